"""Gathering of whole parameters: after each update, or only around their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...runtime.future import Future
from .scattered import Scattered

if TYPE_CHECKING:
    from ..tree import Array


class Gathering:
    """Stages 1 and 2: whole parameters stay, and are gathered in place after each update."""

    def __init__(self) -> None:
        self._whole: dict[Scattered, Future[Array]] = {}
        self._open: dict[Scattered, Future[dict[str, Array]]] = {}

    def visit(self, bucket: Scattered) -> Future[dict[str, Array]]:
        """Return the parameters of a bucket by name, for the computes that are issued next."""
        found = self._open.get(bucket)
        if found is None:
            found = self._open[bucket] = bucket.opened(self._whole.get(bucket, bucket.updated))
        return found

    def all_of(self, bucket: Scattered) -> Future[dict[str, Array]]:
        """Return the parameters of a bucket by name, to be kept."""
        return self.visit(bucket)

    def ends(self) -> None:
        """Note that a step ends, and that the updates of all buckets are issued next."""
        self._open.clear()

    def begins(self, buckets: Sequence[Scattered]) -> None:
        """Note that the updates have been issued, in that order of buckets."""
        for bucket in buckets:
            self._whole[bucket] = bucket.gather()

    def repeat(self) -> None:
        """Gather as in the step before, for ranks that go on without this one."""


class Prefetched(Gathering):
    """Stage 3: whole parameters are gathered ahead of their use, and dropped after it.

    A visit is a run of uses of one bucket. The visits of a step are expected to be the visits of the step before. With
    the first use of one, the gather of the visit `depth` further on is issued; it starts once everything before the
    present visit has been computed. So parameters of at most `depth + 1` buckets are there at once, however far the
    program is ahead of its computes: only the computes hold them, and when these are done the memory is free.

    Args:
        depth: How many visits ahead; with 0 each gather starts when the compute before it ends.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth
        self._expected: list[Scattered] = []
        self._visits: list[Scattered] = []
        self._ahead: deque[tuple[Scattered, Future[Array]]] = deque()
        self._current: tuple[Scattered, Future[dict[str, Array]]] | None = None

    def visit(self, bucket: Scattered) -> Future[dict[str, Array]]:
        """Return the parameters of a bucket by name, for the computes that are issued next."""
        if self._current is not None and self._current[0] is bucket:
            return self._current[1]
        self._visits.append(bucket)
        if self._ahead and self._ahead[0][0] is bucket:
            whole = self._ahead.popleft()[1]
            self._look_ahead(len(self._visits) - 1 + self._depth)
        else:
            self._forget()
            whole = bucket.gather(when=True)
        self._current = bucket, bucket.opened(whole)
        return self._current[1]

    def repeat(self) -> None:
        """Gather as in the step before, for ranks that go on without this one.

        Raises:
            UsageError: If there is no step before.
        """
        if not self._expected:
            raise UsageError(
                "finish: with uneven=True, stage 3 needs at least one step of every rank; give each a batch"
            )
        for bucket in self._expected:
            bucket.unused.append(bucket.passed(self.visit(bucket)))

    def all_of(self, bucket: Scattered) -> Future[dict[str, Array]]:
        """Return the parameters of a bucket by name, to be kept."""
        self._forget()
        return bucket.opened(bucket.gather())

    def ends(self) -> None:
        """Note that a step ends, and that the updates of all buckets are issued next."""
        self._forget()
        self._current = None
        self._expected, self._visits = self._visits, []

    def begins(self, buckets: Sequence[Scattered]) -> None:
        """Note that the updates have been issued, in that order of buckets."""
        for bucket in self._expected[: self._depth]:
            self._ahead.append((bucket, bucket.gather()))

    def _look_ahead(self, visit: int) -> None:
        if visit < len(self._expected):
            bucket = self._expected[visit]
            self._ahead.append((bucket, bucket.gather(when=True)))

    def _forget(self) -> None:
        for bucket, whole in self._ahead:
            bucket.unused.append(whole)
        self._ahead.clear()
