"""How to cut a diffusion decode so that it fits: the clip as a whole, its heads in more groups, in the end tiles.

The decoder sees the whole picture through its eight last blocks, so there is no exact way to cut it beyond the heads:
tiles give another picture, the nearer to the whole the more they overlap.

Source: video_vae.md sections 6.9 and 6.10.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..config import DiffusionVAEConfig
from ..memory import in_words
from .conv_vae import PIXEL_CHANNELS
from .diffusion_grid import DecodeGrid, smallest_overlap
from .diffusion_layers import HIDDEN_BYTES, MLP_GROWTH, chunk_tokens
from .diffusion_vae import PIECE_FRAMES
from .host_frames import frames_bytes
from .plan import PLANNED, AskedSizes, DecodePlan, bytes_of_recording
from .tiling import Tiling, split_axis

# On top of the tensors counted below: small buffers, the allocator's rounding, workspace of the matrix products. The
# tensors alone are 1 to 4 % more than an H200 took at 1536x1024x121 and 768x512x121.
_MARGIN = 1.03
# All heads at once move less memory (a norm is not made twice, 2 % of a decode), two groups take a quarter less of it.
_FEWEST_GROUPS = 2
# Tiles after a plan that ran out of memory ask for at most this share of it. The whole clip in another way is worth a
# try for less.
_SMALLER = 0.85
# Where nothing fits, the plan of least work within this factor of the smallest.
_NEARLY = 1.1


def plan_diffusion_decode(
    config: DiffusionVAEConfig,
    latent_shape: Sequence[int],
    *,
    item_bytes: int,
    free_bytes: int | None,
    asked: AskedSizes = PLANNED,
) -> DecodePlan:
    """Choose the plan of least work that fits.

    latent_shape, item_bytes, free_bytes: see plan.plan_decode. asked: sizes of tiles are honoured, but for overlaps
    below the reference's smallest, which show seams; the reason says so.
    """
    clip = _Clip.of(config, latent_shape, item_bytes)
    tried: list[DecodePlan] = []
    plan = None
    for candidate in _candidates(clip, asked):
        tried.append(candidate)
        if free_bytes is None or candidate.peak_bytes <= free_bytes:
            plan = candidate
            break
    fits = plan is not None
    if plan is None:
        least = min(candidate.peak_bytes for candidate in tried)
        plan = next(candidate for candidate in tried if candidate.peak_bytes <= _NEARLY * least)
    reason = clip.words(plan)
    if free_bytes is not None:
        reason += f", {in_words(free_bytes)} are free"
    if plan is not tried[0]:
        reason += f"; {clip.words(tried[0], brief=True)} would take {in_words(tried[0].peak_bytes)}"
    reason += clip.overlap_words(asked) if plan.tiling else ""
    if not fits:
        reason += "; nothing is smaller, so this may run out of memory: use a smaller picture"
    return replace(plan, reason=reason)


def exact_diffusion_bytes(
    config: DiffusionVAEConfig, latent_shape: Sequence[int], *, item_bytes: int, asked: AskedSizes = PLANNED
) -> int:
    """See plan.exact_decode_bytes."""
    clip = _Clip.of(config, latent_shape, item_bytes)
    untiled = [plan.peak_bytes for plan in _candidates(clip, asked, split_more=False)]
    return min(untiled)


def smaller_diffusion_plan(
    config: DiffusionVAEConfig, latent_shape: Sequence[int], failed: DecodePlan, *, item_bytes: int
) -> DecodePlan | None:
    """The plan of least work that asks for less than one that ran out of memory, with tiles for clearly less, or
    None."""
    clip = _Clip.of(config, latent_shape, item_bytes)
    for plan in _candidates(clip, PLANNED):
        if plan.peak_bytes < failed.peak_bytes * (_SMALLER if plan.tiling else 1):
            reason = f"{clip.words(plan)}; out of memory before with: {failed.reason}"
            return replace(plan, reason=reason)
    return None


@dataclass(frozen=True)
class _Clip:
    config: DiffusionVAEConfig
    grid: DecodeGrid
    latent_frames: int
    item_bytes: int

    @classmethod
    def of(cls, config: DiffusionVAEConfig, latent_shape: Sequence[int], item_bytes: int) -> _Clip:
        return cls(config, DecodeGrid.of(config, latent_shape[2:]), latent_shape[2], item_bytes)

    @property
    def group_counts(self) -> list[int]:
        heads = self.config.stage_channels[-1] // self.config.head_dim
        return [count for count in sorted({min(_FEWEST_GROUPS, heads), heads}) if heads % count == 0]

    def plan(self, tiling: Tiling | None, head_groups: int) -> DecodePlan:
        peak_bytes = int(_MARGIN * max(self._trunk_bytes(), self._render_bytes(tiling, head_groups)))
        recording_bytes = self._recording_bytes(tiling, head_groups)
        return DecodePlan(self.latent_frames, peak_bytes, "", tiling, head_groups, recording_bytes)

    def _trunk_bytes(self) -> int:
        """The largest of the first three stages and of the steps between them."""
        peak = 0
        for stage, sizes in enumerate(self.grid.stages):
            tokens, channels = math.prod(sizes), self.config.stage_channels
            after = tokens * math.prod(self.config.upsamples[stage][0]) * channels[stage + 1]
            beside = (tokens * channels[stage] + 2 * after) * self.item_bytes
            peak = max(peak, self._stage_bytes(tokens, stage, 1), beside)
        return peak

    def _stage_bytes(self, tokens: int, stage: int, head_groups: int) -> int:
        """Stream, queries, keys and values of a stage, and what a chunk of tokens takes beside them."""
        channels = self.config.stage_channels[stage]
        rows = chunk_tokens(tokens, channels, self.item_bytes)
        chunk = rows * channels * (2 + 3 / head_groups + 2 * MLP_GROWTH)
        return int((tokens * channels * (2 + 2 / head_groups) + chunk) * self.item_bytes)

    def _largest_tile(self, tiling: Tiling | None) -> tuple[int, int, int]:
        """(tokens of stage 4, frames, pixels) of the largest tile."""
        grid = self.grid
        cells, (frames, height, width) = grid.largest_tile(tiling or Tiling((0, 0, 0), (0, 0, 0)))
        frames = frames if tiling else grid.frames
        # The last tile in time has the ghost cells.
        return (cells[0] + grid.ghost_cells) * cells[1] * cells[2], frames, frames * height * width

    def _tile_bytes(self, tiling: Tiling | None, head_groups: int) -> int:
        """Stages 4 and 5 of the largest tile."""
        config = self.config
        fourth, _, pixels = self._largest_tile(tiling)
        fifth = pixels // config.patch_size**2
        context = fourth * config.stage_channels[-2] * self.item_bytes
        stream = fifth * config.stage_channels[-1] * self.item_bytes
        stage_5 = context + self._stage_bytes(fifth, len(config.stage_channels) - 1, head_groups)
        stage_5 += min(HIDDEN_BYTES, stream)  # the context of a few cells, before it is added
        return max(self._stage_bytes(fourth, len(config.stage_channels) - 2, 1), stage_5)

    def _recording_bytes(self, tiling: Tiling | None, head_groups: int) -> int:
        """Of the clip or the largest tile: noise, result and its copy, and what else is alive inside; of a tile also
        its part of the context, which is copied to be changed."""
        fourth, _, pixels = self._largest_tile(tiling)
        values = pixels * PIXEL_CHANNELS * self.item_bytes
        buffers, inside = 2 * values, self._tile_bytes(tiling, head_groups)
        if tiling is None:
            inside = max(inside, self._trunk_bytes())
        else:
            # As it comes in; the copy of it that is changed is counted inside.
            buffers += fourth * self.config.stage_channels[-2] * self.item_bytes
        return bytes_of_recording(_MARGIN * buffers, _MARGIN * (inside + values))

    def _render_bytes(self, tiling: Tiling | None, head_groups: int) -> int:
        """Stages 4 and 5 of the largest tile, and what lies beside them."""
        grid, config = self.grid, self.config
        _, frames, pixels = self._largest_tile(tiling)
        canvas = grid.frames * grid.height * grid.width * PIXEL_CHANNELS * self.item_bytes
        # A frame of the result leaves in the weights' dtype and as float32; some more of it wait for the host.
        beside = canvas + pixels * PIXEL_CHANNELS * self.item_bytes * (config.num_steps > 1)
        if tiling is not None:
            whole = (grid.cells[0] + grid.ghost_cells) * grid.cells[1] * grid.cells[2]
            beside += whole * config.stage_channels[-2] * self.item_bytes
            beside += pixels * PIXEL_CHANNELS * self.item_bytes  # its part of the canvas
            beside += 2 * frames_bytes(frames, grid.height, grid.width)
        else:
            beside += 2 * frames_bytes(min(frames, 2 * PIECE_FRAMES), grid.height, grid.width)
        return beside + self._tile_bytes(tiling, head_groups)

    def words(self, plan: DecodePlan, *, brief: bool = False) -> str:
        grid = self.grid
        heads = f"heads in {plan.head_groups} groups" if plan.head_groups > 1 else "all heads at once"
        if plan.tiling is None:
            how = f"whole clip: {grid.content_frames} frames of {self._picture()}, {heads}"
            return f"the whole clip, {heads}," if brief else f"{how}, about {in_words(plan.peak_bytes)}"
        time, rows, columns = grid.tiles(plan.tiling)
        _, made = grid.largest_tile(plan.tiling)
        content = [grid.content_frames, *(axis.stop - axis.start for axis in grid.content)]
        largest = [min(sizes) for sizes in zip(made, content)]  # without the padding of a small latent
        count = len(time) * len(rows) * len(columns)
        shared = []
        if len(time) > 1:
            shared.append(f"{plan.tiling.overlap[0] * grid.frame_cells} frames")
        if len(rows) > 1 or len(columns) > 1:
            shared.append(f"{max(plan.tiling.overlap[1:]) * grid.pixel_cells} pixels")
        how = f"{count} tiles of up to {largest[0]} frames of {largest[2]}x{largest[1]}"
        if brief:
            return f"{how}, {heads},"
        return (
            f"{how} that share {' and '.join(shared)}, of {grid.content_frames} frames of {self._picture()}, {heads}, "
            f"about {in_words(plan.peak_bytes)}"
        )

    def _picture(self) -> str:
        rows, columns = self.grid.content
        return f"{columns.stop - columns.start}x{rows.stop - rows.start}"

    def overlap_words(self, asked: AskedSizes) -> str:
        """What became of overlaps that were asked for."""
        least = smallest_overlap(self.config)
        raised = [
            f"{name} {value} raised to {least[axis] * scale}"
            for name, value, axis, scale in (
                ("temporal_overlap", asked.temporal_overlap, 0, self.grid.frame_cells),
                ("overlap", asked.overlap, 1, self.grid.pixel_cells),
            )
            if value and value < least[axis] * scale
        ]
        return f"; {' and '.join(raised)}: less shows seams" if raised else ""


def _candidates(clip: _Clip, asked: AskedSizes, *, split_more: bool = True) -> Iterator[DecodePlan]:
    """Plans by work: the whole clip, then tilings, each with few and with many groups of heads. Axes with an asked size
    have it; others are split only with split_more."""
    grid, least = clip.grid, smallest_overlap(clip.config)
    scales = (grid.frame_cells, grid.pixel_cells, grid.pixel_cells)
    sizes = (asked.temporal_size, asked.tile_size, asked.tile_size)
    overlaps = (asked.temporal_overlap, asked.overlap, asked.overlap)
    axes = []
    for cells, size, overlap, scale, low, smallest in zip(
        grid.cells, sizes, overlaps, scales, least, grid.tile_minimum
    ):
        shared = max(low, overlap // scale)
        floor = max(smallest, shared + shared // 2)
        if size:
            wanted = max(size // scale, floor)
            axes.append([(0, 0) if wanted >= cells else (wanted, shared)])
        else:
            axes.append([(0, 0), *_sizes(cells, shared, floor)] if split_more else [(0, 0)])
    weighted = [
        [(_cells_of_tiles(cells, *choice, smallest), choice) for choice in choices]
        for cells, choices, smallest in zip(grid.cells, axes, grid.tile_minimum)
    ]
    combined = sorted(product(*weighted), key=lambda axes: math.prod(work for work, _ in axes))
    for choice in combined:
        size, shared = zip(*(sizes for _, sizes in choice))
        tiling = Tiling(size, shared) if any(size) else None
        for head_groups in clip.group_counts:
            yield clip.plan(tiling, head_groups)


def _cells_of_tiles(cells: int, size: int, overlap: int, minimum: int) -> int:
    return sum(tile.stop - tile.start for tile in split_axis(cells, size, overlap, minimum))


def _sizes(cells: int, overlap: int, floor: int) -> Iterator[tuple[int, int]]:
    """(size, overlap) for two tiles of an axis, three, and so on, as even as they get."""
    count = 2
    while True:
        size = -(-(cells + overlap * (count - 1)) // count)
        if size < floor or size >= cells:
            return
        yield size, overlap
        count += 1
