"""The phase log of a render (design.md section 5): one JSON object a line, written while the render runs.

One `Timeline` is one render. The nodes of a graph pass it on (`child`), each node's stay is a `segment`, and inside it
the named phases begin and end. Every event goes at once to the file, to the `ltxgraph` logger, to `on_event` and into
`events`, as the same plain dictionary.

Three times are kept apart because they answer different questions:
- `wall_ms`: host clock, from begin to end;
- `stream_ms`: a CUDA event pair around the phase's work; the gaps in which the GPU waited are inside, so it is no busy
  time;
- `gpu_ms`: time in which kernels ran, set by the caller with the method that measured it, else null.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import numbers
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from .chrome_trace import chrome_trace
from .intervals import gaps, length, phase_interval
from .nvml import UtilizationSampler

SCHEMA = "ltxgraph.phase_log/1"
PHASES = frozenset(
    {
        "load.read",
        "load.place",
        "prepare.connectors",
        "prepare.constants",
        "sample.step",
        "sample.measure",
        "sample.warmup",
        "sample.capture",
        "sample.replay",
        "decode.video.chunk",
        "decode.audio",
        "upscale",
        "transfer.to_host",
    }
)
PHASE_PREFIXES = ("decode.", "encode.")
SEGMENT = "segment"  # the stay in one node; it contains phases and is no phase itself
# queued_events, delayed_events: gpu_time.py, without and with a delay before every part; gaps between kernels taken off
GPU_METHODS = ("cupti", "graph_events", "queued_events", "delayed_events")

log = logging.getLogger("ltxgraph")
_to_json = json.JSONEncoder(allow_nan=False).encode  # json.dumps would build an encoder for every line


def new_render_id() -> str:
    """A name for a new render: sorts by time (UTC, milliseconds), random at the end, safe as a file name everywhere."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}-{secrets.token_hex(3)}"


class Phase:
    """A running phase. Until its end `attrs` may be extended, and `gpu_ms` with `gpu_method` (of GPU_METHODS) be set.

    After the end `wall_ms`, `stream_ms` and `mem_peak_bytes` are known (None where there is nothing to know).
    """

    def __init__(self, name: str, attrs: dict[str, Any], device: torch.device):
        self.name = name
        self.attrs = attrs
        self.gpu_ms: float | None = None
        self.gpu_method: str | None = None
        self.wall_ms: float | None = None
        self.stream_ms: float | None = None
        self.mem_peak_bytes: int | None = None
        self._device = device
        self._begun = _now()
        self._done: tuple[int, int] | None = None
        self._start_event = _record_event(device, name)
        self._end_event: torch.cuda.Event | None = None

    def issued(self) -> None:
        """All work of the phase is issued: record its end on the current stream. Never waits.

        Without a GPU the work is done when it is issued, so this is the phase's end time.
        """
        if self._start_event is None:
            self._done = _now()
        else:
            self._end_event = _record_event(self._device, self.name)

    def wait(self) -> None:
        """Block the host until the work issued so far (up to `issued`, if that was called) is done; it then counts as
        the phase's end time, whatever the host does until `Timeline.end`."""
        if self._done is not None:
            return
        if self._start_event is not None:
            if self._end_event is None:
                self.issued()
            self._end_event.synchronize()
        self._done = _now()


class Timeline:
    """One render's events, and the file they are appended to.

    path: the .jsonl file, by custom `<output>/ltxgraph/<render id>.jsonl`; its folder is made. None keeps events in
        memory only. The file is open only while a phase or segment is, and is flushed at every event.
    device: where the work runs. On CUDA, stream times and peak memory are taken and NVML is sampled in segments. The
        peak counter of torch's allocator is reset at every begin and end; read peaks from the events. They leave out
        the memory of graph recordings under cudaMallocAsync, which is in no torch statistic (cuda_graph_facts.md 5).
    render_id: defaults to the file's stem, or to a new one without a file.
    on_event: called with every event, in the thread that caused it.

    Phases are begun and ended by one thread at a time, and never while the current stream is capturing a graph (raises
    RuntimeError on CUDA). Names outside design.md section 5 raise ValueError.
    """

    def __init__(
        self,
        path: Path | str | None,
        *,
        device: torch.device | str | None = None,
        render_id: str | None = None,
        on_event: Callable[[dict], None] | None = None,
    ):
        self.path = Path(path) if path is not None else None
        self.render_id = render_id or (self.path.stem if self.path else new_render_id())
        self.device = torch.device(device or "cpu")
        if self.device.type == "cuda":
            torch.cuda.init()
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
        self._on_event = on_event
        self._origin_ns = time.perf_counter_ns()
        self._origin_utc = datetime.datetime.now(datetime.timezone.utc)
        self._utilization = UtilizationSampler(self.device)
        self._events: list[dict] = []
        self._lock = threading.Lock()
        self._file = None
        self._file_failed = False
        self._open: list[Phase] = []
        self._last_end: dict[str, tuple[int, int]] = {}
        self._continued = False

    @property
    def events(self) -> tuple[dict, ...]:
        """All events so far as plain JSON values, in the order of the file. Adopted events carry an earlier `t_ms`."""
        with self._lock:
            return tuple(self._events)

    def begin(self, name: str, **attrs: Any) -> Phase:
        """Begin a phase that need not nest with others. On CUDA an event is recorded on the current stream.

        Phases of one name may be in flight together (the sampler issues a step before the previous one is done). The
        measured stretch of such a phase then starts where the previous one of its name ended, so that the walls of
        steps add up to elapsed time; the begin line keeps the time at which the host began to issue.
        """
        _check_name(name)
        return self._begin(name, attrs)

    def end(self, phase: Phase, *, error: BaseException | None = None) -> None:
        """End a phase and write its line. On CUDA this waits for the phase's own end event, never for the device.

        Pipelined use, one step behind: `begin`, issue the work, `phase.issued()`; later `phase.wait()` and `end`.
        error: the exception that ended the phase; its type goes into attrs["error"], and nothing is waited for,
            because after a failure the device may not answer.
        """
        self._require_current()
        if phase not in self._open:
            raise RuntimeError(f"phase {phase.name} has already ended, or belongs to another timeline")
        if phase.gpu_ms is not None and phase.gpu_method not in GPU_METHODS:
            raise ValueError(f"phase {phase.name}: gpu_method is {phase.gpu_method!r}; one of {', '.join(GPU_METHODS)}")
        if error is None:
            phase.wait()
            self._fold_peak_memory()
        else:
            phase.attrs["error"] = type(error).__name__
        done = phase._done or _now()
        start = max(phase._begun, self._last_end.get(phase.name, phase._begun))
        self._last_end[phase.name] = done
        phase.wall_ms = max(done[0] - start[0], 0) / 1e6
        if error is None and phase._start_event is not None:
            phase.stream_ms = phase._start_event.elapsed_time(phase._end_event)
        event = self._event(phase.name, "end", done[0])
        event["wall_ms"] = round(phase.wall_ms, 4)
        event["gpu_ms"] = _rounded(phase.gpu_ms)
        event["gpu_method"] = phase.gpu_method if phase.gpu_ms is not None else None
        busy = phase.gpu_ms / phase.wall_ms if phase.gpu_ms is not None and phase.wall_ms else None
        event["gpu_busy"] = _rounded(busy)
        event["stream_ms"] = _rounded(phase.stream_ms)
        event["cpu_ms"] = round(max(done[1] - start[1], 0) / 1e6, 4)
        event["mem_peak_bytes"] = phase.mem_peak_bytes
        event["nvml"] = self._utilization.window(start[0], done[0])
        event["attrs"] = _plain(phase.attrs, phase.name)
        self._open.remove(phase)
        self._write(event)

    @contextmanager
    def phase(self, name: str, **attrs: Any) -> Iterator[Phase]:
        """A phase around a block. Its end waits for the work issued in the block (one event on the current stream)."""
        phase = self.begin(name, **attrs)
        try:
            yield phase
            self.end(phase)
        except BaseException as error:  # ComfyUI's interrupt included: the line must not be missing
            self._end_failed([phase], error)
            raise

    def note(self, phase_name: str, message: str, **attrs: Any) -> None:
        """One line that has no duration: a decision, a reason. Host only, so it is allowed during a capture."""
        if phase_name != SEGMENT:
            _check_name(phase_name)
        self._require_current()
        event = self._event(phase_name, "note", time.perf_counter_ns())
        event["message"] = message
        event["attrs"] = _plain(attrs, phase_name)
        self._write(event)

    @contextmanager
    def segment(self, name: str) -> Iterator[Phase]:
        """The stay in one node: `segment` events with attrs["name"], NVML sampled from begin to end.

        The render's wall time is the union of its segments. Phases left open by an exception are ended with it.
        """
        outermost = not self._open
        if outermost:
            self._utilization.start()
        depth = len(self._open)
        try:
            segment = self._begin(SEGMENT, {"name": name})
            yield segment
            self.end(segment)
        except BaseException as error:
            self._end_failed(self._open[depth:], error)
            raise
        finally:
            if outermost:
                self._utilization.stop()
        if outermost and self._utilization.reason:
            self._note_once_without_nvml()

    def child(self, *, on_event: Callable[[dict], None] | None = None) -> Timeline:
        """Continue this render in the next node: same render id, same file, same clock, the events so far.

        This timeline then is read-only. A second `child` of it (a cached node feeds a second run or another branch) is
        a fork: a new render id and file that starts with a copy of the events up to here.
        on_event is not inherited: a callback belongs to one node's run.
        """
        if self._open:
            raise RuntimeError(f"phase {self._open[-1].name} is still open; end it before the next node continues")
        twin = object.__new__(Timeline)
        twin.__dict__.update(self.__dict__)
        twin._on_event = on_event
        twin._lock = threading.Lock()
        twin._open = []
        twin._last_end = {}
        twin._continued = False
        twin._events = list(self._events)
        if not self._continued:
            self._continued = True
            return twin
        twin.render_id = new_render_id()
        twin.path = self.path.with_name(f"{twin.render_id}.jsonl") if self.path else None
        twin._events = []
        for event in self._events:
            twin._store({**event, "render": twin.render_id})
        twin.note(SEGMENT, f"continues {self.render_id} a second time, so its events are copied here")
        return twin

    def adopt(self, events: Iterable[dict]) -> None:
        """Take in events of another timeline, as a rule a loader's, that were recorded before this render could know
        them. They are written now and keep their true time: `t_ms` is negative when they lie before the render's
        start. The caller adopts them once, in the first render that uses what was loaded, before it begins a segment.
        """
        self._require_current()
        events = list(events)
        if not events:
            return
        theirs = datetime.datetime.fromisoformat(events[0]["time"])
        shift_ms = (theirs - self._origin_utc).total_seconds() * 1e3 - events[0]["t_ms"]
        for event in events:
            self._store({**event, "render": self.render_id, "t_ms": round(event["t_ms"] + shift_ms, 4)})

    def summary(self) -> dict:
        """`summarize` of the events so far."""
        return summarize(self.events)

    def write_chrome_trace(self, path: Path | str) -> None:
        """Write the timeline so far as a Chrome trace (chrome_trace.py), for Perfetto or chrome://tracing. The file
        appears whole or not at all: an earlier one outlives a full disk or a killed process."""
        samples = [((at - self._origin_ns) / 1e6, gpu, memory) for at, gpu, memory in self._utilization.samples]
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            unfinished.write_text(json.dumps(chrome_trace(self.events, samples), allow_nan=False), encoding="utf-8")
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _begin(self, name: str, attrs: dict[str, Any]) -> Phase:
        self._require_current()
        plain = _plain(attrs, name)  # before anything is recorded: a bad attr must not leave a phase open
        # Before the memory statistics too: under cudaMallocAsync reading them would invalidate the capture.
        _refuse_in_capture(self.device, name)
        self._fold_peak_memory()
        phase = Phase(name, attrs, self.device)
        self._open.append(phase)
        event = self._event(name, "begin", phase._begun[0])
        event["attrs"] = plain
        self._write(event)
        return phase

    def _end_failed(self, phases: list[Phase], error: BaseException) -> None:
        for phase in reversed(phases):
            if phase in self._open:  # the end itself may be what failed, before or after its line was written
                self.end(phase, error=error)

    def _fold_peak_memory(self) -> None:
        """torch keeps one peak counter a device. Every begin and end hands its value to all open phases and resets it,
        so that an inner phase has its own peak and the outer one still has the largest."""
        if self.device.type != "cuda":
            return
        # memory_stats_as_nested_dict: memory_stats itself flattens and sorts some hundred entries at each call
        peak = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["peak"]
        for phase in self._open:
            phase.mem_peak_bytes = max(phase.mem_peak_bytes or 0, peak)
        torch.cuda.reset_peak_memory_stats(self.device)

    def _note_once_without_nvml(self) -> None:
        message = f"no NVML utilisation: {self._utilization.reason}"
        if not any(event.get("message") == message for event in self._events):
            self.note(SEGMENT, message)

    def _require_current(self) -> None:
        if self._continued:
            raise RuntimeError(f"render {self.render_id} was continued by another node; write to the child timeline")

    def _event(self, phase: str, kind: str, at_ns: int) -> dict:
        since = at_ns - self._origin_ns
        utc = self._origin_utc + datetime.timedelta(microseconds=since // 1000)
        return {
            "schema": SCHEMA,
            "render": self.render_id,
            "time": utc.isoformat(timespec="microseconds"),
            "t_ms": round(since / 1e6, 4),
            "phase": phase,
            "event": kind,
        }

    def _write(self, event: dict) -> None:
        self._store(event)
        if log.isEnabledFor(logging.INFO):
            log.info(_readable(event))
        if self._on_event is not None:
            self._on_event(event)

    def _store(self, event: dict) -> None:
        with self._lock:
            self._events.append(event)
            if self.path is None or self._file_failed:
                return
            try:
                if self._file is None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = open(self.path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115 - open while a phase is
                self._file.write(_to_json(event) + "\n")
                self._file.flush()
                if not self._open:
                    self._file.close()  # a report may live long in ComfyUI's cache; it must not hold a file handle
                    self._file = None
            except OSError as error:
                # A full disk must not end a render that is otherwise fine.
                self._file_failed = True
                self._abandon_file()
                log.warning("ltxgraph: phase log %s can't be written (%s); events are kept in memory", self.path, error)


    def _abandon_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # closing flushes again what could not be written
                file.close()


def summarize(events: Iterable[dict]) -> dict:
    """Totals of a render from its events (or the parsed lines of its file); all times in ms.

    - `wall_ms`: union of the segments, and of phases outside any segment; without segments, first to last event.
    - `covered_ms`, `unaccounted_ms`, `coverage`: union of the named phases within that wall, the rest, and the share.
      Nested and overlapping phases count once.
    - `outside_ms`: gaps between segments since the render's start: other nodes, or the user, had the machine.
    - `segments`: name, t_ms, wall_ms in order. `mem_peak_bytes`: the largest of all.
    - `phases`: by name `count`, `wall_ms` (union), `cpu_ms`, `stream_ms`, `gpu_ms` (sums), `gpu_measured` (how many of
      the count have gpu_ms), `gpu_busy` (gpu_ms / wall_ms of those measured), `gpu_methods`, `mem_peak_bytes`,
      `nvml` (weighted by samples), `errors`. What nobody measured is None.
    A segment that is still open extends to the last event.
    """
    events = sorted(events, key=lambda event: event["t_ms"])
    phases: dict[str, list[dict]] = {}
    segments: list[dict] = []
    open_segments: list[dict] = []
    for event in events:
        if event["event"] == "begin" and event["phase"] == SEGMENT:
            open_segments.append({"name": event["attrs"]["name"], "t_ms": event["t_ms"], "wall_ms": 0.0})
        elif event["event"] == "end" and event["phase"] == SEGMENT:
            segment = open_segments.pop()
            segment["wall_ms"] = event["t_ms"] - segment["t_ms"]
            segments.append(segment)
        elif event["event"] == "end":
            phases.setdefault(event["phase"], []).append(event)
    for segment in open_segments:
        segment["wall_ms"] = events[-1]["t_ms"] - segment["t_ms"]
        segments.append(segment)
    segments.sort(key=lambda segment: segment["t_ms"])

    covered = [phase_interval(event) for ends in phases.values() for event in ends]
    if segments:
        stays = [(segment["t_ms"], segment["t_ms"] + segment["wall_ms"]) for segment in segments]
    else:
        own = [event["t_ms"] for event in events if event["t_ms"] >= 0]
        stays = [(own[0], own[-1])] if own else []
    wall = length(stays + covered)
    outside = sum(end - max(start, 0.0) for start, end in gaps(stays + covered) if end > 0)
    peaks = [event["mem_peak_bytes"] for event in events if event.get("mem_peak_bytes") is not None]
    return {
        "render": events[-1]["render"] if events else None,
        "wall_ms": round(wall, 4),
        "covered_ms": round(length(covered), 4),
        "unaccounted_ms": round(wall - length(covered), 4),
        "coverage": _rounded(length(covered) / wall if wall else None),
        "outside_ms": round(outside, 4),
        "mem_peak_bytes": max(peaks, default=None),
        "segments": segments,
        "phases": {name: _phase_summary(ends) for name, ends in phases.items()},
    }


def _phase_summary(ends: list[dict]) -> dict:
    measured = [event for event in ends if event["gpu_ms"] is not None]
    measured_wall = sum(event["wall_ms"] for event in measured)
    gpu_ms = sum(event["gpu_ms"] for event in measured)
    streams = [event["stream_ms"] for event in ends if event["stream_ms"] is not None]
    sampled = [event["nvml"] for event in ends if event["nvml"] is not None]
    return {
        "count": len(ends),
        "wall_ms": round(length(map(phase_interval, ends)), 4),
        "cpu_ms": round(sum(event["cpu_ms"] for event in ends), 4),
        "stream_ms": round(sum(streams), 4) if streams else None,
        "gpu_ms": round(gpu_ms, 4) if measured else None,
        "gpu_measured": len(measured),
        "gpu_busy": _rounded(gpu_ms / measured_wall if measured_wall else None),
        "gpu_methods": sorted({event["gpu_method"] for event in measured}),
        "mem_peak_bytes": max((e["mem_peak_bytes"] for e in ends if e["mem_peak_bytes"] is not None), default=None),
        "nvml": _pooled(sampled) if sampled else None,
        "errors": [event["attrs"]["error"] for event in ends if "error" in event["attrs"]],
    }


def _pooled(windows: list[dict]) -> dict:
    samples = sum(window["samples"] for window in windows)

    def mean(field: str) -> float | None:
        total = sum(window[field] * window["samples"] for window in windows if window["samples"])
        return round(total / samples, 4) if samples else None

    return {"util_mean": mean("util_mean"), "util_zero_share": mean("util_zero_share"), "samples": samples}


def _now() -> tuple[int, int]:
    """(host clock, CPU time of the process), both in ns."""
    return time.perf_counter_ns(), time.process_time_ns()


def _record_event(device: torch.device, phase_name: str) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    _refuse_in_capture(device, phase_name)
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _refuse_in_capture(device: torch.device, phase_name: str) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"phase {phase_name} can't begin or end while the current stream is capturing a graph")


def _check_name(name: str) -> None:
    if name not in PHASES and not name.startswith(PHASE_PREFIXES):
        raise ValueError(
            f"{name!r} is not a phase of the log. Known: {', '.join(sorted(PHASES))}, "
            f"and anything below {' '.join(PHASE_PREFIXES)}"
        )


def _rounded(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None


def _plain(value: Any, where: str) -> Any:
    """value as JSON can hold it: paths, dtypes and devices as text, non-finite floats as "nan", "inf", "-inf".

    Raises TypeError on a tensor: printing one would wait for the device.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: a tensor is no attribute of a phase; pass its shape, or a number read elsewhere")
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    return str(value)


def is_table(value: Any) -> bool:
    """Whether an attribute of an event (copies by kind, kernels) is for the file and not for a line or a widget."""
    if isinstance(value, list):
        return any(isinstance(item, (dict, list)) for item in value)
    return isinstance(value, dict)


def _readable(event: dict) -> str:
    """One line for people, e.g. `ltxgraph: end sample.step 415.2 ms (GPU 403.1 ms, 97% busy; CPU 96.0 ms) step=3`."""
    attrs = " ".join(f"{key}={value}" for key, value in event["attrs"].items() if not is_table(value))
    if event["event"] != "end":
        text = f"{event['event']} {event['phase']}" + (f": {event['message']}" if "message" in event else "")
        return f"ltxgraph: {text} {attrs}".rstrip()
    parts = []
    if event["gpu_ms"] is not None:
        busy = f", {event['gpu_busy']:.0%} busy" if event["gpu_busy"] is not None else ""
        parts.append(f"GPU {event['gpu_ms']:.1f} ms{busy}")
    if event["stream_ms"] is not None:
        parts.append(f"stream {event['stream_ms']:.1f} ms")
    parts.append(f"CPU {event['cpu_ms']:.1f} ms")
    if event["mem_peak_bytes"] is not None:
        parts.append(f"peak {event['mem_peak_bytes'] / 2**30:.2f} GiB")
    return f"ltxgraph: end {event['phase']} {event['wall_ms']:.1f} ms ({'; '.join(parts)}) {attrs}".rstrip()
