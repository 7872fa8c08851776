"""Does a tiled decode differ from an untiled one at the seams of its tiles, or everywhere?

Two tiles are blended where they overlap (`TileOverlaps`), so that is where a seam is. `compare_at_seams` measures two
clips there and elsewhere.

Source: issue D point 6; video_vae.md sections 5 and 6.9 (tiles).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .intervals import union
from .parity import CHUNK_ELEMENTS, computable
from .video_vae.tiling import Range, TileOverlaps

AXES = ("frames", "rows", "columns")
# A mean difference that many times that of the rest sits at the seams.
_AT_SEAMS = 2.0


@dataclass(frozen=True)
class Part:
    """Some pixels of a clip: share of all, and the mean and largest |a - b| of their channels."""

    share: float
    mean_abs: float
    max_abs: float


@dataclass(frozen=True)
class SeamFindings:
    """shared: as in TileOverlaps. seams: pixels that several tiles made; inside: all others, None when there are none.
    worst: (axis, range) of the overlap with the largest mean difference, over all pixels of these frames, rows or
    columns; None when nothing differs in any."""

    shared: tuple[tuple[Range, ...], tuple[Range, ...], tuple[Range, ...]]
    seams: Part
    inside: Part | None
    worst: tuple[str, Range] | None

    @property
    def at_seams(self) -> bool | None:
        """Whether the clips differ at the seams rather than elsewhere; None when that can't be told."""
        if self.inside is None or not (self.seams.max_abs or self.inside.max_abs):
            return None
        return self.seams.mean_abs >= _AT_SEAMS * self.inside.mean_abs

    def words(self) -> str:
        """One clause: what was found, then its numbers."""
        seams, inside = self.seams, self.inside
        if inside is None:
            mean = f"mean {seams.mean_abs:.3g}, largest {seams.max_abs:.3g}"
            return f"tiles overlap everywhere, so that seams can't be told from the rest ({mean})"
        if self.at_seams is None:
            return "no difference at the seams of the tiles, nor inside them"
        found = "the difference sits at the seams" if self.at_seams else "the difference does not sit at the seams"
        found += f": mean {seams.mean_abs:.3g} where tiles overlap ({seams.share:.0%} of the pixels, largest "
        found += f"{seams.max_abs:.3g}), {inside.mean_abs:.3g} inside them (largest {inside.max_abs:.3g})"
        if self.at_seams:
            axis, (first, last) = self.worst
            found += f", most in {axis} {first} to {last - 1}"
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "shared": {axis: [list(place) for place in ranges] for axis, ranges in zip(AXES, self.shared)},
            "seams": vars(self.seams),
            "inside": None if self.inside is None else vars(self.inside),
            "worst": None if self.worst is None else {"axis": self.worst[0], "range": list(self.worst[1])},
            "at_seams": self.at_seams,
        }


def compare_at_seams(a: Tensor, b: Tensor, overlaps: Sequence[TileOverlaps]) -> SeamFindings | None:
    """Differences of two clips where tiles overlap, and elsewhere.

    a, b: IMAGE tensors (N, H, W, C) of one shape, in chunks on the device of `a`; values that are not finite are left
    out. overlaps: of the tiled decodes among the two; N may hold several clips of theirs, one after the other.
    None when the pictures no longer are what was decoded (cut, scaled, of other shapes).
    """
    if a.dim() != 4 or a.shape != b.shape or not a.numel():
        return None
    for layout in overlaps:
        if tuple(a.shape[1:3]) != layout.size[1:] or a.shape[0] % layout.size[0]:
            return None
    shared = tuple(tuple(union(place for layout in overlaps for place in layout.shared[axis])) for axis in range(3))
    clip_frames = overlaps[0].size[0]
    device = computable(a[:0]).device
    on_axis = [_mask(length, ranges, device) for length, ranges in zip((clip_frames, *a.shape[1:3]), shared)]
    in_time = on_axis[0].repeat(a.shape[0] // clip_frames)
    in_space = on_axis[1][:, None] | on_axis[2]

    # Sums and largest values stay on the device until all chunks are issued.
    like = {"device": device, "dtype": torch.float64}
    sums = {True: torch.zeros((), **like), False: torch.zeros((), **like)}
    largest = {True: torch.zeros((), **like), False: torch.zeros((), **like)}
    profiles = [torch.zeros(length, **like) for length in a.shape[:3]]
    step = max(1, CHUNK_ELEMENTS // a[0].numel())
    for start in range(0, a.shape[0], step):
        rows = slice(start, start + step)
        x = computable(a[rows])
        gap = (x.to(torch.float64) - b[rows].to(x.device)).abs_().nan_to_num_(0.0, posinf=0.0)
        seam = in_time[rows, None, None] | in_space
        most, mean = gap.amax(-1), gap.mean(-1)
        for at_seam, mask in ((True, seam), (False, ~seam)):
            sums[at_seam] += (mean * mask).sum()
            largest[at_seam] = torch.maximum(largest[at_seam], (most * mask).amax())
        profiles[0][rows] = mean.mean((1, 2))
        profiles[1] += mean.mean(2).sum(0)
        profiles[2] += mean.mean(1).sum(0)

    pixels = a.shape[0] * a.shape[1] * a.shape[2]
    seam_pixels = pixels - int((~in_time).sum()) * int((~in_space).sum())
    by_frame = profiles[0].view(-1, clip_frames).mean(0)
    means = [by_frame, profiles[1] / a.shape[0], profiles[2] / a.shape[0]]
    bands = [
        (float(profile[first:last].mean()), (axis, (first, last)))
        for axis, profile, ranges in zip(AXES, means, shared)
        for first, last in ranges
    ]
    found, worst = max(bands, default=(0.0, None))
    inside_pixels = pixels - seam_pixels
    return SeamFindings(
        shared,
        Part(seam_pixels / pixels, float(sums[True]) / max(seam_pixels, 1), float(largest[True])),
        Part(inside_pixels / pixels, float(sums[False]) / inside_pixels, float(largest[False]))
        if inside_pixels
        else None,
        worst if found else None,
    )


def _mask(length: int, ranges: Sequence[Range], device: torch.device) -> Tensor:
    mask = torch.zeros(length, dtype=torch.bool)
    for first, last in ranges:
        mask[first:last] = True
    return mask.to(device)
