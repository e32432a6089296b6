"""Where the ranks of a group meet: matching by sequence number, and the check that they mean the same operation.

A `Channel` is shared by the ranks of this process that are in one group, for one stream. A `Port` is one rank's end of
it: its place in the group, its stream, and the number of its next operation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ..collectives.call import Call
from ..errors import CollectiveMismatchError, PeerFailedError, RankLeftError, UsageError
from .future import Failure

if TYPE_CHECKING:
    from .operation import CollectiveFuture
    from .stream import Stream
    from .world import World

Operation: TypeAlias = "CollectiveFuture[object]"

__all__ = ["Channel", "Meeting", "Port"]


class Port:
    """One rank's end of a channel: its position in the group, and its place in meetings, which mostly is the same."""

    __slots__ = ("channel", "next_seq", "place", "position", "stream", "towards")

    def __init__(self, channel: Channel, position: int, stream: Stream, towards: str = "") -> None:
        self.channel, self.position, self.stream = channel, position, stream
        self.place = channel.place(position, stream.rank.rank)
        self.next_seq, self.towards = 0, towards  # the peer of messages, for people to read


class Meeting:
    """The members' ends of one operation, as they arrive."""

    __slots__ = ("arrived", "count", "error", "first", "pattern")

    def __init__(self, members: int) -> None:
        self.arrived: list[Operation | None] = [None] * members
        self.count = 0
        self.pattern: Call | None = None  # of the first arrival, or of the first that says dtype and shape
        self.first: Operation | None = None  # whose call that is
        self.error: Callable[[], BaseException] | None = None


class Channel:
    """The operations that the members of one group issue on one stream, in their common order.

    Attributes:
        key: What names the channel on every rank alike.
        name: Of the group, for messages.
        members: World ranks that meet, in group order.
        size: How many ranks the group has: all of these, unless some stand for others.
        here: How many of the members live in this process; all of them, unless it is a `FarChannel`.
        direct: Whether their operations take the short cut through shared memory.
        label: The key as text.
        tag_base: Where this channel's transport tags begin; 40 bits of a hash of `key`, 24 bits free.
    """

    def __init__(self, world: World, key: tuple[object, ...], name: str, members: tuple[int, ...]) -> None:
        self.key, self.name, self.members = key, name, members
        self.size = self.here = len(members)
        self.direct = world.engine.direct(self.size) or len(set(members)) == 1  # a rank with itself needs no wire
        self.label = repr(key)  # long: it names all members
        self.tag_base = int.from_bytes(hashlib.blake2b(self.label.encode(), digest_size=5).digest(), "big") << 24
        self._world, self._engine = world, world.engine
        self._meetings: dict[int, Meeting] = {}

    def place(self, position: int, rank: int) -> int:
        """Return which of `members` a world rank is that has a position in the group."""
        return position

    def arrive(self, operation: Operation) -> None:
        """Take in one rank's end; with the last one, or at once where data must travel, the work begins."""
        seq = operation.seq
        meeting = self._meetings.get(seq)
        if meeting is None:
            meeting = self._meetings[seq] = Meeting(self.here)
            if self._world.left:
                self._check_left(meeting, operation)
        meeting.arrived[operation.port.place] = operation
        meeting.count += 1
        if meeting.pattern is not operation.call:
            self._compare(meeting, operation)
        if meeting.count == self.here:
            del self._meetings[seq]
        elif self.direct and meeting.error is None:
            operation.lend()
            return
        if meeting.error is not None:
            operation.fail(Failure(meeting.error()))
        else:
            self._engine.arrived(self, meeting, operation)

    def withdraw(self, operation: Operation, failure: Failure) -> None:
        """Fail the whole meeting because one rank has no input for it."""
        meeting = self._meetings.setdefault(operation.seq, Meeting(self.here))
        meeting.count += 1
        if meeting.count == self.here:
            del self._meetings[operation.seq]
        self.fail_one(meeting, operation, failure)

    def fail_one(self, meeting: Meeting, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end with its own error, and the other ends because of it."""
        rank = self.members[operation.port.place]
        message = (
            f"rank {rank} failed before {operation._label()} ({operation.call_site}): "
            f"{type(failure.error).__name__}: {failure.error}"
        )
        operation.fail(failure)
        self._fail(meeting, lambda: PeerFailedError.caused_by(failure.error, message, culprit=rank))

    def rank_left(self, rank: int) -> None:
        """Fail the meetings that wait for `rank`, which has finished its program."""
        for seq, meeting in list(self._meetings.items()):
            if rank in self.missing(seq) and meeting.pattern is not None and meeting.error is None:
                self._fail(meeting, self._left_error(rank, meeting))

    def missing(self, seq: int) -> list[int]:
        """World ranks that have not come to operation `seq`, if some rank has."""
        meeting = self._meetings.get(seq)
        ends = meeting.arrived if meeting is not None else ()
        return [rank for rank, end in zip(self.members, ends, strict=False) if end is None]

    def forget(self, seq: int) -> None:
        """Drop a meeting that will not take place."""
        self._meetings.pop(seq, None)

    def tag(self, pattern: Call, seq: int) -> int:
        """Return the first of the transport tags of operation `seq`; its channels count on from there."""
        return self.tag_base + ((seq & 0xFFFF) << 8)

    def ended(self, meeting: Meeting, operation: Operation) -> None:
        """Take note that one rank's end of a met operation is over."""

    def _gone(self, seq: int) -> set[int]:
        """World ranks that have finished their program without coming to operation `seq`, which nobody here has."""
        return self._world.left.intersection(self.members)

    def _check_left(self, meeting: Meeting, operation: Operation) -> None:
        gone = self._gone(operation.seq)
        if gone:
            meeting.arrived[operation.port.place] = operation
            meeting.error = self._left_error(min(gone), meeting)

    def _left_error(self, rank: int, meeting: Meeting) -> Callable[[], RankLeftError]:
        ends = [end for end in meeting.arrived if end is not None]
        waiting = ", ".join(str(end.port.stream.rank.rank) for end in ends)
        message = (
            f"rank {rank} finished its program while rank {waiting} waits for it in {ends[0]._label()} "
            f"({ends[0].call_site})"
        )
        return lambda: RankLeftError(message, culprit=rank)

    def _compare(self, meeting: Meeting, operation: Operation) -> None:
        pattern, asked = meeting.pattern, operation.call
        if pattern is None or (pattern.dtype is None and pattern.agrees(asked)):
            meeting.pattern, meeting.first = asked, operation
            self._check_results(meeting)
        elif meeting.error is None and asked.dtype is None and pattern.agrees(asked):
            self._check_results(meeting)
        elif meeting.error is None and not pattern.agrees(asked):
            assert meeting.first is not None
            self._fail(meeting, self._mismatch(meeting.first, operation))

    def _check_results(self, meeting: Meeting) -> None:
        """Compare the arrays given by ranks that only receive, now that somebody has said what travels."""
        assert meeting.pattern is not None
        for end in meeting.arrived:
            if end is not None and meeting.error is None:
                try:
                    end.check_result(meeting.pattern)
                except UsageError as error:
                    self.fail_one(meeting, end, Failure(error))

    def _mismatch(self, first: Operation, second: Operation) -> Callable[[], CollectiveMismatchError]:
        return partial(
            CollectiveMismatchError,
            group=self.name,
            seq=second.seq,
            ranks=(self.members[second.port.place], self.members[first.port.place]),
            calls=(str(second.call), str(first.call)),
            call_sites=(second.call_site, first.call_site),
        )

    def _fail(self, meeting: Meeting, error: Callable[[], BaseException]) -> None:
        """Fail every end, each with an error of its own: one exception raised in two tasks would mix tracebacks."""
        meeting.error = error
        for end in meeting.arrived:
            if end is not None:
                end.fail(Failure(error()))
