"""One of the 48 blocks: self attention, text attention, audio <-> video attention, feed-forward, for both streams.

Written for few launches and few passes over the video stream: what stands between two matrix products of a stream
(residual, norm, modulation) goes through ResidualStream, which the blocks update in place.

Source: transformer.md section 8.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..config import TransformerConfig
from .attention import Attention
from .feed_forward import FeedForward
from .inputs import ForwardConstants, StepModulation, StreamConstants, StreamModulation
from .residual import ResidualStream

# ComfyUI normalises q and k with this eps (transformer.md section 18.2).
COMFYUI_QK_EPS = 1e-5


class TransformerBlock(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        video, audio = config.video_width, config.audio_width
        options = {"gated": config.gated_attention, "eps": config.norm_eps}
        video_heads = (config.video_heads, config.video_head_dim)
        audio_heads = (config.audio_heads, config.audio_head_dim)
        self.eps = config.norm_eps

        self.attn1 = Attention(video, video, *video_heads, **options)
        self.attn2 = Attention(video, config.context_width, *video_heads, **options)
        self.ff = FeedForward(video, config.ff_bias)
        self.audio_attn1 = Attention(audio, audio, *audio_heads, **options)
        self.audio_attn2 = Attention(audio, config.audio_context_width, *audio_heads, **options)
        self.audio_ff = FeedForward(audio, config.audio_ff_bias)
        # Both directions attend at the audio stream's head size.
        self.audio_to_video_attn = Attention(video, audio, *audio_heads, **options)
        self.video_to_audio_attn = Attention(audio, video, *audio_heads, **options)

        self.scale_shift_table = _table(9, video)
        self.audio_scale_shift_table = _table(9, audio)
        self.prompt_scale_shift_table = _table(2, video)
        self.audio_prompt_scale_shift_table = _table(2, audio)
        self.scale_shift_table_a2v_ca_video = _table(5, video)
        self.scale_shift_table_a2v_ca_audio = _table(5, audio)

    def forward(
        self,
        layer: int,
        video: ResidualStream | None,
        audio: ResidualStream | None,
        constants: ForwardConstants,
        modulation: StepModulation,
    ) -> None:
        """Update both streams, None where absent."""
        how = {
            "qk_eps": COMFYUI_QK_EPS if constants.compatibility == "comfyui" else self.eps,
            "fused": constants.fused,
        }
        if video is not None and constants.video.enabled:
            skip, keep = constants.perturbation("video_self", layer)
            args = (layer, video, constants.video, modulation.video, how)
            self._attend_self(self.attn1, *args, skip, keep)
            self._attend_text(self.attn2, *args)
        if audio is not None and constants.audio.enabled:
            skip, keep = constants.perturbation("audio_self", layer)
            args = (layer, audio, constants.audio, modulation.audio, how)
            self._attend_self(self.audio_attn1, *args, skip, keep)
            self._attend_text(self.audio_attn2, *args)
        if video is not None and audio is not None:
            self._attend_across(layer, video, audio, constants, modulation, how)
        if video is not None and constants.video.enabled:
            self._feed_forward(self.ff, layer, video, modulation.video, constants.fused)
        if audio is not None and constants.audio.enabled:
            self._feed_forward(self.audio_ff, layer, audio, modulation.audio, constants.fused)

    def _attend_self(
        self,
        attention: Attention,
        layer: int,
        stream: ResidualStream,
        constants: StreamConstants,
        modulation: StreamModulation,
        how: dict[str, Any],
        skip: bool,
        keep: Tensor | None,
    ) -> None:
        shift, scale, gate = modulation.block_rows(layer, 0)
        (x,) = stream.normed((scale, shift))
        out = attention(x, rope=constants.rope, bias=constants.attention_bias, skip=skip, keep=keep, **how)
        stream.add(out, gate)

    def _attend_text(
        self,
        attention: Attention,
        layer: int,
        stream: ResidualStream,
        constants: StreamConstants,
        modulation: StreamModulation,
        how: dict[str, Any],
    ) -> None:
        shift, scale, gate = modulation.block_rows(layer, 6)
        context_shift, context_scale = modulation.prompt[layer]
        (x,) = stream.normed((scale, shift))
        context = stream.modulated_context(constants.context, context_scale, context_shift)
        stream.add(attention(x, context, **how), gate)

    def _attend_across(
        self,
        layer: int,
        video: ResidualStream,
        audio: ResidualStream,
        constants: ForwardConstants,
        modulation: StepModulation,
        how: dict[str, Any],
    ) -> None:
        to_video, keep_video = constants.perturbation("a2v", layer)
        to_audio, keep_audio = constants.perturbation("v2a", layer)
        a2v = constants.video.enabled and not to_video
        v2a = constants.audio.enabled and not to_audio
        if not a2v and not v2a:
            return
        # Rows of a2v first. Both directions read the streams as they were before either was added, but for ComfyUI,
        # which feeds v2a with the video stream after a2v (transformer.md section 18.1).
        first_rows = [0] * a2v + [2] * v2a
        video_rows, audio_rows = (
            [_scale_shift(rows, layer, first) for first in first_rows] for rows in (modulation.video, modulation.audio)
        )
        in_turn = len(first_rows) == 2 and constants.compatibility == "comfyui"
        of_video = video.normed(*video_rows[:1]) if in_turn else video.normed(*video_rows)
        of_audio = audio.normed(*audio_rows)
        if a2v:
            out = self.audio_to_video_attn(
                of_video[0],
                of_audio[0],
                rope=constants.video.cross_rope,
                context_rope=constants.audio.cross_rope,
                **how,
            )
            video.add(out, _kept(modulation.video.cross_gate[layer], keep_video), per_sample=True)
            if in_turn:
                of_video = video.normed(video_rows[1])
        if v2a:
            out = self.video_to_audio_attn(
                of_audio[-1],
                of_video[-1],
                rope=constants.audio.cross_rope,
                context_rope=constants.video.cross_rope,
                **how,
            )
            audio.add(out, _kept(modulation.audio.cross_gate[layer], keep_audio), per_sample=True)

    def _feed_forward(
        self,
        feed_forward: FeedForward,
        layer: int,
        stream: ResidualStream,
        modulation: StreamModulation,
        fused: bool,
    ) -> None:
        shift, scale, gate = modulation.block_rows(layer, 3)
        (x,) = stream.normed((scale, shift))
        stream.add(feed_forward(x, fused=fused), gate)


def _table(rows: int, width: int) -> nn.Parameter:
    # Published in float32 beside bf16 weights; rounded to the activation dtype when the rows are made.
    return nn.Parameter(torch.empty(rows, width, dtype=torch.float32))


def _scale_shift(modulation: StreamModulation, layer: int, first: int) -> tuple[Tensor, Tensor]:
    scale, shift = modulation.cross_rows(layer, first)
    return scale, shift


def _kept(gate: Tensor, keep: Tensor | None) -> Tensor:
    """gate (1 or B, width) with the factors (B, 1, 1, 1) of a perturbation, 0 or 1: as good as multiplying what it
    gates."""
    return gate if keep is None else gate * keep.flatten(1)
