"""Boards that are closed, and how long a process looks for others before it sleeps."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from transports import LinkLostError
from transports.matching.protocol import BROKEN_PROTOCOL
from transports.shared_memory import transport
from transports.shared_memory.board import Board
from transports.shared_memory.transport import polling_rule

from ..efa.processes import opened
from .processes import Host


async def test_a_closed_board_leaves_nothing() -> None:
    """Its memory is lent again, and what another process tells late is not kept."""
    host = Host()
    async with opened(host.transports):
        boards_of = [each._boards for each in host.transports]
        lent = [each.shelf._heap.used_bytes for each in boards_of]
        here, there = await _opened(host, 5)
        unopened = [each.board(6, (0, 1)) for each in host.transports]
        unopened[0].open(0, lambda: None)
        for board in (here, there, *unopened):
            board.close()
        await wait_all_tasks_blocked()
        for each, before in zip(boards_of, lent, strict=True):
            each.shelf._free_released()
            assert (each._open, each._early_notes, each.shelf._heap.used_bytes) == ({}, {}, before)


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
    assert polling_rule(others, 2) == expected
