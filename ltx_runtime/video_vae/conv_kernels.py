"""The Triton kernels of conv_pointwise.py. Imports triton; everything else goes through conv_pointwise.py.

A clip of (C, F, H, W) values is a table of F*H*W rows of C channels that lie side by side; clips of a batch may lie at
any distance. All kernels are bound by memory: they read and write every value once. 128 channels of 121x128x192 rows
(768x512x121) are 0.76 GB: 0.35 ms for a read and a write at the 4.3 TB/s of an H200.
"""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..triton_use import launch
from .cells import Stride
from .conv_pointwise import PIXEL_NORM_EPS

# Values a program, and warps that share them.
_VALUES = 4096
_WARPS = 4


def finish(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, keep: bool, out: Tensor | None, activate: bool
) -> None:
    """See conv_pointwise.finish. x is written only where keep says so."""
    batch, channels, frames, height, width = x.shape
    rows = frames * height * width
    block = triton.next_power_of_2(channels)
    tile = max(1, _VALUES // block)
    launch(
        _finish, (triton.cdiv(rows, tile), batch),
        x, x if bias is None else bias, x if residual is None else residual, x if out is None else out,
        rows, x.stride(0), 0 if residual is None else residual.stride(0), 0 if out is None else out.stride(0),
        PIXEL_NORM_EPS,
        CHANNELS=channels,
        BLOCK=block,
        ROWS=tile,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        KEEP=keep,
        OUT=out is not None,
        ACTIVATE=activate,
        num_warps=_WARPS,
    )  # fmt: skip


def depth_to_space(x: Tensor, bias: Tensor, stride: Stride, skip: int, out: Tensor) -> None:
    """See conv_pointwise.depth_to_space."""
    batch, channels, frames, height, width = x.shape
    growth = stride[0] * stride[1] * stride[2]
    rows = frames * height * width
    block = min(triton.next_power_of_2(channels // growth), _VALUES // growth)
    tile = max(1, _VALUES // (block * growth))
    launch(
        _depth_to_space, (triton.cdiv(rows, tile), triton.cdiv(channels // growth, block), batch),
        x, bias, out,
        rows, height, width, skip, x.stride(0), out.stride(0),
        CHANNELS=channels // growth,
        P1=stride[0], P2=stride[1], P3=stride[2],
        BLOCK=block,
        ROWS=tile,
        num_warps=_WARPS,
    )  # fmt: skip


def add_space_to_depth(main: Tensor, bias: Tensor, skip: Tensor, stride: Stride, out: Tensor) -> None:
    """See conv_pointwise.add_space_to_depth."""
    batch, channels, frames, height, width = out.shape
    shrinking = stride[0] * stride[1] * stride[2]
    group = skip.shape[1] * shrinking // channels
    rows = frames * height * width
    block = max(min(triton.next_power_of_2(channels), _VALUES // group), shrinking)
    tile = max(1, _VALUES // (block * group))
    launch(
        _add_space_to_depth, (triton.cdiv(rows, tile), triton.cdiv(channels, block), batch),
        main, bias, skip, out,
        rows, height, width, main.stride(0), skip.stride(0), out.stride(0),
        CHANNELS=channels,
        P1=stride[0], P2=stride[1], P3=stride[2],
        GROUP=group,
        BLOCK=block,
        ROWS=tile,
        num_warps=_WARPS,
    )  # fmt: skip


def unpatchify(x: Tensor, patch: int, out: Tensor) -> None:
    """See conv_pointwise.unpatchify."""
    batch, channels, frames, height, width = x.shape
    rows = frames * height * width
    tile = max(1, _VALUES // (2 * patch * patch))
    launch(
        _unpatchify, (triton.cdiv(rows, tile), out.shape[1], batch),
        x, out,
        rows, frames, height, width, x.stride(0), out.stride(0),
        CHANNELS=channels,
        PATCH=patch,
        ROWS=tile,
        num_warps=_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _finish(
    x_ptr, bias_ptr, residual_ptr, out_ptr,
    rows, x_clip, residual_clip, out_clip, eps,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr, OUT: tl.constexpr, ACTIVATE: tl.constexpr,
):  # fmt: skip
    """*_clip: distance of the clips of a batch, in values."""
    clip = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (channel < CHANNELS)[None, :]
    place = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    x = tl.load(x_ptr + clip * x_clip + place, mask=here, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        x += tl.load(residual_ptr + clip * residual_clip + place, mask=here, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(x_ptr + clip * x_clip + place, x.to(x_ptr.dtype.element_ty), mask=here)
    if ACTIVATE:
        x *= tl.rsqrt(tl.sum(x * x, 1) / CHANNELS + eps)[:, None]
        x = x / (1 + tl.exp(-x))
    if OUT:
        tl.store(out_ptr + clip * out_clip + place, x.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows", "H", "W", "skip"])
def _depth_to_space(
    x_ptr, bias_ptr, out_ptr,
    rows, H, W, skip, x_clip, out_clip,
    CHANNELS: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """rows, H, W: of x. CHANNELS: of the result, of which a program takes BLOCK."""
    P: tl.constexpr = P1 * P2 * P3
    clip = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * BLOCK
    source = first * P + tl.arange(0, BLOCK * P)
    here = (row < rows)[:, None] & (source < CHANNELS * P)[None, :]
    place = row.to(tl.int64)[:, None] * (CHANNELS * P) + source[None, :]
    x = tl.load(x_ptr + clip * x_clip + place, mask=here, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + source, mask=source < CHANNELS * P, other=0.0).to(tl.float32)[None, :]
    x = tl.permute(tl.reshape(x.to(out_ptr.dtype.element_ty), [ROWS, BLOCK, P]), [0, 2, 1])

    offset = tl.arange(0, P)[None, :]
    frame = (row // (H * W))[:, None] * P1 + offset // (P2 * P3) - skip
    line = (row // W % H)[:, None] * P2 + offset // P3 % P2
    column = (row % W)[:, None] * P3 + offset % P3
    target = (frame.to(tl.int64) * (H * P2) + line) * (W * P3) + column
    channel = first + tl.arange(0, BLOCK)
    there = ((row < rows)[:, None] & (frame >= 0))[:, :, None] & (channel < CHANNELS)[None, None, :]
    tl.store(out_ptr + clip * out_clip + target[:, :, None] * CHANNELS + channel[None, None, :], x, mask=there)


@triton.jit(do_not_specialize=["rows", "H", "W"])
def _add_space_to_depth(
    main_ptr, bias_ptr, skip_ptr, out_ptr,
    rows, H, W, main_clip, skip_clip, out_clip,
    CHANNELS: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """rows, H, W, CHANNELS: of the result; a program takes BLOCK channels, which come from P cells of BLOCK / P
    channels of main and of BLOCK * GROUP / P of skip."""
    P: tl.constexpr = P1 * P2 * P3
    clip = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offset = tl.arange(0, P)[None, :]
    frame = (row // (H * W))[:, None] * P1 + offset // (P2 * P3)
    line = (row // W % H)[:, None] * P2 + offset // P3 % P2
    column = (row % W)[:, None] * P3 + offset % P3
    source = ((frame.to(tl.int64) * (H * P2) + line) * (W * P3) + column)[:, :, None]
    here = (row < rows)[:, None, None]

    WIDTH: tl.constexpr = BLOCK // P
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    fits = channel < CHANNELS // P
    place = source * (CHANNELS // P) + channel[None, None, :]
    main = tl.load(main_ptr + clip * main_clip + place, mask=here & fits[None, None, :], other=0.0).to(tl.float32)
    main += tl.load(bias_ptr + channel, mask=fits, other=0.0).to(tl.float32)[None, None, :]
    main = tl.reshape(tl.permute(main, [0, 2, 1]), [ROWS, BLOCK])

    SKIP: tl.constexpr = CHANNELS * GROUP // P
    SKIP_WIDTH: tl.constexpr = BLOCK * GROUP // P
    channel = tl.program_id(1) * SKIP_WIDTH + tl.arange(0, SKIP_WIDTH)
    fits = here & (channel < SKIP)[None, None, :]
    skip = tl.load(skip_ptr + clip * skip_clip + source * SKIP + channel[None, None, :], mask=fits, other=0.0)
    skip = tl.reshape(tl.permute(skip.to(tl.float32), [0, 2, 1]), [ROWS, BLOCK, GROUP])
    total = main + tl.sum(skip, 2) / GROUP

    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (row < rows)[:, None] & (channel < CHANNELS)[None, :]
    target = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out_ptr + clip * out_clip + target, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "F", "H", "W"])
def _unpatchify(
    x_ptr, out_ptr,
    rows, F, H, W, x_clip, out_clip,
    CHANNELS: tl.constexpr, PATCH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """rows, F, H, W, CHANNELS: of x. A program makes one colour of the pixels of ROWS cells."""
    clip = tl.program_id(2).to(tl.int64)
    colour = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = colour * (PATCH * PATCH) + tl.arange(0, PATCH * PATCH)
    place = row.to(tl.int64)[:, None] * CHANNELS + source[None, :]
    x = tl.load(x_ptr + clip * x_clip + place, mask=(row < rows)[:, None], other=0.0)
    x = tl.permute(tl.reshape(x, [ROWS, PATCH, PATCH]), [2, 0, 1])

    side = tl.arange(0, PATCH)
    frame = colour.to(tl.int64) * F + row // (H * W)
    line = frame[None, :] * (H * PATCH) + (row // W % H)[None, :] * PATCH + side[:, None]
    column = (row % W)[:, None] * PATCH + side[None, :]
    target = line[:, :, None] * (W * PATCH) + column[None, :, :]
    tl.store(out_ptr + clip * out_clip + target, x, mask=(row < rows)[None, :, None])
