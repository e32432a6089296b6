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
    """Stages 1 and 2 of ZeRO: whole parameters stay, and are gathered in place after each update."""

    def __init__(self) -> None:
        # Result of each bucket's last gather: flat parameters.
        self._gathered: dict[ScatteredBucket, Future[Array]] = {}
        # The same parameters by name, of the buckets that are used in this step.
        self._parameters_in_use: dict[ScatteredBucket, Future[dict[str, Array]]] = {}

    def parameters_for_use(self, bucket: ScatteredBucket) -> Future[dict[str, Array]]:
        """Return a future of a bucket's whole parameters by name, for the computes that are issued next."""
        found = self._parameters_in_use.get(bucket)
        if found is None:
            # Before the first gather, `newest_part` is a future of the first weights: all parameters of the bucket.
            found = self._parameters_in_use[bucket] = bucket.parameters_by_name(
                self._gathered.get(bucket, bucket.newest_part)
            )
        return found

    def gather_to_keep(self, bucket: ScatteredBucket) -> Future[dict[str, Array]]:
        """Return a future of a bucket's whole parameters by name, for a caller that keeps them after the step."""
        return self.parameters_for_use(bucket)

    def end_step(self) -> None:
        """Drop the futures of this step: the caller issues the updates of all buckets next."""
        self._parameters_in_use.clear()

    def issue_gathers(self, buckets: Sequence[ScatteredBucket]) -> None:
        """Issue the gathers of all buckets in this order; their updates have been issued."""
        for bucket in buckets:
            self._gathered[bucket] = bucket.gather_parameters()

    def repeat_gathers(self) -> None:
        """Take part in the gathers of a step that only the other ranks make: `issue_gathers` has issued them."""


class Prefetched(Gathering):
    """Stage 3 of ZeRO: whole parameters are gathered ahead of their use, and dropped after it.

    A visit is a run of uses of one bucket, without uses of other buckets in between. Each step is expected to make the
    visits of the previous step. The first use of a visit issues the gather for the visit that is `depth` visits later.
    That gather starts once everything before the present visit has been computed. So the whole parameters of at most
    `depth + 1` buckets exist at once, however far the program is ahead of its computes: only computes hold them.

    Args:
        depth: Number of visits to gather ahead; with 0 each gather starts when the compute before it ends.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth
        self._expected: list[ScatteredBucket] = []  # visits of the previous step
        self._visits: list[ScatteredBucket] = []  # visits of this step so far
        # Gathers that were issued ahead of their visits, the next visit first.
        self._issued_ahead: deque[tuple[ScatteredBucket, Future[Array]]] = deque()
        self._current: dict[ScatteredBucket, Future[dict[str, Array]]] = {}  # the one bucket of the present visit

    def parameters_for_use(self, bucket: ScatteredBucket) -> Future[dict[str, Array]]:
        """Return a future of a bucket's whole parameters by name, for the computes that are issued next.

        If the previous step also used this bucket next, the gather for the visit `depth` visits later is issued, too.
        Otherwise all gathers that were issued ahead are dropped, and this bucket is gathered now.
        """
        if bucket in self._current:
            return self._current[bucket]
        self._visits.append(bucket)
        if self._issued_ahead and self._issued_ahead[0][0] is bucket:
            _, whole = self._issued_ahead.popleft()
            ahead = len(self._visits) - 1 + self._depth
            if ahead < len(self._expected):
                expected = self._expected[ahead]
                self._issued_ahead.append((expected, expected.gather_parameters(behind_computes=True)))
        else:
            self._drop_prefetched()
            whole = bucket.gather_parameters(behind_computes=True)
        self._current = {bucket: bucket.parameters_by_name(whole)}
        return self._current[bucket]

    def repeat_gathers(self) -> None:
        """Take part in the gathers of a step that only the other ranks make: those of this rank's last step.

        Raises:
            UsageError: If this rank has made no step.
        """
        if not self._expected:
            raise UsageError(
                "finish: this rank has made no step; with uneven=True, stage 3 needs at least one; "
                "give each rank a batch"
            )
        for bucket in self._expected:
            bucket.unused_gathers.append(bucket.issue_end_of_gather(self.parameters_for_use(bucket)))

    def gather_to_keep(self, bucket: ScatteredBucket) -> Future[dict[str, Array]]:
        """Return a future of a bucket's whole parameters by name, for a caller that keeps them after the step.

        Drops all gathers that were issued ahead of their visits.
        """
        self._drop_prefetched()
        return bucket.parameters_by_name(bucket.gather_parameters())

    def end_step(self) -> None:
        """Drop the futures of this step: the caller issues the updates of all buckets next.

        The visits of this step become the expected visits of the next one.
        """
        self._drop_prefetched()
        self._current = {}
        self._expected, self._visits = self._visits, []

    def issue_gathers(self, buckets: Sequence[ScatteredBucket]) -> None:
        """Issue the gathers of the first `depth` expected visits; all updates have been issued."""
        self._issued_ahead.extend((bucket, bucket.gather_parameters()) for bucket in self._expected[: self._depth])

    def _drop_prefetched(self) -> None:
        """Drop the gathers that were issued ahead; the update of a bucket still waits until its gather has ended."""
        for bucket, whole in self._issued_ahead:
            bucket.unused_gathers.append(whole)
        self._issued_ahead.clear()
