"""The fixed-cost finder's arithmetic: recorded times in, constant, slope and flags out."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks._fit import Point, fit_cost, judge_phase

SIZES = [1536, 3072, 6144, 12288, 24576]


def points(wall, *, cpu=0.1, gpu: float | None = 0.9, render=4.0) -> list[Point]:
    """A phase whose wall follows a function of x; cpu, gpu: shares of its wall; render: the whole in walls."""
    return [Point(x, w, cpu * w, None if gpu is None else gpu * w, render * w) for x in SIZES for w in [wall(x)]]


def test_a_line_is_found_again():
    fit = fit_cost(SIZES, [5 + 0.01 * x for x in SIZES])
    assert (fit.constant, fit.slope, fit.quadratic) == pytest.approx((5, 0.01, 0), rel=1e-6)
    assert fit.error < 1e-9 and fit(1000) == pytest.approx(15)
    assert fit.constant_share(500) == pytest.approx(0.5)


def test_attention_is_found_beside_the_rest():
    fit = fit_cost(SIZES, [20 + 0.03 * x + 1e-6 * x * x for x in SIZES], quadratic=True)
    assert (fit.constant, fit.slope, fit.quadratic) == pytest.approx((20, 0.03, 1e-6), rel=1e-4)


def test_small_sizes_count_as_much_as_large_ones():
    """1 % of noise on the largest must not drown the constant, which shows at the smallest."""
    noise = 1 + 0.01 * np.array([1, -1, 1, -1, 1])
    fit = fit_cost(SIZES, [30 + 0.02 * x for x in SIZES] * noise)
    assert fit.constant == pytest.approx(30, rel=0.1) and fit.slope == pytest.approx(0.02, rel=0.03)
    assert fit.error < 0.02


def test_no_part_is_negative_and_what_does_not_fit_shows_in_the_error():
    fit = fit_cost(SIZES, [1e-6 * x * x for x in SIZES])
    assert fit.constant == 0 and fit.slope > 0 and fit.error > 0.5
    falling = fit_cost(SIZES, [100 - 0.002 * x for x in SIZES])
    assert falling.slope == 0 and falling.constant > 0


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ([5, 5], [1, 2], r"2 sizes \(1 different\) and 2 costs"),
        ([1, 2], [1], r"2 sizes \(2 different\) and 1 costs"),
        ([1, 2], [0, 1], "not positive"),
    ],
)
def test_what_can_not_be_fitted_is_refused(x, y, words):
    with pytest.raises(ValueError, match=words):
        fit_cost(x, y)


@pytest.mark.parametrize(
    ("phase", "flags"),
    [
        (points(lambda x: 0.01 * x), []),
        (points(lambda x: 12.0), ["constant"]),
        (points(lambda x: 200 + 0.01 * x), []),
        (points(lambda x: 2000 + 0.01 * x), ["constant"]),
        (points(lambda x: 0.01 * x, cpu=0.95, gpu=0.3), ["serial"]),
        (points(lambda x: 12.0, cpu=1.0, gpu=0.0), ["serial", "constant"]),
        # The host spins in a wait while the GPU works: not serial.
        (points(lambda x: 0.01 * x, cpu=1.0, gpu=0.97), []),
        # Another process has the CPU: not serial either.
        (points(lambda x: 0.01 * x, cpu=0.2, gpu=0.1), []),
        (points(lambda x: 0.01 * x, cpu=1.0, gpu=None), []),
    ],
    ids=["follows", "constant", "half constant", "mostly constant", "serial", "both", "spinning", "waiting", "unknown"],
)
def test_flags(phase, flags):
    row = judge_phase(phase)
    assert row["flags"] == flags
    assert row["share_smallest"] == row["share_largest"] == pytest.approx(0.25)


def test_serial_at_one_size_is_flagged_with_how_many():
    phase = points(lambda x: 100 + 0.01 * x, cpu=0.1, gpu=0.9)
    phase[0] = Point(SIZES[0], 115.0, 112.0, 40.0, 460.0)
    row = judge_phase(phase)
    assert row["flags"] == ["serial"] and (row["serial_points"], row["points"]) == (1, 5)
