"""Latent upsamplers: a network that doubles a video latent's height and width, or its frames, between two stages.

Source: upsampler_and_duration.md section 1.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint import CheckpointHeader, Progress, read_header
from .config import UpsamplerConfig
from .errors import NonFiniteError, ShapeError
from .resident_weights import ResidentModule
from .shapes import VideoLatentShape
from .timing import Timeline
from .video_vae.cells import depth_to_space

if TYPE_CHECKING:
    from .video_vae.statistics import PerChannelStatistics

PHASE = "upscale"
_GROUPS = 32
# Tensors of the enlarged grid alive at once: the stream, input and output of a convolution, each also as the
# channels-last copy that cuDNN works on, and a norm's result.
_ALIVE = 6
CUDNN_WORKSPACE_BYTES = 32 << 20  # cuDNN's, on an H200


def _conv(in_channels: int, out_channels: int) -> nn.Conv3d:
    # Zeros on every axis, time too: unlike the VAE's, these convolutions repeat no edge frames.
    return nn.Conv3d(in_channels, out_channels, 3, padding=1)


class ResBlock(nn.Module):
    """silu(norm2(conv2(silu(norm1(conv1(x))))) + x): the activation comes after the sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, channels)
        self.norm1 = nn.GroupNorm(_GROUPS, channels)
        self.conv2 = _conv(channels, channels)
        self.norm2 = nn.GroupNorm(_GROUPS, channels)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.norm1(self.conv1(x)), inplace=True)
        return F.silu(self.norm2(self.conv2(hidden)).add_(x), inplace=True)


class UpsamplerNetwork(nn.Module):
    """(B, C, F, H, W) to (B, C, F, 2H, 2W), or to (B, C, 2F-1, H, W), on latents that are not normalised.

    The norms take their statistics over the whole clip, so a clip can be cut neither in time nor in space.
    """

    def __init__(self, config: UpsamplerConfig) -> None:
        super().__init__()
        width = config.mid_channels
        self.spatial = config.spatial
        self.initial_conv = _conv(config.in_channels, width)
        self.initial_norm = nn.GroupNorm(_GROUPS, width)
        self.res_blocks = nn.ModuleList(ResBlock(width) for _ in range(config.num_blocks))
        grow = nn.Conv2d(width, 4 * width, 3, padding=1) if config.spatial else _conv(width, 2 * width)
        self.upsampler = nn.Sequential(grow)  # a sequence of one: the file's name is upsampler.0
        self.post_upsample_res_blocks = nn.ModuleList(ResBlock(width) for _ in range(config.num_blocks))
        self.final_conv = _conv(width, config.in_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.initial_norm(self.initial_conv(x)), inplace=True)
        for block in self.res_blocks:
            x = block(x)
        x = self._enlarge(x)
        for block in self.post_upsample_res_blocks:
            x = block(x)
        return self.final_conv(x)

    def _enlarge(self, x: Tensor) -> Tensor:
        if not self.spatial:
            return depth_to_space(self.upsampler(x), (2, 1, 1))[:, :, 1:]
        frames = self.upsampler(x.transpose(1, 2).flatten(0, 1))
        return F.pixel_shuffle(frames, 2).unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


def load_upsampler(
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    on_progress: Progress | None = None,
    timeline: Timeline | None = None,
) -> LatentUpsampler:
    """Open the file of a latent upsampler and place its weights on the device.

    dtype None keeps the file's dtypes; it is also the dtype of the activations. on_progress(done_bytes, total_bytes).
    Raises CheckpointError, also for an upsampler by another factor.
    """
    upsampler = LatentUpsampler(read_header(path), device=device, dtype=dtype)
    upsampler.ensure_resident(timeline, on_progress)
    return upsampler


class LatentUpsampler(ResidentModule):
    """The upsampler of one file. config.spatial tells which of the two it is."""

    def __init__(self, header: CheckpointHeader, *, device: torch.device | str, dtype: torch.dtype | None = None):
        """Checks the header; the weights are read by ensure_resident, at the latest in upscale."""
        self.config = UpsamplerConfig.from_header(header)
        prefix_map = {"": header.prefixes["latent_upsampler"]}
        super().__init__(header, lambda: UpsamplerNetwork(self.config), prefix_map, device=device, dtype=dtype)

    @property
    def words(self) -> str:
        return "spatial x2" if self.config.spatial else "temporal x2"

    def output_shape(self, latent_shape: Sequence[int]) -> VideoLatentShape:
        """Of the latent that upscale makes out of (B, C, F, H, W). Raises ShapeError for one that it can't upscale."""
        sizes = tuple(latent_shape)
        if len(sizes) != 5 or sizes[1] != self.config.in_channels or 0 in sizes:
            raise ShapeError(
                f"{self.header.path.name} upscales latents of shape (batch, {self.config.in_channels}, frames, height, "
                f"width), this one has shape {sizes}. Connect the video latent of an LTX sampler."
            )
        batch, channels, frames, height, width = sizes
        if self.config.mid_channels == _GROUPS and frames * height * width == 1:
            raise ShapeError(
                f"{self.header.path.name} normalises each channel by itself, and this latent of shape {sizes} has one "
                f"value in each. Upscale one of more frames or pixels."
            )
        if self.config.spatial:
            return VideoLatentShape(batch, channels, frames, 2 * height, 2 * width)
        return VideoLatentShape(batch, channels, 2 * frames - 1, height, width)

    def check(self, latent_shape: Sequence[int], statistics_channels: int) -> VideoLatentShape:
        """`output_shape`, for a latent of a video VAE with so many latent channels. Raises ShapeError also where the
        two don't go together. Reads no weights."""
        shape = self.output_shape(latent_shape)
        if statistics_channels != shape.channels:
            raise ShapeError(
                f"the video VAE's statistics have {statistics_channels} channels, the latent has {shape.channels}. "
                "Pick the video VAE that belongs to this latent."
            )
        return shape

    def activation_bytes(self, latent_shape: Sequence[int]) -> int:
        """Estimate of the device memory that upscale takes beside the weights. Reads neither weights nor device."""
        shape = self.output_shape(latent_shape)
        weight = self.header.tensors["initial_conv.weight"]
        item_bytes = self.dtype.itemsize if self.dtype else weight.num_bytes // weight.num_elements
        # Clips of a batch run one after the other; the dropped first frame of a temporal x2 is made all the same.
        frames = shape.frames + (0 if self.config.spatial else 1)
        return (
            _ALIVE * self.config.mid_channels * frames * shape.height * shape.width * item_bytes + CUDNN_WORKSPACE_BYTES
        )

    def compute(self, latent: Tensor, statistics: PerChannelStatistics) -> Tensor:
        """The device work of upscale, without host sync: capturable. latent: on the weights' device."""
        x = statistics.denormalize(latent).to(self.module.final_conv.weight.dtype)
        return statistics.normalize(self.module(x))

    def upscale(
        self,
        latent: Tensor,
        statistics: PerChannelStatistics,
        *,
        timeline: Timeline | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> Tensor:
        """Upscale a clean, normalised video latent.

        latent: (B, C, F, H, W) float on any device. statistics: of the video VAE that the latent belongs to
        (VideoVAE.statistics), on this device.
        Returns (B, C, F, 2H, 2W), or (B, C, 2F-1, H, W) from a temporal upsampler: float32, normalised, on the device.
        check_cancelled: called before every clip of the batch.
        Raises ShapeError before any work, CheckpointError, and NonFiniteError.
        """
        shape = self.check(latent.shape, statistics.channels)
        timeline = timeline or Timeline(None, device=self.device)
        self.ensure_resident(timeline)
        attrs = {"kind": self.words, "latent": list(latent.shape), "result": list(shape.as_tuple())}
        with torch.inference_mode(), timeline.phase(PHASE, **attrs):
            latent = latent.to(self.device)
            clips = []
            # One by one: a clip then is what it would be alone, and the batch takes no more memory than a clip.
            for clip in latent.split(1):
                if check_cancelled is not None:
                    check_cancelled()
                clips.append(self.compute(clip, statistics))
            result = torch.cat(clips)
            came, made = torch.stack([latent.isfinite().all(), result.isfinite().all()]).tolist()
        if not came:
            raise NonFiniteError(PHASE, "the latent is NaN or Inf, so what made it failed.")
        if not made:
            raise NonFiniteError(
                PHASE,
                f"the upscaled latent is NaN or Inf though the latent is finite: {self.header.path.name} is damaged, "
                "or the latent is far out of range.",
            )
        return result
