"""Mpi beyond the contract: credit, slots, priorities, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from transports import ArgumentError, LinkLostError, Statistics, TransportClosedError
from transports.buffers import BounceBuffers
from transports.matching import Limits, MessageKind, Receive, Send
from transports.mpi import Mpi
from transports.mpi.mpi_link import CREDIT_BYTES, WINDOW, MpiLink
from transports.mpi.polling import LONGEST_PAUSE_S, PAUSE_PART, PAUSE_PART_MOVING, pause_s
from transports.mpi.wire import EAGER_BYTES, HEADERS, SLOTS

from .loop import Fabric, LoopMpi

LARGE = EAGER_BYTES + 1


def run_pair(main: Callable[[LoopMpi, LoopMpi], Awaitable[None]], *, credit_bytes: int = CREDIT_BYTES) -> None:
    async def both() -> None:
        fabric = Fabric(2)
        pair = (LoopMpi(fabric, member, credit_bytes=credit_bytes) for member in range(2))
        async with next(pair).open() as a, next(pair).open() as b:
            try:
                with trio.fail_after(60):
                    await main(a, b)
            finally:
                async with trio.open_nursery() as nursery:  # each waits for the other
                    nursery.start_soon(a.aclose)
                    nursery.start_soon(b.aclose)
        assert [wire.agreed for wire in fabric.wires] == [True, True]

    trio.run(both)


def test_small_messages_wait_for_credit_and_get_it_back() -> None:
    message = bytes(EAGER_BYTES)
    returned: list[int] = []

    async def send(a: LoopMpi, i: int) -> None:
        await a.endpoint(0).send(1, i, message)
        returned.append(i)

    async def main(a: LoopMpi, b: LoopMpi) -> None:
        for _ in range(3):  # and once credit has come back, all over again
            async with trio.open_nursery() as nursery:
                for i in range(6):
                    nursery.start_soon(send, a, i)
                    await wait_all_tasks_blocked()
                assert returned == [0, 1, 2]  # a fourth one does not fit, with its header
                for i in reversed(range(6)):
                    await b.endpoint(1).recv_into(0, i, bytearray(EAGER_BYTES))
            returned.clear()

    run_pair(main, credit_bytes=4 * EAGER_BYTES)


def test_more_large_messages_than_slots() -> None:
    async def receive(b: LoopMpi, tag: int) -> None:
        out = bytearray(LARGE)
        await b.endpoint(1).recv_into(0, tag, out)
        assert out == tag.to_bytes(2, "little") * (LARGE // 2) + b"x"

    async def main(a: LoopMpi, b: LoopMpi) -> None:
        async with trio.open_nursery() as nursery:
            for tag in range(SLOTS + 50):
                nursery.start_soon(a.endpoint(0).send, 1, tag, tag.to_bytes(2, "little") * (LARGE // 2) + b"x")
            await wait_all_tasks_blocked()  # all are announced before the first is asked for
            for tag in range(SLOTS + 50):
                nursery.start_soon(receive, b, tag)

    run_pair(main)


def test_an_urgent_message_overtakes_after_the_pieces_under_way() -> None:
    fabric = Fabric(2)
    agreed = Limits(eager_bytes=0, chunk_bytes=10, places=SLOTS, confirmed=False)

    def failed(error: LinkLostError) -> None:
        raise error

    links = [
        MpiLink(1 - member, [1 - member], [member], agreed, BounceBuffers(), wire=wire, failed=failed)
        for member, wire in enumerate(fabric.wires)
    ]
    done: list[int] = []
    for tag, nbytes, priority in ((0, 75, 10**30), (1, 20, -(10**30)), (2, 10, 0), (3, 10, 0)):
        links[1].engine.receive(Receive((0, 1, tag), None, nbytes))
        send = Send((0, 1, tag), memoryview(bytes(nbytes)), priority)
        send.wake = lambda send: done.append(send.lane[2])
        links[0].engine.outgoing.announce(send)
        links[0].settle()
    while not links[0].engine.quiet:
        for link, wire in zip(reversed(links), reversed(fabric.wires), strict=True):
            wire.poll(lambda _, message, link=link: link.handle(message))  # type: ignore[misc]
    tags = {slot: tag for tag, slot in enumerate(dict.fromkeys(slot for slot, _ in fabric.wires[0].begun))}
    assert [tags[slot] for slot, _ in fabric.wires[0].begun] == [0] * WINDOW + [1, 1, 2, 3, 0, 0, 0, 0]
    assert fabric.wires[0].begun[-1][1] == 5
    assert done == [1, 2, 3, 0]


def test_what_had_come_before_the_goodbye_is_received_and_nothing_else() -> None:
    async def main(a: LoopMpi, b: LoopMpi) -> None:
        await a.endpoint(0).send(1, 1, b"in time")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.aclose)
            for call in (
                partial(b.endpoint(1).recv_into, 0, 2, bytearray(8)),
                partial(b.endpoint(1).send, 0, 2, bytes(LARGE)),
            ):
                with pytest.raises(LinkLostError, match=r"process 0 \(rank 0\) has left"):
                    await call()
            with pytest.raises(TransportClosedError, match="rank 0 to rank 1, tag 3: the transport has been closed"):
                await a.endpoint(0).send(1, 3, b"too late")
            out = bytearray(7)
            await b.endpoint(1).recv_into(0, 1, out)
            assert out == b"in time"
            nursery.start_soon(b.aclose)

    run_pair(main)


def test_closing_fails_what_waits() -> None:
    async def closed(call: Callable[[], Awaitable[None]]) -> None:
        with pytest.raises(TransportClosedError, match="has been closed"):
            await call()

    async def main(a: LoopMpi, b: LoopMpi) -> None:
        async with trio.open_nursery() as closing:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(closed, partial(a.endpoint(0).recv_into, 1, 2, bytearray(8)))
                nursery.start_soon(closed, partial(a.endpoint(0).send, 1, 2, bytes(LARGE)))
                await wait_all_tasks_blocked()
                closing.start_soon(a.aclose)
            closing.start_soon(b.aclose)  # not before: its goodbye would fail them, too
        assert b.statistics() == Statistics()

    run_pair(main)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"?" * HEADERS.head_bytes, "packet is marked b'????'; install the same overlap in every process"),
        (
            HEADERS.pack(MessageKind.OFFER, 0, 0, 1, 0, 0),
            "peer sent a message of ranks that it does not join: 0 to 1",
        ),
        (
            HEADERS.pack(MessageKind.EAGER, 0, 1, 5, 0),
            "peer sent a message of ranks that it does not join: 1 to 5",
        ),
        (HEADERS.pack(MessageKind.ACCEPT, 0, SLOTS), f"ACCEPT names slot {SLOTS} of {SLOTS}"),
        (HEADERS.pack(MessageKind.WITHDRAWN, 4), "peer answered offer 4, which does not wait for an answer"),
    ],
    ids=["noise", "offer from a stranger", "eager for a stranger", "slot", "withdrawn"],
)
def test_a_process_that_breaks_the_protocol_is_lost(message: bytes, reason: str) -> None:
    async def main() -> None:
        reports: list[str] = []
        fabric = Fabric(2)
        async with LoopMpi(fabric, 0, linger_s=0.0, report=reports.append).open() as a:
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(fails, partial(a.endpoint(0).recv_into, 1, 2, bytearray(8)))
                    nursery.start_soon(fails, partial(a.endpoint(0).send, 1, 2, bytes(LARGE)))
                    await wait_all_tasks_blocked()
                    fabric.wires[1].send_header(0, message)
            await fails(partial(a.endpoint(0).send, 1, 2, b"later"))
            async with trio.open_nursery() as nursery:  # its own ranks go on
                nursery.start_soon(a.endpoint(0).send, 0, 2, b"own")
                await a.endpoint(0).recv_into(0, 2, bytearray(3))

    async def fails(call: Callable[[], Awaitable[None]]) -> None:
        with pytest.raises(LinkLostError) as caught:
            await call()
        assert caught.value.reason.startswith(f"process 1 (rank 1) breaks the protocol: {reason}")

    trio.run(main)


def test_closing_alone_is_reported() -> None:
    async def main() -> None:
        reports: list[str] = []
        fabric = Fabric(3)
        async with LoopMpi(fabric, 1, linger_s=0.0, report=reports.append).open():
            pass
        assert reports == [
            "closed without agreement: process 1 waited 0.0 s for process 0 (rank 0), process 2 (rank 2)"
        ]
        assert fabric.wires[1].agreed is False

    trio.run(main)


def test_when_mpi_fails_everything_fails_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(handle: object) -> bool:
        raise LinkLostError("the MPI library failed: no such luck")

    async def fails(call: Callable[[], Awaitable[None]]) -> None:
        with pytest.raises(LinkLostError, match=r"rank \d to rank \d, tag \d: .* no such luck"):
            await call()

    async def main() -> None:
        fabric = Fabric(2)
        async with LoopMpi(fabric, 0).open() as a:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fails, partial(a.endpoint(0).recv_into, 1, 2, bytearray(8)))
                await wait_all_tasks_blocked()
                monkeypatch.setattr(fabric.wires[0], "poll", broken)
            await fails(partial(a.endpoint(0).send, 1, 3, b"later"))
        assert fabric.wires[0].agreed is False

    trio.run(main)


def test_a_defect_of_ours_is_raised_and_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(handle: object) -> bool:
        raise ZeroDivisionError("a defect")

    async def fails(call: Callable[[], Awaitable[None]]) -> None:
        with pytest.raises(LinkLostError, match="the transport has failed: ZeroDivisionError"):
            await call()

    async def main() -> None:
        fabric = Fabric(2)
        async with LoopMpi(fabric, 0).open() as a, trio.open_nursery() as nursery:
            nursery.start_soon(fails, partial(a.endpoint(0).recv_into, 1, 2, bytearray(8)))
            await wait_all_tasks_blocked()
            monkeypatch.setattr(fabric.wires[0], "poll", broken)

    with pytest.raises(ExceptionGroup) as caught:
        trio.run(main)
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]


def test_lent_memory_is_used_again() -> None:
    async def main(a: LoopMpi, b: LoopMpi) -> None:
        lent = []
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a.endpoint(0).send, 1, 0, bytes(LARGE))
                with await b.endpoint(1).recv(0, 0, LARGE) as delivery:
                    lent.append(delivery.view.obj)
        assert lent[0] is lent[1]

    run_pair(main)


def test_it_is_opened_once_and_before_it_is_used() -> None:
    async def main() -> None:
        transport = LoopMpi(Fabric(1), 0)
        with pytest.raises(TransportClosedError, match="not open yet"):
            await transport.endpoint(0).send(0, 0, b"")
        async with transport.open():
            pass
        with pytest.raises(TransportClosedError, match="make another LoopMpi"):
            async with transport.open():
                pass

    trio.run(main)


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        ([[0]], "the communicator has 2 processes: give every process ranks"),
        ([[0], [0]], "each rank once"),
        ([[0], []], "give every process ranks"),
        ([[0], [-1]], "once, from 0 up"),
        ([[0], [2**32]], "once, from 0 up"),
    ],
)
def test_placements_that_cannot_be(placement: list[list[int]], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        LoopMpi(Fabric(2), 0, placement=placement)


def test_only_local_ranks_have_endpoints() -> None:
    transport = LoopMpi(Fabric(2), 1, placement=[[0, 1], [2, 3]])
    assert (transport.ranks, transport.peers) == ((2, 3), (0, 1, 2, 3))
    assert repr(transport) == "<LoopMpi of ranks 2, 3>"
    with pytest.raises(ArgumentError, match="there is no rank 1 here; this process has ranks 2, 3"):
        transport.endpoint(1)


def test_pauses_grow_with_the_wait_and_more_slowly_while_bytes_move() -> None:
    for waited_s in (1e-3, 0.1):
        assert pause_s(waited_s, urgent=True, moving=False) == waited_s * PAUSE_PART
        assert pause_s(waited_s, urgent=True, moving=True) == waited_s * PAUSE_PART_MOVING
    for moving in (True, False):
        assert pause_s(1e9, urgent=True, moving=moving) == LONGEST_PAUSE_S
    assert pause_s(0.0, urgent=False, moving=False) == LONGEST_PAUSE_S


def test_without_mpi4py_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(ImportError, match=r"mpi4py is not installed: pip install mpi4py"):
        Mpi()


def test_importing_does_not_start_mpi() -> None:
    code = "import sys, transports, transports.mpi; print(any(name.startswith('mpi4py') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
