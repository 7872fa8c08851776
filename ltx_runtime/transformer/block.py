"""One of the 48 blocks: self attention, text attention, audio <-> video attention, feed-forward, for both streams.

Written for few launches and few passes over the video stream: norms feed one fused multiply-add, residuals are added in
place (the streams are the model's own tensors), and with one noise level a step every modulation row broadcasts.

Source: transformer.md section 8.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TransformerConfig
from .adaln import modulate, token_row
from .attention import Attention
from .feed_forward import FeedForward
from .inputs import ForwardConstants, StepModulation, StreamConstants, StreamModulation

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
        video: Tensor | None,
        audio: Tensor | None,
        constants: ForwardConstants,
        modulation: StepModulation,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Update both streams in place and return them: video (B, Nv, D), audio (B, Na, d), None where absent."""
        qk_eps = COMFYUI_QK_EPS if constants.compatibility == "comfyui" else self.eps
        if video is not None and constants.video.enabled:
            skip, keep = constants.perturbation("video_self", layer)
            args = (layer, video, constants.video, modulation.video, qk_eps)
            self._attend_self(self.attn1, *args, skip, keep)
            self._attend_text(self.attn2, *args)
        if audio is not None and constants.audio.enabled:
            skip, keep = constants.perturbation("audio_self", layer)
            args = (layer, audio, constants.audio, modulation.audio, qk_eps)
            self._attend_self(self.audio_attn1, *args, skip, keep)
            self._attend_text(self.audio_attn2, *args)
        if video is not None and audio is not None:
            self._attend_across(layer, video, audio, constants, modulation, qk_eps)
        if video is not None and constants.video.enabled:
            self._feed_forward(self.ff, layer, video, constants.video, modulation.video)
        if audio is not None and constants.audio.enabled:
            self._feed_forward(self.audio_ff, layer, audio, constants.audio, modulation.audio)
        return video, audio

    def _attend_self(
        self,
        attention: Attention,
        layer: int,
        x: Tensor,
        constants: StreamConstants,
        modulation: StreamModulation,
        qk_eps: float,
        skip: bool,
        keep: Tensor | None,
    ) -> None:
        shift, scale, gate = _rows(modulation.block_rows(layer, 0), constants)
        normed = modulate(self._norm(x), scale, shift)
        out = attention(normed, rope=constants.rope, bias=constants.attention_bias, qk_eps=qk_eps, skip=skip, keep=keep)
        x.addcmul_(out, gate)

    def _attend_text(
        self,
        attention: Attention,
        layer: int,
        x: Tensor,
        constants: StreamConstants,
        modulation: StreamModulation,
        qk_eps: float,
    ) -> None:
        shift, scale, gate = _rows(modulation.block_rows(layer, 6), constants)
        context_shift, context_scale = modulation.prompt[layer].unsqueeze(2).unbind(0)
        context = modulate(constants.context, context_scale, context_shift)
        out = attention(modulate(self._norm(x), scale, shift), context, qk_eps=qk_eps)
        x.addcmul_(out, gate)

    def _attend_across(
        self,
        layer: int,
        video: Tensor,
        audio: Tensor,
        constants: ForwardConstants,
        modulation: StepModulation,
        qk_eps: float,
    ) -> None:
        to_video, keep_video = constants.perturbation("a2v", layer)
        to_audio, keep_audio = constants.perturbation("v2a", layer)
        a2v = constants.video.enabled and not to_video
        v2a = constants.audio.enabled and not to_audio
        if not a2v and not v2a:
            return
        # Both directions read the streams as they were before either was added.
        normed_video, normed_audio = self._norm(video), self._norm(audio)
        if a2v:
            scale, shift = _rows(modulation.video.cross_rows(layer, 0), constants.video)
            context_scale, context_shift = _rows(modulation.audio.cross_rows(layer, 0), constants.audio)
            out = self.audio_to_video_attn(
                modulate(normed_video, scale, shift),
                modulate(normed_audio, context_scale, context_shift),
                rope=constants.video.cross_rope,
                context_rope=constants.audio.cross_rope,
                qk_eps=qk_eps,
            )
            if keep_video is not None:
                out = out.mul_(keep_video.squeeze(-1))
            video.addcmul_(out, modulation.video.cross_gate[layer].unsqueeze(1))
            if v2a and constants.compatibility == "comfyui":
                # ComfyUI feeds v2a with the video stream after a2v (transformer.md section 18.1).
                normed_video = self._norm(video)
        if v2a:
            scale, shift = _rows(modulation.audio.cross_rows(layer, 2), constants.audio)
            context_scale, context_shift = _rows(modulation.video.cross_rows(layer, 2), constants.video)
            out = self.video_to_audio_attn(
                modulate(normed_audio, scale, shift),
                modulate(normed_video, context_scale, context_shift),
                rope=constants.audio.cross_rope,
                context_rope=constants.video.cross_rope,
                qk_eps=qk_eps,
            )
            if keep_audio is not None:
                out = out.mul_(keep_audio.squeeze(-1))
            audio.addcmul_(out, modulation.audio.cross_gate[layer].unsqueeze(1))

    def _feed_forward(
        self,
        feed_forward: FeedForward,
        layer: int,
        x: Tensor,
        constants: StreamConstants,
        modulation: StreamModulation,
    ) -> None:
        shift, scale, gate = _rows(modulation.block_rows(layer, 3), constants)
        x.addcmul_(feed_forward(modulate(self._norm(x), scale, shift)), gate)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps)


def _table(rows: int, width: int) -> nn.Parameter:
    # Published in float32 beside bf16 weights; rounded to the activation dtype when the rows are made.
    return nn.Parameter(torch.empty(rows, width, dtype=torch.float32))


def _rows(rows: Tensor, constants: StreamConstants) -> list[Tensor]:
    return [token_row(row, constants.timestep_index) for row in rows.unbind(0)]
