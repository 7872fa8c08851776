"""One denoising step: model, x0, mask blend, sampler update. Pure device work from tensors to tensors; the captured region.

Source: transformer.md sections 8.3, 10, 11, 12.2, 12.3.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .transformer.inputs import ForwardConstants, StepModulation
from .transformer.model import LTXTransformer


@dataclass(frozen=True)
class Blend:
    """Given tokens of one stream. denoise_mask: (B, N, 1) float32; clean: (B, N, C) float32."""

    denoise_mask: Tensor
    clean: Tensor


@dataclass(frozen=True)
class StepConstants:
    """All that a step reads and that stays the same over the loop. A stream's blend is None when its mask is all ones."""

    forward: ForwardConstants
    video_blend: Blend | None
    audio_blend: Blend | None
    sampler: str


@dataclass(frozen=True)
class StreamInputs:
    """x: (B, N, C) noisy tokens in the latent dtype. noise: same shape, None for a deterministic sampler."""

    x: Tensor
    noise: Tensor | None


@dataclass(frozen=True)
class StepInputs:
    """What changes from step to step. coefficients: float32 scalars of the sampler, see `step_coefficients`."""

    video: StreamInputs | None
    audio: StreamInputs | None
    modulation: StepModulation
    coefficients: Tensor


@dataclass(frozen=True)
class StreamOutputs:
    """x: next noisy tokens. denoised: this step's x0. Both (B, N, C) in the latent dtype."""

    x: Tensor
    denoised: Tensor


@dataclass(frozen=True)
class StepOutputs:
    """probe: (streams,) float32 sums of the next tokens, video first; not finite as soon as one element isn't."""

    video: StreamOutputs | None
    audio: StreamOutputs | None
    probe: Tensor


def denoise_step(transformer: LTXTransformer, constants: StepConstants, inputs: StepInputs) -> StepOutputs:
    """Model pass, x0, mask blend and sampler update of both streams."""
    streams = (inputs.video, inputs.audio)
    velocities = transformer(*(s.x if s is not None else None for s in streams), constants.forward, inputs.modulation)
    blends = (constants.video_blend, constants.audio_blend)
    video, audio = (
        _advance(stream, velocity, blend, inputs.coefficients, constants.sampler)
        for stream, velocity, blend in zip(streams, velocities, blends)
    )
    probe = torch.stack([s.x.sum(dtype=torch.float32) for s in (video, audio) if s is not None])
    return StepOutputs(video, audio, probe)


def _advance(stream, velocity, blend, coefficients, sampler) -> StreamOutputs | None:
    if stream is None:
        return None
    sigma = coefficients[0]
    tau = sigma if blend is None else blend.denoise_mask * sigma
    denoised = x0_from_velocity(stream.x, velocity, tau)
    if blend is not None:
        denoised = blend_clean(denoised, blend.denoise_mask, blend.clean)
    if sampler == "euler":
        return StreamOutputs(euler_step(stream.x, denoised, coefficients), denoised)
    x = ancestral_step(stream.x, denoised, stream.noise, coefficients)
    if blend is not None:
        x = blend_clean(x, blend.denoise_mask, blend.clean)
    return StreamOutputs(x, denoised)


def x0_from_velocity(x: Tensor, velocity: Tensor, tau: Tensor) -> Tensor:
    """x0 = x - tau*v in float32, cast to x's dtype. tau: scalar or (B, N, 1) float32, denoise_mask*sigma."""
    return (x.float() - velocity.float() * tau).to(x.dtype)


def blend_clean(x: Tensor, denoise_mask: Tensor, clean: Tensor) -> Tensor:
    """x*m + clean*(1-m) in float32, cast to x's dtype."""
    return (x.float() * denoise_mask + clean * (1 - denoise_mask)).to(x.dtype)


def euler_step(x: Tensor, denoised: Tensor, coefficients: Tensor) -> Tensor:
    """x + (x - x0)/sigma * (sigma' - sigma). The derivative is rounded to x's dtype, as the reference does; with float32
    latents that is ComfyUI's arithmetic bit for bit. coefficients: sigma, sigma' - sigma."""
    derivative = ((x.float() - denoised.float()) / coefficients[0]).to(x.dtype)
    return (x.float() + derivative.float() * coefficients[1]).to(x.dtype)


def ancestral_step(x: Tensor, denoised: Tensor, noise: Tensor, coefficients: Tensor) -> Tensor:
    """Ancestral Euler for rectified flow, float32 until the end of the step.

    coefficients: sigma, sigma_d/sigma, 1 - sigma_d/sigma, (1-sigma')/(1-sigma_d), s_noise, renoise. On the last step they
    are sigma, 0, 1, 1, s_noise, 0, which leaves x0.
    """
    _, keep, pull, rescale, s_noise, renoise = coefficients.unbind()
    mixed = keep * x.float() + pull * denoised.float()
    return (rescale * mixed + noise.float() * s_noise * renoise).to(x.dtype)


def step_coefficients(sampler: str, sigma: Tensor, sigma_next: Tensor, *, eta: float, s_noise: float) -> Tensor:
    """Float32 scalars of one step, computed in float32 in the order that ComfyUI computes them (bit-equal), on the CPU.

    sigma, sigma_next: () float32. Euler: (2,). Ancestral Euler: (6,).
    """
    if sampler == "euler":
        return torch.stack([sigma, sigma_next - sigma])
    one = torch.ones(())
    if sigma_next == 0:
        return torch.stack([sigma, 0 * one, one, one, s_noise * one, 0 * one])
    down = sigma_next * (1 + (sigma_next / sigma - 1) * eta)
    keep = down / sigma
    rescale, renoise = one, 0 * one
    if eta > 0:
        rescale = (1 - sigma_next) / (1 - down)
        renoise = (sigma_next**2 - down**2 * (1 - sigma_next) ** 2 / (1 - down) ** 2).clamp_min(0) ** 0.5
    return torch.stack([sigma, keep, 1 - keep, rescale, s_noise * one, renoise])
