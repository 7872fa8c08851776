"""The mel VAE: latents (B, C, T, bins) to stereo log-mel and back. Time is the height of a picture, mel bins its width.

Source: audio.md sections 2 and 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import STEREO, AudioVAEConfig

PIXEL_NORM_EPS = 1e-6


def pixel_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean over channels of x^2 + 1e-6), reduced and scaled in float32. x: (B, C, T, M); returns x's dtype."""
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().div_(x.shape[1]).add_(PIXEL_NORM_EPS).rsqrt_()
    return torch.mul(x, scale, out=torch.empty_like(x))


class CausalConv(nn.Module):
    """Convolution that sees no later frame: zeros before the first frame in time, on both sides in mel.

    kernel 3, or 1 (a shortcut: no padding).
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, padding=(0, kernel // 2))
        self._past = kernel - 1

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 0, self._past, 0)) if self._past else x)


class ResBlock(nn.Module):
    """shortcut(x) + conv2(silu(pn(conv1(silu(pn(x))))))."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = CausalConv(in_channels, out_channels)
        self.conv2 = CausalConv(out_channels, out_channels)
        self.nin_shortcut = CausalConv(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(pixel_norm(x), inplace=True))
        hidden = self.conv2(F.silu(pixel_norm(hidden), inplace=True))
        return hidden.add_(x if self.nin_shortcut is None else self.nin_shortcut(x))


class Upsample(nn.Module):
    """Twice as many mel bins, and frames T -> 2T - 1: the first row would lie before the start."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))[:, :, 1:]


class Downsample(nn.Module):
    """Half as many mel bins, and frames 2T - 1 -> T."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 2, 0)))


class _Middle(nn.Module):
    """Two ResBlocks under the names that the file gives them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels, channels)
        self.block_2 = ResBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.block_1(x))


class _Level(nn.Module):
    """ResBlocks of one grid and the change to the next one, under the names that the file gives them."""

    def __init__(
        self, in_channels: int, out_channels: int, count: int, *, upsample: bool = False, downsample: bool = False
    ) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            ResBlock(in_channels if i == 0 else out_channels, out_channels) for i in range(count)
        )
        self.upsample = Upsample(out_channels) if upsample else None
        self.downsample = Downsample(out_channels) if downsample else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        change = self.upsample or self.downsample
        return x if change is None else change(x)


class MelDecoder(nn.Module):
    """Denormalised latents (B, C, T, bins) to natural log-mel (B, 2, 4T - 3, 4 bins), both in the weights' dtype."""

    def __init__(self, config: AudioVAEConfig) -> None:
        super().__init__()
        widths = [config.base_channels * multiplier for multiplier in config.channel_multipliers]
        self.conv_in = CausalConv(config.latent_channels, widths[-1])
        self.mid = _Middle(widths[-1])
        self.up = nn.ModuleList()
        for level, width in enumerate(widths):
            before = widths[min(level + 1, len(widths) - 1)]
            self.up.append(_Level(before, width, config.num_res_blocks + 1, upsample=level > 0))
        self.conv_out = CausalConv(widths[0], STEREO)

    def forward(self, latent: Tensor) -> Tensor:
        x = self.mid(self.conv_in(latent))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(pixel_norm(x), inplace=True))


class MelEncoder(nn.Module):
    """Log-mel (B, 2, T, M) to means and log-variances (B, 2C, about T / 4, M / 4), not normalised."""

    def __init__(self, config: AudioVAEConfig) -> None:
        super().__init__()
        widths = [config.base_channels * multiplier for multiplier in config.channel_multipliers]
        self.conv_in = CausalConv(STEREO, config.base_channels)
        self.down = nn.ModuleList()
        before = config.base_channels
        for level, width in enumerate(widths):
            self.down.append(_Level(before, width, config.num_res_blocks, downsample=level + 1 < len(widths)))
            before = width
        self.mid = _Middle(before)
        self.conv_out = CausalConv(before, 2 * config.latent_channels)

    def forward(self, mel: Tensor) -> Tensor:
        x = self.conv_in(mel)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(pixel_norm(self.mid(x)), inplace=True))


class LatentStatistics(nn.Module):
    """Mean and deviation of each (channel, mel bin), channel-major. The transformer works on normalised latents."""

    def __init__(self, channels: int, bins: int) -> None:
        super().__init__()
        # The file's names hold dashes, so no attribute syntax reaches them.
        self.register_parameter("mean-of-means", nn.Parameter(torch.empty(channels * bins)))
        self.register_parameter("std-of-means", nn.Parameter(torch.empty(channels * bins)))
        self._shape = (1, channels, 1, bins)

    def _float32(self, name: str) -> Tensor:
        return self.get_parameter(name).float().view(self._shape)

    def denormalize(self, latent: Tensor) -> Tensor:
        """latent * std + mean in float32. latent: (B, C, T, bins)."""
        return torch.addcmul(self._float32("mean-of-means"), latent.float(), self._float32("std-of-means"))

    def normalize(self, means: Tensor) -> Tensor:
        """(means - mean) / std in float32. means: (B, C, T, bins)."""
        return (means.float() - self._float32("mean-of-means")) / self._float32("std-of-means")


class MelVAE(nn.Module):
    """Encoder, decoder and latent statistics, computing in the weights' dtype."""

    def __init__(self, config: AudioVAEConfig) -> None:
        super().__init__()
        self.decoder = MelDecoder(config)
        self.encoder = MelEncoder(config)
        self.per_channel_statistics = LatentStatistics(config.latent_channels, config.latent_bins)
        self._latent_channels = config.latent_channels

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.conv_in.conv.weight.dtype

    def decode(self, latent: Tensor) -> Tensor:
        """Normalised latents (B, C, T, bins) to log-mel (B, 2, 4T - 3, 4 bins) float32."""
        return self.decoder(self.per_channel_statistics.denormalize(latent).to(self.dtype)).float()

    def encode(self, mel: Tensor) -> Tensor:
        """Log-mel (B, 2, T, M) to normalised latents (B, C, ceil(ceil(T / 2) / 2), M / 4) float32: the means."""
        moments = self.encoder(mel.to(self.dtype))
        return self.per_channel_statistics.normalize(moments[:, : self._latent_channels])
