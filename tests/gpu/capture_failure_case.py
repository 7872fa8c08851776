"""One injected capture failure in a process of its own: python3 capture_failure_case.py KIND [aimdo].

KIND: python, sync, memory, device_sync. Prints one JSON line: what three graphed renders did, and whether each equals
eager. Kinds python, sync and memory leave a valid capture behind (class A); device_sync invalidates it (class B).
"""
import faulthandler
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]


def main(kind: str, aimdo: bool) -> None:
    faulthandler.dump_traceback_later(50, exit=True)  # a hang says where
    if aimdo:
        # As ComfyUI's main.py does, before torch touches the device.
        import comfy_aimdo.control

        comfy_aimdo.control.init(nvml_pressure=True)
    import torch

    if aimdo:
        torch.cuda.init()
        comfy_aimdo.control.init_devices([(0, 0)])
        comfy_aimdo.control.set_log_info()
    from rendering import tiny_request, tiny_transformer, tiny_video_vae

    from ltx_runtime import cuda_graph, step_runner, steps
    from ltx_runtime.sampler import sample

    model, vae = tiny_transformer("cuda"), tiny_video_vae("cuda")
    eager = [vae.decode(sample(model, tiny_request(seed=s), cuda_graph="off").video) for s in (1, 2, 3)]
    failures = {"left": 1}

    def failing(module, constants, inputs):
        outputs = steps.denoise_step(module, constants, inputs)
        if torch.cuda.is_current_stream_capturing() and failures["left"]:
            failures["left"] -= 1
            if kind == "python":
                raise ValueError("injected")
            if kind == "sync":
                outputs.probe.sum().item()
            if kind == "memory":
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            if kind == "device_sync":
                torch.cuda.synchronize()
        return outputs

    step_runner.denoise_step = failing
    renders = []
    for index, seed in enumerate((1, 2, 3)):
        result = sample(model, tiny_request(seed=seed), cuda_graph="on")
        frames = vae.decode(result.video)
        renders.append({"equal": bool(torch.equal(frames, eager[index])), "mode": result.graph["mode"],
                        "decision": result.graph["decision"], "fallback": result.graph.get("fallback")})
    healthy = bool(torch.randn(16, device="cuda").isfinite().all())
    free = torch.cuda.mem_get_info()[0]
    print(json.dumps({"kind": kind, "aimdo": aimdo, "allocator": cuda_graph.allocator_backend(), "renders": renders,
                      "healthy": healthy, "free": free}), flush=True)
    if aimdo:
        # Its allocation hooks call back into Python, also while the interpreter shuts down: skip that.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], "aimdo" in sys.argv[2:])
