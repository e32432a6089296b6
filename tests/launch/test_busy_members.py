"""Members that are busy are not lost: signs of life come from a thread of their own, and of those whose GIL is kept the
kernel is asked.
"""

import math
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeAlias

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from overlap.errors import UsageError
from overlap.kernel_facts import ProcessState, process_identity, process_state
from overlap.processes.identity import JoinError, SilenceLimits
from overlap.processes.join import Membership, enter_in_own_thread, join
from overlap.processes.link import ControlLink
from overlap.processes.members import MemberLostError
from overlap.processes.wire import MemberLost, MemberNotice, Refused
from tests.interpreters import Python, environment, free_port
from tests.waiting import run
from transports.tcp import TcpInfo

from .company import Company, MakeCompany, Puppet, listening, watch

# -- a thread of its own ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def manager(events: list[str], fails: str = "") -> AsyncIterator[int]:
    if fails == "entering":
        raise ValueError(fails)
    events.append("entered")
    events.append(f"in {threading.current_thread().name}")
    try:
        async with trio.open_nursery() as nursery:
            if fails == "inside":
                nursery.start_soon(_fail)
            yield 7
            nursery.cancel_scope.cancel()
    except ExceptionGroup:
        raise ValueError(fails) from None
    finally:
        events.append("left")
    if fails == "leaving":
        raise ValueError(fails)


async def _fail() -> None:
    raise ValueError


@pytest.mark.parametrize("fails", ["", "entering", "inside", "leaving"])
def test_a_context_manager_is_held_open_in_another_thread(fails: str) -> None:
    events: list[str] = []

    async def main() -> None:
        async with enter_in_own_thread("test", manager(events, fails)) as value:
            assert value == 7
            assert "in test" in events
            if fails == "inside":
                await trio.sleep_forever()

    with pytest.raises(ValueError, match=rf"^{fails}$") if fails else nullcontext():
        run(main)
    assert events[:1] + events[-1:] == ([] if fails == "entering" else ["entered", "left"])


def test_an_error_of_the_block_is_raised_as_it_is_and_leaves_the_manager() -> None:
    events: list[str] = []

    async def main() -> None:
        async with enter_in_own_thread("test", manager(events)):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        run(main)
    assert events == ["entered", "in test", "left"]


@pytest.mark.parametrize("when", ["before", "entering", "inside"])
def test_cancelling_the_block_leaves_the_manager_and_the_thread(when: str) -> None:
    events: list[str] = []
    begun = threading.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        events.append("begun")
        begun.set()
        try:
            await trio.sleep(math.inf if when == "entering" else 0)
            yield
        finally:
            events.append("left")

    async def enter() -> None:
        with scope:
            async with enter_in_own_thread("test", slow()):
                assert when == "inside"
                await trio.sleep_forever()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(enter)
            await trio.to_thread.run_sync(begun.wait)
            await wait_all_tasks_blocked(0.05)
            scope.cancel()

    scope = trio.CancelScope()
    if when == "before":
        scope.cancel()
        run(enter)
    else:
        run(main)
    assert scope.cancelled_caught
    assert events == ["begun", "left"] if when != "before" else events in ([], ["begun", "left"])


# -- a membership in it ----------------------------------------------------------------------------------------------


def meet_apart(members: int, main: object) -> list[str]:
    """Run `main` on every member of a world, each of which lives in a loop of its own."""

    async def attend(company: Company, member: int) -> None:
        async with join(company.config(member), report=company.lines.append) as membership:
            await main(membership)  # type: ignore[operator]

    async def everybody(company: Company) -> None:
        async with trio.open_nursery() as nursery:
            for member in range(members):
                nursery.start_soon(attend, company, member)

    with listening() as listener:
        company = Company(listener, members)
        run(lambda: everybody(company))
    return company.lines


def test_members_apart_do_what_members_do() -> None:
    async def main(membership: Membership) -> None:
        assert await membership.exchange("x", bytes([membership.member])) == [b"\x00", b"\x01", b"\x02"]
        report = "this is a bug in overlap, please report it$"
        with pytest.raises(UsageError, match=f"^exchange 'x': the part has 50000 bytes, the limit is 49152; {report}"):
            await membership.exchange("x", bytes(50_000))
        with pytest.raises(UsageError, match=f"^notice: has 70000 bytes, the limit is 61440; {report}"):
            membership.send_notice(bytes(70_000))
        membership.send_notice(b"from %d" % membership.member)
        heard = [await anext(membership) for _ in range(2)]
        others = {0, 1, 2} - {membership.member}
        assert sorted(heard, key=str) == [MemberNotice(other, b"from %d" % other) for other in sorted(others)]
        assert membership.clock_offset.error_ns >= 0
        await membership.barrier("end")
        await membership.leave()

    assert meet_apart(3, main) == []


def test_a_loss_is_heard_apart() -> None:
    async def main(membership: Membership) -> None:
        await membership.barrier("all here")
        if membership.member == 1:
            return
        reason = "its connection ended without a goodbye"
        assert [await anext(membership)] == [MemberLost(member=1, reason=reason)]
        with pytest.raises(MemberLostError, match=rf"^barrier 'x': process 1 is lost: {reason}$"):
            await membership.barrier("x")
        await membership.leave()

    assert meet_apart(2, main) == []


async def test_a_world_that_does_not_come_together_says_so(make_company: MakeCompany) -> None:
    company = make_company(2)
    with pytest.raises(JoinError, match=r"^process 1 did not join within 0.1 s$"):
        async with join(company.config(0, timeout_s=0.1), report=company.lines.append):
            raise AssertionError("nobody else came")


@pytest.mark.slow
async def test_who_keeps_its_loop_busy_is_not_silent(make_company: MakeCompany) -> None:
    """Each stops its own loop in turn, for longer than any member may be silent."""
    patience = SilenceLimits(beat_s=0.02, suspect_s=0.4, silence_s=0.5)

    async def attend(company: Company, member: int) -> None:
        config = company.config(member, patience=patience)
        async with join(config, report=company.lines.append) as membership:
            for busy in range(2):
                await membership.barrier("turn")
                if busy == member:
                    threading.Event().wait(1.0)  # as a long computation would; of both, as they share this loop
            await membership.barrier("end")
            await membership.leave()

    company = make_company(2)
    async with trio.open_nursery() as nursery:
        for member in range(2):
            nursery.start_soon(attend, company, member)
    assert company.lines == []


# -- what the kernel says of those that are silent -------------------------------------------------------------------


@contextmanager
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that waits for the end of its input."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_kernel_tells_who_runs_and_who_is_stopped_or_gone() -> None:
    with child() as process:
        name = process_identity(process.pid)
        assert process_state(name) is ProcessState.RUNS
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert process_state(name) is ProcessState.STOPPED
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(name) is ProcessState.GONE  # a zombie
        process.wait()
        assert process_state(name) is ProcessState.GONE
    assert process_state(process_identity()) is ProcessState.RUNS


def test_of_others_it_knows_nothing() -> None:
    host, pid, began = process_identity().split(" ")
    for name in ("", "x", f"{host} me {began}", f"{host} {pid}", f"{host} {pid} {began} more"):
        assert process_state(name) is ProcessState.UNKNOWN
    assert process_state(f"other {pid} {began}") is ProcessState.ELSEWHERE
    assert process_state(f"{host} {pid} {int(began) + 1}") is ProcessState.GONE  # its number was given to another
    assert process_identity(2**22 + 1) == ""


Loss: TypeAlias = tuple[int, str, float]
WATCHED = {
    ProcessState.RUNS: ("it runs, but a call in it keeps the GIL; it is waited for", None),
    ProcessState.STOPPED: ("it is stopped; it counts as lost after 15 s", "no sign of life for 15 s; it is stopped"),
    ProcessState.GONE: (
        "it has ended, and something else keeps its connection; it counts as lost after 15 s",
        "no sign of life for 15 s; it has ended",
    ),
    ProcessState.ELSEWHERE: (
        "it may be stopped, or in a call that keeps the GIL, or its host is gone; it counts as lost after 15 s",
        "no sign of life for 15 s",
    ),
    ProcessState.UNKNOWN: (
        "it may be stopped, or in a call that keeps the GIL; it counts as lost after 15 s",
        "no sign of life for 15 s",
    ),
}


def watched(
    state: ProcessState, monkeypatch: pytest.MonkeyPatch, *, answers_s: float, over: bool = False
) -> tuple[list[str], list[Loss]]:
    """Watch a member that says nothing, for up to 400 s, whose host answers for so long, or whose connection is over;
    return the lines and losses, with when they were.
    """
    lines: list[str] = []
    lost: list[Loss] = []

    def lose(member: int, reason: str) -> None:
        lost.append((member, reason, trio.current_time() - begun_s))
        nursery.cancel_scope.cancel()

    async def main() -> None:
        nonlocal nursery, begun_s
        begun_s = trio.current_time()
        ours, theirs = memory_stream_pair()
        link = ControlLink(ours, limit_bytes=1000)
        link.process = "of the test"
        if over:
            link.end_reading("has hung up")
        async with trio.open_nursery() as nursery:
            config = company.config(0, ranks_each=2, patience=SilenceLimits())
            nursery.start_soon(watch, 3, link, config, lines.append, lose)
            for _ in range(800):
                await trio.testing.wait_all_tasks_blocked()
                clock.jump(0.5)
            nursery.cancel_scope.cancel()
        await theirs.aclose()

    def answering(_: ControlLink) -> str:
        return "10.0.0.3" if trio.current_time() - begun_s < answers_s else ""

    nursery: trio.Nursery
    begun_s = 0.0
    monkeypatch.setattr("overlap.processes.link.process_state", {"of the test": state}.__getitem__)
    monkeypatch.setattr(ControlLink, "answering_host", answering)
    clock = MockClock()
    with listening() as listener:
        company = Company(listener, 4)
        trio.run(main, clock=clock)
    return lines, lost


@pytest.mark.parametrize("state", ProcessState)
def test_a_silent_member_is_lost_unless_it_runs(state: ProcessState, monkeypatch: pytest.MonkeyPatch) -> None:
    suspicion, loss = WATCHED[state]
    lines, lost = watched(state, monkeypatch, answers_s=inf if state is not ProcessState.ELSEWHERE else 0)
    assert lines == [f"process 3 (ranks 6-7) has been silent for 5 s: {suspicion}"]
    assert lost == ([] if loss is None else [(3, loss, 15)])


@pytest.mark.parametrize("state", ProcessState)
def test_whose_connection_is_over_is_not_called_silent(state: ProcessState, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(state, monkeypatch, answers_s=0, over=True) == ([], [])


@pytest.mark.parametrize(
    ("answers_s", "loss"),
    [
        (inf, (3, "no sign of life for 300 s; its host 10.0.0.3 answers", 300)),
        (100, (3, "no sign of life for 15 s", 100)),
    ],
)
def test_a_silent_member_of_another_host_is_waited_for_while_that_answers(
    answers_s: float, loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, lost = watched(ProcessState.ELSEWHERE, monkeypatch, answers_s=answers_s)
    assert lines == [
        "process 3 (ranks 6-7) has been silent for 5 s: its host 10.0.0.3 answers: it is stopped, or a call in it "
        "keeps the GIL; it is waited for, and counts as lost after 300 s"
    ]
    assert lost == [loss]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what another kernel has acknowledged")
async def test_a_host_answers_though_its_process_reads_nothing() -> None:
    with listening() as listener:
        async with await trio.open_tcp_stream(*listener.getsockname()) as stream:
            link, theirs = ControlLink(stream, limit_bytes=1000), listener.accept()[0]
            encrypted = ControlLink(trio.SSLStream(stream, ssl.create_default_context()), limit_bytes=1000)
            await stream.send_all(bytes(1000))
            assert link.answering_host() == encrypted.answering_host() == "127.0.0.1"
            theirs.close()
        assert link.answering_host() == ""  # closed
        assert ControlLink(memory_stream_pair()[0], limit_bytes=1000).answering_host() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what another kernel has acknowledged")
async def test_what_was_acknowledged_long_ago_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as listener:
        async with await trio.open_tcp_stream(*listener.getsockname()) as stream:
            link = ControlLink(stream, limit_bytes=1000)
            seen = [TcpInfo(False, since_ack_s, 0.0, 0, 0) for since_ack_s in (5.0, 5.001)]
            monkeypatch.setattr("overlap.processes.link.tcp_info", lambda _: seen.pop(0))
            assert link.answering_host() == "127.0.0.1"
            assert link.answering_host() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what another kernel has acknowledged")
@pytest.mark.parametrize("process", ["another-host 7 7", ""])
async def test_patience_with_a_silent_process_of_another_host_ends(process: str, make_company: MakeCompany) -> None:
    """One that has no name may be anything that answers; nobody waits longer for it."""
    patience = SilenceLimits(beat_s=0.05, suspect_s=0.2, silence_s=0.4, answering_s=0.8)
    reason = "no sign of life for 0.8 s; its host 127.0.0.1 answers" if process else "no sign of life for 0.4 s"
    seen: list[object] = []

    async def hear(membership: Membership) -> None:
        seen.append(await anext(membership))
        await membership.leave()

    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(company.attend, 0, hear, patience=patience))
        puppet = await Puppet.enter(company, 1, process=process)
        assert await puppet.hear(Refused) == Refused(reason=reason)
        await puppet.stream.aclose()
    assert seen == [MemberLost(member=1, reason=reason)]


APART = """
import math
import os
from overlap import kernel_facts
kernel_facts._process_namespace = lambda: f"host-{os.getpid()}"
"""
BUSY = """
import ctypes, os, signal, sys, time
import numpy as np
import overlap

async def main(rank):
    await rank.barrier()
    if rank.rank == int(sys.argv[1]):
        if sys.argv[2] == "python":
            end = time.monotonic() + 20
            while time.monotonic() < end:
                pass
        elif sys.argv[2] == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:  # a call that keeps the GIL
            await rank.compute(ctypes.PyDLL(None).sleep, ctypes.c_uint(20))
    return float((await rank.all_reduce(np.ones(4_000_000)))[0])

print(*overlap.run(main))
"""


@pytest.mark.slow  # longer than a process may be silent, which the tests above show on clocks of their own
@pytest.mark.parametrize("how", ["python", "native"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_world_waits_for_a_rank_that_is_busy(tmp_path: Path, rank: int, how: str) -> None:
    """The other one has more to send than fits on the way."""
    (tmp_path / "busy.py").write_text(BUSY)
    with running(tmp_path, "busy.py", str(rank), how) as job:
        out, err = job.communicate(timeout=120)
    assert (job.returncode, out) == (0, "2.0\n2.0\n"), err


@contextmanager
def running(folder: Path, *arguments: str, size: str = "--processes") -> Iterator[Python]:
    """Launch processes of a world of two, or with `--nnodes` those of one of two hosts."""
    command = ("-m", "overlap", "run", size, "2", "--no-prefix", *arguments)
    wires = {"OVERLAP_UNIX": "0"} if size == "--processes" else {}
    with Python(*command, cwd=folder, env=environment(OVERLAP_SECRET="of this test", **wires)) as job:
        try:
            yield job
        finally:
            job.kill()


@pytest.mark.slow  # as above, of processes that take each other for those of other hosts
@pytest.mark.parametrize("rank", [0, 1])
def test_a_world_waits_for_a_busy_rank_of_another_host(tmp_path: Path, rank: int) -> None:
    (tmp_path / "busy.py").write_text(APART + BUSY)
    with running(tmp_path, "busy.py", str(rank), "native") as job:
        out, err = job.communicate(timeout=120)
    assert (job.returncode, out) == (0, "2.0\n2.0\n"), err
    said = f"process {rank} (rank {rank}) has been silent for 5 s: its host 127.0.0.1 answers: "
    assert said in err


@pytest.mark.slow  # a process may be stopped for long; test_launcher_patience.py shows it on a clock of its own
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_ended_by_the_launcher_of_its_own_host(tmp_path: Path, rank: int) -> None:
    (tmp_path / "busy.py").write_text(APART + BUSY)
    host = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--node-rank")
    with (
        running(tmp_path, *host, str(rank), "busy.py", str(rank), "stopped", size="--nnodes") as there,
        running(tmp_path, *host, str(1 - rank), "busy.py", str(rank), "stopped", size="--nnodes") as here,
    ):
        told, err = there.communicate(timeout=120)[1], here.communicate(timeout=120)[1]
    assert (there.returncode, here.returncode) == (128 + signal.SIGKILL, 1)
    assert f"overlap: process {rank} (rank {rank}, pid " in told
    assert "has been stopped for 15 s, as SIGSTOP does, and is killed" in told
    assert f") on {socket.gethostname()} was stopped, as SIGSTOP does, and had to be killed\n" in told
    assert f"PeerLostError: process {rank} (rank {rank}) is lost: " in err
