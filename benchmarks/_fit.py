"""How a phase's cost grows: constant + slope * size by least squares, and what that says about it. Numbers in, numbers
out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

# CPU time this near to wall while the GPU is idle for more than half of it: the host does the work, one thing after
# another.
SERIAL_CPU_SHARE = 0.8
SERIAL_GPU_BUSY = 0.5
# A phase whose fixed part is this share of its cost at the largest size does not follow the size.
CONSTANT_SHARE = 0.75


@dataclass(frozen=True)
class Fit:
    """cost(x) = constant + slope * x + quadratic * x**2, no part negative. error: largest relative distance of a
    point."""

    constant: float
    slope: float
    quadratic: float
    error: float

    def __call__(self, x: float) -> float:
        return self.constant + self.slope * x + self.quadratic * x * x

    def constant_share(self, x: float) -> float:
        total = self(x)
        return self.constant / total if total else 0.0


@dataclass(frozen=True)
class Point:
    """One phase in one render of size x, milliseconds. gpu_ms: time in which the GPU worked, None when not measured.
    render_ms: wall of the whole render."""

    x: float
    wall_ms: float
    cpu_ms: float
    gpu_ms: float | None
    render_ms: float

    @property
    def share(self) -> float:
        return self.wall_ms / self.render_ms if self.render_ms else 0.0

    @property
    def serial(self) -> bool:
        if self.gpu_ms is None or not self.wall_ms:
            return False
        return self.cpu_ms >= SERIAL_CPU_SHARE * self.wall_ms and self.gpu_ms < SERIAL_GPU_BUSY * self.wall_ms


def fit_cost(x: Sequence[float], y: Sequence[float], *, quadratic: bool = False) -> Fit:
    """Least squares of relative errors, so that small sizes count as much as large ones; costs are never negative.

    x: sizes, at least two of them different. y: costs > 0. quadratic: allow a third term, for attention.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(x) != len(y) or len(set(x)) < 2:
        raise ValueError(
            f"{len(x)} sizes ({len(set(x))} different) and {len(y)} costs; two different sizes are the least"
        )
    if not (y > 0).all():
        raise ValueError("a cost is not positive")
    unit = x.max()
    columns = np.stack([np.ones_like(x), x / unit, (x / unit) ** 2], 1)[:, : 3 if quadratic else 2] / y[:, None]
    best, least = None, np.inf
    # The best solution without a negative part is the plain one over some of the columns: try them all.
    for count in range(1, columns.shape[1] + 1):
        for chosen in map(list, combinations(range(columns.shape[1]), count)):
            solution = np.linalg.lstsq(columns[:, chosen], np.ones_like(y), rcond=None)[0]
            error = float(((columns[:, chosen] @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(3), error
                best[chosen] = solution
    constant, slope, square = (float(v) for v in best)
    fitted = columns @ best[: columns.shape[1]]
    return Fit(constant, slope / unit, square / unit**2, float(np.abs(fitted - 1).max()))


def judge_phase(points: Sequence[Point], *, quadratic: bool = False) -> dict:
    """A phase over several sizes: its fit, its share of the wall, and what is flagged.

    flags: "serial" (at some size the host works alone, see SERIAL_*), "constant" (hardly grows with the size). Values
    named smallest and largest stand for the points of smallest and largest x.
    """
    fit = fit_cost([p.x for p in points], [p.wall_ms for p in points], quadratic=quadratic)
    smallest, largest = min(points, key=lambda p: p.x), max(points, key=lambda p: p.x)
    serial = [p for p in points if p.serial]
    flags = ["serial"] if serial else []
    if fit.constant_share(largest.x) >= CONSTANT_SHARE:
        flags.append("constant")
    return {
        "constant_ms": fit.constant,
        "slope_ms": fit.slope,
        "quadratic_ms": fit.quadratic,
        "error": fit.error,
        "constant_share_smallest": fit.constant_share(smallest.x),
        "constant_share_largest": fit.constant_share(largest.x),
        "share_smallest": smallest.share,
        "share_largest": largest.share,
        "serial_points": len(serial),
        "points": len(points),
        "flags": flags,
    }
