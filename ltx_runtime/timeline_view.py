"""The phase log as a timeline widget reads it: events without what repeats on every line, and the render's totals."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .timing import is_table, summarize

SCHEMA = "ltxgraph.timeline/1"
# What new_render_id makes, and an arm's name behind it: nothing that could leave the log's folder.
RENDER_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9]{3}-[0-9a-f]{6}(-[a-z]{1,16}){0,4}")
_SHOWN = (
    "t_ms",
    "phase",
    "event",
    "message",
    "wall_ms",
    "gpu_ms",
    "gpu_method",
    "gpu_busy",
    "stream_ms",
    "cpu_ms",
    "mem_peak_bytes",
    "nvml",
)


def compact(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event of the phase log without nulls, without the fields that are the same in all, and without tables in
    its attributes (`timing.is_table`): those stay in the file."""
    shown = {field: event[field] for field in _SHOWN if event.get(field) is not None}
    attrs = {name: value for name, value in event["attrs"].items() if not is_table(value)}
    return shown | ({"attrs": attrs} if attrs else {})


def read_timeline(path: Path, most_events: int | None = None) -> dict[str, Any]:
    """A log file as {schema, render, time (of the first event), events (`compact`), summary (`timing.summarize`)}.

    most_events: read no further, to see the render as it was when a node of it ended. A half-written last line, as a
    killed process leaves it, ends the reading too. Raises FileNotFoundError; ValueError for a file without one event.
    """
    events = []
    with open(path, encoding="utf-8") as lines:
        for line in itertools.islice(lines, most_events):
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                break
    if not events:
        raise ValueError(f"{path.name} holds no event of a phase log")
    return {
        "schema": SCHEMA,
        "render": events[0]["render"],
        "time": events[0]["time"],
        "events": [compact(event) for event in events],
        "summary": summarize(events),
    }
