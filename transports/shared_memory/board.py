"""Boards: rows of shared memory in which the ranks of a group post their progress and the place of their bytes.

A row belongs to one rank and one operation; only its rank writes it. Rows are used again after `OPERATIONS` operations.
The first word holds the operation's tag and the phase; it is written last, and read first. A row is a cache line, so
that a small payload comes with it; larger payloads lie behind all rows. The number of the operation stands beside the
mode: a rank that only gives may be ahead of others, whose rows hold something older then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

from transports.common import OPERATIONS, PAYLOAD_BYTES, PHASES, Board, Place
from transports.failures import LinkLostError
from transports.shared_memory.memory_link import MemoryLink
from transports.shared_memory.ordering import FENCE, FENCED, fence, keep_order
from transports.shared_memory.peer_memory import address_of, read
from transports.shared_memory.segment import Heap, Segment, Shelf, leaver
from transports.shared_memory.waiting import Waiting

_ROW_BYTES, _ROW_WORDS = 64, 8
_HEAD_BYTES = 32  # the word, `where`, number and `mode`, `result`; the rest of a row is for a payload that fits
_NEAR_BYTES = _ROW_BYTES - _HEAD_BYTES
_FAR = OPERATIONS * _ROW_BYTES
#: Memory of one rank for one group.
BOARD_BYTES = _FAR + OPERATIONS * PAYLOAD_BYTES
_LAST = PHASES - 1  # the phase of a rank that is done
_MODE_BITS, _MODE = 8, 0xFF
_ROOM, _READS = 1, 2  # flags that a rank tells beside the place of its rows
_TOLD_BITS = 2
_CLOSED = 1 << 63  # told instead: nothing more is told of the rank's rows


class Boards:
    """The boards of one process.

    Args:
        segment: Its memory.
        heap: The part of the memory that can be lent.
        waiting: The waiting of this process for others.
        ring: Wakes the sleeping ones among some processes, by index.

    Attributes:
        shelf: The memory that is lent.
    """

    segment: Segment
    waiting: Waiting
    ring: Callable[[Sequence[int]], None]

    def __init__(self, segment: Segment, heap: Heap, waiting: Waiting, ring: Callable[[Sequence[int]], None]) -> None:
        self.segment, self.waiting, self.ring = segment, waiting, ring
        self._begins = address_of(segment.view)
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

    def place_of(self, address: int, nbytes: int) -> int | None:
        """Return where something of this process lies in its segment, if it does."""
        where = address - self._begins
        return where if 0 <= where <= self.segment.nbytes - nbytes else None

    def lose(self, member: int, reason: str) -> None:
        """Note that a process is gone, and let every watcher look."""
        for board in self._open.values():
            board.lose(member, reason)
        self.waiting.look()


class _SharedBoard(Board):
    """The board of one group; arguments as of `Boards.make`."""

    ready: bool
    usable: bool
    reads: bool
    waiting: Waiting

    def __init__(
        self,
        boards: Boards,
        key: int,
        ranks: Sequence[int],
        homes: Sequence[int],
        links: Mapping[int, MemoryLink],
    ) -> None:
        self.ready, self.usable, self.reads = False, True, True
        self.lost: str | None = None
        self.processes: int = 1 + len(links)
        self._boards, self._key, self._ranks, self._homes = boards, key, tuple(ranks), tuple(homes)
        self._here, self._links = boards.segment, links
        self._others = tuple(dict.fromkeys(home for home in homes if home in links))
        local = [home for home in homes if home not in links]
        self._rung = (*self._others, local[0]) if len(local) > 1 else self._others
        self.waiting, self._when_ready = boards.waiting, list[Callable[[], None]]()
        self._starts: list[int] = [-1] * len(ranks)
        self._taken: set[int] = set()  # where ranks of this process have their rows
        self._rows: list[memoryview] = []
        self._words: list[memoryview] = []

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
        self._rows, self._words, self._when_ready = [], [], []
        self._boards.close(self._key)

    def _tell_start(self) -> int:
        start = self._boards.shelf.take(BOARD_BYTES)
        if start is not None:  # whoever had this memory before has left something there
            self._taken.add(start)
            self._here.view[start : start + _FAR] = bytes(_FAR)
        reads = _READS if all(self._links[other].peer.readable for other in self._others) else 0
        return reads if start is None else (start << _TOLD_BITS) | _ROOM | reads

    def hear(self, rank: int, told: int) -> None:
        """Take in where a rank has its rows."""
        position = self._ranks.index(rank)
        self._starts[position] = told >> _TOLD_BITS
        self.usable &= bool(told & _ROOM)
        self.reads &= bool(told & _READS)
        self.usable &= self._starts[position] + BOARD_BYTES <= self._segment(position).nbytes
        if min(self._starts) >= 0:
            self._map()
            self.ready = True
            opening, self._when_ready = self._when_ready, []
            for begin in opening:
                begin()

    def _map(self) -> None:
        if self.usable:
            rows = [
                self._segment(position).view[start : start + BOARD_BYTES] for position, start in enumerate(self._starts)
            ]
            self._rows = rows
            self._words = [row.cast("Q") for row in rows]

    def _segment(self, position: int) -> Segment:
        link = self._links.get(self._homes[position])
        return self._here if link is None else link.peer.segment

    # -- posting ------------------------------------------------------------------------------------------------------

    def arrive(
        self, position: int, number: int, tag: int, *, where: int = 0, mode: int = 0, payload: memoryview | None = None,
        result: int = 0,
    ) -> None:  # fmt: skip
        slot = number % OPERATIONS
        words, first = self._words[position], slot * _ROW_WORDS
        if payload is not None:
            self.payload(position, number, payload.nbytes)[:] = payload
        words[first + 1] = where
        words[first + 2] = (number + 1) << _MODE_BITS | mode
        if result:
            words[first + 3] = result
        if not FENCED:
            keep_order()
        words[first] = tag | 1
        FENCE.acquire()  # without a call of `fence`, on the path of every operation
        FENCE.release()

    def advance(self, position: int, number: int, tag: int, phase: int, *, result: int = 0) -> None:
        words, first = self._words[position], number % OPERATIONS * _ROW_WORDS
        if result:
            words[first + 3] = result
        if not FENCED:
            keep_order()
        words[first] = tag | phase
        fence()

    def end(self, position: int, number: int, tag: int) -> None:
        self._words[position][number % OPERATIONS * _ROW_WORDS] = tag | _LAST

    def free(self, position: int, number: int) -> bool:
        first = number % OPERATIONS * _ROW_WORDS
        words = self._words[position]
        held = words[first] & ~_LAST
        return not held or self._passed(first, words[first + 2] >> _MODE_BITS, held + _LAST)

    def reached(self, number: int, tag: int, phase: int) -> bool:
        first, least, limit = number % OPERATIONS * _ROW_WORDS, tag + phase, tag + 256
        for words in self._words:
            if not least <= words[first] < limit:
                return False
        if not FENCED:
            keep_order()
        return True

    def has_come(self, position: int, number: int, tag: int) -> bool:
        come = tag < self._words[position][number % OPERATIONS * _ROW_WORDS] < tag + PHASES
        if not FENCED:
            keep_order()
        return come

    def came(self, number: int) -> bool:
        place = number % OPERATIONS * _ROW_WORDS + 2
        return all(words[place] >> _MODE_BITS > number for words in self._words)

    def passed(self, number: int, tag: int, phase: int) -> bool:
        return self._passed(number % OPERATIONS * _ROW_WORDS, number + 1, tag + phase)

    def _passed(self, first: int, number: int, least: int) -> bool:
        """Whether the words of every rank from `first` on are so far, or hold a later number."""
        limit = least | _LAST
        return all(least <= words[first] <= limit or words[first + 2] >> _MODE_BITS > number for words in self._words)

    def posted(self, position: int, number: int) -> tuple[int, int]:
        words, first = self._words[position], number % OPERATIONS * _ROW_WORDS
        return words[first + 1], words[first + 2] & _MODE

    def result(self, position: int, number: int) -> int:
        return self._words[position][number % OPERATIONS * _ROW_WORDS + 3]

    def payload(self, position: int, number: int, nbytes: int) -> memoryview:
        first, apart = _payloads_at(nbytes)
        start = first + number % OPERATIONS * apart
        return self._rows[position][start : start + nbytes]

    def payloads(self, position: int, nbytes: int) -> tuple[memoryview, int]:
        first, apart = _payloads_at(nbytes)
        return self._rows[position][first:], apart

    # -- waking -------------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        self._boards.ring(self._rung)

    def lose(self, member: int, reason: str) -> None:
        """Note that a process is gone."""
        if member in self._others:
            self.lost = self.lost or reason

    # -- memory -------------------------------------------------------------------------------------------------------

    def lend(self, nbytes: int) -> Place | None:
        start = self._boards.shelf.take(nbytes)
        return None if start is None else Place(start, self._here.view[start : start + nbytes])

    def take_back(self, place: Place) -> None:
        self._boards.shelf.give_back(place.where)

    def place_of(self, address: int, nbytes: int) -> int | None:
        return self._boards.place_of(address, nbytes)

    def lend_to_all(self, nbytes: int) -> int | None:
        return self._boards.shelf.lend(nbytes, len(self._ranks))

    def left(self, position: int, owner: int, where: int, nbytes: int) -> Callable[[], None]:
        return leaver(self._segment(owner).view, where, nbytes, position)

    def mapped(self, position: int, where: int, nbytes: int) -> memoryview:
        return self._segment(position).view[where : where + nbytes]

    def read(self, position: int, address: int, into: memoryview) -> None:
        member = self._homes[position]
        if member not in self._links:  # this very process
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(into)), address, into.nbytes)
            return
        try:
            read(self._links[member].peer.pid, address, into)
        except OSError as error:
            raise LinkLostError(f"the memory of process {member} cannot be read: {error.strerror}") from error


def _payloads_at(nbytes: int) -> tuple[int, int]:
    """Return where payloads of a size begin in the rows of a rank, and how far apart they are."""
    return (_HEAD_BYTES, _ROW_BYTES) if nbytes <= _NEAR_BYTES else (_FAR, PAYLOAD_BYTES)
