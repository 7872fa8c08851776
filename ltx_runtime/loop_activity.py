"""Does a render live on the GPU? Copies, waits and busy time of one step and of a whole denoising loop, from CUPTI.

A measurement of its own, never part of a timed render: CUPTI slows the host while it records and every launch of the process
afterwards.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .gpu_activity import GpuActivity, measure_gpu_busy
from .sampler import SampleRequest, denoise, prepare
from .step_runner import StepRunner
from .steps import denoise_step
from .timing import Timeline

# The finite flags: one float32 a stream and step, read through pinned memory one step behind.
_EDGE_BYTES_PER_STEP = 8


@dataclass(frozen=True)
class LoopActivity:
    """resident: None when it could not be measured. words: one plain sentence. step: activity between the kernels of one
    step, run eager (a recording holds the same kernels). loop: of the whole loop, its edges included. Both as plain values of `GpuActivity.attrs`, with host and device
    bytes added up."""

    resident: bool | None
    words: str
    step: dict[str, Any] | None = None
    loop: dict[str, Any] | None = None


def measure_loop_activity(model, request: SampleRequest, *, cuda_graph: str) -> LoopActivity:
    """Run the request's loop once under the profiler. cuda_graph: "off", or "on" for a key that was captured before.

    The weights must be resident. Raises what `sample` raises.
    """
    if model.device.type != "cuda":
        return LoopActivity(None, f"resident: not measured, the model is on {model.device.type}")
    with torch.inference_mode():
        prepared = prepare(model, request, Timeline(None, device=model.device))
        total = len(prepared.coefficients)

        def loop() -> None:
            with StepRunner(
                model,
                prepared.constants,
                total,
                Timeline(None),
                cuda_graph=cuda_graph,
                on_capture_failure="error",
                on_finished=lambda index: None,
            ) as runner:
                denoise(prepared, request, runner, lambda: None, None)

        whole = measure_gpu_busy(loop, device=model.device)
        if whole.reason is not None:
            return LoopActivity(None, f"resident: not measured, {whole.reason}")
        inputs = prepared.inputs(0, prepared.start)
        step = measure_gpu_busy(lambda: denoise_step(model.module, prepared.constants[0], inputs), device=model.device)
    return _judged(step, whole, total)


def _judged(step: GpuActivity, whole: GpuActivity, total: int) -> LoopActivity:
    inside, edges = _moved(step), _moved(whole)
    waits = None if step.host_waits is None else sum(count for _, count in step.host_waits)
    edge_waits = None if whole.host_waits is None else sum(count for _, count in whole.host_waits)
    resident = (
        inside["host_to_device_bytes"] == 0
        and inside["device_to_host_bytes"] == 0
        and waits == 0
        and edges["host_to_device_bytes"] == 0
        and edges["device_to_host_bytes"] <= _EDGE_BYTES_PER_STEP * total
    )
    words = (
        f"resident: {'yes' if resident else 'no'}: between the kernels of a step "
        f"{inside['host_to_device_bytes']} bytes to the device, {inside['device_to_host_bytes']} bytes to the host, {waits} waits; "
        f"in the whole loop of {total} steps, its edges included, {edges['host_to_device_bytes']} bytes to the device, "
        f"{edges['device_to_host_bytes']} bytes to the host, {edge_waits} waits"
    )
    return LoopActivity(resident, words, step.attrs() | inside, whole.attrs() | edges)


def _moved(activity: GpuActivity) -> dict[str, int]:
    moved = {"HtoD": 0, "DtoH": 0}
    for copy in activity.memcpys:
        if copy.kind in moved:
            # A torch without activity metadata hides the size: count at least that something moved.
            moved[copy.kind] += 1 if copy.bytes is None else copy.bytes
    return {"host_to_device_bytes": moved["HtoD"], "device_to_host_bytes": moved["DtoH"]}
