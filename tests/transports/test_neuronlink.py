"""NeuronLink beyond the contract: no copies, no leftovers, threads only where asked for."""

import gc
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from transports import ArgumentError, Envelope, NeuronLink, TransportClosedError, TransportError, neuronlink

THREADED = 1000


def link_of_two() -> NeuronLink:
    return NeuronLink(2, thread_copy_bytes=THREADED)


async def test_recv_lends_the_senders_own_memory() -> None:
    link = link_of_two()
    data = np.arange(1000.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.wire(0).send, 1, 0, data)
        with await link.wire(1).recv(0, 0, data.nbytes) as delivery:
            lent = np.frombuffer(delivery.view, np.float64)
            assert np.shares_memory(lent, data)


async def test_the_sender_of_a_message_whose_delivery_is_dropped_fails() -> None:
    link = link_of_two()

    async def receive() -> None:
        await link.wire(1).recv(0, 7, 8)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        with pytest.raises(TransportError, match=r"^the receiver dropped the Delivery of this message without"):
            await link.wire(0).send(1, 7, bytes(8))


@pytest.mark.parametrize("nbytes", [8, THREADED])
@pytest.mark.parametrize("receive_first", [True, False])
async def test_the_sender_is_suspended_until_the_release(nbytes: int, receive_first: bool) -> None:
    events: list[str] = []

    async def send(link: NeuronLink) -> None:
        await link.wire(0).send(1, 0, bytes(nbytes))
        events.append("send returned")

    async def receive(link: NeuronLink) -> None:
        with await link.wire(1).recv(0, 0, nbytes):
            await wait_all_tasks_blocked()
            events.append("released")

    link = link_of_two()
    async with trio.open_nursery() as nursery:
        for call in (receive, send) if receive_first else (send, receive):
            nursery.start_soon(call, link)
            await wait_all_tasks_blocked(0.001)
    assert events == ["released", "send returned"]


@pytest.mark.parametrize("receive_first", [True, False])
@pytest.mark.parametrize(("nbytes", "copies"), [(THREADED - 1, 0), (THREADED, 1)])
async def test_large_copies_and_only_those_are_made_in_threads(
    nbytes: int, copies: int, receive_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    real = neuronlink.start_thread_soon

    def counted(copy: partial[None], deliver: Callable[..., object]) -> None:
        seen.append(copy.func)
        real(copy, deliver)

    monkeypatch.setattr(neuronlink, "start_thread_soon", counted)
    data, out = np.random.default_rng(0).bytes(nbytes), bytearray(nbytes)
    link = link_of_two()
    calls = [partial(link.wire(0).send, 1, 0, data), partial(link.wire(1).recv_into, 0, 0, out)]
    async with trio.open_nursery() as nursery:
        for call in reversed(calls) if receive_first else calls:
            nursery.start_soon(call)
            await wait_all_tasks_blocked()
    assert (seen, bytes(out)) == ([np.copyto] * copies, data)


async def test_a_receive_that_is_cancelled_while_a_thread_copies_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = trio.CancelScope()
    real = neuronlink.start_thread_soon

    def cancel_then_copy(copy: partial[None], deliver: Callable[..., object]) -> None:
        scope.cancel()
        real(copy, deliver)

    monkeypatch.setattr(neuronlink, "start_thread_soon", cancel_then_copy)
    out = bytearray(THREADED)
    link = link_of_two()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.wire(0).send, 1, 0, b"x" * THREADED)
        with scope:
            await link.wire(1).recv_into(0, 0, out)
    assert scope.cancel_called
    assert not scope.cancelled_caught
    assert out == b"x" * THREADED


async def test_unexpected_messages_are_named_and_nothing_stays_behind() -> None:
    link = NeuronLink(3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.wire(0).send, 1, 4, b"123")
        await wait_all_tasks_blocked()
        nursery.start_soon(link.wire(0).send, 1, 4, b"4")
        nursery.start_soon(link.wire(2).recv, 1, 5, 6)
        await wait_all_tasks_blocked()
        first, second = Envelope(src=0, dst=1, tag=4, nbytes=3), Envelope(src=0, dst=1, tag=4, nbytes=1)
        assert link.wire(1).unexpected() == [first, second]
        assert link.wire(2).unexpected() == []
        assert [*link.mailboxes[2].receives] == [(1, 2, 5)]
        (await link.wire(1).recv(0, 4, 3)).release()
        nursery.cancel_scope.cancel()
    assert link.wire(1).unexpected() == []
    assert not any(box.sends or box.receives for box in link.mailboxes.values())


@pytest.mark.slow
async def test_no_queue_remains_of_a_tag_that_is_used_no_more() -> None:
    async def exchange(link: NeuronLink, tag: int) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.wire(0).send, 1, tag, b"123")
            nursery.start_soon(link.wire(2).recv, 1, tag, 6)
            (await link.wire(1).recv(0, tag, 3)).release()
            nursery.cancel_scope.cancel()

    link = NeuronLink(3)
    before = queues()
    for tag in range(100):
        await exchange(link, tag)
    assert queues() < before + 50


def queues() -> int:
    """Return how many deques there are in this process: what else it does may make or drop a few."""
    gc.collect()
    return sum(type(found) is deque for found in gc.get_objects())


@pytest.mark.parametrize("receive_first", [True, False])
@pytest.mark.parametrize("lend", [True, False])
async def test_no_hold_on_a_buffer_remains(lend: bool, receive_first: bool) -> None:
    async def send(link: NeuronLink, data: bytearray) -> None:
        await link.wire(0).send(1, 0, data)
        data.append(1)  # raises BufferError while anybody holds a view

    async def receive(link: NeuronLink, out: bytearray) -> None:
        if lend:
            (await link.wire(1).recv(0, 0, 8)).release()
        else:
            await link.wire(1).recv_into(0, 0, out)
            out.append(1)

    for _ in range(8):  # the order in which the two tasks wake up is random
        link, data, out = NeuronLink(2), bytearray(8), bytearray(8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive if receive_first else send, link, out if receive_first else data)
            await wait_all_tasks_blocked()
            nursery.start_soon(send if receive_first else receive, link, data if receive_first else out)
        assert (len(data), len(out)) == (9, 8 if lend else 9)


async def test_a_rank_can_send_to_itself() -> None:
    end = link_of_two().wire(1)
    out = bytearray(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end.send, 1, 0, b"me")
        await end.recv_into(1, 0, out)
    assert out == b"me"


async def test_closing_ends_what_waits_and_what_comes(autojump_clock) -> None:
    errors: list[str] = []

    async def note(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(TransportClosedError) as caught, trio.fail_after(1):
            await call()
        errors.append(str(caught.value))

    link = NeuronLink(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(note, partial(link.wire(0).send, 1, 3, b"x"))
        nursery.start_soon(note, partial(link.wire(1).recv, 0, 4, 1))
        await wait_all_tasks_blocked()
        await link.aclose()
    await note(partial(link.wire(0).recv_into, 1, 5, bytearray(1)))
    await link.aclose()
    assert sorted(errors) == [
        "message from rank 0 to rank 1, tag 3: the transport has been closed",
        "message from rank 0 to rank 1, tag 4: the transport has been closed",
        "message from rank 1 to rank 0, tag 5: the transport has been closed; make another one",
    ]


async def test_closing_lets_a_matched_message_finish() -> None:
    link = NeuronLink(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.wire(0).send, 1, 3, b"x")
        with await link.wire(1).recv(0, 3, 1) as delivery:
            await link.aclose()
            assert bytes(delivery.view) == b"x"


@pytest.mark.parametrize("ranks", [0, -1, (), (1, 1), (0, -1)])
def test_bad_ranks_are_rejected(ranks: int | tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="name at least one rank, each once, from 0 up"):
        NeuronLink(ranks)


def test_unknown_ranks_are_named() -> None:
    with pytest.raises(
        ArgumentError, match=r"^there is no rank 7 here; this NeuronLink joins ranks 0-3; pass one of them$"
    ):
        NeuronLink(4).wire(7)


def test_names() -> None:
    link = NeuronLink((4, 5, 6))
    assert (repr(link), link.ranks, link.peers, link.shares_memory([6, 4])) == (
        "<NeuronLink of ranks 4-6>",
        (4, 5, 6),
        (4, 5, 6),
        True,
    )
    assert not link.shares_memory([4, 7])
    assert link.wire(5) is link.wire(5)
