"""LTX Graph Duration: how long a clip the prompt asks for."""
from __future__ import annotations

from comfy_api.latest import io

from ..ltx_runtime import published
from ..ltx_runtime.checkpoint import read_header
from ..ltx_runtime.duration import (
    DEFAULT_MAX_SECONDS,
    DEFAULT_MIN_SECONDS,
    DurationHead,
    check_limits,
    duration_frames,
    predict_seconds,
)
from . import host, live
from .checks import check_socket
from .conditioning import read_conditioning
from .load import Model, ModelFiles
from .sample import report_input, report_output

_FILES = ModelFiles(("model_patches",), published.DURATION_HEAD_FILE, ("duration_head",))


class LTXGraphDuration(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphDuration",
            display_name="LTX Graph Duration",
            category="LTXGraph",
            description="Asks LTX-2.5's duration head how long the prompt's clip should be. Use frames as the length "
            "of the empty latent.",
            search_aliases=["LTX 2.5", "LTXVDurationPredictor", "length", "num_frames"],
            inputs=[
                Model.Input("model", tooltip="From LTX Graph Model Loader. Its text connectors feed the head."),
                io.Conditioning.Input("positive", tooltip="The encoded prompt of the clip."),
                io.Combo.Input(
                    "duration_head",
                    options=_FILES.names(),
                    tooltip="A duration head from models/model_patches.",
                ),
                io.Float.Input(
                    "frame_rate", default=24.0, min=1.0, max=1000.0, step=0.01, tooltip="Turns seconds into frames."
                ),
                _limit("min_seconds", DEFAULT_MIN_SECONDS),
                _limit("max_seconds", DEFAULT_MAX_SECONDS),
                report_input(),
            ],
            outputs=[
                io.Float.Output(display_name="seconds", tooltip="As predicted, without limits."),
                io.Int.Output(display_name="frames", tooltip="Within the limits, on the 8k+1 grid."),
                report_output(),
            ],
        )

    @classmethod
    def validate_inputs(cls, duration_head: str | None = None) -> bool | str:
        return _FILES.verdict(duration_head)

    @classmethod
    def fingerprint_inputs(cls, duration_head: str | None = None, **_inputs):
        return _FILES.state(duration_head)

    @classmethod
    def execute(
        cls,
        model: host.DeviceModel,
        positive,
        duration_head: str,
        frame_rate: float,
        min_seconds: float,
        max_seconds: float,
        report=None,
    ) -> io.NodeOutput:
        check_socket(model, host.DeviceModel, "model", "LTX Graph Model Loader")
        check_limits(frame_rate, min_seconds=min_seconds, max_seconds=max_seconds)
        path = _FILES.checked(duration_head)
        # 8 MB, read in milliseconds: not worth a place in ComfyUI's memory management.
        head = DurationHead(read_header(path), device=model.model.device)
        prompt = read_conditioning(positive, "positive", model.model.config)
        with host.stay(report, "LTXGraphDuration", [model]) as timeline:
            host.make_resident([model], timeline, head.weights_bytes)
            seconds = predict_seconds(model.model, head, prompt.text, timeline=timeline)
            frames = duration_frames(seconds, frame_rate, min_seconds=min_seconds, max_seconds=max_seconds)
            words = f"the prompt asks for {seconds:.2f} s: {frames} frames at {frame_rate:g} frames a second"
            timeline.note("prepare.connectors", words)
        settings = {"duration_head": path.name, "predicted_seconds": seconds, "predicted_frames": frames}
        report = host.extend(report, timeline, settings=settings, notes=[words])
        return io.NodeOutput(seconds, frames, report, ui=live.shown({"": report}))


def _limit(name: str, default: float) -> io.Input:
    return io.Float.Input(
        name, default=default, min=0.1, max=120.0, step=0.1, tooltip="A limit of the frames, in seconds."
    )
