"""Does a render live on the GPU? Copies, waits and busy time of one step and of a whole denoising loop, from CUPTI.

A measurement of its own, never part of a timed render: CUPTI slows the host while it records and every launch of the
process afterwards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from .gpu_activity import GpuActivity, measure_gpu_busy
from .sampler import SampleRequest, denoise, prepare
from .step_runner import StepRunner
from .steps import denoise_step
from .timing import Timeline

# The finite flags: one float32 a stream and step, read through pinned memory one step behind.
_EDGE_BYTES_PER_STEP = 8


@dataclass(frozen=True)
class LoopActivity:
    """resident: None when it could not be measured. words: one plain sentence, begins with "resident: ".
    step: activity between the kernels of one step, run eager (a recording holds the same kernels). loop: of the whole
    loop, its edges included. decode: of one decode, when the caller measured one too. All as `plain_activity`.
    steps: of the loop. took_ms: what the measurement cost.
    """

    resident: bool | None
    words: str
    step: dict[str, Any] | None = None
    loop: dict[str, Any] | None = None
    decode: dict[str, Any] | None = None
    steps: int = 0
    took_ms: float = 0.0


def measure_loop_activity(model, request: SampleRequest, *, cuda_graph: str) -> LoopActivity:
    """Run the request's loop once under the profiler. cuda_graph: "off", or "on" for a key that was captured before.

    The weights must be resident. Raises what `sample` raises.
    """
    if model.device.type != "cuda":
        return LoopActivity(None, f"resident: not measured, the model is on {model.device.type}")
    started = time.perf_counter()
    with torch.inference_mode():
        prepared = prepare(model, request, Timeline(None, device=model.device))
        total = len(prepared.coefficients)

        def loop() -> None:
            with StepRunner(
                model,
                prepared.constants,
                total,
                Timeline(None, device=model.device),  # of the device: the runner waits by its events
                cuda_graph=cuda_graph,
                on_capture_failure="error",
                on_finished=lambda index: None,
            ) as runner:
                denoise(prepared, request, runner, lambda: None, None)

        whole = measure_gpu_busy(loop, device=model.device)
        if whole.reason is not None:
            return LoopActivity(None, f"resident: not measured, {whole.reason}")
        inputs = prepared.inputs(0, prepared.start)
        step = measure_gpu_busy(lambda: denoise_step(model.module, prepared.constants[0], inputs), device=model.device)
        if step.reason is not None:
            return LoopActivity(None, f"resident: not measured, {step.reason}")
    return judge_activity(plain_activity(step), plain_activity(whole), total, (time.perf_counter() - started) * 1e3)


def plain_activity(activity: GpuActivity) -> dict[str, Any]:
    """`GpuActivity.attrs`, with host_to_device_bytes and device_to_host_bytes added up over all copies (None as soon as
    one copy's size is hidden, as by torch before 2.9), and waits: how often the host waited for the device (None where
    the profiler did not show it)."""
    moved: dict[str, int | None] = {"HtoD": 0, "DtoH": 0}
    for copy in activity.memcpys:
        if copy.kind in moved:
            total = moved[copy.kind]
            moved[copy.kind] = None if total is None or copy.bytes is None else total + copy.bytes
    waits = None if activity.host_waits is None else sum(count for _, count in activity.host_waits)
    return activity.attrs() | {
        "host_to_device_bytes": moved["HtoD"],
        "device_to_host_bytes": moved["DtoH"],
        "waits": waits,
    }


def judge_activity(step: dict[str, Any], loop: dict[str, Any], total: int, took_ms: float) -> LoopActivity:
    """Resident or not. step, loop: `plain_activity` of one step and of the whole loop of `total` steps.

    Resident means: no byte and no wait between the kernels of a step, nothing to the device in the whole loop, and to
    the host only the finite flags at its edge. What nobody saw makes it "not known", unless the rest says no already.
    """
    limits = [
        (step["host_to_device_bytes"], 0),
        (step["device_to_host_bytes"], 0),
        (step["waits"], 0),
        (loop["host_to_device_bytes"], 0),
        (loop["device_to_host_bytes"], _EDGE_BYTES_PER_STEP * total),
    ]
    resident = None if any(seen is None for seen, _ in limits) else True
    if any(seen is not None and seen > limit for seen, limit in limits):
        resident = False
    answer = {True: "yes", False: "no", None: "not known"}[resident]
    words = (
        f"resident: {answer}: between the kernels of a step {_moved_words(step)}; "
        f"in the whole loop of {total} steps, its edges included, {_moved_words(loop)}"
    )
    return LoopActivity(resident, words, step, loop, steps=total, took_ms=took_ms)


def _moved_words(activity: dict[str, Any]) -> str:
    def known(count: int | None) -> str:
        return "an unknown number of" if count is None else str(count)

    return (
        f"{known(activity['host_to_device_bytes'])} bytes to the device, "
        f"{known(activity['device_to_host_bytes'])} bytes to the host, "
        f"{known(activity['waits'])} waits"
    )
