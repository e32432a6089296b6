"""Samples of the time of an operation, and their summary; also used for other libraries. Pure.

A *sample* starts at a barrier, and ends when the slowest rank has its result. Ranks leave the barrier at different
times, which differ by more than an operation on small messages takes. So for small messages a sample is the time of
many operations back to back, divided by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BATCHED_BYTES = 32 << 10
"""Largest size whose samples are batches: ranks of gloo leave a barrier 60 us apart (median of 200, on two cores)."""

BATCH = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Number of samples of a measurement."""

    iters: int = 20  # Counted samples
    warmup: int = 5  # Samples before them, which are discarded

    def operations_per_sample(self, size_bytes: int) -> int:
        """Return the number of operations in one sample of messages of `size_bytes`."""
        return BATCH if size_bytes <= BATCHED_BYTES else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Summary of samples, in nanoseconds for one operation."""

    median_ns: float
    p10_ns: float
    p90_ns: float

    @classmethod
    def of_samples(cls, samples_ns: Sequence[float] | NDArray[np.float64]) -> Times:
        """Summarise samples in nanoseconds; percentiles are interpolated between neighbours."""
        p10, median, p90 = (float(value) for value in np.percentile(samples_ns, (10, 50, 90)))
        return cls(median_ns=median, p10_ns=p10, p90_ns=p90)

    def bytes_per_s(self, nbytes: int) -> float:
        """Return `nbytes` divided by the median: algbw."""
        return nbytes / (self.median_ns / 1e9) if self.median_ns else 0.0


def slowest_times(by_rank_ns: Sequence[Sequence[int]], *, batch: int) -> Times:
    """Summarise the samples of all ranks: the slowest rank's time of each sample, divided by the operations in it."""
    return Times.of_samples(np.asarray(by_rank_ns, np.float64).max(axis=0) / batch)
