"""Boards: what the ranks of a group have in common, and what they see of each other."""

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
from trio.testing import wait_all_tasks_blocked

from transports.common import OPERATIONS, PAYLOAD_BYTES, Board
from transports.shared_memory import waiting
from transports.shared_memory.board import BOARD_BYTES
from transports.shared_memory.peer_memory import WORDS, Word
from transports.shared_memory.waiting import fence, let_threads_run, looking

from ..efa.processes import TIMEOUT_S, opened, run
from .processes import Host

TAG = 7 << 8


@asynccontextmanager
async def boards(**settings: object) -> AsyncIterator[list[Board]]:
    """The board of ranks 0 and 1, as each of two processes sees it, opened by both."""
    host = Host(**settings)
    async with opened(host.transports):
        yield await _opened(host, 5)


@pytest.mark.parametrize("nbytes", [0, 8, 32, 33, PAYLOAD_BYTES])
def test_what_a_rank_brings_along_is_there_when_it_has_come(nbytes: int) -> None:
    async def main() -> None:
        async with boards() as (here, there):
            payload = bytes(i % 251 for i in range(nbytes))
            assert not there.reached(3, TAG, 1)
            here.arrive(0, 3, TAG, where=11, mode=2, payload=memoryview(payload))
            assert not there.reached(3, TAG, 1)
            there.arrive(1, 3, TAG)
            assert here.reached(3, TAG, 1)
            assert there.posted(0, 3) == (11, 2)
            assert there.payload(0, 3, nbytes) == payload

    run(main)


def test_what_was_said_first_stays_for_those_who_are_slower() -> None:
    async def main() -> None:
        async with boards() as (here, there):
            here.arrive(0, 3, TAG, where=11, mode=2)
            here.advance(0, 3, TAG, 2, result=99)
            here.advance(0, 3, TAG, 3)
            there.arrive(1, 3, TAG)
            assert there.posted(0, 3) == (11, 2)
            assert there.result(0, 3) == 99
            assert there.reached(3, TAG, 1)
            assert not there.reached(3, TAG, 2)

    run(main)


def test_another_operation_of_the_same_number_is_not_taken_for_it() -> None:
    async def main() -> None:
        async with boards() as (here, there):
            here.arrive(0, 3, TAG)
            there.arrive(1, 3, TAG + 256)
            assert not here.reached(3, TAG, 1)
            assert not there.reached(3, TAG + 256, 1)

    run(main)


@pytest.mark.parametrize("before", ["a board", "a loan"])
def test_a_board_is_as_new_whoever_had_its_memory(before: str) -> None:
    async def main() -> None:
        host = Host()
        async with opened(host.transports):
            used = await _opened(host, 5)
            loans = [board.lend(BOARD_BYTES) for board in used]
            for position, (board, loan) in enumerate(zip(used, loans, strict=True)):
                assert loan is not None
                board.arrive(position, 3 + OPERATIONS, TAG)
                loan.view[:] = b"x" * BOARD_BYTES
                board.close()
                if before == "a loan":  # what came back last is lent first
                    board.take_back(loan)
            for position, board in enumerate(await _opened(host, 6)):
                assert board.free(position, 3)
                assert not board.came(3)

    run(main)


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


def test_memory_comes_back_when_all_have_gone_on() -> None:
    async def main() -> None:
        async with boards() as (here, there):
            for position, board in enumerate((here, there)):
                board.arrive(position, 3, TAG)
            assert not here.passed(3, TAG, 3)
            here.advance(0, 3, TAG, 3)
            assert not here.passed(3, TAG, 3)
            there.arrive(1, 3 + OPERATIONS, TAG + 256)  # who came to a later one has done with this
            assert here.passed(3, TAG, 3)
            place = here.lend(5000)
            assert place is not None
            place.view[:] = b"x" * 5000
            assert there.mapped(0, place.where, 5000) == b"x" * 5000
            here.take_back(place)
            again = here.lend(5000)
            assert again is not None
            assert again.where == place.where

    run(main)


def test_memory_is_bounded() -> None:
    async def main() -> None:
        async with boards(limit_bytes=0) as (here, there):
            assert here.usable
            assert there.usable
            assert here.lend(1 << 20) is None

    run(main)


class Waiting:
    """Someone who waits at a board until a test lets others come."""

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
        async with boards() as (here, there):
            with elsewhere() as told:
                for passes in range(300):
                    waiting = Waiting()

                    def come(waiting: Waiting = waiting) -> None:
                        waiting.others_came = True
                        fence()
                        there.ring()

                    here.waiting.watch(waiting)
                    told.put(come)
                    for _ in range(passes % 5):
                        await trio.lowlevel.checkpoint()
                    await waiting.looked.wait()
                    here.waiting.unwatch(waiting)
                    seen += 1
        return seen

    assert run(main) == 300


def test_a_process_that_is_awake_is_not_rung_and_looks_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    rung = Mock()
    monkeypatch.setattr(waiting, "FENCED", True)

    async def main() -> None:
        async with boards() as (here, there):
            waiting = Waiting()
            here.waiting.watch(waiting)
            await wait_all_tasks_blocked(0.01)  # it has slept, and said so
            waiting.others_came = True
            with monkeypatch.context() as patched:
                patched.setattr(os, "eventfd_write", rung)
                there.ring()
            await waiting.looked.wait()

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
        async with boards() as (here, _):
            came, waiting = Waiting(), Waiting()
            came.others_came = True
            assert here.waiting.wait(came)
            assert [here.waiting.wait(waiting) for _ in range(5)] == [False] * 5
            assert here.waiting.wait(came)

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


def come(waiting: Waiting, there: Board) -> None:
    waiting.others_came = True
    there.ring()


@pytest.mark.skipif(not WORDS, reason="needs Linux on x86-64")
@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (lambda here, there, waiting: come(waiting, there), True),
        (lambda here, there, waiting: here.waiting.unwatch(waiting), False),
        (lambda here, there, waiting: here.waiting.watch(Waiting()), False),
    ],
    ids=["whoever comes", "the end", "who else waits"],
)
def test_a_thread_that_naps_in_place_of_the_loop_is_woken(
    ends: Callable[[Board, Board, Waiting], object], expected: bool, napped: SimpleQueue[bool]
) -> None:
    found: list[bool] = []

    async def main() -> None:
        async with boards() as (here, there):
            waiting = Waiting()
            here.waiting.watch(waiting)
            assert here.waiting.rouse(waiting)
            thread = threading.Thread(target=lambda: found.append(here.waiting.linger(waiting, None)))
            thread.start()
            await trio.to_thread.run_sync(napped.get)
            await wait_all_tasks_blocked(0.01)  # the loop sleeps again, and leaves it to the thread
            ends(here, there, waiting)
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
        async with boards() as (here, there):
            waiting = Waiting()
            here.waiting.watch(waiting)
            assert here.waiting.rouse(waiting)
            first = threading.Thread(target=lambda: found.append(here.waiting.linger(waiting, None)))
            first.start()
            await trio.to_thread.run_sync(napped.get)
            assert not here.waiting.rouse(waiting)
            assert not await trio.to_thread.run_sync(here.waiting.linger, waiting, 0.01)
            assert napped.empty()
            come(waiting, there)  # which rings only those that are marked
            await trio.to_thread.run_sync(first.join, TIMEOUT_S)
            assert not first.is_alive()

    run(main)
    assert found == [True]


def test_a_nap_lasts_no_longer_than_it_may(napped: SimpleQueue[bool]) -> None:
    async def main() -> None:
        async with boards() as (here, _):
            waiting = Waiting()
            here.waiting.watch(waiting)
            assert here.waiting.rouse(waiting)
            assert not await trio.to_thread.run_sync(here.waiting.linger, waiting, 0.01)

    run(main)
