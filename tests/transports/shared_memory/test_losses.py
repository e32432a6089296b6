"""A process that dies is noticed by who waits for it, who reads its memory, and whose memory it was reading."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio

from transports import LinkLostError, TransportError
from transports.shared_memory import SharedMemory, joining
from transports.shared_memory.segment import Segment

from ..efa.processes import SECRET, Lines, run
from .other import LONG_BYTES
from .processes import Host

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


@pytest.mark.parametrize(("owner", "call"), [(Segment, "make"), (os, "eventfd")])
async def test_a_process_that_has_no_memory_to_share_says_so_and_is_reached_by_sockets(
    monkeypatch: pytest.MonkeyPatch, owner: object, call: str
) -> None:
    monkeypatch.setattr(owner, call, Mock(side_effect=OSError(27, "File too large")))
    host = Host()
    await _look_at_all(host)
    for member, lines in enumerate(host.reports):
        how = "shares no memory with processes of this host, which sockets reach: File too large"
        assert lines == [f"process {member} {how}"]


async def test_processes_of_other_hosts_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "host_identity", lambda: "")

    refusals: set[str] = set()

    async def look(transport: SharedMemory) -> None:
        with pytest.raises(TransportError) as caught:
            await _look(transport)
        refusals.add(str(caught.value))

    async with trio.open_nursery() as nursery:
        for transport in Host(everybody=True).transports:
            nursery.start_soon(look, transport)
    unreached = "cannot be reached through the memory of this host; use sockets (efa)"
    assert refusals == {f"process 0 {unreached}", f"process 1 {unreached}"}
