"""Triton kernels of Attention: q and k normalised and turned in place, and the heads' gates. Imports triton.

Both are bound by memory. At 24,576 tokens of 32 heads of 128 (S2, self attention) norm_and_rotate_ reads and writes q
and k once (805 MB) and reads the table (201 MB): 0.23 ms at the 4.3 TB/s of an H200, and gate_heads_ 0.09.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_use import launch
from .rope import RopeTable

# Values of a program that gates, of one warp that normalises and turns.
_GATED = 4096
_PER_WARP = 1024


def probe(device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Build the kernels and run them, in the current device, for triton_use.try_triton."""
    q, k = (torch.zeros(1, 2, heads * head_dim, device=device, dtype=dtype) for _ in range(2))
    weight = torch.ones(heads * head_dim, device=device, dtype=dtype)
    table = RopeTable(*(torch.ones(1, 2, heads, head_dim // 2, device=device, dtype=dtype) for _ in range(2)))
    for rope in (table, None):
        norm_and_rotate_(q, k, weight, weight, rope, rope, head_dim, eps=1e-6)
    gate_heads_(q.unflatten(2, (heads, -1)), torch.zeros(1, 2, heads, device=device, dtype=dtype))


def norm_and_rotate_(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rope: RopeTable | None,
    context_rope: RopeTable | None,
    head_dim: int,
    *,
    eps: float,
) -> None:
    """x = x / rms(x) * weight over all heads together, then each head turned to its token's position; in place, in
    float32, rounded once.

    q: (B, N, heads * head_dim), k: (B, M, heads * head_dim), contiguous. Weights: (heads * head_dim,). rope is that of
    q, context_rope of k (both or none); their tables are contiguous.
    """
    batch, q_tokens, inner = q.shape
    k_tokens = k.shape[1]
    q_table, k_table = _table(rope), _table(context_rope)
    launch(
        _norm_and_rotate, (q_tokens + k_tokens, batch),
        q, k, q_weight, k_weight, *q_table, *k_table, q_tokens, k_tokens, eps,
        HEADS=inner // head_dim,
        HALF=head_dim // 2,
        BLOCK_HEADS=triton.next_power_of_2(inner // head_dim),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=min(max(triton.next_power_of_2(inner) // _PER_WARP, 1), 8),
    )  # fmt: skip


def gate_heads_(x: Tensor, logits: Tensor) -> None:
    """x *= 2 sigmoid(logits) per head, in place. x: (B, N, heads, head_dim), logits: (B, N, heads), both contiguous."""
    head_dim, count = x.shape[3], logits.numel()
    dims = triton.next_power_of_2(head_dim)
    rows = max(1, _GATED // dims)
    launch(
        _gate_heads, (triton.cdiv(count, rows),),
        x, logits, count, HEAD_DIM=head_dim, DIMS=dims, ROWS=rows, num_warps=4,
    )  # fmt: skip


def _table(rope: RopeTable | None) -> tuple[Tensor | None, Tensor | None, int]:
    """cos, sin and how far the next sample's are: all samples may share them."""
    if rope is None:
        return None, None, 0
    return rope.cos, rope.sin, 0 if rope.cos.shape[0] == 1 else rope.cos.stride(0)


@triton.jit(do_not_specialize=["q_table", "k_table", "q_tokens", "k_tokens"])
def _norm_and_rotate(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr,
    q_cos_ptr, q_sin_ptr, q_table, k_cos_ptr, k_sin_ptr, k_table,
    q_tokens, k_tokens, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """One token of q or k a program. Those of the same place follow each other, so that in self attention the second
    finds the table in the cache."""
    program = tl.program_id(0)
    pairs = tl.minimum(q_tokens, k_tokens)
    of_pair = program < 2 * pairs
    token = tl.where(of_pair, program // 2, program - pairs)
    if tl.where(of_pair, program % 2 == 0, q_tokens > k_tokens):
        _token(
            q_ptr, q_weight_ptr, q_cos_ptr, q_sin_ptr, q_table, token, q_tokens, eps,
            HEADS, HALF, BLOCK_HEADS, BLOCK_HALF,
        )  # fmt: skip
    else:
        _token(
            k_ptr, k_weight_ptr, k_cos_ptr, k_sin_ptr, k_table, token, k_tokens, eps,
            HEADS, HALF, BLOCK_HEADS, BLOCK_HALF,
        )  # fmt: skip


@triton.jit
def _token(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, table, token, tokens, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    here = (head < HEADS) & (pair < HALF)
    sample = tl.program_id(1).to(tl.int64)
    first = head * (2 * HALF) + pair
    row_ptr = x_ptr + (sample * tokens + token) * (2 * HEADS * HALF)
    a = tl.load(row_ptr + first, mask=here, other=0.0).to(tl.float32)
    b = tl.load(row_ptr + first + HALF, mask=here, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a + b * b) / (2 * HEADS * HALF) + eps)
    a *= scale * tl.load(weight_ptr + first, mask=here, other=0.0).to(tl.float32)
    b *= scale * tl.load(weight_ptr + first + HALF, mask=here, other=0.0).to(tl.float32)
    if cos_ptr is not None:
        turn = sample * table + token.to(tl.int64) * (HEADS * HALF) + head * HALF + pair
        cos = tl.load(cos_ptr + turn, mask=here, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + turn, mask=here, other=0.0).to(tl.float32)
        tl.store(row_ptr + first, a * cos - b * sin, mask=here)
        tl.store(row_ptr + first + HALF, b * cos + a * sin, mask=here)
    else:
        tl.store(row_ptr + first, a, mask=here)
        tl.store(row_ptr + first + HALF, b, mask=here)


@triton.jit(do_not_specialize=["count"])
def _gate_heads(x_ptr, logits_ptr, count, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr):
    """A row is one head of one token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    here = (row < count)[:, None] & (dim < HEAD_DIM)[None, :]
    place = row.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    logits = tl.load(logits_ptr + row, mask=row < count, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=here, other=0.0).to(tl.float32)
    tl.store(x_ptr + place, x * (2 / (1 + tl.exp(-logits)))[:, None], mask=here)
