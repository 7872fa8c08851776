"""The conv video VAE as one module, with the parameter names of the published file.

Source: video_vae.md sections 1-4.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import ConvVAEConfig
from .conv_layers import Downsample, ResBlock, Stride, TemporalConv, Upsample, patchify, unpatchify
from .streaming import run_in_chunks

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


def encoder_block_specs(config: ConvVAEConfig) -> tuple[BlockSpec, ...]:
    """down_blocks in the order of computation."""
    width = config.encoder_base_channels
    specs = []
    for kind, options in config.encoder_blocks:
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


class PerChannelStatistics(nn.Module):
    """Mean and deviation per latent channel. The transformer works on normalised latents."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # The file's names hold dashes, so no attribute syntax reaches them.
        self.register_parameter("mean-of-means", nn.Parameter(torch.empty(channels)))
        self.register_parameter("std-of-means", nn.Parameter(torch.empty(channels)))

    def _float32(self, name: str) -> Tensor:
        return self.get_parameter(name).float().view(1, -1, 1, 1, 1)

    def denormalize(self, latent: Tensor) -> Tensor:
        """latent * std + mean in float32. latent: (B, C, F, H, W)."""
        return torch.addcmul(self._float32("mean-of-means"), latent.float(), self._float32("std-of-means"))

    def normalize(self, means: Tensor) -> Tensor:
        """(means - mean) / std in float32. means: (B, C, F, H, W)."""
        return (means.float() - self._float32("mean-of-means")) / self._float32("std-of-means")


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

    def forward(self, x: Tensor, chunk_frames: int) -> Iterator[Tensor]:
        """Denormalised latents (B, C, F, H, W) to unclamped pixels (B, 3, n, 32H, 32W) in the weights' dtype: the
        8(F-1)+1 frames piece after piece, chunk_frames latent frames at a time."""
        for patches in run_in_chunks(self.layers(), x, chunk_frames):
            yield unpatchify(patches, self.patch_size)


class ConvEncoder(nn.Module):
    """Pixels to latents, causal in time."""

    def __init__(self, config: ConvVAEConfig) -> None:
        super().__init__()
        specs = encoder_block_specs(config)
        self.patch_size = config.patch_size
        self.time_factor = 1
        for spec in specs:
            self.time_factor *= spec.stride[0]
        self.conv_in = TemporalConv(PIXEL_CHANNELS * config.patch_size**2, config.encoder_base_channels, causal=True)
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

    def forward(self, pixels: Tensor, chunk_frames: int) -> Iterator[Tensor]:
        """Pixels (B, 3, 8k+1, 32H, 32W) in [-1, 1] to means (B, C, n, H, W), not normalised, in pieces as
        ConvDecoder.forward."""
        for moments in run_in_chunks(self.layers(), patchify(pixels, self.patch_size), chunk_frames):
            yield moments[:, :-1]


class ConvVideoVAE(nn.Module):
    """Encoder, decoder and latent statistics. Build it on the meta device; the loader places the weights.

    with_encoder: False leaves the encoder out (0.64 GB of the published file) where only decoding is wanted.
    """

    def __init__(self, config: ConvVAEConfig, *, with_encoder: bool) -> None:
        super().__init__()
        self.encoder = ConvEncoder(config) if with_encoder else None
        self.decoder = ConvDecoder(config)
        self.per_channel_statistics = PerChannelStatistics(config.latent_channels)

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype: that of the weights."""
        return self.decoder.conv_in.conv.weight.dtype

    def decode(self, latent: Tensor, chunk_frames: int) -> Iterator[Tensor]:
        """Normalised latents (B, C, F, H, W) on the weights' device to pixels, see ConvDecoder.forward."""
        return self.decoder(self.per_channel_statistics.denormalize(latent).to(self.dtype), chunk_frames)

    def encode(self, pixels: Tensor, chunk_frames: int | None = None) -> Tensor:
        """Pixels (B, 3, F, Hpx, Wpx) in [-1, 1] to normalised latents (B, C, F', H, W) in float32.

        Frames beyond the last 8k+1 are dropped; Hpx and Wpx are multiples of 32.
        chunk_frames: latent frames at a time, None for the whole clip.
        Source: video_vae.md section 4.
        """
        factor = self.encoder.time_factor
        latent_frames = (pixels.shape[2] - 1) // factor + 1
        pixels = pixels[:, :, : (latent_frames - 1) * factor + 1].to(self.dtype)
        means = torch.cat(list(self.encoder(pixels, chunk_frames or latent_frames)), dim=2)
        return self.per_channel_statistics.normalize(means)
