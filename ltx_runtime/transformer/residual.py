"""A stream between the matrix products of the blocks: norms, modulation and gated residuals.

Plain torch makes three passes over the stream of what stands between two parts of a block: add, norm, modulate. On a
GPU that Triton knows it is one (residual_kernels.py): a part's output is not added at once but by the next norm, which
reads the stream anyway, also from one block to the next. That pass takes each token's modulation rows from the tables
of the noise levels itself, computes in float32 and rounds once where the plain path rounds after every operation.

Which of the two it is, is decided once for a stage (`refusal`) and stands in ForwardConstants.fused, for attention and
feed-forward too.
"""
from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from ..triton_use import triton_refusal, try_triton
from .adaln import modulate, token_row

# Whose kernels these are, for triton_use.
TRITON_OWNER = "denoiser"

Modulation = tuple[Tensor, Tensor]  # scale, stored as 1 + scale, and shift: tables (U, width)


class ResidualStream:
    """Tokens of one stream, (B, N, width) contiguous, and at most one output that is still to be added to them.

    index: (B or 1, N) int64, each token's row in modulation tables (U, width); None when a sample has one noise level
    (U is 1 or B). fused: see refusal. x is updated in place.
    """

    def __init__(self, x: Tensor, index: Tensor | None, eps: float, fused: bool):
        self._x = x
        self._index = index
        self._eps = eps
        self._kernels = _kernels() if fused else None
        self._pending: tuple[Tensor, Tensor, bool] | None = None

    def add(self, out: Tensor, gate: Tensor, *, per_sample: bool = False) -> None:
        """x += out * gate. out: like x, given up by the caller. gate: (U, width), or (1 or B, width) with per_sample:
        such rows don't go by the index."""
        self.tokens()
        self._pending = out.contiguous(), gate, self._index is not None and not per_sample
        if self._kernels is None:
            self.tokens()

    def normed(self, *modulations: Modulation, norm: str = "rms") -> list[Tensor]:
        """For each one or two modulations norm(x) * scale + shift, new tensors. norm: "rms" or "layer", no weight."""
        if self._kernels is not None:
            pending, self._pending = self._pending, None
            return self._kernels.residual_pass(self._x, pending, modulations, self._index, norm, self._eps)
        width = self._x.shape[-1:]
        if norm == "rms":
            x = F.rms_norm(self._x, width, None, self._eps)
        else:
            x = F.layer_norm(self._x, width, eps=self._eps)
        rows = ([token_row(table, self._index) for table in tables] for tables in modulations)
        return [modulate(x, scale, shift) for scale, shift in rows]

    def modulated_context(self, context: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """context * scale + shift, a new tensor: what the stream attends to beside itself. context: (B, S, width of its
        own); scale (as 1 + scale), shift: (1 or B, width)."""
        if self._kernels is not None:
            return self._kernels.residual_pass(context, None, ((scale, shift),), None, "none", 0.0)[0]
        return modulate(context, scale.unsqueeze(1), shift.unsqueeze(1))

    def tokens(self) -> Tensor:
        """x with everything added. Not a copy."""
        pending, self._pending = self._pending, None
        if pending is None:
            return self._x
        if self._kernels is not None:
            self._kernels.residual_pass(self._x, pending, (), self._index, "none", self._eps)
        else:
            out, gate, by_index = pending
            self._x.addcmul_(out, token_row(gate, self._index if by_index else None))
        return self._x


def refusal(device: torch.device, dtype: torch.dtype, heads: tuple[tuple[int, int], ...]) -> str | None:
    """Why the fused passes can't run here, those of attention included; None where they can. Builds and runs kernels at
    its first use in a process.

    heads: of each stream, their number and size; together they are as wide as the stream.
    """
    reason = triton_refusal(device, dtype, TRITON_OWNER)
    if reason is None and not _run(device, dtype, heads):
        return triton_refusal(device, dtype, TRITON_OWNER)
    return reason


# A fact about the process. A failure is kept by triton_use.
@functools.cache
def _run(device: torch.device, dtype: torch.dtype, heads: tuple[tuple[int, int], ...]) -> bool:
    return try_triton(
        lambda: _probe(device, dtype, heads), TRITON_OWNER, "residual, norm, modulation, attention", device
    )


def _probe(device: torch.device, dtype: torch.dtype, heads: tuple[tuple[int, int], ...]) -> None:
    attention_kernels = importlib.import_module(".attention_kernels", __package__)
    for count, head_dim in heads:
        x = torch.zeros(1, 2, count * head_dim, dtype=dtype, device=device)
        row = torch.zeros(1, count * head_dim, dtype=dtype, device=device)
        stream = ResidualStream(x, None, 1e-6, fused=True)
        stream.add(torch.zeros_like(x), row)
        stream.normed((row, row), (row, row))
        attention_kernels.probe(device, dtype, count, head_dim)
    torch.cuda.synchronize(device)


def _kernels() -> ModuleType:
    return importlib.import_module(".residual_kernels", __package__)
