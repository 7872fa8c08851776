"""What a denoising run is asked for, and what can be refused before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .conditioning import TokenState
from .errors import RequestError, ShapeError
from .guidance import Guidance, passes_needed, resolve_guidance
from .noise import NOISE_CONVENTIONS, Pair, check_noise
from .schedules import SAMPLERS, check_sigmas, sampler_steps
from .transformer.model import COMPATIBILITIES

if TYPE_CHECKING:
    from .config import TransformerConfig


@dataclass(frozen=True)
class TextFeatures:
    """features: (B, n, video width + audio width) float. processed False: raw projections of the valid tokens, the
    connectors still have to run; True: connector output, used as it is. Source: transformer.md section 7."""

    features: Tensor
    processed: bool


@dataclass(frozen=True)
class SampleRequest:
    """One denoising run. At least one of video and audio; every tensor may be on any device.

    video, audio: what is generated and what is given. A second stage takes the upscaled latent in its video state;
    given sound is a frozen audio state; a retake a state with a temporal region (conditioning.py). sigmas: (n+1,)
    float32, decreasing, n steps. sampler: "euler", "euler_ancestral" (eta and s_noise belong to it) or "res_2s".
    noise_convention: "comfyui" (noise, masks and float32 latents bit-equal to a ComfyUI sampler) or "reference"
    (latents in the model's dtype, generators on the device, given tokens as the reference treats them). noise: start
    noise in latent layout instead of the drawn one, comfyui only. compatibility: "reference", or "comfyui" for its
    deviations from the reference (transformer.md section 18.1-3). guidance: None for one pass a step. negative: the
    negative prompt, which CFG needs.
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
    guidance: Guidance | None = None
    negative: TextFeatures | None = None

    @property
    def states(self) -> dict[str, TokenState]:
        """The streams that are present, by name."""
        return {name: state for name, state in (("video", self.video), ("audio", self.audio)) if state is not None}

    @property
    def batch(self) -> int:
        return next(iter(self.states.values())).shape.batch

    @property
    def passes_at_once(self) -> int:
        """Passes that may go through the model as one batch."""
        if self.guidance is None or self.guidance.batching == "sequential":
            return 1
        return len(passes_needed([getattr(self.guidance, name) for name in self.states]))


def check_request(request: SampleRequest, config: TransformerConfig) -> None:
    """Raise RequestError or ShapeError, naming the part and the remedy, for a request that this model can't run."""
    for name, value, allowed in (
        ("sampler", request.sampler, tuple(name for name in SAMPLERS if name != "auto")),
        ("noise_convention", request.noise_convention, NOISE_CONVENTIONS),
        ("compatibility", request.compatibility, COMPATIBILITIES),
    ):
        if value not in allowed:
            raise RequestError(f"{name}={value!r} is not one of {', '.join(allowed)}.")
    if request.noise is not None and request.noise_convention != "comfyui":
        raise RequestError("a given start noise needs noise_convention 'comfyui'; the reference draws its own.")
    if not request.states:
        raise RequestError("neither a video nor an audio latent was given.")
    batches = {name: state.shape.batch for name, state in request.states.items()}
    if len(set(batches.values())) > 1:
        raise ShapeError(f"the latents have different batch sizes: {batches}. Use the same batch for video and audio.")
    for name, state in request.states.items():
        _check_state(state, name, config)
        if request.noise_convention == "comfyui":
            _ = state.latent_shape  # raises when appended tokens have no place in ComfyUI's layout
    for part, name in zip(request.noise or (), ("video", "audio")):
        if name in request.states:
            check_noise(part, request.states[name], name)
    sampler_steps(request.sampler, check_sigmas(request.sigmas))  # raises for sigmas that the sampler can't end at
    if request.guidance is not None:
        streams = list(request.states)
        resolve_guidance(request.guidance, streams=streams, layers=config.num_layers, file_name="")
    if all(state.frozen for state in request.states.values()):
        raise RequestError(
            "nothing is to be generated: the masks keep every token of the latent. Use a mask above 0 somewhere."
        )
    _check_text(request.text, "the conditioning", request.batch, config)
    if request.negative is not None:
        _check_text(request.negative, "the negative conditioning", request.batch, config)
    if request.guidance is not None and request.negative is None:
        for name in request.states:
            scale = getattr(request.guidance, name).cfg_scale
            if scale != 1:
                raise RequestError(
                    f"{name} guidance: cfg_scale={scale} needs a negative prompt. Connect negative (an empty prompt "
                    f"will do), or set cfg_scale to 1."
                )


def _check_state(state: TokenState, name: str, config: TransformerConfig) -> None:
    channels = config.in_channels if name == "video" else config.audio_in_channels
    if state.initial.shape[-1] != channels:
        raise ShapeError(
            f"the {name} latent has {state.initial.shape[-1]} features a token, the model takes {channels}. "
            f"Use a latent made for LTX-2.5."
        )
    for tensor, words in ((state.initial, "latent"), (state.clean, "given latent"), (state.denoise_mask, "mask")):
        if not _all_finite(tensor):
            raise RequestError(f"the {name} {words} holds NaN or Inf before sampling; make a new one.")
    if bool(((state.denoise_mask < 0) | (state.denoise_mask > 1)).any()):
        low, high = (float(edge) for edge in torch.aminmax(state.denoise_mask))
        raise RequestError(
            f"the {name} mask runs from {low:g} to {high:g}; it must lie between 0 (keep) and 1 (generate)."
        )
    target, inside = state.shape.tokens, state.tokens - state.outside_latent
    if inside > target:
        times, clip_end = state.positions[:, 0, target:inside], state.positions[:, 0, :target].max()
        outside = (times[..., 0] >= clip_end) | (times[..., 1] <= 0)
        if bool(outside.any()):
            start, end = times[outside][0].tolist()
            raise RequestError(
                f"a guide or keyframe at {start:.3f} to {end:.3f} s is outside the clip, which lasts "
                f"{float(clip_end):.3f} s. Give it a frame of the clip."
            )


def _all_finite(tensor: Tensor) -> bool:
    """By its extremes, which are NaN as soon as one value is: one pass, where isfinite takes five, 15 ms of a CPU for
    the features of a prompt."""
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _check_text(text: TextFeatures, name: str, batch: int, config: TransformerConfig) -> None:
    features = text.features
    width = config.context_width + config.audio_context_width
    if features.ndim != 3 or features.shape[-1] != width:
        raise ShapeError(
            f"{name} has shape {tuple(features.shape)}, the model takes (batch, tokens, {width}) "
            f"({config.context_width} video + {config.audio_context_width} audio features). Encode the prompt with the "
            f"text encoder of LTX-2.5 (gemma4-12b-with-proj-ltx-2.5)."
        )
    if features.shape[1] == 0:
        raise RequestError(f"{name} holds no token; encode the prompt again.")
    if not _all_finite(features):
        raise RequestError(f"{name} holds NaN or Inf; encode the prompt again.")
    if features.shape[0] not in (1, batch):
        raise ShapeError(
            f"{name} has batch {features.shape[0]}, the latent {batch}. Use one prompt, or one for each sample."
        )
