"""GPU time of one call without a profiler: event pairs around work that stood in the launch queue before it began.

The call is cut into parts short enough for the queue (about 1,000 launches), all of the same work but for the first,
which is short. A part that the host had issued as a whole before the device began it ran without waiting for the host;
whether it did is asked of its first event. Two ways there:

* A host that is far ahead stays so by itself: one delay at the start, another after a part that was late all the same,
  and nothing else disturbs the device's clock.
* Else the device spins before every part while the host issues it.

Event pairs also count the gap between queued kernels, about 1 us each. The launches of the call are counted in a run
that is not timed, the gap is measured once a device; what is left agrees with the union of CUPTI's kernel intervals
(benchmarks/step.py prints both: within 5 %, of kernels of 2 us within 10 %). CUPTI itself gives more, but its first use
costs seconds and every launch of the process stays slower afterwards (H200: eager steps of 127 ms became 165-200 ms).
So a render uses this, benchmarks use CUPTI.
"""
from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import triton_use
from .cuda_graph import no_garbage_collection

# Of the shortest kernel, as CUPTI sees it on an H200. The rest of a queue's pace is the gap between kernels.
SHORTEST_KERNEL_MS = 0.62e-3
# For a host that is too busy to measure it (H200: 0.9 to 1.1).
_USUAL_GAP_MS = 1e-3
_PACE_LAUNCHES, _PACE_DELAY_MS = 300, 5
# A delay against the mean issue time of a part: the host's pace varies.
_RESERVE = 1.5


@dataclass(frozen=True)
class GpuTime:
    """gpu_ms: None when too many parts were not queued in time, then `reason` says so. event_ms: the same with the gaps
    between kernels. method: "queued_events" or "delayed_events". parts: number of parts, late: of them not in time."""

    result: Any
    method: str
    parts: int
    late: int
    gpu_ms: float | None = None
    event_ms: float | None = None
    reason: str | None = None


# Calls that only look at memory in another way, or allocate it; and those that may do either.
_NO_LAUNCH = frozenset(
    {
        "view", "view_as", "expand", "expand_as", "unflatten", "transpose", "permute", "movedim", "t", "squeeze",
        "unsqueeze", "select", "narrow", "unbind", "split", "chunk", "detach", "as_strided", "empty", "empty_like",
        "empty_strided", "new_empty", "new_empty_strided", "__get__",
    }
)  # fmt: skip
_MAY_LAUNCH = frozenset(
    {"to", "float", "double", "half", "bfloat16", "contiguous", "reshape", "flatten", "__getitem__"}
)


class LaunchCount(TorchFunctionMode):
    """Counts the kernels that calls of this thread launch: one for each call of PyTorch's with a tensor for a result,
    but for views, and for each of a Triton kernel. Composite calls and split matrix products count once (2 % too few at
    S0)."""

    def __init__(self):
        super().__init__()
        self.launches = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs) if kwargs else func(*args)
        name = getattr(func, "__name__", "")
        if name not in _NO_LAUNCH:
            several = isinstance(result, tuple) and len(result) > 0 and isinstance(result[0], Tensor)
            if name in _MAY_LAUNCH and args and isinstance(result, Tensor):
                self.launches += _memory_of(result) != _memory_of(args[0])
            elif several or isinstance(result, Tensor) or name == "__setitem__" or func is triton_use.launch:
                self.launches += 1
        return result


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def queued_gpu_time(
    fn: Callable[[], Any],
    cuts: Sequence[nn.Module],
    *,
    part_ms: float,
    launches: int,
    host_ahead: bool,
    device: torch.device,
) -> GpuTime:
    """Run fn once and time its GPU work.

    cuts: modules that fn calls; a new part begins before each. part_ms: what the host takes to issue a part, at most,
    for the length of the delays. launches: of fn, by LaunchCount. host_ahead: delays at the start and after late parts
    instead of one a part.
    Waits for the device before and after. fn's exceptions pass through.
    """
    gap_ms = launch_gap_ms(device)
    delay_cycles = int(_RESERVE * part_ms * _cycles_per_ms())
    starts: list[torch.cuda.Event] = []
    ends: list[torch.cuda.Event] = []
    in_time: list[bool] = []

    def begin() -> None:
        if not (host_ahead and in_time and in_time[-1]):
            torch.cuda._sleep(delay_cycles)
        starts.append(_recorded_event())

    def finish() -> None:
        ends.append(_recorded_event())
        # Once the device has begun, the last launches may come too late.
        in_time.append(not starts[-1].query())
        if not host_ahead:
            ends[-1].synchronize()

    def cut(module: nn.Module, args: Any) -> None:
        finish()
        begin()

    hooks = [module.register_forward_pre_hook(cut) for module in cuts]
    torch.cuda.synchronize(device)
    try:
        with no_garbage_collection():  # it holds the host for longer than a part takes
            begin()
            result = fn()
            finish()
        ends[-1].synchronize()
    finally:
        for hook in hooks:
            hook.remove()
    method, late = "queued_events" if host_ahead else "delayed_events", in_time.count(False)
    event_ms = sum_of_parts([started.elapsed_time(ended) for started, ended in zip(starts, ends)], in_time)
    if event_ms is None:
        words = f"{late} of {len(starts)} parts were not queued in time"
        return GpuTime(result, method, len(starts), late, reason=words)
    return GpuTime(result, method, len(starts), late, without_gaps(event_ms, launches, gap_ms), event_ms)


def sum_of_parts(times: Sequence[float], in_time: Sequence[bool]) -> float | None:
    """All parts together: one that was late counts as the median of those in time, since the parts after the first do
    the same work. None when only a few were in time."""
    (first, *times), (_, *in_time) = times, in_time
    queued = [ms for ms, good in zip(times, in_time) if good]
    if 2 * len(queued) < len(times):
        return None
    return first + sum(queued) + (len(times) - len(queued)) * (statistics.median(queued) if queued else 0.0)


def without_gaps(event_ms: float, launches: int, gap_ms: float) -> float:
    """Event time less the gaps between queued kernels. Not less than what the shortest kernels alone would leave of it,
    so that a miscount can't make it nothing."""
    least = event_ms * SHORTEST_KERNEL_MS / (SHORTEST_KERNEL_MS + gap_ms)
    return max(event_ms - launches * gap_ms, least)


@functools.cache
def launch_gap_ms(device: torch.device) -> float:
    """Gap between two kernels of a full queue, from the pace of the shortest ones; measured once a device."""
    pace_ms = queue_pace_ms(device)
    return _USUAL_GAP_MS if pace_ms is None else max(pace_ms - SHORTEST_KERNEL_MS, 0.0)


def queue_pace_ms(device: torch.device) -> float | None:
    """Time from one to the next of the shortest kernels in a full queue, the better of two; None on a host so busy that
    it never filled the queue in time."""
    paces = []
    with torch.cuda.device(device):
        for _ in range(2):
            torch.cuda._sleep(int(_PACE_DELAY_MS * _cycles_per_ms()))
            started = _recorded_event()
            for _ in range(_PACE_LAUNCHES):
                torch.cuda._sleep(1)
            ended = _recorded_event()
            if not started.query():
                ended.synchronize()
                paces.append(started.elapsed_time(ended) / _PACE_LAUNCHES)
    return min(paces, default=None)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _cycles_per_ms() -> float:
    """Pace of the spinning kernel now, from one timed spin of about a ms."""
    cycles = 2_000_000
    torch.cuda._sleep(1000)  # the kernel's first launch loads it
    started = _recorded_event()
    torch.cuda._sleep(cycles)
    ended = _recorded_event()
    ended.synchronize()
    return cycles / started.elapsed_time(ended)
