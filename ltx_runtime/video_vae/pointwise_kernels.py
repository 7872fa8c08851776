"""The Triton kernels of pointwise.py. Imports triton; everything else goes through pointwise.py.

All are bound by memory; at the 4.3 TB/s of an H200 a block at 768x512x121 takes 2.1 ms of split_norm_rope, which reads
and writes its rows once (9.1 GB), 4.3 of silu_mul (reads two and writes one, 18 GB), 0.7 of each rms_norm (3 GB), 1.1
of add_cells (4.6 GB).
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ..triton_use import launch

if TYPE_CHECKING:
    from .rotary import RotaryTables

_TOKENS = 64
_VALUES = 2048


def split_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotary: RotaryTables,
    first: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float = 1e-6,
) -> None:
    """See pointwise.split_norm_rope."""
    count, heads, head_dim = q.shape
    time, height, width = rotary.grid
    launch(
        _split_norm_rope, (triton.cdiv(count, _TOKENS), 3 * heads),
        qkv, q_weight, k_weight, rotary.cos, rotary.sin, q, k, v,
        count, first, height, width, time * rotary.pairs[0], height * rotary.pairs[1], eps,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS=heads,
        HEAD_DIM=head_dim,
        DIMS=triton.next_power_of_2(head_dim),
        PAIRS_T=rotary.pairs[0],
        PAIRS_H=rotary.pairs[1],
        TOKENS=_TOKENS,
        num_warps=4,
    )  # fmt: skip


def silu_mul(gate: Tensor, up: Tensor) -> None:
    """See pointwise.silu_mul_."""
    count = gate.numel()
    launch(_silu_mul, (triton.cdiv(count, _VALUES),), gate, up, count, VALUES=_VALUES, num_warps=8)


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float = 1e-6) -> None:
    """See pointwise.rms_norm."""
    count, channels = x.shape
    lanes = triton.next_power_of_2(channels)
    rows = max(1, _VALUES // lanes)
    launch(
        _rms_norm, (triton.cdiv(count, rows),),
        x, weight, out, count, eps, CHANNELS=channels, LANES=lanes, ROWS=rows, num_warps=4
    )


def add_cells(x: Tensor, grown: Tensor, stride: tuple[int, int, int], first: int, dropped: int) -> None:
    """See pointwise.add_cells_."""
    frames, height, width, channels = x.shape
    low = max(0, first * stride[0] - dropped)
    high = min(frames, (first + grown.shape[0]) * stride[0] - dropped)
    if low >= high:
        return
    count = (high - low) * height * width
    lanes = triton.next_power_of_2(channels)
    rows = max(1, _VALUES // lanes)
    launch(
        _add_cells, (triton.cdiv(count, rows),),
        x[low], grown, count, height, width, low + dropped - first * stride[0],
        P1=stride[0], P2=stride[1], P3=stride[2], CHANNELS=channels, LANES=lanes, ROWS=rows, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "first", "H", "W", "size_t", "size_h"])
def _split_norm_rope(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
    count, first, H, W, size_t, size_h, eps,
    q_token, q_head, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    PAIRS_T: tl.constexpr, PAIRS_H: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """size_t, size_h: values of the tables of time and height, which lie one after the other before that of width."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    role = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    dims = tl.arange(0, DIMS)
    here = (token < count)[:, None] & (dims < HEAD_DIM)[None, :]
    row = token.to(tl.int64)[:, None]
    source = qkv_ptr + row * (3 * HEADS * HEAD_DIM) + (role * HEADS + head) * HEAD_DIM + dims[None, :]
    x = tl.load(source, mask=here, other=0.0)
    if role == 2:
        tl.store(v_ptr + row * v_token + head * v_head + dims[None, :], x, mask=here)
    else:
        weight = tl.load((q_weight_ptr if role == 0 else k_weight_ptr) + dims, mask=dims < HEAD_DIM, other=0.0)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)
        normed = wide * scale[:, None] * weight[None, :]

        pair = tl.arange(0, DIMS // 2)[None, :]
        place = (first + token)[:, None]
        in_t = place // (H * W) * PAIRS_T + pair
        in_h = size_t + place // W % H * PAIRS_H + pair - PAIRS_T
        in_w = size_t + size_h + place % W * PAIRS_H + pair - PAIRS_T - PAIRS_H
        where = tl.where(pair < PAIRS_T, in_t, tl.where(pair < PAIRS_T + PAIRS_H, in_h, in_w))
        turns = (token < count)[:, None] & (2 * pair < HEAD_DIM)
        cos = tl.load(cos_ptr + where, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + where, mask=turns, other=0.0)
        even, odd = tl.split(tl.reshape(normed, [TOKENS, DIMS // 2, 2]))
        turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [TOKENS, DIMS])
        if role == 0:
            tl.store(q_ptr + row * q_token + head * q_head + dims[None, :], turned, mask=here)
        else:
            tl.store(k_ptr + row * k_token + head * k_head + dims[None, :], turned, mask=here)


# count is specialised on its divisibility by 16, without which the mask would keep loads at 16 bits.
@triton.jit
def _silu_mul(gate_ptr, up_ptr, count, VALUES: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    here = index < count
    gate = tl.load(gate_ptr + index, mask=here).to(tl.float32)
    up = tl.load(up_ptr + index, mask=here).to(tl.float32)
    tl.store(gate_ptr + index, gate / (1 + tl.exp(-gate)) * up, mask=here)


@triton.jit(do_not_specialize=["count"])
def _rms_norm(
    x_ptr, weight_ptr, out_ptr, count, eps, CHANNELS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    here = (row < count)[:, None] & (lane < CHANNELS)[None, :]
    place = row.to(tl.int64)[:, None] * CHANNELS + lane[None, :]
    x = tl.load(x_ptr + place, mask=here, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + lane, mask=lane < CHANNELS, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / CHANNELS + eps)
    tl.store(out_ptr + place, x * scale[:, None] * weight[None, :], mask=here)


@triton.jit(do_not_specialize=["count", "H", "W", "ahead"])
def _add_cells(
    x_ptr, grown_ptr, count, H, W, ahead,
    P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ahead: frames of grown before the first of x."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    frame, h, w = token // (H * W) + ahead, token // W % H, token % W
    cell = (frame // P1 * (H // P2) + h // P2) * (W // P3) + w // P3
    offset = (frame % P1 * P2 + h % P2) * P3 + w % P3
    lane = tl.arange(0, LANES)
    here = (token < count)[:, None] & (lane < CHANNELS)[None, :]
    source = (cell.to(tl.int64) * (P1 * P2 * P3) + offset)[:, None] * CHANNELS + lane[None, :]
    place = token.to(tl.int64)[:, None] * CHANNELS + lane[None, :]
    grown = tl.load(grown_ptr + source, mask=here, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=here, other=0.0).to(tl.float32)
    tl.store(x_ptr + place, x + grown, mask=here)
