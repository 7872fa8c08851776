"""What the GPU did during one call, from CUPTI activity records (torch.profiler, NVIDIA only).

Kernel start and end times come from the device, so the union of their intervals is true busy time, gaps excluded, for
eager code and for graph replays alike. The price is a slower host during the call: profiled wall time is no wall time.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType

from .intervals import Interval, gaps, length

# Runtime and driver calls in which the host waits for the device; cudaFree waits for all of it.
HOST_WAITS = frozenset(
    {
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cudaMemcpy2D",
        "cudaMemcpyToSymbol",
        "cudaMemcpyFromSymbol",
        "cudaFree",
        "cudaFreeHost",
        "cuCtxSynchronize",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuMemcpyHtoD",
        "cuMemcpyDtoH",
        "cuMemcpyDtoD",
        "cuMemFree",
    }
)
# Bounds fn among the host calls. Chosen because no code calls it in passing and the profiler does not filter it out.
_MARKER = "cudaMemGetInfo"
_VERSION_SUFFIX = re.compile(r"(_v\d+|_ptsz|_ptds)+$")
_BYTES = re.compile(r'"bytes":\s*(\d+)')


@dataclass(frozen=True)
class Memcpy:
    """One copy by the device. kind: HtoD, DtoH, DtoD, PtoP ...; memory: e.g. "Pageable -> Device"; bytes: None where
    this torch does not hand out activity metadata."""

    kind: str
    memory: str
    bytes: int | None
    ms: float


@dataclass(frozen=True)
class KernelTotal:
    name: str
    count: int
    ms: float


@dataclass(frozen=True)
class GpuActivity:
    """Result of `measure_gpu_busy`. Times in ms. Where nothing was measured all but `result` and `profiled_wall_ms`
    are None or empty and `reason` says why.

    gpu_ms: union of kernels, copies and fills. kernel_ms: union of kernels alone.
    profiled_wall_ms: host time of fn to the end of its device work, slowed down by the profiler.
    host_waits: (call, count) of HOST_WAITS inside fn; None when the profiler did not show host calls.
    longest_gap_ms: longest stretch without activity between the first and the last one.
    """

    result: Any
    profiled_wall_ms: float
    reason: str | None = None
    gpu_ms: float | None = None
    kernel_ms: float | None = None
    kernel_count: int | None = None
    memset_count: int | None = None
    memcpys: tuple[Memcpy, ...] = ()
    host_waits: tuple[tuple[str, int], ...] | None = None
    launches: int | None = None
    top_kernels: tuple[KernelTotal, ...] = ()
    longest_gap_ms: float | None = None

    def attrs(self) -> dict:
        """The numbers as attributes of a phase: plain values, copies added up by kind."""
        copies: dict[str, dict] = {}
        for copy in self.memcpys:
            total = copies.setdefault(f"{copy.kind} ({copy.memory})", {"count": 0, "bytes": 0})
            total["count"] += 1
            total["bytes"] = None if copy.bytes is None or total["bytes"] is None else total["bytes"] + copy.bytes
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("result", "memcpys", "top_kernels", "host_waits")
        }
        waits = None if self.host_waits is None else dict(self.host_waits)
        return {
            **fields,
            "memcpys": copies,
            "host_waits": waits,
            "top_kernels": [dataclasses.asdict(kernel) for kernel in self.top_kernels],
        }


@dataclass(frozen=True)
class ActivityRecord:
    """One profiler event: kind "kernel", "gpu_memcpy", "gpu_memset" or "host"; times in ns on the profiler's clock."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    bytes: int | None = None


def measure_gpu_busy(fn: Callable[[], Any], *, device: torch.device | str | None = None) -> GpuActivity:
    """Run fn exactly once and say what `device` (default: the current CUDA device) did meanwhile.

    Waits for the device before and after fn, so it must not run near a capture. fn's exceptions pass through. Where
    the profiler can't run (no CUDA, another profiler active, CUPTI missing) fn runs all the same and `reason` is set.
    The first use in a process initialises CUPTI, which takes up to some seconds outside the measured call.
    """
    device = torch.device(device or "cuda")
    if device.type != "cuda" or not torch.cuda.is_available():
        start = time.perf_counter()
        result = fn()
        return GpuActivity(result, (time.perf_counter() - start) * 1e3, reason="no CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.synchronize(index)
    profiler, reason = _start_profiler()
    try:
        torch.cuda.mem_get_info(index)
        start = time.perf_counter()
        result = fn()
        issued = time.perf_counter()
        torch.cuda.mem_get_info(index)
        waited_from = time.perf_counter()
        torch.cuda.synchronize(index)
        wall_ms = (time.perf_counter() - waited_from + issued - start) * 1e3
    except BaseException:
        if profiler is not None:
            profiler.stop()
        raise
    if profiler is None:
        return GpuActivity(result, wall_ms, reason=reason)
    try:
        profiler.stop()
        records = _read_records(profiler, index)
    except RuntimeError as error:
        return GpuActivity(result, wall_ms, reason=f"the profiler gave no result: {error}")
    return summarize_activity(records, result, wall_ms)


def summarize_activity(
    records: Iterable[ActivityRecord], result: Any, profiled_wall_ms: float, top: int = 12
) -> GpuActivity:
    """GpuActivity from the records of one profiled call; `top` kernels by total time."""
    records = list(records)
    work = [record for record in records if record.kind != "host"]
    if not work:
        reason = "the profiler recorded no GPU activity: CUPTI is not available, or nothing was launched"
        return GpuActivity(result, profiled_wall_ms, reason=reason)
    kernels = [record for record in work if record.kind == "kernel"]
    totals: dict[str, list[int]] = {}
    for kernel in kernels:
        total = totals.setdefault(kernel.name, [0, 0])
        total[0] += 1
        total[1] += kernel.end_ns - kernel.start_ns
    by_time = sorted(totals.items(), key=lambda item: -item[1][1])[:top]
    called = _host_calls_of_fn(records)
    waits = None if called is None else Counter(name for name in called if name in HOST_WAITS)
    return GpuActivity(
        result=result,
        profiled_wall_ms=profiled_wall_ms,
        gpu_ms=length(map(_span, work)) / 1e6,
        kernel_ms=length(map(_span, kernels)) / 1e6,
        kernel_count=len(kernels),
        memset_count=sum(record.kind == "gpu_memset" for record in work),
        memcpys=tuple(_memcpy(record) for record in work if record.kind == "gpu_memcpy"),
        host_waits=None if waits is None else tuple(sorted(waits.items())),
        launches=None if called is None else sum("Launch" in name for name in called),
        top_kernels=tuple(KernelTotal(name, count, ns / 1e6) for name, (count, ns) in by_time),
        longest_gap_ms=max((end - start for start, end in gaps(map(_span, work))), default=0) / 1e6,
    )


def _start_profiler() -> tuple[torch.profiler.profile | None, str | None]:
    try:
        # Bytes of copies are metadata that torch 2.9 and later hand out on request.
        config = torch._C._profiler._ExperimentalConfig(expose_kineto_event_metadata=True)
    except TypeError:
        config = None
    if torch.autograd._profiler_enabled():
        return None, "another profiler is active"
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], experimental_config=config)
    try:
        profiler.start()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch built without CUPTI
        return None, f"the profiler did not start: {error}"
    return profiler, None


def _read_records(profiler: torch.profiler.profile, device_index: int) -> list[ActivityRecord]:
    """The raw events: profiler.events() builds a call tree over all of them, about a second for a 9,000-kernel step."""
    records = []
    for event in profiler.profiler.kineto_results.events():
        start = event.start_ns()
        end = start + event.duration_ns()
        if event.device_type() == DeviceType.CPU:
            records.append(ActivityRecord("host", _VERSION_SUFFIX.sub("", event.name()), start, end))
        elif event.device_index() == device_index:
            kind = _kind(event)
            if kind is not None:
                records.append(ActivityRecord(kind, event.name(), start, end, _bytes(event)))
    return records


def _kind(event: Any) -> str | None:
    """kernel, gpu_memcpy or gpu_memset; None for ranges and synchronisation records, which are no work."""
    if hasattr(event, "activity_type"):
        kind = event.activity_type()
        return kind if kind in ("kernel", "gpu_memcpy", "gpu_memset") else None
    name = event.name()
    if name.startswith("Memcpy"):
        return "gpu_memcpy"
    if name.startswith("Memset"):
        return "gpu_memset"
    return None if name.endswith(" Sync") or name.startswith("Stream Wait") else "kernel"


def _bytes(event: Any) -> int | None:
    metadata = event.metadata_json() if hasattr(event, "metadata_json") else ""
    found = _BYTES.search(metadata or "")
    return int(found.group(1)) if found else None


def _host_calls_of_fn(records: list[ActivityRecord]) -> list[str] | None:
    """Names of the CUDA calls between the two markers; None when the markers are not visible."""
    host = sorted((record for record in records if record.kind == "host"), key=_span)
    marks = [position for position, record in enumerate(host) if record.name == _MARKER]
    if len(marks) < 2:
        return None
    return [record.name for record in host[marks[0] + 1 : marks[-1]] if record.name != _MARKER]


def _memcpy(record: ActivityRecord) -> Memcpy:
    """From names such as "Memcpy HtoD (Pageable -> Device)"."""
    match = re.match(r"Memcpy (\w+)(?: \((.*)\))?", record.name)
    kind, memory = (match.group(1), match.group(2) or "") if match else (record.name, "")
    return Memcpy(kind, memory, record.bytes, (record.end_ns - record.start_ns) / 1e6)


def _span(record: ActivityRecord) -> Interval:
    return record.start_ns, record.end_ns
