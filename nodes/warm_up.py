"""LTX Graph Warm Up: record the step of a render before it is asked for."""

from __future__ import annotations

from comfy_api.latest import io

from ..ltx_runtime.cuda_graph import unavailable_reason
from ..ltx_runtime.errors import CaptureError
from ..ltx_runtime.warm_up import recorded_words, warm_up
from . import host, live
from .load import Model
from .sample import (
    arithmetic_inputs,
    capture_failure_input,
    cuda_graphs_refused,
    optional_sampling_inputs,
    read_job,
    report_input,
    report_output,
    sampling_inputs,
)

# A recording serves every seed and every start noise.
_WITHOUT_EFFECT = ("seed", "noise")


class LTXGraphWarmUp(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphWarmUp",
            display_name="LTX Graph Warm Up",
            category="LTXGraph",
            description="Records the CUDA graph of a render's step ahead of time: the render itself never records.",
            search_aliases=["LTX 2.5", "CUDA graph", "capture", "first run"],
            is_output_node=True,
            inputs=[
                *(given for given in sampling_inputs() if given.id not in _WITHOUT_EFFECT),
                capture_failure_input(),
                *arithmetic_inputs(),
                *(given for given in optional_sampling_inputs() if given.id not in _WITHOUT_EFFECT),
                report_input(),
            ],
            outputs=[
                Model.Output(display_name="model", tooltip="The same model, for LTX Graph Sampler."),
                report_output(),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **_) -> int:
        # No socket has a value yet when ComfyUI asks: after a loss of any transformer's recordings it runs again, and
        # finds its own in no time if they are still there.
        return host.recordings_lost()

    @classmethod
    def execute(cls, model: host.DeviceModel, on_capture_failure: str, report=None, **inputs) -> io.NodeOutput:
        job = read_job(model, seed=0, **inputs)
        reason = cuda_graphs_refused() or unavailable_reason(model.model.device)
        if reason and on_capture_failure == "error":
            raise CaptureError(
                f"nothing recorded: {reason}. Set on_capture_failure to eager to go on without a recording."
            )
        with host.stay(report, "LTXGraphWarmUp", [model]) as timeline:
            graph = None
            if reason:
                words = f"nothing recorded: {reason}"
            else:
                host.make_resident([model], timeline, job.activation_bytes(recorded=True))
                graph = warm_up(model.model, job.request, timeline=timeline, on_capture_failure=on_capture_failure)
                words = recorded_words(graph)
            timeline.note("sample.warmup", words)
        report = host.extend(report, timeline, settings=job.settings, notes=(f"warm-up: {words}",), graph=graph)
        return io.NodeOutput(model, report, ui={**live.shown({"": report}), "text": [words]})
