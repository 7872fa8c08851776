"""Attention with whole-width q/k norms, rotary positions and per-head gates; the one place that picks a kernel.

Source: transformer.md section 8.1.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .inputs import GuideBias
from .rope import RopeTable, apply_rope

# Queries that a program of cuDNN's takes; and how many programs leave three quarters of an H200 idle.
_QUERY_TILE = 128
_FEW_TILES = 32


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | GuideBias | None = None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim) + bias) v, not causal.

    q: (B, N, heads, head_dim); k, v: (B, M, heads, head_dim); bias: (B, 1, N, M) in q's dtype, or in parts. Returns q's
    shape.

    The kernel choice of the whole model lives here: torch's own (cuDNN on an H200, the fastest at every video shape),
    but flash for few queries on many keys.
    """
    if isinstance(bias, GuideBias):
        targets = q.shape[1] - bias.queries.shape[2]
        of_target = attend(q[:, :targets], k, v, bias.keys.expand(-1, -1, targets, -1))
        return torch.cat((of_target, attend(q[:, targets:], k, v, bias.queries)), dim=1)
    flash = bias is None and _flash_is_faster(q, k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if flash:
        return torch._scaled_dot_product_flash_attention(q, k, v)[0].transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def _flash_is_faster(q: Tensor, k: Tensor) -> bool:
    """Few queries on many keys (the sound's on the picture's): too few for a query tile on every multiprocessor, and
    only flash then splits the keys. 126 x 6144, 32 heads of 64: 0.034 ms against cuDNN's 0.059 on an H200; with twice
    as many queries they are equal.
    """
    batch, queries, heads, head_dim = q.shape
    return (
        k.shape[1] >= 8 * queries
        and batch * heads * -(-queries // _QUERY_TILE) <= _FEW_TILES
        and q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and _has_flash(q.device)
    )


@functools.cache
def _has_flash(device: torch.device) -> bool:
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module(".attention_kernels", __package__)


class Attention(nn.Module):
    """Self or cross attention; parameter names as published.

    query_width, context_width: widths of the two inputs; the output has query_width again. The inner width is
    heads * head_dim.
    """

    def __init__(self, query_width: int, context_width: int, heads: int, head_dim: int, *, gated: bool, eps: float):
        super().__init__()
        inner = heads * head_dim
        self.head_dim = head_dim
        self.to_q = nn.Linear(query_width, inner)
        self.to_k = nn.Linear(context_width, inner)
        self.to_v = nn.Linear(context_width, inner)
        # Over all heads together: a per-head norm is not equivalent.
        self.q_norm = nn.RMSNorm(inner, eps=eps)
        self.k_norm = nn.RMSNorm(inner, eps=eps)
        self.to_gate_logits = nn.Linear(query_width, heads) if gated else None
        self.to_out = nn.ModuleList([nn.Linear(inner, query_width)])

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        rope: RopeTable | None = None,
        context_rope: RopeTable | None = None,
        bias: Tensor | GuideBias | None = None,
        qk_eps: float | None = None,
        skip: bool = False,
        keep: Tensor | None = None,
        fused: bool = False,
    ) -> Tensor:
        """x: (B, N, query_width); context: (B, M, context_width), x itself when None. Returns (B, N, query_width).

        rope turns the queries, context_rope the keys (rope when None). qk_eps replaces the q/k norms' eps.
        Perturbation (section 13): skip gives the values instead of attending; keep (B, 1, 1, 1) blends per sample.
        fused: by attention_kernels, which take contiguous tensors.
        """
        context = x if context is None else context
        v = self._heads(self.to_v(context))
        if skip:
            out = v
        else:
            normed = self._normed_fused if fused else self._normed
            q, k = normed(self.to_q(x), self.to_k(context), rope, context_rope or rope, qk_eps)
            out = attend(q, k, v, bias)
            if keep is not None:
                out = torch.lerp(v, out, keep)
        if self.to_gate_logits is not None:
            logits = self.to_gate_logits(x)
            if fused:
                out = out.contiguous()  # as every kernel that torch picks on a GPU leaves it
                _kernels().gate_heads_(out, logits)
            else:
                out = out.mul_(logits.sigmoid_().mul_(2).unsqueeze(-1))
        return self.to_out[0](out.flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_dim))

    def _normed(
        self, q: Tensor, k: Tensor, rope: RopeTable | None, context_rope: RopeTable | None, eps: float | None
    ) -> tuple[Tensor, Tensor]:
        """q and k normalised, turned where there is a rope, as heads."""
        q = self._heads(self._norm(self.q_norm, q, eps))
        k = self._heads(self._norm(self.k_norm, k, eps))
        return (q, k) if rope is None else (apply_rope(q, rope), apply_rope(k, context_rope))

    def _normed_fused(
        self, q: Tensor, k: Tensor, rope: RopeTable | None, context_rope: RopeTable | None, eps: float | None
    ) -> tuple[Tensor, Tensor]:
        """The same in one pass, over q and k."""
        _kernels().norm_and_rotate_(
            q, k, self.q_norm.weight, self.k_norm.weight, rope, context_rope, self.head_dim,
            eps=self.q_norm.eps if eps is None else eps,
        )  # fmt: skip
        return self._heads(q), self._heads(k)

    @staticmethod
    def _norm(norm: nn.RMSNorm, x: Tensor, eps: float | None) -> Tensor:
        return F.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps if eps is None else eps)
