"""Paced, to the exact instant, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from transports import ArgumentError, LinkSpeed, NeuronLink, Paced, by_kind

QUANTUM_S = 0.125
SPEED = LinkSpeed(latency_s=0.5, bandwidth_bytes_per_s=1024)


def paced(ranks: int = 2) -> Paced:
    return Paced(NeuronLink(ranks, thread_copy_bytes=None), links=lambda src, dst: SPEED, quantum_s=QUANTUM_S)


def run(main: Callable[[Log], Awaitable[None]], transport: Paced | None = None) -> None:
    """Run a test with an open transport: of two ranks, unless it needs another."""
    opened = transport or paced()

    async def within() -> None:
        async with opened.open():
            await main(Log(opened))

    trio.run(within, clock=MockClock(autojump_threshold=0))


class Log:
    """Who finished when."""

    def __init__(self, transport: Paced) -> None:
        self.transport = transport
        self.sent: dict[str, float] = {}
        self.received: dict[str, float] = {}

    async def exchange(self, name: str, src: int, dst: int, tag: int, nbytes: int, priority: int = 0) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.receive, name, src, dst, tag, nbytes)
            await self.send(name, src, dst, tag, nbytes, priority)

    async def send(self, name: str, src: int, dst: int, tag: int, nbytes: int, priority: int = 0) -> None:
        await self.transport.wire(src).send(dst, tag, bytes(nbytes), priority=priority)
        self.sent[name] = trio.current_time()

    async def receive(self, name: str, src: int, dst: int, tag: int, nbytes: int) -> None:
        (await self.transport.wire(dst).recv(src, tag, nbytes)).release()
        self.received[name] = trio.current_time()


def test_latency_and_bandwidth_add_up() -> None:
    async def main(log: Log) -> None:
        await log.exchange("one", 0, 1, 0, 1024)
        assert log.sent == log.received == {"one": 1.5}
        await log.exchange("two", 0, 1, 0, 0)
        assert log.received["two"] == 2.0

    run(main)


def test_messages_share_a_wire_and_latencies_overlap() -> None:
    async def main(log: Log) -> None:
        async with trio.open_nursery() as nursery:
            for tag in range(3):
                nursery.start_soon(log.exchange, str(tag), 0, 1, tag, 512)
        assert sorted(log.received.values()) == [1.0, 1.5, 2.0]

    run(main)


def test_each_direction_of_each_pair_is_a_wire() -> None:
    async def main(log: Log) -> None:
        async with trio.open_nursery() as nursery:
            for src, dst in ((0, 1), (1, 0), (0, 2), (2, 1), (1, 1)):
                nursery.start_soon(log.exchange, f"{src}{dst}", src, dst, 0, 1024)
        assert log.received == {"01": 1.5, "10": 1.5, "02": 1.5, "21": 1.5, "11": 0.0}

    run(main, paced(3))


def test_an_urgent_message_overtakes_at_a_quantum_boundary() -> None:
    async def main(log: Log) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.exchange, "large", 0, 1, 0, 1024)
            await trio.sleep(0.3125)
            nursery.start_soon(log.exchange, "urgent", 0, 1, 1, 128, -1)
        assert log.received == {"urgent": 0.375 + 0.125 + 0.5, "large": 1.125 + 0.5}

    run(main)


def test_the_most_urgent_of_one_instant_goes_first() -> None:
    async def main(log: Log) -> None:
        async with trio.open_nursery() as nursery:
            for priority in (1, -1, 0):
                nursery.start_soon(log.exchange, str(priority), 0, 1, priority + 1, 512, priority)
        assert log.received == {"-1": 1.0, "0": 1.5, "1": 2.0}

    run(main)


def test_a_cancelled_message_makes_room() -> None:
    async def main(log: Log) -> None:
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0.3125):
                nursery.start_soon(log.exchange, "next", 0, 1, 1, 512, 1)
                await log.send("cancelled", 0, 1, 0, 1024)
        assert (log.sent, log.received) == ({"next": 1.375}, {"next": 1.375})
        assert log.transport.wire(1).unexpected() == []

    run(main)


def test_order_survives_the_random_order_of_waking() -> None:
    async def main(log: Log) -> None:
        transport = log.transport
        got: list[int] = []
        async with trio.open_nursery() as nursery:
            for i in range(30):
                nursery.start_soon(transport.wire(0).send, 1, 0, bytes(i % 2))
                await trio.testing.wait_all_tasks_blocked()
            for i in range(30):
                with await transport.wire(1).recv(0, 0, i % 2) as delivery:
                    got.append(delivery.view.nbytes)
        assert got == [0, 1] * 15

    run(main)


def test_a_message_waits_for_a_late_receiver() -> None:
    async def main(log: Log) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.send, "one", 0, 1, 0, 1024)
            await trio.sleep(10)
            await log.receive("one", 0, 1, 0, 1024)
        assert log.sent == log.received == {"one": 10.0}

    run(main)


def test_links_without_a_speed_are_left_alone() -> None:
    async def main(log: Log) -> None:
        await log.exchange("unpaced", 0, 1, 0, 2**20)
        await log.exchange("paced", 0, 2, 0, 512)
        assert log.received == {"unpaced": 0.0, "paced": 1.0}

    inner = NeuronLink(3, thread_copy_bytes=None)
    run(main, Paced(inner, links=lambda src, dst: SPEED if dst == 2 else None))


def test_speed_by_kind_of_link() -> None:
    speed_of = by_kind(lambda src, dst: "near" if src == dst else "far", {"far": SPEED})
    assert speed_of(0, 1) is SPEED
    with pytest.raises(ArgumentError, match=r"^no speed for links of kind 'near'; speeds names 'far'$"):
        speed_of(0, 0)


@pytest.mark.parametrize(("latency_s", "bandwidth"), [(-1, 1), (math.inf, 1), (math.nan, 1), (0, 0), (0, math.nan)])
def test_impossible_speeds_are_rejected(latency_s: float, bandwidth: float) -> None:
    with pytest.raises(ArgumentError, match="it must be"):
        LinkSpeed(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)


@pytest.mark.parametrize("quantum_s", [0, -1, math.inf, math.nan])
def test_impossible_quanta_are_rejected(quantum_s: float) -> None:
    with pytest.raises(ArgumentError, match="quantum_s"):
        Paced(NeuronLink(1), links=lambda src, dst: None, quantum_s=quantum_s)


def test_it_says_what_it_wraps_and_that_memory_is_no_short_cut() -> None:
    assert repr(paced()) == "<Paced around <NeuronLink of ranks 0, 1>>"
    assert not paced().shares_memory([0, 1])
