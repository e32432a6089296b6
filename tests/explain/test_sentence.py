"""The sentence on a timeline, whose figures add up."""

import re
from dataclasses import replace

import pytest

import overlap
from overlap.explain.recorded import explain_timeline
from overlap.timeline import Recorder, Span, Timeline, breakdowns
from overlap.timeline.measure.critical_path import critical_path
from overlap.timeline.measure.operations import sum_operations_by_line
from tests.timeline.made import comm, compute, render_text, sentence, timeline_of


def recorded(*lanes):
    """Each lane is (kind, [(start_us, end_us), ...]) of rank 0."""
    recorder = Recorder(0)
    for kind, spans in lanes:
        for start, end in spans:
            recorder.append((kind, kind, "x", start * 1000, end * 1000, None))
    return Timeline.collect([recorder], world_size=1)


@pytest.mark.parametrize(
    ("compute", "comm", "said"),
    [
        ([(0, 50)], [], "whole run 50.0 us: compute 50.0"),
        ([(0, 50)], [(10, 40)], "whole run 50.0 us: compute 50.0, exposed 0.0 (0%)"),
        ([(0, 50)], [(30, 100)], "whole run 100.0 us: compute 50.0, exposed 50.0 (50%): 50.0 on the wire (x)"),
        (
            [(0, 50)],
            [(70, 100)],
            "whole run 100.0 us: compute 50.0, exposed 30.0 (30%): 30.0 on the wire (x); 20.0 (20%) idle",
        ),
        ([], [(0, 50)], "whole run 50.0 us: compute not recorded, exposed 50.0 (100%): 50.0 on the wire (x)"),
    ],
)
def test_what_is_said(compute, comm, said):
    assert sentence(recorded(("compute", compute), ("comm", comm))) == said


def test_who_was_waited_for_and_what_was_on_the_wire(training):
    timeline = training(3, late_ns=3_000_000)
    assert sentence(timeline, step=1) == (
        "step 11.6 ms: compute 7.6, exposed 4.0 (34%): 3.8 on the wire (mostly all_reduce 0 at train.py:41), 0.2 in "
        "parts below 1/20 of the step; try: issue it earlier, in smaller parts, or send fewer bytes: no later compute "
        "could hide it, -300 us if the rest stays, at most -2 ms"
    )
    assert ": 1.0 waiting for rank 1 (compute 'b' at train.py:1), 4.0 on the wire (all_reduce at train.py:9)" in (
        sentence(timeline_of(compute(0, 0, 8000), compute(1, 0, 10_000, "b"), *pair(8000, 10_000, 14_000)))
    )


@pytest.mark.parametrize("late_ns", [0, 400_000, 1_000_000, 3_000_000])
def test_the_parts_of_exposed_communication_add_up(training, late_ns):
    said = sentence(training(3, late_ns=late_ns), step=1)
    exposed, parts = re.search(r"exposed ([\d.]+) \(\d+%\): (.*); try: ", said).groups()
    figures = [float(each) for each in re.findall(r"(?:^|, )([\d.]+) (?:waiting|on the wire|in parts)", parts)]
    assert sum(figures) == pytest.approx(float(exposed), abs=0.051 * (1 + len(figures)))


def pair(*times, **how):
    first, met, end = times
    return [comm(rank, start, met, end, ranks=(0, 1), **how) for rank, start in enumerate((first, met))]


def test_hidden_is_in_the_table(training):
    timeline = training(3, late_ns=3_000_000)
    for row in breakdowns(timeline, step=1):
        [line] = render_text(timeline, step=1, ranks=[row.rank], width=120).split("rank/ms")[1].splitlines()[1:2]
        assert f"{row.overlap_ratio:.0%}" in line.split()


def test_it_is_one_line_whatever_names_there_are():
    said = sentence(timeline_of(compute(0, 0, 10), compute(1, 0, 30, "a\n\x1b[31mb"), *pair(10, 30, 50)))
    assert r"compute 'a\n\x1b[31mb'" in said
    assert said.isprintable()


def test_times_far_below_the_unit_keep_a_digit():
    said = sentence(recorded(("compute", [(0, 100_000)]), ("comm", [(100_000, 100_002)])))
    assert said == "whole run 100.0 ms: compute 100.0, exposed 0.002 (0%)"


@pytest.mark.parametrize(("late_ns", "told"), [(1000, False), (3000, True)])
def test_a_loss_below_a_twentieth_is_not_named(late_ns, told):
    at = 10_000 + late_ns
    said = sentence(timeline_of(compute(0, 0, 10_000), compute(1, 0, at), *pair(10_000, at, 20_000)))
    assert ("waiting for rank 1" in said) is told
    assert " on the wire (all_reduce" in said


def test_queued_is_not_idle():
    queued = comm(0, 96, 97, 99, issued=80)
    assert sentence(timeline_of(compute(0, 0, 80), queued)) == (
        "whole run 99 ns: compute 80, exposed 3 (3%); 16 (16%) queued (all_reduce at train.py:9)"
    )


def test_the_line_whose_operations_queue_is_named():
    """Computes hide a part of the queue of line 5; line 7 is queued behind it, and then alone."""
    first = comm(0, 60, 60, 62, issued=10, site="train.py:5")
    other = comm(0, 66, 66, 68, issued=56, site="train.py:7", op="broadcast")
    said = sentence(timeline_of(compute(0, 0, 50), first, other))
    assert "; 14 (21%) queued (mostly all_reduce at train.py:5)" in said


def test_the_slowest_rank_stands_apart_from_the_means():
    steps = [
        Span(rank=rank, kind="step", lane="step", name="step 0", start_ns=0, end_ns=end, step=0)
        for rank, end in enumerate((100, 60))
    ]
    timeline = timeline_of(*steps, compute(0, 0, 100), compute(1, 0, 60))
    assert sentence(timeline, step=0) == "step 100 ns on the longest of 2 ranks; 80 on average: compute 80"


def test_a_rank_that_marks_no_steps_is_drawn_and_has_no_part_in_the_figures():
    steps = [
        Span(rank=rank, kind="step", lane="step", name="step 0", start_ns=start, end_ns=start + 30, step=0)
        for rank, start in ((1, 0), (2, 60))
    ]
    work = compute(1, 0, 20), compute(2, 60, 90)
    server = compute(0, 0, 9), comm(0, 10, 20, 30, ranks=(0, 1)), comm(1, 20, 20, 30, ranks=(0, 1), site="train.py:7")
    timeline = timeline_of(*steps, *work, *server)
    assert sentence(timeline, step=0).startswith(
        "step 30 ns: compute 25, exposed 5 (17%): 5 on the wire (all_reduce at train.py:7)"
    )
    assert [(one.call_site, one.exposed_ns) for one in sum_operations_by_line(timeline, step=0)] == [("train.py:7", 10)]
    assert sum(link.duration_ns for link in critical_path(timeline, step=0)) == 30
    drawn = render_text(timeline, step=0, all=True, width=100).splitlines()
    assert drawn[0] == "step 0: 3 of 3 ranks; rank 0 marks no steps and is not counted"
    assert [line.split()[:2] for line in drawn if line.startswith((" " * 6, "rank/ns"))][-4:] == [
        ["rank/ns", "wall"], ["0", "90"], ["1", "30"], ["2", "30"],
    ]  # fmt: skip
    assert sentence(timeline, step=0, ranks=[0]).startswith("step 90 ns: compute 9, ")


def in_a_step(*spans):
    end_ns = max(span.end_ns for span in spans)
    step = Span(rank=0, kind="step", lane="step", name="step 0", start_ns=0, end_ns=end_ns, step=0)
    return overlap.why(timeline_of(step, *(replace(span, step=0) for span in spans)))


def test_many_small_calls_are_joined():
    calls = [comm(0, 10 * at, 10 * at, 10 * at + 9, seq=at, nbytes=16384) for at in range(50)]
    (item,) = in_a_step(*calls).advice
    assert "; 50 calls of 16 KiB (all_reduce at train.py:9)" in item.evidence
    assert item.change.startswith("join arrays before the call")
    (few,) = in_a_step(*calls[:49]).advice
    assert "calls of" not in few.evidence
    assert few.change.startswith("issue first")


def test_many_small_buckets_are_joined_although_each_has_a_name_of_its_own_and_they_only_queue():
    calls = [comm(0, 1000 + at, 1000 + at, 1001 + at, seq=at, nbytes=1024, issued=0) for at in range(50)]
    item = in_a_step(*(replace(call, name=f"bucket {at}") for at, call in enumerate(calls))).advice[0]
    assert "; 50 calls of 1 KiB (all_reduce at train.py:9)" in item.evidence


def test_a_program_of_torch_learns_what_records_its_computes():
    timeline = recorded(("comm", [(0, 50)]))
    assert explain_timeline(timeline).undecided == ("what was hidden, as no compute is recorded",)
    timeline.meta["torch"] = "yes"
    assert (
        explain_timeline(timeline)
        .undecided[0]
        .endswith("overlap.torch.record(model, optimizer) records that of modules")
    )
    assert ": compute not recorded (overlap.torch.record(model) does that), exposed 50.0" in sentence(timeline)
