"""Failures of operations, and their causes: which of them a program was given."""

from __future__ import annotations


class FailureCause:
    """FailureCause of failed operations: one failed compute, or one loss that many operations met.

    Attributes:
        seen: Whether any task or thread was given the error of an operation that failed of it.
    """

    __slots__ = ("_unseen", "seen")

    def __init__(self, *, seen: bool = False) -> None:
        self.seen: bool = seen
        self._unseen: dict[FailureCause, Failure] | None = None

    def keep_in(self, unseen: dict[FailureCause, Failure], failure: Failure) -> None:
        """Keep one of its failures among the unseen ones of a rank, until it is seen."""
        self._unseen = unseen
        unseen.setdefault(self, failure)

    def note_seen(self) -> None:
        """Note that a program was given an error of it; the rank keeps its failure no longer."""
        self.seen = True
        unseen, self._unseen = self._unseen, None
        if unseen is not None:
            unseen.pop(self, None)


class Failure:
    """One error, shared by the future of the operation that raised it and by futures that depended on it.

    Attributes:
        error: The exception as raised.
        awaiters: Tasks that await it at a checkpoint.
        cause: What made the operation fail, which other failures may share.
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
        """Whether any task or thread was given it, or another error of its cause."""
        return self.cause.seen

    def note_seen(self) -> None:
        """Note that a task or thread was given it; an unseen failure fails its rank at the end."""
        self.cause.note_seen()
