"""Are two renders equal, and where did the time go? The composable node, and the one that runs both arms itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from comfy_api.latest import io, ui

from ..ltx_runtime.errors import LTXError, RequestError, ShapeError
from ..ltx_runtime.parity import DIFFERENT
from ..ltx_runtime.parity_run import ParityOutcome, judge_clips, run_parity
from ..ltx_runtime.pictures import difference_picture, timeline_picture
from ..ltx_runtime.report_text import as_text, json_report
from ..ltx_runtime.sampler import TextFeatures
from ..ltx_runtime.timing import Timeline
from . import host, live
from .audio import AudioVAE, audio_part, read_audio
from .checks import check_socket
from .conditioning import read_conditioning
from .decode import video_part
from .latents import check_generations
from .load import VideoVAE
from .sample import (
    Report,
    SamplingJob,
    arithmetic_inputs,
    cuda_graphs_refused,
    optional_sampling_inputs,
    read_job,
    sampling_inputs,
)


class RendersDiffer(LTXError):
    """on_difference is `fail` and the verdict is `different`."""


def _judging_inputs() -> list[io.Input]:
    return [
        io.Float.Input(
            "tolerance", default=0.0, min=0.0, max=1.0, step=0.0001, round=False, tooltip="0 = every bit must be equal."
        ),
        io.Combo.Input("on_difference", options=["report", "fail"], default="report", tooltip="fail: stop the prompt."),
    ]


def _outputs() -> list[io.Output]:
    return [
        io.String.Output(display_name="report", tooltip="Verdict and timelines as text: for Preview as Text."),
        io.Boolean.Output(display_name="bit_exact", tooltip="True only when every value is equal bit for bit."),
        io.Image.Output(display_name="difference", tooltip="Where and when the clips differ, and by how much."),
        io.Image.Output(display_name="timeline", tooltip="Where the time went, one picture a render."),
    ]


def _finished(
    node: type[io.ComfyNode], judged: ParityOutcome, renders: dict[str, host.RenderReport], on_difference: str
) -> io.NodeOutput:
    """The four outputs and the JSON for /history. Raises RendersDiffer when that is wanted.

    A picture that fails (a full disk, say) is black, and the report says why.
    """
    verdict = judged.verdict
    if verdict.status == DIFFERENT and on_difference == "fail":
        raise RendersDiffer(f"{verdict.words}. on_difference is 'fail'; set it to 'report' to see the pictures.")


    def difference() -> torch.Tensor:
        return difference_picture(
            *judged.clips,
            verdict,
            comparison=judged.frames,
            waveform=judged.waveform,
            seams=judged.seams,
            names=judged.names,
        )

    def timeline() -> torch.Tensor:
        timelines = [
            timeline_picture(r.timeline.events, title=f"{arm}: render {r.timeline.render_id}")
            for arm, r in renders.items()
        ]
        return torch.cat(timelines or [timeline_picture(())])

    notes: list[str] = []
    images: list[dict] = []
    pictures = [
        _picture(node, "difference", difference, images, notes),
        _picture(node, "timeline", timeline, images, notes),
    ]
    report = json_report(verdict, renders, notes=notes)
    text = as_text(report)
    return io.NodeOutput(
        text,
        verdict.bit_exact,
        *map(host.to_intermediate, pictures),
        ui={
            # One JSON text: ComfyUI counts objects in a `ui` entry as files that the job made.
            "ltxgraph_report": [json.dumps(report, allow_nan=False)],
            **live.shown(renders, verdict),
            "text": [text],
            "images": images,
        },
    )


def _picture(
    node: type[io.ComfyNode], name: str, draw: Callable[[], torch.Tensor], images: list[dict], notes: list[str]
) -> torch.Tensor:
    """Draw a picture and write it where the browser finds it. Adds to images, or to notes why it failed."""
    picture = torch.zeros(1, 64, 64, 3)
    try:
        picture = draw()
        images.extend(ui.PreviewImage(picture, cls=node).as_dict()["images"])
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not cost the verdict of renders that took minutes
        host.logger.exception("the %s picture failed", name)
        notes.append(f"the {name} picture failed, the verdict stands: {type(error).__name__}: {error}")
    return picture


class LTXGraphTimingParity(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphTimingParity",
            display_name="LTX Graph Timing Parity",
            category="LTXGraph",
            description="Compares two renders: one verdict on pixels and sound, pictures of difference and timelines.",
            search_aliases=["LTX 2.5", "compare", "benchmark", "difference"],
            is_output_node=True,
            inputs=[
                io.Image.Input("frames_a", tooltip="Decoded frames of the first render, as a rule the eager one."),
                io.Image.Input("frames_b", tooltip="Decoded frames of the second render."),
                *_judging_inputs(),
                io.Audio.Input(
                    "audio_a",
                    optional=True,
                    tooltip="Sound of the first render: judged with the frames. Connect both or none.",
                ),
                io.Audio.Input("audio_b", optional=True, tooltip="Sound of the second render."),
                Report.Input(
                    "report_a", optional=True, tooltip="Report of the first render, for timing and what really ran."
                ),
                Report.Input("report_b", optional=True, tooltip="Report of the second render."),
            ],
            outputs=_outputs(),
        )

    @classmethod
    def execute(
        cls,
        frames_a,
        frames_b,
        tolerance: float,
        on_difference: str,
        audio_a=None,
        audio_b=None,
        report_a=None,
        report_b=None,
    ) -> io.NodeOutput:
        if (audio_a is None) != (audio_b is None):
            raise RequestError(
                "audio_a and audio_b: connect both or none; the sound of one render alone can't be compared."
            )
        frames = {"frames_a": frames_a, "frames_b": frames_b}
        sounds = {"audio_a": audio_a, "audio_b": audio_b}
        judged = judge_clips(
            tuple(_checked_frames(value, name) for name, value in frames.items()),
            None if audio_a is None else tuple(read_audio(value, name) for name, value in sounds.items()),
            tuple(report.graph if report is not None else None for report in (report_a, report_b)),
            tuple(report.settings if report is not None else {} for report in (report_a, report_b)),
            tuple(report.tiles if report is not None else None for report in (report_a, report_b)),
            decode_graphs=tuple(report.decode_graph if report is not None else None for report in (report_a, report_b)),
            tolerance=tolerance,
        )
        renders = {name: report for name, report in zip(judged.names, (report_a, report_b)) if report is not None}
        return _finished(cls, judged, renders, on_difference)


def _checked_frames(frames: Any, name: str) -> torch.Tensor:
    """The frames of input `name`. Raises RequestError and ShapeError for what is no IMAGE."""
    source = "the frames of LTX Graph Video Decode or their like"
    check_socket(frames, torch.Tensor, name, source)
    if frames.ndim != 4 or frames.shape[3] not in (1, 3, 4):
        raise ShapeError(
            f"{name}: frames of shape {tuple(frames.shape)}, expected (frames, height, width, channels) with 1, 3 or 4 "
            f"channels. Connect {source}."
        )
    if not frames.is_floating_point():
        raise RequestError(f"{name}: these frames are {frames.dtype}, expected float in [0, 1]. Connect {source}.")
    return frames


class LTXGraphParityRun(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphParityRun",
            display_name="LTX Graph Parity Run",
            category="LTXGraph",
            description="Renders a prompt eager and with CUDA graphs, several seeds and replays; compares every bit.",
            search_aliases=["LTX 2.5", "compare", "benchmark", "CUDA graph", "bit exact"],
            is_output_node=True,
            inputs=[
                *sampling_inputs(),
                VideoVAE.Input(
                    "video_vae", tooltip="From LTX Graph Video VAE Loader. One decode plan serves all renders."
                ),
                io.Int.Input("replays", default=3, min=1, max=100, tooltip="Graphed renders of each seed."),
                io.Int.Input("seeds", default=2, min=1, max=100, tooltip="Seeds, counted up from `seed`."),
                *_judging_inputs(),
                *arithmetic_inputs(),
                *optional_sampling_inputs(),
                AudioVAE.Input(
                    "audio_vae",
                    optional=True,
                    tooltip="From LTX Graph Audio VAE Loader: the sound is decoded and judged too. Without it only the "
                    "sound's latent is.",
                ),
                io.Conditioning.Input(
                    "positive_b",
                    optional=True,
                    tooltip="A second prompt for every other seed: one that stuck in a recording would show.",
                ),
                io.Boolean.Input(
                    "measure_residency",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Afterwards run each arm once more under the profiler and report copies, waits and GPU "
                    "time. Off, because every launch after that is slower until ComfyUI is restarted (eager steps of "
                    "small clips by up to a half): later times mean less. Costs two renders and a decode, and some "
                    "seconds the first time.",
                ),
            ],
            outputs=_outputs(),
        )

    @classmethod
    def fingerprint_inputs(cls, **_) -> int:
        # It measures: the same prompt again is a second measurement. The clock, not NaN: this goes into JSON.
        return time.time_ns()

    @classmethod
    def execute(
        cls,
        model: host.DeviceModel,
        video_vae: host.DeviceModel,
        replays: int,
        seeds: int,
        tolerance: float,
        on_difference: str,
        audio_vae: host.DeviceModel | None = None,
        positive_b=None,
        measure_residency: bool = False,
        **inputs,
    ) -> io.NodeOutput:
        job = read_job(model, **inputs)
        other_text = None if positive_b is None else _second_prompt(positive_b, job)
        models = [model, video_vae]
        refused = cuda_graphs_refused()
        shape = video_part(inputs["latent_image"], "latent_image").shape
        decoding_bytes = video_vae.model.exact_bytes(shape, recorded=not refused)
        activation_bytes = job.activation_bytes(recorded=True) + decoding_bytes
        if audio_vae is not None:
            models.append(audio_vae)
            activation_bytes += audio_vae.model.decode_bytes(audio_part(inputs["latent_image"], "latent_image").shape)
        check_generations(*models)
        logs: dict[str, Timeline] = {}
        feeds: list[live.Feed] = []

        def timeline_of(arm: str) -> Timeline:
            feed = host.new_feed(arm)
            feeds.append(feed)
            logs[arm] = host.new_timeline(models, f"-{arm.replace(' ', '-')}", on_event=feed.wake)
            feed.timeline = logs[arm]
            return logs[arm]

        def load(timeline: Timeline) -> None:
            host.make_resident(models, timeline, activation_bytes)

        try:
            outcome = run_parity(
                model.model,
                video_vae.model,
                job.request,
                load=load,
                replays=replays,
                seeds=seeds,
                tolerance=tolerance,
                timelines=timeline_of,
                audio_vae=None if audio_vae is None else audio_vae.model,
                other_text=other_text,
                without_graphs=refused,
                measure_residency=measure_residency,
                check_cancelled=host.cancel_check(),
                on_progress=host.step_progress(),
            )
        finally:
            for timeline in logs.values():
                host.write_trace(timeline)
            for feed in feeds:
                feed.close()
        settings = job.settings | {"video_vae": video_vae.name, "replays": replays, "seeds": seeds}
        if audio_vae is not None:
            settings["audio_vae"] = audio_vae.name
        renders = {
            arm: host.RenderReport(
                timeline,
                settings,
                (*job.notes, *outcome.decodes.get(arm, ())),
                outcome.graphs.get(arm),
                outcome.activities.get(arm),
            )
            for arm, timeline in logs.items()
        }
        return _finished(cls, outcome, renders, on_difference)


def _second_prompt(positive_b: Any, job: SamplingJob) -> TextFeatures:
    """Raises RequestError when it asks for another frame rate: the latent has one."""
    prompt = read_conditioning(positive_b, "positive_b", job.model.model.config)
    if prompt.frame_rate != job.settings["frame_rate"]:
        raise RequestError(
            f"positive_b: its frame_rate is {prompt.frame_rate:g}, that of positive {job.settings['frame_rate']:g}. "
            f"Give both the same (LTXVConditioning sets it)."
        )
    return prompt.text
