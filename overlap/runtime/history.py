"""History of the calls of the ranks here on a communicator that spans processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .match import Key, RankCall, mismatch
from .operation import Operation
from .signature import CallSignature, signature_of

if TYPE_CHECKING:
    from ..processes.control import ControlPlane

# Runs of equal calls in a history: another process may arrive thousands of operations later, with another call.
REMEMBERED = 4096

# Last operations that were answered.
_ANSWERED = 256


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
