"""Rotary position tables: split halves, other frequencies in every head.

Built once per stage (they depend on grid, frame rate and appended tokens only) and laid out as (B, N, heads, half),
which is how the attention sees its queries and keys before it transposes views, so the step needs no copy.

Source: transformer.md section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeTable:
    """cos and sin, each (B or 1, N, heads, head_dim / 2) in the activation dtype, contiguous."""

    cos: Tensor
    sin: Tensor


def frequency_grid(theta: float, width: int, axes: int) -> Tensor:
    """Angular frequencies (width // (2*axes),) float32, computed in float64: theta^(k/(n-1)) * pi/2."""
    count = width // (2 * axes)
    exponents = torch.linspace(0, 1, count, dtype=torch.float64)
    return (torch.pow(theta, exponents) * (math.pi / 2)).to(torch.float32)


def rope_table(
    positions: Tensor, max_pos: Sequence[float], *, width: int, heads: int, theta: float, dtype: torch.dtype
) -> RopeTable:
    """cos and sin for tokens at the given points.

    positions: (B, axes, N) float32 points (interval midpoints, or token indices). max_pos: one value an axis, in the
    unit of positions. width: of all heads together. Angles are float32 whatever the dtype of the result.
    """
    axes = positions.shape[1]
    frequencies = frequency_grid(theta, width, axes).to(positions.device)
    scale = positions.new_tensor(tuple(max_pos))
    fractions = positions.transpose(1, 2) / scale  # (B, N, axes)
    # Frequency-major, axis-minor.
    angles = (frequencies[:, None] * (fractions[:, :, None, :] * 2 - 1)).flatten(2)
    # A width that the axes don't divide is filled up in front, in head 0, by entries that don't rotate (angle 0).
    angles = torch.nn.functional.pad(angles, (width // 2 - angles.shape[2], 0))
    angles = angles.unflatten(2, (heads, width // (2 * heads)))
    # Of one axis the angles inherit the strides of positions, tokens side by side.
    return RopeTable(cos=angles.cos().to(dtype).contiguous(), sin=angles.sin().to(dtype).contiguous())


def apply_rope(x: Tensor, table: RopeTable) -> Tensor:
    """Rotate x (B, N, heads, head_dim): with x = [a | b] in each head, [a cos - b sin | b cos + a sin].

    Three kernels: one product over all of x, then each half gets the other's share in place.
    """
    halves = x.unflatten(3, (2, -1))
    rotated = halves * table.cos.unsqueeze(3)
    first, second = halves.unbind(3)
    rotated.select(3, 0).addcmul_(second, table.sin, value=-1)
    rotated.select(3, 1).addcmul_(first, table.sin)
    return rotated.flatten(3)
