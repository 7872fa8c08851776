"""Guidance: extra passes through the model, whose differences from the prompt's own pass push each stream.

Reading order: `GuidanceSpec` and `PRESETS` (what a user sets), `passes_needed` (what a step runs), `forward_passes`
(how the passes go through the model), `guide` (how their predictions combine; inside the captured step).

Source: transformer.md section 13.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import RequestError
from .transformer.inputs import PERTURBATION_KINDS, ForwardConstants, GuideBias, StreamConstants, perturbation_mode
from .transformer.rope import RopeTable

# In batch order. cond: the prompt. uncond: the negative prompt. ptb: the prompt, with self attention of the STG blocks
# replaced by its values. mod: the prompt, with the two streams not hearing each other.
PASSES = ("cond", "uncond", "ptb", "mod")
PASS_MODES = ("auto", "batched", "sequential")


@dataclass(frozen=True)
class GuidanceSpec:
    """Guidance of one stream. The defaults switch every part off.

    cfg_scale (1 = off): away from the negative prompt. stg_scale (0 = off): away from a prediction whose self attention
    was perturbed in stg_blocks. modality_scale (1 = off): away from a prediction that did not hear the other stream.
    rescale (0 = off, 1 = full): brings the guided prediction's spread back to that of the prompt's own. skip_step n: of
    every n + 1 steps the stream is predicted in the first and keeps that prediction in the others.
    """

    cfg_scale: float = 1.0
    stg_scale: float = 0.0
    modality_scale: float = 1.0
    rescale: float = 0.0
    stg_blocks: tuple[int, ...] = ()
    skip_step: int = 0

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes that this stream needs beside cond."""
        wanted = (self.cfg_scale != 1, self.stg_scale != 0, self.modality_scale != 1)
        return tuple(name for name, on in zip(PASSES[1:], wanted) if on)

    def skips(self, step: int) -> bool:
        return step % (self.skip_step + 1) != 0


@dataclass(frozen=True)
class Guidance:
    """Guidance of a render. batching: whether the passes of a step go through the model as one batch or one after the
    other; "auto" decides by memory before the loop."""

    video: GuidanceSpec = field(default_factory=GuidanceSpec)
    audio: GuidanceSpec = field(default_factory=GuidanceSpec)
    batching: str = "auto"

    @property
    def active(self) -> bool:
        """False when every step is one pass."""
        return any(spec.passes or spec.skip_step for spec in (self.video, self.audio))

    @property
    def uses_negative(self) -> bool:
        return any("uncond" in spec.passes for spec in (self.video, self.audio))


def _dev(cfg_scale: float) -> GuidanceSpec:
    return GuidanceSpec(cfg_scale, stg_scale=1.0, modality_scale=3.0, rescale=0.7, stg_blocks=(28,))


# Lightricks' defaults for 2.4 and newer. The dev presets go with the dev schedule (30 steps, HQ: 15 steps of res_2s).
PRESETS: dict[str, Guidance] = {
    "distilled": Guidance(),
    "dev": Guidance(video=_dev(3.0), audio=_dev(7.0)),
    "dev HQ": Guidance(
        video=GuidanceSpec(3.0, modality_scale=3.0, rescale=0.45),
        audio=GuidanceSpec(7.0, modality_scale=3.0, rescale=1.0),
    ),
}


def resolve_guidance(
    guidance: Guidance, *, streams: Sequence[str], layers: int, file_name: str
) -> tuple[Guidance, list[str]]:
    """Guidance as this model and these streams can use it, and what a report should say about it.

    Parts that can't change a prediction are switched off, with a note: modality guidance of a single stream, STG whose
    blocks this model lacks. Raises RequestError for values that mean nothing.
    """
    if guidance.batching not in PASS_MODES:
        raise RequestError(f"guidance batching={guidance.batching!r} is not one of {', '.join(PASS_MODES)}.")
    notes: list[str] = []
    resolved = {}
    for name in ("video", "audio"):
        spec: GuidanceSpec = getattr(guidance, name)
        _check_spec(spec, name)
        if name not in streams:
            spec = GuidanceSpec()
        if len(streams) == 1 and spec.modality_scale != 1:
            notes.append(f"{name} modality guidance is off: there is no other stream to hear")
            spec = dataclasses.replace(spec, modality_scale=1.0)
        known = tuple(block for block in spec.stg_blocks if block < layers)
        if spec.stg_scale != 0 and known != spec.stg_blocks:
            missing = ", ".join(str(block) for block in spec.stg_blocks if block >= layers)
            notes.append(f"{name} STG: this model has {layers} blocks, so block {missing} is left out")
        if spec.stg_scale != 0 and not known:
            notes.append(f"{name} STG is off: none of its blocks is in this model")
            spec = dataclasses.replace(spec, stg_scale=0.0)
        resolved[name] = dataclasses.replace(spec, stg_blocks=known)
    result = dataclasses.replace(guidance, **resolved)
    if result.active and "distilled" in file_name.lower():
        notes.append(
            f"guidance with {file_name}: a distilled model is made to run without; expect oversaturated results"
        )
    return result, notes


def _check_spec(spec: GuidanceSpec, name: str) -> None:
    for setting in ("cfg_scale", "stg_scale", "modality_scale", "rescale"):
        if not math.isfinite(getattr(spec, setting)):
            raise RequestError(f"{name} guidance: {setting}={getattr(spec, setting)} must be a finite number.")
    if not 0 <= spec.rescale <= 1:
        raise RequestError(f"{name} guidance: rescale={spec.rescale} must lie between 0 and 1.")
    if spec.skip_step < 0:
        raise RequestError(f"{name} guidance: skip_step={spec.skip_step} must be 0 or more.")
    if any(block < 0 for block in spec.stg_blocks):
        raise RequestError(f"{name} guidance: stg_blocks={list(spec.stg_blocks)} must be 0 or more.")
    if spec.stg_scale != 0 and not spec.stg_blocks:
        raise RequestError(
            f"{name} guidance: stg_scale={spec.stg_scale} needs stg_blocks, the blocks to perturb (dev: 28)."
        )


def passes_needed(specs: Sequence[GuidanceSpec]) -> tuple[str, ...]:
    """The passes of a step that predicts streams with these specs, in batch order; none without streams."""
    if not specs:
        return ()
    wanted = {name for spec in specs for name in spec.passes}
    return tuple(name for name in PASSES if name == "cond" or name in wanted)


def forward_passes(
    base: ForwardConstants,
    passes: Sequence[str],
    specs: Mapping[str, GuidanceSpec],
    *,
    negative: tuple[Tensor | None, Tensor | None],
    batch: int,
    layers: int,
    batched: bool,
) -> tuple[ForwardConstants, ...]:
    """Constants of the model calls that make `passes`: one call for all as a batch, or one call a pass.

    base: of the prompt, for `batch` samples. specs: of the streams that are predicted; a stream of base that is not
    among them feeds the other and is not updated. negative: contexts of the negative prompt, (batch, S, width) of video
    and audio.
    """
    calls = []
    for group in [tuple(passes)] if batched else [(name,) for name in passes]:
        video, audio = (
            None if stream is None else _stream_for(group, stream, context, enabled=name in specs)
            for name, stream, context in (("video", base.video, negative[0]), ("audio", base.audio, negative[1]))
        )
        modes, keep = _perturbations(group, specs, layers)
        if keep is not None:
            like = (base.video or base.audio).rope.cos
            keep = keep.repeat_interleave(batch, dim=2).to(like.device, like.dtype)[..., None, None, None]
        calls.append(
            dataclasses.replace(base, video=video, audio=audio, perturbation_modes=modes, perturbation_keep=keep)
        )
    return tuple(calls)


def _stream_for(
    group: Sequence[str], stream: StreamConstants, negative: Tensor | None, *, enabled: bool
) -> StreamConstants:
    """A stream's constants for a batch of passes. What all samples share stays as it is and broadcasts."""
    context = None
    if enabled:
        contexts = [negative if name == "uncond" else stream.context for name in group]
        context = contexts[0] if len(contexts) == 1 else torch.cat(contexts)

    def tiled(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.shape[0] == 1 or len(group) == 1:
            return tensor
        return tensor.repeat(len(group), *[1] * (tensor.ndim - 1))

    def tiled_rope(table: RopeTable | None) -> RopeTable | None:
        return None if table is None else RopeTable(tiled(table.cos), tiled(table.sin))

    return dataclasses.replace(
        stream,
        context=context,
        rope=tiled_rope(stream.rope),
        cross_rope=tiled_rope(stream.cross_rope),
        keyframe_marker=tiled(stream.keyframe_marker),
        # A bias in parts has no batch.
        attention_bias=stream.attention_bias
        if isinstance(stream.attention_bias, GuideBias)
        else tiled(stream.attention_bias),
        timestep_index=tiled(stream.timestep_index),
        max_mask=tiled(stream.max_mask),
        enabled=enabled,
    )


def _perturbations(
    group: Sequence[str], specs: Mapping[str, GuidanceSpec], layers: int
) -> tuple[tuple[tuple[str, ...], ...] | None, Tensor | None]:
    """Modes [kind][layer] of a batch of passes, and (kinds, layers, passes) keep factors when passes of it differ."""
    keep = torch.ones(len(PERTURBATION_KINDS), layers, len(group))
    for index, name in enumerate(group):
        if name == "ptb":
            for kind, stream in (("video_self", "video"), ("audio_self", "audio")):
                spec = specs.get(stream)
                if spec is not None and spec.stg_scale != 0:
                    keep[PERTURBATION_KINDS.index(kind), list(spec.stg_blocks), index] = 0
        elif name == "mod":
            for kind in ("a2v", "v2a"):
                keep[PERTURBATION_KINDS.index(kind), :, index] = 0
    if bool((keep == 1).all()):
        return None, None
    modes = tuple(tuple(perturbation_mode(samples) for samples in kind) for kind in keep.tolist())
    return modes, keep if any("mix" in kind for kind in modes) else None


@dataclass(frozen=True)
class GuidanceTerms:
    """One stream's guidance as the step reads it. passes: those it combines with cond. rescaled: whether the spread is
    brought back. scales: (5,) float32, cfg - 1, stg, modality - 1, rescale, 1 - rescale: inputs, so that another scale
    needs no other graph."""

    passes: tuple[str, ...]
    rescaled: bool
    scales: Tensor

    @classmethod
    def of(cls, spec: GuidanceSpec, device: torch.device) -> GuidanceTerms | None:
        """None when the stream's cond pass is its prediction."""
        if not spec.passes:
            return None
        scales = (spec.cfg_scale - 1, spec.stg_scale, spec.modality_scale - 1, spec.rescale, 1 - spec.rescale)
        return cls(spec.passes, spec.rescale != 0, torch.tensor(scales, dtype=torch.float32, device=device))


def guide(predictions: Mapping[str, Tensor], terms: GuidanceTerms) -> Tensor:
    """The guided x0 of one stream, from the x0 of each pass.

    predictions: by pass, (B, N, C) in the latent dtype; cond and all of terms.passes. Float32 inside, cond's dtype out.
    The spread is the unbiased standard deviation over the whole tensor: kept tokens and all samples of the batch
    included.
    """
    cond = predictions["cond"].float()
    *weights, rescale, keep = terms.scales.unbind()
    guided = cond
    for name, weight in zip(PASSES[1:], weights):
        if name in terms.passes:
            guided = guided + weight * (cond - predictions[name].float())
    if terms.rescaled:
        guided = guided * (rescale * (cond.std() / guided.std()) + keep)
    return guided.to(predictions["cond"].dtype)


def cfg_star_delta(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """What rescaled CFG (CFG*) adds to cond: (scale - 1)(cond - k uncond), k the projection of cond on uncond per
    sample.

    cond, uncond: (B, ...) float32. An optional guider of the reference that no recipe and no official node uses, so it
    is no part of GuidanceSpec: for scripts that combine predictions themselves. Source: transformer.md section 13.
    """
    k = _projection(cond, uncond)
    return (scale - 1) * (cond - k * uncond)


def apg_delta(cond: Tensor, uncond: Tensor, scale: float, eta: float, norm_threshold: float) -> Tensor:
    """What adaptive projected guidance adds to cond: the difference, limited in norm, its part along cond weighted by
    eta.

    cond, uncond: (B, ..., ...) float32, at least three axes. norm_threshold 0: no limit. An optional guider of the
    reference like cfg_star_delta: for scripts that combine predictions themselves.
    """
    difference = cond - uncond
    if norm_threshold > 0:
        # Over the last three axes: of token-shaped predictions that is the whole batch.
        norm = torch.linalg.vector_norm(difference, dim=(-3, -2, -1), keepdim=True)
        difference = difference * (norm_threshold / norm).clamp(max=1)
    parallel = _projection(difference, cond) * cond
    return (scale - 1) * (eta * parallel + (difference - parallel))


def _projection(x: Tensor, onto: Tensor) -> Tensor:
    """<x, onto> / |onto|^2 of each sample, shaped to multiply onto."""
    axes = tuple(range(1, x.ndim))
    return (x * onto).sum(dim=axes, keepdim=True) / (onto.square().sum(dim=axes, keepdim=True) + 1e-8)
