import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import trio

import overlap.timeline
from overlap.timeline import Recorder, Timeline
from tests.threads import run_threads

ROOT = Path(overlap.timeline.__file__).parents[2]
INFO = (("all_reduce", "ring", "dp", 7, 64, "bfloat16", 35), 10, -1, "train.py:4", 0, 9)


def test_each_kind_becomes_its_span():
    recorder = Recorder(3)
    recorder.append(("compute", "compute", "forward", 1, 4, 8))
    recorder.append(("comm", "tp", "all_reduce", 20, 50, INFO))
    recorder.append(("step", "step", "step 9", 0, 60, 9))
    compute, comm, step = recorder.spans()
    assert (compute.rank, compute.kind, compute.lane, compute.name) == (3, "compute", "compute", "forward")
    assert (compute.start_ns, compute.end_ns, compute.duration_ns) == (1, 4, 3)
    assert (compute.info, compute.step) == (None, 8)
    assert (step.kind, step.step, step.info) == ("step", 9, None)
    assert (comm.lane, comm.step) == ("tp", 9)
    assert (comm.info.op, comm.info.algorithm, comm.info.group, comm.info.seq) == ("all_reduce", "ring", "dp", 7)
    assert (comm.info.nbytes, comm.info.dtype, comm.info.priority) == (64, "bfloat16", -1)
    assert comm.info.call_site == "train.py:4"


def test_a_collective_divides_into_queue_wait_last_rank_wait_and_transfer():
    recorder = Recorder(0)
    recorder.append(("comm", "comm", "all_reduce", 20, 50, INFO))
    info = recorder.spans()[0].info
    assert (info.queue_wait_ns, info.last_rank_wait_ns, info.transfer_ns) == (10, 15, 15)


def test_what_recording_leaves_raw_is_put_into_words_when_read():
    code = compile("\n\nx = 1", str(Path.cwd() / "lib" / "train.py"), "exec")
    other = compile("\nx = 1", "/nowhere/else.py", "exec")
    recorder = Recorder(0)
    for place in ((code, 2), (other, 2)):
        info = (("all_reduce", "ring", ("tp", (2, 0)), 7, 64, np.dtype("float32"), 35), 10, -1, *place, 9)
        recorder.append(("comm", "comm", "all_reduce", 20, 50, info))
    recorder.append(("comm", "comm", "barrier", 20, 50, (("barrier", "", "tp", 8, 0, None, 35), 10, 0, "", 0, None)))
    first, second, barrier = (span.info for span in recorder.spans())
    assert (first.group, first.ranks, first.dtype, first.call_site) == ("tp", (2, 0), "float32", "lib/train.py:3")
    assert second.call_site == "else.py:2"
    assert (barrier.group, barrier.ranks, barrier.dtype) == ("tp", (), "")


def test_comm_without_details_and_the_first_step_are_told_apart():
    recorder = Recorder(0)
    recorder.append(("comm", "comm", "send", 0, 1, None))
    recorder.append(("step", "step", "step 0", 0, 1, 0))
    comm, step = recorder.spans()
    assert comm.info is None
    assert step.step == 0


def test_the_ring_keeps_the_latest_and_counts_what_it_dropped():
    recorder = Recorder(0, capacity=3)
    assert recorder.dropped == 0
    for i in range(5):
        recorder.append(("compute", "compute", str(i), i, i + 1, None))
    assert [span.name for span in recorder.spans()] == ["2", "3", "4"]
    assert [recorder.dropped, recorder.dropped] == [2, 2]
    assert repr(recorder) == "<Recorder rank 0: 3 of 3 spans>"


def test_two_threads_lose_no_count():
    recorder = Recorder(0, capacity=10)

    def work():
        for i in range(20_000):
            recorder.append(("compute", "compute", "x", i, i, None))

    run_threads(threading.Thread(target=work) for _ in range(2))
    assert recorder.dropped == 40_000 - 10


def test_a_timeline_is_sorted_and_sums_what_was_dropped():
    recorders = [Recorder(rank, capacity=2) for rank in (4, 1)]
    for recorder in recorders:
        for start in (9, 5, 7):
            recorder.append(("compute", "compute", "x", start, 10, None))
    timeline = Timeline.collect(recorders, world_size=8, clock="virtual", meta={"a": "b"})
    assert [(span.start_ns, span.rank) for span in timeline.spans] == [(5, 1), (5, 4), (7, 1), (7, 4)]
    assert (timeline.dropped, timeline.world_size, timeline.clock, timeline.meta) == (2, 8, "virtual", {"a": "b"})
    assert timeline.ranks() == [1, 4]
    assert [span.start_ns for span in timeline.for_rank(4)] == [5, 7]
    assert timeline.steps() == []


def test_steps_are_the_recorded_indices(training):
    assert training(2).steps() == [0, 1, 2]


def test_recording_loads_neither_rich_nor_what_only_readers_need():
    late = {"rich", "overlap.timeline.draw.view", "overlap.timeline.files.reading"}
    code = f"import sys, overlap.timeline; print({late} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_public_name_loads_and_others_are_refused():
    assert all(getattr(overlap.timeline, name).__name__ == name for name in overlap.timeline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = overlap.timeline.nonsense


def test_a_compute_knows_where_and_when_it_was_issued():
    code = compile("\n\nx = 1", str(Path.cwd() / "lib" / "train.py"), "exec")
    recorder = Recorder(0)
    recorder.append(("compute", "compute", "forward", 20, 50, (code, 2, 11, 9)))
    recorder.append(("compute", "compute", "back", 50, 60, ("train.py:7", 0, 12, None)))
    first, second = recorder.spans()
    assert (first.call_site, first.issued_ns, first.step, first.info) == ("lib/train.py:3", 11, 9, None)
    assert (second.call_site, second.issued_ns, second.step) == ("train.py:7", 12, None)


def test_a_message_is_of_two_ranks_and_a_compute_has_its_line():
    from overlap.config import overriding_config

    seen: list[Timeline] = []

    async def main(rank):
        rank.compute(int)
        if rank.rank == 2:
            rank.send(np.zeros(3), 0)
        elif rank.rank == 0:
            rank.recv(np.zeros(3), 2)

    with overriding_config(watcher=seen.append):
        overlap.run(main, ranks=3)
    spans = seen[0].spans
    assert {span.info.ranks for span in spans if span.kind == "comm"} == {(2, 0)}
    computes = [span for span in spans if span.kind == "compute"]
    line = main.__code__.co_firstlineno + 1
    assert [span.call_site.endswith(f"test_spans.py:{line}") for span in computes] == [True] * 3
    assert all(span.issued_ns <= span.start_ns for span in computes)


def test_when_a_program_began_to_wait_for_a_collective_is_in_its_span():
    seen = []

    async def main(rank, awaited):
        if rank.rank == 1:
            await awaited.wait()
        first = rank.all_reduce(np.ones(3))
        second = rank.all_reduce(np.ones(3))
        awaited.set()  # rank 1 issues nothing before rank 0 gives way
        await second
        await first  # which had ended
        if rank.rank == 0:
            seen.append(rank.recorder.spans())

    overlap.run(main, trio.Event(), ranks=2)
    first, second = (span.info for span in seen[0])
    assert first.awaited_ns is None
    assert second.issued_ns < second.awaited_ns < second.end_ns
