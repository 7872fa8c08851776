"""Sizes of a diffusion decode: what is padded, what is cut off again, where tiles lie, and the noise for them.

Source: video_vae.md sections 6.1, 6.9 and 8.3.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import DiffusionVAEConfig
from ..errors import RequestError
from ..shapes import SPACE_FACTOR, TIME_FACTOR
from .conv_vae import PIXEL_CHANNELS
from .tiling import Span, Tile, Tiling, ramp_weights, split_axis

Sizes = tuple[int, int, int]


def smallest_latent(config: DiffusionVAEConfig) -> Sizes:
    """Latent frames, height and width below which a window would not fit into its stage: (3, 7, 7)."""
    smallest, grown = [1, 1, 1], [1, 1, 1]
    for stage, kernel in enumerate(config.stage_kernels):
        smallest = [max(low, -(-size // scale)) for low, size, scale in zip(smallest, kernel, grown)]
        if stage < len(config.upsamples):
            grown = [scale * factor for scale, factor in zip(grown, config.upsamples[stage][0])]
    return tuple(smallest)


def smallest_tile(config: DiffusionVAEConfig) -> Sizes:
    """Cells of stage 4 below which a window would not fit into a tile: (6, 6, 6)."""
    stride = config.upsamples[-1][0]
    return tuple(
        max(fourth, -(-fifth // factor)) for fourth, fifth, factor in zip(*config.stage_kernels[-2:], stride)
    )


def smallest_overlap(config: DiffusionVAEConfig) -> Sizes:
    """Cells of stage 4 that tiles share at least: as far as the further-looking of stages 4 and 5 sees, on the grid of
    latents: (20, 20, 20), which is 40 frames and 160 pixels."""
    stride = config.upsamples[-1][0]
    seen = []
    for axis, factor in enumerate(stride):
        fourth = config.stage_depths[-2] * (config.stage_kernels[-2][axis] // 2)
        fifth = math.ceil(config.stage_depths[-1] * (config.stage_kernels[-1][axis] // 2) / factor)
        cells_a_latent = (TIME_FACTOR if axis == 0 else SPACE_FACTOR // config.patch_size) // factor
        seen.append(-(-max(fourth, fifth) // cells_a_latent) * cells_a_latent)
    return tuple(seen)


@dataclass(frozen=True)
class DecodeGrid:
    """One clip on its way through the decoder.

    padding: of a latent, for F.pad in replicate mode: edges up to the smallest latent, and ghost frames behind.
    stages: tokens along (time, height, width) of stages 1 to 3, ghost frames included.
    cells, ghost_cells: stage 4 without the ghost frames, and how many of its frames they add.
    frames, height, width: of what stage 5 makes. content_frames, content: what of it the latent stands for, the frames
    from the first on and (rows, columns).
    frame_cells, pixel_cells: frames and pixels of a cell. tile_minimum: see smallest_tile.
    """

    padding: tuple[int, ...]
    stages: tuple[Sizes, ...]
    cells: Sizes
    ghost_cells: int
    frames: int
    height: int
    width: int
    content_frames: int
    content: tuple[slice, slice]
    frame_cells: int
    pixel_cells: int
    tile_minimum: Sizes

    @classmethod
    def of(cls, config: DiffusionVAEConfig, latent: Sequence[int]) -> DecodeGrid:
        """latent: frames, height and width."""
        need = [max(0, low - size) for low, size in zip(smallest_latent(config), latent)]
        before = (need[1] // 2, need[2] // 2)
        ghost = 2 * (config.stage_kernels[0][0] // 2)
        frames, height, width = (size + more for size, more in zip(latent, need))
        frame_cells, pixel_cells = config.upsamples[-1][0][0], config.upsamples[-1][0][1] * config.patch_size
        cells_a_frame = TIME_FACTOR // frame_cells
        stages = [(frames + ghost, height, width)]
        for stride, _ in config.upsamples[:-2]:
            time, *space = (cells * factor for cells, factor in zip(stages[-1], stride))
            stages.append((time - stride[0] + 1, *space))
        made = TIME_FACTOR * (frames + ghost - 1) + 1
        rows, columns = (
            slice(SPACE_FACTOR * start, SPACE_FACTOR * (start + size)) for start, size in zip(before, latent[1:])
        )
        return cls(
            padding=(before[1], need[2] - before[1], before[0], need[1] - before[0], 0, need[0] + ghost),
            stages=tuple(stages),
            cells=(
                cells_a_frame * (frames - 1) + 1,
                height * SPACE_FACTOR // pixel_cells,
                width * SPACE_FACTOR // pixel_cells,
            ),
            ghost_cells=cells_a_frame * ghost,
            frames=min(made, max(made - TIME_FACTOR * ghost, config.stage_kernels[-1][0])),
            height=height * SPACE_FACTOR,
            width=width * SPACE_FACTOR,
            content_frames=TIME_FACTOR * (latent[0] - 1) + 1,
            content=(rows, columns),
            frame_cells=frame_cells,
            pixel_cells=pixel_cells,
            tile_minimum=smallest_tile(config),
        )

    def cropped(self, pixels: Tensor, frame: int) -> Tensor:
        """What a latent stands for, of pixels (1, 3, n, height, width) from this frame on; perhaps no frame at all."""
        rows, columns = self.content
        return pixels[:, :, : max(0, self.content_frames - frame), rows, columns]

    def ghosts_of(self, time: Span) -> int:
        """Ghost cells behind a tile: only those at the end of the clip have them."""
        return self.ghost_cells if time.stop == self.cells[0] else 0

    def tiles(self, tiling: Tiling) -> list[list[Tile]]:
        """Of each axis, in cells."""
        return [
            split_axis(cells, size, overlap, minimum)
            for cells, size, overlap, minimum in zip(self.cells, tiling.size, tiling.overlap, self.tile_minimum)
        ]

    def largest_tile(self, tiling: Tiling) -> tuple[Sizes, Sizes]:
        """(cells, (frames, height, width) of what it makes) along each axis of the largest tile."""
        cells = tuple(max(tile.stop - tile.start for tile in tiles) for tiles in self.tiles(tiling))
        scales = (self.frame_cells, self.pixel_cells, self.pixel_cells)
        made = [size * scale for size, scale in zip(cells, scales)]
        if cells[0] == self.cells[0]:
            made[0] -= self.frame_cells - 1
        return cells, tuple(made)

    def spans(self, tiling: Tiling) -> tuple[list[Span], list[Span], list[Span]]:
        """Tiles of each axis with the frames, rows and columns that they give."""
        times, rows, columns = self.tiles(tiling)
        return (
            [self._time_span(tile) for tile in times],
            [self._space_span(tile) for tile in rows],
            [self._space_span(tile) for tile in columns],
        )

    def _time_span(self, tile: Tile) -> Span:
        scale = self.frame_cells
        # The first cell of a clip has one frame less.
        first, last = max(0, tile.start * scale - scale + 1), tile.stop * scale - scale + 1
        return _span(tile, first, last, scale)

    def _space_span(self, tile: Tile) -> Span:
        scale = self.pixel_cells
        return _span(tile, tile.start * scale, tile.stop * scale, scale)


def _span(tile: Tile, first: int, last: int, scale: int) -> Span:
    weights = ramp_weights(last - first, tile.left * scale, tile.right * scale)
    return Span(tile.start, tile.stop, first, last, weights)


@dataclass(frozen=True)
class DecodeNoise:
    """Where the noise of a diffusion decode comes from.

    seed: of a generator on the weights' device, anew for every clip of a batch, which draws in the weights' dtype;
    ComfyUI always takes 0. canvas: the noise itself instead, (1 or B, 3, F, Hpx, Wpx) as DecodeGrid has them.
    per_tile: tiles draw their own, one after the other, as the reference does in a decode of one step (with more steps
    this has no effect). Else all tiles take their part of one canvas, which is the noise of the untiled decode.
    """

    seed: int = 0
    canvas: Tensor | None = None
    per_tile: bool = False

    def check(self, clips: int, grid: DecodeGrid) -> None:
        """Raises RequestError for a canvas that does not fit so many clips."""
        if self.canvas is None:
            return
        given, wanted = tuple(self.canvas.shape), (PIXEL_CHANNELS, grid.frames, grid.height, grid.width)
        if given[1:] != wanted or given[0] not in (1, clips):
            raise RequestError(
                f"the noise of the video decoder has shape {given}, this latent is decoded from {(clips, *wanted)}. "
                "Give noise of this shape, or a seed."
            )


COMFYUI_NOISE = DecodeNoise()


class ClipNoise:
    """The noise of one clip."""

    def __init__(
        self, noise: DecodeNoise, item: int, grid: DecodeGrid, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """item: number of the clip in its batch."""
        self._shape = (1, PIXEL_CHANNELS, grid.frames, grid.height, grid.width)
        self._like = {"device": device, "dtype": dtype}
        self._generator = torch.Generator(device).manual_seed(noise.seed)
        self._canvas = None
        if noise.canvas is not None:
            self._canvas = noise.canvas[item if len(noise.canvas) > 1 else 0][None].to(**self._like)
        elif not noise.per_tile:
            self._canvas = self._draw(self._shape)

    def part(self, frames: slice, rows: slice, columns: slice) -> Tensor:
        """(1, 3, n, h, w) of the canvas, or drawn now."""
        if self._canvas is not None:
            return self._canvas[:, :, frames, rows, columns]
        return self._draw((*self._shape[:2], *(place.stop - place.start for place in (frames, rows, columns))))

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator, **self._like)
