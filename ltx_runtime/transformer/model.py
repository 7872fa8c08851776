"""The LTX denoiser: an audio and a video stream through the same blocks.

Three calls make a step. `prepare` turns a stage's tokens and contexts into constants, once a stage. `modulations` turns
the sigmas of all steps into AdaLN rows, before the loop. `forward` is pure device work: no host sync, no random
numbers, no host tensor, no branch on data. It is what gets captured.

Source: transformer.md; sections are named at each part. Where ComfyUI deviates (18.1 to 18.3) the reference is followed
unless compatibility says "comfyui".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..conditioning import TokenState
from ..config import ConnectorConfig, TransformerConfig
from ..errors import CheckpointError, RequestError, ShapeError
from ..tensor_tree import map_tensors
from ..triton_use import on_device
from .adaln import AdaLayerNormSingle, add_tables, sinusoid, stack_tables
from .block import COMFYUI_QK_EPS, TransformerBlock
from .connector import Connector
from .inputs import (
    PERTURBATION_KINDS,
    ForwardConstants,
    GuideBias,
    StepModulation,
    StreamConstants,
    StreamModulation,
    perturbation_mode,
)
from .residual import ResidualStream, refusal
from .rope import RopeTable, rope_table

COMPATIBILITIES = ("reference", "comfyui")
# Prompts are tokenised to 1024; longer ones (ComfyUI only) extend the context in whole register sets.
CONTEXT_LENGTH = 1024
_SAME_LEVEL = 1e-6
# Above this many noise levels a step's rows are made block by block: at 22B rows for all blocks take 5 MB a level.
MANY_LEVELS = 16
# Rows of a block's tables: those of its own stream, and the first of its cross attention's (the last is the gate).
_BLOCK_ROWS, _CROSS_ROWS = 9, 4


class LTXTransformer(nn.Module):
    """Build on the meta device and load strictly: parameter names are the file's, minus `model.diffusion_model.`."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        video, audio = config.video_width, config.audio_width

        self.patchify_proj = nn.Linear(config.in_channels, video)
        self.audio_patchify_proj = nn.Linear(config.audio_in_channels, audio)
        self.keyframes_abs_pos_embedding = nn.Parameter(torch.empty(1, video)) if config.keyframe_embedding else None

        self.adaln_single = AdaLayerNormSingle(video, _BLOCK_ROWS)
        self.audio_adaln_single = AdaLayerNormSingle(audio, _BLOCK_ROWS)
        self.prompt_adaln_single = AdaLayerNormSingle(video, 2) if config.prompt_adaln else None
        self.audio_prompt_adaln_single = AdaLayerNormSingle(audio, 2) if config.prompt_adaln else None
        self.av_ca_video_scale_shift_adaln_single = AdaLayerNormSingle(video, _CROSS_ROWS)
        self.av_ca_audio_scale_shift_adaln_single = AdaLayerNormSingle(audio, _CROSS_ROWS)
        self.av_ca_a2v_gate_adaln_single = AdaLayerNormSingle(video, 1)
        self.av_ca_v2a_gate_adaln_single = AdaLayerNormSingle(audio, 1)

        self.transformer_blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))

        # Published in float32 beside bf16 weights, like the blocks' tables.
        self.scale_shift_table = nn.Parameter(torch.empty(2, video, dtype=torch.float32))
        self.audio_scale_shift_table = nn.Parameter(torch.empty(2, audio, dtype=torch.float32))
        self.proj_out = nn.Linear(video, config.out_channels)
        self.audio_proj_out = nn.Linear(audio, config.audio_out_channels)

        self.video_embeddings_connector = self._connector(config.video_connector)
        self.audio_embeddings_connector = self._connector(config.audio_connector)
        # Inference only; the blocks add residuals in place.
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype: that of the weights."""
        return self.patchify_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.patchify_proj.weight.device

    def fused_refusal(self) -> str | None:
        """Why plain torch, not our kernels, stands between the matrix products; None where they do (residual.py)."""
        c = self.config
        heads = ((c.video_heads, c.video_head_dim), (c.audio_heads, c.audio_head_dim))
        return refusal(self.device, self.dtype, heads)

    def connect_text(
        self,
        features: Tensor,
        mask: Tensor | None = None,
        *,
        length: int | None = None,
        compatibility: str = "reference",
    ) -> tuple[Tensor, Tensor]:
        """Run the connectors: unprocessed text features to the contexts of both streams (section 7).

        features: (B, n, video + audio feature width), any float dtype. mask: (B, n), nonzero = a real token (padding is
        0); None = all real. length: of the contexts, by default 1024 and whole register sets beyond.
        Returns (video context (B, length, D), audio context (B, length, d)) in the activation dtype.
        Raises ShapeError for features of another width, CheckpointError when the file holds no connectors.
        """
        _check_compatibility(compatibility)
        video, audio = self.video_embeddings_connector, self.audio_embeddings_connector
        if video is None or audio is None:
            raise CheckpointError(
                "this transformer file has no text connectors ({video,audio}_embeddings_connector.*),"
                " so it can't use unprocessed text features. Use the published file, or conditioning that is processed."
            )
        widths = [video.config.width, audio.config.width]
        if features.ndim != 3 or features.shape[2] != sum(widths):
            raise ShapeError(
                f"text features have shape {tuple(features.shape)}, this model needs (B, tokens, {sum(widths)}) = "
                f"{widths[0]} video + {widths[1]} audio. Encode the prompt with the text encoder of this model."
            )
        features = features.to(device=self.device)
        batch, tokens, _ = features.shape
        if mask is None:
            lengths = torch.full((batch,), tokens, device=self.device)
        else:
            valid = mask.to(device=self.device) != 0
            lengths = valid.sum(dim=1)
            order = torch.argsort((~valid).to(torch.uint8), dim=1, stable=True)
            features = features.gather(1, order.unsqueeze(-1).expand_as(features))
        if length is None:
            registers = video.config.num_registers
            length = -(-max(CONTEXT_LENGTH, tokens) // registers) * registers
        qk_eps = COMFYUI_QK_EPS if compatibility == "comfyui" else None
        video_features, audio_features = features.split(widths, dim=2)
        return video(video_features, lengths, length, qk_eps), audio(audio_features, lengths, length, qk_eps)

    def prepare(
        self,
        *,
        video: TokenState | None,
        audio: TokenState | None,
        video_context: Tensor | None,
        audio_context: Tensor | None,
        video_enabled: bool = True,
        audio_enabled: bool = True,
        perturbations: Tensor | Sequence | None = None,
        per_sample_sigma: bool = False,
        compatibility: str = "reference",
    ) -> ForwardConstants:
        """Everything constant through a stage. May wait for the device; runs before the loop.

        video, audio: the streams present. *_context: (B or 1, S, context width), connector output; needed by an enabled
        stream. A stream present but not enabled feeds the other one and is not updated. perturbations: (4, layers, B)
        in PERTURBATION_KINDS order, 1 = keep, 0 = perturb (section 13). per_sample_sigma: samples may differ in sigma.
        Raises RequestError when there is nothing to denoise or a setting is unknown, ShapeError for contexts of another
        width or batch.
        """
        _check_compatibility(compatibility)
        if video is None and audio is None:
            raise RequestError("nothing to denoise: give a video latent, an audio latent, or both.")
        both = video is not None and audio is not None
        batch = (video or audio).shape.batch
        if both and audio.shape.batch != batch:
            raise ShapeError(f"video batch {batch} and audio batch {audio.shape.batch} differ. Use equal batch sizes.")
        modes, keep = self._perturbations(perturbations, batch)
        c = self.config

        def stream(state: TokenState | None, sizes: _StreamSizes, context: Tensor | None, enabled: bool):
            if state is None:
                return None
            context = self._context(context, sizes, batch) if enabled else None
            return self._stream_constants(state, sizes, context, enabled, both, per_sample_sigma, compatibility)

        video_sizes = _StreamSizes("video", c.video_width, c.video_heads, c.context_width, c.video_max_pos)
        audio_sizes = _StreamSizes("audio", c.audio_width, c.audio_heads, c.audio_context_width, c.audio_max_pos)
        return ForwardConstants(
            video=stream(video, video_sizes, video_context, video_enabled),
            audio=stream(audio, audio_sizes, audio_context, audio_enabled),
            perturbation_modes=modes,
            perturbation_keep=keep,
            num_sigmas=batch if per_sample_sigma else 1,
            compatibility=compatibility,
            fused=self.fused_refusal() is None,
        )

    def modulation(
        self, constants: ForwardConstants, sigma: Tensor, sigma_audio: Tensor | None = None
    ) -> StepModulation:
        """AdaLN rows of one step, see modulations; sigmas without the axis of steps."""
        audio = None if sigma_audio is None else sigma_audio.reshape(1, -1)
        return self.modulations(constants, sigma.reshape(1, -1), audio)[0]

    def modulations(
        self, constants: ForwardConstants, sigmas: Tensor, audio_sigmas: Tensor | None = None
    ) -> list[StepModulation]:
        """AdaLN rows of several steps for all blocks (section 6), per distinct noise level. Runs before the loop.

        sigmas: (steps, 1) float32, or (steps, B) with per_sample_sigma, of both streams; of video only when
        audio_sigmas is given. A frozen stream (given sound) has denoise mask 0 and sigma 0. A step's rows have the same
        bits whatever the other steps; they are views of tensors that all steps share.
        Raises ShapeError for another number of sigmas.
        """
        given = {}
        if constants.video is not None:
            given["video"] = self._sigmas(sigmas, constants)
        if constants.audio is not None:
            given["audio"] = self._sigmas(sigmas if audio_sigmas is None else audio_sigmas, constants)
        both = len(given) == 2
        # The scalar level of each stream, which modulates its prompt and gates the other stream's cross attention.
        scalars, gates = dict(given), dict(given)
        if constants.compatibility == "comfyui":
            # ComfyUI takes the largest token level: own sample's for prompts, the whole batch's for gates (18.3).
            for name, stream in (("video", constants.video), ("audio", constants.audio)):
                if stream is not None:
                    scalars[name] = given[name] * stream.max_mask
                    gates[name] = scalars[name].amax(dim=1, keepdim=True)

        blocks = self.transformer_blocks
        video = audio = None
        if constants.video is not None:
            video = self._stream_modulation(
                levels=_levels(given["video"], constants.video),
                scalar=scalars["video"],
                gate=gates["audio"] if both else None,
                adaln=self.adaln_single,
                prompt_adaln=self.prompt_adaln_single,
                cross_adaln=self.av_ca_video_scale_shift_adaln_single,
                gate_adaln=self.av_ca_a2v_gate_adaln_single,
                tables=[block.scale_shift_table for block in blocks],
                prompt_tables=[block.prompt_scale_shift_table for block in blocks],
                cross_tables=[block.scale_shift_table_a2v_ca_video for block in blocks],
                output_table=self.scale_shift_table,
            )
        if constants.audio is not None:
            audio = self._stream_modulation(
                levels=_levels(given["audio"], constants.audio),
                scalar=scalars["audio"],
                gate=gates["video"] if both else None,
                adaln=self.audio_adaln_single,
                prompt_adaln=self.audio_prompt_adaln_single,
                cross_adaln=self.av_ca_audio_scale_shift_adaln_single,
                gate_adaln=self.av_ca_v2a_gate_adaln_single,
                tables=[block.audio_scale_shift_table for block in blocks],
                prompt_tables=[block.audio_prompt_scale_shift_table for block in blocks],
                cross_tables=[block.scale_shift_table_a2v_ca_audio for block in blocks],
                output_table=self.audio_scale_shift_table,
            )
        together = StepModulation(video=video, audio=audio)
        return [map_tensors(lambda _, rows, step=step: rows[step], together) for step in range(sigmas.shape[0])]

    def modulation_bytes(self, constants: ForwardConstants) -> int:
        """Memory of one step's AdaLN rows, about: of those that grow with the number of noise levels."""
        rows = 0
        for stream, width in ((constants.video, self.config.video_width), (constants.audio, self.config.audio_width)):
            if stream is not None:
                levels = stream.mask_values.numel() * constants.num_sigmas
                blocks = 1 if levels > MANY_LEVELS else len(self.transformer_blocks)
                rows += levels * blocks * (_BLOCK_ROWS + _CROSS_ROWS) * width
        return rows * self.dtype.itemsize

    def forward(
        self,
        video_tokens: Tensor | None,
        audio_tokens: Tensor | None,
        constants: ForwardConstants,
        modulation: StepModulation,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Velocities of one step: noise - clean, so x0 = x - tau * velocity per token.

        video_tokens: (B, Nv, C), audio_tokens: (B, Na, C), any float dtype; None where absent. Returns the same shapes
        in the activation dtype. The captured region: nothing here touches the host.
        """
        with on_device(self.device):
            video = audio = None
            if video_tokens is not None:
                x = self.patchify_proj(video_tokens.to(self.dtype))
                if constants.video.keyframe_marker is not None:
                    x.addcmul_(constants.video.keyframe_marker, self.keyframes_abs_pos_embedding)
                video = self._stream(x, constants.video, constants.fused)
            if audio_tokens is not None:
                x = self.audio_patchify_proj(audio_tokens.to(self.dtype))
                audio = self._stream(x, constants.audio, constants.fused)
            for layer, block in enumerate(self.transformer_blocks):
                block(layer, video, audio, constants, modulation)
            return (
                None if video is None else _output(video, modulation.video, self.proj_out),
                None if audio is None else _output(audio, modulation.audio, self.audio_proj_out),
            )

    def _stream(self, x: Tensor, constants: StreamConstants, fused: bool) -> ResidualStream:
        return ResidualStream(x, constants.timestep_index, self.config.norm_eps, fused)

    def _connector(self, config: ConnectorConfig | None) -> Connector | None:
        return None if config is None else Connector(config, self.config.norm_eps, self.config.rope_theta)

    def _stream_constants(
        self,
        state: TokenState,
        sizes: _StreamSizes,
        context: Tensor | None,
        enabled: bool,
        cross: bool,
        per_sample_sigma: bool,
        compatibility: str,
    ) -> StreamConstants:
        c = self.config
        starts, ends = _shared(state.positions).to(self.device, torch.float32).unbind(dim=-1)
        midpoints = (starts + ends) / 2
        # Both streams' times go through one scale, so that equal times get equal angles.
        cross_max_pos = (max(c.video_max_pos[0], c.audio_max_pos[0]),)
        mask = state.denoise_mask.squeeze(-1).to(self.device, torch.float32)
        if compatibility == "comfyui":
            # ComfyUI casts the mask to the model's dtype before it makes noise levels of it.
            mask = mask.to(self.dtype).to(torch.float32)
        values, index = _noise_levels(mask, per_sample_sigma)
        return StreamConstants(
            context=context,
            rope=self._rope(midpoints, sizes.max_pos, sizes.width, sizes.heads),
            cross_rope=self._rope(midpoints[:, :1], cross_max_pos, c.audio_width, c.audio_heads) if cross else None,
            keyframe_marker=self._keyframe_marker(state),
            attention_bias=self._attention_bias(state),
            mask_values=values,
            timestep_index=index,
            max_mask=_shared(mask.amax(dim=1)) if compatibility == "comfyui" else None,
            enabled=enabled,
        )

    def _rope(self, midpoints: Tensor, max_pos: Sequence[float], width: int, heads: int) -> RopeTable:
        return rope_table(midpoints, max_pos, width=width, heads=heads, theta=self.config.rope_theta, dtype=self.dtype)

    def _context(self, context: Tensor | None, sizes: _StreamSizes, batch: int) -> Tensor:
        if context is None:
            raise RequestError(f"the {sizes.name} stream is to be denoised but has no {sizes.name} text context.")
        if context.ndim != 3 or context.shape[0] not in (1, batch) or context.shape[2] != sizes.context_width:
            raise ShapeError(
                f"{sizes.name} text context has shape {tuple(context.shape)}, this model needs "
                f"({batch} or 1, tokens, {sizes.context_width})."
            )
        return context.to(self.device, self.dtype).expand(batch, -1, -1).contiguous()

    def _keyframe_marker(self, state: TokenState) -> Tensor | None:
        if self.keyframes_abs_pos_embedding is None or state.keyframe_marker is None:
            return None
        return _shared(state.keyframe_marker).to(self.device, self.dtype)

    def _attention_bias(self, state: TokenState) -> Tensor | GuideBias | None:
        """ln(strength) (section 11), the most negative finite value where the strength is 0."""

        def bias_of(strength: Tensor) -> Tensor:
            strength = strength.to(self.device, torch.float32)
            return torch.where(strength > 0, strength.log(), torch.finfo(self.dtype).min).to(self.dtype)

        if state.guide_strength is not None:
            bias, targets = bias_of(state.guide_strength), state.tokens - state.guide_strength.numel()
            keys = torch.cat((bias.new_zeros(targets), bias))
            queries = torch.cat((bias[:, None].expand(-1, targets), bias.new_zeros(bias.numel(), bias.numel())), dim=1)
            return GuideBias(keys[None, None, None], queries[None, None].contiguous())
        if state.attention_strength is None:
            return None
        return bias_of(_shared(state.attention_strength)).unsqueeze(1)

    def _perturbations(
        self, perturbations: Tensor | Sequence | None, batch: int
    ) -> tuple[tuple[tuple[str, ...], ...] | None, Tensor | None]:
        if perturbations is None:
            return None, None
        keep = torch.as_tensor(perturbations).to("cpu", torch.float32)
        expected = (len(PERTURBATION_KINDS), self.config.num_layers, batch)
        if tuple(keep.shape) != expected:
            raise ShapeError(
                f"perturbations have shape {tuple(keep.shape)}, expected {expected} = (kinds, layers, batch)."
            )
        modes = tuple(tuple(perturbation_mode(samples) for samples in kind) for kind in keep.tolist())
        if any("mix" in kind for kind in modes):
            return modes, keep.to(self.device, self.dtype)[..., None, None, None]
        return modes, None

    def _sigmas(self, sigmas: Tensor, constants: ForwardConstants) -> Tensor:
        """(steps, num_sigmas) float32 on the device."""
        if sigmas.shape[1] != constants.num_sigmas:
            raise ShapeError(
                f"{sigmas.shape[1]} sigmas for a step prepared for {constants.num_sigmas} (see per_sample_sigma)."
            )
        return sigmas.to(self.device, torch.float32)

    def _stream_modulation(
        self,
        *,
        levels: Tensor,
        scalar: Tensor,
        gate: Tensor | None,
        adaln: AdaLayerNormSingle,
        prompt_adaln: AdaLayerNormSingle | None,
        cross_adaln: AdaLayerNormSingle,
        gate_adaln: AdaLayerNormSingle,
        tables: list[Tensor],
        prompt_tables: list[Tensor],
        cross_tables: list[Tensor],
        output_table: Tensor,
    ) -> StreamModulation:
        """Of all steps together: every tensor has an axis of steps in front. levels, scalar, gate: (steps, ...)."""
        steps, dtype = levels.shape[0], self.dtype
        many = levels.shape[1] > MANY_LEVELS
        timesteps = [levels * self.config.timestep_scale, scalar * self.config.timestep_scale]
        if gate is not None:
            timesteps.append(gate * self.config.av_ca_timestep_scale)
        widths = [part.shape[1] for part in timesteps]
        of_levels, of_scalar, *of_gate = sinusoid(torch.cat(timesteps, dim=1)).to(dtype).split(widths, dim=1)

        def of_all_steps(table: Tensor) -> Tensor:
            return table.expand(steps, *table.shape)

        rows, embedding = adaln(of_levels)
        tables = stack_tables(tables, dtype)
        if many:
            blocks, block_tables = rows[:, None].contiguous(), of_all_steps(tables)
        else:
            blocks, block_tables = add_tables(tables, rows), None
            blocks[:, :, 1::3].add_(1)

        prompt = stack_tables(prompt_tables, dtype)
        if prompt_adaln is None:
            prompt = of_all_steps(torch.cat((prompt[:, :1], prompt[:, 1:] + 1), dim=1))
        else:
            prompt = add_tables(prompt, prompt_adaln(of_scalar)[0])
            prompt[:, :, 1].add_(1)

        cross = cross_gate = own_cross_tables = None
        if gate is not None:
            tables = stack_tables(cross_tables, dtype)
            scale_shift_tables, gate_tables = tables[:, :_CROSS_ROWS], tables[:, _CROSS_ROWS:]
            cross_rows = cross_adaln(of_levels)[0]
            if many:
                cross = cross_rows[:, None].contiguous()
                own_cross_tables = of_all_steps(scale_shift_tables.contiguous())
            else:
                cross = add_tables(scale_shift_tables, cross_rows)
                cross[:, :, 0::2].add_(1)
            cross_gate = add_tables(gate_tables, gate_adaln(*of_gate)[0]).squeeze(2)

        output = output_table.to(dtype).unsqueeze(1) + embedding.unsqueeze(1)
        output[:, 1].add_(1)
        return StreamModulation(
            blocks=blocks,
            prompt=prompt,
            cross=cross,
            cross_gate=cross_gate,
            output=output,
            block_tables=block_tables,
            cross_tables=own_cross_tables,
        )


def _output(stream: ResidualStream, modulation: StreamModulation, proj: nn.Linear) -> Tensor:
    shift, scale = modulation.output
    (x,) = stream.normed((scale, shift), norm="layer")
    return proj(x)


class _StreamSizes(NamedTuple):
    name: str
    width: int
    heads: int
    context_width: int
    max_pos: tuple[float, ...]


def _check_compatibility(compatibility: str) -> None:
    if compatibility not in COMPATIBILITIES:
        raise RequestError(f"compatibility={compatibility!r} is unknown. Use one of {', '.join(COMPATIBILITIES)}.")


def _shared(tensor: Tensor) -> Tensor:
    """One batch entry where all are equal: it broadcasts, and moves fewer bytes every step."""
    return tensor[:1] if bool((tensor == tensor[:1]).all()) else tensor


def _levels(sigmas: Tensor, stream: StreamConstants) -> Tensor:
    """Distinct noise levels (steps, U), in the order that timestep_index points into."""
    return (sigmas.unsqueeze(-1) * stream.mask_values).flatten(1)


def _noise_levels(mask: Tensor, per_sample_sigma: bool) -> tuple[Tensor, Tensor | None]:
    """Distinct values (M,) of a denoise mask (B, N), and each token's noise level (see StreamConstants.timestep_index).

    With a sigma per sample the levels of sample b stand at b*M ... b*M + M-1.
    """
    low, high = torch.aminmax(mask)
    if bool(low == high):
        return low.reshape(1), None
    values, index = torch.unique(mask, return_inverse=True)
    # A resized mask holds one value as several that differ by rounding: one level, so that the key stays the same.
    steps = values.diff() > _SAME_LEVEL
    starts = torch.cat((steps.new_ones(1), steps))
    values, index = values[starts], (starts.cumsum(0) - 1)[index]
    if values.numel() == 1:
        return values, None
    if per_sample_sigma:
        samples = torch.arange(mask.shape[0], device=mask.device)
        return values, index + samples[:, None] * values.numel()
    return values, _shared(index)
