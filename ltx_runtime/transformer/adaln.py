"""Adaptive layer norm: from a noise level to shift, scale and gate rows.

Rows are made per distinct noise level before the loop, never per token: text-to-video has one level a step. They are
made for several steps at once, as (steps, rows, U, width), U the number of distinct levels.

Source: transformer.md section 6.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SINUSOID_WIDTH = 256


def sinusoid(timesteps: Tensor) -> Tensor:
    """(...) timesteps on the 0...1000 scale -> (..., 256) float32, cosines first."""
    half = SINUSOID_WIDTH // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timesteps.device) * -math.log(10000) / half
    angles = timesteps.to(torch.float32).unsqueeze(-1) * exponents.exp()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class _TimestepEmbedder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear_1 = nn.Linear(SINUSOID_WIDTH, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        return _step_by_step(self.linear_2, F.silu(_step_by_step(self.linear_1, features)))


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

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """features: (steps, U, 256), sinusoids in the weight dtype. Returns rows (steps, rows, U, width) and the
        embedding (steps, U, width)."""
        embedding = self.emb.timestep_embedder(features)
        rows = _step_by_step(self.linear, F.silu(embedding)).unflatten(2, (-1, self.width))
        return rows.transpose(1, 2), embedding


def _step_by_step(linear: nn.Linear, x: Tensor) -> Tensor:
    """linear of (steps, U, width), one product a step: the kernel of a product, and with it the bits, may depend on the
    number of rows, and a step must not depend on how many others are prepared with it."""
    return torch.stack([linear(rows) for rows in x.unbind()])


def stack_tables(tables: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The blocks' tables (rows, width) as one (blocks, rows, 1, width) in dtype."""
    return torch.stack(tables).to(dtype).unsqueeze(2)


def add_tables(tables: Tensor, rows: Tensor) -> Tensor:
    """Block tables (blocks, rows, 1, width) + shared rows (steps, rows, U, width) -> (steps, blocks, rows, U, width).

    Contiguous, so that a row is a (U, width) table.
    """
    return (tables + rows.unsqueeze(1)).contiguous()


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
