"""Mean and deviation of the latent channels: the border between the transformer's latents and those of the VAE.

Source: video_vae.md section 2.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checkpoint import CheckpointHeader, load_weights
from ..resident_weights import build_on_meta

PREFIX = "per_channel_statistics."


class PerChannelStatistics(nn.Module):
    """Mean and deviation per latent channel. The transformer works on normalised latents."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # The file's names hold dashes, so no attribute syntax reaches them.
        self.register_parameter("mean-of-means", nn.Parameter(torch.empty(channels)))
        self.register_parameter("std-of-means", nn.Parameter(torch.empty(channels)))

    @property
    def channels(self) -> int:
        return self.get_parameter("mean-of-means").shape[0]

    def _float32(self, name: str) -> Tensor:
        return self.get_parameter(name).float().view(1, -1, 1, 1, 1)

    def denormalize(self, latent: Tensor) -> Tensor:
        """latent * std + mean in float32. latent: (B, C, F, H, W)."""
        return torch.addcmul(self._float32("mean-of-means"), latent.float(), self._float32("std-of-means"))

    def normalize(self, means: Tensor) -> Tensor:
        """(means - mean) / std in float32. means: (B, C, F, H, W)."""
        return (means.float() - self._float32("mean-of-means")) / self._float32("std-of-means")


def load_statistics(
    header: CheckpointHeader, vae_prefix: str, channels: int, device: torch.device | str
) -> PerChannelStatistics:
    """Read the statistics alone, two short vectors, out of a video VAE file.

    vae_prefix: of the VAE's names in the file. Raises CheckpointError when they are missing or of another width.
    """
    statistics = build_on_meta(lambda: PerChannelStatistics(channels))
    load_weights(statistics, header, {"": vae_prefix + PREFIX}, device=device)
    return statistics
