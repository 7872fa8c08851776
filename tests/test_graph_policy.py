"""Recorded timings in, decision out. Timings: H200, 22B layout, 121 frames (benchmarks/results)."""
from dataclasses import replace

import pytest

from ltx_runtime.graph_policy import BusyMeasurement, IssueMeasurement, decide, decide_piece

S0_SLOW_HOST = BusyMeasurement(wall_ms=364.0, gpu_ms=102.0, launches=6130)  # a real ComfyUI's stage 1
S0 = BusyMeasurement(wall_ms=121.7, gpu_ms=102.3, launches=6130)
S1 = BusyMeasurement(wall_ms=393.8, gpu_ms=375.7, launches=5986)
S2 = BusyMeasurement(wall_ms=2076.6, gpu_ms=2073.1, launches=5986)


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


@pytest.mark.parametrize(
    "wall_ms, launches, measured_ms",
    [(5.5, 280, 87), (5.5, 280, 81), (111.4, 5986, 115 + 238 + 106), (389.0, 5986, 397 + 305 + 388)],
)
def test_the_predicted_cost_of_a_capture_is_what_it_took(wall_ms, launches, measured_ms):
    """benchmarks/results/auto_h200_202611.md: tiny sizes, S0, S1. Too little would capture what does not pay."""
    predicted = BusyMeasurement(wall_ms, wall_ms / 2, launches).predicted_capture_ms
    assert 0.95 < predicted / measured_ms < 1.3


def test_a_tiny_render_does_not_capture_for_itself():
    tiny = BusyMeasurement(wall_ms=5.5, gpu_ms=0.6, launches=280)
    first = decide(tiny, 8, seen_before=False)
    assert not first.capture and "pays after 17 steps" in first.words
    assert decide(tiny, 8, seen_before=True).capture


def test_busy_never_exceeds_one():
    assert BusyMeasurement(wall_ms=100.0, gpu_ms=101.0, launches=100).gpu_busy == 1.0
    assert not decide(BusyMeasurement(wall_ms=100.0, gpu_ms=101.0, launches=100), 100, seen_before=True).capture


@pytest.mark.parametrize("measurement", [S0_SLOW_HOST, S0, S1, S2])
@pytest.mark.parametrize("error", [0.95, 1.05])
def test_a_gpu_time_within_its_error_bound_decides_the_same_when_the_shape_comes_back(measurement, error):
    off = replace(measurement, gpu_ms=measurement.gpu_ms * error)
    exact, found = (decide(m, 8, seen_before=True) for m in (measurement, off))
    # S1 at 95 % busy gains 1.05x at most: with 5 % less it stands on the edge, and either choice costs under 2 %.
    if measurement is S1 and error < 1:
        assert off.wall_ms / off.predicted_replay_ms < 1.11
    else:
        assert exact.capture == found.capture


@pytest.mark.parametrize(
    "issue_ms, device_ms, captures",
    [
        (6.7, 40.0, False),  # conv 384x256x121: replayed in 45.4 ms instead of 44.8
        (7.7, 172.6, False),
        (30.4, 143.7, False),
        (155.1, 538.0, False),  # diffusion 768x512x121: 530.5 instead of 531.3
        (51.4, 132.5, False),
        (81.5, 138.5, False),  # diffusion 384x256x121: 132.4 instead of 135.1
        (20.3, 29.2, True),  # diffusion 256x256x25, cudaMallocAsync: 22.7 instead of 30.5
        (19.0, 23.4, True),
        (32.6, 36.9, True),  # the same, native allocator: 24.0 instead of 36.1
        (6.7, 6.7, True),
        (12, 11, True),
    ],
)
def test_a_piece_of_a_decode_is_captured_where_the_host_is_its_limit(issue_ms, device_ms, captures):
    """All but the last measured (benchmarks/results/decode_h200_202611.md)."""
    decision = decide_piece(IssueMeasurement(issue_ms, device_ms))
    assert decision.capture == captures
    times = f"host issues in {issue_ms:.1f} ms, device works {device_ms:.1f}"
    assert decision.words == times + (": the host is the limit, recorded" if captures else ": not recorded")
