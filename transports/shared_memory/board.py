"""Boards: rows of shared memory in which the ranks of a group meet, for the engine that carries out their collectives.

Each rank of a group has rows in the memory of its process, one for each operation under way, and tells the others where
they are. `native/collectives.c` says what is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from transports.common import OPERATIONS, PAYLOAD_BYTES, Board
from transports.shared_memory import engine as native
from transports.shared_memory.memory_link import MemoryLink
from transports.shared_memory.segment import Heap, Segment, Shelf, leaver

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine, Run, Table

#: Memory of one rank for one group: a cache line and a payload for each operation.
BOARD_BYTES = OPERATIONS * (64 + PAYLOAD_BYTES)
_NO_PLACES, _WAITED_FOR = 1, 2  # how a run is submitted, as native/collectives.c has it
_ROOM, _READS = 1, 2  # flags that a rank tells beside the place of its rows
_TOLD_BITS = 2
_CLOSED = 1 << 63  # told instead: nothing more is told of the rank's rows


class Boards:
    """The boards of one process.

    Args:
        segment: Its memory.
        heap: The part of the memory that can be lent.
        engine: Of this process.
        look_s: How long to look for others before sleeping.

    Attributes:
        shelf: The memory that is lent.
    """

    segment: Segment
    engine: Engine
    look_s: float

    def __init__(self, segment: Segment, heap: Heap, engine: Engine, look_s: float) -> None:
        self.segment, self.engine, self.look_s = segment, engine, look_s
        self.shelf: Shelf = Shelf(segment.view, heap)
        self._told: dict[tuple[int, int], int] = {}
        self._open: dict[int, _SharedBoard] = {}

    def make(
        self, key: int, ranks: Sequence[int], homes: Sequence[int], links: Mapping[int, MemoryLink]
    ) -> _SharedBoard:
        """Make the board of a group, or return it.

        Args:
            key: Number of the group.
            ranks: Of the group.
            homes: Process of each rank.
            links: To the other processes of this host, by index.
        """
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = _SharedBoard(self, key, ranks, homes, links)
            for rank in ranks:
                if (key, rank) in self._told:
                    found.hear(rank, self._told.pop((key, rank)))
        return found

    def hear(self, fields: Sequence[int]) -> None:
        """Take in where a rank elsewhere has its rows."""
        key, rank, told = fields
        if told == _CLOSED:
            self._told.pop((key, rank), None)
        elif key in self._open:
            self._open[key].hear(rank, told)
        else:
            self._told[key, rank] = told

    def close(self, key: int) -> None:
        """Forget the board of a group."""
        self._open.pop(key, None)

    def lose(self, member: int, reason: str) -> None:
        """Note that a process is gone."""
        for board in self._open.values():
            board.lose(member, reason)


class _SharedBoard(Board):
    """The board of one group; arguments as of `Boards.make`."""

    ready: bool
    usable: bool

    def __init__(
        self,
        boards: Boards,
        key: int,
        ranks: Sequence[int],
        homes: Sequence[int],
        links: Mapping[int, MemoryLink],
    ) -> None:
        self.ready, self.usable, self._reads = False, True, True
        self.lost: str | None = None
        self.processes: int = 1 + len(links)
        self.look_s: float = boards.look_s
        self._boards, self._key, self._ranks, self._homes = boards, key, tuple(ranks), tuple(homes)
        self._here, self._links = boards.segment, links
        self._others = tuple(dict.fromkeys(home for home in homes if home in links))
        self._when_ready = list[Callable[[], None]]()
        self._starts: list[int] = [-1] * len(ranks)
        self._taken: set[int] = set()  # where ranks of this process have their rows

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self, position: int, when_ready: Callable[[], None]) -> None:
        if not self.ready:
            self._when_ready.append(when_ready)
        if self._starts[position] < 0:
            rank = self._ranks[position]
            told = self._tell_start()
            for other in self._others:
                self._links[other].tell(self._key, rank, told)
            self.hear(rank, told)

    def close(self) -> None:
        shelf = self._boards.shelf
        for position, start in enumerate(self._starts):
            if self._homes[position] in self._links:
                continue
            for other in self._others:  # it may hear only now where the rows are, or keep that for a board to come
                self._links[other].tell(self._key, self._ranks[position], _CLOSED)
            if start in self._taken:
                shelf.give_back(start)
        for start in self._native.take_places(True) if "_native" in self.__dict__ else ():
            shelf.give_back(start)
        self.__dict__.pop("_native", None)
        self._when_ready = []
        self._boards.close(self._key)

    def _tell_start(self) -> int:
        start = self._boards.shelf.take(BOARD_BYTES)
        if start is not None:  # whoever had this memory before has left something there
            self._taken.add(start)
            self._here.view[start : start + 64 * OPERATIONS] = bytes(64 * OPERATIONS)
        flags = _READS if all(self._links[other].peer.readable for other in self._others) else 0
        return flags if start is None else (start << _TOLD_BITS) | _ROOM | flags

    def hear(self, rank: int, told: int) -> None:
        """Take in where a rank has its rows."""
        position = self._ranks.index(rank)
        self._starts[position] = told >> _TOLD_BITS
        self.usable &= bool(told & _ROOM)
        self._reads &= bool(told & _READS)
        self.usable &= self._starts[position] + BOARD_BYTES <= self._segment(position).nbytes
        if min(self._starts) >= 0:
            self.ready = True
            opening, self._when_ready = self._when_ready, []
            for begin in opening:
                begin()

    def _segment(self, position: int) -> Segment:
        link = self._links.get(self._homes[position])
        return self._here if link is None else link.peer.segment

    @cached_property
    def _native(self) -> native.Board:
        """Return the board as the engine has it."""
        engine = self._boards.engine
        seats = []
        for position, (start, home) in enumerate(zip(self._starts, self._homes, strict=True)):
            segment, link = self._segment(position), self._links.get(home)
            rows = segment.view[start : start + BOARD_BYTES]
            seats.append((rows, segment.view, 0 if link is None else link.peer.pid, -1 if link is None else home))
        return native.Board(engine, seats, self._reads)

    def lose(self, member: int, reason: str) -> None:
        """Note that a process is gone."""
        if member in self._others:
            self.lost = self.lost or reason
            if "_native" in self.__dict__:
                self._native.lose()

    # -- operations ---------------------------------------------------------------------------------------------------

    def submit(
        self, table: Table, owner: object, number: int, tag: int, source: int, target: int, priority: int,
        nbytes: int, home: int, *, waited_for: bool = False,
    ) -> Run:  # fmt: skip
        engine, call = self._boards.engine, (self._native, table, owner, number, tag, source, target, priority, home)
        run = engine.submit(*call, _WAITED_FOR if waited_for else 0)
        if run is None:  # no place of this size is left that has been lent to this board
            start = self._boards.shelf.take(nbytes)
            if start is None:
                for idle in self._native.take_places(False):
                    self._boards.shelf.give_back(idle)
                start = self._boards.shelf.take(nbytes)
            if start is not None:
                self._native.add_place(start, nbytes)
            run = engine.submit(*call, _NO_PLACES if start is None else 0)
            assert run is not None, "there is a place, or none to be had"
        return run

    def wait(self, run: Run, seconds: float, look_s: float) -> int:
        return self._boards.engine.wait(run, seconds, look_s)

    def forget(self, run: Run) -> None:
        self._boards.engine.forget(run)

    def cancel(self, run: Run) -> bool:
        return self._boards.engine.cancel(run)

    # -- memory -------------------------------------------------------------------------------------------------------

    def lend_to_all(self, nbytes: int) -> int | None:
        return self._boards.shelf.lend(nbytes, len(self._ranks))

    def left(self, position: int, owner: int, where: int, nbytes: int) -> Callable[[], None]:
        return leaver(self._segment(owner).view, where, nbytes, position)

    def mapped(self, position: int, where: int, nbytes: int) -> memoryview:
        return self._segment(position).view[where : where + nbytes]
