"""The networks of the conv video VAE, with the parameter names of the published file.

Source: video_vae.md sections 1-4.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..config import ConvVAEConfig, VideoEncoderConfig
from . import conv_pointwise
from .cells import Stride, patchify
from .conv_layers import Downsample, ResBlock, TemporalConv, Upsample
from .statistics import PerChannelStatistics
from .streaming import in_chunks, run_in_chunks

if TYPE_CHECKING:
    from .recording import PieceRecorder

PIXEL_CHANNELS = 3
_STRIDES: dict[str, Stride] = {"space": (1, 2, 2), "time": (2, 1, 1), "all": (2, 2, 2)}


@dataclass(frozen=True)
class BlockSpec:
    """One entry of up_blocks or down_blocks: ResBlocks of one width (stride (1, 1, 1)), or a change of grid."""

    in_channels: int
    out_channels: int
    stride: Stride
    num_res_blocks: int


def decoder_block_specs(config: ConvVAEConfig) -> tuple[BlockSpec, ...]:
    """up_blocks in the order of computation: the config lists them in encoder order."""
    width = config.decoder_base_channels
    for _, options in config.decoder_blocks:
        width *= options.get("multiplier", 1)
    specs = []
    for kind, options in reversed(config.decoder_blocks):
        spec = _block_spec(kind, options, width, width // options.get("multiplier", 1))
        specs.append(spec)
        width = spec.out_channels
    return tuple(specs)


def encoder_block_specs(config: VideoEncoderConfig) -> tuple[BlockSpec, ...]:
    """down_blocks in the order of computation."""
    width = config.base_channels
    specs = []
    for kind, options in config.blocks:
        spec = _block_spec(kind, options, width, width * options.get("multiplier", 1))
        specs.append(spec)
        width = spec.out_channels
    return tuple(specs)


def _block_spec(kind: str, options: Mapping[str, int], in_channels: int, out_channels: int) -> BlockSpec:
    if kind == "res_x":
        return BlockSpec(in_channels, in_channels, (1, 1, 1), options["num_layers"])
    return BlockSpec(in_channels, out_channels, _STRIDES[kind.split("_")[1]], 0)


class ResBlocks(nn.Module):
    """A row of ResBlocks of one width. A container for the names only: the stream runs its layers one by one."""

    def __init__(self, channels: int, count: int, *, causal: bool) -> None:
        super().__init__()
        self.res_blocks = nn.ModuleList(ResBlock(channels, causal=causal) for _ in range(count))


def layers_of(block: nn.Module) -> list[nn.Module]:
    return list(block.res_blocks) if isinstance(block, ResBlocks) else [block]


class ConvDecoder(nn.Module):
    """Latents to pixels: widths fall while the grid grows by 8 in time and 32 in space."""

    def __init__(self, config: ConvVAEConfig) -> None:
        super().__init__()
        specs = decoder_block_specs(config)
        causal = config.causal_decoder
        self.patch_size = config.patch_size
        self.conv_in = TemporalConv(config.latent_channels, specs[0].in_channels, causal=causal)
        self.up_blocks = nn.ModuleList(
            ResBlocks(spec.in_channels, spec.num_res_blocks, causal=causal)
            if spec.num_res_blocks
            else Upsample(spec.in_channels, spec.out_channels, spec.stride, causal=causal)
            for spec in specs
        )
        self.conv_out = TemporalConv(
            specs[-1].out_channels, PIXEL_CHANNELS * config.patch_size**2, causal=causal, activated=True
        )

    def layers(self) -> list[tuple[nn.Module, int]]:
        """(layer, frames at its input for one latent frame) in order, for run_in_chunks."""
        rate = 1
        layers: list[tuple[nn.Module, int]] = [(self.conv_in, rate)]
        for block in self.up_blocks:
            layers += [(layer, rate) for layer in layers_of(block)]
            if isinstance(block, Upsample):
                rate *= block.stride[0]
        return layers + [(self.conv_out, rate)]

    def forward(self, x: Tensor, chunk_frames: int, recorder: PieceRecorder | None = None) -> Iterator[Tensor]:
        """Denormalised latents (B, C, F, H, W) to unclamped pixels (B, 3, n, 32H, 32W) in the weights' dtype: the
        8(F-1)+1 frames piece after piece, chunk_frames latent frames at a time. recorder: see run_in_chunks."""
        pieces = run_in_chunks(self.layers(), in_chunks(x, chunk_frames), chunk_frames, recorder)
        # Not a loop: its variable would keep a piece alive while the next one is computed.
        return map(partial(conv_pointwise.unpatchify, patch=self.patch_size), pieces)


class ConvEncoder(nn.Module):
    """Pixels to latents, causal in time."""

    def __init__(self, config: VideoEncoderConfig) -> None:
        super().__init__()
        specs = encoder_block_specs(config)
        self.patch_size = config.patch_size
        self.time_factor = 1
        for spec in specs:
            self.time_factor *= spec.stride[0]
        self.conv_in = TemporalConv(PIXEL_CHANNELS * config.patch_size**2, config.base_channels, causal=True)
        self.down_blocks = nn.ModuleList(
            ResBlocks(spec.in_channels, spec.num_res_blocks, causal=True)
            if spec.num_res_blocks
            else Downsample(spec.in_channels, spec.out_channels, spec.stride)
            for spec in specs
        )
        # The last channel is one log-variance for all; only the means are used.
        self.conv_out = TemporalConv(specs[-1].out_channels, config.latent_channels + 1, causal=True, activated=True)

    def layers(self) -> list[tuple[nn.Module, int]]:
        """As ConvDecoder.layers."""
        rate = self.time_factor
        layers: list[tuple[nn.Module, int]] = [(self.conv_in, rate)]
        for block in self.down_blocks:
            layers += [(layer, rate) for layer in layers_of(block)]
            if isinstance(block, Downsample):
                rate //= block.stride[0]
        return layers + [(self.conv_out, rate)]

    def forward(self, pieces: Iterable[tuple[Tensor, bool]], chunk_frames: int) -> Iterator[Tensor]:
        """Pixels in [-1, 1] to means (B, C, n, H, W), not normalised, in pieces.

        pieces: (pixels (B, 3, n, 32H, 32W) in the weights' dtype, whether they are the last), 8k+1 frames in all.
        """
        patches = ((patchify(pixels, self.patch_size), last) for pixels, last in pieces)
        for moments in run_in_chunks(self.layers(), patches, chunk_frames):
            yield moments[:, :-1]


class ConvVideoVAE(nn.Module):
    """Decoder and latent statistics. Build it on the meta device; the loader places the weights."""

    def __init__(self, config: ConvVAEConfig) -> None:
        super().__init__()
        self.decoder = ConvDecoder(config)
        self.per_channel_statistics = PerChannelStatistics(config.latent_channels)

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype: that of the weights."""
        return self.decoder.conv_in.conv.weight.dtype

    def decode(self, latent: Tensor, chunk_frames: int, recorder: PieceRecorder | None = None) -> Iterator[Tensor]:
        """Normalised latents (B, C, F, H, W) on the weights' device to pixels, see ConvDecoder.forward."""
        _lay_out(self.decoder)
        return self.decoder(self.per_channel_statistics.denormalize(latent).to(self.dtype), chunk_frames, recorder)


class ConvVideoEncoder(nn.Module):
    """Encoder and latent statistics: the other half of the conv video VAE's file, and the same weights stand in that of
    the diffusion video VAE. A module of its own, because most renders need one half only (0.8 and 0.6 GB)."""

    def __init__(self, config: VideoEncoderConfig) -> None:
        super().__init__()
        self.encoder = ConvEncoder(config)
        self.per_channel_statistics = PerChannelStatistics(config.latent_channels)

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype: that of the weights."""
        return self.encoder.conv_in.conv.weight.dtype

    def encode(self, pieces: Iterable[tuple[Tensor, bool]], chunk_frames: int) -> Iterator[Tensor]:
        """Pixels, see ConvEncoder.forward, to normalised latents (B, C, n, H, W) in float32, in pieces."""
        _lay_out(self.encoder)
        for means in self.encoder(pieces, chunk_frames):
            yield self.per_channel_statistics.normalize(means)


def _lay_out(network: nn.Module) -> None:
    """Bring the weights of the convolutions into the layout of the activations, once: cuDNN would copy them in every
    call. Files hold them in PyTorch's own."""
    for conv in network.modules():
        if isinstance(conv, nn.Conv3d):
            layout = conv_pointwise.memory_format(conv.weight.device, conv.weight.dtype)
            if not conv.weight.is_contiguous(memory_format=layout):
                with torch.inference_mode(False):
                    weight = conv.weight.detach().contiguous(memory_format=layout)
                    conv.weight = nn.Parameter(weight, requires_grad=False)
