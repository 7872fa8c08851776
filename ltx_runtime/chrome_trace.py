"""The phase log as a Chrome trace: JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One track a node segment with its phases nested below it; phases that overlap without nesting (steps in flight) get
further tracks beside it. A capture is marked across all tracks. Counters: peak memory by phase, NVML utilisation.
"""

from __future__ import annotations

from collections.abc import Iterable

from .intervals import phase_interval

_PROCESS = 1
_OUTSIDE = "outside nodes"
_SHOWN = ("gpu_ms", "gpu_method", "gpu_busy", "stream_ms", "cpu_ms", "nvml", "attrs")
_ROUNDING_MS = 0.001  # times in the log are rounded: neighbours may seem to overlap by less than this


def chrome_trace(events: Iterable[dict], samples: Iterable[tuple[float, int, int]] = ()) -> dict:
    """events: of the phase log. samples: (t_ms, gpu percent, memory percent) from NVML.

    Returns the trace object. Its times are in us since the earliest event, because viewers drop negative ones;
    otherData["origin_t_ms"] is the `t_ms` of time 0.
    """
    events = sorted(events, key=lambda event: event["t_ms"])
    ends = [event for event in events if event["event"] == "end"]
    origin = min([phase_interval(event)[0] for event in ends] + [event["t_ms"] for event in events[:1]], default=0.0)

    def us(t_ms: float) -> float:
        return round((t_ms - origin) * 1e3, 3)

    segments = [(*phase_interval(end), end["attrs"]["name"]) for end in ends if end["phase"] == "segment"]
    tracks = _Tracks()
    trace: list[dict] = []
    # Outer before inner: of two phases that begin together, the longer one is the container.
    for end in sorted(ends, key=lambda end: (phase_interval(end)[0], -end["wall_ms"])):
        start, stop = phase_interval(end)
        trace.append(
            {
                "ph": "X",
                "pid": _PROCESS,
                "tid": tracks.place(_segment_at(segments, (start + stop) / 2), start, stop),
                "name": _label(end),
                "cat": end["phase"].split(".")[0],
                "ts": us(start),
                "dur": round((stop - start) * 1e3, 3),
                "args": {key: end[key] for key in _SHOWN},
            }
        )
        if end["phase"] == "sample.capture":
            trace.append({"ph": "i", "pid": _PROCESS, "tid": 0, "s": "p", "name": "graph capture", "ts": us(start)})
        if end["mem_peak_bytes"] is not None and end["phase"] != "segment":
            trace.append(
                {
                    "ph": "C",
                    "pid": _PROCESS,
                    "name": "peak memory GiB",
                    "ts": us(start),
                    "args": {"allocated": round(end["mem_peak_bytes"] / 2**30, 4)},
                }
            )
    trace.extend(
        {
            "ph": "i",
            "pid": _PROCESS,
            "tid": 0,
            "s": "p",
            "name": event["message"],
            "ts": us(event["t_ms"]),
            "args": event["attrs"],
        }
        for event in events
        if event["event"] == "note"
    )
    trace.extend(
        {
            "ph": "C",
            "pid": _PROCESS,
            "name": "NVML utilisation %",
            "ts": us(t_ms),
            "args": {"gpu": gpu, "memory": memory},
        }
        for t_ms, gpu, memory in samples
    )
    render = events[-1]["render"] if events else ""
    names = [{"ph": "M", "pid": _PROCESS, "tid": 0, "name": "process_name", "args": {"name": f"render {render}"}}]
    for name, tid in tracks.names():
        names.append({"ph": "M", "pid": _PROCESS, "tid": tid, "name": "thread_name", "args": {"name": name}})
        names.append({"ph": "M", "pid": _PROCESS, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    return {
        "traceEvents": names + trace,
        "displayTimeUnit": "ms",
        "otherData": {"render": render, "origin_t_ms": origin},
    }


class _Tracks:
    """Gives every slice a track of its segment on which it nests; a viewer draws half-overlapping slices wrongly."""

    def __init__(self) -> None:
        self._tracks: list[tuple[str, int, list[float]]] = []  # name, number within its segment, ends of open slices

    def place(self, segment: str, start: float, stop: float) -> int:
        """Track id for a slice. Slices come ordered by start, longer ones first."""
        used = 0
        for tid, (name, _, open_ends) in enumerate(self._tracks, 1):
            if name != segment:
                continue
            used += 1
            while open_ends and open_ends[-1] <= start + _ROUNDING_MS:
                open_ends.pop()
            if not open_ends or stop <= open_ends[-1] + _ROUNDING_MS:
                open_ends.append(stop)
                return tid
        self._tracks.append((segment, used, [stop]))
        return len(self._tracks)

    def names(self) -> list[tuple[str, int]]:
        return [
            (f"{name}, in flight {number}" if number else name, tid)
            for tid, (name, number, _) in enumerate(self._tracks, 1)
        ]


def _segment_at(segments: list[tuple[float, float, str]], t_ms: float) -> str:
    inside = [segment for segment in segments if segment[0] <= t_ms <= segment[1]]
    return min(inside, key=lambda segment: segment[1] - segment[0])[2] if inside else _OUTSIDE


def _label(end: dict) -> str:
    if end["phase"] == "segment":
        return end["attrs"]["name"]
    position = next((f" {end['attrs'][key]}" for key in ("step", "chunk", "tile") if key in end["attrs"]), "")
    return end["phase"] + position
