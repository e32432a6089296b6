"""The flight record of a world: what is in it after each way to end, what stays, and that no run suffers from it."""

import errno
import gc
import os
import signal
import tracemalloc
from mmap import mmap
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import trio

import overlap
from overlap.flight.folder import KEPT_FILES, MOST_FILES, default_folder, open_flight, open_records
from overlap.flight.layout import CALLS, KEPT, RECORDS, file_bytes
from overlap.flight.reading import Flight, read_flight
from overlap.flight.recorder import Known, Writer
from overlap.runtime.operation import CollectiveFuture
from overlap.timeline.recording import Recorder
from overlap.waits.ends import EndState
from tests import interpreters
from tests.errors import error_of

from . import KILLED


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLAP_FLIGHT_DIR", str(tmp_path / "records"))
    return tmp_path / "records"


def only(folder: Path) -> Flight:
    (file,) = folder.iterdir()
    return read_flight(file)


def fail(main, *args: object, ranks: int = 2) -> None:
    with pytest.raises(overlap.RankFailedError):
        overlap.run(main, *args, ranks=ranks)


def unfinished(record):
    """Return the unfinished operations, oldest first."""
    return [end for end in record.ends() if end.done_ns is None]


def test_a_failed_world_leaves_what_its_ranks_did(folder):
    async def main(rank):
        with rank.step(7):
            await rank.all_reduce(np.ones(2, np.float32))
            product = rank.compute(lambda: np.ones(3), name="think")
            await rank.all_gather(product)
            if rank.rank == 1:
                raise ValueError("no")
            await rank.barrier()

    fail(main)
    flight = only(folder)
    assert (flight.world_size, flight.process, flight.processes, flight.pid) == (2, 0, 1, os.getpid())
    assert [record.rank for record in flight.ranks] == [0, 1]
    ends = flight.ranks[0].ends()
    assert [(end.call.op, end.call.name, end.seq, end.step, end.state) for end in ends] == [
        ("all_reduce", "", 0, 7, EndState.DONE),
        ("compute", "think", 0, 7, EndState.DONE),
        ("all_gather", "", 1, 7, EndState.DONE),
        ("barrier", "", 2, 7, EndState.WAITING),
    ]
    reduced, think, gathered, _ = ends
    call = reduced.call
    assert (call.form, call.group, call.members, call.nbytes) == ("float32 (2,), op='sum'", "world", (0, 1), 8)
    assert gathered.call.form == "float64 (3,)"  # known only once its input was there
    assert call.site.rpartition(":")[0].endswith("test_recorder.py")
    assert reduced.issued_ns <= think.issued_ns <= think.begun_ns <= min(think.done_ns, gathered.done_ns)
    assert [end.call.op for end in flight.ranks[1].ends()] == ["all_reduce", "compute", "all_gather"]
    assert flight.ending is not None
    assert (flight.ending.how, flight.ending.rank, flight.ending.here) == ("failed", 1, True)
    assert flight.ending.line.startswith("ValueError: no at test_recorder.py:")


def test_a_compute_has_ended_before_what_uses_it_ends(folder):
    """Its thread settles it; the loop, which may be busy, hears of it later than of what it has ended itself."""

    async def main(rank):
        product = rank.compute(np.ones, 3, name="think")
        while not product.done:
            sleep(0)  # noqa: ASYNC251 (the thread is to have the interpreter, not the loop)
        assert rank.all_reduce(product).done
        raise ValueError("no")

    fail(main, ranks=1)
    think, reduced = only(folder).ranks[0].ends()[:2]
    assert think.begun_ns <= think.done_ns <= reduced.done_ns


def test_nothing_remains_of_a_world_that_ends_well(folder):
    async def main(rank):
        assert [path.parent for path in open_records()] == [folder]
        await rank.barrier()

    overlap.run(main, ranks=2)
    assert not folder.exists()
    assert open_records() == []


def test_what_is_in_the_folder_besides_stays(folder):
    folder.mkdir()
    (folder / "mine").touch()

    async def main(rank):
        pass

    overlap.run(main, ranks=1)
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_a_folder_that_is_asked_for_is_made_with_the_folders_above_it(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLAP_FLIGHT_DIR", str(tmp_path / "job" / "records"))

    async def main(rank):
        assert [path.parent for path in open_records()] == [tmp_path / "job" / "records"]

    overlap.run(main, ranks=1)


def test_a_world_that_stalls_leaves_its_record(folder):
    async def main(rank):
        await rank.all_reduce(np.ones(1)) if rank.rank == 0 else await rank.recv(np.ones(1), 0)

    with pytest.raises(overlap.StallError):
        overlap.run(main, ranks=2, timeout_s=0.1)
    ending = only(folder).ending
    assert (ending.how, ending.rank) == ("stalled", None)
    assert ending.line.startswith("StallError: the world did not finish within timeout_s=0.1")


def test_a_rank_that_has_finished_is_known(folder):
    async def main(rank):
        if rank.rank == 1:
            return
        await rank.send(np.ones(1), 1)

    fail(main)
    assert [record.left for record in only(folder).ranks] == [False, True]


def test_messages_name_their_peer_and_their_ends(folder):
    async def main(rank):
        if rank.rank == 0:
            await rank.send(np.ones(1), 1, tag=5)
        elif rank.rank == 1:
            await rank.recv(np.ones(1), 0, tag=5)
            await rank.recv(np.ones(1), None)
        if rank.rank == 0:
            raise ValueError

    fail(main)
    sender, receiver = only(folder).ranks
    (sent,), (received, waits) = [end.call for end in sender.ends()], [end.call for end in receiver.ends()]
    assert (sent.op, sent.peer, sent.tag, sent.members) == ("send", 1, 5, (0, 1))
    assert (waits.op, waits.peer, waits.any_source, waits.members) == ("recv", None, True, ())
    assert sent.key == received.key != waits.key


def test_the_last_operations_are_kept_and_no_more(folder):
    async def main(rank):
        for step in range(RECORDS + 10):
            with rank.step(step):
                await rank.barrier()
        raise ValueError

    fail(main, ranks=1)
    (record,) = only(folder).ranks
    assert [(end.seq, end.step) for end in record.ends()] == [(at, at) for at in range(10, RECORDS + 10)]


def test_the_oldest_unfinished_operations_are_kept(folder):
    async def main(rank):
        if rank.rank == 0:
            for _ in range(RECORDS + 3):
                rank.all_reduce(np.ones(1))
        await rank.recv(np.ones(1), 0) if rank.rank == 1 else None
        raise ValueError

    fail(main)
    record = only(folder).ranks[0]
    assert [end.seq for end in unfinished(record)] == list(range(RECORDS - KEPT))


def test_operations_issued_far_ahead_are_recorded_when_their_turn_comes(folder):
    """The record shows those in flight and the last that have ended, not those that were issued first."""
    ahead, ended = 3 * RECORDS, 2 * RECORDS + 7

    async def main(rank):
        if rank.rank == 0:
            issued = []
            for step in range(ahead):
                with rank.step(step):
                    issued.append(rank.recv(np.ones(1), 1))
            await rank.barrier()
            for future in issued[:ended]:
                await future
            raise ValueError
        await rank.barrier()
        for _ in range(ended):
            await rank.send(np.ones(1), 0)
        await trio.sleep_forever()

    fail(main)
    record = only(folder).ranks[0]
    awaited = range(ended, ended + RECORDS - KEPT)
    assert [(end.seq, end.step) for end in unfinished(record)] == [(number, number) for number in awaited]
    done = [end.seq for end in record.ends() if end.done_ns and end.call.op != "barrier"]
    assert done == list(range(ended - len(done), ended))
    assert len(record.ends()) == RECORDS


@pytest.mark.slow
def test_operations_that_end_before_a_record_is_free_leave_none_taken(folder):
    """Futures of messages that waited for a record, and were settled by another thread or out of order."""

    async def main(rank):
        if rank.rank == 0:
            never = [rank.recv(np.ones(1), 1, tag=1) for _ in range(RECORDS)]
            for _ in range(2 * RECORDS):
                await rank.compute(np.ones, 1)
                await rank.send(np.ones(1), 1)
            await rank.send(np.ones(1), 1, tag=2)
            for future in never:
                await future
            await rank.barrier()
        else:
            for _ in range(2 * RECORDS):
                await rank.recv(np.ones(1), 0)
            await rank.recv(np.ones(1), 0, tag=2)
            for _ in range(RECORDS):
                await rank.send(np.ones(1), 0, tag=1)
            await rank.barrier()
            await trio.sleep_forever()
        raise ValueError

    fail(main)
    record = only(folder).ranks[0]
    assert unfinished(record) == []
    assert len(record.ends()) == RECORDS


def test_the_words_of_the_last_calls_are_kept_however_many_there_are(folder):
    async def main(rank):
        for length in range(1, 2 * CALLS):
            await rank.all_reduce(np.ones(length, np.int8))
            await rank.all_reduce(np.ones(1, np.float64))
        raise ValueError

    fail(main, ranks=1)
    newest = [end.call.form for end in only(folder).ranks[0].ends()[-CALLS // 2 :]]
    lengths = range(2 * CALLS - CALLS // 4, 2 * CALLS)
    assert newest[::2] == [f"int8 ({length},), op='sum'" for length in lengths]
    assert set(newest[1::2]) == {"float64 (1,), op='sum'"}


@pytest.mark.parametrize("index", [-1, 1 << 80])
def test_a_step_that_does_not_fit_is_none(folder, index):
    async def main(rank):
        with rank.step(3), rank.step(index):
            await rank.barrier()
        raise ValueError

    fail(main, ranks=1)
    (record,) = only(folder).ranks
    assert (record.ends()[0].step, record.step) == (None, -1)


@pytest.mark.parametrize("name", ["x" * 5000, 'quoted "\\\n\x00', "名" * 3000])
def test_names_of_any_kind_and_length_are_kept_as_far_as_they_fit(folder, name):
    async def main(rank):
        await rank.group([0], name=name).barrier()
        await rank.all_reduce(np.ones(1), name=name)
        raise ValueError(name)

    fail(main, ranks=1)
    flight = only(folder)
    assert len(flight.ranks[0].ends()) == 2
    assert flight.ending.line[:13].startswith(("ValueError: x", "ValueError: '", "ValueError: q", "ValueError: 名"))


def test_it_is_readable_after_sigkill(folder, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    ended = interpreters.run(program, cwd=tmp_path, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    flight = only(folder)
    assert flight.ending is None
    done = {
        record.rank: [(end.seq, end.step, not end.is_open) for end in record.ends() if not end.call.is_message]
        for record in flight.ranks
    }
    assert done[0] == [(0, 0, True), (1, 1, True), (2, 2, True), (3, 3, False)]
    assert done[1] == done[0][:3]
    assert [record.step for record in flight.ranks] == [3, 3]


# -- no run fails for want of it -----------------------------------------------------------------------------------


async def nothing(rank):
    await rank.barrier()
    return rank.rank


def test_a_full_disk_costs_one_line(folder, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert overlap.run(nothing, ranks=2) == overlap.run(nothing, ranks=2) == [0, 1]
    told = f"overlap: no flight record: {folder}: No space left on device; OVERLAP_FLIGHT_DIR names another folder\n"
    assert capsys.readouterr().err == told
    assert list(folder.iterdir()) == []


def test_a_file_in_the_place_of_the_folder_is_refused(folder):
    folder.touch()
    told = f"flight_dir: {folder} is no folder; make it, or name another (flight_dir: OVERLAP_FLIGHT_DIR)"
    assert str(error_of(overlap.UsageError, overlap.run, nothing)) == told


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.delenv("OVERLAP_FLIGHT_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return default_folder()


def test_a_link_in_the_place_of_the_default_folder_is_not_followed(temporary, tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    temporary.symlink_to(tmp_path / "elsewhere")
    assert overlap.run(nothing, ranks=1) == [0]
    assert list((tmp_path / "elsewhere").iterdir()) == []
    reason = "it is not a folder of this user; OVERLAP_FLIGHT_DIR names another folder"
    assert capsys.readouterr().err == f"overlap: no flight record: {temporary}: {reason}\n"


def test_the_default_folder_keeps_the_newest(temporary):
    temporary.mkdir()
    files = [temporary / f"old{index:03}-0.flight" for index in range(MOST_FILES + 5)]
    for age, file in enumerate(files):
        file.touch()
        os.utime(file, (age, age))
    own = temporary / f"own-{os.getpid()}.flight"  # of a world of this process that has ended
    alive = temporary / f"alive-{os.getppid()}.flight"
    for file in (own, alive):
        file.touch()
        os.utime(file, (0, 0))
    (temporary / "not ours").touch()
    overlap.run(nothing, ranks=1)
    kept = files[-KEPT_FILES:]
    assert sorted(temporary.iterdir()) == sorted([*kept, alive, temporary / "not ours"])


def test_a_run_that_removes_the_folder_as_another_begins_costs_it_no_record(temporary, monkeypatch, capsys):
    ends = open_flight(None, "ends-1", [0], {})
    monkeypatch.setattr("overlap.flight.folder._remove_old_records", lambda _: ends.close(keep=False))
    begins = open_flight(None, "begins-1", [0], {})
    assert (capsys.readouterr().err, begins and begins.path) == ("", temporary / "begins-1.flight")
    begins.close(keep=False)
    assert not temporary.exists()


def test_only_its_owner_reads_it(temporary):
    async def main(rank):
        (file,) = open_records()
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    overlap.run(main, ranks=1)


def test_virtual_time_needs_none(folder):
    async def main(rank):
        assert open_records() == []
        raise ValueError

    with pytest.raises(overlap.RankFailedError):
        overlap.run(main, ranks=2, clock="virtual")
    assert not folder.exists()


def test_of_messages_that_come_again_the_words_are_written_once(folder, monkeypatch):
    told: list[str] = []

    def counted(operation):
        told.append(operation.name)
        return written(operation)

    written = CollectiveFuture.flight_fields
    monkeypatch.setattr(CollectiveFuture, "flight_fields", counted)

    async def main(rank):
        for _ in range(20):
            if rank.rank == 0:
                await rank.send(np.ones(2), 1)
            else:
                await rank.recv(np.ones(2), 0)
            await rank.barrier()

    overlap.run(main, ranks=2)
    assert sorted(told) == ["barrier", "barrier", "recv", "send"]  # each rank has words of its own


def test_nothing_is_kept_of_messages_that_are_over(folder):
    """Their ends are forgotten at rest, and made anew for the next."""

    def known():
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is Known]

    async def main(rank):
        for _ in range(200):
            await (rank.recv(np.empty(2), 0) if rank.rank else rank.send(np.ones(2), 1))
        await rank.barrier()
        return sum(id(each) not in older for each in known())

    kept = known()  # of worlds that other tests have left to the collector
    older = set(map(id, kept))
    assert max(overlap.run(main, ranks=2)) < 20


class Placed:
    """An operation that a line has issued."""

    def __init__(self, instruction: int) -> None:
        self.place = (only.__code__, instruction)

    def flight_fields(self) -> dict[str, object]:
        return {"op": "all_reduce", "name": f"all_reduce at {self.place[1]}"}


def test_two_lines_that_issue_the_same_call_in_turn_need_no_more_memory():
    flight = Writer(mmap(-1, file_bytes(1)), [0], {}).begin_rank(0, Recorder(0))
    known, lines = Known(), (Placed(1), Placed(2))

    def issue(times: int) -> None:
        for number in range(times):
            flight.record_end(flight.record_issue(lines[number % 2], known, "call", 7, 1), 2)

    issue(2 * RECORDS)
    tracemalloc.start()
    try:
        issue(10_000)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 10_000  # a word for each would be 80,000
