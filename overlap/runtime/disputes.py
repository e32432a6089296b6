"""Disputes: comparison of the ends of a match, which fails if ranks disagree."""

from __future__ import annotations

from collections.abc import Callable

import trio

from ..errors import CollectiveMismatchError, PeerFailedError, UsageError, in_one_line
from .arguments import check_result
from .failure import Failure
from .match import Match, RankCall, minority_and_majority, mismatch
from .operation import Operation

# Time that two differing ranks wait for a third, to know the minority.
_DISPUTE_S = 0.05


class Disputes:
    """The part of a communicator that compares the ends of a match."""

    name: str
    members: tuple[int, ...]
    direct: bool

    def fail_one(self, match: Match, operation: Operation, failure: Failure) -> None:
        """Fail one rank's end with its own error, and the other ends because of it."""
        rank = self.members[operation.port.place]
        message = f"rank {rank} failed before {operation.label} ({operation.call_site}): {in_one_line(failure.error)}"
        operation.fail(failure)
        self._fail(match, lambda: PeerFailedError.caused_by(failure.error, message, culprit=rank))

    def _compare(self, match: Match, operation: Operation) -> None:
        """Compare an operation with the pattern of its match; dispute it if the calls differ."""
        pattern, call = match.pattern, operation.call
        if match.disputed:
            self._dispute(match, operation)
        elif pattern is None:  # no other end arrived, and its own result was checked with its arguments
            match.pattern, match.first = call, operation
        elif pattern.dtype is None and pattern.agrees(call):
            match.pattern, match.first = call, operation
            self._check_results(match)
        elif match.error is None and call.dtype is None and pattern.agrees(call):
            self._check_results(match)
        elif match.error is None and not pattern.agrees(call):
            self._dispute(match, operation)

    def _check_results(self, match: Match) -> None:
        """Compare the `out` of ranks that only receive with the dtype and shape, which are known now."""
        assert match.pattern is not None
        for end in match:
            if end is not None and match.error is None:
                try:
                    check_result(end.out, match.pattern, end.member.rank)
                except UsageError as error:
                    self.fail_one(match, end, Failure(error))

    def _dispute(self, match: Match, operation: Operation, *, final: bool = False) -> None:
        """Fail a match with different ends, once the minority is known: for sides of equal size more ends may arrive.

        It waits for more ends only if the communicator is direct: no bytes move there until all have arrived. Otherwise
        some ends could succeed in the meantime.

        Args:
            operation: Any of its ends here.
            final: Whether to wait for no more ends.
        """
        if match.error is not None:
            return
        rank_calls = self._rank_calls(match)
        few, many = minority_and_majority(rank_calls)
        if final or not self.direct or len(few) < len(many) or len(rank_calls) == len(self.members):
            self._fail_dispute(match, operation.seq, mismatch(self.name, operation.seq, few[0], many[0]))
        elif not match.disputed:
            match.disputed, match.pattern = True, None  # so that each later end is compared
            operation.context.spawn(self._dispute_later, match, operation)

    async def _dispute_later(self, match: Match, operation: Operation) -> None:
        """Fail a match after a time in which further ranks may show which side is the minority."""
        await trio.sleep(_DISPUTE_S)
        self._dispute(match, operation, final=True)

    def _rank_calls(self, match: Match) -> list[RankCall]:
        """Return the calls of all ranks that are known to have arrived."""
        return [RankCall(self.members[end.port.place], end.call, end.call_site) for end in match.ends]

    def _fail_dispute(self, match: Match, seq: int, error: Callable[[], CollectiveMismatchError]) -> None:
        self._fail(match, error)

    def _fail(self, match: Match, error: Callable[[], BaseException]) -> None:
        """Fail every end, each with an error of its own: one exception raised in two tasks would mix tracebacks."""
        match.error = error
        for end in match:
            if end is not None:
                end.fail(Failure(error()))
