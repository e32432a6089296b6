"""Failures of operations, and their causes, with a mark for causes that a program was given."""

from __future__ import annotations


class FailureCause:
    """Cause of failed operations: one failed compute, or one loss that many operations met.

    Attributes:
        seen: Whether any task or thread was given an error of this cause.
    """

    __slots__ = ("_unseen", "seen")

    def __init__(self, *, seen: bool = False) -> None:
        self.seen: bool = seen
        self._unseen: dict[FailureCause, Failure] | None = None

    def keep_in(self, unseen: dict[FailureCause, Failure], failure: Failure) -> None:
        """Put a failure of this cause among a rank's unseen ones, until the cause is seen."""
        self._unseen = unseen
        unseen.setdefault(self, failure)

    def mark_seen(self) -> None:
        """Note that a program was given an error of this cause, and remove it from the unseen ones."""
        self.seen = True
        unseen, self._unseen = self._unseen, None
        if unseen is not None:
            unseen.pop(self, None)


class Failure:
    """One error, shared by the future of the operation that raised it and by futures that depended on it.

    Args:
        seen: Whether somebody has got the error.

    Attributes:
        error: The exception as raised.
        awaiters: Number of tasks that await it at a checkpoint.
        cause: Cause of the failure, which other failures may share.
        prompt: Whether it ends its rank at once if nobody awaits it: an error of the rank's own code.
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
        """Note that a task or thread was given the error; an unseen failure fails its rank at the end."""
        self.cause.mark_seen()
