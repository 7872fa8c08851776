"""Cells of a finer grid as channels of a coarser one, and back. Plain views and copies of (B, C, F, H, W) tensors.

Source: video_vae.md section 2.
"""
from __future__ import annotations

from torch import Tensor

Stride = tuple[int, int, int]


def depth_to_space(x: Tensor, stride: Stride) -> Tensor:
    """(B, C*p1*p2*p3, F, H, W) -> (B, C, F*p1, H*p2, W*p3). Channel ((c*p1 + i)*p2 + j)*p3 + k goes to offset (i, j, k)
    of its cell."""
    p1, p2, p3 = stride
    batch, channels, frames, height, width = x.shape
    channels //= p1 * p2 * p3
    x = x.unflatten(1, (channels, p1, p2, p3)).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.reshape(batch, channels, frames * p1, height * p2, width * p3)


def space_to_depth(x: Tensor, stride: Stride) -> Tensor:
    """The inverse of depth_to_space."""
    p1, p2, p3 = stride
    batch, channels, frames, height, width = x.shape
    x = x.reshape(batch, channels, frames // p1, p1, height // p2, p2, width // p3, p3)
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(batch, channels * p1 * p2 * p3, frames // p1, height // p2, width // p3)


def unpatchify(x: Tensor, patch: int) -> Tensor:
    """(B, 3*p*p, F, H, W) -> pixels (B, 3, F, H*p, W*p). Channel (c*p + column)*p + row: unlike depth_to_space, the row
    offset is the fastest."""
    batch, channels, frames, height, width = x.shape
    channels //= patch**2
    x = x.unflatten(1, (channels, patch, patch)).permute(0, 1, 4, 5, 3, 6, 2)
    return x.reshape(batch, channels, frames, height * patch, width * patch)


def patchify(x: Tensor, patch: int) -> Tensor:
    """The inverse of unpatchify. The channels of a cell lie side by side in memory."""
    batch, channels, frames, height, width = x.shape
    x = x.reshape(batch, channels, frames, height // patch, patch, width // patch, patch)
    x = x.permute(0, 2, 3, 5, 1, 6, 4)
    return x.reshape(batch, frames, height // patch, width // patch, channels * patch**2).movedim(-1, 1)
