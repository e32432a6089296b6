from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.errors import UsageError
from overlap.timeline import Recorder, Span, Timeline, breakdowns, median_step
from overlap.timeline.measure.intervals import covered_ns, intersect, merge, subtract, total_length_ns
from overlap.timeline.measure.metrics import breakdowns_by_step
from overlap.timeline.measure.steps import rank_windows
from tests.errors import error_of

from .made import compute as compute_span
from .made import timeline_of as timeline_of_spans
from .made import traces

LIMIT_NS = 40
intervals = st.lists(st.tuples(st.integers(0, LIMIT_NS), st.integers(0, LIMIT_NS)).map(sorted).map(tuple), max_size=8)


def covered(pairs):
    return {instant for start, end in pairs for instant in range(start, end)}


@given(intervals, intervals)
def test_interval_arithmetic_is_set_arithmetic(left, right):
    a, b = merge(left), merge(right)
    assert covered(a) == covered(left)
    assert covered(intersect(a, b)) == covered(left) & covered(right)
    assert covered(subtract(a, b)) == covered(left) - covered(right)
    assert total_length_ns(a) == len(covered(left))


@given(intervals, intervals)
def test_each_interval_is_covered_as_far_as_its_instants_are(left, right):
    real = [(start, end) for start, end in left if start < end]
    start_ns, end_ns = np.array(real, np.int64).reshape(-1, 2).T
    expected = [len(covered([pair]) & covered(right)) for pair in real]
    assert covered_ns(start_ns, end_ns, merge(right)).tolist() == expected


@given(intervals, intervals)
def test_results_are_merged(left, right):
    for result in (merge(left), intersect(merge(left), merge(right)), subtract(merge(left), merge(right))):
        assert all(start < end for start, end in result)
        assert all(before[1] < after[0] for before, after in pairwise(result))


def timeline_of(compute, comm, step=None):
    recorder = Recorder(0)
    for start, end in compute:
        recorder.append(("compute", "compute", "f", start, end, None))
    for number, (start, end) in enumerate(comm):
        recorder.append(("comm", "comm" if number % 2 else "tp", "all_reduce", start, end, None))
    if step:
        recorder.append(("step", "step", "step 0", *step, 0))
    return Timeline.collect([recorder], world_size=1)


@given(intervals, intervals, st.tuples(st.integers(0, LIMIT_NS), st.integers(0, LIMIT_NS)).map(sorted).map(tuple))
def test_a_step_adds_up_as_counted_nanosecond_by_nanosecond(compute, comm, window):
    (row,) = breakdowns(timeline_of(compute, comm, window), step=0)
    inside = covered([window])
    busy, talking = covered(compute) & inside, covered(comm) & inside
    assert row.wall_ns == len(inside)
    assert (row.compute_ns, row.comm_ns) == (len(busy), len(talking))
    assert row.compute_only_ns == len(busy - talking)
    assert row.overlapped_ns == len(busy & talking)
    assert row.exposed_ns == len(talking - busy)
    assert row.idle_ns == len(inside - busy - talking)
    assert row.wall_ns == row.compute_only_ns + row.overlapped_ns + row.exposed_ns + row.idle_ns
    assert (row.waiting_ns, row.wire_ns, row.transfer_ns, row.queued_ns) == (0, row.exposed_ns, row.comm_ns, 0)


def test_the_figures_of_a_known_picture():
    (row,) = breakdowns(timeline_of([(0, 50)], [(30, 70), (60, 90)]))
    assert (row.rank, row.step, row.wall_ns, row.compute_ns, row.comm_ns) == (0, None, 90, 50, 60)
    assert (row.compute_only_ns, row.overlapped_ns, row.exposed_ns, row.idle_ns) == (30, 20, 40, 0)
    assert row.overlap_ratio == 20 / 60


def test_steps_that_were_issued_ahead_of_their_computes_follow_each_other():
    recorder = Recorder(0)
    for step in range(3):
        recorder.append(("step", "step", f"step {step}", 0, 0, step))  # issuing takes no time here
        recorder.append(("compute", "compute", "f", 100 * step + 40, 100 * step + 90, step))
        recorder.append(("comm", "comm", "all_reduce", 100 * step + 80, 100 * step + 130, None))
    timeline = Timeline.collect([recorder], world_size=1)
    rows = [breakdowns(timeline, step=step)[0] for step in range(3)]
    assert [row.wall_ns for row in rows] == [90, 100, 100]
    assert [row.exposed_ns for row in rows] == [0, 40, 40]
    assert [row.overlapped_ns for row in rows] == [10, 10, 10]
    assert median_step(timeline) == 1


def test_a_step_inside_another_one_has_its_own_window():
    recorder = Recorder(0)
    recorder.append(("step", "step", "step 0", 0, 100, 0))
    recorder.append(("compute", "compute", "f", 0, 20, 0))
    recorder.append(("step", "step", "step 1", 30, 60, 1))
    recorder.append(("compute", "compute", "f", 35, 70, 1))
    recorder.append(("compute", "compute", "f", 80, 100, 0))
    timeline = Timeline.collect([recorder], world_size=1)
    assert [breakdowns(timeline, step=step)[0].wall_ns for step in range(2)] == [100, 40]


def test_without_communication_there_is_no_ratio():
    assert breakdowns(timeline_of([(0, 5)], []))[0].overlap_ratio is None


def test_without_a_step_all_ranks_share_the_window_from_first_start_to_last_end():
    recorders = [Recorder(0), Recorder(1)]
    recorders[0].append(("compute", "compute", "f", 10, 20, None))
    recorders[1].append(("compute", "compute", "f", 15, 40, None))
    first, second = breakdowns(Timeline.collect(recorders, world_size=2))
    assert (first.wall_ns, first.idle_ns) == (30, 20)
    assert (second.wall_ns, second.idle_ns) == (30, 5)


def test_each_rank_has_its_own_window_of_a_step_and_the_latest_of_a_repeated_one():
    recorders = [Recorder(rank) for rank in range(4)]
    recorders[0].append(("step", "step", "step 1", 0, 10, 1))
    recorders[0].append(("step", "step", "step 1", 50, 57, 1))
    recorders[1].append(("step", "step", "step 1", 4, 9, 1))
    recorders[2].append(("step", "step", "step 2", 4, 9, 2))
    recorders[3].append(("compute", "compute", "f", 1, 99, None))  # no steps: seen from first to last
    windows = rank_windows(Timeline.collect(recorders, world_size=4), step=1)
    assert windows == [(0, 1, 50, 57), (1, 1, 4, 9), (3, None, 4, 57)]


def test_the_median_step_is_by_the_longest_rank_and_the_shorter_of_two():
    recorder, other = Recorder(0), Recorder(1)
    for step, wall in enumerate((25, 10, 40, 20, 30)):  # the first is left out
        recorder.append(("step", "step", "", 0, wall, step))
    timeline = Timeline.collect([recorder, other], world_size=2)
    assert median_step(timeline) == 3
    other.append(("step", "step", "", 0, 50, 3))
    assert median_step(Timeline.collect([recorder, other], world_size=2)) == 4
    assert median_step(Timeline.collect([Recorder(0), other], world_size=2)) == 3
    assert median_step(timeline_of([(0, 1)], [])) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 7}, "step: nobody recorded step 7; recorded are 0-2"),
        ({"ranks": [0, 2, 5, 6]}, "ranks: 2, 5-6 have no spans; recorded are 0-1"),
        ({"ranks": []}, "ranks: an empty selection shows nothing; name one or more"),
    ],
)
def test_what_is_not_there_is_named(training, arguments, message):
    assert str(error_of(UsageError, breakdowns, training(2), **arguments)) == message


def test_an_empty_timeline_says_so():
    with pytest.raises(UsageError, match="the timeline has no spans"):
        breakdowns(Timeline(spans=[], world_size=1))


@given(traces())
def test_all_steps_at_once_have_the_times_of_each(timeline):
    marked = [Span(rank=0, kind="step", lane="step", name=f"step {at}", start_ns=9 * at, end_ns=9 * at + 9, step=at)
              for at in range(3)]  # fmt: skip
    timeline = timeline_of_spans(*timeline.spans, *marked)
    assert breakdowns_by_step(timeline) == {step: breakdowns(timeline, step=step) for step in range(3)}


def test_without_steps_the_whole_run_is_measured():
    timeline = timeline_of_spans(compute_span(0, 0, 5), compute_span(1, 2, 9))
    assert breakdowns_by_step(timeline) == {None: breakdowns(timeline)}
