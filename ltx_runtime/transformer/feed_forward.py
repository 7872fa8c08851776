"""The feed-forward of every block.

Source: transformer.md section 8.2.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class _GeluProjection(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool):
        super().__init__()
        self.proj = nn.Linear(width, inner, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """Linear, GELU(tanh), linear; four times as wide inside."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        # Entry 1 is the published dropout, which has no weights.
        self.net = nn.ModuleList(
            [_GeluProjection(width, 4 * width, bias), nn.Identity(), nn.Linear(4 * width, width, bias=bias)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[0](x))
