"""GPU time of one call without a profiler: event pairs around work that was queued up behind a device-side delay.

The host issues a part of the call while the device spins; when the spin ends, the part is in the launch queue as a whole and
runs without gaps, so an event pair around it is busy time. Parts stay short enough for the queue (about 1,000 launches).

CUPTI gives the same number (within 5 %, checked in benchmarks/) and more, but its first use costs seconds and every launch
of the process stays slower afterwards (measured on an H200: eager steps of 127 ms became 165-200 ms). So the decision inside
a render uses this, benchmarks use CUPTI.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class GpuTime:
    """gpu_ms: None when a part was not queued in time, then `reason` says so. parts: number of parts."""

    result: Any
    gpu_ms: float | None
    parts: int
    reason: str | None = None


def gpu_time_behind_delay(
    fn: Callable[[], Any], cuts: Sequence[nn.Module], *, wall_ms: float, device: torch.device
) -> GpuTime:
    """Run fn once and time its GPU work.

    cuts: modules that fn calls; a new part begins before each. wall_ms: what fn takes without this, for the length of the
    delays. Waits for the device before and after. fn's exceptions pass through.
    """
    # Twice the mean issue time of a part: the host's pace varies.
    delay_cycles = int(2 * wall_ms / (len(cuts) + 1) * _cycles_per_ms())
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    late = 0

    def begin() -> None:
        torch.cuda._sleep(delay_cycles)
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        pairs.append(pair)

    def finish() -> None:
        nonlocal late
        started, ended = pairs[-1]
        ended.record()
        late += started.query()  # the delay is over already: the last launches may have come too late
        ended.synchronize()

    def cut(module: nn.Module, args: Any) -> None:
        finish()
        begin()

    hooks = [module.register_forward_pre_hook(cut) for module in cuts]
    torch.cuda.synchronize(device)
    try:
        begin()
        result = fn()
        finish()
    finally:
        for hook in hooks:
            hook.remove()
    if late:
        return GpuTime(result, None, len(pairs), f"{late} of {len(pairs)} parts were not queued in time")
    return GpuTime(result, sum(started.elapsed_time(ended) for started, ended in pairs), len(pairs))


def _cycles_per_ms() -> float:
    """Pace of the spinning kernel, from one timed spin of about a ms."""
    cycles = 2_000_000
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1000)  # the kernel's first launch loads it
    started.record()
    torch.cuda._sleep(cycles)
    ended.record()
    ended.synchronize()
    return cycles / started.elapsed_time(ended)
