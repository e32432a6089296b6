"""Turns of ranks by random priorities that change at a few random steps: probabilistic concurrency testing (PCT).

Burckhardt, Kothari, Musuvathi, Nagarakatte, "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs",
ASPLOS 2010. A step is one rank's part in one operation, or the moment in which its thread goes on after a wait. Of all
ranks that could take a step, the one with the highest priority does. At d - 1 steps of the first k the rank whose turn
it would be gets a priority below all others. A fault that needs d steps of n ranks in a certain order is found with a
probability of at least 1 / (n k^(d-1)).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from random import Random

import trio

# Choices of a seed: d, the number of ordered steps that a fault may need, and k, as a power of two. With d = 1,
# priorities would never change; odd seeds, which change the speeds of ranks, try that.
_DEPTHS, _POWERS = (2, 3, 4), range(2, 13)


class Turns:
    """The turns of one run, decided by a seed.

    Attributes:
        depth: d of the formula: the number of ordered steps that a fault may need.
        length: k of the formula: priorities change only in this many first steps.

    Args:
        seed: The seed.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        chance = Random(f"turns {seed}")
        self.depth: int = chance.choice(_DEPTHS)
        self.length: int = 2 ** chance.choice(_POWERS)
        changes = chance.sample(range(1, self.length + 1), self.depth - 1)
        self._lowered = {step: -chance.random() for step in changes}  # by step: the new priority of the next rank
        self._priorities: dict[int, float] = {}  # by rank
        self._waiting: dict[int, deque[Callable[[], None]]] = {}  # by rank: its queued steps, the oldest first
        self._queue: list[tuple[float, int]] = []  # heap of (-priority, rank) of ranks with queued steps
        self._step = 0  # number of steps so far

    def queue(self, rank: int, go: Callable[[], None]) -> None:
        """Queue a step of a rank.

        Args:
            rank: The rank.
            go: Called when it is the rank's turn.
        """
        if rank not in self._waiting:
            self._waiting[rank] = deque()
            # A heap has the smallest item first: so the priority is negated.
            heappush(self._queue, (-self._rank_priority(rank), rank))
        self._waiting[rank].append(go)

    async def wait_for_turn(self, rank: int) -> None:
        """Wait until it is the turn of a rank."""
        its_turn = trio.Event()
        self.queue(rank, its_turn.set)
        await its_turn.wait()

    def run_next_step(self) -> bool:
        """Run the oldest queued step of the rank with the highest priority; return False if no step is queued."""
        if not self._waiting:
            return False
        self._step += 1
        if self._step in self._lowered:
            self._lower_first_priority(self._lowered[self._step])
        _, rank = self._queue[0]
        steps = self._waiting[rank]
        go = steps.popleft()
        if not steps:
            del self._waiting[rank]
            heappop(self._queue)
        go()
        return True

    def _lower_first_priority(self, priority: float) -> None:
        """Give the waiting rank with the highest priority a new priority, below all others."""
        _, rank = self._queue[0]
        self._priorities[rank] = priority
        heapreplace(self._queue, (-priority, rank))

    def _rank_priority(self, rank: int) -> float:
        """Return the priority of a rank. At first it is a random number from 0 to 1; lowered ones are negative."""
        if rank not in self._priorities:
            self._priorities[rank] = Random(f"priority {self._seed}, rank {rank}").random()
        return self._priorities[rank]
