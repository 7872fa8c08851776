"""Recorded timings in, decision out. Timings: H200, 22B layout, 121 frames (benchmarks/results)."""
import pytest

from ltx_runtime.graph_policy import BusyMeasurement, decide

S0_SLOW_HOST = BusyMeasurement(wall_ms=364.0, gpu_ms=102.0)  # a real ComfyUI's stage 1
S0 = BusyMeasurement(wall_ms=130.6, gpu_ms=110.2)
S1 = BusyMeasurement(wall_ms=393.8, gpu_ms=375.7)
S2 = BusyMeasurement(wall_ms=2076.6, gpu_ms=2073.1)


def test_a_host_bound_loop_is_captured_at_once():
    decision = decide(S0_SLOW_HOST, 7, seen_before=False)
    assert decision.capture and "28% busy" in decision.words and "7 remain, captured" in decision.words


@pytest.mark.parametrize("measurement", [S1, S2])
@pytest.mark.parametrize("seen_before", [False, True])
def test_a_busy_gpu_is_left_alone_and_the_words_bound_the_gain(measurement, seen_before):
    decision = decide(measurement, 1000, seen_before=seen_before)
    assert not decision.capture and "capture would gain at most 1.0" in decision.words


def test_a_small_gain_waits_until_the_shape_comes_back():
    first = decide(S0, 5, seen_before=False)
    assert not first.capture and "only 5 remain" in first.words
    assert decide(S0, 8, seen_before=True).capture


def test_the_break_even_step_decides():
    cost = S0.predicted_capture_ms / (S0.wall_ms - S0.predicted_replay_ms)
    assert not decide(S0, int(cost), seen_before=False).capture
    assert decide(S0, int(cost) + 1, seen_before=False).capture


def test_busy_never_exceeds_one():
    assert BusyMeasurement(wall_ms=100.0, gpu_ms=101.0).gpu_busy == 1.0
    assert not decide(BusyMeasurement(wall_ms=100.0, gpu_ms=101.0), 100, seen_before=True).capture
