"""Wires with a pace: plans against a wire simulated quantum by quantum, to the exact instant."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from transports import ArgumentError, LinkSpeed, NeuronLink, Paced, by_kind
from transports.paced import PlannedTransfer, PlannedWire

# -- paced, to the exact instant, in virtual time ----------------------------------------------------------------------

QUANTUM_S = 0.125
SPEED = LinkSpeed(latency_s=0.5, bandwidth_bytes_per_s=1024)


def paced(ranks: int = 2) -> Paced:
    return Paced(NeuronLink(ranks, thread_copy_bytes=None), links=lambda src, dst: SPEED, quantum_s=QUANTUM_S)


class Log:
    """Which messages were sent and received when, over an open transport."""

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


@asynccontextmanager
async def logged(transport: Paced | None = None) -> AsyncIterator[Log]:
    """Open a transport, of two ranks unless the test needs another one, and log its messages."""
    transport = transport or paced()
    async with transport.open():
        yield Log(transport)


async def test_latency_and_bandwidth_add_up(autojump_clock: MockClock) -> None:
    async with logged() as log:
        await log.exchange("one", 0, 1, 0, 1024)
        assert log.sent == log.received == {"one": 1.5}
        await log.exchange("two", 0, 1, 0, 0)
        assert log.received["two"] == 2.0


async def test_messages_share_a_wire_and_latencies_overlap(autojump_clock: MockClock) -> None:
    async with logged() as log:
        async with trio.open_nursery() as nursery:
            for tag in range(3):
                nursery.start_soon(log.exchange, str(tag), 0, 1, tag, 512)
        assert sorted(log.received.values()) == [1.0, 1.5, 2.0]


async def test_each_direction_of_each_pair_is_a_wire(autojump_clock: MockClock) -> None:
    async with logged(paced(3)) as log:
        async with trio.open_nursery() as nursery:
            for src, dst in ((0, 1), (1, 0), (0, 2), (2, 1), (1, 1)):
                nursery.start_soon(log.exchange, f"{src}{dst}", src, dst, 0, 1024)
        assert log.received == {"01": 1.5, "10": 1.5, "02": 1.5, "21": 1.5, "11": 0.0}


async def test_an_urgent_message_overtakes_at_a_quantum_boundary(autojump_clock: MockClock) -> None:
    async with logged() as log:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.exchange, "large", 0, 1, 0, 1024)
            await trio.sleep(0.3125)
            nursery.start_soon(log.exchange, "urgent", 0, 1, 1, 128, -1)
        assert log.received == {"urgent": 0.375 + 0.125 + 0.5, "large": 1.125 + 0.5}


async def test_the_most_urgent_of_one_instant_goes_first(autojump_clock: MockClock) -> None:
    async with logged() as log:
        async with trio.open_nursery() as nursery:
            for priority in (1, -1, 0):
                nursery.start_soon(log.exchange, str(priority), 0, 1, priority + 1, 512, priority)
        assert log.received == {"-1": 1.0, "0": 1.5, "1": 2.0}


async def test_a_cancelled_message_makes_room(autojump_clock: MockClock) -> None:
    async with logged() as log:
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0.3125):
                nursery.start_soon(log.exchange, "next", 0, 1, 1, 512, 1)
                await log.send("cancelled", 0, 1, 0, 1024)
        assert (log.sent, log.received) == ({"next": 1.375}, {"next": 1.375})
        assert log.transport.wire(1).unexpected() == []


async def test_order_survives_the_random_order_of_waking(autojump_clock: MockClock) -> None:
    async with logged() as log:
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


async def test_a_message_waits_for_a_late_receiver(autojump_clock: MockClock) -> None:
    async with logged() as log:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.send, "one", 0, 1, 0, 1024)
            await trio.sleep(10)
            await log.receive("one", 0, 1, 0, 1024)
        assert log.sent == log.received == {"one": 10.0}


async def test_links_without_a_speed_are_left_alone(autojump_clock: MockClock) -> None:
    inner = NeuronLink(3, thread_copy_bytes=None)
    async with logged(Paced(inner, links=lambda src, dst: SPEED if dst == 2 else None)) as log:
        await log.exchange("unpaced", 0, 1, 0, 2**20)
        await log.exchange("paced", 0, 2, 0, 512)
        assert log.received == {"unpaced": 0.0, "paced": 1.0}


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


# -- A wire's plan against a wire simulated quantum by quantum ---------------------------------------------------------

QUANTUM = 8  # ticks; a wire of one byte per tick makes every instant a whole number


@dataclass
class Message:
    at: int
    nbytes: int
    priority: int
    cancelled_at: float = math.inf
    arrivals: list[float] = field(default_factory=list)


def simulated(messages: list[Message]) -> dict[int, float]:
    """Send one quantum at a time, each of the message that is most urgent when the wire is free."""
    left = {i: message.nbytes for i, message in enumerate(messages)}
    done: dict[int, float] = {}
    now = 0
    while waiting := [i for i in left if i not in done and messages[i].cancelled_at > max(now, messages[i].at)]:
        ready = [i for i in waiting if messages[i].at <= now]
        if not ready:
            now = min(messages[i].at for i in waiting)
            continue
        chosen = min(ready, key=lambda i: (messages[i].priority, i))
        sent = min(QUANTUM, left[chosen])
        now += sent
        left[chosen] -= sent
        if not left[chosen]:
            done[chosen] = now
    return done


def planned(messages: list[Message], latency: int = 0) -> dict[int, float]:
    """Tell a wire what happens when, and read the last plan."""
    wire = PlannedWire(LinkSpeed(latency_s=latency, bandwidth_bytes_per_s=1), quantum_s=QUANTUM)
    calls = [(message.at, 0, i) for i, message in enumerate(messages)]
    calls += [
        (int(message.cancelled_at), 1, i) for i, message in enumerate(messages) if message.cancelled_at < math.inf
    ]
    transfers: dict[int, PlannedTransfer] = {}
    for at, is_cancel, i in sorted(calls):
        message = messages[i]
        if is_cancel:
            wire.remove(transfers[i], now_s=at)
        else:
            transfers[i] = wire.add(
                i, message.nbytes, priority=message.priority, now_s=at, planned=message.arrivals.append
            )
    return {i: message.arrivals[-1] for i, message in enumerate(messages)}


def build(at: int, nbytes: int, priority: int, cancelled_after: int | None) -> Message:
    return Message(at, nbytes, priority, math.inf if cancelled_after is None else at + cancelled_after)


MESSAGES = st.lists(
    st.builds(
        build,
        at=st.integers(0, 60),
        nbytes=st.integers(0, 50),
        priority=st.integers(-1, 1),
        cancelled_after=st.none() | st.integers(1, 40),
    ),
    max_size=8,
).map(lambda messages: sorted(messages, key=lambda message: message.at))


@given(MESSAGES)
def test_the_plan_is_what_a_quantum_by_quantum_wire_does(messages: list[Message]) -> None:
    expected = simulated(messages)
    plan = planned(messages)
    kept = {i for i, message in enumerate(messages) if expected.get(i, math.inf) < message.cancelled_at}
    assert {i: plan[i] for i in kept} == {i: expected[i] for i in kept}
    assert kept >= {i for i, message in enumerate(messages) if message.cancelled_at == math.inf}


def test_latency_comes_on_top_and_holds_nobody_up() -> None:
    messages = [Message(0, 10, 0), Message(0, 10, 0)]
    assert planned(messages, latency=100) == {0: 110, 1: 120}


def test_equals_never_change_a_plan() -> None:
    messages = [Message(at, 30, 0) for at in range(5)]
    planned(messages)
    assert [message.arrivals for message in messages] == [[30], [60], [90], [120], [150]]


def test_an_urgent_message_of_the_same_tag_waits_for_its_elder() -> None:
    wire = PlannedWire(LinkSpeed(latency_s=0, bandwidth_bytes_per_s=1), quantum_s=QUANTUM)
    elder, younger, other = (list[float]() for _ in range(3))
    wire.add(0, 20, priority=0, now_s=0, planned=elder.append)
    wire.add(0, 20, priority=-9, now_s=0, planned=younger.append)
    wire.add(1, 20, priority=-1, now_s=0, planned=other.append)
    assert (elder, younger, other) == ([20, 40], [40, 60], [20])


def test_an_elder_that_has_left_holds_nobody_back() -> None:
    wire = PlannedWire(LinkSpeed(latency_s=0, bandwidth_bytes_per_s=1), quantum_s=QUANTUM)
    urgent, other = list[float](), list[float]()
    wire.add(0, 20, priority=0, now_s=0, planned=lambda _: None)
    wire.add(1, 20, priority=-1, now_s=100, planned=other.append)
    wire.add(0, 20, priority=-9, now_s=100, planned=urgent.append)
    assert (urgent, other) == ([120], [120, 140])


def test_a_quantum_of_a_cancelled_message_leaves_in_full() -> None:
    messages = [Message(0, 30, 0, cancelled_at=9), Message(10, 10, 0)]
    assert planned(messages)[1] == simulated(messages)[1] == 2 * QUANTUM + 10


def test_an_empty_message_does_not_pass_a_more_urgent_one_of_its_instant() -> None:
    messages = [Message(5, 0, 0), Message(5, 10, -1)]
    assert planned(messages) == simulated(messages) == {0: 15, 1: 15}


def test_an_infinite_bandwidth_leaves_the_latency() -> None:
    wire = PlannedWire(LinkSpeed(latency_s=3, bandwidth_bytes_per_s=math.inf))
    arrivals = list[float]()
    for priority in (0, -1, 1):
        wire.add(priority + 1, 2**40, priority=priority, now_s=5, planned=arrivals.append)
    assert set(arrivals) == {8}
