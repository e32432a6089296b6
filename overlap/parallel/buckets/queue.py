"""Queue of buckets: buckets are sent in one order on all ranks, in whatever order their gradients come.

Operations of a stream are matched by their number, so two ranks that send equal buckets in different orders would
average different gradients. A full bucket therefore waits until all buckets before it have been sent. Where gradients
come in the order of the queue, as in the usual backward pass, no bucket waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from .plan import BucketPlan


class Fillable(Protocol):
    """A bucket, as the queue sees it."""

    plan: BucketPlan

    @property
    def is_full(self) -> bool:
        """Whether all gradients of this step have been handed over."""


B = TypeVar("B", bound=Fillable)


class BucketQueue(Generic[B]):
    """The buckets of one model on one rank, and the number of them that have been sent in this step.

    Args:
        buckets: The buckets in the order in which they are sent, the same on all ranks.

    Attributes:
        buckets: The same.
        bucket_by_name: The bucket of each gradient, by name.
        sent_count: Number of buckets that have been sent in this step.
    """

    def __init__(self, buckets: Sequence[B] = ()) -> None:
        self.buckets: list[B] = list(buckets)
        self.bucket_by_name: dict[str, B] = {name: bucket for bucket in self.buckets for name in bucket.plan.names}
        self.sent_count: int = 0

    @property
    def unsent_buckets(self) -> Sequence[B]:
        """The buckets that have not been sent in this step."""
        return self.buckets[self.sent_count :]

    def take_full_buckets(self) -> Iterator[B]:
        """Yield the next buckets of the queue up to the first that is not full; each counts as sent."""
        while self.sent_count < len(self.buckets) and self.buckets[self.sent_count].is_full:
            self.sent_count += 1
            yield self.buckets[self.sent_count - 1]

    def take_remaining_buckets(self) -> Iterator[B]:
        """Yield all buckets that have not been sent in this step; each counts as sent."""
        for bucket in self.unsent_buckets:  # a copy: the caller may begin the next step at the last bucket
            self.sent_count += 1
            yield bucket

    def begin_step(self) -> None:
        """Begin the next step: no bucket has been sent."""
        self.sent_count = 0
