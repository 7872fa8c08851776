"""Runs the steps of one render, eager or by replay, one step ahead of the host's wait, and keeps the account of it.

The host issues step i, then waits for step i-1: the GPU never drains, and progress and cancel stay within one step of
the truth (a replay returns at once, so without this wait they would lie).
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .cuda_graph import GraphedStep, GraphKey, allocator_backend, unavailable_reason
from .errors import CaptureError, NonFiniteError, RestartRequiredError
from .gpu_time import LaunchCount, queued_gpu_time
from .graph_policy import BusyMeasurement, decide
from .steps import StepConstants, StepInputs, StepOutputs, denoise_step
from .timing import Phase, Timeline

if TYPE_CHECKING:
    from .runtime import TransformerModel

CUDA_GRAPH_MODES = ("auto", "on", "off")
ON_CAPTURE_FAILURE = ("eager", "error")

# auto: the first eager step of a kind meets cold kernels and has its launches counted, the second is timed with the
# device idle at both ends, the third runs in timed parts.
_COUNTED_RUN, _TIMED_RUN, _MEASURED_RUN = 0, 1, 2
# A busy host may issue a part too late to time it; the next step then gets longer delays.
_MEASURE_TRIES, _LONGER_DELAYS = 3, 3
# No host that renders takes longer (a busy ComfyUI: 0.06).
SLOW_LAUNCH_MS = 0.06
# About 500 launches: half of what the launch queue holds.
BLOCKS_PER_PART = 4


@dataclass
class _Kind:
    """What is known of the steps that share one graph key. A render whose guidance skips passes has several kinds.
    lag_ms: how far the device was behind when the timed step was issued. late_tries: those of measure_tries with
    delays."""

    key: GraphKey | None = None
    recording: GraphedStep | None = None
    capture: bool = False
    measuring: bool = False
    eager_runs: int = 0
    launches: int = 0
    timed_ms: float = 0.0
    lag_ms: float = 0.0
    measure_tries: int = 0
    late_tries: int = 0


@dataclass
class _InFlight:
    """A step that was issued and not yet waited for. ended: recorded on the model's device behind the step and the copy
    of its finite flags; the timeline may run on another device. replay: events around a replay."""

    index: int
    phase: Phase
    probe: torch.Tensor
    ended: torch.cuda.Event | None
    replay: tuple[torch.cuda.Event, torch.cuda.Event] | None


class StepRunner:
    """One render's steps: a context manager in which `run` is called for every step. `account` tells what happened.

    constants: of every step; steps of one kind share one object.
    on_finished(index): called when the host has seen step `index` end. refused: why the host forbids graphs, empty when
    it doesn't.
    Raises CaptureError at construction or in `run` with on_capture_failure "error", RestartRequiredError whenever the
    process can't go on, NonFiniteError when a step's result isn't finite.
    """

    def __init__(
        self,
        model: TransformerModel,
        constants: Sequence[StepConstants],
        total_steps: int,
        timeline: Timeline,
        *,
        cuda_graph: str,
        on_capture_failure: str,
        on_finished: Callable[[int], None],
        refused: str = "",
    ):
        self._model = model
        self._constants = constants
        self._total = total_steps
        self._timeline = timeline
        self._raise_failures = on_capture_failure == "error"
        self._on_finished = on_finished
        self._cuda = model.device.type == "cuda"
        self._in_flight: _InFlight | None = None
        self._eager_only: _Kind | None = None
        self._kinds: dict[GraphKey, _Kind] = {}
        self._streams = [n for n in ("video", "audio") if getattr(constants[0], n) is not None]
        # The finite flags leave the device through pinned memory, so that reading them never waits for more than their
        # step.
        self._probes = torch.empty(total_steps, len(self._streams), pin_memory=self._cuda)

        self.account: dict = {"requested": cuda_graph, "mode": "eager", "decision": "", "steps": []}
        if cuda_graph == "off":
            self._eager_only = _Kind()
            self.account["decision"] = "off: eager"
        elif reason := refused or unavailable_reason(model.device):
            self._give_up(reason)
        elif cuda_graph == "on":
            self.account["decision"] = "on: captured at first use of a shape, replayed after"
        else:
            self.account["decision"] = f"auto: not measured, a render of {total_steps} steps is too short"

    def run(self, index: int, inputs: StepInputs) -> StepOutputs:
        """Issue step `index` and wait for the one before it. The outputs may be a recording's own buffers: valid until
        the next `run`."""
        kind = self._eager_only or self._kind(index, inputs)
        if kind.recording is None and kind.capture:
            outputs = self._capture(kind, index, inputs)
            if outputs is not None:
                self.account["steps"].append("capture")
                self._check_finite(index, outputs.probe.to("cpu"))
                self._on_finished(index)
                return outputs
        if kind.recording is not None:
            return self._replay(kind, index, inputs)
        if kind.measuring and kind.eager_runs == _MEASURED_RUN:
            return self._measure(kind, index, inputs)
        return self._eager(kind, index, inputs)

    def capture_ahead(self, index: int, inputs: StepInputs) -> bool:
        """Capture step `index` without running it, so that a later render of the same key replays at once. False: it
        stays eager, the reason is in the account."""
        kind = self._eager_only or self._kind(index, inputs)
        if kind.recording is None and kind.capture:
            self._capture(kind, index, inputs)
        return kind.recording is not None

    def __enter__(self) -> StepRunner:
        return self

    def __exit__(self, kind, error: BaseException | None, traceback) -> None:
        """Wait for the last step and close the account. After an error or a cancel nothing is waited for."""
        try:
            if error is None:
                self._drain()
            elif self._in_flight is not None:
                self._timeline.end(self._in_flight.phase, error=error)
        finally:
            for known in self._kinds.values():
                if known.recording is not None:
                    known.recording.forget_constants()
        graphs = self._model.graphs
        self.account |= {
            "allocator": allocator_backend(),
            "graphs": len(graphs),
            "graph_bytes": graphs.device_bytes,
            "counters": {k: v for k, v in vars(graphs.counters).items() if k != "last_miss"},
        }

    def _kind(self, index: int, inputs: StepInputs) -> _Kind:
        """The kind of a step. At its first sight: find its recording, or decide what to do about one."""
        key = GraphKey.of((self._constants[index], inputs), weight_generation=self._model.generation)
        if key in self._kinds:
            return self._kinds[key]
        graphs = self._model.graphs
        kind = self._kinds[key] = _Kind(key, graphs.find(key))
        if kind.recording is not None:
            self.account["decision"] = "replayed: this shape was captured before"
            return kind
        self.account["missed"] = list(graphs.counters.last_miss)
        if sum(k.recording is not None or k.capture for k in self._kinds.values()) >= graphs.max_graphs:
            # A recording that this render still needs must not make way: it would be captured again every render.
            self.account["decision"] += f"; more kinds of steps than {graphs.max_graphs} recordings: the rest eager"
            return kind
        if refusal := graphs.refusal(key):
            self._give_up(refusal)
            return self._eager_only
        if self.account["requested"] == "on":
            kind.capture = True
        elif known := graphs.measurement(key):
            self._decide(kind, known, self._left(index), seen_before=True)
        else:
            kind.measuring = True
        return kind

    def _left(self, index: int) -> int:
        """Steps of the kind of step `index` that are still to run, itself included."""
        return sum(constants is self._constants[index] for constants in self._constants[index:])

    def _decide(self, kind: _Kind, measurement: BusyMeasurement, remaining_steps: int, *, seen_before: bool) -> None:
        kind.measuring = False
        decision = decide(measurement, remaining_steps, seen_before=seen_before)
        kind.capture = decision.capture
        self.account["decision"] = f"auto: {decision.words}"
        self.account["measured"] = vars(measurement) | {"gpu_busy": measurement.gpu_busy}
        self._timeline.note("sample.measure", self.account["decision"])

    def _give_up(self, reason: str) -> None:
        """Go on eager, or raise when the user asked for that."""
        self._eager_only = _Kind()
        self.account["fallback"] = reason
        self.account["decision"] = f"eager: {reason}"
        if self._raise_failures:
            raise _no_graph(reason)
        self._timeline.note("sample.capture", self.account["decision"])

    def _step(self, constants: StepConstants, inputs: StepInputs) -> StepOutputs:
        return denoise_step(self._model.module, constants, inputs)

    def _capture(self, kind: _Kind, index: int, inputs: StepInputs) -> StepOutputs | None:
        """Capture, and give the outputs of the first replay. None: capture failed, the step is still to run."""
        self._drain()
        try:
            kind.recording, outputs = self._model.graphs.capture(
                kind.key,
                self._step,
                self._constants[index],
                inputs,
                lambda name: self._timeline.phase(name, step=index),
                keep=[known.recording for known in self._kinds.values() if known.recording is not None],
            )
        except RestartRequiredError:
            raise
        except CaptureError as error:
            self._give_up(str(error))
            return None
        self.account["capture"] = vars(kind.recording.report)
        self.account["mode"] = "graph"
        return outputs

    def _replay(self, kind: _Kind, index: int, inputs: StepInputs) -> StepOutputs:
        self.account["mode"] = "graph"
        phase = self._timeline.begin("sample.replay", step=index)
        kind.recording.load(self._constants[index], inputs)
        started = _recorded_event()
        outputs = kind.recording.replay()
        return self._issued(index, phase, outputs, (started, _recorded_event()))

    def _eager(self, kind: _Kind, index: int, inputs: StepInputs) -> StepOutputs:
        counted = kind.measuring and kind.eager_runs == _COUNTED_RUN
        timed = kind.measuring and kind.eager_runs == _TIMED_RUN
        if timed:
            self._drain()
        begun = time.perf_counter()
        phase = self._timeline.begin("sample.step", step=index)
        try:
            with LaunchCount() if counted else contextlib.nullcontext() as count:
                outputs = self._step(self._constants[index], inputs)
        except BaseException as error:
            self._timeline.end(phase, error=error)
            raise
        self._issued(index, phase, outputs, None)
        if counted:
            kind.launches = count.launches
        if timed:
            issued_ms = (time.perf_counter() - begun) * 1e3
            self._drain()
            kind.timed_ms, kind.lag_ms = phase.wall_ms, phase.wall_ms - issued_ms
        kind.eager_runs += 1
        return outputs

    def _measure(self, kind: _Kind, index: int, inputs: StepInputs) -> StepOutputs:
        """Run this step in timed parts, in a phase of its own; its bits are those of any eager step."""
        self._drain()
        # From the first block on: a step of several passes one after the other meets it again.
        cuts = list(self._model.module.transformer_blocks)[::BLOCKS_PER_PART]
        parts = 1 + len(cuts) * self._constants[index].model_calls
        host_ahead = kind.lag_ms > kind.timed_ms / parts and kind.measure_tries == 0
        with self._timeline.phase(
            "sample.measure", step=index, eager_wall_ms=kind.timed_ms, launches=kind.launches
        ) as phase:
            measured = queued_gpu_time(
                lambda: self._step(self._constants[index], inputs),
                cuts,
                part_ms=min(kind.timed_ms, kind.launches * SLOW_LAUNCH_MS)
                / parts
                * _LONGER_DELAYS**kind.late_tries,
                launches=kind.launches,
                host_ahead=host_ahead,
                device=self._model.device,
            )
            outputs: StepOutputs = measured.result
            phase.gpu_ms, phase.gpu_method = measured.gpu_ms, measured.method
            phase.attrs |= {"parts": measured.parts, "late_parts": measured.late, "event_ms": measured.event_ms}
        kind.measure_tries += 1
        kind.late_tries += not host_ahead
        self.account["steps"].append("measure")
        self._check_finite(index, outputs.probe.to("cpu"))
        self._on_finished(index)
        if measured.gpu_ms is None:
            kind.measuring = kind.measure_tries < _MEASURE_TRIES
            self.account["decision"] = f"auto: GPU time could not be measured ({measured.reason}), not captured"
            self._timeline.note("sample.measure", self.account["decision"])
            return outputs
        measurement = BusyMeasurement(kind.timed_ms, measured.gpu_ms, kind.launches)
        self._model.graphs.remember(kind.key, measurement)
        self._decide(kind, measurement, self._left(index) - 1, seen_before=False)
        return outputs

    def _issued(self, index: int, phase: Phase, outputs: StepOutputs, replay) -> StepOutputs:
        self._probes[index].copy_(outputs.probe, non_blocking=True)
        ended = _recorded_event() if self._cuda else None
        phase.issued()
        before, self._in_flight = self._in_flight, _InFlight(index, phase, self._probes[index], ended, replay)
        self.account["steps"].append("eager" if replay is None else "replay")
        self._finish(before)
        return outputs

    def _drain(self) -> None:
        """Wait for the step in flight."""
        flight, self._in_flight = self._in_flight, None
        self._finish(flight)

    def _finish(self, flight: _InFlight | None) -> None:
        """Wait for an issued step, end its phase and report it."""
        if flight is None:
            return
        if flight.ended is not None:
            flight.ended.synchronize()
        flight.phase.wait()
        if flight.replay is not None:
            started, ended = flight.replay
            flight.phase.gpu_ms, flight.phase.gpu_method = started.elapsed_time(ended), "graph_events"
        self._timeline.end(flight.phase)
        self._check_finite(flight.index, flight.probe)
        self._on_finished(flight.index)

    def _check_finite(self, index: int, probe: torch.Tensor) -> None:
        for name, value in zip(self._streams, probe.tolist()):
            if value != value or value in (float("inf"), float("-inf")):
                raise NonFiniteError(
                    "sample.step", f"the {name} latent holds NaN or Inf after step {index + 1} of {self._total}; "
                    f"the render is stopped. Check the weights, the conditioning and the input latent."
                )


def check_graphs_allowed(
    device: torch.device, *, cuda_graph: str, on_capture_failure: str, refused: str = ""
) -> None:
    """Raise the CaptureError that a StepRunner with these settings would raise at construction: before weights are
    read."""
    reason = refused or unavailable_reason(device)
    if reason and cuda_graph != "off" and on_capture_failure == "error":
        raise _no_graph(reason)


def _no_graph(reason: str) -> CaptureError:
    return CaptureError(
        f"no CUDA graph: {reason}. on_capture_failure is 'error'; set it to 'eager', or cuda_graph to 'off', to render "
        "anyway."
    )


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
