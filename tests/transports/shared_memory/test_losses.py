"""Losses, links and limits of shared memory."""

import base64
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import trio

from tests.errors import error_from
from tests.waiting import Lines, run
from transports import LinkLostError, Request, TransportError
from transports.shared_memory import SharedMemory, joining
from transports.shared_memory.joining import MemoryJoining
from transports.shared_memory.memory_limit import memory_limit_bytes
from transports.shared_memory.segment import Segment

from ..efa.processes import SECRET
from ..promises import leaves_at_once
from .other import LONG_BYTES
from .processes import Host, opened

# -- A process that dies is noticed by who waits for it, who reads its memory, and whose memory it was reading ---------

OTHER = Path(__file__).with_name("other.py")


@asynccontextmanager
async def beside(what: str, lines: Lines) -> AsyncIterator[tuple[SharedMemory, subprocess.Popen[str]]]:
    """Join a process that does as it is told."""
    with subprocess.Popen(  # noqa: ASYNC220 - it takes a millisecond
        [sys.executable, OTHER, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        async def exchange(name: str, mine: bytes) -> list[bytes]:
            theirs = await trio.to_thread.run_sync(stdout.readline)
            print(base64.b64encode(mine).decode(), file=stdin, flush=True)
            return [mine, base64.b64decode(theirs)]

        try:
            transport = SharedMemory(
                member=0, placement=((0,), (1,)), secret=SECRET, exchange=exchange, report=lines.append
            )
            async with transport.open():
                yield transport, process
        finally:
            process.kill()


async def test_who_sleeps_notices() -> None:
    lines = Lines()
    async with beside("ends", lines) as (transport, _):
        end = transport.wire(0)
        await end.send(1, 1, b"x")
        with pytest.raises(LinkLostError, match=r": process 1 \(rank 1\) is lost: its process has ended$"):
            await end.recv_into(1, 2, bytearray(1))
    assert lines == ["process 1 (rank 1) is lost: its process has ended"]


async def test_a_loss_that_is_told_before_the_neighbours_are_known_is_not_forgotten() -> None:
    async def exchange(_: str, mine: bytes) -> list[bytes]:
        transport.lose([1], "it has hung up")  # its card has come, and nobody has looked at it
        return [mine, mine]

    placement = ((0,), (1,))
    transport = SharedMemory(member=0, placement=placement, exchange=exchange, report=Lines().append, secret=SECRET)
    with pytest.raises(LinkLostError, match=r"^process 1 is lost: it has hung up$"):
        async with transport.open():
            pass


async def test_a_process_that_ends_amid_the_exchange_of_memory_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    map_peer, closed = MemoryJoining._map_peer, trio.Event()

    async def end_amid(self: MemoryJoining, connection: Any, *others: Any) -> Any:
        if self.member == 1:
            connection.close()
            closed.set()
            raise LinkLostError("this process ends")
        await closed.wait()
        return await map_peer(self, connection, *others)

    async def look(transport: SharedMemory) -> None:
        errors.append(str(await error_from(LinkLostError, _look(transport))))

    errors: list[str] = []
    monkeypatch.setattr(MemoryJoining, "_map_peer", end_amid)
    async with trio.open_nursery() as nursery:
        for transport in Host().transports:
            nursery.start_soon(look, transport)
    lost = "process 1 cannot be reached: socket connection broken: [Errno 32] Broken pipe"
    assert sorted(errors) == [lost, "this process ends"]


@pytest.mark.parametrize("what", ["sends", "receives"])
def test_who_is_in_the_midst_of_a_message_notices(what: str) -> None:
    """On a busy machine all bytes may have moved before the other process dies: then once more."""

    async def die_in_the_midst() -> str:
        async with beside(what, Lines()) as (transport, _):
            end = transport.wire(0)
            call = end.recv_into if what == "sends" else end.send
            try:
                await call(1, 1, bytearray(LONG_BYTES))
            except LinkLostError as error:
                return str(error)
            return ""

    async def main() -> None:
        for _ in range(20):
            if error := await die_in_the_midst():
                assert "its process has ended" in error
                return
        raise AssertionError("each of 20 messages had moved before the other process died")

    run(main)


async def _look(transport: SharedMemory) -> None:
    async with transport.open():
        assert transport.peers == ()
        assert not transport.links


async def _look_at_all(host: Host) -> None:
    async with trio.open_nursery() as nursery:
        for transport in host.transports:
            nursery.start_soon(_look, transport)


async def test_who_cannot_share_memory_is_left_to_sockets_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "from_descriptor", Mock(side_effect=OSError("no")))
    host = Host()
    await _look_at_all(host)
    for lines, other in zip(host.reports, (1, 0), strict=True):
        assert lines == [f"process {other} of this host is reached by sockets: its memory cannot be mapped: no"]


_FULL = Mock(side_effect=OSError(27, "File too large"))


@pytest.mark.parametrize(
    ("owner", "name", "value", "cause"),
    [
        (Segment, "make", _FULL, "File too large"),
        (os, "eventfd", _FULL, "File too large"),
        (joining, "STALE", True, "the compiled code is of another version; install overlap again"),
    ],
)
async def test_a_process_that_has_no_memory_to_share_says_so_and_is_reached_by_sockets(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, value: object, cause: str
) -> None:
    monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(joining, "BUILT", not joining.STALE)
    host = Host()
    await _look_at_all(host)
    for member, lines in enumerate(host.reports):
        how = f"shares no memory with processes of this host, which sockets reach: {cause}"
        assert lines == [f"process {member} {how}"]


async def test_processes_of_other_hosts_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "host_identity", lambda: "")

    refusals: set[str] = set()

    async def look(transport: SharedMemory) -> None:
        refusals.add(str(await error_from(TransportError, _look(transport))))

    async with trio.open_nursery() as nursery:
        for transport in Host(everybody=True).transports:
            nursery.start_soon(look, transport)
    unreached = "cannot be reached through the memory of this host; use sockets (efa)"
    assert refusals == {f"process 0 {unreached}", f"process 1 {unreached}"}


# -- packets leave one after the other, also those that are sent because another one has been --------------------------


@pytest.mark.slow
async def test_what_is_sent_as_another_packet_leaves_does_not_take_its_room() -> None:
    host = Host()
    async with opened(host.transports):
        a, b = (transport.wire(rank) for rank, transport in enumerate(host.transports))
        starter, packets, over = a.route(1), 0, trio.Event()

        def fill(_: Request | None) -> None:
            nonlocal packets
            packets += 1
            while leaves_at_once(a, 1, 5, b"much of it"):
                packets += 1

        def fill_again(call: Request) -> None:
            fill(call)
            over.set()

        fill(None)
        starter.begin_send(1, 6, b"queued", done=fill_again)
        await b.recv_into(0, 6, bytearray(6))
        await over.wait()
        received = [bytearray(10) for _ in range(packets)]
        for each in received:
            await b.recv_into(0, 5, each)
        assert received == [b"much of it"] * packets


# -- the memory of a container, with the files of control groups of both versions --------------------------------------

MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "67108864\n"}, 1 << 26),
        ("0::/\n", {"memory.max": "max\n"}, MACHINE_BYTES),
        ("0::/job/rank\n", {"job/memory.max": "67108864\n", "job/rank/memory.max": "max\n"}, 1 << 26),
        ("0::/outside/this\n", {"memory.max": "67108864\n"}, 1 << 26),
        ("3:cpu:/\n2:memory:/docker/7\n", {"memory/memory.limit_in_bytes": "67108864\n"}, 1 << 26),
        ("2:memory:/\n", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, MACHINE_BYTES),
        (None, {}, MACHINE_BYTES),
    ],
)
@pytest.mark.everyday(7)
def test_the_smallest_limit_counts(tmp_path: Path, groups: str | None, files: dict[str, str], limit: int) -> None:
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert memory_limit_bytes(tmp_path) == limit


def test_a_segment_is_a_share_of_half_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transports.shared_memory.joining.memory_limit_bytes", lambda: 1 << 28)
    joining = MemoryJoining.__new__(MemoryJoining)
    joining.members, joining._limit_bytes = 2, None
    segment = joining._make_segment()
    assert segment.nbytes == 1 << 26
    segment.view.release()
