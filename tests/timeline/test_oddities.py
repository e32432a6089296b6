"""What cannot be true is told in one line, with what is shown all the same; of what can be, not a word."""

import json
from dataclasses import replace

import pytest

from overlap import UsageError
from overlap.cli import main
from overlap.explain.oddities import describe_oddities
from overlap.timeline import Span, Timeline, read_trace, write_trace

from .made import comm, compute, sentence, timeline_of

TWICE = (
    "1 span on a lane of computes begins before the one before has ended (first: 'work' of rank 0 on 'compute'), "
    "which counts once"
)


def issued(start, end):
    return replace(compute(0, start, end), issued_ns=0)


@pytest.mark.parametrize(
    ("spans", "told"),
    [
        ([issued(0, 5), issued(5, 9), compute(0, 3, 7), comm(0, 1, 2, 9), comm(0, 1, 2, 9, seq=1)], ""),
        ([issued(0, 5), issued(4, 9)], TWICE),
        (
            [comm(1, 5, 6, 9, issued=7)],
            "1 span begins before it was called (first: 'all_reduce' of rank 1): a clock went back; "
            "it is shown as not queued",
        ),
        ([compute(7, 0, 1)], "the file says 3 ranks, and has rank 7; all are shown"),
    ],
)
def test_what_cannot_be_true_is_told(spans, told):
    assert describe_oddities(timeline_of(*spans)) == told


def test_a_rank_that_did_nothing_in_the_step_is_idle():
    """The last rank marks no steps, and has recorded an operation before."""
    step = Span(rank=0, kind="step", lane="step", name="step 3", start_ns=10, end_ns=20, step=3)
    timeline = timeline_of(comm(2, 0, 0, 5), step, replace(compute(0, 10, 20), step=3))
    assert sentence(timeline, step=3) == "step 10 ns: compute 10"


def test_of_several_oddities_there_is_one_line():
    told = describe_oddities(timeline_of(issued(0, 5), issued(4, 9), issued(4, 9), compute(9, 0, 1)))
    assert told.startswith("2 spans on a lane of computes begin before ")
    assert told.endswith("; the file says 3 ranks, and has rank 9; all are shown")


@pytest.fixture
def backwards(tmp_path):
    """A file in which one of two spans ends before it starts."""
    path = tmp_path / "t.json"
    write_trace(Timeline(spans=[compute(0, 0, 5), compute(0, 5, 9, "later")], world_size=0), path)
    document = json.loads(path.read_text())
    (span,) = (event for event in document if event["name"] == "later")
    span["args"]["end_ns"] = 3
    path.write_text(json.dumps(document))
    return path


def test_what_ends_before_it_starts_is_left_out(backwards, capsys):
    assert [span.name for span in read_trace(backwards).spans] == ["work"]
    assert main(["timeline", str(backwards)]) == 0
    shown = capsys.readouterr()
    assert shown.err == (
        "overlap: 1 span ends before it starts ('later' of rank 0): shown is the rest; "
        "the file says 0 ranks, and has rank 0; all are shown\n"
    )
    assert "of 0 ranks" in shown.out


def test_where_nothing_is_left_it_is_no_trace(backwards):
    document = json.loads(backwards.read_text())
    backwards.write_text(json.dumps([event for event in document if event["name"] != "work"]))
    with pytest.raises(
        UsageError, match=r"damaged trace file: all of its spans end before they start; record it again$"
    ):
        read_trace(backwards)
