"""Faults of a simulation, by seed: late and lost parts of operations, deaths, slow ranks, task order.

Everything follows from the seed and a name: what happens to the fifth thing that rank 3 does is drawn from just that.
So a seed repeats a run exactly, and no draw depends on the order in which ranks are served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableSequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from random import Random

from ..errors import UsageError
from ..runtime.trio_private import task_order

# What a seed chooses from where the caller leaves it open, evenly on a logarithmic scale. Of a program of ten to ten
# thousand operations some seeds then hit one, some every other one.
_DELAY, _DELAY_S = (1e-3, 0.5), (1e-6, 1.0)
_LOSS = _DEATH = (1e-4, 0.1)
_SLOW, _SLOW_FACTOR = (0.05, 0.5), (1.5, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults in virtual time; pass them as `overlap.Virtual(faults=...)`.

    What is None is chosen by the seed, which also leaves out about half of the kinds: so different seeds try different
    mixtures. A run then either has the results of one without faults, or ends with an error that names a culprit.
    """

    seed: int = 0  # Of everything random; the same seed makes the same run, to the nanosecond
    delay: float | None = None  # Probability that a compute, or a rank's part in an operation, is held up
    delay_s: float | None = None  # For how long at most; any time up to that is as likely
    # Probability that a rank's part in an operation never arrives. After `silence_s` that rank is lost.
    loss: float | None = None
    # Probability that a rank dies at a compute or an operation: before it, while it runs, or right after. Its program
    # is cancelled and nothing is heard from it any more; after `notice_s` it is lost.
    death: float | None = None
    slow: float | None = None  # Share of the ranks whose computes take longer
    slow_factor: float | None = None  # How many times as long
    reorder: bool = True  # Whether tasks that are ready at once run in an order that the seed shuffles
    notice_s: float = 0.1  # How long until the others know of a death
    silence_s: float = 15.0  # How long until they give up a rank from which they hear nothing

    def __post_init__(self) -> None:
        for name in ("delay", "loss", "death", "slow"):
            _check(name, getattr(self, name), 0, 1)
        for name in ("delay_s", "notice_s", "silence_s"):
            _check(name, getattr(self, name), 0, 1e9)
        _check("slow_factor", self.slow_factor, 1, 1e9)

    def __str__(self) -> str:
        told = [f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if self._is_told(each.name)]
        return f"Faults({', '.join(told)})"

    @property
    def only_seeded(self) -> bool:
        """Whether all but the seed was left open."""
        return not any(self._is_told(each.name) for each in fields(self) if each.name != "seed")

    def _is_told(self, name: str) -> bool:
        return name == "seed" or getattr(self, name) != getattr(_NONE_TOLD, name)


def _check(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:  # also for NaN
        raise UsageError(f"faults: {name} is {value!r}; expected {least:g} to {most:g}")


_NONE_TOLD = Faults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Fate of one thing that a rank does."""

    late_ns: int = 0  # How long it is held up
    lost: bool = False  # It never arrives
    dies_at: float | None = None  # The rank dies when this share of it is over, 0 to 1; None: it lives on


class Fates:
    """The faults of one run, as they are drawn.

    Attributes:
        faults: What was asked for.
        dead: Ranks that have died.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.dead: set[int] = set()
        self._done: Counter[int] = Counter()
        self._delay = self._chosen("delay", faults.delay, _DELAY)
        self._loss = self._chosen("loss", faults.loss, _LOSS)
        self._death = self._chosen("death", faults.death, _DEATH)
        self._slow = self._chosen("slow", faults.slow, _SLOW)
        self._delay_s = self._drawn("delay_s", faults.delay_s, _DELAY_S)
        self._slow_factor = self._drawn("slow_factor", faults.slow_factor, _SLOW_FACTOR)

    @property
    def repeating(self) -> str:
        """Instruction to repeat the run, for messages."""
        how = f"the same again: clock=overlap.Virtual(faults=overlap.{self.faults})"
        return f"{how} or `overlap simulate --faults {self.faults.seed}`" if self.faults.only_seeded else how

    def cause(self, rank: int) -> str:
        """Say what wanted a rank to be hit, for messages."""
        return f"{self.faults} wants it"

    def next(self, rank: int, step: int | None = None) -> Fate:
        """Draw what becomes of the next thing that a rank does, in whichever step."""
        self._done[rank] += 1
        chance = self._chance(f"rank {rank}, {self._done[rank]}")
        dies, lost, late, when = (chance.random() for _ in range(4))
        return Fate(
            late_ns=round(chance.uniform(0, self._delay_s) * 1e9) if late < self._delay else 0,
            lost=lost < self._loss,
            dies_at=when if dies < self._death else None,
        )

    def slow_ns(self, rank: int, cost_ns: int, step: int | None = None) -> int:
        """Return the time of a compute on a rank, which may be slow."""
        slow = self._chance(f"rank {rank}").random() < self._slow
        return round(cost_ns * self._slow_factor) if slow else cost_ns

    def _chance(self, name: str) -> Random:
        return Random(f"{self.faults.seed}, {name}")

    def _chosen(self, name: str, told: float | None, scale: tuple[float, float]) -> float:
        """Return a probability: as told, or none or some by the seed."""
        if told is None and self._chance(f"whether {name}").random() < 0.5:
            return 0.0
        return self._drawn(name, told, scale)

    def _drawn(self, name: str, told: float | None, scale: tuple[float, float]) -> float:
        least, most = scale
        share = self._chance(name).random()
        return told if told is not None else float(least * (most / least) ** share)

    def ordering_tasks(self) -> AbstractContextManager[None]:
        """Let Trio run tasks that are ready at once in the order of their making, or one that the seed shuffles.

        Raises:
            UsageError: In the ``with``, if this version of Trio has no way to choose it.
        """
        return task_order(self._chance("tasks") if self.faults.reorder else _InOrder())


class _InOrder(Random):
    """Shuffles nothing."""

    def shuffle(self, x: MutableSequence[object]) -> None:
        """Turn tasks round, the oldest last: Trio takes them from the end."""
        x.reverse()
