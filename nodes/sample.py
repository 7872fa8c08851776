"""LTX Graph Sampler: sockets to a request, a request's result to sockets."""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from comfy_api.latest import io

from ..ltx_runtime.comfyui_conditioning import audio_state_from_comfyui, video_state_from_comfyui
from ..ltx_runtime.errors import RequestError
from ..ltx_runtime.guidance import Guidance
from ..ltx_runtime.memory import activation_item_bytes, sampling_bytes
from ..ltx_runtime.noise import NOISE_CONVENTIONS
from ..ltx_runtime.request import check_request
from ..ltx_runtime.sampler import SampleRequest, SampleResult, sample
from ..ltx_runtime.schedules import SAMPLERS, SCHEDULES, check_sigmas, resolve_sampler, resolve_schedule
from ..ltx_runtime.shapes import AUDIO_LATENTS_PER_SECOND, audio_latent_frames
from ..ltx_runtime.step_runner import CUDA_GRAPH_MODES, ON_CAPTURE_FAILURE, check_graphs_allowed
from ..ltx_runtime.transformer.model import COMPATIBILITIES
from . import host, live
from .checks import check_socket
from .conditioning import check_same_guides, read_conditioning
from .guidance import GuidanceSocket
from .latents import LatentParts, check_generations, made_by, noise_masks, read_latent
from .load import Model

Report = io.Custom("LTXGRAPH_REPORT")

# Core sampler function -> our sampler. On a flow model core's ancestral Euler calls its RF form itself.
_CORE_SAMPLERS = {
    "sample_euler": "euler",
    "sample_euler_ancestral": "euler_ancestral",
    "sample_euler_ancestral_RF": "euler_ancestral",
}


def sampling_inputs() -> list[io.Input]:
    """The inputs that the sampler and the parity run share, in the order both show them."""
    return [
        Model.Input("model", tooltip="From LTX Graph Model Loader."),
        io.Conditioning.Input("positive", tooltip="The encoded prompt, of an LTX text encoder or a saved file."),
        io.Latent.Input("latent_image", tooltip="Plain video, plain audio, or video with audio."),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=True,
            tooltip="Of the start noise and of the noise that steps add: the same seed gives the same clip.",
        ),
        io.Combo.Input(
            "schedule",
            options=list(SCHEDULES),
            default="auto",
            tooltip="auto reads the file name: distilled or dev. template stage 2: from 0.85, as ComfyUI's templates. "
            "dev HQ: shifted for the latent's size. Connected sigmas win.",
        ),
        io.Int.Input(
            "steps", default=30, min=1, max=1000, tooltip="For the dev schedules; the distilled ones have their own."
        ),
        io.Combo.Input(
            "sampler_name",
            options=list(SAMPLERS),
            default="auto",
            tooltip="auto: ancestral Euler for the first stage of the distilled 2.5 model, else Euler. A connected "
            "sampler wins.",
        ),
    ]


def arithmetic_inputs() -> list[io.Input]:
    """The two settings that decide which render is reproduced."""
    return [
        io.Combo.Input(
            "noise_convention",
            options=list(NOISE_CONVENTIONS),
            default="comfyui",
            advanced=True,
            tooltip="comfyui: the noise of ComfyUI's own samplers for this seed. reference: that of Lightricks' "
            "pipelines.",
        ),
        io.Combo.Input(
            "compatibility",
            options=list(COMPATIBILITIES),
            default="reference",
            advanced=True,
            tooltip="reference: Lightricks' model. comfyui: ComfyUI's deviations from it, to reproduce a native "
            "render.",
        ),
    ]


def optional_sampling_inputs() -> list[io.Input]:
    return [
        io.Conditioning.Input("negative", optional=True, tooltip="Read by CFG, see guidance; else the report says so."),
        io.Noise.Input("noise", optional=True, tooltip="Wins over seed."),
        io.Sigmas.Input("sigmas", optional=True, tooltip="Wins over schedule and steps."),
        io.Sampler.Input(
            "sampler",
            optional=True,
            tooltip="Euler or ancestral Euler with its eta and s_noise. Wins over sampler_name.",
        ),
        GuidanceSocket.Input("guidance", optional=True, tooltip="From LTX Graph Guidance. None: one pass a step."),
    ]


def capture_failure_input() -> io.Input:
    return io.Combo.Input(
        "on_capture_failure",
        options=list(ON_CAPTURE_FAILURE),
        default="eager",
        tooltip="eager: go on without a graph and report the reason. error: stop.",
    )


def report_input() -> io.Input:
    return Report.Input(
        "report", optional=True, tooltip="From an earlier node of the same render; none starts a new log."
    )


def report_output() -> io.Output:
    return Report.Output(
        display_name="report",
        tooltip="Log and timing of the render up to here: for its next node, and for LTX Graph Timing Parity.",
    )


class LTXGraphSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphSampler",
            display_name="LTX Graph Sampler",
            category="LTXGraph",
            description="Denoises an LTX latent on the device, eager or by replaying a recorded CUDA graph.",
            search_aliases=["LTX 2.5", "KSampler", "CUDA graph", "SamplerCustomAdvanced"],
            inputs=[
                *sampling_inputs(),
                io.Combo.Input(
                    "cuda_graph",
                    options=list(CUDA_GRAPH_MODES),
                    default="auto",
                    tooltip="auto: record the step when that pays for this shape, and say why. Without CUDA a step "
                    "runs eager.",
                ),
                capture_failure_input(),
                *arithmetic_inputs(),
                *optional_sampling_inputs(),
                report_input(),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="Denoised, of the same kind as latent_image."),
                report_output(),
            ],
        )

    @classmethod
    def execute(
        cls, model: host.DeviceModel, cuda_graph: str, on_capture_failure: str, report=None, **inputs
    ) -> io.NodeOutput:
        job = read_job(model, **inputs)
        refused = cuda_graphs_refused()
        check_graphs_allowed(
            model.model.device, cuda_graph=cuda_graph, on_capture_failure=on_capture_failure, refused=refused
        )
        with host.stay(report, "LTXGraphSampler", [model]) as timeline:
            for note in job.notes:
                timeline.note("prepare.constants", note)
            recorded = cuda_graph != "off" and not refused
            host.make_resident([model], timeline, job.activation_bytes(recorded=recorded))
            result = sample(
                model.model,
                job.request,
                cuda_graph=cuda_graph,
                on_capture_failure=on_capture_failure,
                graphs_refused=refused,
                timeline=timeline,
                check_cancelled=host.cancel_check(),
                on_step=host.step_progress(),
                on_preview=host.step_preview(timeline, model.model.device),
            )
            with timeline.phase("transfer.to_host"):
                parts = [None if part is None else host.to_intermediate(part) for part in sampled_parts(result)]
        latent = made_by(job.latent.replaced(*parts), model)
        notes = (*job.notes, *result.notes)
        report = host.extend(report, timeline, settings=job.settings, notes=notes, graph=result.graph)
        return io.NodeOutput(latent, report, ui=live.shown({"": report}))


def sampled_parts(result: SampleResult) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Video and sound as the LATENT has them: guides stay behind the video, for LTXVCropGuides to cut off."""
    if result.appended is None:
        return result.video, result.audio
    return torch.cat((result.video, result.appended), dim=2), result.audio


def cuda_graphs_refused() -> str:
    """Why the host forbids CUDA graphs, or empty."""
    return "ComfyUI was started with --disable-cuda-graphs" if host.cuda_graphs_disabled() else ""


@dataclass(frozen=True)
class SamplingJob:
    """The sampler's sockets in plain values. request: what the runtime runs. settings, notes: for the report."""

    model: host.DeviceModel
    latent: LatentParts
    request: SampleRequest
    settings: dict[str, Any]
    notes: tuple[str, ...]

    def activation_bytes(self, *, recorded: bool) -> int:
        model = self.model.model
        item_bytes = activation_item_bytes(model.header)
        return sampling_bytes(model.config, self.request, item_bytes=item_bytes, recorded=recorded)


def read_job(
    model: host.DeviceModel,
    *,
    positive,
    latent_image,
    seed: int,
    schedule: str,
    steps: int,
    sampler_name: str,
    noise_convention: str,
    compatibility: str,
    negative=None,
    guidance=None,
    noise=None,
    sigmas=None,
    sampler=None,
) -> SamplingJob:
    """Translate sockets. Raises RequestError or ShapeError, naming the input, before any weight is read."""
    check_socket(model, host.DeviceModel, "model", "LTX Graph Model Loader")
    config = model.model.config
    latent = read_latent(latent_image, "latent_image")
    check_generations(model, latent=latent)
    prompt = read_conditioning(positive, "positive", config)
    if guidance is not None:
        check_socket(guidance, Guidance, "guidance", "LTX Graph Guidance")
    notes = [*model.notes, *prompt.notes]
    other = None
    if negative is not None and guidance is not None and guidance.uses_negative:
        other = read_conditioning(negative, "negative", config)
        check_same_guides(prompt, other)
    elif negative is not None:
        notes.append("negative is not used: without CFG no pass reads it")

    if sigmas is None:
        tokens = None if latent.video is None else latent.video_shape.tokens
        sigmas, words = resolve_schedule(schedule, steps, model.name, video_tokens=tokens)
    else:
        sigmas = check_sigmas(check_socket(sigmas, torch.Tensor, "sigmas", "a node with SIGMAS"))
        words = f"{len(sigmas) - 1} steps from the connected sigmas"
    notes.append(words)
    options: dict[str, float] = {}
    if sampler is None:
        sampler_name, words = resolve_sampler(sampler_name, sigmas, model.name, config.model_version)
    else:
        sampler_name, options = read_sampler(sampler)
        words = f"{sampler_name} from the connected sampler"
    notes.append(words)

    start_noise = None
    if noise is not None:
        seed = getattr(noise, "seed", seed)
        start_noise = _read_noise(noise.generate_noise(latent_image), latent)
    elif noise_convention == "comfyui" and latent.source.get("batch_index") is not None:
        start_noise = _read_noise(
            host.indexed_noise(latent.source["samples"], seed, latent.source["batch_index"]), latent
        )

    masks = noise_masks(latent) if latent.source.get("noise_mask") is not None else {}
    video = audio = None
    if latent.video is not None:
        video = video_state_from_comfyui(
            latent.video.float(), prompt.frame_rate, noise_mask=masks.get("video"), **prompt.guides
        )
    elif prompt.guides:
        raise RequestError("positive: it names guides of a video, and latent_image holds sound only.")
    if latent.audio is not None:
        audio = audio_state_from_comfyui(latent.audio.float(), masks.get("audio"), prompt.voice)
        if video is not None:
            notes += _length_notes(video.shape.num_frames, prompt.frame_rate, latent.audio_shape.frames)
    elif prompt.voice is not None:
        raise RequestError("positive: it holds a reference voice (ref_audio), and latent_image holds no sound.")
    request = SampleRequest(
        video=video,
        audio=audio,
        text=prompt.text,
        negative=None if other is None else other.text,
        guidance=guidance,
        sigmas=sigmas,
        seed=seed,
        sampler=sampler_name,
        noise_convention=noise_convention,
        noise=start_noise,
        compatibility=compatibility,
        **options,
    )
    check_request(request, config)
    settings = {
        "model": model.name,
        "loras": [{"file": spec.name, "strength": spec.strength} for spec in model.loras],
        "seed": seed,
        "sampler": sampler_name,
        **options,
        "sigmas": sigmas.tolist(),
        "frame_rate": prompt.frame_rate,
        "video_latent": None if latent.video is None else list(latent.video.shape),
        "audio_latent": None if latent.audio is None else list(latent.audio.shape),
        "noise": "connected" if noise is not None else noise_convention,
        "compatibility": compatibility,
        "guidance": None if guidance is None else dataclasses.asdict(guidance),
    }
    return SamplingJob(model, latent, request, settings, tuple(notes))


def _length_notes(num_frames: int, frame_rate: float, audio_frames: int) -> list[str]:
    """What to say when picture and sound end at different times."""
    if abs(audio_latent_frames(num_frames, frame_rate) - audio_frames) <= 1:
        return []
    note = (
        f"the sound lasts {audio_frames / AUDIO_LATENTS_PER_SECOND:.2f} s, the video {num_frames / frame_rate:.2f} s "
        f"at {frame_rate:g} frames a second; give the sound's latent and LTXVConditioning one frame rate"
    )
    return [note]


def read_sampler(sampler: Any) -> tuple[str, dict[str, float]]:
    """Our sampler and its options for a SAMPLER. Raises RequestError, by name, for one that isn't ours."""
    function = getattr(getattr(sampler, "sampler_function", None), "__name__", type(sampler).__name__)
    name = _CORE_SAMPLERS.get(function)
    if name is None:
        raise RequestError(
            f"sampler: {function.removeprefix('sample_')} is not one of LTX Graph Sampler's. "
            f"Select euler or euler_ancestral, or use the native sampler."
        )
    options = dict(getattr(sampler, "extra_options", None) or {})
    known = {key: float(options.pop(key)) for key in ("eta", "s_noise") if key in options}
    if name == "euler":
        # Core's Euler draws noise only when it churns; eta and s_noise do nothing there.
        known = {}
        if not options.get("s_churn"):
            for key in ("s_churn", "s_tmin", "s_tmax"):
                options.pop(key, None)
    if options:
        raise RequestError(
            f"sampler: {name} with {', '.join(f'{k}={v}' for k, v in sorted(options.items()))} is not supported. "
            f"LTX Graph Sampler knows eta and s_noise of ancestral Euler."
        )
    return name, known


def _read_noise(noise: Any, latent: LatentParts) -> tuple[Any, Any]:
    """The two parts of a NOISE's tensor. Raises RequestError when it doesn't fit the latent."""
    parts = tuple(noise.unbind()) if getattr(noise, "is_nested", False) else (noise,)
    for part in parts:
        check_socket(part, torch.Tensor, "noise", "RandomNoise or its like")
    wanted = tuple(part for part in (latent.video, latent.audio) if part is not None)
    if len(parts) != len(wanted) or any(n.shape != w.shape for n, w in zip(parts, wanted)):
        raise RequestError(
            f"noise: it was made for {_shapes(parts)}, latent_image is {_shapes(wanted)}. "
            f"Use RandomNoise, or a noise with both a video and an audio part."
        )
    return (None, parts[0]) if latent.video is None else (parts[0], parts[1] if len(parts) == 2 else None)


def _shapes(parts: tuple) -> str:
    return " and ".join(str(tuple(part.shape)) for part in parts)
