"""A tiny golden transformer as a model handle, requests for it, and the sampling loop written out naively: an
oracle."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ltx_runtime import sampler
from ltx_runtime.conditioning import audio_state, text_to_video_state
from ltx_runtime.cuda_graph import GraphKey
from ltx_runtime.guidance import Guidance, GuidanceSpec
from ltx_runtime.runtime import TransformerModel, load_transformer
from ltx_runtime.sampler import SampleRequest, SampleResult, TextFeatures
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape
from ltx_runtime.timing import Timeline

FPS = 24.0
LAYERS = 3
WEIGHTS = Path(__file__).parent / "goldens" / "transformer_w_av25.safetensors"
SIGMAS = (1.0, 0.9, 0.7, 0.4, 0.0)


@functools.cache
def tiny_model() -> TransformerModel:
    """Three blocks, 16 latent channels, float32 on the CPU."""
    return load_transformer(WEIGHTS, device="cpu", dtype=torch.float32)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def video_shape(frames: int = 3, height: int = 2, width: int = 2, batch: int = 1) -> VideoLatentShape:
    return VideoLatentShape(batch, 16, frames, height, width)


def audio_shape(frames: int = 7, batch: int = 1) -> AudioLatentShape:
    return AudioLatentShape(batch, 4, frames, 4)


def text(seed: int, tokens: int = 5) -> TextFeatures:
    config = tiny_model().config
    return TextFeatures(random(1, tokens, config.context_width + config.audio_context_width, seed=seed), processed=True)


def tiny_request(**changes) -> SampleRequest:
    """Text to video with sound, four steps of Euler in the reference's convention."""
    batch = changes.pop("batch", 1)
    settings = {
        "video": text_to_video_state(video_shape(batch=batch), FPS),
        "audio": audio_state(audio_shape(batch=batch)),
        "text": text(1),
        "negative": text(2),
        "sigmas": torch.tensor(SIGMAS),
        "seed": 3,
        "noise_convention": "reference",
    }
    return SampleRequest(**settings | changes)


def sampled(request: SampleRequest, **options) -> SampleResult:
    """An eager render."""
    return sampler.sample(tiny_model(), request, cuda_graph="off", **options)


def prepared(request: SampleRequest) -> sampler.Prepared:
    with torch.inference_mode():
        return sampler.prepare(tiny_model(), request, Timeline(None))


def key(steps: sampler.Prepared, index: int) -> GraphKey:
    """That of the recording which step `index` would ask for."""
    return GraphKey.of((steps.constants[index], steps.inputs(index, steps.start, steps.start)), weight_generation=0)


def naive_loop(
    request: SampleRequest, start: dict[str, Tensor], noise: list[dict[str, Tensor]] | None = None
) -> dict[str, Tensor]:
    """Tokens at the end, by the formulas of transformer.md sections 11 to 13, one forward at a time.

    start: noisy tokens by stream. noise: of every step, for ancestral Euler with eta 1.
    """
    guidance = request.guidance or Guidance()
    specs: dict[str, GuidanceSpec] = {name: getattr(guidance, name) for name in request.states}
    x, kept = dict(start), {}
    for index, (sigma, sigma_next) in enumerate(zip(request.sigmas[:-1], request.sigmas[1:])):
        running = {name: spec for name, spec in specs.items() if index % (spec.skip_step + 1) == 0}
        if running:
            kept |= _guided(request, running, x, sigma)
        for name, tokens in x.items():
            drawn = None if noise is None else noise[index]
            x[name] = _naive_step(request, name, tokens, kept[name], sigma, sigma_next, drawn)
    return x


def _blended(request: SampleRequest, name: str, tokens: Tensor) -> Tensor:
    mask = request.states[name].denoise_mask
    return tokens * mask + request.states[name].clean * (1 - mask)


def _guided(request: SampleRequest, running: dict[str, GuidanceSpec], x: dict[str, Tensor], sigma: Tensor):
    """Guided x0 of the streams that are predicted in this step."""
    perturbed, alone = (torch.ones(4, LAYERS, request.batch) for _ in range(2))
    for row, name in enumerate(("video", "audio")):
        if name in running and running[name].stg_scale != 0:
            perturbed[row, list(running[name].stg_blocks)] = 0
    alone[2:] = 0
    cond = _x0(request, request.text, running, x, sigma, None)
    uncond = cond if request.negative is None else _x0(request, request.negative, running, x, sigma, None)
    ptb = _x0(request, request.text, running, x, sigma, perturbed)
    mod = _x0(request, request.text, running, x, sigma, alone)
    found = {}
    for name, spec in running.items():
        c = cond[name]
        guided = c + (spec.cfg_scale - 1) * (c - uncond[name]) + spec.stg_scale * (c - ptb[name])
        guided = guided + (spec.modality_scale - 1) * (c - mod[name])
        if spec.rescale:
            guided = guided * (spec.rescale * c.std() / guided.std() + 1 - spec.rescale)
        found[name] = guided
    return found


def _x0(request: SampleRequest, features: TextFeatures, running, x: dict[str, Tensor], sigma: Tensor, perturbations):
    """x0 of one forward."""
    transformer, config = tiny_model().module, tiny_model().config
    states, comfyui = request.states, request.noise_convention == "comfyui"
    video_context, audio_context = features.features.split([config.context_width, config.audio_context_width], dim=-1)
    constants = transformer.prepare(
        video=states.get("video"),
        audio=states.get("audio"),
        video_context=video_context,
        audio_context=audio_context,
        video_enabled="video" in running,
        audio_enabled="audio" in running,
        perturbations=perturbations,
        compatibility=request.compatibility,
    )
    given = {name for name, state in states.items() if bool((state.denoise_mask == 0).all())}
    levels = [torch.zeros(()) if name in given else sigma for name in ("video", "audio")]
    seen = {name: _blended(request, name, tokens) if comfyui else tokens for name, tokens in x.items()}
    velocities = transformer(
        seen.get("video"), seen.get("audio"), constants, transformer.modulation(constants, *levels)
    )
    return {
        name: seen[name] - (sigma if comfyui else sigma * states[name].denoise_mask) * velocity
        for name, velocity in zip(("video", "audio"), velocities)
        if name in running
    }


def _naive_step(request, name, x, guided, sigma, sigma_next, noise):
    denoised = _blended(request, name, guided)
    if request.sampler == "euler":
        return x + (x - denoised) / sigma * (sigma_next - sigma)
    if sigma_next == 0:
        return denoised
    down = sigma_next**2 / sigma
    x = down / sigma * x + (1 - down / sigma) * denoised
    rescale = (1 - sigma_next) / (1 - down)
    x = rescale * x + (sigma_next**2 - down**2 * rescale**2).clamp(min=0).sqrt() * noise[name]
    return x if request.noise_convention == "comfyui" else _blended(request, name, x)
