"""Boards and shelves in shared memory, and how the event loop hears of messages or looks for them."""

import os
import re
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.threads import running
from tests.waiting import TIMEOUT_S, run
from transports import LinkLostError
from transports.matching.protocol import BROKEN_PROTOCOL
from transports.patience import Patience
from transports.shared_memory import transport
from transports.shared_memory.board import Board
from transports.shared_memory.engine import bells
from transports.shared_memory.segment import Heap, LoanPool, make_releaser
from transports.shared_memory.transport import choose_polling

from ..efa.processes import opened
from .processes import Host

# -- boards that are closed, and how long a process looks for others before it sleeps ----------------------------------


async def test_a_closed_board_leaves_nothing() -> None:
    """Its memory is lent again, and what another process tells late is not kept."""
    host = Host()
    async with opened(host.transports):
        boards_of = [each._boards for each in host.transports]
        lent = [sum(each.loan_pool._heap._sizes.values()) for each in boards_of]
        here, there = await _opened(host, 5)
        unopened = [each.board(6, (0, 1)) for each in host.transports]
        unopened[0].open(0, lambda: None)
        for board in (here, there, *unopened):
            board.close()
        await wait_all_tasks_blocked()
        for each, before in zip(boards_of, lent, strict=True):
            each.loan_pool._free_released()
            assert (each._open, each._early_notes, sum(each.loan_pool._heap._sizes.values())) == ({}, {}, before)


async def _opened(host: Host, key: int) -> list[Board]:
    found = [each.board(key, (0, 1)) for each in host.transports]
    ready = [trio.Event(), trio.Event()]
    for position, board in enumerate(found):
        assert board is not None
        board.open(position, ready[position].set)
    for event in ready:
        await event.wait()
    return [board for board in found if board is not None]


@pytest.mark.parametrize("opened_first", [True, False])
@pytest.mark.parametrize(
    ("rank", "note", "expected"),
    [
        (99, 3, "about rank 99, which is none of its own in that group"),
        (0, 3, "about rank 0, which is none of its own in that group"),
        (1, 1 << 40 | 1, f"about rows at byte {1 << 38} of its memory, which has {1 << 24} bytes"),
        (1, 72 << 2 | 1, f"about rows at byte 72 of its memory, which has {1 << 24} bytes"),
    ],
)
async def test_an_invalid_note_ends_the_link_to_its_process_by_name(
    rank: int, note: int, expected: str, *, opened_first: bool
) -> None:
    host = Host(limit_bytes=1 << 24)
    async with opened(host.transports):
        here, there = host.transports
        if opened_first:
            board = here.board(5, (0, 1))
            assert board is not None
            board.open(0, lambda: None)
        there.engine.note(0, 5, rank, note)
        reason = f"process 1 (rank 1) is lost: it sent a note {expected}; {BROKEN_PROTOCOL}"
        with pytest.raises(LinkLostError, match=f"{re.escape(reason)}$"):
            await here.wire(0).recv_into(1, 2, bytearray(1))
        board = here.board(5, (0, 1))
        assert board is not None
        assert not board.ready
    assert host.reports[0] == [reason]


async def test_a_note_about_a_rank_of_its_process_in_no_group_ends_the_link() -> None:
    host = Host(((0,), (1, 2)))
    async with opened(host.transports):
        here, there = host.transports
        here.board(5, (0, 1))
        there.engine.note(0, 5, 2, 3)
        with pytest.raises(LinkLostError, match="about rank 2, which is none of its own in that group"):
            await here.wire(0).recv_into(1, 2, bytearray(1))


@pytest.mark.parametrize(
    ("others", "grouped", "session", "expected"),
    [
        ([7], "1", 1, (150e-6, False)),
        ([7, 8], "0", 1, (150e-6, True)),
        ([7, 8], "1", 0, (150e-6, True)),
        ([7, 8], "1", 1, (0.0, True)),
        ([7, 8], None, 1, (150e-6, True)),
    ],
)
def test_others_are_let_run_where_they_can_be(
    others: list[int],
    grouped: str | None,
    session: int,
    expected: tuple[float, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch = tmp_path / "switch"
    if grouped is not None:
        switch.write_text(f"{grouped}\n")
    monkeypatch.setattr(transport, "AUTOGROUP", switch)
    monkeypatch.setattr(os, "getsid", lambda pid: session if pid else 0)
    assert choose_polling(others, 2) == expected


# -- the event loop hears of messages whenever they come: while it is awake, asleep, or about to sleep -----------------

PASSES = 300
SLEEPERS, UNATTENDED, BY_LOOP = 1, 3, 2  # see native/engine.h


def test_no_message_is_overlooked_whenever_it_comes() -> None:
    async def main() -> int:
        host, came = Host(), 0
        async with opened(host.transports):
            here, there = host.transports
            due: SimpleQueue[int | None] = SimpleQueue()

            def send() -> None:
                for number in iter(due.get, None):
                    data = np.array([number])
                    there.engine.send(0, 5, 0, b"", None, 8, memoryview(data).cast("B"), 1 << 32 | 0, 0, None)

            with running(threading.Thread(target=send)):
                out, end = np.zeros(1, int), here.wire(0)
                for number in range(PASSES):
                    due.put(number)
                    for _ in range(number % 5):
                        await trio.lowlevel.checkpoint()
                    await end.recv_into(1, 5, out)
                    came += int(out[0] == number)
                due.put(None)
        return came

    assert run(main) == PASSES


def test_a_loop_that_sleeps_notices_a_message_though_a_thread_is_woken_that_does_not_sleep() -> None:
    async def main() -> int:
        host, data, out = Host(), np.array([7]), np.zeros(1, int)
        async with opened(host.transports):
            here, there = host.transports
            words = bells(here._boards.segment.view).cast("I")

            def send() -> None:
                late = time.monotonic() + TIMEOUT_S
                while words[UNATTENDED] != BY_LOOP and time.monotonic() < late:
                    time.sleep(0.001)
                words[SLEEPERS] = 7
                there.engine.send(0, 5, 0, b"", None, 8, memoryview(data).cast("B"), 1 << 32 | 0, 0, None)

            with running(threading.Thread(target=send)):
                await here.wire(0).recv_into(1, 5, out)
        return int(out[0])

    assert run(main) == 7


# -- looking before sleeping is given up where it does not help, and tried again now and then --------------------------


def waits(patience: Patience, count: int, *, come: bool) -> int:
    """Wait so often, for others who would come while somebody looks or would not; return how often that looked."""
    looked = 0
    for _ in range(count):
        if patience.next_poll_s():
            looked += 1
            patience.record_poll(came=come)
    return looked


def test_it_looks_as_long_as_that_helps() -> None:
    assert waits(Patience(50e-6), 100, come=True) == 100


def test_after_three_times_in_vain_it_looks_every_sixteenth_time() -> None:
    patience = Patience(50e-6)
    assert waits(patience, 3, come=False) == 3
    assert waits(patience, 160, come=False) == 10


def test_once_it_helps_again_it_looks_always() -> None:
    patience = Patience(50e-6)
    waits(patience, 3, come=False)
    assert waits(patience, 15, come=True) == 0
    assert waits(patience, 100, come=True) == 100


def test_where_somebody_else_needs_the_cores_it_is_given_up_for_longer() -> None:
    patience = Patience(50e-6)
    assert patience.next_poll_s()
    patience.pause_polling()
    assert [patience.next_poll_s() > 0 for _ in range(64)] == [False] * 63 + [True]
    patience.record_poll(came=True)
    assert waits(patience, 100, come=True) == 100


# -- what ranks hold together comes back when the last of them has dropped it ------------------------------------------

PAGE = 4096


def shelf_of(pages: int) -> tuple[LoanPool, Heap, memoryview]:
    memory = memoryview(bytearray(PAGE * (pages + 1)))
    heap = Heap(PAGE, len(memory))
    return LoanPool(memory, heap), heap, memory


def test_a_piece_comes_back_when_all_have_left() -> None:
    loan_pool, _, memory = shelf_of(1)
    start = loan_pool.loan(100, 2)
    assert start == PAGE
    leaves = [make_releaser(memory, start, 100, position) for position in range(2)]
    leaves[1]()
    assert loan_pool.allocate(PAGE) is None
    leaves[0]()
    assert loan_pool.allocate(PAGE) == start


def test_a_piece_of_one_process_comes_back_when_it_is_given_back() -> None:
    loan_pool, heap, _ = shelf_of(1)
    start = loan_pool.allocate(PAGE)
    assert start is not None
    assert loan_pool.allocate(PAGE) is None
    loan_pool.release(start)
    assert loan_pool.allocate(PAGE) == start
    assert sum(heap._sizes.values()) == PAGE


def test_words_lie_behind_what_is_held() -> None:
    loan_pool, _, memory = shelf_of(1)
    start = loan_pool.loan(13, 3)
    assert start is not None
    memory[start : start + 13] = bytes(range(13))
    for position in range(3):
        make_releaser(memory, start, 13, position)()
    assert memory[start : start + 13] == bytes(range(13))


def test_what_was_left_before_says_nothing_of_what_comes_after() -> None:
    loan_pool, _, memory = shelf_of(1)
    for _ in range(2):
        start = loan_pool.loan(100, 1)
        assert start is not None
        assert loan_pool.loan(100, 1) is None
        make_releaser(memory, start, 100, 0)()


def test_who_needs_memory_gets_what_was_left() -> None:
    loan_pool, _, memory = shelf_of(1)
    start = loan_pool.loan(100, 1)
    assert start is not None
    assert loan_pool.allocate(PAGE) is None
    make_releaser(memory, start, 100, 0)()
    assert loan_pool.allocate(PAGE) == start


@pytest.mark.parametrize(("nbytes", "lent"), [(1, 1), (PAGE + 1, 2), (9 * PAGE, 10), (33 * PAGE, 40), (64 * PAGE, 64)])
def test_pieces_waste_at_most_a_quarter_beyond_a_page(nbytes: int, lent: int) -> None:
    heap = Heap(0, 1 << 30)
    heap.allocate(nbytes)
    assert sum(heap._sizes.values()) == lent * PAGE
