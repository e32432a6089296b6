"""Fingerprints: random numbers in place of data, such that a wrong sum gives itself away.

Input slot s of rank r is `a[r] * b[s]` modulo 2^64 with random a and b. A result is a sum of such products, and two
different sums agree for one seed with a probability of about 2^-58 (a bilinear form that is not zero vanishes that
rarely).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .pattern import Ints
from .schedule import Schedule

Words: TypeAlias = NDArray[np.uint64]

# Odd multipliers with well mixed bits: those of the last stage of splitmix64.
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_HALF = np.uint64(32)


def combine(lower: Words, higher: Words) -> Words:
    """Return a stand-in for an ADD that tells operand order and parenthesisation apart."""
    mixed: Words = lower * _MIX[0] + higher * _MIX[1]
    mixed ^= mixed >> _HALF
    return mixed


class Fingerprint:
    """The random numbers of one seed, and the results they must lead to."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.schedule = schedule
        random = np.random.default_rng(seed)
        self.of_rank = random.integers(0, 2**64, schedule.size, np.uint64)
        self.of_slot = random.integers(0, 2**64, schedule.slots[0], np.uint64)
        self.unwritten = random.integers(0, 2**64, dtype=np.uint64)

    def initial(self, rank: Ints, slot: Ints) -> Words:
        """Return the value of input slots."""
        value: Words = self.of_rank[rank] * self.of_slot[slot]
        return value

    def result(self, rank: Ints, slot: Ints) -> Words:
        """Return what output slots must hold at the end; anything for slots that do not exist."""
        s, k = self.schedule, self.schedule.slots_per_block
        slot = np.minimum(slot, s.slots[1] - 1)
        if s.reduces:
            sums: Words = self._sums()[rank * k + slot if s.collective == "reduce_scatter" else slot]
            return sums
        if s.collective in ("all_gather", "gather"):
            return self.initial(slot // k, slot % k)
        if s.collective == "all_to_all":
            return self.initial(slot // k, rank * k + slot % k)
        if s.collective == "permute":
            return self._arrived(rank, slot)
        return self.initial(np.full(1, s.root), rank * k + slot if s.collective == "scatter" else slot)

    def folded(self, rank: Ints, slot: Ints) -> Words:
        """Return what output slots must hold where each element is combined in the order of ranks."""
        s = self.schedule
        slot = np.minimum(slot, s.slots[1] - 1)
        of_slot = self.of_slot[rank * s.slots_per_block + slot if s.collective == "reduce_scatter" else slot]
        total: Words = self.of_rank[0] * of_slot
        for other in self.of_rank[1:]:
            total = combine(total, other * of_slot)
        return total

    def _sums(self) -> Words:
        sums: Words = self.of_rank.sum(dtype=np.uint64) * self.of_slot
        return sums

    def _arrived(self, rank: Ints, slot: Ints) -> Words:
        """Return what comes from the source of each rank's pair, if it has one."""
        source = np.full(self.schedule.size, -1)
        for src, dst in self.schedule.pairs:
            source[dst] = src
        return np.where(source[rank] < 0, self.unwritten, self.initial(source[rank], slot))
