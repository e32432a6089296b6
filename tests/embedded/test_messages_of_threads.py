"""Messages of threads: begun and taken in by the thread itself while its loop sleeps, in any mixture."""

import math
import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import overlap
from overlap.processes import control
from overlap.runtime.communicators import Communicators
from overlap.runtime.handover import Handover
from overlap.runtime.inbox import Inbox
from overlap.runtime.lane import Queue
from transports.shared_memory.engine import BUILT

from .connecting import TIMEOUT_S, connected

ROUNDS = 40
# Short, up to two thirds of a ring, and longer than one.
ELEMENTS = (1, 2_000, 20_000, 100_000, 300_000)


def told(src: int, tag: int, number: int, size: int) -> np.ndarray[Any, Any]:
    return np.arange(size, dtype=np.float64) + src * 1000 + tag * 100 + number


def exchange(world: overlap.Connection, tag: int, seed: int) -> int:
    """Send to and receive from the other rank, in an order that both derive from a seed; return how many came."""
    order, rank = random.Random(seed), world.rank
    me, came = rank.rank, 0
    for number in range(ROUNDS):
        size, first, waits = order.choice(ELEMENTS), order.randrange(2), order.random() < 0.7
        mine, theirs = told(me, tag, number, size), told(1 - me, tag, number, size)
        calls: list[Callable[[], Any]] = [
            partial(rank.send, mine, 1 - me, tag=tag),
            partial(rank.recv, np.empty(size), 1 - me, tag=tag),
        ]
        if first != me:
            calls.reverse()
        futures = []
        for call in calls:
            futures.append(call())
            if waits and size < 5_000:  # longer ones wait for their receiver
                futures[-1].result(TIMEOUT_S)
        found = [future.result(TIMEOUT_S) for future in futures]
        np.testing.assert_array_equal(found[0 if first != me else 1], theirs)
        came += 1
    return came


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_messages_come_whole_and_in_order(threads: int, seed: int) -> None:
    def program(world: overlap.Connection) -> list[int]:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda tag: exchange(world, tag, seed * 10 + tag), range(threads)))

    assert connected(program, 2) == [[ROUNDS] * threads] * 2


def test_a_thread_takes_in_what_tasks_and_callbacks_wait_for() -> None:
    """The packets that a thread finds may end what a task awaits, or what calls back: the loop does that."""

    def program(world: overlap.Connection) -> list[int]:
        rank, heard, ended = world.rank, list[int](), threading.Event()
        me = rank.rank

        async def echo() -> int:
            total = 0
            for number in range(ROUNDS):
                sent = rank.send(np.array([number]), 1 - me, tag=7)
                total += int((await rank.recv(np.empty(1, int), 1 - me, tag=7))[0])
                await sent
            return total

        def next_one(number: int) -> None:
            rank.send(np.array([number]), 1 - me, tag=8)
            future = rank.recv(np.empty(1, int), 1 - me, tag=8)
            future.add_done_callback(lambda it: heard.append(int(it.result()[0])))
            if number + 1 == ROUNDS:
                future.add_done_callback(lambda _: ended.set())

        async def any_source() -> int:
            total = 0
            for _ in range(ROUNDS):
                total += int((await rank.recv(np.empty(1, int), None, tag=9))[0])
            return total

        with ThreadPoolExecutor(2) as pool:
            awaited = pool.submit(world.run, echo)
            found = pool.submit(world.run, any_source)
            for number in range(ROUNDS):
                next_one(number)
                rank.send(np.array([number]), 1 - me, tag=9)
                exchanged = rank.recv(np.empty(1, int), 1 - me, tag=6)
                rank.send(np.array([number]), 1 - me, tag=6).result(TIMEOUT_S)
                assert exchanged.result(TIMEOUT_S)[0] == number
            assert ended.wait(TIMEOUT_S)
            return [awaited.result(TIMEOUT_S), found.result(TIMEOUT_S), sum(heard), heard == sorted(heard)]

    total = ROUNDS * (ROUNDS - 1) // 2
    assert connected(program, 2) == [[total, total, total, True]] * 2


def test_a_waiting_thread_leaves_to_the_loop_what_wakes_tasks() -> None:
    """One message ends what a task awaits, another one what calls back; the third is the thread's own."""

    def sender(world: overlap.Connection) -> list[Any]:
        for number in range(ROUNDS):
            begun.wait(TIMEOUT_S)
            for tag in (7, 8, 6):
                world.rank.send(np.array([number]), 0, tag=tag)
        return []

    def receiver(world: overlap.Connection) -> list[Any]:
        rank, heard, awaited = world.rank, list[int](), list[int]()
        told = threading.Semaphore(0)

        async def receive(number: int) -> None:
            future = rank.recv(np.empty(1, int), 1, tag=7)
            told.release()
            awaited.append(int((await future)[0]))

        def hear(future: Any) -> None:
            heard.append(int(future.result()[0]))
            told.release()

        with ThreadPoolExecutor(1) as pool:
            for number in range(ROUNDS):
                task = pool.submit(world.run, receive, number)
                told.acquire()
                rank.recv(np.empty(1, int), 1, tag=8).add_done_callback(hear)
                own = rank.recv(np.empty(1, int), 1, tag=6)
                begun.wait(TIMEOUT_S)
                assert own.result(TIMEOUT_S)[0] == number
                task.result(TIMEOUT_S)
                assert told.acquire(timeout=TIMEOUT_S)
        return [heard, awaited]

    begun = threading.Barrier(2)
    found = connected(lambda world: sender(world) if world.rank.rank else receiver(world), 2)
    assert found[0] == [[*range(ROUNDS)]] * 2


in_place = Handover.run_in_place


def patient_in_place(handover: Handover, work: Callable[[], Any], otherwise: object) -> Any:
    """Work in the loop's place as soon as the loop sleeps, however long that takes."""
    results = list[Any]()

    def once() -> bool:
        results.append(work())
        return True

    gate = threading.Event()
    while not in_place(handover, once, False):
        if handover.turn is None:  # it lets nobody in
            return otherwise
        gate.wait(0.001)
    return results[0]


@pytest.mark.parametrize("order", ["message first", "receive first"])
def test_a_long_message_that_a_thread_has_accepted_is_read_though_it_waits_no_more(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread meets its announcement, and turns to other things: the loop is to read it, or its sender waits."""

    def sender(world: overlap.Connection) -> list[bool]:
        for number in range(ROUNDS):
            meeting.wait(TIMEOUT_S)
            sent = world.rank.send(np.full(300_000, number), 1, tag=1)
            world.rank.send(np.array([number]), 1, tag=2).result(TIMEOUT_S)
            announced.release()
            sent.result(TIMEOUT_S)
            taken.release()
        return []

    def receiver(world: overlap.Connection) -> list[bool]:
        rank, found = world.rank, list[bool]()
        for number in range(ROUNDS):
            if number == 5:
                monkeypatch.setattr(Handover, "run_in_place", patient_in_place)
            meeting.wait(TIMEOUT_S)
            if order == "message first":
                assert announced.acquire(timeout=TIMEOUT_S)
            long = rank.recv(np.empty(300_000, int), 0, tag=1)
            assert rank.recv(np.empty(1, int), 0, tag=2).result(TIMEOUT_S)[0] == number
            found.append(taken.acquire(timeout=TIMEOUT_S / 4))
            assert (long.result(TIMEOUT_S) == number).all()
        return found

    meeting = threading.Barrier(2)
    announced, taken = threading.Semaphore(0), threading.Semaphore(0)
    found = connected(lambda world: receiver(world) if world.rank.rank else sender(world), 2)
    assert found[1] == [True] * ROUNDS


@pytest.mark.skipif(not BUILT, reason="the engine was not compiled")
def test_a_message_for_which_there_is_room_leaves_before_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one waits for its receiver, and comes in its turn."""
    # now and then each process looks at the messages that nobody wants, which takes them from the ring
    monkeypatch.setattr(Communicators, "ask_others", lambda *_: False)

    def program(world: overlap.Connection) -> list[float]:
        rank, found = world.rank, list[float]()
        for turn in range(3):
            if rank.rank == 0:
                first, second = (rank.send(np.full(100_000, turn + part), 1) for part in (0.25, 0.5))
                first.result(TIMEOUT_S)
                assert not second.done
                meeting.wait(TIMEOUT_S)
                second.result(TIMEOUT_S)
            else:
                meeting.wait(TIMEOUT_S)
                found += [float(rank.recv(np.empty(100_000), 0).result(TIMEOUT_S).mean()) for _ in range(2)]
            meeting.wait(TIMEOUT_S)
        return found

    meeting = threading.Barrier(2)
    assert connected(program, 2) == [[], [turn + part for turn in range(3) for part in (0.25, 0.5)]]


def test_a_thread_waits_on_for_a_message_that_another_thread_has_given_up_waiting_for() -> None:
    def receiver(world: overlap.Connection) -> int:
        future = world.rank.recv(np.empty(1, int), 1)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(future.result, TIMEOUT_S)
            with pytest.raises(TimeoutError):
                future.result(0.1)
            waited.set()
            return int(other.result(TIMEOUT_S)[0])

    def sender(world: overlap.Connection) -> int:
        assert waited.wait(TIMEOUT_S)
        return int(world.rank.send(np.array([7]), 0).result(TIMEOUT_S) is None)

    waited = threading.Event()
    assert connected(lambda world: sender(world) if world.rank.rank else receiver(world), 2)[0] == 7


@pytest.mark.skipif(not BUILT, reason="the engine was not compiled")
def test_a_short_message_wakes_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a peer and a size are known, a thread begins and ends its messages itself, if its loop sleeps."""
    asked: list[str] = []
    post = Handover.post

    def posting(handover: Handover, function: Callable[..., object], *args: object) -> None:
        asked.append(getattr(function, "__name__", ""))
        post(handover, function, *args)

    def program(world: overlap.Connection) -> None:
        rank = world.rank
        me = rank.rank
        for number in range(ROUNDS):
            if number == 5:
                meeting.wait(TIMEOUT_S)
                asked.clear()
                monkeypatch.setattr(Handover, "run_in_place", patient_in_place)
                meeting.wait(TIMEOUT_S)
            if me == number % 2:
                rank.send(np.array([number]), 1 - me).result(TIMEOUT_S)
            else:
                assert rank.recv(np.empty(1, int), 1 - me).result(TIMEOUT_S)[0] == number
        meeting.wait(TIMEOUT_S)
        seen.append(asked.count("_issue_on_loop"))
        meeting.wait(TIMEOUT_S)
        monkeypatch.setattr(Handover, "run_in_place", in_place)

    meeting, seen = threading.Barrier(2), list[int]()
    # an operation that waits for 50 ms is told of, and the next one is the business of the loop
    monkeypatch.setattr(control, "_LONG_NS", math.inf)
    monkeypatch.setattr(Handover, "post", posting)
    connected(program, 2)
    assert seen == [0, 0]


@pytest.mark.parametrize("transport", [None, "efa"], ids=["memory", "sockets"])
def test_messages_on_both_ways_come_although_both_ranks_close_meanwhile(transport: str | None) -> None:
    """Only one message of a lane is under way; the others wait for it, and so do their receives."""

    def program(world: overlap.Connection) -> list[Any]:
        rank, other = world.rank, 1 - world.rank.rank
        for number in range(8):
            rank.send(np.full(200_000, float(number)), other)
        return [rank.recv(((200_000,), "float64"), other) for _ in range(8)]

    for received in connected(program, 2, transport=transport):
        assert [{*future.result(0).tolist()} for future in received] == [{float(number)} for number in range(8)]


def test_receives_from_any_rank_that_nobody_sends_to_keep_no_rank_from_closing() -> None:
    """Both ranks close with a message that nobody receives, and such a receive, which may not take it."""

    def program(world: overlap.Connection) -> None:
        rank, other = world.rank, 1 - world.rank.rank
        sent.put(rank.send(np.ones(200_000), other, tag=1))
        received.put(rank.recv(((200_000,), "float64"), tag=2))

    sent, received = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(connected, program, 2)
        sends, receives = [[each.get(timeout=TIMEOUT_S) for _ in range(2)] for each in (sent, received)]
        try:
            for send in sends:
                assert send.result(TIMEOUT_S) is None
        finally:
            assert all(receive.cancel() for receive in receives)
        assert closing.result(TIMEOUT_S) == [None, None]


LONG = 600_000  # elements of a message that leaves over no wire before its receive


def test_a_rank_that_closes_reports_that_its_receive_from_any_rank_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks close with such a receive, and a message for each other; each receive takes that of a third rank."""
    closing, send_closing, search = set[int](), control.ControlPlane.send_closing, Inbox._search_for_message

    def announce(plane: control.ControlPlane, rank: int) -> None:
        send_closing(plane, rank)
        closing.add(rank)

    def search_late(inbox: Inbox, waiting: Queue, arrived: Any = None) -> None:
        if closing >= {0, 1}:
            search(inbox, waiting, arrived)
        else:
            inbox.shared.call_later(partial(search_late, inbox, waiting, arrived))

    def program(world: overlap.Connection) -> Any:
        rank = world.rank
        if rank.rank == 2:
            for number in range(4):
                rank.send(np.full((LONG, 1)[number // 2], 2.0), number % 2, tag=number // 2)
            return None
        rank.recv(np.empty(1), 2, tag=1).result(TIMEOUT_S)  # the message before it is announced
        received = rank.recv(np.empty(LONG))
        rank.send(np.zeros(LONG), 1 - rank.rank)
        return received

    monkeypatch.setattr(control.ControlPlane, "send_closing", announce)
    monkeypatch.setattr(Inbox, "_search_for_message", search_late)
    assert [set(received.result(0)) for received in connected(program, 3)[:2]] == [{2.0}] * 2
