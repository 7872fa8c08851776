from ltx_runtime.intervals import gaps, length, phase_interval, union


def test_union_joins_overlapping_touching_and_contained_intervals_and_drops_empty_ones():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (5.2, 5.4), (9, 9)]) == [(0, 4), (5, 6)]


def test_length_counts_shared_time_once():
    assert length([(0, 10), (2, 3), (8, 12), (20, 21)]) == 13
    assert length([]) == 0


def test_gaps_are_what_lies_between():
    assert gaps([(20, 21), (0, 10), (2, 3), (12, 15)]) == [(10, 12), (15, 20)]
    assert gaps([(1, 2)]) == []


def test_phase_interval_ends_at_the_event():
    assert phase_interval({"t_ms": 30.0, "wall_ms": 12.5}) == (17.5, 30.0)
