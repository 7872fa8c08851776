"""Rotary positions of the diffusion decoder: adjacent pairs of a head's values turn with time, height or width.

Source: video_vae.md section 6.4.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BASE = 10000.0


def axis_widths(head_dim: int) -> tuple[int, int, int]:
    """How many of a head's values turn with (T, H, W), in this order: (16, 24, 24) of 64."""
    time = head_dim // 4 // 2 * 2
    if (head_dim - time) // 2 % 2:
        time -= 2
    space = (head_dim - time) // 2
    return time, space, space


@dataclass(frozen=True)
class RotaryTables:
    """cos and sin of one grid, float32, one after the other the tables (cells, pairs) of its axes, flat.

    grid: (T, H, W), positions count from 0 on each axis. pairs: of each axis.
    """

    cos: Tensor
    sin: Tensor
    grid: tuple[int, int, int]
    pairs: tuple[int, int, int]

    @classmethod
    def of(cls, grid: tuple[int, int, int], head_dim: int, device: torch.device) -> RotaryTables:
        angles = []
        widths = axis_widths(head_dim)
        for cells, width in zip(grid, widths):
            exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
            frequencies = torch.pow(_BASE, -exponents)
            positions = torch.arange(cells, dtype=torch.float32, device=device)
            angles.append((positions[:, None] * frequencies).flatten())
        flat = torch.cat(angles)
        return cls(flat.cos(), flat.sin(), tuple(grid), tuple(width // 2 for width in widths))

    def of_tokens(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each (stop - first, head_dim / 2), of these tokens of the grid, counted in the order T, H, W."""
        tokens = torch.arange(first, stop, device=self.cos.device)
        _, height, width = self.grid
        places = (tokens // (height * width), tokens // width % height, tokens % width)
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        start = 0
        for cells, pairs, place in zip(self.grid, self.pairs, places):
            for part, table in zip(parts, (self.cos, self.sin)):
                part.append(table[start : start + cells * pairs].view(cells, pairs)[place])
            start += cells * pairs
        return torch.cat(parts[0], dim=1), torch.cat(parts[1], dim=1)
