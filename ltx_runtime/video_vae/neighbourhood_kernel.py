"""Neighbourhood attention as one Triton kernel: tiles of queries against the union of their windows, on tensor cores.

A program takes a tile of queries of one head and walks, plane by plane, through the box of keys that any of them sees,
with an online softmax in float32. The mask costs no work on the scores: every query row of the tile picks one row per
axis out of a small table (positions in the tile by keys: 0 inside the window, a huge negative number outside), which is
one more matrix product, 16 deep, before that of queries and keys. Comparing coordinates on every score instead took 510
instructions a step where this takes 325.

Work for 121x128x192 tokens, 4 heads of 64, window 11^3, tile 4x4x8: the box is 14x14x18 keys, padded to 14 planes of
256, 2.7 times the 1331 that a query needs. 10.9 TFLOP and 1.4 for the mask; 4.3e10 exponentials; 87 GB through L2.
Compiled for an H200 a step of 64 keys is 334 instructions a warp without spills: 16 ms to issue, 14 ms of tensor cores,
13 ms of exponentials, 16 ms of L2. Two blocks share a multiprocessor and hide one another's waits in part: 25 ms
predicted, 29.8 measured.

Imports triton; everything else goes through neighbourhood_attention.py.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_use import launch


@dataclass(frozen=True)
class KernelShape:
    """tile: queries a program along time, height and width, powers of two; their sum is at most 32. block_keys: keys a
    step. registers: a thread's, None = the compiler's choice; 128 let two blocks of 8 warps share a multiprocessor."""

    tile: tuple[int, int, int] = (4, 4, 8)
    block_keys: int = 64
    warps: int = 8
    stages: int = 3
    registers: int | None = 128


BEST = KernelShape()
# Relative offsets in a box of keys are 32-bit.
MAX_BOX_ELEMENTS = 2**31 - 1


def box_sizes(
    grid: tuple[int, int, int], kernel_size: tuple[int, int, int], shape: KernelShape = BEST
) -> tuple[int, ...]:
    """Keys along each axis that the queries of a tile see together."""
    return tuple(min(tile + kernel - 1, cells) for tile, kernel, cells in zip(shape.tile, kernel_size, grid))


def attend(
    q: Tensor, k: Tensor, v: Tensor, kernel_size: tuple[int, int, int], out: Tensor, shape: KernelShape = BEST
) -> None:
    """Write the attention of q (B, T, H, W, heads, head_dim) on k and v into out; see neighbourhood_attention, which
    checks the arguments. out may be q: a program reads its queries before it writes, and no other reads them."""
    batch, *grid, heads, head_dim = q.shape
    box = box_sizes(tuple(grid), kernel_size, shape)
    tiles = 1
    for cells, tile in zip(grid, shape.tile):
        tiles *= triton.cdiv(cells, tile)
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    if shape.registers and torch.version.hip is None:
        options["maxnreg"] = shape.registers
    launch(
        _attend, (tiles, batch * heads),
        q, k, v, out,
        *grid, heads,
        q.stride(3), q.stride(4), k.stride(3), k.stride(4), v.stride(3), v.stride(4), out.stride(3), out.stride(4),
        **dict(zip(("KT", "KH", "KW", "TT", "TH", "TW", "BT", "BH", "BW"), (*kernel_size, *shape.tile, *box))),
        HEAD_DIM=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=shape.block_keys,
        MASK_ROWS=max(16, triton.next_power_of_2(sum(shape.tile))),
        **options,
    )  # fmt: skip


@triton.jit
def _window_start(position, kernel, cells):
    """First key that a query sees on one axis: windows shift inwards at the borders."""
    return tl.minimum(tl.maximum(position - kernel // 2, 0), cells - kernel)


@triton.jit(do_not_specialize=["T", "H", "W", "heads"])
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr,
    T, H, W, heads,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    TT: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_N: tl.constexpr, MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """K*: window, T*: tile of queries, B*: box of keys. *_token and *_head are strides in elements."""
    PLANE_BLOCKS: tl.constexpr = (BH * BW + BLOCK_N - 1) // BLOCK_N
    LOG2E: tl.constexpr = 1.4426950408889634
    # Far below any score, and in the range of float16: a row of masked scores stays finite until its first real key
    # comes, and is then scaled by exp2(-huge) = 0.
    OUTSIDE: tl.constexpr = -6e4

    # Width runs fastest, then height: programs that run together share keys.
    tile = tl.program_id(0)
    head = tl.program_id(1) % heads
    tiles_w = tl.cdiv(W, TW)
    tiles_h = tl.cdiv(H, TH)
    t0 = tile // (tiles_w * tiles_h) * TT
    h0 = tile // tiles_w % tiles_h * TH
    w0 = tile % tiles_w * TW
    clip = (tl.program_id(1) // heads).to(tl.int64) * T * H * W

    # The box of keys, moved into the grid where it would reach out of it.
    box_t = tl.minimum(_window_start(t0, KT, T), T - BT)
    box_h = tl.minimum(_window_start(h0, KH, H), H - BH)
    box_w = tl.minimum(_window_start(w0, KW, W), W - BW)

    dims = tl.arange(0, DIMS)
    row = tl.arange(0, TT * TH * TW)
    row_t = row // (TH * TW)
    row_h = row // TW % TH
    row_w = row % TW
    in_grid = (t0 + row_t < T) & (h0 + row_h < H) & (w0 + row_w < W)
    query = clip + ((t0 + row_t).to(tl.int64) * H + h0 + row_h) * W + w0 + row_w
    here = in_grid[:, None] & (dims[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + query[:, None] * q_token + head * q_head + dims[None, :], mask=here, other=0.0)

    # Row p of the mask table: the window of the queries at position p of the tile, first all of time, then height,
    # then width.
    p = tl.arange(0, MASK_ROWS)
    start_t = _window_start(t0 + p, KT, T) - box_t
    start_h = _window_start(h0 + p - TT, KH, H) - box_h
    start_w = _window_start(w0 + p - TT - TH, KW, W) - box_w
    start = tl.where(p < TT, start_t, tl.where(p < TT + TH, start_h, start_w))[:, None]
    size = tl.where(p < TT, KT, tl.where(p < TT + TH, KH, KW))[:, None]
    of_t = (p < TT)[:, None]
    of_h = (p < TT + TH)[:, None]
    picks = (
        (p[None, :] == row_t[:, None])
        | (p[None, :] == TT + row_h[:, None])
        | (p[None, :] == TT + TH + row_w[:, None])
    ).to(q.dtype)

    first_key = clip + (box_t.to(tl.int64) * H + box_h) * W + box_w
    k_ptr += first_key * k_token + head * k_head
    v_ptr += first_key * v_token + head * v_head

    acc = tl.zeros([TT * TH * TW, DIMS], tl.float32)
    peak = tl.full([TT * TH * TW], float("-inf"), tl.float32)
    total = tl.zeros([TT * TH * TW], tl.float32)
    for step in range(BT * PLANE_BLOCKS):
        key_t = step // PLANE_BLOCKS
        n = step % PLANE_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
        key_h = n // BW
        key_w = n % BW
        # The last block of a plane may reach below the box: it reads the last row again, and no window holds it.
        key = (key_t * H + tl.minimum(key_h, BH - 1)) * W + key_w
        if HEAD_DIM == DIMS:
            k = tl.load(k_ptr + key[:, None] * k_token + dims[None, :])
            v = tl.load(v_ptr + key[:, None] * v_token + dims[None, :])
        else:
            k = tl.load(k_ptr + key[:, None] * k_token + dims[None, :], mask=dims[None, :] < HEAD_DIM, other=0.0)
            v = tl.load(v_ptr + key[:, None] * v_token + dims[None, :], mask=dims[None, :] < HEAD_DIM, other=0.0)

        into = tl.where(of_t, key_t, tl.where(of_h, key_h[None, :], key_w[None, :])) - start
        outside = tl.where((into >= 0) & (into < size), 0.0, OUTSIDE).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), tl.dot(picks, outside))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores * LOG2E - (new_peak * LOG2E)[:, None])
        shrink = tl.exp2((peak - new_peak) * LOG2E)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        peak = new_peak

    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + query[:, None] * out_token + head * out_head + dims[None, :], result, mask=here)
