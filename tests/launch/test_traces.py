"""One trace file of all processes, of any size; and what becomes of it when one of them is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from overlap.errors import UsageError
from overlap.processes import traces as traces
from overlap.processes.member import Membership
from overlap.processes.traces import part_path, write_together
from overlap.timeline import Recorder, Timeline, read_trace
from overlap.timeline.recording import RawSpan

from .company import meet

NEEDS_FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")


def timeline(member: int, *, members: int, spans: int = 1) -> Timeline:
    """Each member has one rank, which takes part in collectives of all."""
    recorder = Recorder(member, capacity=spans)
    group = ("world", tuple(range(members)))
    for seq in range(spans):
        meeting = ("all_reduce", "ring", group, seq, 8, "float32", 10 * seq + 1)
        raw: RawSpan = ("comm", "comm", "all_reduce", 10 * seq, 10 * seq + 9, (meeting, 10 * seq, 0, "t.py:1", 0, None))
        recorder.append(raw)
    return Timeline.collect([recorder], world_size=members)


@pytest.mark.parametrize("members", [1, 2])
def test_whoever_cannot_write_the_trace_of_all_says_where_its_own_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], members: int
) -> None:
    path = tmp_path / "t.json"

    async def main(membership: Membership) -> None:
        if membership.member == 0:
            await write_together(lambda: Timeline.collect([Recorder(0)], world_size=members), path, membership)

    meet(members, main)
    own = path if members == 1 else tmp_path / "t-process0.json"
    assert list(tmp_path.iterdir()) == [own]
    assert read_trace(own).world_size == members
    lost = (
        f"overlap: no {path}: not all processes could give their timelines; that of this process is in {own}: "
        "`overlap timeline PARTS -o t.json` makes one of all\n"
    )
    assert capsys.readouterr().err == ("" if members == 1 else lost)


def test_a_trace_larger_than_any_window_is_of_all_and_exact(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    wrote = []

    async def main(membership: Membership) -> None:
        mine = timeline(membership.member, members=3, spans=5_000)
        wrote.append((membership.member, await write_together(lambda: mine, path, membership)))

    assert meet(3, main) == []
    assert sorted(wrote) == [(0, True), (1, False), (2, False)]
    assert list(tmp_path.iterdir()) == [path]
    whole = read_trace(path)
    assert [len(spans) for spans in whole.by_rank().values()] == [5_000] * 3
    assert all(span.duration_ns == 9 for span in whole.spans)
    first = [span for span in whole.spans if span.info and span.info.seq == 0]
    last_ns = max(span.start_ns for span in first)
    assert [span.info.met_ns for span in first if span.info] == [min(last_ns, span.end_ns) for span in first]


def test_nobody_is_hurried_who_is_at_work_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on coming. Here it is over for everybody before the work begins."""
    path = tmp_path / "t.json"
    over = trio.Event()

    @contextmanager
    def short(seconds: float) -> Iterator[None]:
        with trio.CancelScope() as scope:
            yield
            scope.cancel()
        assert not scope.cancelled_caught
        over.set()

    monkeypatch.setattr(traces.trio, "fail_after", short)

    async def main(membership: Membership) -> None:
        await write_together(lambda: timeline(membership.member, members=2), path, membership)

    meet(2, main)
    assert over.is_set()
    assert len(read_trace(path).spans) == 2


@NEEDS_FULL
def test_where_it_cannot_be_written_every_process_keeps_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    refused = []

    async def main(membership: Membership) -> None:
        try:
            await write_together(lambda: timeline(membership.member, members=2), "/dev/full", membership)
        except UsageError as error:
            refused.append((membership.member, str(error)))

    meet(2, main)
    assert refused == [(0, "trace: cannot write /dev/full: No space left on device; name another file")]
    kept = [tmp_path / f"full-process{member}" for member in range(2)]
    assert [read_trace(path).ranks() for path in kept] == [[0], [1]]
    told = capsys.readouterr().err
    assert all(f"that of this process is in {path}: " in told for path in kept)


def test_a_part_is_kept_where_there_is_room(tmp_path: Path) -> None:
    assert part_path(tmp_path / "run.json", 3) == tmp_path / "run-process3.json"
    assert part_path("/nowhere/run.json", 3) == Path(traces.tempfile.gettempdir(), "run-process3.json")


WRITES = """
import os, signal, sys, trio
from overlap.processes.traces import delaying_sigterm

async def main():
    with delaying_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep(0)
        print("written", flush=True)
    print("not reached")

trio.run(main)
"""


def test_a_launcher_that_ends_the_rest_does_not_end_the_writing() -> None:
    done = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("written\n", -signal.SIGTERM)
