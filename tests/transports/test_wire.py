"""A wire's plan against a wire simulated quantum by quantum."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from transports import LinkSpeed
from transports.paced import PlannedTransfer, PlannedWire

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
