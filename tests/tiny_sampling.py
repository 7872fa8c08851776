"""A tiny golden transformer as a model handle, requests for it, and the sampling loop written out naively: an oracle."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ltx_runtime.conditioning import audio_state, text_to_video_state
from ltx_runtime.guidance import Guidance, GuidanceSpec
from ltx_runtime.runtime import TransformerModel, load_transformer
from ltx_runtime.sampler import SampleRequest, TextFeatures
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape

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


def naive_loop(request: SampleRequest, start: dict[str, Tensor], noise: list[dict[str, Tensor]] | None = None) -> dict[str, Tensor]:
    """Tokens at the end, by the formulas of transformer.md sections 11 to 13, one forward at a time.

    start: noisy tokens by stream. noise: of every step, for ancestral Euler with eta 1.
    """
    transformer, config = tiny_model().module, tiny_model().config
    states, guidance = request.states, request.guidance or Guidance()
    specs: dict[str, GuidanceSpec] = {name: getattr(guidance, name) for name in states}
    comfyui = request.noise_convention == "comfyui"
    x, kept = dict(start), {}

    def contexts(features: TextFeatures) -> dict[str, Tensor]:
        video, audio = features.features.split([config.context_width, config.audio_context_width], dim=-1)
        return {"video_context": video, "audio_context": audio}

    def blended(name: str, tokens: Tensor) -> Tensor:
        mask = states[name].denoise_mask
        return tokens * mask + states[name].clean * (1 - mask)

    for index, (sigma, sigma_next) in enumerate(zip(request.sigmas[:-1], request.sigmas[1:])):
        running = [name for name, spec in specs.items() if index % (spec.skip_step + 1) == 0]
        seen = {name: blended(name, tokens) if comfyui else tokens for name, tokens in x.items()}

        def predict(text: TextFeatures, perturbations: Tensor | None) -> dict[str, Tensor]:
            constants = transformer.prepare(
                video=states.get("video"),
                audio=states.get("audio"),
                **contexts(text),
                video_enabled="video" in running,
                audio_enabled="audio" in running,
                perturbations=perturbations,
                compatibility=request.compatibility,
            )
            levels = [
                torch.zeros(()) if name in states and bool((states[name].denoise_mask == 0).all()) else sigma
                for name in ("video", "audio")
            ]
            velocities = transformer(
                seen.get("video"), seen.get("audio"), constants, transformer.modulation(constants, *levels)
            )
            found = {}
            for name, velocity in zip(("video", "audio"), velocities):
                if name in running:
                    tau = sigma if comfyui else sigma * states[name].denoise_mask
                    found[name] = seen[name] - tau * velocity
            return found

        if running:
            perturbed = torch.ones(4, LAYERS, request.batch)
            for row, name in enumerate(("video", "audio")):
                if name in specs and specs[name].stg_scale != 0:
                    perturbed[row, list(specs[name].stg_blocks)] = 0
            alone = torch.ones(4, LAYERS, request.batch)
            alone[2:] = 0
            cond = predict(request.text, None)
            uncond = predict(request.negative, None) if request.negative is not None else cond
            ptb, mod = predict(request.text, perturbed), predict(request.text, alone)
            for name in running:
                s, c = specs[name], cond[name]
                guided = c + (s.cfg_scale - 1) * (c - uncond[name]) + s.stg_scale * (c - ptb[name])
                guided = guided + (s.modality_scale - 1) * (c - mod[name])
                if s.rescale:
                    guided = guided * (s.rescale * c.std() / guided.std() + 1 - s.rescale)
                kept[name] = guided
        for name in x:
            denoised = blended(name, kept[name])
            if request.sampler == "euler":
                x[name] = x[name] + (x[name] - denoised) / sigma * (sigma_next - sigma)
            elif sigma_next == 0:
                x[name] = denoised
            else:
                down = sigma_next**2 / sigma
                x[name] = down / sigma * x[name] + (1 - down / sigma) * denoised
                rescale = (1 - sigma_next) / (1 - down)
                weight = (sigma_next**2 - down**2 * rescale**2).clamp(min=0).sqrt()
                x[name] = rescale * x[name] + weight * noise[index][name]
                if not comfyui:
                    x[name] = blended(name, x[name])
    return x
