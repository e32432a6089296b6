"""Matches of the ends of one operation, the error if they differ, and the history of the calls of ranks here."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..collectives.call import Call
from ..errors import CollectiveMismatchError, PeerFailedError, in_one_line
from .operation import Operation
from .signature import CallSignature, signature_of

if TYPE_CHECKING:
    from ..processes.control import ControlPlane

CHANNEL_BITS = 8

# Runs of equal calls in a history: another process may arrive thousands of operations later, with another call.
REMEMBERED = 4096

# Last operations that were answered.
_ANSWERED = 256


class Key(NamedTuple):
    """Name of a communicator, the same on every rank."""

    ranks: tuple[int, ...]  # World ranks of the group, in its order
    occurrence: int  # Number among the groups with these ranks
    stream: str  # Name of the stream; "" for messages
    src: int = -1  # Group rank that sends messages; -1 for collectives
    dst: int = -1  # Group rank that receives messages; -1 for collectives
    tag: int = -1  # Tag of messages; for parts of trees, their place (see `tree_operation`)

    @property
    def group(self) -> Key:
        """Key of the group: the same for all its communicators."""
        return Key(self.ranks, self.occurrence, "")

    @property
    def id(self) -> int:
        """Id of 40 bits for messages between processes."""
        return self.tag_base() >> 24

    def with_any_tag(self) -> Key:
        """Return the key of messages of all tags between the two ranks."""
        return self._replace(tag=0)

    def tag_base(self, *more: object) -> int:
        """Return 40 bits of a hash of the key, and of more values that must be the same, above 24 free bits."""
        text = repr((*self, *more)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=5).digest(), "big") << 24


class RankCall(NamedTuple):
    """The call of one rank."""

    rank: int  # World rank
    call: Call  # Call that the rank issued
    call_site: str  # Line that issued it


class Match(list["Operation | None"]):
    """The members' ends of one operation by place, as they arrive; None for an end that has not arrived.

    A list, because one is made for every operation, and a constructor in Python takes as long as all its fields.

    Attributes:
        arrived: Number of ends that have arrived.
        pattern: Call of the first arrival, or of the first with dtype and shape.
        first: The operation with that call.
        error: Maker of the error of each end.
        ended: Number of ends here that are over.
        disputed: Whether ends differ, and more must arrive before the minority is clear.
        asked: Whether the other processes know that ranks wait here.
        assumed: Whether its pattern is only inferred from the array for the result.
        remote_calls: Known calls of ranks of other processes.
    """

    arrived = ended = 0
    asked = assumed = False
    remote_calls: Mapping[int, RankCall] = MappingProxyType({})
    pattern: Call | None = None
    first: Operation | None = None
    error: Callable[[], BaseException] | None = None
    disputed = False

    @property
    def ends(self) -> list[Operation]:
        """The ends that have arrived."""
        return [end for end in self if end is not None]

    @property
    def started_ns(self) -> int:
        """Start time of the first end here."""
        return min((end.started_ns for end in self if end is not None), default=0)


class Unfit(Exception):
    """One end of an operation cannot take part; `__cause__` has the reason."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation.label)
        self.operation = operation


def minority_and_majority(rank_calls: Sequence[RankCall]) -> tuple[list[RankCall], list[RankCall]]:
    """Return the smallest and the largest side of ranks that agree; of equal sides, the later one is the minority."""
    sides: list[list[RankCall]] = []
    for rank_call in rank_calls:
        side = next((side for side in sides if side[0].call.agrees(rank_call.call)), None)
        if side is None:
            sides.insert(0, [rank_call])
        else:
            side.append(rank_call)
    return min(sides, key=len), max(reversed(sides), key=len)


def mismatch(
    group: str, seq: int, first: tuple[int, object, str], second: tuple[int, object, str]
) -> Callable[[], CollectiveMismatchError]:
    """Return the maker of the error for two ranks that differ in operation `seq`: a `RankCall` of each, or its text."""
    return partial(
        CollectiveMismatchError,
        group=group,
        seq=seq,
        ranks=(first[0], second[0]),
        calls=(str(first[1]), str(second[1])),
        call_sites=(first[2], second[2]),
    )


def failed_before(operation: Operation, cause: BaseException) -> Callable[[], PeerFailedError]:
    """Return the maker of the error for the other ends of an operation that one end could not take part in."""
    rank = operation.context.rank
    message = f"rank {rank} failed before {operation.label} ({operation.call_site}): {in_one_line(cause)}"
    return partial(PeerFailedError.caused_by, cause, message, culprit=rank)


def gave_up(operation: Operation, cause: BaseException) -> Callable[[], PeerFailedError]:
    """Return the maker of the error for all that follows an operation whose rank waits for it no longer."""
    rank = operation.context.rank
    return partial(PeerFailedError.caused_by, cause, f"rank {rank} gave up: {cause}", culprit=rank)


class History:
    """Calls of the ranks here on a communicator that spans processes.

    Args:
        key: Key of the communicator.

    Attributes:
        id: Name of the communicator in messages between processes.
        group_id: That of its group.
        name: Name of the group in errors.
        members: World ranks of the communicator.
        issued: Number of operations issued by each member here, by world rank.
        runs: Runs of operations with one signature, as [number of the first, number after the last, signature, world
            rank]. A list, because one may be made for every operation.
    """

    __slots__ = ("answered", "group_id", "id", "issued", "members", "name", "runs")

    def __init__(self, key: Key, name: str, members: tuple[int, ...]) -> None:
        self.id: int = key.id
        self.group_id: int = key.group.id
        self.name: str = name
        self.members: tuple[int, ...] = members
        self.issued: dict[int, int] = {}
        self.runs: deque[list[Any]] = deque(maxlen=REMEMBERED)
        self.answered: deque[int] = deque(maxlen=_ANSWERED)  # operations with dtype and shape sent to receivers

    def record(self, operation: Operation) -> None:
        """Record the call of a rank."""
        rank, seq, runs = operation.context.rank, operation.seq, self.runs
        signature = signature_of(operation.call, operation.place)
        self.issued[rank] = max(self.issued.get(rank, 0), seq + 1)
        if runs and runs[-1][1:] == [seq, signature, rank]:
            runs[-1][1] = seq + 1
        elif (own := self.call(seq)) is None or not own.call.has_all_values:
            runs.append([seq, seq + 1, signature, rank])

    @property
    def next_seq(self) -> int:
        """Number of the next operation of the rank here that is furthest ahead."""
        return max(self.issued.values(), default=0)

    def find(self, seq: int) -> tuple[CallSignature, int] | None:
        """Return the signature of an operation, and the rank here; None if it is too old, or to come."""
        for start, stop, signature, rank in reversed(self.runs):
            if start <= seq < stop:
                return signature, rank
        return None

    def call(self, seq: int) -> RankCall | None:
        """Return the call of an operation; None if it is too old, or to come."""
        found = self.find(seq)
        return None if found is None or found[0].call is None else RankCall(found[1], found[0].call, found[0].site)

    def compare(self, seq: int, theirs: RankCall, far: ControlPlane) -> Callable[[], BaseException] | None:
        """Compare the call of a rank elsewhere, which waits, with the one here, and answer it.

        Returns:
            The maker of the error if they differ, which is reported.
        """
        own = self.call(seq)
        if own is None:
            return None
        if not own.call.agrees(theirs.call):
            error = mismatch(self.name, seq, theirs, own)
            far.send_operation_failed(self, seq, error())
            return error
        self.answer(seq, (theirs,), far)
        return None

    def answer(self, seq: int, theirs: Iterable[RankCall], far: ControlPlane) -> None:
        """Send dtype and shape, once, if a rank here has them and another only receives, and has neither."""
        own = self.call(seq)
        asked = any(each.call.dtype is None for each in theirs)
        if asked and own is not None and own.call.dtype is not None and seq not in self.answered:
            self.answered.append(seq)
            far.send_wait(self, seq, own)

    def is_before(self, seq: int) -> bool:
        """Whether an operation is older than the history."""
        return bool(self.runs) and seq < self.runs[0][0]
