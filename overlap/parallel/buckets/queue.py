"""Queue of buckets: they leave in one order on all ranks, whatever order the gradients come in.

Operations of a stream are matched by their number, so two ranks that send equal buckets in different orders would
average different gradients. A full bucket therefore waits until those before it have left. Where gradients come in the
order of the queue, as in the usual backward pass, none waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from .plan import BucketPlan


class Fillable(Protocol):
    """A bucket, as the queue sees it."""

    plan: BucketPlan

    @property
    def full(self) -> bool:
        """Whether all gradients of this step are there."""


B = TypeVar("B", bound=Fillable)


class BucketQueue(Generic[B]):
    """The buckets of one model on one rank, and how many of them have left in this step.

    Args:
        buckets: In the order in which they travel, the same on all ranks.

    Attributes:
        buckets: As given.
        home: The bucket of each gradient, by name.
        sent: How many buckets have left in this step.
    """

    def __init__(self, buckets: Sequence[B] = ()) -> None:
        self.buckets: list[B] = list(buckets)
        self.home: dict[str, B] = {name: bucket for bucket in self.buckets for name in bucket.plan.names}
        self.sent: int = 0

    @property
    def waiting(self) -> Sequence[B]:
        """The buckets that have not left in this step."""
        return self.buckets[self.sent :]

    def due(self) -> Iterator[B]:
        """Yield full buckets, as long as all buckets before them have left; each counts as sent."""
        while self.sent < len(self.buckets) and self.buckets[self.sent].full:
            self.sent += 1
            yield self.buckets[self.sent - 1]

    def rest(self) -> Iterator[B]:
        """Yield all buckets that have not left in this step; each counts as sent."""
        for bucket in self.waiting:  # as they are now: the last of them may begin the next round
            self.sent += 1
            yield bucket

    def begin(self) -> None:
        """Begin the next step: no bucket has left."""
        self.sent = 0
