"""When capturing pays, a denoising step or a piece of a decode: pure decisions from measured numbers.

Source: design.md section 6; costs of a capture from cuda_graph_facts.md section 7.
"""
from __future__ import annotations

from dataclasses import dataclass

# A replayed step still has launch gaps and the copies at its edge: measured 3-9 % over the kernels' own time (H200,
# S0-S1).
_REPLAY_OVERHEAD = 1.05
# Beside its two passes a capture took 70-75 ms at 280 launches and 220-410 at 6,000 (H200, native, tiny to S2): what it
# costs whatever the step, and a launch.
_CAPTURE_MS = 60.0
_RECORDING_MS = 0.05
# Below this gain per step the decision would rest on noise.
_MINIMUM_GAIN = 1.05
# A host that takes a smaller share of a piece's time to issue it is ahead of the device for nearly all of it. Diffusion
# decodes have short kernels in some stages and long ones in others: replays gained 24 to 33 % at shares of 0.70 to
# 0.88, and 2 % at 0.39 to 0.59 (H200, benchmarks/results/decode_h200_202611.md).
_HOST_LIMITED = 0.65


@dataclass(frozen=True)
class BusyMeasurement:
    """Eager steps of one key, milliseconds. wall_ms: unprofiled step, synchronised at both ends. gpu_ms: union of the
    intervals in which kernels ran. launches: kernels of a step."""

    wall_ms: float
    gpu_ms: float
    launches: int

    @property
    def gpu_busy(self) -> float:
        return min(self.gpu_ms / self.wall_ms, 1.0)

    @property
    def predicted_replay_ms(self) -> float:
        return min(self.gpu_ms * _REPLAY_OVERHEAD, self.wall_ms)

    @property
    def predicted_capture_ms(self) -> float:
        """A warm-up pass and a first replay, the recording, which goes by the launches, and what any capture costs."""
        return 2 * self.wall_ms + self.launches * _RECORDING_MS + _CAPTURE_MS


@dataclass(frozen=True)
class Decision:
    """capture: whether to. words: the reasoning with its numbers, for report and log."""

    capture: bool
    words: str


def decide(measurement: BusyMeasurement, remaining_steps: int, *, seen_before: bool) -> Decision:
    """Capture when it pays within this render's remaining steps, or when the key comes back (seen_before) and a
    replayed step is faster at all."""
    if measurement.gpu_ms <= 0:
        return Decision(False, "no GPU time was measured, not captured")
    saved = measurement.wall_ms - measurement.predicted_replay_ms
    gain = measurement.wall_ms / measurement.predicted_replay_ms
    busy = f"{measurement.gpu_busy:.0%} busy ({measurement.gpu_ms:.1f} of {measurement.wall_ms:.1f} ms)"
    if gain < _MINIMUM_GAIN:
        return Decision(False, f"{busy}: capture would gain at most {1 / measurement.gpu_busy:.2f}x, not captured")
    break_even = measurement.predicted_capture_ms / saved
    cost = (
        f"capture costs about {measurement.predicted_capture_ms:.0f} ms and saves about {saved:.1f} ms a step "
        f"({gain:.2f}x): pays after {break_even:.0f} steps"
    )
    if remaining_steps > break_even:
        return Decision(True, f"{busy}: {cost}, {remaining_steps} remain, captured")
    if seen_before:
        return Decision(True, f"{busy}: {cost}, {remaining_steps} remain, but this shape came back, captured")
    return Decision(
        False, f"{busy}: {cost}, only {remaining_steps} remain, not captured; a next render of this shape will"
    )


@dataclass(frozen=True)
class IssueMeasurement:
    """One eager piece of a decode, milliseconds. issue_ms: of the host, without its waits for the device. device_ms:
    between events before and after the piece; where the host is the slower one, its gaps are inside."""

    issue_ms: float
    device_ms: float


def decide_piece(measurement: IssueMeasurement) -> Decision:
    """Capture a piece of a shape that came back where the host is its limit, if only in parts. Where the host is ahead
    all the time, a replay takes as long as the eager piece, and the memory of the recording is for nothing."""
    times = f"host issues in {measurement.issue_ms:.1f} ms, device works {measurement.device_ms:.1f}"
    if measurement.issue_ms < _HOST_LIMITED * measurement.device_ms:
        return Decision(False, f"{times}: not recorded")
    return Decision(True, f"{times}: the host is the limit, recorded")
