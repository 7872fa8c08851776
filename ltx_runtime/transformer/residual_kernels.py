"""The Triton kernel of residual.py. Imports triton; everything else goes through residual.py.

Bound by memory. At the 4.3 TB/s of an H200 a pass over the video stream at 768x512x121 (6144 x 4096 bf16, 50 MB) that
adds, norms and modulates reads two tensors and writes two: 0.047 ms. Modulation rows are read by every program and stay
in the caches.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_use import launch

# A program does up to so many tokens of one sample one after the other, with its rows in registers where all tokens
# share them.
TOKENS = 1
# Values of a token that one thread holds.
VALUES = 16
MAX_WARPS = 16


def residual_pass(
    x: Tensor,
    added: tuple[Tensor, Tensor, bool] | None,
    modulations: Sequence[tuple[Tensor, Tensor]],
    index: Tensor | None,
    norm: str,
    eps: float,
) -> list[Tensor]:
    """x += out * gate in place, then for each (scale, shift) norm(x) * scale + shift into a new tensor.

    x: (B, N, width), contiguous. added: (out of x's shape, gate (U, width), whether the gate's rows go by index);
    without it x is not written. modulations: up to two, of tables (U, width). index: (B or 1, N) int64 into the U rows;
    None: row b of sample b, row 0 where U is 1. norm: "rms", "layer" or "none".
    Computed in float32 and rounded once at each tensor that is stored; the norm is that of x as stored.
    """
    batch, tokens, width = x.shape
    outputs = [torch.empty_like(x) for _ in modulations]
    out = gate = scale1 = shift1 = y1 = scale2 = shift2 = y2 = None
    gate_by_index = False
    gate_step = row_step = 0
    if added is not None:
        out, gate, gate_by_index = added
        gate_step = int(gate.shape[0] > 1)
    if outputs:
        (scale1, shift1), y1 = modulations[0], outputs[0]
        row_step = int(scale1.shape[0] > 1)
        if len(outputs) == 2:
            (scale2, shift2), y2 = modulations[1], outputs[1]
    lanes = triton.next_power_of_2(width)
    launch(
        _residual_pass, (-(-tokens // TOKENS), batch),
        x, out, gate, index, scale1, shift1, y1, scale2, shift2, y2,
        tokens, 0 if index is None or index.shape[0] == 1 else tokens, gate_step, row_step, eps,
        ADD=added is not None,
        GATE_BY_INDEX=gate_by_index,
        NORM=norm,
        OUTPUTS=len(outputs),
        ROWS_BY_INDEX=index is not None and bool(outputs),
        WIDTH=width,
        LANES=lanes,
        TOKENS=TOKENS,
        num_warps=min(MAX_WARPS, max(1, lanes // (32 * VALUES))),
    )  # fmt: skip
    return outputs


# Pointers are specialised on their alignment and WIDTH is known, so loads are as wide as the width allows.
@triton.jit(do_not_specialize=["tokens", "index_step", "gate_step", "row_step"])
def _residual_pass(
    x_ptr, out_ptr, gate_ptr, index_ptr, scale1_ptr, shift1_ptr, y1_ptr, scale2_ptr, shift2_ptr, y2_ptr,
    tokens, index_step, gate_step, row_step, eps,
    ADD: tl.constexpr, GATE_BY_INDEX: tl.constexpr, NORM: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS_BY_INDEX: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """index_step, gate_step, row_step: from one sample to the next, in entries of the index and in rows of a table."""
    sample = tl.program_id(1)
    first = tl.program_id(0) * TOKENS
    lane = tl.arange(0, LANES)
    here = lane < WIDTH
    if ADD and not GATE_BY_INDEX:
        gate = tl.load(gate_ptr + sample * gate_step * WIDTH + lane, mask=here, other=0.0).to(tl.float32)
    if OUTPUTS > 0 and not ROWS_BY_INDEX:
        shared = sample * row_step * WIDTH + lane
        scale1 = tl.load(scale1_ptr + shared, mask=here, other=0.0).to(tl.float32)
        shift1 = tl.load(shift1_ptr + shared, mask=here, other=0.0).to(tl.float32)
        if OUTPUTS > 1:
            scale2 = tl.load(scale2_ptr + shared, mask=here, other=0.0).to(tl.float32)
            shift2 = tl.load(shift2_ptr + shared, mask=here, other=0.0).to(tl.float32)
    for token in range(first, tl.minimum(first + TOKENS, tokens)):
        own = (sample * tokens + token).to(tl.int64) * WIDTH + lane
        x = tl.load(x_ptr + own, mask=here, other=0.0).to(tl.float32)
        if GATE_BY_INDEX or ROWS_BY_INDEX:
            row = tl.load(index_ptr + sample * index_step + token) * WIDTH + lane
        if ADD:
            out = tl.load(out_ptr + own, mask=here, other=0.0).to(tl.float32)
            if GATE_BY_INDEX:
                gate = tl.load(gate_ptr + row, mask=here, other=0.0).to(tl.float32)
            stored = (x + out * gate).to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + own, stored, mask=here)
            x = stored.to(tl.float32)
        if OUTPUTS > 0:
            if NORM == "layer":
                x = tl.where(here, x - tl.sum(x, 0) / WIDTH, 0.0)
            if NORM != "none":
                x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
            if ROWS_BY_INDEX:
                scale1 = tl.load(scale1_ptr + row, mask=here, other=0.0).to(tl.float32)
                shift1 = tl.load(shift1_ptr + row, mask=here, other=0.0).to(tl.float32)
            tl.store(y1_ptr + own, x * scale1 + shift1, mask=here)
            if OUTPUTS > 1:
                if ROWS_BY_INDEX:
                    scale2 = tl.load(scale2_ptr + row, mask=here, other=0.0).to(tl.float32)
                    shift2 = tl.load(shift2_ptr + row, mask=here, other=0.0).to(tl.float32)
                tl.store(y2_ptr + own, x * scale2 + shift2, mask=here)
