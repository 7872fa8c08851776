"""One denoising step: model passes, guidance, x0, mask blend, sampler update. Pure device work from tensors to tensors;
the captured region.

Everything that Python branches on here is a plain value in `StepConstants` or the presence of a tensor in `StepInputs`,
so it is part of the graph key by itself.

Reading order: `StepConstants`, `StepInputs`, `denoise_step`, `_predict`; then the update of each sampler.

Source: transformer.md sections 8.3, 10, 11, 12, 13.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .guidance import GuidanceTerms, guide
from .schedules import res_2s_middle_sigma
from .transformer.inputs import ForwardConstants, StepModulation
from .transformer.model import LTXTransformer

# What the reference's SDE mix uses in res_2s.
RES_2S_ETA = 0.5
_FIXPOINT_ITERATIONS = 100

Streams = tuple[Tensor | None, Tensor | None]  # video, audio


@dataclass(frozen=True)
class Blend:
    """Given tokens of one stream. denoise_mask: (B, N, 1) float32; clean: (B, N, C) float32.

    before_model False, the reference: the noisy tokens hold what is given from the start on, each token's own noise
    level makes its x0. True, ComfyUI: the model sees a blend with the clean latent at every call, x0 is made with the
    step's sigma, and the noisy tokens themselves are never blended (transformer.md section 18.11).
    """

    denoise_mask: Tensor
    clean: Tensor
    before_model: bool

    def apply(self, x: Tensor) -> Tensor:
        return blend_clean(x, self.denoise_mask, self.clean)


@dataclass(frozen=True)
class StreamRule:
    """How the steps of one kind treat one stream. guidance None: the cond pass is its prediction. blend None:
    everything is generated. remembers: a step may reuse the guided x0 of the one before, so each hands it on. reuses:
    this kind does."""

    guidance: GuidanceTerms | None = None
    blend: Blend | None = None
    remembers: bool = False
    reuses: bool = False


@dataclass(frozen=True)
class StepConstants:
    """All that the steps of one kind read and that stays the same. forwards: one for each model call, either one call
    with a batch of all passes or one call a pass; empty when every stream reuses its x0. A rule is None for an absent
    stream.

    sampler: "euler", "euler_ancestral", "res_2s", or "x0" (the prediction is the result)."""

    forwards: tuple[ForwardConstants, ...]
    passes: tuple[str, ...]
    video: StreamRule | None
    audio: StreamRule | None
    sampler: str

    @property
    def model_calls(self) -> int:
        """Model calls of one step."""
        return len(self.forwards) * (2 if self.sampler == "res_2s" else 1)


@dataclass(frozen=True)
class StreamInputs:
    """x: (B, N, C) noisy tokens in the latent dtype. noise: same shape, None for a deterministic sampler; mid_noise:
    that of the middle of a res_2s step. previous: the last guided x0, where the step reuses it."""

    x: Tensor
    noise: Tensor | None
    mid_noise: Tensor | None = None
    previous: Tensor | None = None


@dataclass(frozen=True)
class StepInputs:
    """What changes from step to step. modulation: None when no model call is made. mid_modulation: of the second model
    call of a res_2s step. coefficients: scalars of the sampler, see `step_coefficients`."""

    video: StreamInputs | None
    audio: StreamInputs | None
    modulation: StepModulation | None
    coefficients: Tensor
    mid_modulation: StepModulation | None = None


@dataclass(frozen=True)
class StreamOutputs:
    """x: next noisy tokens. denoised: this step's x0. guided: x0 before the blend, None when no later step reuses it.
    All (B, N, C) in the latent dtype."""

    x: Tensor
    denoised: Tensor
    guided: Tensor | None = None


@dataclass(frozen=True)
class StepOutputs:
    """probe: (streams,) float32 sums of the next tokens, video first; not finite as soon as one element isn't."""

    video: StreamOutputs | None
    audio: StreamOutputs | None
    probe: Tensor


class _Prediction(NamedTuple):
    """One stream's x0: as guided, and blended with what is given."""

    guided: Tensor
    denoised: Tensor


def denoise_step(transformer: LTXTransformer, constants: StepConstants, inputs: StepInputs) -> StepOutputs:
    """Predict x0 of both streams and take the sampler's step."""
    streams = (inputs.video, inputs.audio)
    rules = (constants.video, constants.audio)
    x = _each(lambda s: s.x, streams)
    previous = _each(lambda s: s.previous, streams)
    if constants.sampler == "res_2s":
        predictions, x = _res_2s_step(transformer, constants, inputs, x, previous)
    else:
        predictions = _predict(transformer, constants, x, inputs.modulation, inputs.coefficients[0], previous)
        x = _each(functools.partial(_advance, constants.sampler, inputs.coefficients), streams, rules, predictions)
    video, audio = _each(_outputs, rules, predictions, x)
    probe = torch.stack([tokens.sum(dtype=torch.float32) for tokens in x if tokens is not None])
    return StepOutputs(video, audio, probe)


def _outputs(rule: StreamRule, prediction: _Prediction, x: Tensor) -> StreamOutputs:
    return StreamOutputs(x, prediction.denoised, prediction.guided if rule.remembers else None)


def _predict(
    transformer: LTXTransformer,
    constants: StepConstants,
    x: Streams,
    modulation: StepModulation | None,
    sigma: Tensor,
    previous: Streams,
) -> tuple[_Prediction | None, _Prediction | None]:
    """x0 of both streams at sigma, a 0-dim tensor."""
    rules = (constants.video, constants.audio)
    seen = _each(lambda t, rule: rule.blend.apply(t) if rule.blend and rule.blend.before_model else t, x, rules)
    velocities = _velocities(transformer, constants, seen, modulation)

    def prediction(index: int) -> _Prediction | None:
        rule = rules[index]
        if rule is None:
            return None
        blend = rule.blend
        if rule.reuses:
            guided = previous[index]
        else:
            tau = sigma if blend is None or blend.before_model else blend.denoise_mask * sigma
            x0 = {name: x0_from_velocity(seen[index], v[index], tau) for name, v in velocities.items()}
            guided = x0["cond"] if rule.guidance is None else guide(x0, rule.guidance)
        return _Prediction(guided, guided if blend is None else blend.apply(guided))

    return prediction(0), prediction(1)


def _velocities(
    transformer: LTXTransformer, constants: StepConstants, seen: Streams, modulation: StepModulation | None
) -> dict[str, Streams]:
    """Velocities of each pass."""
    forwards, passes = constants.forwards, constants.passes
    if len(forwards) == len(passes):
        return {name: transformer(*seen, forward, modulation) for name, forward in zip(passes, forwards)}
    batch = _each(lambda t: t.repeat(len(passes), 1, 1), seen)
    video, audio = _each(lambda v: v.chunk(len(passes)), transformer(*batch, forwards[0], modulation))
    return {
        name: (None if video is None else video[index], None if audio is None else audio[index])
        for index, name in enumerate(passes)
    }


def _advance(
    sampler: str, coefficients: Tensor, stream: StreamInputs, rule: StreamRule, prediction: _Prediction
) -> Tensor:
    denoised = prediction.denoised
    if sampler == "x0":
        return denoised
    if sampler == "euler":
        return euler_step(stream.x, denoised, coefficients)
    x = ancestral_step(stream.x, denoised, stream.noise, coefficients)
    if not _is_blended_again(rule):
        return x
    # Without noise (the step to 0) there is nothing to take off, and blending a fraction twice would be another result.
    renoise = coefficients[-1]
    return torch.where(renoise > 0, rule.blend.apply(x), x)


def _is_blended_again(rule: StreamRule) -> bool:
    """The reference takes the noise off given tokens again after a sampler has put some on."""
    return rule.blend is not None and not rule.blend.before_model


def _each(fn, *streams: Iterable) -> tuple:
    """fn over the values of (video, audio) pairs, None where a stream is absent."""
    return tuple(None if values[0] is None else fn(*values) for values in zip(*streams))


def x0_from_velocity(x: Tensor, velocity: Tensor, tau: Tensor) -> Tensor:
    """x0 = x - tau*v in float32, cast to x's dtype. tau: scalar or (B, N, 1) float32, denoise_mask*sigma."""
    return (x.float() - velocity.float() * tau).to(x.dtype)


def blend_clean(x: Tensor, denoise_mask: Tensor, clean: Tensor) -> Tensor:
    """x*m + clean*(1-m) in float32 (float64 for such x), cast to x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * denoise_mask + clean * (1 - denoise_mask)).to(x.dtype)


def euler_step(x: Tensor, denoised: Tensor, coefficients: Tensor) -> Tensor:
    """x + (x - x0)/sigma * (sigma' - sigma). The derivative is rounded to x's dtype, as the reference does; with
    float32 latents that is ComfyUI's arithmetic bit for bit. coefficients: sigma, sigma' - sigma."""
    derivative = ((x.float() - denoised.float()) / coefficients[0]).to(x.dtype)
    return (x.float() + derivative.float() * coefficients[1]).to(x.dtype)


def ancestral_step(x: Tensor, denoised: Tensor, noise: Tensor, coefficients: Tensor) -> Tensor:
    """Ancestral Euler for rectified flow, float32 until the end of the step.

    coefficients: sigma, sigma_d/sigma, 1 - sigma_d/sigma, (1-sigma')/(1-sigma_d), s_noise, renoise. On the last step
    they are sigma, 0, 1, 1, s_noise, 0, which leaves x0.
    """
    _, keep, pull, rescale, s_noise, renoise = coefficients.unbind()
    mixed = keep * x.float() + pull * denoised.float()
    return (rescale * mixed + noise.float() * s_noise * renoise).to(x.dtype)


class Res2sCoefficients(NamedTuple):
    """Scalars of one res_2s step, float64 (section 12.5). half: h*a21; first, second: h*b1, h*b2. gain, rest: the fixed
    point of the anchor. The others: those of the two SDE mixes, to the middle and to the end of the step."""

    half: Tensor
    first: Tensor
    second: Tensor
    gain: Tensor
    rest: Tensor
    sigma: Tensor
    sigma_mid: Tensor
    mid_alpha: Tensor
    mid_delta: Tensor
    mid_noise: Tensor
    sigma_next: Tensor
    alpha: Tensor
    delta: Tensor
    noise: Tensor


def _res_2s_step(
    transformer: LTXTransformer, constants: StepConstants, inputs: StepInputs, x: Streams, previous: Streams
) -> tuple[tuple[_Prediction | None, _Prediction | None], Streams]:
    """Both model calls of a res_2s step. Returns the predictions of the second and the next tokens."""
    streams, rules = (inputs.video, inputs.audio), (constants.video, constants.audio)
    c = Res2sCoefficients(*inputs.coefficients.unbind())
    first = _predict(transformer, constants, x, inputs.modulation, c.sigma.float(), previous)
    middle = _each(functools.partial(_res_2s_middle, c), streams, rules, first)
    x_mid = _each(lambda m, tokens: m[0].to(tokens.dtype), middle, x)
    guided = _each(lambda p: p.guided, first)
    second = _predict(transformer, constants, x_mid, inputs.mid_modulation, c.sigma_mid.float(), guided)

    def end(stream: StreamInputs, rule: StreamRule, m: Streams, p1: _Prediction, p2: _Prediction) -> Tensor:
        anchor = m[1]
        target = anchor + c.first * (p1.denoised.double() - anchor) + c.second * (p2.denoised.double() - anchor)
        mixed = sde_mix(anchor, target, stream.noise, (c.sigma, c.sigma_next, c.alpha, c.delta, c.noise))
        return (rule.blend.apply(mixed) if _is_blended_again(rule) else mixed).to(stream.x.dtype)

    return second, _each(end, streams, rules, middle, first, second)


def _res_2s_middle(
    c: Res2sCoefficients, stream: StreamInputs, rule: StreamRule, prediction: _Prediction
) -> tuple[Tensor, Tensor]:
    """Tokens in the middle of the step, and the anchor that its end starts from, float64."""
    x, denoised = stream.x.double(), prediction.denoised.double()
    target = x + c.half * (denoised - x)
    mixed = sde_mix(x, target, stream.mid_noise, (c.sigma, c.sigma_mid, c.mid_alpha, c.mid_delta, c.mid_noise))
    x_mid = rule.blend.apply(mixed) if _is_blended_again(rule) else mixed
    anchor = c.gain * (x_mid - c.half * denoised) + c.rest * x
    return x_mid, anchor


def sde_mix(sample: Tensor, target: Tensor, noise: Tensor, coefficients: Iterable[Tensor]) -> Tensor:
    """A step from sample to target with part of its noise replaced (section 12.5), in float64.

    coefficients: sigma, sigma', alpha, delta, noise weight, see `sde_coefficients`.
    """
    sigma, sigma_next, alpha, delta, weight = coefficients
    epsilon = (sample - target) / (sigma - sigma_next)
    return alpha * (sample - sigma * epsilon + delta * epsilon) + weight * noise


def cfg_pp_euler_step(
    x: Tensor, denoised: Tensor, uncond_denoised: Tensor, noise: Tensor, coefficients: Tensor
) -> Tensor:
    """CFG++ Euler (section 12.6): from the guided x0, along the unconditional prediction's noise. Float32 until the
    end.

    coefficients: sigma, alpha, alpha', down, s_noise * up; see `cfg_pp_coefficients`. An option of the reference that
    no recipe uses and no render calls: the golden steps (tests/golden_kinds/steps.py) do.
    """
    sigma, alpha, alpha_next, down, up = coefficients.unbind()
    derivative = (x.float() - alpha * uncond_denoised.float()) / sigma
    return (alpha_next * (denoised.float() + down * derivative + up * noise.float())).to(x.dtype)


def step_coefficients(sampler: str, sigma: Tensor, sigma_next: Tensor, *, eta: float, s_noise: float) -> Tensor:
    """Scalars of one step on the CPU; the first (res_2s: see Res2sCoefficients) is sigma.

    sigma, sigma_next: () float32. Euler: (2,), ancestral Euler: (6,), x0: (1,), float32, computed in float32 in the
    order that ComfyUI computes them (bit-equal). res_2s: (14,) float64. eta and s_noise belong to ancestral Euler.
    """
    if sampler == "x0":
        return sigma[None]
    if sampler == "res_2s":
        return _res_2s_coefficients(float(sigma), float(sigma_next))
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


def _res_2s_coefficients(sigma: float, sigma_next: float) -> Tensor:
    h, a21, b1, b2 = runge_kutta_coefficients(sigma, sigma_next)
    sigma_mid = res_2s_middle_sigma(sigma, sigma_next)
    half = h * a21
    gain, rest = 0.0, 1.0
    if h < 0.5 and sigma > 0.03:
        # The reference repeats anchor <- x_mid - half*(denoised - anchor). Summed up, so that the step has one form:
        # the iterations are a geometric series in half.
        rest = half**_FIXPOINT_ITERATIONS
        gain = (1 - rest) / (1 - half)
    middle, end = sde_coefficients(sigma, sigma_mid), sde_coefficients(sigma, sigma_next)
    values = Res2sCoefficients(half, h * b1, h * b2, gain, rest, *middle, *end[1:])
    return torch.tensor(values, dtype=torch.float64)


def runge_kutta_coefficients(sigma: float, sigma_next: float) -> tuple[float, float, float, float]:
    """h, a21, b1, b2 of res_2s (section 12.5)."""
    h = math.log(sigma / sigma_next)
    second = 2 * (math.expm1(-h) + h) / h**2
    return h, math.expm1(-h / 2) / -h, math.expm1(-h) / -h - second, second


def sde_coefficients(
    sigma: float, sigma_next: float, eta: float = RES_2S_ETA
) -> tuple[float, float, float, float, float]:
    """sigma, sigma', alpha, delta and noise weight of one SDE mix."""
    weight = min(eta * sigma_next, 0.9999 * sigma_next)
    remaining = math.sqrt(sigma_next**2 - weight**2)
    alpha = 1 - sigma_next + remaining
    return sigma, sigma_next, alpha, remaining / alpha, weight


def cfg_pp_coefficients(sigma: float, sigma_next: float, *, eta: float, s_noise: float) -> Tensor:
    """(5,) float32 scalars of `cfg_pp_euler_step`."""
    alpha, alpha_next = max(1 - sigma, 2.0**-23), max(1 - sigma_next, 2.0**-23)
    ratio, ratio_next = sigma / alpha, sigma_next / alpha_next
    up = min(eta * math.sqrt(ratio_next**2 * max(ratio**2 - ratio_next**2, 0) / ratio**2), ratio_next)
    down = math.sqrt(max(ratio_next**2 - up**2, 0))
    return torch.tensor([sigma, alpha, alpha_next, down, s_noise * up])
