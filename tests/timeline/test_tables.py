"""Tables on request: operations, and the critical path."""

import argparse
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from overlap.cli.timeline import add_arguments, main
from overlap.cli.timeline.tables import critical_path_table, operations_table
from overlap.explain.recorded import explain_timeline
from overlap.explain.spans import pieces_of_spans
from overlap.timeline import Span, breakdowns, write_trace
from overlap.timeline.measure.activity import Activity
from overlap.timeline.measure.critical_path import critical_path
from overlap.timeline.measure.operations import sum_operations_by_line
from overlap.timeline.measure.steps import rank_windows
from overlap.units import format_table
from tests.timeline.made import comm, compute, timeline_of, traces


def one_late():
    """Rank 1 computes 15 us longer; both computed 5 us before."""
    return timeline_of(
        compute(0, 0, 5_000), compute(1, 0, 5_000), compute(1, 5_000, 20_000, "tokenise", "train.py:31"),
        comm(0, 6_000, 22_000, 30_000, issued=5_500), comm(1, 22_000, 22_000, 31_000),
    )  # fmt: skip


def test_operations_are_added_up_by_place():
    (row,) = sum_operations_by_line(one_late())
    assert (row.op, row.call_site, row.algorithm, row.count, row.nbytes) == ("all_reduce", "train.py:9", "ring", 2, 16)
    assert (row.queued_ns, row.waiting_ns, row.transfer_ns, row.exposed_ns) == (500, 16_000, 17_000, 33_000)
    assert row.algbw_bytes_per_s == pytest.approx(16 / 17e-6)
    assert row.busbw_bytes_per_s == pytest.approx(16 / 17e-6 * 4 / 3)
    assert operations_table([row], ranks=2, width=80) == [
        "operation   called at   exposed/us  wait  calls  transfer  size  busGB/s  queued",
        "all_reduce  train.py:9        16.5   8.0      1       8.5   8 B  0.00125     0.2",
    ]
    assert operations_table([], ranks=2, width=80) == ["communication: none recorded"]


@given(traces())
def test_exposed_time_of_lines_adds_up_to_that_of_the_ranks(timeline):
    """Traces have up to four operations in flight together."""
    rows, ranks = sum_operations_by_line(timeline), breakdowns(timeline)
    assert sum(row.exposed_ns for row in rows) == sum(rank.exposed_ns for rank in ranks)
    assert sum(row.exposed_waiting_ns for row in rows) == sum(rank.waiting_ns for rank in ranks)


def test_operations_in_flight_together_share_exposed_time():
    """The oldest that moves bytes has it, or else the oldest that waits."""
    timeline = timeline_of(comm(0, 0, 6, 20, seq=0, site="a.py:1"), comm(0, 1, 4, 30, seq=1, site="b.py:1"))
    assert [(row.call_site, row.exposed_ns) for row in sum_operations_by_line(timeline)] == [
        ("a.py:1", 4 + 14),
        ("b.py:1", 2 + 10),
    ]
    (wire,) = [cause for cause in explain_timeline(timeline).causes if cause.cause == "wire"]
    assert wire.places == ("all_reduce at a.py:1 (14 ns)", "all_reduce at b.py:1 (12 ns)")


def test_an_operation_that_began_before_the_window_of_its_step_is_exposed_in_it():
    """The compute of a step runs in the next one, whose window begins later than its operation."""
    spans = []
    for step in range(2):
        at = 100 * step
        spans += [
            Span(rank=0, kind="step", lane="step", name="", start_ns=at, end_ns=at + 100, step=step),
            comm(0, at, at, at + 100, seq=step),
            replace(compute(0, at + 100, at + 110), step=step),
        ]
    timeline = timeline_of(*spans)
    (row,) = sum_operations_by_line(timeline, step=1)
    (rank,) = breakdowns(timeline, step=1)
    assert (row.count, row.exposed_ns, rank.exposed_ns) == (1, 90, 90)


def test_operations_belong_to_the_step_that_issued_them():
    """The operation of step 0 runs within step 1, and that of step 1 is over before its window begins."""
    steps = [
        Span(rank=rank, kind="step", lane="step", name="step", start_ns=start, end_ns=start + 10, step=step)
        for rank in range(2)
        for start, step in ((0, 1), (10, 0), (20, 1))
    ]
    work = [replace(compute(rank, 0, 25), step=0) for rank in range(2)]
    work += [replace(compute(rank, 25, 29), step=1) for rank in range(2)]
    issued = [
        replace(comm(rank, start, start + 2, start + 4, seq=seq, issued=called, nbytes=64 * seq), step=step)
        for rank in range(2)
        for seq, (step, called, start) in enumerate(((1, 1, 1), (0, 12, 26), (1, 20, 20)))
    ]
    timeline = timeline_of(*steps, *work, *issued)
    for step, nbytes in ((0, 64), (1, 128)):
        (one,) = sum_operations_by_line(timeline, step=step)
        assert (one.count, one.nbytes) == (2, 2 * nbytes)


def overlapping_steps():
    """Rank 1 computes for 30 in step 0; rank 0 waits for it within step 1, from 10 to 30."""
    blocks = ((0, 0, 0, 10), (1, 0, 0, 30), (0, 1, 10, 48), (1, 1, 30, 48))
    work = ((0, 0, 0, 10), (1, 0, 0, 30), (0, 1, 34, 44), (1, 1, 34, 44))
    issued = ((0, 0, 10, 30), (1, 0, 30, 30), (0, 1, 44, 44), (1, 1, 44, 44))
    return timeline_of(
        *(
            Span(rank=rank, kind="step", lane="step", name="step", start_ns=start, end_ns=end, step=step)
            for rank, step, start, end in blocks
        ),
        *(replace(compute(rank, start, end), step=step) for rank, step, start, end in work),
        *(
            replace(comm(rank, start, met, met + 4, seq=step, ranks=(0, 1)), step=step)
            for rank, step, start, met in issued
        ),
    )


def test_tables_of_steps_that_overlap_say_what_the_verdict_says():
    timeline = overlapping_steps()
    for step, waiting_ns in ((0, 0), (1, 20)):
        exposed_ns = sum(rank.exposed_ns for rank in breakdowns(timeline, step=step))
        pieces = pieces_of_spans(Activity(timeline, rank_windows(timeline, step=step)))
        assert pieces.cost_by_cause().get("waiting", 0) == waiting_ns
        (row,) = sum_operations_by_line(timeline, step=step)
        assert (row.count, row.exposed_ns, row.exposed_waiting_ns) == (2, exposed_ns, waiting_ns)


def test_the_critical_path_goes_through_the_late_rank():
    path = critical_path(one_late())
    assert [(link.rank, str(link), link.start_ns, link.end_ns) for link in path] == [
        (1, "compute 'work' at train.py:1", 0, 5_000),
        (1, "compute 'tokenise' at train.py:31", 5_000, 20_000),
        (1, "program", 20_000, 22_000),
        (1, "all_reduce at train.py:9", 22_000, 31_000),
    ]
    assert critical_path_table(path, width=80) == [
        "on the critical path               rank    us  share  times",
        "compute 'tokenise' at train.py:31     1  15.0    48%      1",
        "all_reduce at train.py:9              1   9.0    29%      1",
        "compute 'work' at train.py:1          1   5.0    16%      1",
        "program                               1   2.0     6%      1",
    ]
    assert critical_path_table(path, width=80, rows_at_most=2)[-1] == "and 2 more, 7.0 us"


@given(traces())
def test_the_links_of_a_critical_path_follow_each_other(timeline):
    path = critical_path(timeline)
    first_ns, last_ns = min(s.start_ns for s in timeline.spans), max(s.end_ns for s in timeline.spans)
    assert (path[0].start_ns, path[-1].end_ns) == (first_ns, last_ns)
    assert all(one.end_ns == other.start_ns for one, other in pairwise(path))
    assert all(link.duration_ns > 0 for link in path)


def test_narrow_tables_wrap_words_and_then_leave_figures_out():
    rows = [["a long name of something", "1", "22"]]
    assert format_table(["what", "n", "m"], rows, width=80, words=[0])[1] == "a long name of something  1  22"
    assert format_table(["what", "n", "m"], rows, width=24, words=[0])[1:] == ["a long name of     1  22", "something"]
    assert format_table(["what", "n", "m"], rows, width=18, words=[0])[1:] == ["a long name of  1", "something"]
    place = [("models/transformer/attention.py:41", "1", "22")]
    assert format_table(["what", "n", "m"], place, width=24, words=[0])[1:] == [
        "models/transforme  1  22", "r/attention.py:41",
    ]  # fmt: skip


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    late = tmp_path / "late.json"
    write_trace(one_late(), late)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert main(parser.parse_args([str(late), "--ops", "--critical-path"])) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.split("\n\n")] == ["operation", "on", "whole"]
    assert [line for line in shown.splitlines() if line != line.rstrip()] == []
