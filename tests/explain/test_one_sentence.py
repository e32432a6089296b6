"""`overlap timeline FILE` and `overlap why FILE` end with one sentence, of our traces and of profiles."""

import numpy as np
import pytest

import overlap
from overlap.cli import main
from overlap.timeline import breakdowns, write_trace
from tests.explain.profiles import Recording
from tests.timeline.programs import MIB, data_parallel, nothing, run


async def one_bucket(rank):
    """All gradients in one bucket, which travels when backward is over."""
    for step in range(3):
        with rank.step(step):
            gradient = rank.compute(lambda: np.zeros(64 * MIB, "f4"), name="backward", seconds=4e-3)
            await rank.all_reduce(gradient, name="bucket 0")
            rank.compute(nothing, name="update", seconds=1e-4)


OURS = {
    "a late rank": (data_parallel(late_s=9e-3), "waiting for rank 3 (compute 'tokenise' at"),
    "a bucket that is too large": (one_bucket, "on the wire (bucket 0 at"),
    "an exposed wire": (data_parallel(mib=32, awaits="each"), "on the wire (all_reduce at"),
}


def last_lines(path, capsys):
    """Return the text of the timeline's page, and the sentence of why, each in one line."""
    assert main(["timeline", str(path)]) == 0
    return " ".join(capsys.readouterr().out.split()), " ".join(overlap.why(path).verdict.split())


@pytest.mark.parametrize("name", OURS)
def test_of_our_traces(tmp_path, capsys, name):
    program, part = OURS[name]
    timeline = run(program)
    write_trace(timeline, tmp_path / "run.json")
    page, sentence = last_lines(tmp_path / "run.json", capsys)
    assert page.endswith(sentence)
    assert part in sentence
    found = overlap.why(timeline)
    assert found.verdict == overlap.why(tmp_path / "run.json").verdict
    # each statement is true of the events: the causes of a rank add up to its step, and are those of the spans
    rows = {row.rank: row for row in breakdowns(timeline, step=found.step)}
    for rank, row in rows.items():
        costs = {cause: ns for one, step, cause, ns in found.costs if (one, step) == (rank, found.step)}
        assert sum(costs.values()) == row.wall_ns
        assert costs.get("waiting", 0) + costs.get("wire", 0) == row.exposed_ns
        assert costs["compute"] == row.compute_ns


def launch_bound(recording):
    for number in range(60):
        recording.op("aten::add", 100 * number, 100 * number + 90)
        recording.kernel(100 * number + 95, 100 * number + 100, launch=100 * number + 80)


def exposed(recording):
    recording.kernel(10, 300, launch=5)
    recording.kernel(
        300, 700, launch=6, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    )
    recording.kernel(700, 900, launch=7)


def copies(recording):
    recording.kernel(10, 300, launch=5)
    recording.copy(300, 800)
    recording.kernel(800, 900, launch=7)


@pytest.mark.parametrize("events", [launch_bound, exposed, copies], ids=lambda events: events.__name__)
def test_of_profiles(tmp_path, capsys, events):
    recording = Recording(world=2 if events is exposed else 1)
    recording.note("ProfilerStep#3", 0, 6_000 if events is launch_bound else 1_000)
    events(recording)
    path = recording.write(tmp_path / "rank0.json.gz")
    page, sentence = last_lines(path, capsys)
    assert page.endswith(sentence)
    found = overlap.why(path)
    assert sum(ns for _, step, _, ns in found.costs if step == found.step) == found.step_ns
