"""Columns say what the spans said, in the same order; what a look at a window finds is all that matters to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.timeline import Recorder, Timeline, breakdowns
from overlap.timeline.columnar import SpanColumns, SpanList
from overlap.timeline.recording import columns_from_spans

from .made import comm, compute, span_order, traces


@given(traces())
def test_columns_say_what_the_spans_said(timeline):
    columns = columns_from_spans(timeline.spans)
    assert list(columns.spans()) == timeline.spans
    halves = [columns.take(columns.rank == rank) for rank in (0, 1, 2)]
    assert sorted(SpanColumns.concatenate(halves).spans(), key=span_order) == timeline.spans


@given(traces(), st.randoms(use_true_random=False))
def test_columns_are_sorted_as_spans_are(timeline, shuffle):
    spans = [*timeline.spans, compute(2, 0, 1, "a"), compute(2, 0, 1, "b"), compute(10, 0, 1)]
    shuffle.shuffle(spans)
    found = Timeline.of_columns(columns_from_spans(spans), world_size=11)
    assert found.spans == sorted(spans, key=span_order)
    assert sum(len(found.for_rank(rank)) for rank in found.ranks()) == len(found.spans)


@pytest.mark.slow
@given(traces(), st.integers(0, 30))
def test_what_is_near_a_window_is_all_that_matters_inside(timeline, end):
    window = (end // 2, end)
    near = timeline.chosen(timeline.columns.spans_near(window))
    touching = [span for span in timeline.spans if span.start_ns <= end and span.end_ns >= end // 2]
    assert [span for span in touching if span not in near] == []
    touched = {span.info.seq for span in touching if span.info}
    assert [s for s in timeline.spans if s.info and s.info.seq in touched and s not in near] == []


def test_of_a_step_the_figures_are_the_same_whatever_else_was_recorded():
    recorder = Recorder(0)
    for step in range(50):
        begin = 100 * step
        recorder.append(("compute", "compute", "forward", begin, begin + 60, ("train.py:1", 0, begin, step)))
        recorder.append(("step", "step", "step", begin, begin + 90, step))
    timeline = Timeline.collect([recorder], world_size=1)
    (row,) = breakdowns(timeline, step=7)
    assert (row.wall_ns, row.compute_ns, row.idle_ns) == (90, 60, 30)
    assert isinstance(timeline.spans, SpanList)
    assert sum(span is not None for span in timeline.spans._span_objects) < 5, "others were made only to be left out"


def test_a_span_is_made_once():
    one = Timeline.of_columns(columns_from_spans([comm(0, 1, 2, 3), compute(0, 0, 9)]), world_size=1)
    (near,) = one.chosen(one.columns.spans_near((9, 12)))
    assert near is one.spans[0]
    assert one.spans[1:] == list(one.spans)[1:]
    assert one.spans[-1] is list(one.spans)[1]
