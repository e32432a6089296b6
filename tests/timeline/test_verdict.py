"""The verdict: one sentence, whose figures add up."""

from dataclasses import replace

import pytest

from overlap.timeline import Recorder, Span, Timeline, breakdowns
from overlap.timeline.measure.critical_path import critical_path
from overlap.timeline.measure.operations import operations
from overlap.timeline.measure.verdict import verdict_of
from tests.timeline.made import render_text

from .made import comm, compute, timeline_of


def recorded(*lanes):
    """Each lane is (kind, [(start_us, end_us), ...]) of rank 0."""
    recorder = Recorder(0)
    for kind, spans in lanes:
        for start, end in spans:
            recorder.append((kind, kind, "x", start * 1000, end * 1000, None))
    return Timeline.collect([recorder], world_size=1)


def test_operations_that_ran_before_the_computes_of_their_step_are_told():
    """The program runs ahead: it issues step 1 while the computes of step 0 run."""
    spans = [
        replace(compute(0, 0, 50), step=0), replace(compute(0, 50, 80), step=1),
        replace(comm(0, 11, 11, 20, ranks=(0,)), step=1),
        *(Span(rank=0, kind="step", lane="step", name="s", start_ns=s, end_ns=s + 10, step=s // 10) for s in (0, 10)),
    ]  # fmt: skip
    told = verdict_of(timeline_of(*spans), step=1).text()
    assert told == "step 30 ns: compute 30, idle 0; communication: what was issued in it ran before"


@pytest.mark.parametrize(
    ("compute", "comm", "said"),
    [
        ([(0, 50)], [], "whole run 50.0 us: compute 50.0, idle 0.0; communication: none recorded"),
        ([(0, 50)], [(10, 40)], "whole run 50.0 us: compute 50.0, exposed 0.0 (0%); hidden 100% of 100% possible"),
        (
            [(0, 50)],
            [(30, 100)],
            "whole run 100.0 us: compute 50.0, exposed 50.0 (50%): 50.0 on the wire (x); hidden 29% of 71% possible",
        ),
        (
            [(0, 50)],
            [(70, 100)],
            "whole run 100.0 us: compute 50.0, exposed 30.0 (30%): 30.0 on the wire (x); idle 20.0; "
            "hidden 0% of 100% possible",
        ),
    ],
)
def test_what_is_said(compute, comm, said):
    assert str(verdict_of(recorded(("compute", compute), ("comm", comm)))) == said


def test_who_was_waited_for_and_what_was_on_the_wire(training):
    verdict = verdict_of(training(3, late_ns=3_000_000), step=1)
    assert str(verdict) == (
        "step 11.6 ms: compute 7.6, exposed 4.0 (34%): 0.2 waiting for rank 2 (compute 'forward'), 3.8 on the wire "
        "(mostly all_reduce 0 at train.py:41); hidden 49% of 81% possible"
    )
    assert verdict.exposed_ns == verdict.waiting_ns + verdict.wire_ns
    assert verdict.exposed_ns == sum(cause.duration_ns for cause in verdict.causes)
    assert [(rank, str(cause)) for rank, cause, _ in verdict.blamed()] == [(2, "compute 'forward'")]


def test_hidden_is_what_it_is_in_the_table(training):
    timeline = training(3, late_ns=3_000_000)
    for row in breakdowns(timeline, step=1):
        said = str(verdict_of(timeline, step=1, ranks=[row.rank]))
        [line] = render_text(timeline, step=1, ranks=[row.rank], width=120).split("rank/ms")[1].splitlines()[1:2]
        assert f"hidden {row.overlap_ratio:.0%} of " in said
        assert f"{row.overlap_ratio:.0%}" in line.split()


def test_it_is_one_line_whatever_names_there_are():
    late = compute(1, 0, 30, "a\n\x1b[31mb")
    told = str(
        verdict_of(
            timeline_of(
                compute(0, 0, 10),
                late,
                *(comm(rank, start, 30, 50, ranks=(0, 1)) for rank, start in enumerate((10, 30))),
            )
        )
    )
    assert r"compute 'a\n\x1b[31mb'" in told
    assert told.isprintable()


def test_times_far_below_the_unit_keep_a_digit():
    said = str(verdict_of(recorded(("compute", [(0, 100_000)]), ("comm", [(100_000, 100_002)]))))
    assert "exposed 0.002 (0%): 0.002 on the wire" in said


@pytest.mark.parametrize(("late_ns", "told"), [(1, False), (400, True)])
def test_waiting_that_is_nothing_is_not_told(late_ns, told):
    at = 10_000 + late_ns
    timeline = timeline_of(
        compute(0, 0, 10_000), compute(1, 0, at), comm(0, 10_000, at, 20_000, ranks=(0, 1)),
        comm(1, at, at, 20_000, ranks=(0, 1)),
    )  # fmt: skip
    said = str(verdict_of(timeline))
    assert ("waiting for rank 1" in said) is told
    assert " on the wire (all_reduce" in said


def test_queued_is_not_idle_and_the_largest_loss_is_named():
    """Idle is 3 % of the time, and yet the most that is lost."""
    queued = comm(0, 96, 97, 99, issued=90)
    assert str(verdict_of(timeline_of(compute(0, 0, 90), queued))) == (
        "whole run 99 ns: compute 90, exposed 3 (3%): 1 waiting for a rank that is not recorded, "
        "2 on the wire (all_reduce at train.py:9); queued 6 (all_reduce at train.py:9); hidden 0% of 100% possible"
    )


def test_the_line_whose_operations_queue_is_named():
    """Computes hide a part of the queue of line 5, and line 7 is queued for less."""
    first = comm(0, 60, 60, 62, issued=10, site="train.py:5")
    other = comm(0, 62, 62, 64, issued=56, site="train.py:7", op="broadcast")
    said = str(verdict_of(timeline_of(compute(0, 0, 50), first, other)))
    assert "; queued 10 (mostly all_reduce at train.py:5); " in said


def test_the_slowest_rank_stands_apart_from_the_means():
    steps = [
        Span(rank=rank, kind="step", lane="step", name="step 0", start_ns=0, end_ns=end, step=0)
        for rank, end in enumerate((100, 60))
    ]
    timeline = timeline_of(*steps, compute(0, 0, 100), compute(1, 0, 60))
    said = str(verdict_of(timeline, step=0))
    assert said.startswith("step 100 ns on the longest of 2 ranks; 80 on average: compute 80, idle 0")


def test_a_rank_that_marks_no_steps_is_drawn_and_has_no_part_in_the_figures():
    steps = [
        Span(rank=rank, kind="step", lane="step", name="step 0", start_ns=start, end_ns=start + 30, step=0)
        for rank, start in ((1, 0), (2, 60))
    ]
    work = compute(1, 0, 20), compute(2, 60, 90)
    server = compute(0, 0, 9), comm(0, 10, 20, 30, ranks=(0, 1)), comm(1, 20, 20, 30, ranks=(0, 1), site="train.py:7")
    timeline = timeline_of(*steps, *work, *server)
    assert str(verdict_of(timeline, step=0)) == (
        "step 30 ns: compute 25, exposed 5 (17%): 5 on the wire (all_reduce at train.py:7); hidden 0% of 100% possible"
    )
    assert [(one.call_site, one.exposed_ns) for one in operations(timeline, step=0)] == [("train.py:7", 10)]
    assert sum(link.duration_ns for link in critical_path(timeline, step=0)) == 30
    drawn = render_text(timeline, step=0, all=True, width=100).splitlines()
    assert drawn[0] == "step 0: 3 of 3 ranks; rank 0 marks no steps and is not counted"
    assert [line.split()[:2] for line in drawn if line.startswith((" " * 6, "rank/ns"))][-4:] == [
        ["rank/ns", "wall"], ["0", "90"], ["1", "30"], ["2", "30"],
    ]  # fmt: skip
    assert str(verdict_of(timeline, step=0, ranks=[0])).startswith("step 90 ns: compute 9, ")


def test_many_small_calls_are_told():
    calls = [comm(0, 10 * at, 10 * at, 10 * at + 9, seq=at, nbytes=16384) for at in range(50)]
    assert "; 50 calls of 16 KiB (all_reduce at train.py:9)" in str(verdict_of(timeline_of(*calls)))
    few = timeline_of(*calls[:49])
    assert "calls of" not in str(verdict_of(few))


def test_many_small_buckets_are_told_although_each_has_a_name_of_its_own_and_they_only_queue():
    calls = [comm(0, 1000 + at, 1000 + at, 1001 + at, seq=at, nbytes=1024, issued=0) for at in range(50)]
    told = str(verdict_of(timeline_of(*(replace(call, name=f"bucket {at}") for at, call in enumerate(calls)))))
    assert "; 50 calls of 1 KiB (all_reduce at train.py:9)" in told
