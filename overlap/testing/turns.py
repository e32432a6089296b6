"""Turns of ranks by priorities that change at a few random steps, as PCT has them.

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

# Choices of a seed: the number of ordered steps that a fault may need, and the number of steps as a power of two. For
# one step alone, priorities would never change: seeds with other speeds try that.
_DEPTHS, _POWERS = (2, 3, 4), range(2, 13)


class Turns:
    """The turns of one run, decided by a seed.

    Attributes:
        depth: d; how many ordered steps a fault may need so that the bound holds.
        length: k; in how many of the first steps priorities change.
    """

    depth: int
    length: int

    def __init__(self, seed: int) -> None:
        self._seed = seed
        chance = Random(f"turns {seed}")
        self.depth, self.length = chance.choice(_DEPTHS), 2 ** chance.choice(_POWERS)
        changes = chance.sample(range(1, self.length + 1), self.depth - 1)
        self._lowered = {step: -chance.random() for step in changes}  # priorities from those steps on
        self._priorities: dict[int, float] = {}
        self._waiting: dict[int, deque[Callable[[], None]]] = {}
        self._queue: list[tuple[float, int]] = []  # a heap of ranks that wait, the highest priority first
        self._step = 0

    def hold(self, rank: int, go: Callable[[], None]) -> None:
        """Queue a step of a rank; `go` is called when it is the rank's turn."""
        if rank not in self._waiting:
            self._waiting[rank] = deque()
            heappush(self._queue, (-self._priority(rank), rank))
        self._waiting[rank].append(go)

    async def wait_for_turn(self, rank: int) -> None:
        """Wait until it is the turn of a rank."""
        its_turn = trio.Event()
        self.hold(rank, its_turn.set)
        await its_turn.wait()

    def release(self) -> bool:
        """Let the next rank take its step; False if no rank waits for its turn."""
        if not self._waiting:
            return False
        self._step += 1
        if self._step in self._lowered:
            lowered = self._queue[0][1]
            self._priorities[lowered] = self._lowered[self._step]
            heapreplace(self._queue, (-self._priorities[lowered], lowered))
        rank = self._queue[0][1]
        steps = self._waiting[rank]
        go = steps.popleft()
        if not steps:
            del self._waiting[rank]
            heappop(self._queue)
        go()
        return True

    def _priority(self, rank: int) -> float:
        """Return the priority of a rank; at first it is drawn, and at least 0."""
        if rank not in self._priorities:
            self._priorities[rank] = Random(f"priority {self._seed}, rank {rank}").random()
        return self._priorities[rank]
