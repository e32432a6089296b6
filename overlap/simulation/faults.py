"""Faults of a simulation, by seed: late and lost parts of operations, deaths, slow ranks, task order.

Each draw depends on the seed and a name only, such as the fifth operation of rank 3. So a seed repeats a run exactly,
and no draw depends on the order of the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableSequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from random import Random

from ..errors import UsageError
from ..runtime.trio_private import task_order

# Ranges that a seed draws from by default, evenly on a logarithmic scale. Of a program of ten to ten thousand
# operations some seeds then hit one, some every other one.
_DELAY_SHARES, _DELAY_S = (1e-3, 0.5), (1e-6, 1.0)
_LOSS_SHARES = _DEATH_SHARES = (1e-4, 0.1)
_SLOW_SHARES, _SLOW_FACTOR = (0.05, 0.5), (1.5, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults in virtual time; pass them as `overlap.Virtual(faults=...)`.

    Values of None are chosen by the seed, which also leaves out about half of the kinds, so that different seeds try
    different mixtures. A run then has the results of one without faults, or ends with an error that names a culprit.
    """

    seed: int = 0  # Seed of all random numbers; the same seed makes the same run, to the nanosecond
    delay: float | None = None  # Probability that a compute, or a rank's part in an operation, is held up
    delay_s: float | None = None  # Longest delay; any time up to it is as likely
    # Probability that a rank's part in an operation never arrives. After `silence_s` that rank is lost.
    loss: float | None = None
    # Probability that a rank dies at a compute or an operation: before it, while it runs, or right after. Its program
    # is cancelled and sends no more messages; after `notice_s` it is lost.
    death: float | None = None
    slow: float | None = None  # Share of the ranks with slow computes
    slow_factor: float | None = None  # Factor of their times
    reorder: bool = True  # Whether the seed shuffles tasks that are ready at once
    notice_s: float = 0.1  # Time until the other ranks notice a death
    silence_s: float = 15.0  # Time until they give up a rank that sends nothing
    # Deaths at instants of virtual time: seconds, and the rank in the first world.
    kills: tuple[tuple[float, int], ...] = ()
    # Whether the other ranks go on after a loss, as processes do under `overlap run --survive`: `main` is called again
    # in a smaller world. It begins `recovery_s` after the end of the world before; real ones on one host take up to
    # 0.2 s (`python -m tests.benchmarks survive`).
    survive: bool = False
    recovery_s: float = 0.2

    def __post_init__(self) -> None:
        for time_s, _ in self.kills:
            _check_range("kills", time_s, 0, 1e9)
        for name in ("delay", "loss", "death", "slow"):
            _check_range(name, getattr(self, name), 0, 1)
        for name in ("delay_s", "notice_s", "silence_s", "recovery_s"):
            _check_range(name, getattr(self, name), 0, 1e9)
        _check_range("slow_factor", self.slow_factor, 1, 1e9)

    def __str__(self) -> str:
        figures = [
            f"{entry.name}={getattr(self, entry.name)!r}" for entry in fields(self) if self._is_given(entry.name)
        ]
        return f"Faults({', '.join(figures)})"

    @property
    def only_seeded(self) -> bool:
        """Whether the seed is the only value given."""
        return not any(self._is_given(entry.name) for entry in fields(self) if entry.name != "seed")

    def _is_given(self, name: str) -> bool:
        """Return whether a figure differs from its default; the seed counts as given."""
        return name == "seed" or getattr(self, name) != getattr(_NONE_GIVEN, name)


def _check_range(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:  # also for NaN
        raise UsageError(f"faults: {name} is {value!r}; expected {least:g} to {most:g}")


_NONE_GIVEN = Faults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Faults of one compute or operation of a rank."""

    late_ns: int = 0  # Delay
    lost: bool = False  # Whether it never arrives
    dies_at: float | None = None  # Share of it after which the rank dies, 0 to 1; None if it lives on


class Fates:
    """Random draws of the faults of one run.

    Args:
        faults: The faults to draw from.
        epoch: Epoch of the world, if it goes on after losses.

    Attributes:
        faults: The faults to draw from.
        dead: Ranks that have died.
    """

    def __init__(self, faults: Faults, *, epoch: int = 0) -> None:
        self.faults = faults
        self._prefix = f"{faults.seed}, epoch {epoch}" if epoch else f"{faults.seed}"
        self.dead: set[int] = set()
        self._done: Counter[int] = Counter()
        self._delay = self._draw_probability("delay", faults.delay, _DELAY_SHARES)
        self._loss = self._draw_probability("loss", faults.loss, _LOSS_SHARES)
        self._death = self._draw_probability("death", faults.death, _DEATH_SHARES)
        self._slow = self._draw_probability("slow", faults.slow, _SLOW_SHARES)
        self._delay_s = self._draw_on_scale("delay_s", faults.delay_s, _DELAY_S)
        self._slow_factor = self._draw_on_scale("slow_factor", faults.slow_factor, _SLOW_FACTOR)

    @property
    def repeat_text(self) -> str:
        """Instruction to repeat the run, for messages."""
        text = f"the same again: clock=overlap.Virtual(faults=overlap.{self.faults})"
        return f"{text} or `overlap simulate --fault-seed {self.faults.seed}`" if self.faults.only_seeded else text

    def cause(self, rank: int) -> str:
        """Return the cause of a rank's fault, for messages."""
        return f"{self.faults} wants it"

    def next(self, rank: int, step: int | None = None) -> Fate:
        """Draw the faults of the next compute or operation of a rank; `step` is for other sources of faults."""
        self._done[rank] += 1
        source = self._random_source(f"rank {rank}, {self._done[rank]}")
        dies, lost, late, dying_at = (source.random() for _ in range(4))
        return Fate(
            late_ns=round(source.uniform(0, self._delay_s) * 1e9) if late < self._delay else 0,
            lost=lost < self._loss,
            dies_at=dying_at if dies < self._death else None,
        )

    def slow_ns(self, rank: int, cost_ns: int, step: int | None = None) -> int:
        """Return the time of a compute on a rank: `cost_ns`, or a multiple if the seed made the rank slow."""
        slow = self._random_source(f"rank {rank}").random() < self._slow
        return round(cost_ns * self._slow_factor) if slow else cost_ns

    def _random_source(self, name: str) -> Random:
        return Random(f"{self._prefix}, {name}")

    def _draw_probability(self, name: str, fixed: float | None, scale: tuple[float, float]) -> float:
        """Return a probability: `fixed`, else drawn by the seed, which leaves out half of the kinds (0)."""
        if fixed is None and self._random_source(f"whether {name}").random() < 0.5:
            return 0.0
        return self._draw_on_scale(name, fixed, scale)

    def _draw_on_scale(self, name: str, fixed: float | None, scale: tuple[float, float]) -> float:
        """Return a figure: `fixed`, else drawn by the seed evenly on a logarithmic scale."""
        least, most = scale
        share = self._random_source(name).random()
        return fixed if fixed is not None else float(least * (most / least) ** share)

    def ordering_tasks(self) -> AbstractContextManager[None]:
        """Return a context in which Trio runs tasks that are ready at once by age, or shuffled by the seed.

        Raises:
            UsageError: In the ``with``, if this version of Trio has no way to choose the order.
        """
        return task_order(self._random_source("tasks") if self.faults.reorder else _FixedOrder())


class _FixedOrder(Random):
    """Source of randomness for Trio that keeps the order of tasks."""

    def shuffle(self, x: MutableSequence[object]) -> None:
        """Reverse the tasks, so that the oldest is last: Trio takes them from the end."""
        x.reverse()
