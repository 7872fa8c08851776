"""The Triton kernels of fused_vocoder.py. Imports triton; everything else goes through fused_vocoder.py.

Signals lie channels last: float32 (B, L, C), or as three parts (3, B, L, C) whose sum is the float32 signal: its
leading 8 bits of mantissa, the next 8, the last 8. Published weights are bfloat16, so parts and weights multiply
exactly on the tensor cores and only the sums are rounded: three products where TF32 would need three with 2 bits less,
and six if the weights had 24 bits too. A tensor core drops the bits below its running sum instead of rounding, an error
that grows with the number of steps; so each block of products starts at zero and is added to the total in float32.
Measured against float64 at 768 channels and 11 taps: relative rms 1.6e-7, cuDNN's float32 1.1e-6.

5 s of sound are 1.1 TFLOP: 3.4 ms of bfloat16 tensor cores at their peak. Measured on an H200: 9.7 ms, the widest
convolutions at 525 of 989 TFLOP/s; cuDNN's take 43. An activation reads 4 bytes a value and writes 6, 513 M values in
all: 1.2 ms at 4.3 TB/s, measured 3.7; it is bound by its arithmetic.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..triton_use import launch

PARTS = 3
_MEAN_VALUES = 1024


@dataclass(frozen=True)
class ConvTile:
    """rows (positions) and columns (output channels) a program, values of the sum a step; powers of two."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3

    @property
    def shared_bytes(self) -> int:
        return self.stages * 2 * self.depth * (PARTS * self.rows + self.columns)

    def within(self, shared_bytes: int) -> ConvTile:
        """For a GPU with less shared memory: shorter steps, then fewer in flight. A packed weight suits both."""
        tile = self
        if tile.shared_bytes > shared_bytes and tile.depth == 64:
            tile = replace(tile, depth=32)
        while tile.shared_bytes > shared_bytes and tile.stages > 1:
            tile = replace(tile, stages=tile.stages - 1)
        return tile


@dataclass(frozen=True)
class SnakeTile:
    """segments of so many positions a program, each walked by itself, and the most channels; powers of two."""

    segments: int = 16
    positions: int = 16
    channels: int = 32
    warps: int = 4


SNAKE = SnakeTile()


def conv_tile(channels: int, columns: int) -> ConvTile:
    """The fastest tile on an H200 for so many input and output channels (docs/decisions.md)."""
    if columns > 64 and columns != 192:
        return ConvTile(64, 128, 32, stages=4) if channels % 64 else ConvTile(128, 128, 64, warps=8)
    if columns > 32:
        return ConvTile(64, 64, 32, stages=4) if channels < 64 else ConvTile(128, 64, 32)
    if columns > 16:
        return ConvTile(128, 32, 32, stages=2)
    return ConvTile(128, 16, 16, stages=4)


def pack(weight: Tensor, dtype: torch.dtype = torch.bfloat16, tile: ConvTile | None = None) -> Tensor:
    """A convolution's weight (N, C, taps) as `conv` takes it: (rows, columns), one row for each tap and channel."""
    columns, channels, _ = weight.shape
    tile = tile or conv_tile(channels, columns)
    spacing = _tap_rows(channels, tile.depth)
    rows = F.pad(weight.permute(2, 1, 0), (0, -columns % tile.columns, 0, spacing - channels)).flatten(0, 1)
    return F.pad(rows, (0, 0, 0, -rows.shape[0] % tile.depth)).to(dtype).contiguous()


def _tap_rows(channels: int, depth: int) -> int:
    """Rows of a packed weight that a tap takes: whole steps, unless a step holds whole taps."""
    return channels if depth % channels == 0 else triton.cdiv(channels, depth) * depth


def snake(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    frequency: Tensor,
    gain: Tensor,
    parts: Tensor,
    tile: SnakeTile | None = None,
) -> None:
    """The anti-aliased activation of a signal, as parts.

    x: (B, L, C) float32. up, down: (12,) float32, up with its gain of 2. frequency, gain: (C,) float32.
    parts: (3, B, L, C), written.
    """
    batch, length, channels = x.shape
    tile = tile or SNAKE
    columns = min(tile.channels, channels & -channels)  # the largest power of two that divides the channels
    segments = tile.segments * (tile.channels // columns)
    grid = (triton.cdiv(length, segments * tile.positions), channels // columns, batch)
    launch(
        _snake, grid,
        x, up, down, frequency, gain, parts,
        length, channels,
        SEGMENTS=segments, POSITIONS=tile.positions, COLUMNS=columns, num_warps=tile.warps,
    )  # fmt: skip


def conv(
    parts: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    *,
    taps: int,
    dilation: int,
    padding: int,
    residual: Tensor | None = None,
    tile: ConvTile | None = None,
) -> None:
    """out[l] = bias + sum over taps t of parts[l + t * dilation - padding] @ weight[t] (+ residual[l]).

    parts: (3, B, L, C); outside of the signal there is silence. weight: of the parts' dtype, from `pack`. bias: (N,)
    float32. out: (B, L, N) float32, written. residual: (B, L, N) float32; out will do.
    """
    _, batch, length, channels = parts.shape
    columns = out.shape[2]
    tile = (tile or conv_tile(channels, columns)).within(_shared_memory(parts.device))
    steps = triton.cdiv(taps * _tap_rows(channels, tile.depth), tile.depth)
    grid = (triton.cdiv(length, tile.rows) * triton.cdiv(columns, tile.columns), batch)
    launch(
        _conv, grid,
        parts, weight, bias, out if residual is None else residual, out,
        length, columns, channels, weight.shape[1], taps, dilation, padding, steps, int(residual is not None),
        # Known to the compiler where a step and a tap do not fit together: it then sees which values lie side by side.
        CHANNELS=0 if channels % tile.depth == 0 else channels,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def mean(signals: Sequence[Tensor], out: Tensor) -> None:
    """The mean of one or three float32 signals (B, L, C), into out: (B, L, C) float32, or its parts (3, B, L, C)."""
    count = signals[0].numel()
    first, *others = signals
    second, third = others or (None, None)
    grid = (triton.cdiv(count, _MEAN_VALUES),)
    launch(_mean, grid, first, second, third, out, count, PARTS=out.dim() == 4, VALUES=_MEAN_VALUES, num_warps=4)


def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may take."""
    if device.type != "cuda":
        return 1 << 30
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@triton.jit
def _store_parts(y, pointer, part_stride, mask):
    """Three parts of a dtype whose mantissa holds a third of the bits: each is what the ones before left."""
    dtype: tl.constexpr = pointer.dtype.scalar.element_ty
    high = y.to(dtype)
    rest = y - high.to(tl.float32)
    middle = rest.to(dtype)
    low = (rest - middle.to(tl.float32)).to(dtype)
    tl.store(pointer, high, mask=mask)
    tl.store(pointer + part_stride, middle, mask=mask)
    tl.store(pointer + 2 * part_stride, low, mask=mask)


@triton.jit
def _sin_squared(z):
    """sin(z)^2: within 4e-7 where |z| < 1e4 and 2e-6 where |z| < 1e5, in [0, 1] everywhere. Rounding z itself to
    float32 costs 6e-8 |z|.

    Its period is pi, so the nearest multiple is taken off (in three pieces: the first two products are exact where it
    matters) and no quadrant has to be told apart.
    """
    ROUND: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it leaves whole numbers
    turns = (z * 0.3183098861837907 + ROUND) - ROUND
    r = z - turns * 3.140625
    r = r - turns * 9.67502593994140625e-4
    r = r - turns * 1.50995799097e-7
    r2 = r * r
    p = -2.50518649e-8 * r2 + 2.75573114e-6
    p = p * r2 - 1.98412698e-4
    p = p * r2 + 8.3333333e-3
    p = p * r2 - 1.66666667e-1
    s = r + r * r2 * p
    return tl.minimum(s * s, 1.0)


@triton.jit
def _activate(v, frequency, gain):
    return v + _sin_squared(v * frequency) * gain


# A program walks along its segments position by position. It holds seven input samples around position p, from which
# the two samples of the doubled signal at p follow, and six sums of outputs that are under way: nothing but the input
# is read, nothing but the output written, and every sine is taken once.
@triton.jit(do_not_specialize=["length"])
def _snake(
    x_ptr, up_ptr, down_ptr, frequency_ptr, gain_ptr, parts_ptr,
    length, channels,
    SEGMENTS: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    # COLUMNS divides the channels, which the compiler can't know of 24.
    clip = tl.multiple_of(tl.program_id(2).to(tl.int64) * length * channels, COLUMNS)
    part_stride = tl.multiple_of(tl.num_programs(2).to(tl.int64) * length * channels, COLUMNS)
    x_ptr += clip
    parts_ptr += clip
    frequency = tl.load(frequency_ptr + column)
    gain = tl.load(gain_ptr + column)
    u0, u1, u2 = tl.load(up_ptr), tl.load(up_ptr + 1), tl.load(up_ptr + 2)
    u3, u4, u5 = tl.load(up_ptr + 3), tl.load(up_ptr + 4), tl.load(up_ptr + 5)
    u6, u7, u8 = tl.load(up_ptr + 6), tl.load(up_ptr + 7), tl.load(up_ptr + 8)
    u9, u10, u11 = tl.load(up_ptr + 9), tl.load(up_ptr + 10), tl.load(up_ptr + 11)
    d0, d1, d2 = tl.load(down_ptr), tl.load(down_ptr + 1), tl.load(down_ptr + 2)
    d3, d4, d5 = tl.load(down_ptr + 3), tl.load(down_ptr + 4), tl.load(down_ptr + 5)
    d6, d7, d8 = tl.load(down_ptr + 6), tl.load(down_ptr + 7), tl.load(down_ptr + 8)
    d9, d10, d11 = tl.load(down_ptr + 9), tl.load(down_ptr + 10), tl.load(down_ptr + 11)

    last = length - 1
    segment = (tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS))[:, None]
    start = segment * POSITIONS
    centre = tl.minimum(tl.maximum(start - 4, 0), last)
    x0 = tl.load(x_ptr + tl.multiple_of(tl.maximum(centre - 3, 0) * channels, (1, COLUMNS)) + column)
    x1 = tl.load(x_ptr + tl.multiple_of(tl.maximum(centre - 2, 0) * channels, (1, COLUMNS)) + column)
    x2 = tl.load(x_ptr + tl.multiple_of(tl.maximum(centre - 1, 0) * channels, (1, COLUMNS)) + column)
    x3 = tl.load(x_ptr + tl.multiple_of(centre * channels, (1, COLUMNS)) + column)
    x4 = tl.load(x_ptr + tl.multiple_of(tl.minimum(centre + 1, last) * channels, (1, COLUMNS)) + column)
    x5 = tl.load(x_ptr + tl.multiple_of(tl.minimum(centre + 2, last) * channels, (1, COLUMNS)) + column)
    x6 = tl.load(x_ptr + tl.multiple_of(tl.minimum(centre + 3, last) * channels, (1, COLUMNS)) + column)
    y0 = tl.zeros([SEGMENTS, COLUMNS], tl.float32)
    y1, y2, y3, y4, y5 = y0, y0, y0, y0, y0
    for step in range(POSITIONS + 6):
        p = start - 3 + step
        # Both ends go on as they are: in the input by the clamped address, in the doubled signal because the samples
        # stay where they are while p is outside.
        moves = (p > 0) & (p < length)
        new = tl.load(x_ptr + tl.multiple_of(tl.minimum(tl.maximum(p + 3, 0), last) * channels, (1, COLUMNS)) + column)
        x0 = tl.where(moves, x1, x0)
        x1 = tl.where(moves, x2, x1)
        x2 = tl.where(moves, x3, x2)
        x3 = tl.where(moves, x4, x3)
        x4 = tl.where(moves, x5, x4)
        x5 = tl.where(moves, x6, x5)
        x6 = tl.where(moves, new, x6)
        even = _activate(u11 * x0 + u9 * x1 + u7 * x2 + u5 * x3 + u3 * x4 + u1 * x5, frequency, gain)
        odd = _activate(u10 * x1 + u8 * x2 + u6 * x3 + u4 * x4 + u2 * x5 + u0 * x6, frequency, gain)
        first = even
        even = tl.where(p < length, even, odd)
        odd = tl.where(p < 0, first, odd)
        done = y0 + d11 * even
        y0 = y1 + d9 * even + d10 * odd
        y1 = y2 + d7 * even + d8 * odd
        y2 = y3 + d5 * even + d6 * odd
        y3 = y4 + d3 * even + d4 * odd
        y4 = y5 + d1 * even + d2 * odd
        y5 = d0 * odd
        place = p - 3
        here = (place < length) & (step >= 6)
        _store_parts(done, parts_ptr + tl.multiple_of(place * channels, (1, COLUMNS)) + column, part_stride, here)


@triton.jit(do_not_specialize=["length", "taps", "dilation", "padding", "steps", "adds"])
def _conv(
    parts_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr,
    length, columns, channels, weight_columns, taps, dilation, padding, steps, adds,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """CHANNELS: 0 where the channels are whole steps. adds: whether there is a residual."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    clip = tl.program_id(1).to(tl.int64) * length
    width = channels if CHANNELS == 0 else CHANNELS
    part_stride = tl.num_programs(1).to(tl.int64) * length * width
    high_ptr = parts_ptr + clip * width
    middle_ptr = high_ptr + part_stride
    low_ptr = middle_ptr + part_stride
    weights = weight_ptr + k[:, None] * weight_columns + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        if CHANNELS != 0 and DEPTH % CHANNELS == 0:
            # Several taps a step.
            tap = step * (DEPTH // CHANNELS) + k // CHANNELS
            source = row[:, None] + (tap * dilation - padding)[None, :]
            inside = (source >= 0) & (source < length) & (tap < taps)[None, :]
            place = source * CHANNELS + (k % CHANNELS)[None, :]
        elif CHANNELS != 0:
            # The last step of a tap is partly beyond the channels.
            TAP_STEPS: tl.constexpr = (CHANNELS + DEPTH - 1) // DEPTH
            channel = step % TAP_STEPS * DEPTH + k
            source = row + (step // TAP_STEPS * dilation - padding)
            inside = ((source >= 0) & (source < length))[:, None] & (channel < CHANNELS)[None, :]
            place = source[:, None] * CHANNELS + channel[None, :]
        else:
            tap_steps = channels // DEPTH
            source = row + (step // tap_steps * dilation - padding)
            inside = ((source >= 0) & (source < length))[:, None]
            place = source[:, None] * channels + (step % tap_steps * DEPTH + k)[None, :]
        low = tl.load(low_ptr + place, mask=inside, other=0.0)
        middle = tl.load(middle_ptr + place, mask=inside, other=0.0)
        high = tl.load(high_ptr + place, mask=inside, other=0.0)
        weight = tl.load(weights)
        weights += DEPTH * weight_columns
        products = tl.dot(low, weight)
        products = tl.dot(middle, weight, products)
        products = tl.dot(high, weight, products)
        total += products
    total += tl.load(bias_ptr + column, mask=column < columns, other=0.0)[None, :]
    place = (clip + row)[:, None] * columns + column[None, :]
    here = (row < length)[:, None] & (column < columns)[None, :]
    if adds:
        total += tl.load(residual_ptr + place, mask=here, other=0.0)
    tl.store(out_ptr + place, total, mask=here)


@triton.jit
def _mean(first_ptr, second_ptr, third_ptr, out_ptr, count, PARTS: tl.constexpr, VALUES: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    here = index < count
    y = tl.load(first_ptr + index, mask=here)
    if second_ptr is not None:
        y = (y + tl.load(second_ptr + index, mask=here) + tl.load(third_ptr + index, mask=here)) / 3.0
    if PARTS:
        _store_parts(y, out_ptr + index, count, here)
    else:
        tl.store(out_ptr + index, y, mask=here)
