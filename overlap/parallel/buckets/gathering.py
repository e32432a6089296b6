"""Gathering of whole parameters: after each update, or only around their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...runtime.future import Future
from .scattered import ScatteredBucket

if TYPE_CHECKING:
    from ..tree import Array


class Gathering:
    """Stages 1 and 2: whole parameters stay, and are gathered in place after each update."""

    def __init__(self) -> None:
        self._whole: dict[ScatteredBucket, Future[Array]] = {}
        self._open: dict[ScatteredBucket, Future[dict[str, Array]]] = {}

    def visit(self, bucket: ScatteredBucket) -> Future[dict[str, Array]]:
        """Return the parameters of a bucket by name, for the computes that are issued next."""
        found = self._open.get(bucket)
        if found is None:
            found = self._open[bucket] = bucket.parameters_by_name(self._whole.get(bucket, bucket.updated))
        return found

    def gather_to_keep(self, bucket: ScatteredBucket) -> Future[dict[str, Array]]:
        """Return the parameters of a bucket by name, for a caller that keeps them."""
        return self.visit(bucket)

    def end_step(self) -> None:
        """Forget the parameters of this step: the updates of all buckets are issued next."""
        self._open.clear()

    def begin_step(self, buckets: Sequence[ScatteredBucket]) -> None:
        """Gather all buckets in this order, after their updates were issued."""
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
        self._expected: list[ScatteredBucket] = []
        self._visits: list[ScatteredBucket] = []
        self._ahead: deque[tuple[ScatteredBucket, Future[Array]]] = deque()
        self._current: tuple[ScatteredBucket, Future[dict[str, Array]]] | None = None

    def visit(self, bucket: ScatteredBucket) -> Future[dict[str, Array]]:
        """Return the whole parameters of a bucket by name, for the computes that are issued next.

        Begins the gathers of the buckets that will be needed after this one, in the order of earlier steps.
        """
        if self._current is not None and self._current[0] is bucket:
            return self._current[1]
        self._visits.append(bucket)
        if self._ahead and self._ahead[0][0] is bucket:
            whole = self._ahead.popleft()[1]
            self._prefetch(len(self._visits) - 1 + self._depth)
        else:
            self._drop_prefetched()
            whole = bucket.gather(when=True)
        self._current = bucket, bucket.parameters_by_name(whole)
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
            bucket.unused.append(bucket.drop_gathered(self.visit(bucket)))

    def gather_to_keep(self, bucket: ScatteredBucket) -> Future[dict[str, Array]]:
        """Return the parameters of a bucket by name, for a caller that keeps them."""
        self._drop_prefetched()
        return bucket.parameters_by_name(bucket.gather())

    def end_step(self) -> None:
        """Forget the parameters of this step: the updates of all buckets are issued next."""
        self._drop_prefetched()
        self._current = None
        self._expected, self._visits = self._visits, []

    def begin_step(self, buckets: Sequence[ScatteredBucket]) -> None:
        """Gather the first `depth` buckets that are expected, after the updates were issued."""
        for bucket in self._expected[: self._depth]:
            self._ahead.append((bucket, bucket.gather()))

    def _prefetch(self, visit: int) -> None:
        """Issue the gather for a visit of this step, by its number; nothing after the last expected visit."""
        if visit < len(self._expected):
            bucket = self._expected[visit]
            self._ahead.append((bucket, bucket.gather(when=True)))

    def _drop_prefetched(self) -> None:
        """Give up gathers that are ahead; their buckets are not updated before those end."""
        for bucket, whole in self._ahead:
            bucket.unused.append(whole)
        self._ahead.clear()
