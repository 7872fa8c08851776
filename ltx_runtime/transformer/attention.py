"""Attention with whole-width q/k norms, rotary positions and per-head gates; the one place that picks a kernel.

Source: transformer.md section 8.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .inputs import GuideBias
from .rope import RopeTable, apply_rope


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | GuideBias | None = None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim) + bias) v, not causal.

    q: (B, N, heads, head_dim); k, v: (B, M, heads, head_dim); bias: (B, 1, N, M) in q's dtype, or in parts. Returns q's
    shape.

    The kernel choice of the whole model lives here. torch's own choice now: cuDNN on an H200, the fastest at every
    video shape. Flash is faster for few queries on many keys (126 x 6144, head_dim 64: 0.032 against 0.058 ms).
    """
    if isinstance(bias, GuideBias):
        targets = q.shape[1] - bias.queries.shape[2]
        of_target = attend(q[:, :targets], k, v, bias.keys.expand(-1, -1, targets, -1))
        return torch.cat((of_target, attend(q[:, targets:], k, v, bias.queries)), dim=1)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


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
    ) -> Tensor:
        """x: (B, N, query_width); context: (B, M, context_width), x itself when None. Returns (B, N, query_width).

        rope turns the queries, context_rope the keys (rope when None). qk_eps replaces the q/k norms' eps.
        Perturbation (section 13): skip gives the values instead of attending; keep (B, 1, 1, 1) blends per sample.
        """
        context = x if context is None else context
        v = self._heads(self.to_v(context))
        if skip:
            out = v
        else:
            q = self._heads(self._norm(self.q_norm, self.to_q(x), qk_eps))
            k = self._heads(self._norm(self.k_norm, self.to_k(context), qk_eps))
            if rope is not None:
                q = apply_rope(q, rope)
                k = apply_rope(k, context_rope or rope)
            out = attend(q, k, v, bias)
            if keep is not None:
                out = torch.lerp(v, out, keep)
        if self.to_gate_logits is not None:
            gates = self.to_gate_logits(x).sigmoid_().mul_(2)
            out = out.mul_(gates.unsqueeze(-1))
        return self.to_out[0](out.flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_dim))

    @staticmethod
    def _norm(norm: nn.RMSNorm, x: Tensor, eps: float | None) -> Tensor:
        return F.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps if eps is None else eps)
