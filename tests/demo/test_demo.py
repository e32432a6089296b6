"""The demo."""

import argparse
import hashlib
import io
import math
import re
from dataclasses import replace
from functools import partial
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from overlap import UsageError
from overlap.cli import demo
from overlap.cli.demo import training
from overlap.cli.demo.model import Block, Classifier
from overlap.cli.demo.report import (
    MedianSteps,
    StepTimes,
    draw_median_steps,
    introduction_text,
    make_step_printer,
    median_steps,
    step_times,
    summary_text,
    verdict_text,
)
from overlap.cli.demo.training import DemoComparison, Task, compare_trainings, measure_fitting_bandwidth
from overlap.data import Digits, digits
from overlap.timeline import CollectiveInfo, Recorder, Span, Timeline, TimelineView, breakdowns, read_trace

# -- demo --------------------------------------------------------------------------------------------------------------

STEP = {"forward": 3, "loss": 1, "backward": 3, "update": 3}
SMALL = ((9, 4), (4, 2), (128, 10))


@pytest.fixture
def command(capsys, monkeypatch):
    """Return a function that runs `overlap demo ...` with a tiny model and returns its code and what it printed."""
    monkeypatch.setattr(demo, "Task", partial(Task, widths=SMALL))
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    parser = argparse.ArgumentParser(prog="overlap")
    demo.add_arguments(parser)

    def run(*argv):
        code = demo.main(parser.parse_args(argv))
        return code, capsys.readouterr().out

    return run


def task(ranks, *, steps, bandwidth_bytes_per_s=1e9):
    return Task(ranks=ranks, steps=steps, bandwidth_bytes_per_s=bandwidth_bytes_per_s, widths=SMALL)


def compared(ranks, **more):
    return compare_trainings(task(ranks, **more), lambda loss: None)


def test_gradients_are_the_slopes_of_the_loss():
    random = np.random.default_rng(1)
    for last in (False, True):
        block = Block((9, 6, 4), last=last)
        weights, x = block.initial_weights(random).astype(np.float64), random.standard_normal((5, 9))
        weights += random.standard_normal(weights.shape) / 10  # biases too
        toward = random.standard_normal((5, 4))
        dx, gradient = block.backward(weights, block.forward(weights, x)[1], toward)
        for point, slopes, at in ((weights, gradient, 7), (weights, gradient, len(weights) - 1), (x, dx, 3)):
            for index in (at, at + 20) if at + 20 < point.size else (at,):
                before, step = point.flat[index], 1e-6
                ends = []
                for moved in (before + step, before - step):
                    point.flat[index] = moved
                    ends.append(float((block.forward(weights, x)[0] * toward).sum()))
                point.flat[index] = before
                assert slopes.flat[index] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6)
        assert np.count_nonzero(gradient) > len(gradient) // 2


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_report(command, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, which is dumb
    code, shown = command("--ranks", "3", "--steps", "4")
    assert code == 0
    assert shown.isascii()
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert shown.startswith("3 ranks learn 1438 images of handwritten digits with 1,340 weights. Links: ")
    assert re.findall(r"^step (\d) of 8, loss \d\.\d{3}$", shown, re.M) == ["2", "4", "6", "8"]
    assert re.search(r"^step \(median of 3\) +[\d.]+ \w+ +[\d.]+ \w+$", shown, re.M)
    assert re.search(
        r"^speed-up [^\n]+\nwith overlap, step [\d.]+ \ws"
        r"(\son\sthe\slongest\sof\s3\sranks;\s[\d.]+\son\saverage)?:",
        shown,
        re.M,
    )
    assert re.search(r"\nwith overlap, step [^\n]+(\n[^\n]+)*\n\Z", shown)
    assert len(shown.partition("\nwithout overlap")[2].splitlines()) < 24
    assert re.search(r"^speed-up +\d+\.\d\dx; test accuracy \d+\.\d% of 359 images$", shown, re.M)
    assert re.search(r"^without overlap, step [123]: 3 ranks; most waited for first, alike in one row$", shown, re.M)
    assert re.search(r"^with overlap, step [567]: 3 ranks; most waited for first, alike in one row$", shown, re.M)
    assert 2 <= len(re.findall(r"^ *(?:\d like )?\d compute +\|", shown, re.M)) <= 4
    assert "~ waiting for a rank" in shown


def test_the_proof_of_identical_weights(command):
    _, shown = command("--ranks", "2", "--steps", "3")
    assert re.search(r"^identical weights  yes, bit by bit on all 2 ranks; SHA-256 [0-9a-f]{16}$", shown, re.M)


def test_a_difference_fails_the_command(command, monkeypatch):
    monkeypatch.setattr(Classifier, "digest", lambda model: f"{id(model):064x}")
    code, shown = command("--ranks", "2", "--steps", "1")
    assert code == 1
    assert "identical weights  NO; SHA-256 of all weights:" in shown
    digests = re.findall(r"^  rank (\d) +([0-9a-f]{16})    ([0-9a-f]{16})$", shown, re.M)
    assert [rank for rank, *_ in digests] == ["0", "1"]


def test_a_drawing_with_blocks_and_no_colour_in_a_pipe(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, shown = command("--ranks", "2", "--steps", "1")
    assert "█ compute" in shown
    assert "\x1b" not in shown
    assert max(len(line) for line in shown.splitlines()) == 100


def test_the_trace_file_holds_both_trainings(command, tmp_path):
    path = tmp_path / "demo.trace.json"
    _, shown = command("--ranks", "2", "--steps", "2", "--trace", str(path))
    assert f"wrote {path}" in shown
    timeline = read_trace(path)
    assert (timeline.world_size, timeline.steps()) == (2, [0, 1, 2, 3])
    assert timeline.meta == {"script": "overlap demo"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "1"], "--ranks: expected 2 to 64, got 1"),
        (["--ranks", "65"], "--ranks: expected 2 to 64, got 65"),
        (["--steps", "0"], "--steps: expected 1 or more, got 0"),
        (["--trace", "no/such/place.json"], "--trace: there is no folder "),
    ],
)
def test_options_that_cannot_be_meant(command, argv, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        command(*argv)


# -- the two trainings -------------------------------------------------------------------------------------------------


def test_all_ranks_and_both_loops_end_with_the_same_weights():
    found = compared(4, steps=3)
    assert len(found.digests) == 4
    assert len({digest for pair in found.digests for digest in pair}) == 1
    assert found.identical


def test_the_outcome_names_each_ranks_weights_and_the_right_answers(monkeypatch):
    """Models that are never trained, whose weights tell rank and turn; the one with overlap knows all but three."""

    class Model:
        def __init__(self, rank, turn):
            self.rank, self.turn = rank, turn

        def digest(self):
            return f"{self.rank}{self.turn}" * 32

        def logits(self, images):
            scores = np.zeros((359, 10))
            scores[np.arange(359), (labels + (np.arange(359) < 3)) % 10] = 1
            return scores if self.turn else None

    async def train(rank, *_):
        return Model(rank.rank, 0), Model(rank.rank, 1)

    labels = digits().split()[1].labels
    monkeypatch.setattr(training, "train", train)
    found = compared(3, steps=1)
    assert found.digests == [(f"{rank}0" * 32, f"{rank}1" * 32) for rank in range(3)]
    assert (found.right, found.tests, found.identical) == (356, 359, False)


def test_every_step_computes_and_communicates_the_same():
    timeline = compared(2, steps=2).timeline
    for step in timeline.steps():
        for rank in range(2):
            names = names_in(timeline, rank, step)
            assert {name: names[name] for name in ("forward", "loss", "backward", "update")} == STEP
            assert [names[f"bucket {place}"] for place in range(3)] == [1, 1, 1]


def test_only_the_overlapped_loop_communicates_before_its_backward_pass_ends():
    timeline = compared(2, steps=2).timeline
    for step, order in ((0, "computes first"), (1, "computes first"), (2, "issues early"), (3, "issues early")):
        spans = within(timeline, 0, step)
        last_backward = max(span.start_ns for span in spans if span.name == "backward")
        first_issue = min(span.info.issued_ns for span in spans if span.name.startswith("bucket"))
        assert ("computes first" if first_issue > last_backward else "issues early") == order


def test_the_fitted_bandwidth_makes_communication_a_part_of_compute(monkeypatch):
    asked = []
    probe = compared(4, steps=2, bandwidth_bytes_per_s=math.inf)
    monkeypatch.setattr(training, "compare_trainings", lambda task, make_step_printer: asked.append(task) or probe)
    compute_ns = [max(row.compute_ns for row in breakdowns(probe.timeline, step=step)) for step in range(4)]
    nbytes = 4 * 1340
    expected = 4 * nbytes / (training.COMM_PER_COMPUTE * min(compute_ns) / 1e9)  # up the tree of four ranks, and down
    assert measure_fitting_bandwidth(task(4, steps=9)) == float(f"{expected:.2g}")
    assert asked == [task(4, steps=2, bandwidth_bytes_per_s=math.inf)]


def within(timeline, rank, step):
    start_ns, end_ns = next((s.start_ns, s.end_ns) for s in timeline.for_rank(rank) if s.step == step)
    return [s for s in timeline.for_rank(rank) if s.kind != "step" and start_ns <= s.start_ns < end_ns]


def names_in(timeline, rank, step):
    names = [span.name for span in within(timeline, rank, step)]
    return {name: names.count(name) for name in names}


# -- the figures -------------------------------------------------------------------------------------------------------


def test_figures_of_one_step_do_without_a_warm_up():
    found = median_steps(compared(2, steps=1))
    assert (found.counted, found.without.index, found.overlapped.index) == (1, 0, 1)


def test_the_median_step_is_measured_by_its_longest_rank():
    recorders = [Recorder(0), Recorder(1)]
    for step, (first_ns, second_ns) in enumerate([(10, 90), (70, 60), (50, 40), (20, 30)]):
        start_ns = 1000 * step
        for recorder, wall_ns in zip(recorders, (first_ns, second_ns), strict=True):
            recorder.append(("step", "step", "step", start_ns, start_ns + wall_ns, step))
            recorder.append(("compute", "compute", "work", start_ns, start_ns + 10, None))
            recorder.append(("comm", "comm", "all_reduce", start_ns + 5, start_ns + 20, None))
    timeline = Timeline.collect(recorders, world_size=2)
    assert step_times(timeline, [2]) == [StepTimes(index=2, wall_ns=50, comm_ns=15, overlapped_ns=5)]
    assert median_steps(replace(comparison(), timeline=timeline, steps=2)).without.index == 1
    # Those with overlap are steps 2 and 3, of which the first warms up.
    assert median_steps(replace(comparison(), timeline=timeline, steps=2)).overlapped.wall_ns == 30


@pytest.mark.parametrize(("walls_ns", "chosen"), [([70, 90, 50, 30], 2), ([90, 30, 70], 1), ([90, 50, 40, 60], 1)])
def test_of_an_even_number_of_steps_the_shorter_middle_one_is_shown(walls_ns, chosen):
    """The first one warms up: of three the median is left, of two the shorter."""
    recorder = Recorder(0)
    for step, wall_ns in enumerate(walls_ns * 2):
        recorder.append(("step", "step", "step", 1000 * step, 1000 * step + wall_ns, step))
    timeline = Timeline.collect([recorder], world_size=1)
    found = median_steps(replace(comparison(), timeline=timeline, steps=len(walls_ns)))
    assert (found.without.index, found.overlapped.index) == (chosen, chosen + len(walls_ns))


def comparison(**changes):
    values = {"digests": [("ab" * 32, "ab" * 32)] * 2, "right": 350, "tests": 359, "steps": 6}
    return DemoComparison(**{**values, "timeline": Timeline.collect([], world_size=2), **changes})


MEDIANS = MedianSteps(
    without=StepTimes(index=3, wall_ns=100_000_000, comm_ns=40_000_000, overlapped_ns=0),
    overlapped=StepTimes(index=9, wall_ns=65_000_000, comm_ns=40_000_000, overlapped_ns=36_000_000),
    counted=5,
)

SUMMARY = """\
                             without overlap    with overlap
step (median of 5)                    100 ms           65 ms
communication                          40 ms           40 ms
  hidden under compute                  0 ns           36 ms
identical weights  yes, bit by bit on all 2 ranks; SHA-256 abababababababab
speed-up           1.54x; test accuracy 97.5% of 359 images"""


def test_the_summary():
    assert summary_text(comparison(), MEDIANS) == SUMMARY


def span(kind, rank, start_ns, end_ns, **more):
    return Span(rank=rank, kind=kind, lane=kind, name=kind, start_ns=start_ns, end_ns=end_ns, **more)


def spans_of(step, rank, *, overlapped):
    """Of eight ranks the sixth computes twice as long; with overlap most bytes move under its compute."""
    begin_ns, late = 1_000_000 * step, 5
    moved_ns = begin_ns + 400_000
    met_ns = begin_ns + 250_000 if overlapped else moved_ns
    start_ns = met_ns if overlapped or rank == late else begin_ns + 200_000
    end_ns = moved_ns + (20_000 if overlapped else 100_000)
    what = {"op": "all_reduce", "algorithm": "ring", "group": "world", "seq": step, "nbytes": 8, "dtype": "float32"}
    times = {"issued_ns": start_ns, "met_ns": met_ns, "start_ns": start_ns, "end_ns": end_ns}
    info = CollectiveInfo(**what, **times, priority=0, call_site="train.py:9", ranks=tuple(range(8)))
    yield span("step", rank, begin_ns, end_ns, step=step)
    yield span("compute", rank, begin_ns, moved_ns if rank == late else begin_ns + 200_000, call_site="train.py:1")
    yield span("comm", rank, start_ns, end_ns, info=info)


DRAWN = """\
without overlap, step 0: 8 ranks; most waited for first, alike in one row
       5 compute |#################################################............|
         comm    |.................................................!!!!!!!!!!!!|
7 like 3 compute |########################.....................................|
         comm    |........................~~~~ waits for rank 5 ~~~!!!!!!!!!!!!|
with overlap, step 1: 8 ranks; most waited for first, alike in one row
7 like 3 compute |########################.....................................|
         comm    |...............................!!!!!!!!!!!!!!!!!!!!..........|
       5 compute |#################################################............|
         comm    |...............................==================!!..........|
                  |0 us       |100 us     |200 us     |300 us     |400 us
# compute  = hidden comm  ~ waiting for a rank  ! on the wire  . idle"""

JUDGED = """\
with overlap, step 420.0 us: compute 225.0, exposed 151.2 (36%): 151.2 on the
wire (comm at train.py:9); 43.8 (10%) idle"""


def test_both_pictures_fold_ranks_and_begin_with_the_one_that_is_waited_for():
    spans = [one for step in range(2) for rank in range(8) for one in spans_of(step, rank, overlapped=step == 1)]
    found = replace(comparison(), timeline=Timeline(spans=spans, world_size=8), steps=1)
    of = median_steps(found)
    shown = [line.plain for line in draw_median_steps(found, of, width=80, ascii=True, color=False)]
    assert "\n".join(shown) == DRAWN
    assert verdict_text(TimelineView(found.timeline, step=of.overlapped.index), width=80) == JUDGED


def test_one_other_bit_on_one_rank_shows():
    other = comparison(digests=[("ab" * 32, "ab" * 32), ("ab" * 32, "ab" * 31 + "ac")])
    assert not other.identical
    assert "identical weights  NO;" in summary_text(other, MEDIANS)


def test_the_introduction_says_why_the_links_are_so_fast():
    asked = task(2, steps=3, bandwidth_bytes_per_s=4.2e7)
    said = introduction_text(asked, images=32, width=80)
    part = training.COMM_PER_COMPUTE
    assert " ".join(said.split()) == (
        "2 ranks learn 32 images of handwritten digits with 1,340 weights. Links: 42 MB/s each way between any two "
        f"ranks (chosen to make communication take {part} of compute here). All-reduce: binomial, mean, float32. Two "
        "equal models take turns for 3 steps each: the first communicates after its backward pass, the second under it."
    )


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress_gets_four_lines():
    out = Console(file=io.StringIO(), width=80, color_system=None)
    advance = make_step_printer(out, steps=8)
    for step in range(8):
        advance(step / 2)
    lines = ["step 2 of 8, loss 0.500", "step 4 of 8, loss 1.500", "step 6 of 8, loss 2.500", "step 8 of 8, loss 3.500"]
    assert out.file.getvalue().splitlines() == lines


# -- the verdict -------------------------------------------------------------------------------------------------------

MS = 10**6
HERE = "/home/somebody/.venv/lib/python3.11/site-packages/overlap/cli/demo/training.py"


def test_a_verdict_names_no_folder():
    told = verdict_text(
        SimpleNamespace(sentence=f"step 9.0 ms: compute 8.0, exposed 1.0 (11%) (x at {HERE}:145)"), width=80
    )
    assert told == ("with overlap, step 9.0 ms: compute 8.0, exposed 1.0 (11%) (x at training.py:145)")


# -- data --------------------------------------------------------------------------------------------------------------

CHECKSUM = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
PER_DIGIT = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as the UCI repository states for its test set
SPLIT = [3, 3, 8, 8, 7, 2, 2, 4, 4, 2, 7, 9, 3, 6, 2, 1, 7, 1, 8, 0]
PER_DIGIT_TESTED = [31, 37, 39, 41, 27, 35, 37, 38, 37, 37]

FIRST = """\
..5d91..
..dfaf5.
.3f2.b8.
.4c..88.
.58..98.
.4b.1c7.
.2e5ac..
..6da..."""


def test_the_file_is_the_one_described():
    data = files("overlap.data").joinpath("digits.csv.gz").read_bytes()
    assert hashlib.sha256(data).hexdigest() == CHECKSUM
    assert CHECKSUM in files("overlap.data").joinpath("digits.md").read_text(encoding="utf-8")


def test_shapes_types_and_range():
    data = digits()
    assert (data.images.shape, data.images.dtype) == ((1797, 64), np.float32)
    assert (data.labels.shape, data.labels.dtype) == ((1797,), np.int64)
    assert (data.images.min(), data.images.max()) == (0, 1)
    assert len(data) == 1797
    assert np.bincount(data.labels).tolist() == PER_DIGIT


def test_the_first_image_is_a_zero():
    data = digits()
    ink = (data.images[0] * 16).astype(int).reshape(8, 8)
    assert "\n".join("".join(".123456789abcdefg"[dots] for dots in row) for row in ink) == FIRST
    assert data.labels[0] == 0


def test_the_split_is_always_the_same():
    train, test = digits().split()
    assert (len(train), len(test)) == (1438, 359)
    assert test.labels[:20].tolist() == SPLIT
    assert np.bincount(test.labels).tolist() == PER_DIGIT_TESTED


def test_the_split_uses_every_image_once():
    data = digits()
    numbered = Digits(images=data.images, labels=np.arange(len(data)))
    train, test = numbered.split()
    assert sorted([*train.labels, *test.labels]) == list(range(1797))
    assert (test.images == data.images[test.labels]).all()


def test_the_data_cannot_be_changed():
    for part in (digits(), *digits().split()):
        with pytest.raises(ValueError, match="read-only"):
            part.images[0, 0] = 1
        with pytest.raises(ValueError, match="read-only"):
            part.labels[0] = 1
