"""Boards that are closed, and the waiting of a process for packets of others."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import Mock

import pytest
import trio
from transports.shared_memory.waiting import Waiting, fence, let_threads_run, looking
from trio.testing import wait_all_tasks_blocked

from transports.common import Board
from transports.shared_memory import waiting
from transports.shared_memory.peer_memory import WORDS, Word

from ..efa.processes import TIMEOUT_S, opened, run
from .processes import Host


@asynccontextmanager
async def hosted(**settings: object) -> AsyncIterator[tuple[Waiting, Callable[[], None]]]:
    """The waiting of one of two processes, and how the other rings it."""
    host = Host(**settings)
    async with opened(host.transports):
        here, there = host.transports
        yield here.waiting, there.links[0].ring


def test_a_closed_board_leaves_nothing() -> None:
    """Its memory is lent again, and what another process tells late is not kept."""

    async def main() -> None:
        host = Host()
        async with opened(host.transports):
            boards_of = [transport._boards for transport in host.transports]
            lent = [each.shelf._heap.lent_bytes for each in boards_of]
            here, there = await _opened(host, 5)
            unopened = [transport.board(6, (0, 1)) for transport in host.transports]
            unopened[0].open(0, lambda: None)
            for board in (here, there, *unopened):
                board.close()
            await wait_all_tasks_blocked()
            for each, before in zip(boards_of, lent, strict=True):
                each.shelf._sort_in()
                assert (each._open, each._told, each.shelf._heap.lent_bytes) == ({}, {}, before)

    run(main)


async def _opened(host: Host, key: int) -> list[Board]:
    found = [transport.board(key, (0, 1)) for transport in host.transports]
    ready = [trio.Event(), trio.Event()]
    for position, board in enumerate(found):
        assert board is not None
        board.open(position, ready[position].set)
    for event in ready:
        await event.wait()
    return [board for board in found if board is not None]


class Waiter:
    """Someone who waits until a test lets others come."""

    def __init__(self) -> None:
        self.others_came = False
        self.looked = trio.Event()

    def look(self) -> None:
        if self.others_came:
            self.looked.set()


@contextmanager
def elsewhere() -> Iterator[SimpleQueue[Callable[[], None] | None]]:
    """A thread that does what it is told, at any time as seen by the loop: asleep, awake, or about to sleep."""
    told: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def work() -> None:
        for act in iter(told.get, None):
            act()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield told
    finally:
        told.put(None)
        thread.join(TIMEOUT_S)


def test_nobody_who_waits_is_overlooked_whenever_the_others_come() -> None:
    async def main() -> int:
        seen = 0
        async with hosted() as (here, ring):
            with elsewhere() as told:
                for passes in range(300):
                    waiter = Waiter()

                    def come(waiter: Waiter = waiter) -> None:
                        waiter.others_came = True
                        fence()
                        ring()

                    here.watch(waiter)
                    told.put(come)
                    for _ in range(passes % 5):
                        await trio.lowlevel.checkpoint()
                    await waiter.looked.wait()
                    here.unwatch(waiter)
                    seen += 1
        return seen

    assert run(main) == 300


def test_a_process_that_is_awake_is_not_rung_and_looks_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    rung = Mock()
    monkeypatch.setattr(waiting, "FENCED", True)

    async def main() -> None:
        async with hosted() as (here, ring):
            waiter = Waiter()
            here.watch(waiter)
            await wait_all_tasks_blocked(0.01)  # it has slept, and said so
            waiter.others_came = True
            with monkeypatch.context() as patched:
                patched.setattr(os, "eventfd_write", rung)
                ring()
            await waiter.looked.wait()

    run(main)
    assert not rung.called


@pytest.mark.parametrize(
    ("others", "grouped", "session", "expected"),
    [
        ([7], "1", 1, (300e-6, let_threads_run)),
        ([7, 8], "0", 1, (300e-6, os.sched_yield)),
        ([7, 8], "1", 0, (300e-6, os.sched_yield)),
        ([7, 8], "1", 1, (0.0, os.sched_yield)),
        ([7, 8], None, 1, (300e-6, os.sched_yield)),
    ],
)
def test_others_are_let_run_where_they_can_be(
    others: list[int],
    grouped: str | None,
    session: int,
    expected: tuple[float, Callable[[], object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch = tmp_path / "switch"
    if grouped is not None:
        switch.write_text(f"{grouped}\n")
    monkeypatch.setattr(waiting, "AUTOGROUP", switch)
    monkeypatch.setattr(os, "getsid", lambda pid: session if pid else 0)
    assert looking(others, 2) == expected


def test_who_is_about_to_wait_may_look_for_a_moment() -> None:
    async def main() -> None:
        async with hosted() as (here, _):
            came, waiter = Waiter(), Waiter()
            came.others_came = True
            assert here.wait(came)
            assert [here.wait(waiter) for _ in range(5)] == [False] * 5
            assert here.wait(came)

    run(main)


@pytest.fixture
def napped(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[bool]:
    """Let naps last until they are ended; says when one has begun."""
    begun: SimpleQueue[bool] = SimpleQueue()
    waits = Word.wait

    def wait(word: Word, seen: int, timeout_s: float) -> None:
        begun.put(True)
        waits(word, seen, timeout_s)

    monkeypatch.setattr(Word, "wait", wait)
    monkeypatch.setattr(waiting, "_NAP_S", 10 * TIMEOUT_S)
    return begun


def come(waiter: Waiter, ring: Callable[[], None]) -> None:
    waiter.others_came = True
    ring()


@pytest.mark.skipif(not WORDS, reason="needs Linux on x86-64")
@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (lambda here, ring, waiter: come(waiter, ring), True),
        (lambda here, ring, waiter: here.unwatch(waiter), False),
        (lambda here, ring, waiter: here.watch(Waiter()), False),
    ],
    ids=["whoever comes", "the end", "who else waits"],
)
def test_a_thread_that_naps_in_place_of_the_loop_is_woken(
    ends: Callable[[Waiting, Callable[[], None], Waiter], object], expected: bool, napped: SimpleQueue[bool]
) -> None:
    found: list[bool] = []

    async def main() -> None:
        async with hosted() as (here, ring):
            waiter = Waiter()
            here.watch(waiter)
            assert here.rouse(waiter)
            thread = threading.Thread(target=lambda: found.append(here.linger(waiter, None)))
            thread.start()
            await trio.to_thread.run_sync(napped.get)
            await wait_all_tasks_blocked(0.01)  # the loop sleeps again, and leaves it to the thread
            ends(here, ring, waiter)
            await trio.to_thread.run_sync(thread.join, TIMEOUT_S)
            assert not thread.is_alive()

    run(main)
    assert found == [expected]


@pytest.mark.skipif(not WORDS, reason="needs Linux on x86-64")
def test_a_second_thread_that_waits_for_the_same_leaves_the_nap_of_the_first_alone(
    napped: SimpleQueue[bool],
) -> None:
    """It may not take the loop's place, nor nap: leaving, it would clear the mark that lets a peer wake the first."""
    found: list[bool] = []

    async def main() -> None:
        async with hosted() as (here, ring):
            waiter = Waiter()
            here.watch(waiter)
            assert here.rouse(waiter)
            first = threading.Thread(target=lambda: found.append(here.linger(waiter, None)))
            first.start()
            await trio.to_thread.run_sync(napped.get)
            assert not here.rouse(waiter)
            assert not await trio.to_thread.run_sync(here.linger, waiter, 0.01)
            assert napped.empty()
            come(waiter, ring)  # which rings only those that are marked
            await trio.to_thread.run_sync(first.join, TIMEOUT_S)
            assert not first.is_alive()

    run(main)
    assert found == [True]


def test_a_nap_lasts_no_longer_than_it_may(napped: SimpleQueue[bool]) -> None:
    async def main() -> None:
        async with hosted() as (here, _):
            waiter = Waiter()
            here.watch(waiter)
            assert here.rouse(waiter)
            assert not await trio.to_thread.run_sync(here.linger, waiter, 0.01)

    run(main)
