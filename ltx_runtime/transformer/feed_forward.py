"""The feed-forward of every block.

Source: transformer.md section 8.2.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _GeluProjection(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool):
        super().__init__()
        self.proj = nn.Linear(width, inner, bias=bias)

    def forward(self, x: Tensor, *, fused: bool) -> Tensor:
        if not fused:
            return F.gelu(self.proj(x), approximate="tanh")
        weight, bias = self.proj.weight, self.proj.bias
        if bias is None:
            bias = _zeros(weight.shape[0], weight.dtype, weight.device)
        # cuBLAS applies GELU(tanh) to its sums before it rounds them.
        return torch._addmm_activation(bias, x.flatten(0, 1), weight.t(), use_gelu=True).unflatten(0, x.shape[:2])


class FeedForward(nn.Module):
    """Linear, GELU(tanh), linear; four times as wide inside."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        # Entry 1 is the published dropout, which has no weights.
        self.net = nn.ModuleList(
            [_GeluProjection(width, 4 * width, bias), nn.Identity(), nn.Linear(4 * width, width, bias=bias)]
        )

    def forward(self, x: Tensor, *, fused: bool = False) -> Tensor:
        """(B, N, width) to the same. fused: GELU within the matrix product, on a GPU in bfloat16 or float16."""
        return self.net[2](self.net[0](x, fused=fused))


@functools.cache
def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The bias that the product with GELU wants and the picture's feed-forward has not: one for all blocks.

    Made in the pass before a capture, hence not in the capture's memory.
    """
    return torch.zeros(count, dtype=dtype, device=device)
