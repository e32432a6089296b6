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
from transports.shared_memory.segment import Heap, LoanPool, Segment, make_releaser
from transports.signature import PlainSignature, Signature

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine, Run, Table

#: Memory of one rank for one group: a cache line, a payload and a signature for each operation.
BOARD_BYTES = OPERATIONS * (64 + PAYLOAD_BYTES + 128)
_NO_PLACES, _WAITED_FOR = 1, 2  # flags of a submission, see native/collectives.c
# A note is an integer that a process sends to the others about the rows of one of its ranks: the offset of the rows in
# the memory of the process, shifted left by `_FLAG_BITS`, plus flags. `_ROOM`: there is memory for the rows. `_READS`:
# the process can read the memory of all others. Or the note is `_CLOSED`: the process has closed the board.
_ROOM, _READS = 1, 2
_FLAG_BITS = 2
# a bit that no offset has, because memory is smaller
_CLOSED = 1 << 63


class Boards:
    """The boards of one process.

    Args:
        segment: Shared memory of the process.
        heap: Allocator of the part of the segment for loans.
        engine: Engine of the process.
        look_s: How many seconds a thread polls before it sleeps.
        links: The links to the other processes of this host, by index.

    Attributes:
        loan_pool: The loans of the segment.
    """

    def __init__(
        self, segment: Segment, heap: Heap, engine: Engine, look_s: float, links: Mapping[int, MemoryLink]
    ) -> None:
        self.segment = segment
        self.engine = engine
        self.look_s = look_s
        self.links = links
        self.loan_pool: LoanPool = LoanPool(segment.view, heap)
        self._early_notes: dict[tuple[int, int], int] = {}  # for boards that do not exist yet, by key and rank
        self._open: dict[int, Board] = {}

    def find_or_make(self, key: int, ranks: Sequence[int], homes: Sequence[int]) -> Board:
        """Return the board of a group, made at the first call.

        Args:
            key: Number of the group, the same on every rank.
            ranks: Ranks of the group, in its order.
            homes: For each of these ranks, the index of its process.
        """
        board = self._open.get(key)
        if board is None:
            board = self._open[key] = Board(self, key, ranks, homes)
            for rank in ranks:
                if (key, rank) in self._early_notes:
                    board.receive_rows_note(rank, self._early_notes.pop((key, rank)))
            for member, link in self.links.items():
                if link.gone is not None:
                    board.lose(member, link.gone)
        return board

    def receive_rows_note(self, link: MemoryLink, key: int, rank: int, note: int) -> None:
        """Check a note of another process about the rows of one of its ranks, and pass it on to the board of the group.

        If this process has no such board yet, the note is kept until it is made. An invalid note ends the link.

        Args:
            link: The link to the other process.
            key: Number of the group.
            rank: The rank that the note is about.
            note: Offset and flags of the rows, or `_CLOSED`.
        """
        board, start, memory_bytes = self._open.get(key), note >> _FLAG_BITS, link.peer.segment.nbytes
        invalid = ""
        if note == _CLOSED:
            if board is not None:
                board.record_closed(link)
            # The board has no users here, so the other process may release its memory: that is the answer.
            elif self._early_notes.pop((key, rank), None) is not None:
                link.send_note(key, rank, _CLOSED)
        elif rank not in link.ranks or (board is not None and rank not in board.ranks):
            invalid = f"about rank {rank}, which is none of its own in that group"
        elif note & _ROOM and (start % 64 or start + BOARD_BYTES > memory_bytes):
            invalid = f"about rows at byte {start} of its memory, which has {memory_bytes} bytes"
        elif board is not None:
            board.receive_rows_note(rank, note)
        else:
            self._early_notes[key, rank] = note
        if invalid:
            link.lose(f"it sent a note {invalid}; {BROKEN_PROTOCOL}", evident=True)

    def forget(self, key: int) -> None:
        """Remove the board of a group, whose memory has been released."""
        self._open.pop(key, None)

    def lose(self, member: int, reason: str) -> None:
        """Mark all boards that a lost process shares as lost, so that their operations fail."""
        for board in list(self._open.values()):
            board.lose(member, reason)


class Board:
    """The shared memory of the ranks of one group. A position is the index of a rank in the group.

    Args:
        boards: The boards of this process.
        key: Number of the group, the same on every rank.
        ranks: Ranks of the group, in its order.
        homes: For each of these ranks, the index of its process.

    Attributes:
        ready: Whether all ranks have opened the board; nothing can be submitted before.
        usable: Whether every process has memory for its rows. Once the board is ready, all processes agree on it.
        lost: Why the process of a rank is lost; None: none is.
        ranks: Ranks of the group, by position.
        processes: Number of processes of this host that share memory, this one included.
        look_s: Seconds for which a thread polls before it sleeps.
        engine: Engine that carries out the operations. Callers wait for runs, and cancel runs, by its methods.
    """

    def __init__(self, boards: Boards, key: int, ranks: Sequence[int], homes: Sequence[int]) -> None:
        self.ready: bool = False
        self.usable: bool = True
        self.lost: str | None = None
        self.processes: int = 1 + len(boards.links)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.look_s: float = boards.look_s
        self.engine: Engine = boards.engine
        self._boards, self._key, self._homes, self._links = boards, key, tuple(homes), boards.links
        self._reads = True  # whether every process can read the memory of all others, as far as known
        self._others = tuple(dict.fromkeys(home for home in homes if home in boards.links))  # the other processes
        self._waiters = list[Callable[[], None]]()
        # offset of the rows of each rank in the memory of its process; -1: not known yet
        self._starts: list[int] = [-1] * len(ranks)
        self._taken: set[int] = set()  # offsets of the rows of this process's ranks
        self._is_closed = False
        self._users = set(self._others)  # other processes that have not closed the board

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self, position: int, when_ready: Callable[[], None]) -> None:
        """Open the board for a rank of this process, and send a note about its rows to the other processes.

        Args:
            position: Position of the rank.
            when_ready: Called once the board is ready, or a process of the board is lost; not called if the board is
                ready already.
        """
        if not self.ready:
            self._waiters.append(when_ready)
        if self._starts[position] < 0:
            rank = self.ranks[position]
            note = self._allocate_rows()
            for other in self._others:
                self._links[other].send_note(self._key, rank, note)
            self.receive_rows_note(rank, note)

    def close(self) -> None:
        """Close the board for the ranks of this process.

        Its memory is released once every other process has closed the board, or is lost.
        """
        self._is_closed, self._waiters = True, []
        for rank, home in zip(self.ranks, self._homes, strict=True):
            for other in self._others if home not in self._links else ():
                self._links[other].send_note(self._key, rank, _CLOSED)
        self._release_if_unused()

    def record_closed(self, link: MemoryLink) -> None:
        """Record that the process of a link does not use the board any more, so that memory may be released."""
        self._users.difference_update([member for member in self._others if self._links[member] is link])
        self._release_if_unused()

    def _release_if_unused(self) -> None:
        """Release the rows and results of this process, once all processes have closed the board, or are lost."""
        if not self._is_closed or self._users:
            return
        loan_pool = self._boards.loan_pool
        for start in self._taken:
            loan_pool.release(start)
        # `_native` is a cached property: looking at it would make a board
        for start in self._native.take_places(True) if "_native" in self.__dict__ else ():
            loan_pool.release(start)
        self.__dict__.pop("_native", None)
        self._taken = set()
        self._boards.forget(self._key)

    def _allocate_rows(self) -> int:
        """Return the note about the rows of a rank for the other processes.

        Without free memory the note lacks `_ROOM`, so that no process uses the board.
        """
        start = self._boards.loan_pool.allocate(BOARD_BYTES)
        if start is not None:  # the memory may have contents of an earlier loan
            self._taken.add(start)
            self._boards.segment.view[start : start + 64 * OPERATIONS] = bytes(64 * OPERATIONS)
        flags = _READS if all(self._links[other].peer.readable for other in self._others) else 0
        return flags if start is None else (start << _FLAG_BITS) | _ROOM | flags

    def receive_rows_note(self, rank: int, note: int) -> None:
        """Record the offset and the flags of a rank's rows. When all ranks have theirs, the board is ready.

        Args:
            rank: A rank of the group, by its number in the world.
            note: Offset and flags of its rows.
        """
        position = self.ranks.index(rank)
        self._starts[position] = note >> _FLAG_BITS
        self.usable &= bool(note & _ROOM)
        self._reads &= bool(note & _READS)
        if min(self._starts) >= 0:
            self.ready = True
            self._notify_waiters()

    def _notify_waiters(self) -> None:
        """Call each function passed to `open`, because the board is ready, or one of its processes is lost."""
        opening, self._waiters = self._waiters, []
        for begin in opening:
            begin()

    def _find_segment(self, position: int) -> Segment:
        """Return the shared memory of the process in which the rank at a position lives."""
        link = self._links.get(self._homes[position])
        return self._boards.segment if link is None else link.peer.segment

    @cached_property
    def _native(self) -> native.Board:
        """The compiled engine's own object for this board, made at first use; all ranks must have opened the board."""
        rows_of_ranks = []
        for position, (start, home) in enumerate(zip(self._starts, self._homes, strict=True)):
            segment, link = self._find_segment(position), self._links.get(home)
            rows = segment.view[start : start + BOARD_BYTES]
            # process whose memory is read; 0 and -1 for this process
            pid, member = (0, -1) if link is None else (link.peer.pid, home)
            rows_of_ranks.append((rows, segment.view, pid, member))
        board = native.Board(self.engine, rows_of_ranks, self._reads)
        if self.lost is not None:
            board.lose()
        return board

    def lose(self, member: int, reason: str) -> None:
        """Mark the board as lost if the lost process has a rank in the group; its operations fail then.

        Args:
            member: Index of the lost process.
            reason: Evidence of the loss, for messages.
        """
        if member in self._others:
            self.lost = self.lost or reason
            if "_native" in self.__dict__:
                self._native.lose()
            self._notify_waiters()
            self._users.discard(member)
            self._release_if_unused()

    # -- operations ---------------------------------------------------------------------------------------------------

    def submit(
        self, table: Table, owner: object, number: int, tag: int, source: int, target: int, priority: int,
        nbytes: int, home: int, *, signature: Signature | None = None, waited_for: bool = False,
    ) -> Run:  # fmt: skip
        """Let the engine carry out a rank's part of an operation, and return the run, which may have ended already.

        The board must be ready and usable.

        Args:
            table: The program of the operation.
            owner: Object whose `on_end` is called on the event loop's thread at the end of the run, unless a thread
                that waits for the run sees the end first.
            number: Number of the operation.
            tag: Tag of the operation, the same for all ranks with equal calls; its last byte is 0.
            source: Address of the input; 0: there is none.
            target: Address of the result; 0: there is none.
            priority: Lower is more urgent.
            nbytes: Length of an input.
            home: Offset, in this process's memory, of a result that all ranks share and this rank loans; 0: none.
            signature: Signature of the call, written next to the row; None: no signature is written. If a rank that the
                run waits for has posted this number with another tag, the run ends as `MISMATCH`, and `Run.position` is
                the position of that rank. A tag has 40 bits of the call, 16 of the number, and 8 zeros.
            waited_for: Whether the calling thread waits for the end at once, so that no thread has to be woken.
        """
        engine, call = self.engine, (self._native, table, owner, number, tag, source, target, priority, home)
        call_fields = (0, b"") if signature is None else (signature.fingerprint, signature.text)
        run = engine.submit(*call, _WAITED_FOR if waited_for else 0, *call_fields)
        if run is None:  # the board has no free memory for an input of this length
            start = self._boards.loan_pool.allocate(nbytes)
            if start is None:
                # the loan_pool has no room: return memory that the board keeps and no operation uses, then try again
                for idle in self._native.take_places(False):
                    self._boards.loan_pool.release(idle)
                start = self._boards.loan_pool.allocate(nbytes)
            if start is not None:
                self._native.add_place(start, nbytes)
            run = engine.submit(*call, _NO_PLACES if start is None else 0, *call_fields)
            assert run is not None, "there is a place, or none to be had"
        return run

    def make_submitter(self, table: Table) -> Callable[..., Run | None]:
        """Return the engine's own function that submits operations with a table, without the calls of `submit`.

        The function returns the run; or None if the board has no memory for an input, as `submit` then takes some.
        """
        return partial(self.engine.submit, self._native, table)

    def row_tag(self, position: int, number: int) -> int:
        """Return the tag of operation `number` in the row of a rank; 0 if the row does not have that operation."""
        # The word of a row is the tag, whose last byte is 0, plus a phase in that byte. Before that byte, the tag has
        # the lower 16 bits of the operation's number.
        tag: int = self._native.row(position, number)[0] & ~0xFF
        return tag if (tag >> 8) & 0xFFFF == number & 0xFFFF else 0

    def row_signature(self, position: int, number: int) -> PlainSignature:
        """Return the signature of operation `number` that the rank at a position has written next to its row.

        Raises:
            LinkLostError: The other process has written something else there.
        """
        try:
            _, _, fingerprint, text = self._native.row(position, number)
        except ValueError as error:
            wrong = f"rank {self.ranks[position]} wrote invalid data into its board: {error}"
            raise LinkLostError(f"{wrong}; {BROKEN_PROTOCOL}") from error
        return PlainSignature(fingerprint, text)

    # -- memory -------------------------------------------------------------------------------------------------------

    def loan_to_all(self, nbytes: int) -> int | None:
        """Loan `nbytes` of this process's memory to all ranks together, and return its offset; None: none is free.

        The loan ends once each rank has called the function that `make_loan_release` returns for it.
        """
        return self._boards.loan_pool.loan(nbytes, len(self.ranks))

    def make_loan_release(self, position: int, owner: int, where: int, nbytes: int) -> Callable[[], None]:
        """Return the function by which a rank of this process releases a loan of `loan_to_all`; any thread may call it.

        Args:
            position: Position of the rank that releases.
            owner: Position of any rank of the process that owns the memory.
            where: Offset that `loan_to_all` returned in that process.
            nbytes: Length of the loan.
        """
        return make_releaser(self._find_segment(owner).view, where, nbytes, position)

    def view_of_loan(self, position: int, where: int, nbytes: int) -> memoryview:
        """Return the memory of a loan, as this process maps it.

        Args:
            position: Position of a rank of the process that owns the memory.
            where: Offset of the loan in that process's memory.
            nbytes: Length of the loan.
        """
        return self._find_segment(position).view[where : where + nbytes]
