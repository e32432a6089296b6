"""Boards: rows of shared memory in which the ranks of a group match collectives, for the engine.

Each rank of a group has rows in the memory of its process, one for each operation under way, and sends their offset to
the others. `native/collectives.c` describes the contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

from transports.base import OPERATIONS, PAYLOAD_BYTES
from transports.failures import LinkLostError
from transports.matching.protocol import BROKEN_PROTOCOL
from transports.shared_memory import engine as native
from transports.shared_memory.memory_link import MemoryLink
from transports.shared_memory.segment import Heap, Segment, Shelf, make_releaser
from transports.signature import PlainSignature, Signature

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine, Run, Table

#: Memory of one rank for one group: a cache line, a payload and a signature for each operation.
BOARD_BYTES = OPERATIONS * (64 + PAYLOAD_BYTES + 128)
_NO_PLACES, _WAITED_FOR = 1, 2  # flags of a submission, see native/collectives.c
# A note about the rows of a rank: their offset, shifted, and flags; or `_CLOSED`.
_ROOM, _READS = 1, 2
_FLAG_BITS = 2
_CLOSED = 1 << 63


class Boards:
    """The boards of one process.

    Args:
        segment: Memory of the process.
        heap: The part of the memory for loans.
        engine: Engine of the process.
        look_s: How long to poll before sleeping.

    Attributes:
        shelf: The loans.
    """

    segment: Segment
    engine: Engine
    look_s: float

    def __init__(self, segment: Segment, heap: Heap, engine: Engine, look_s: float) -> None:
        self.segment, self.engine, self.look_s = segment, engine, look_s
        self.shelf: Shelf = Shelf(segment.view, heap)
        self._early_notes: dict[tuple[int, int], int] = {}  # for boards that do not exist yet, by key and rank
        self._open: dict[int, Board] = {}

    def make(self, key: int, ranks: Sequence[int], homes: Sequence[int], links: Mapping[int, MemoryLink]) -> Board:
        """Return the board of a group, made at the first call.

        Args:
            key: Number of the group.
            ranks: Ranks of the group.
            homes: Process of each rank.
            links: The links to the other processes of this host, by index.
        """
        board = self._open.get(key)
        if board is None:
            board = self._open[key] = Board(self, key, ranks, homes, links)
            for rank in ranks:
                if (key, rank) in self._early_notes:
                    board.receive_note(rank, self._early_notes.pop((key, rank)))
            for member, link in links.items():
                if link.gone is not None:
                    board.lose(member, link.gone)
        return board

    def receive_note(self, link: MemoryLink, key: int, rank: int, note: int) -> None:
        """Handle a note of another process about the rows of one of its ranks; an invalid one ends the link."""
        board, start, memory_bytes = self._open.get(key), note >> _FLAG_BITS, link.peer.segment.nbytes
        invalid = ""
        if note == _CLOSED:
            if board is not None:
                board.receive_closed(link)
            elif self._early_notes.pop((key, rank), None) is not None:  # never opened here, or not yet
                link.send_note(key, rank, _CLOSED)
        elif rank not in link.ranks or (board is not None and rank not in board.ranks):
            invalid = f"about rank {rank}, which is none of its own in that group"
        elif note & _ROOM and (start % 64 or start + BOARD_BYTES > memory_bytes):
            invalid = f"about rows at byte {start} of its memory, which has {memory_bytes} bytes"
        elif board is not None:
            board.receive_note(rank, note)
        else:
            self._early_notes[key, rank] = note
        if invalid:
            link.lose(f"it sent a note {invalid}; {BROKEN_PROTOCOL}", evident=True)

    def forget(self, key: int) -> None:
        """Forget the board of a group; its memory has been released."""
        self._open.pop(key, None)

    def lose(self, member: int, reason: str) -> None:
        """Mark the boards in which a lost process takes part, so that their operations fail."""
        for board in list(self._open.values()):
            board.lose(member, reason)


class Board:
    """The shared memory of the ranks of one group. A position is a rank of the group. Arguments as of `Boards.make`.

    Attributes:
        ready: Whether all ranks have opened the board; nothing can be submitted before.
        usable: Whether every process has room for the board, and an engine; alike on all ranks once it is ready.
        lost: Why one of the ranks is lost; None: no rank is.
        ranks: Ranks of the group.
        processes: Number of processes of this host that share memory, this one included.
        look_s: How long a thread polls before it sleeps.
        engine: Engine that carries out the operations; runs are waited for, and cancelled, there.
    """

    ready: bool
    usable: bool
    ranks: tuple[int, ...]
    look_s: float
    engine: Engine

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
        self.look_s, self.engine = boards.look_s, boards.engine
        self._boards, self._key, self.ranks, self._homes = boards, key, tuple(ranks), tuple(homes)
        self._here, self._links = boards.segment, links
        self._others = tuple(dict.fromkeys(home for home in homes if home in links))
        self._when_ready = list[Callable[[], None]]()
        self._starts: list[int] = [-1] * len(ranks)
        self._taken: set[int] = set()  # offsets of the rows of this process's ranks
        self._is_closed = False
        self._users = set(self._others)  # other processes that have not closed it

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self, position: int, when_ready: Callable[[], None]) -> None:
        """Open the board for a rank of this process; `when_ready` is called later, unless the board is ready now.

        It is also called if a process of the board is lost before.
        """
        if not self.ready:
            self._when_ready.append(when_ready)
        if self._starts[position] < 0:
            rank = self.ranks[position]
            note = self._take_rows()
            for other in self._others:
                self._links[other].send_note(self._key, rank, note)
            self.receive_note(rank, note)

    def close(self) -> None:
        """Close it for the ranks of this process; its memory is released once all other processes have, or are lost."""
        self._is_closed, self._when_ready = True, []
        for rank, home in zip(self.ranks, self._homes, strict=True):
            for other in self._others if home not in self._links else ():
                self._links[other].send_note(self._key, rank, _CLOSED)
        self._release()

    def receive_closed(self, link: MemoryLink) -> None:
        """Note that another process has closed it, or has none."""
        self._users.difference_update([member for member in self._others if self._links[member] is link])
        self._release()

    def _release(self) -> None:
        """Release the rows and results of this process, once all processes have closed the board, or are lost."""
        if not self._is_closed or self._users:
            return
        shelf = self._boards.shelf
        for start in self._taken:
            shelf.release(start)
        for start in self._native.take_places(True) if "_native" in self.__dict__ else ():
            shelf.release(start)
        self.__dict__.pop("_native", None)
        self._taken = set()
        self._boards.forget(self._key)

    def _take_rows(self) -> int:
        """Take memory for the rows of a rank; return the note about it for the other processes."""
        start = self._boards.shelf.take(BOARD_BYTES)
        if start is not None:  # the memory has contents of an earlier loan
            self._taken.add(start)
            self._here.view[start : start + 64 * OPERATIONS] = bytes(64 * OPERATIONS)
        flags = _READS if all(self._links[other].peer.readable for other in self._others) else 0
        return flags if start is None else (start << _FLAG_BITS) | _ROOM | flags

    def receive_note(self, rank: int, note: int) -> None:
        """Handle a note about the rows of a rank."""
        position = self.ranks.index(rank)
        self._starts[position] = note >> _FLAG_BITS
        self.usable &= bool(note & _ROOM)
        self._reads &= bool(note & _READS)
        if min(self._starts) >= 0:
            self.ready = True
            self._call_waiters()

    def _call_waiters(self) -> None:
        """Call the functions that wait for the board to be ready, or lost."""
        opening, self._when_ready = self._when_ready, []
        for begin in opening:
            begin()

    def _find_segment(self, position: int) -> Segment:
        link = self._links.get(self._homes[position])
        return self._here if link is None else link.peer.segment

    @cached_property
    def _native(self) -> native.Board:
        """Board of the compiled engine, made at first use, when all ranks have opened this one."""
        seats = []
        for position, (start, home) in enumerate(zip(self._starts, self._homes, strict=True)):
            segment, link = self._find_segment(position), self._links.get(home)
            rows = segment.view[start : start + BOARD_BYTES]
            seats.append((rows, segment.view, 0 if link is None else link.peer.pid, -1 if link is None else home))
        board = native.Board(self.engine, seats, self._reads)
        if self.lost is not None:
            board.lose()
        return board

    def lose(self, member: int, reason: str) -> None:
        """Mark the board if a lost process takes part."""
        if member in self._others:
            self.lost = self.lost or reason
            if "_native" in self.__dict__:
                self._native.lose()
            self._call_waiters()
            self._users.discard(member)
            self._release()

    # -- operations ---------------------------------------------------------------------------------------------------

    def submit(
        self, table: Table, owner: object, number: int, tag: int, source: int, target: int, priority: int,
        nbytes: int, home: int, *, signature: Signature | None = None, waited_for: bool = False,
    ) -> Run:  # fmt: skip
        """Let the engine carry out a rank's end of an operation; it may have ended when this returns.

        Args:
            table: The program of the operation.
            owner: Its `on_end` is called on the event loop's thread, unless a waiting thread finds the end first.
            number: Number of the operation.
            tag: Tag of the operation, the same for all ranks with equal calls; its last byte is 0.
            source: Address of the input; 0: there is none.
            target: Address of the result; 0: there is none.
            priority: Lower is more urgent.
            nbytes: Length of an input.
            home: Offset of the shared result that this rank loans; 0: none.
            signature: What the operation is, written beside the row. Its run ends as a `MISMATCH` if a rank that it
                waits for has posted this number with another tag: the first 40 bits of a tag are of the call, the next
                16 of the number. `Run.position` is the position of that rank then. None: no rank looks for that.
            waited_for: Whether the calling thread waits for the end at once, so that no thread has to be woken.
        """
        engine, call = self.engine, (self._native, table, owner, number, tag, source, target, priority, home)
        call_fields = (0, b"") if signature is None else (signature.fingerprint, signature.text)
        run = engine.submit(*call, _WAITED_FOR if waited_for else 0, *call_fields)
        if run is None:  # the board has no free place of this size
            start = self._boards.shelf.take(nbytes)
            if start is None:
                for idle in self._native.take_places(False):
                    self._boards.shelf.release(idle)
                start = self._boards.shelf.take(nbytes)
            if start is not None:
                self._native.add_place(start, nbytes)
            run = engine.submit(*call, _NO_PLACES if start is None else 0, *call_fields)
            assert run is not None, "there is a place, or none to be had"
        return run

    def submitter(self, table: Table) -> Callable[..., Run | None]:
        """Return the engine's own function that submits operations with a table; see `native/collectives.c`.

        It returns None if there is no memory for an input: `submit` finds some.
        """
        return partial(self.engine.submit, self._native, table)

    def row_tag(self, position: int, number: int) -> int:
        """Return the tag of operation `number` in the row of a rank; 0: it is not there, or not there any more."""
        tag: int = self._native.row(position, number)[0] & ~0xFF
        return tag if (tag >> 8) & 0xFFFF == number & 0xFFFF else 0

    def row_signature(self, position: int, number: int) -> PlainSignature:
        """Return the signature of operation `number`, which its rank has written beside its row of the board.

        Raises:
            LinkLostError: The other process has written something else there.
        """
        try:
            _, _, fingerprint, text = self._native.row(position, number)
        except ValueError as error:
            raise LinkLostError(f"rank {self.ranks[position]} wrote invalid data into its board: {error}") from error
        return PlainSignature(fingerprint, text)

    # -- memory -------------------------------------------------------------------------------------------------------

    def loan_to_all(self, nbytes: int) -> int | None:
        """Loan memory of this process to all ranks together, and return its offset; None without free memory.

        The loan ends once every rank has called its function of `make_release`.
        """
        return self._boards.shelf.loan(nbytes, len(self.ranks))

    def make_release(self, position: int, owner: int, where: int, nbytes: int) -> Callable[[], None]:
        """Return the function by which a rank of this process releases a loan to all ranks; any thread may call it.

        Args:
            position: Position of the rank that releases.
            owner: Position of a rank of the process that owns the memory.
            where: Offset that `loan_to_all` returned there.
            nbytes: Length of the loan.
        """
        return make_releaser(self._find_segment(owner).view, where, nbytes, position)

    def loan_view(self, position: int, where: int, nbytes: int) -> memoryview:
        """Return the memory of a loan, as a rank's process maps it."""
        return self._find_segment(position).view[where : where + nbytes]
