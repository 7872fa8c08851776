"""Arithmetic on time intervals: (start, end) pairs in one unit, end >= start."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order; touching ones are joined, empty ones dropped."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Time covered by at least one of the intervals."""
    return sum(end - start for start, end in union(intervals))


def gaps(intervals: Iterable[Interval]) -> list[Interval]:
    """The uncovered stretches between the first start and the last end."""
    merged = union(intervals)
    return [(before[1], after[0]) for before, after in pairwise(merged)]


def phase_interval(end_event: dict) -> Interval:
    """The measured stretch of a phase or segment from its end line in the phase log: ms since the render's start."""
    return end_event["t_ms"] - end_event["wall_ms"], end_event["t_ms"]
