"""What a killed run leaves of its timeline, and what is recorded of a run of days."""

import numpy as np
import pytest

import overlap
from overlap import Faults, UsageError, Virtual
from overlap.processes import traces
from overlap.processes.clock import ClockOffset
from overlap.processes.traces import TraceFile
from overlap.timeline import Recorder, Timeline, read_trace
from overlap.timeline.files.trace import Header
from overlap.timeline.recording import KeptSteps
from tests.timeline.made import shifted

STEP_NS = 100


@pytest.fixture(autouse=True)
def no_thread_writes(monkeypatch):
    """The tests write by themselves."""
    monkeypatch.setattr(traces, "EVERY_S", 1e6)


def step(recorder, index, *, computes=2):
    begin = index * STEP_NS
    for at in range(computes):
        info = ("train.py:1", 0, begin, index)
        recorder.append(("compute", "compute", "work", begin + 10 * at, begin + 10 * at + 5, info))
    recorder.append(("step", "step", f"step {index}", begin, begin + 90, index))


def growing_file(path, *recorders, clock=None):
    file = TraceFile(path)
    file.begin_section(Header(world_size=2, clock="real", meta={"script": "t"}, run="job.0"), recorders, clock=clock)
    return file


def collected(*recorders):
    return Timeline.collect(recorders, world_size=2).spans


def test_what_was_written_is_there_without_an_end(tmp_path):
    path, recorders = tmp_path / "run-process0.json", [Recorder(0), Recorder(1)]
    growing = growing_file(path, *recorders, clock=lambda: ClockOffset(offset_ns=1000, error_ns=3))
    for index in range(3):
        for recorder in recorders[: index + 1]:
            step(recorder, index)
        growing.flush()
    growing.flush()
    found = read_trace(path)
    assert found.spans == shifted(Timeline.collect(recorders, world_size=2), 1000).spans
    assert (found.world_size, found.meta["script"]) == (2, "t")
    assert found.meta["cut"] == "what was recorded before the run was killed"
    assert found.meta["clock_error_ns"] == "3"
    growing.end_section({"script": "u"})
    assert list(tmp_path.iterdir()) == [path]
    assert (read_trace(path).spans, read_trace(path).meta) == (found.spans, {"script": "u", "clock_error_ns": "3"})


@pytest.mark.slow
def test_cut_at_any_byte_it_holds_what_was_complete(tmp_path):
    path, recorder = tmp_path / "x.json", Recorder(0)
    growing = growing_file(path, recorder)
    for index in range(3):
        step(recorder, index)
        growing.flush()
    growing.end_section({})
    data, counts = path.read_bytes(), []
    for kept in range(len(data)):
        path.write_bytes(data[:kept])
        try:
            counts.append(len(read_trace(path).spans))
        except UsageError:
            assert counts == []
    assert sorted(set(counts)) == [*range(1, 10)]  # the last one before the array ends
    assert counts == sorted(counts)


def test_of_a_long_run_the_file_holds_what_the_recorders_keep(tmp_path):
    path, recorder = tmp_path / "x.part", Recorder(0, capacity=9)
    growing, sizes = growing_file(path, recorder), []
    for index in range(100):
        step(recorder, index)
        growing.flush()
        sizes.append(len(read_trace(path).spans))
    assert max(sizes) <= 2 * 9 + 3
    assert read_trace(path).spans[-9:] == list(collected(recorder))
    growing.end_section({})
    assert read_trace(path).spans == list(collected(recorder))


def test_the_last_steps_are_kept_however_many_spans_they_have():
    recorder = Recorder(0, steps=KeptSteps.parse("last:3"))
    for index in range(50):
        step(recorder, index, computes=index)
    timeline = Timeline.collect([recorder], world_size=1)
    assert timeline.steps() == [47, 48, 49]
    assert len(timeline.spans) == 47 + 48 + 49 + 3
    assert timeline.dropped == sum(range(47)) + 47


def test_reading_what_was_dropped_does_not_change_what_is_kept():
    recorder = Recorder(0, steps=KeptSteps.parse("last:3"))
    for index in range(50):
        step(recorder, index)
        assert recorder.dropped == max(0, index - 2) * (len(recorder) // min(index + 1, 3))
    assert Timeline.collect([recorder], world_size=1).steps() == [47, 48, 49]


def test_every_nth_step_is_recorded_and_what_is_in_none():
    recorder = Recorder(0, steps=KeptSteps.parse("every:10,last:2"))
    for index in range(50):
        step(recorder, index)
        recorder.append(("program", "program", "busy", index * STEP_NS, index * STEP_NS + 1, None))
    timeline = Timeline.collect([recorder], world_size=1)
    assert timeline.steps() == [30, 40]
    assert {span.step for span in timeline.spans if span.kind == "compute"} == {30, 40}
    assert sum(span.kind == "program" for span in timeline.spans) == 30


@pytest.mark.parametrize(
    "clock", [Virtual(), Virtual(shapes_only=True, alike=1), Virtual(faults=Faults(loss=0, death=0))]
)
def test_virtual_time_keeps_the_steps_that_are_asked_for(clock, tmp_path):
    async def program(rank):
        for index in range(9):
            with rank.step(index):
                await rank.all_reduce(rank.compute(np.zeros, 4, "f4", seconds=1e-6))

    path = tmp_path / "t.json"
    overlap.run(program, ranks=2, cluster="trn1.32xlarge", clock=clock, trace=path, trace_steps="last:2,every:3")
    timeline = read_trace(path)
    assert timeline.steps() == [3, 6]
    assert {span.step for span in timeline.spans} == {3, 6}


@pytest.mark.parametrize("text", ["", "last", "last:0", "every:-1", "every:2,every:3", "first:3", "last:3,"])
def test_which_steps_is_one_of_a_few_words(text):
    with pytest.raises(ValueError, match=r"^expected last:N, every:N or both, with N from 1, got "):
        KeptSteps.parse(text)
