"""Matches of the ranks' ends of one operation, errors for ends that differ, and histories of this process's calls."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..collectives.call import Call
from ..errors import CollectiveMismatchError, PeerFailedError, one_line_text
from .operation import Operation
from .signature import CallSignature, signature_of

if TYPE_CHECKING:
    from ..processes.control import ControlPlane

CHANNEL_BITS = 8

# Most runs of equal calls in a history: another process may arrive thousands of operations later, with another call.
REMEMBERED = 4096

# Number of the last answered operations that a history remembers.
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
        """The key in 40 bits, for messages between processes: a hash that is the same in every process."""
        return self.tag_base() >> 24

    def tag_base(self, *more: object) -> int:
        """Return a hash of the key, and of `more` values, in the upper 40 of 64 bits; the lower 24 bits are 0."""
        text = repr((*self, *more)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=5).digest(), "big") << 24


class RankCall(NamedTuple):
    """The call of one rank."""

    rank: int  # World rank
    call: Call  # Call that the rank issued
    call_site: str  # Line that issued it


class Match(list["Operation | None"]):
    """The ends of one operation: a list with each rank's operation, by `Port.match_index`; None until it has arrived.

    It is a list with class attributes, because one is made for every operation, and `list(...)` runs no Python code.

    Attributes:
        arrived: Number of ends that have arrived.
        pattern: The call that all others are compared with: that of the first end, or of the first with a shape.
        first: The operation with that call.
        error: Makes the error that each end fails with; None as long as nothing has failed.
        ended: Number of ends in this process that are over.
        disputed: Whether ends differ, and more must arrive before the minority is clear.
        asked: Whether the other processes know that ranks here wait.
        assumed: Whether dtype and shape of `pattern` are only inferred from the array for the result.
        remote_calls: Calls of ranks of other processes, as far as known, by world rank.
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
        """Instant at which the first end in this process arrived; 0 without one."""
        return min((end.started_ns for end in self if end is not None), default=0)


class Unfit(Exception):
    """Raised if one rank's end of an operation, `operation`, cannot take part. `__cause__` has the reason."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation.label)
        self.operation = operation


def minority_and_majority(rank_calls: Sequence[RankCall]) -> tuple[list[RankCall], list[RankCall]]:
    """Split ranks into sides with equal calls; return the smallest side and the largest.

    Of sides of equal size, the one that began last is the minority, the one that began first the majority.
    """
    sides: list[list[RankCall]] = []
    for rank_call in rank_calls:
        side = next((side for side in sides if side[0].call.agrees(rank_call.call)), None)
        if side is None:
            sides.insert(0, [rank_call])
        else:
            side.append(rank_call)
    return min(sides, key=len), max(reversed(sides), key=len)


def mismatch_error_maker(
    group: str, seq: int, first: tuple[int, object, str], second: tuple[int, object, str]
) -> Callable[[], CollectiveMismatchError]:
    """Return the maker of the error for two ranks that differ.

    Args:
        group: Name of the group.
        seq: Number of the operation.
        first: World rank, call and line of one of the two; a `RankCall` is such a tuple.
        second: World rank, call and line of the other one.
    """
    return partial(
        CollectiveMismatchError,
        group=group,
        seq=seq,
        ranks=(first[0], second[0]),
        calls=(str(first[1]), str(second[1])),
        call_sites=(first[2], second[2]),
    )


def peer_error_maker(operation: Operation, cause: BaseException) -> Callable[[], PeerFailedError]:
    """Return the maker of the error for the other ranks of an operation in which one rank cannot take part.

    Args:
        operation: The end of the rank that cannot take part.
        cause: The error of that end.
    """
    rank = operation.context.rank
    message = f"rank {rank} failed before {operation.label} ({operation.call_site}): {one_line_text(cause)}"
    return partial(PeerFailedError.caused_by, cause, message, culprit=rank)


def gave_up_error_maker(operation: Operation, cause: BaseException) -> Callable[[], PeerFailedError]:
    """Return the maker of the error for the operations that fail because one rank has given up waiting.

    Args:
        operation: The operation that the rank has given up.
        cause: The error of that operation, such as that of a deadline.
    """
    rank = operation.context.rank
    return partial(PeerFailedError.caused_by, cause, f"rank {rank} gave up: {cause}", culprit=rank)


class History:
    """Past calls of this process's ranks on a communicator that spans processes, to compare with other processes.

    Args:
        key: Key of the communicator, or of a group that is aborted.
        name: Name of the group in errors.
        members: World ranks of the communicator.

    Attributes:
        id: `key.id`, which names the communicator in messages between processes.
        group_id: The same for the group of the communicator.
        issued: Number of operations that each rank of this process has issued, by world rank.
        runs: Successive operations with one signature, as lists [number of the first, number after the last, signature,
            world rank]. Operations 3 to 7 of rank 1 are [3, 8, signature, 1].
        answered: Numbers of the last operations whose dtype and shape were sent to ranks that only receive.
    """

    __slots__ = ("answered", "group_id", "id", "issued", "members", "name", "runs")

    def __init__(self, key: Key, name: str, members: tuple[int, ...]) -> None:
        self.id: int = key.id
        self.group_id: int = key.group.id
        self.name: str = name
        self.members: tuple[int, ...] = members
        self.issued: dict[int, int] = {}
        self.runs: deque[list[Any]] = deque(maxlen=REMEMBERED)
        self.answered: deque[int] = deque(maxlen=_ANSWERED)

    def record(self, operation: Operation) -> None:
        """Record the call of a rank of this process.

        One call of each operation is enough: the first, or the first with a shape.
        """
        rank, seq, runs = operation.context.rank, operation.seq, self.runs
        signature = signature_of(operation.call, operation.place)
        self.issued[rank] = max(self.issued.get(rank, 0), seq + 1)
        if runs and runs[-1][1:] == [seq, signature, rank]:  # the next one of the run
            runs[-1][1] = seq + 1
        elif (own := self.find_call(seq)) is None or not own.call.has_all_values:
            runs.append([seq, seq + 1, signature, rank])

    @property
    def next_seq(self) -> int:
        """Number of operations that the rank of this process that is furthest ahead has issued."""
        return max(self.issued.values(), default=0)

    def find_signature(self, seq: int) -> tuple[CallSignature, int] | None:
        """Return the signature of operation `seq`, and the world rank that issued it here.

        Return None if no rank here has issued it, or the history no longer goes back so far.
        """
        for start, stop, signature, rank in reversed(self.runs):
            if start <= seq < stop:
                return signature, rank
        return None

    def find_call(self, seq: int) -> RankCall | None:
        """Return the call of operation `seq` by a rank of this process, or None as `find_signature` does."""
        found = self.find_signature(seq)
        return None if found is None else RankCall(found[1], cast(Call, found[0].call), found[0].site)

    def compare_and_answer(
        self, seq: int, theirs: RankCall, control: ControlPlane
    ) -> Callable[[], BaseException] | None:
        """Compare the call of a waiting rank of another process with the call here, and answer that process.

        Args:
            seq: Number of the operation.
            theirs: The call of the waiting rank.
            control: Sends the answer, or a report of the difference.

        Returns:
            The maker of the error if the calls differ; the caller fails the operation here. None if they agree, or no
            call is known here.
        """
        own = self.find_call(seq)
        if own is None:
            return None
        if not own.call.agrees(theirs.call):
            error = mismatch_error_maker(self.name, seq, theirs, own)
            control.send_operation_failed(self, seq, error())
            return error
        self.answer_with_shape(seq, (theirs,), control)
        return None

    def answer_with_shape(self, seq: int, theirs: Iterable[RankCall], control: ControlPlane) -> None:
        """Send dtype and shape to the other processes, once, if a rank here knows them and one of `theirs` does not.

        Args:
            seq: Number of the operation.
            theirs: Known calls of ranks of other processes. One that only receives has no dtype.
            control: Sends the answer.
        """
        own = self.find_call(seq)
        asked = any(each.call.dtype is None for each in theirs)
        if asked and own is not None and own.call.dtype is not None and seq not in self.answered:
            self.answered.append(seq)
            control.send_waiting_call(self, seq, own)

    def has_forgotten(self, seq: int) -> bool:
        """Whether the history no longer goes back to operation `seq`."""
        return bool(self.runs) and seq < self.runs[0][0]
