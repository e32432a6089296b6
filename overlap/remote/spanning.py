"""Channels whose members live in several processes.

Here only the ranks of this process meet; their programs start as soon as anybody has said what travels. That the
others mean the same is checked without a message on the way: the tags of an operation are made from what it is, so
ranks that disagree exchange no byte. Both wait then, and `Neighbours` tells what waits for long; whoever hears of an
operation that differs from its own fails it everywhere, with both calls.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, TypeAlias

from ..collectives.call import Call
from ..collectives.kinds import Collective
from ..errors import CollectiveMismatchError, PeerFailedError
from ..runtime.communicator import Channel, Meeting
from ..runtime.future import Failure
from ..timeline.spans import call_site

if TYPE_CHECKING:
    from ..runtime.operation import CollectiveFuture
    from ..runtime.world import World
    from .control_plane import Neighbours

Operation: TypeAlias = "CollectiveFuture[object]"
CodePlace: TypeAlias = tuple[CodeType, int]

__all__ = ["FarChannel", "Said"]

# How many finished operations a channel remembers, for a neighbour that comes to them late and with another call. A
# sender of small messages may be ahead by as many as its transport takes without a receiver.
_REMEMBERED = 256

_ANNOUNCED = (Collective.BROADCAST, Collective.SCATTER)
"""Operations in which ranks that only receive need not say dtype and shape: the root's process tells the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One rank's call of one operation, as a neighbour tells it.

    Attributes:
        rank: World rank that made it.
        call: What it asked for.
        call_site: Where.
    """

    rank: int
    call: Call
    call_site: str


class FarMeeting(Meeting):
    """A meeting of which only some ends are in this process."""

    __slots__ = ("ended", "heard_of", "told")

    def __init__(self, members: int) -> None:
        super().__init__(members)
        self.ended = 0
        self.told = False  # whether the neighbours know that ranks wait here
        self.heard_of: set[int] = set()  # ranks elsewhere that are known to be in it

    @property
    def started_ns(self) -> int:
        """When the first of ours came."""
        return min((end.started_ns for end in self.arrived if end is not None), default=0)


class FarChannel(Channel):
    """A channel of which only some members are in this process.

    Attributes:
        id: Names the channel in what processes tell each other.
        issued: Of the members here, by world rank: how many operations they have issued.
    """

    _meetings: dict[int, FarMeeting]  # type: ignore[assignment]

    def __init__(
        self, world: World, key: tuple[object, ...], name: str, members: tuple[int, ...], neighbours: Neighbours
    ) -> None:
        super().__init__(world, key, name, members)
        self.direct = False
        self.here = sum(member in world.local for member in members)
        self.id = self.tag_base >> 24
        self.issued: dict[int, int] = {}
        self._neighbours = neighbours
        self._bases: dict[Call, int] = {}
        self._past: OrderedDict[int, tuple[int, Call, CodePlace]] = OrderedDict()
        self._broken: Callable[[], BaseException] | None = None

    def tag(self, pattern: Call, seq: int) -> int:
        """Return a tag that no rank shares which means another operation."""
        base = self._bases.get(pattern)
        if base is None:
            told = f"{self.key!r} {pattern}".encode()
            base = int.from_bytes(hashlib.blake2b(told, digest_size=5).digest(), "big") << 24
            self._bases[pattern] = base
        return base + ((seq & 0xFFFF) << 8)

    # -- our own ranks -------------------------------------------------------------------------------------------

    def arrive(self, operation: Operation) -> None:
        """Take in one rank's end; its program starts as soon as it is known what travels."""
        seq, position = operation.seq, operation.port.position
        meeting = self._meetings.get(seq)
        if meeting is None:
            meeting = self._open(operation)
        meeting.arrived[position] = operation
        meeting.count += 1
        self.issued[self.members[position]] = max(seq + 1, self.issued.get(self.members[position], 0))
        if meeting.pattern is not operation.call:
            self._compare(meeting, operation)
        if operation.kind in _ANNOUNCED and operation.call.dtype is not None:
            self._neighbours.tell_call(self, seq, self._said(operation))
        for said in self._neighbours.said_before(self.id, seq):
            self.hear(seq, said)
        if meeting.error is not None:
            operation.fail(Failure(meeting.error()))
            self.ended(meeting, operation)
        else:
            self._engine.arrived(self, meeting, operation)

    def _open(self, operation: Operation) -> FarMeeting:
        meeting = self._meetings[operation.seq] = FarMeeting(self.size)
        meeting.error = self._broken
        if self._world.left and meeting.error is None:
            self._check_left(meeting, operation)
        return meeting

    def ended(self, meeting: Meeting, operation: Operation) -> None:
        """Forget a meeting once all of our ends are over, but for what was called."""
        assert isinstance(meeting, FarMeeting)
        meeting.ended += 1
        if meeting.ended == self.here and self._meetings.pop(operation.seq, None) is not None:
            self._past[operation.seq] = (self.members[operation.port.position], operation.call, operation.place)
            if len(self._past) > _REMEMBERED:
                self._past.popitem(last=False)

    def withdraw(self, operation: Operation, failure: Failure) -> None:
        """Fail the whole meeting, here and elsewhere, because one rank has no input for it."""
        meeting = self._meetings.setdefault(operation.seq, FarMeeting(self.size))
        meeting.count += 1
        self.fail_one(meeting, operation, failure)

    def fail_one(self, meeting: Meeting, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end with its own error, and all other ends because of it."""
        super().fail_one(meeting, operation, failure)
        assert meeting.error is not None
        self._neighbours.tell_failed_end(self, operation.seq, self.members[operation.port.position], meeting.error())

    def missing(self, seq: int) -> list[int]:
        """World ranks that are not known to have come to operation `seq`, if some rank has."""
        meeting = self._meetings.get(seq)
        return [rank for rank in super().missing(seq) if meeting is None or rank not in meeting.heard_of]

    def waiting(self, before_ns: int) -> Iterator[tuple[int, Said]]:
        """Find what has been under way since `before_ns` or longer and has not been told; it counts as told now."""
        for seq, meeting in self._meetings.items():
            if not meeting.told and meeting.first is not None and meeting.started_ns <= before_ns:
                meeting.told = True
                for end in meeting.arrived:
                    if end is not None:
                        yield seq, self._said(end)

    def _said(self, operation: Operation) -> Said:
        rank = self.members[operation.port.position]
        return Said(rank=rank, call=operation.call, call_site=operation.call_site)

    # -- what the neighbours say ---------------------------------------------------------------------------------

    def hear(self, seq: int, said: Said) -> bool:
        """Compare a neighbour's call with ours; False if none of ours has come to it yet."""
        meeting = self._meetings.get(seq)
        if meeting is None or meeting.first is None:
            mine = self._past.get(seq)
            if mine is not None and not mine[1].agrees(said.call):
                self._differ(seq, Said(rank=mine[0], call=mine[1], call_site=call_site(*mine[2])), said)
            return mine is not None or meeting is not None or seq < max(self.issued.values(), default=0) - _REMEMBERED
        meeting.heard_of.add(said.rank)
        assert meeting.pattern is not None
        if not meeting.pattern.agrees(said.call):
            self._differ(seq, self._said(meeting.first), said)
        elif meeting.pattern.dtype is None and said.call.dtype is not None:
            meeting.pattern = said.call
            self._check_results(meeting)
            self._engine.start(self, meeting)
        return True

    def _differ(self, seq: int, mine: Said, theirs: Said) -> None:
        error = partial(
            CollectiveMismatchError,
            group=self.name,
            seq=seq,
            ranks=(theirs.rank, mine.rank),
            calls=(str(theirs.call), str(mine.call)),
            call_sites=(theirs.call_site, mine.call_site),
        )
        self._neighbours.tell_difference(self, seq, error())
        self.fail_here(seq, error)

    def fail_here(self, seq: int, error: Callable[[], BaseException]) -> None:
        """Fail our ends of operation `seq`, and of all to come if it is over or nobody has come to it."""
        meeting = self._meetings.get(seq)
        if meeting is None:
            self._broken = error
        elif meeting.error is None:
            self._fail(meeting, error)

    def hear_failed_end(self, seq: int, culprit: int, message: str) -> None:
        """Fail our ends because of a rank elsewhere."""
        self.fail_here(seq, lambda: PeerFailedError(message, culprit=culprit))

    # -- ranks that have finished --------------------------------------------------------------------------------

    def rank_left(self, rank: int) -> None:
        """Fail the meetings that wait for `rank`, which has finished its program."""
        for seq, meeting in list(self._meetings.items()):
            if self._lacks(meeting, rank, seq) and meeting.pattern is not None and meeting.error is None:
                self._fail(meeting, self._left_error(rank, meeting))

    def _lacks(self, meeting: Meeting, rank: int, seq: int) -> bool:
        if rank in self._world.local:
            return meeting.arrived[self.members.index(rank)] is None
        return rank in self._gone(seq)

    def _gone(self, seq: int) -> set[int]:
        return {rank for rank in super()._gone(seq) if seq >= self._issued_by(rank)}

    def _issued_by(self, rank: int) -> int:
        if rank in self._world.local:
            return self.issued.get(rank, 0)
        return self._neighbours.issued_by(rank, self.id)
