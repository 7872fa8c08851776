"""Adaptive layer norm: from a noise level to shift, scale and gate rows.

Rows are made per distinct noise level before the loop, never per token: text-to-video has one level a step. A row set
stands as (rows, U, width), U the number of distinct levels.

Source: transformer.md section 6.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SINUSOID_WIDTH = 256


def sinusoid(timesteps: Tensor) -> Tensor:
    """(n,) timesteps on the 0...1000 scale -> (n, 256) float32, cosines first."""
    half = SINUSOID_WIDTH // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timesteps.device) * -math.log(10000) / half
    angles = timesteps.to(torch.float32)[:, None] * exponents.exp()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class _TimestepEmbedder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear_1 = nn.Linear(SINUSOID_WIDTH, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(features)))


class _Embedding(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.timestep_embedder = _TimestepEmbedder(width)


class AdaLayerNormSingle(nn.Module):
    """Timesteps -> modulation rows shared by all blocks; each block adds its own table."""

    def __init__(self, width: int, rows: int):
        super().__init__()
        self.width = width
        self.emb = _Embedding(width)
        self.linear = nn.Linear(width, rows * width)

    def forward(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """timesteps: (U,) float32, 0...1000. Returns rows (rows, U, width) and the embedding (U, width)."""
        embedding = self.emb.timestep_embedder(sinusoid(timesteps).to(self.linear.weight.dtype))
        rows = self.linear(F.silu(embedding)).unflatten(1, (-1, self.width))
        return rows.transpose(0, 1), embedding


def add_tables(tables: list[Tensor], rows: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Block tables (rows, width) each + shared rows (rows, U, width) -> (blocks, rows, U, width), in dtype.

    Without rows (prompt AdaLN off) the tables alone, U = 1. Contiguous, so that a row is a (U, width) table.
    """
    stacked = torch.stack(tables).to(dtype).unsqueeze(2)
    return stacked.contiguous() if rows is None else (stacked + rows).contiguous()


def token_row(row: Tensor, index: Tensor | None) -> Tensor:
    """One modulation row (U, width), ready to broadcast over tokens (B, N, width).

    index: (B or 1, N) into U, or None when every token of a sample shares its level (U is 1 or B).
    """
    if index is None:
        return row.unsqueeze(1)
    return row.index_select(0, index.flatten()).unflatten(0, index.shape)


def modulate(x: Tensor, one_plus_scale: Tensor, shift: Tensor) -> Tensor:
    """x * (1 + scale) + shift in one pass."""
    return torch.addcmul(shift, x, one_plus_scale)
