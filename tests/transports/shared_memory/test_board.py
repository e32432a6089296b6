"""Boards: what the ranks of a group have in common, and what they see of each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from transports.common import OPERATIONS, PAYLOAD_BYTES, Board

from ..efa.processes import TIMEOUT_S, opened, run
from .processes import Host

TAG = 7 << 8


@asynccontextmanager
async def boards(**settings: object) -> AsyncIterator[list[Board]]:
    """The board of ranks 0 and 1, as each of two processes sees it, opened by both."""
    host = Host(**settings)
    async with opened(host.transports):
        found = [transport.board(5, (0, 1)) for transport in host.transports]
        ready = [trio.Event(), trio.Event()]
        for position, board in enumerate(found):
            assert board is not None
            board.open(position, ready[position].set)
        for event in ready:
            await event.wait()
        yield [board for board in found if board is not None]


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


def test_who_waits_is_rung() -> None:
    async def main() -> None:
        async with boards() as (here, there):
            looked = [trio.Event()]
            here.watch(lambda: looked[-1].set())
            await wait_all_tasks_blocked(0.01)  # it has looked before it sleeps
            looked.append(trio.Event())
            there.ring()
            with trio.move_on_after(TIMEOUT_S / 2):
                await looked[-1].wait()
            assert [each.is_set() for each in looked] == [True, True]

    run(main)
