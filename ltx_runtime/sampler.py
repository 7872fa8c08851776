"""From a request to final latents: validate, prepare what is constant, denoise.

Reading order: `SampleRequest`, `sample`, `denoise`. One step is in steps.py, eager or replayed execution in step_runner.py.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .conditioning import TokenState
from .errors import RequestError, ShapeError
from .noise import NOISE_CONVENTIONS, ComfyNoise, Pair, ReferenceNoise
from .patchify import unpatchify_audio, unpatchify_video
from .runtime import TransformerModel
from .schedules import check_sigmas
from .step_runner import CUDA_GRAPH_MODES, ON_CAPTURE_FAILURE, StepRunner
from .steps import Blend, StepConstants, StepInputs, StreamInputs, step_coefficients
from .timing import Timeline
from .transformer.inputs import StepModulation
from .transformer.model import COMPATIBILITIES


@dataclass(frozen=True)
class TextFeatures:
    """features: (B, n, video width + audio width) float. processed False: raw projections of the valid tokens, the connectors
    still have to run; True: connector output, used as it is. Source: transformer.md section 7."""

    features: Tensor
    processed: bool


@dataclass(frozen=True)
class SampleRequest:
    """One denoising run. At least one of video and audio; every tensor may be on any device.

    sigmas: (n+1,) float32, decreasing, n steps. sampler: "euler" or "euler_ancestral" (eta and s_noise belong to the second).
    noise_convention: "comfyui" (noise and float32 latents bit-equal to a ComfyUI sampler) or "reference" (latents in the
    model's dtype, generators on the device). noise: start noise in latent layout instead of the drawn one, comfyui only.
    compatibility: "reference", or "comfyui" for its deviations from the reference (transformer.md section 18.1-3).
    """

    video: TokenState | None
    audio: TokenState | None
    text: TextFeatures
    sigmas: Tensor
    seed: int
    sampler: str = "euler"
    eta: float = 1.0
    s_noise: float = 1.0
    noise_convention: str = "comfyui"
    noise: Pair | None = None
    compatibility: str = "reference"


@dataclass
class SampleResult:
    """video: (B, 128, F, H, W), audio: (B, 8, T, 16), float32 on the model's device, None for an absent stream.
    graph: what the graph policy decided and did, with its numbers."""

    video: Tensor | None
    audio: Tensor | None
    graph: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """All that the loop reads, on the device. start: noisy tokens of both streams; the lists have one entry a step."""

    constants: StepConstants
    start: Pair
    noise: list[Pair]
    modulation: list[StepModulation]
    coefficients: list[Tensor]

    def inputs(self, index: int, x: Pair) -> StepInputs:
        """Inputs of step `index` for the tokens (video, audio) that the step before left."""
        video, audio = (None if tokens is None else StreamInputs(tokens, n) for tokens, n in zip(x, self.noise[index]))
        return StepInputs(video, audio, self.modulation[index], self.coefficients[index])


def sample(
    model: TransformerModel,
    request: SampleRequest,
    *,
    cuda_graph: str = "auto",
    on_capture_failure: str = "eager",
    noise_source: ReferenceNoise | None = None,
    timeline: Timeline | None = None,
    check_cancelled: Callable[[], None] | None = None,
    on_step: Callable[[int, int], None] | None = None,
    on_preview: Callable[[int, int, Tensor], None] | None = None,
) -> SampleResult:
    """Denoise a request.

    cuda_graph: "auto", "on", "off". on_capture_failure: "eager" (go on, the reason in the result) or "error" (raise).
    noise_source: continue a reference render's generators (second stage) instead of seeding new ones.
    check_cancelled: called before every step; whatever it raises ends the render and leaves the model usable.
    on_step(done, total): after the host saw a step end. on_preview(index, total, denoised): right after a step was issued,
    with its x0 as (B, C, F, H, W) on the device (video, else audio); copying it to the host waits for that step.
    Raises RequestError or ShapeError before any work, CaptureError, NonFiniteError naming the phase.
    """
    _check_choices(request, cuda_graph, on_capture_failure)
    timeline = timeline or Timeline(None, device=model.device)
    sigmas = check_sigmas(request.sigmas)
    _check_streams(model, request)
    model.ensure_resident(timeline)
    with torch.inference_mode():
        prepared = prepare(model, request, timeline, noise_source)
        total = len(sigmas) - 1
        with StepRunner(
            model,
            prepared.constants,
            total,
            timeline,
            cuda_graph=cuda_graph,
            on_capture_failure=on_capture_failure,
            on_finished=lambda index: on_step(index + 1, total) if on_step else None,
        ) as runner:
            video, audio = denoise(prepared, request, runner, check_cancelled or (lambda: None), on_preview)
        scale = 1.0
        if request.noise_convention == "comfyui" and sigmas[-1] > 0:
            scale = 1 - sigmas[-1].item()  # ComfyUI divides the noisy end state of an unfinished schedule
        return SampleResult(
            None if video is None else _to_latent(request.video, video) / scale,
            None if audio is None else _to_latent(request.audio, audio) / scale,
            runner.account,
        )


def denoise(prepared: Prepared, request: SampleRequest, runner: StepRunner, check_cancelled, on_preview) -> Pair:
    """The denoising loop: final tokens of both streams."""
    total = len(prepared.coefficients)
    x = prepared.start
    for index in range(total):
        check_cancelled()
        outputs = runner.run(index, prepared.inputs(index, x))
        x = tuple(None if stream is None else stream.x for stream in (outputs.video, outputs.audio))
        if on_preview is not None:
            state, shown = (request.video, outputs.video) if outputs.video else (request.audio, outputs.audio)
            on_preview(index, total, _to_latent(state, shown.denoised))
    return x


def prepare(
    model: TransformerModel, request: SampleRequest, timeline: Timeline, noise_source: ReferenceNoise | None = None
) -> Prepared:
    """Everything constant in the loop, or known before it: contexts, positions, RoPE, AdaLN rows, noise of all steps.
    The weights must be resident."""
    sigmas = check_sigmas(request.sigmas)
    device, transformer = model.device, model.module
    video, audio = (None if s is None else s.to(device) for s in (request.video, request.audio))
    with timeline.phase("prepare.connectors"):
        features = request.text.features.to(device, non_blocking=True)
        if request.text.processed:
            contexts = features.split([model.config.context_width, model.config.audio_context_width], dim=-1)
        else:
            contexts = transformer.connect_text(features, compatibility=request.compatibility)
        if not all(bool(c.isfinite().all()) for c in contexts):
            raise RequestError("the text conditioning is NaN or Inf after the connectors; encode the prompt again.")
    with timeline.phase("prepare.constants", steps=len(sigmas) - 1):
        forward = transformer.prepare(
            video=video,
            audio=audio,
            video_context=contexts[0],
            audio_context=contexts[1],
            compatibility=request.compatibility,
        )
        modulation = [transformer.modulation(forward, sigma) for sigma in sigmas[:-1].to(device)]
        pairs = list(zip(sigmas[:-1], sigmas[1:]))
        coefficients = [
            step_coefficients(request.sampler, s, n, eta=request.eta, s_noise=request.s_noise).to(device) for s, n in pairs
        ]
        noise_source = noise_source or _noise_source(model, request)
        start = tuple(
            None if state is None else _start_tokens(state, noise, sigmas[0].to(device), request.noise_convention)
            for state, noise in zip((video, audio), noise_source.initial(video, audio))
        )
        noise = _step_noise(request, sigmas, noise_source, video, audio)
        constants = StepConstants(forward, _blend(video), _blend(audio), request.sampler)
    return Prepared(constants, start, noise, modulation, coefficients)


def _noise_source(model, request: SampleRequest):
    if request.noise_convention == "reference":
        return ReferenceNoise(request.seed, model.device, model.module.dtype)
    return ComfyNoise(request.seed, model.device, request.noise)


def _step_noise(request: SampleRequest, sigmas: Tensor, source, video, audio) -> list[Pair]:
    """Noise of every step. The last step to sigma 0 draws none: its noise is zero."""
    if request.sampler == "euler":
        return [(None, None)] * (len(sigmas) - 1)
    noise: list[Pair] = []
    for sigma_next in sigmas[1:]:
        if sigma_next > 0:
            noise.append(source.step(video, audio))
        else:
            noise.append(
                tuple(None if s is None else torch.zeros_like(s.initial, dtype=source.latent_dtype) for s in (video, audio))
            )
    return noise


def _start_tokens(state: TokenState, noise: Tensor, sigma: Tensor, convention: str) -> Tensor:
    """Noisy tokens at the first sigma, in the dtype of the noise."""
    if convention == "comfyui":
        return sigma * noise + (1 - sigma) * state.initial
    noisy = torch.lerp(state.initial, noise.float(), sigma)
    return torch.lerp(state.clean, noisy, state.denoise_mask).to(noise.dtype)


def _blend(state: TokenState | None) -> Blend | None:
    """None when everything is generated: the step then has no mask arithmetic."""
    if state is None or bool((state.denoise_mask == 1).all()):
        return None
    return Blend(state.denoise_mask.contiguous(), state.clean.contiguous())


def _to_latent(state: TokenState, tokens: Tensor) -> Tensor:
    """Target tokens as a latent, float32. A copy, so that no recording's buffer leaves."""
    unpatchify = unpatchify_video if hasattr(state.shape, "height") else unpatchify_audio
    return unpatchify(tokens[:, : state.shape.tokens], state.shape).float().clone()


def _check_choices(request: SampleRequest, cuda_graph: str, on_capture_failure: str) -> None:
    for name, value, allowed in (
        ("cuda_graph", cuda_graph, CUDA_GRAPH_MODES),
        ("on_capture_failure", on_capture_failure, ON_CAPTURE_FAILURE),
        ("sampler", request.sampler, ("euler", "euler_ancestral")),
        ("noise_convention", request.noise_convention, NOISE_CONVENTIONS),
        ("compatibility", request.compatibility, COMPATIBILITIES),
    ):
        if value not in allowed:
            raise RequestError(f"{name}={value!r} is not one of {', '.join(allowed)}.")
    if request.noise is not None and request.noise_convention != "comfyui":
        raise RequestError("a given start noise needs noise_convention 'comfyui'; the reference draws its own.")


def _check_streams(model: TransformerModel, request: SampleRequest) -> None:
    config = model.config
    states = {"video": request.video, "audio": request.audio}
    present = {name: s for name, s in states.items() if s is not None}
    if not present:
        raise RequestError("neither a video nor an audio latent was given.")
    batches = {name: s.shape.batch for name, s in present.items()}
    if len(set(batches.values())) > 1:
        raise ShapeError(f"the latents have different batch sizes: {batches}. Use the same batch for video and audio.")
    for name, state in present.items():
        channels = config.in_channels if name == "video" else config.audio_in_channels
        if state.initial.shape[-1] != channels:
            raise ShapeError(
                f"the {name} latent has {state.initial.shape[-1]} features a token, the model takes {channels}. "
                f"Use a latent made for LTX-2.5."
            )
        if not bool(torch.isfinite(state.initial).all()):
            raise RequestError(f"the {name} latent holds NaN or Inf before sampling; make a new latent.")
        if request.noise_convention == "comfyui" and (
            state.tokens != state.shape.tokens or bool((state.denoise_mask != 1).any())
        ):
            raise RequestError(
                f"the {name} latent has kept or appended tokens, which noise_convention 'comfyui' does not support yet. "
                f"Use noise_convention 'reference'."
            )
    features = request.text.features
    width = config.context_width + config.audio_context_width
    if features.ndim != 3 or features.shape[-1] != width:
        raise ShapeError(
            f"the conditioning has shape {tuple(features.shape)}, the model takes (batch, tokens, {width}) "
            f"({config.context_width} video + {config.audio_context_width} audio features). Encode the prompt with the text "
            f"encoder of LTX-2.5 (gemma4-12b-with-proj-ltx-2.5)."
        )
    if not bool(torch.isfinite(features).all()):
        raise RequestError("the conditioning holds NaN or Inf; encode the prompt again.")
    batch = next(iter(batches.values()))
    if features.shape[0] not in (1, batch):
        raise ShapeError(f"the conditioning has batch {features.shape[0]}, the latent {batch}. Use 1 or {batch}.")
