"""Failures of operations, and their causes. A cause is "seen" once a task or thread was given an error of it."""

from __future__ import annotations


class FailureCause:
    """Cause of one or many failed operations, such as a failed compute or a lost process.

    Attributes:
        seen: Whether any task or thread was given an error of this cause.
    """

    __slots__ = ("_unseen", "seen")

    def __init__(self, *, seen: bool = False) -> None:
        self.seen: bool = seen
        # the rank's dict of unseen failures, if this cause is in it
        self._unseen: dict[FailureCause, Failure] | None = None

    def add_to_unseen(self, unseen: dict[FailureCause, Failure], failure: Failure) -> None:
        """Put a failure of this cause into `unseen`, a rank's dict of unseen failures, until the cause is seen."""
        self._unseen = unseen
        unseen.setdefault(self, failure)

    def mark_seen(self) -> None:
        """Record that a task or thread was given an error of this cause, and remove it from the unseen failures."""
        self.seen = True
        unseen, self._unseen = self._unseen, None
        if unseen is not None:
            unseen.pop(self, None)


class Failure:
    """An error of an operation. Operations that fail because it was their input share the object.

    Args:
        error: The exception as raised.
        seen: Whether the failure counts as seen from the start; an unseen failure fails its rank at the end.
        prompt: Whether it ends its rank at once if no task awaits it: for errors of the rank's own code.

    Attributes:
        awaiters: Number of tasks that are at the checkpoint of an await, after which they raise this error.
        cause: Cause of the failure, which other failures may share.
    """

    __slots__ = ("awaiters", "cause", "error", "prompt")

    def __init__(self, error: BaseException, *, seen: bool = False, prompt: bool = False) -> None:
        self.error: BaseException = error
        self.awaiters: int = 0
        self.cause: FailureCause = FailureCause(seen=seen)
        self.prompt: bool = prompt

    @property
    def seen(self) -> bool:
        """Whether any task or thread was given this error, or another one of its cause."""
        return self.cause.seen

    def mark_seen(self) -> None:
        """Record that a task or thread was given the error; an unseen failure fails its rank at the end."""
        self.cause.mark_seen()
