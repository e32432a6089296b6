"""States of an operation, and the allowed changes from one to another.

One table holds for everything that a program can await: collectives, messages, computes, tasks, and derived futures, in
real and in virtual time. `docs/architecture.md` shows the states as a user sees them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class OperationState(IntEnum):
    """State of an operation. From `DONE` on, it has ended; so `state >= DONE` asks whether it has."""

    ISSUED = 0  #: issued by the program; no stream has admitted it yet, or its sources have not ended
    QUEUED = 1  #: waits for room in the window of its stream, or for its turn on a compute stream
    ADMITTED = 2  #: has room, and begins when the operation that made room has been delivered
    BLOCKED = 3  #: has its turn, and waits for its inputs
    MATCHING = 4  #: waits for other ranks
    RUNNING = 5  #: its bytes move, or its function runs
    UNWANTED = 6  #: a receive that may have met a message, and that no task waits for any more
    CANCELLING = 7  #: a receive that is cancelled, while the transport takes it back
    STOPPING = 8  #: has failed, and its bytes are being stopped
    PARKED = 9  #: a receive that has given its place back, until a task awaits it again
    DONE = 10  #: has a result
    FAILED = 11  #: has an error
    CANCELLED = 12  #: was withdrawn, or one of its inputs was

    @property
    def word(self) -> str:
        """Name of the state in messages."""
        return self.name.lower()


(
    ISSUED, QUEUED, ADMITTED, BLOCKED, MATCHING, RUNNING, UNWANTED, CANCELLING, STOPPING, PARKED,
    DONE, FAILED, CANCELLED,
) = OperationState  # fmt: skip

_ENDS = (DONE, FAILED, CANCELLED)

TABLE: Final[dict[OperationState, tuple[OperationState, ...]]] = {
    ISSUED: (QUEUED, BLOCKED, MATCHING, RUNNING, *_ENDS),
    QUEUED: (ADMITTED, BLOCKED, MATCHING, RUNNING, PARKED, *_ENDS),
    ADMITTED: (BLOCKED, MATCHING, PARKED, *_ENDS),
    BLOCKED: (BLOCKED, MATCHING, RUNNING, *_ENDS),
    MATCHING: (ISSUED, RUNNING, UNWANTED, CANCELLING, PARKED, *_ENDS),
    RUNNING: (UNWANTED, CANCELLING, STOPPING, PARKED, *_ENDS),
    UNWANTED: (MATCHING, RUNNING, CANCELLING, STOPPING, PARKED, *_ENDS),
    CANCELLING: (PARKED, *_ENDS),
    STOPPING: (FAILED, CANCELLED),
    PARKED: (ISSUED, *_ENDS),
    DONE: (PARKED,),
    FAILED: (),
    CANCELLED: (),
}
"""States that may follow each state.

Only receives become `UNWANTED`, `CANCELLING` or `PARKED`, which is also the one way back from `DONE`: a message that
no task has taken goes to the next receive. `MATCHING` goes back to `ISSUED` if a receive from any source has chosen
a sender.
"""

# Rows of truth values: each operation looks some up, and members of an enum are slow to find in sets.
FOLLOWS: Final = tuple(tuple(after in TABLE[state] for after in OperationState) for state in OperationState)
"""`FOLLOWS[state][after]`: whether `after` may follow `state`."""


class TransitionError(RuntimeError):
    """A forbidden change of state: an error in this library, not in the program.

    Attributes:
        before: State of the operation, which does not change.
        after: The forbidden next state.
        operation: Label, line and rank of the operation, for the text.
    """

    def __init__(self, before: OperationState, after: OperationState) -> None:
        super().__init__(before, after)
        self.before: OperationState = before
        self.after: OperationState = after
        self.operation: str = "an operation"

    def __str__(self) -> str:
        change = f"{self.operation} is {self.before.word} and cannot become {self.after.word}"
        return f"{change}: this is a bug in overlap, please report it"
