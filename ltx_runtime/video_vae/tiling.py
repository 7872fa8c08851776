"""Overlapping tiles: how an axis is split, how much each tile counts where, and their sum as a stream of frames.

Tiles are the last resort, since a network that looks further than their overlap gives another picture; what is here
follows the reference's rules, so that it gives the reference's.

Source: video_vae.md sections 5 and 6.9.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..shapes import SPACE_FACTOR, TIME_FACTOR

CHANNELS = 3


@dataclass(frozen=True)
class Tile:
    """A stretch of one axis in cells, with the widths of the ramps to its neighbours."""

    start: int
    stop: int
    left: int
    right: int

    def pixels(self) -> slice:
        """Of latent cells along height or width."""
        return slice(self.start * SPACE_FACTOR, self.stop * SPACE_FACTOR)

    def cells(self) -> slice:
        return slice(self.start, self.stop)

    def ramp(self) -> Tensor:
        """(stop - start,) float32 weights: one, falling evenly towards a neighbour."""
        return ramp_weights(self.stop - self.start, self.left, self.right)


def ramp_weights(length: int, left: int, right: int, *, from_zero: bool = False) -> Tensor:
    """(length,) float32: ones, rising over `left` values and falling over `right`. Two tiles that share a ramp add up
    to one. from_zero: the rise begins with a zero, of a value that counts for nothing."""
    weights = torch.ones(length)
    rise = torch.arange(left) / left if from_zero and left else torch.arange(1, left + 1) / (left + 1)
    weights[:left] *= rise
    weights[length - right :] *= torch.arange(right, 0, -1) / (right + 1)
    return weights


def split_axis(cells: int, size: int, overlap: int, minimum: int = 0) -> list[Tile]:
    """The reference's tiles of an axis: overlapping by `overlap`, the last one possibly shorter. size 0 = one tile.

    minimum: a last tile that is shorter reaches further back instead.
    """
    size = max(size, 2, overlap + 1) if size else cells
    if cells <= size:
        return [Tile(0, cells, 0, 0)]
    step = size - overlap
    count = -(-(cells - overlap) // step)
    tiles = [
        Tile(i * step, min(i * step + size, cells), overlap if i else 0, overlap if i < count - 1 else 0)
        for i in range(count)
    ]
    last, before = tiles[-1], tiles[-2]
    if last.stop - last.start < minimum:
        start = max(0, cells - minimum)
        tiles[-2:] = [
            replace(before, right=before.stop - start),
            replace(last, start=start, left=before.stop - start),
        ]
    return tiles


@dataclass(frozen=True)
class Tiling:
    """Size and overlap of tiles along time, height and width, in a decoder's cells; size 0 = an axis of one tile."""

    size: tuple[int, int, int]
    overlap: tuple[int, int, int]


@dataclass(frozen=True)
class Span:
    """One tile on one axis: the cells [start, stop) that are decoded, the positions [first, last) of the result that
    they give, and how much they count there: (last - first,) float32."""

    start: int
    stop: int
    first: int
    last: int
    weights: Tensor

    @property
    def cells(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def positions(self) -> slice:
        return slice(self.first, self.last)


Range = tuple[int, int]


@dataclass(frozen=True)
class TileOverlaps:
    """Where the tiles of a decode overlap in its result.

    size: frames, height and width of one clip. tiles: how many along each of these. shared: along each, the ranges
    [first, last) to which neighbours count both.
    """

    size: tuple[int, int, int]
    tiles: tuple[int, int, int]
    shared: tuple[tuple[Range, ...], tuple[Range, ...], tuple[Range, ...]]

    @classmethod
    def of(cls, spans: Sequence[Sequence[Span]], content: Sequence[slice]) -> TileOverlaps:
        """spans: of time, rows and columns. content: the part of their positions that a decode gives, along each."""
        return cls(
            tuple(place.stop - place.start for place in content),
            tuple(map(len, spans)),
            tuple(tuple(_shared(axis, place)) for axis, place in zip(spans, content)),
        )

    def words(self) -> str:
        """As "12 tiles sharing 8 frames, 64 px"."""
        frames, rows, columns = (max((last - first for first, last in ranges), default=0) for ranges in self.shared)
        parts = [f"{frames} frames"] * bool(frames) + [f"{max(rows, columns)} px"] * bool(rows or columns)
        return f"{math.prod(self.tiles)} tiles sharing {', '.join(parts)}"


def _shared(spans: Sequence[Span], content: slice) -> Iterator[Range]:
    """Positions of which a span and the one before it count both, from the start of `content` on and cut to it."""
    for before, span in pairwise(spans):
        first = span.first + int((span.weights == 0).sum())
        first, last = max(first, content.start) - content.start, min(before.last, content.stop) - content.start
        if first < last:
            yield first, last


def latent_spans(latent: Sequence[int], tiling: Tiling) -> tuple[list[Span], list[Span], list[Span]]:
    """Tiles of a latent (frames, height, width) with the frames, rows and columns that the conv decoder makes of each.
    tiling: in latent cells.

    A latent frame stands for 8 frames, the first of a tile for one: so a later tile begins one latent frame earlier,
    and its first frame counts for nothing.
    """
    times, rows, columns = (split_axis(*axis) for axis in zip(latent, tiling.size, tiling.overlap))
    return (
        [_latent_time_span(tile) for tile in times],
        [_latent_space_span(tile) for tile in rows],
        [_latent_space_span(tile) for tile in columns],
    )


def _latent_time_span(tile: Tile) -> Span:
    start = max(0, tile.start - 1)
    first, last = TIME_FACTOR * start, TIME_FACTOR * (tile.stop - 1) + 1
    left = TIME_FACTOR * tile.left + 1 if tile.start else 0
    weights = ramp_weights(last - first, left, TIME_FACTOR * tile.right, from_zero=True)
    return Span(start, tile.stop, first, last, weights)


def _latent_space_span(tile: Tile) -> Span:
    first, last = SPACE_FACTOR * tile.start, SPACE_FACTOR * tile.stop
    weights = ramp_weights(last - first, SPACE_FACTOR * tile.left, SPACE_FACTOR * tile.right)
    return Span(tile.start, tile.stop, first, last, weights)


def completed(spans: Sequence[Span]) -> list[Span]:
    """The same spans with weights that add up to one everywhere. A short last tile whose ramps overlap breaks that."""
    total = torch.zeros(spans[-1].last)
    for span in spans:
        total[span.positions] += span.weights
    return [replace(span, weights=span.weights / total[span.positions]) for span in spans]


def blend(
    times: Sequence[Span],
    rows: Sequence[Span],
    columns: Sequence[Span],
    decode: Callable[[Span, Span, Span], Iterator[Tensor]],
    device: torch.device,
) -> Iterator[Tensor]:
    """Decode every tile, in the order time, height, width, and yield the weighted sum, frames that no later tile
    touches, in order: (1, 3, n, H, W) float32.

    decode(time, row, column): a tile's frames in pieces (1, 3, n, h, w), in order.
    """
    # Onto the device before the first tile: a copy from pageable memory makes the host wait.
    times, rows, columns = (
        [replace(span, weights=span.weights.to(device)) for span in completed(axis)] for axis in (times, rows, columns)
    )
    kept: Tensor | None = None
    for index, time in enumerate(times):
        total = torch.zeros(1, CHANNELS, time.last - time.first, rows[-1].last, columns[-1].last, device=device)
        if kept is not None:
            total[:, :, : kept.shape[2]] = kept
        for row in rows:
            for column in columns:
                mask = row.weights[:, None] * column.weights
                part = total[:, :, :, row.positions, column.positions]
                frame = 0
                for piece in decode(time, row, column):
                    stop = frame + piece.shape[2]
                    rise = time.weights[frame:stop, None, None]
                    part[:, :, frame:stop].addcmul_(piece * rise, mask)
                    frame = stop
        done = times[index + 1].first - time.first if index + 1 < len(times) else total.shape[2]
        kept = total[:, :, done:].clone()
        if done:
            yield total[:, :, :done]
        del total, part, piece  # all one memory, and the next sum needs as much
