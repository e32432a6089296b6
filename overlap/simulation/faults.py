"""Random faults of a simulation: delays and losses of a rank's part in an operation, deaths, slow ranks, task order.

Each random draw depends on the seed and a name only, such as the fifth operation of rank 3. So a seed repeats a run
exactly, and no draw depends on the order in which ranks run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableSequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from random import Random

from ..errors import UsageError
from ..runtime.trio_private import ordering_tasks

# Ranges from which a seed draws by default, evenly on a logarithmic scale. In a program of ten to ten thousand
# operations, some seeds then disturb a single operation, and some every other operation.
_DELAY_SHARES, _DELAY_S = (1e-3, 0.5), (1e-6, 1.0)
_LOSS_SHARES = _DEATH_SHARES = (1e-4, 0.1)
_SLOW_SHARES, _SLOW_FACTOR = (0.05, 0.5), (1.5, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults in virtual time; pass them as `overlap.Virtual(faults=...)`.

    A value of None is drawn by the seed, which leaves out about half of the kinds of faults, so that different seeds
    try different mixtures. A run with faults has the same results as one without, or ends with an error that names a
    culprit.
    """

    seed: int = 0  # Seed of all random numbers; the same seed makes the same run, to the nanosecond
    delay: float | None = None  # Probability that a compute, or a rank's part in an operation, is held up
    delay_s: float | None = None  # Longest delay in seconds; each delay is drawn evenly between 0 and this
    # Probability that a rank's part in an operation never arrives. After `silence_s` the other ranks give the rank up.
    loss: float | None = None
    # Probability that a rank dies at a compute or an operation: before it, while it runs, or right after it. The rank's
    # program is cancelled and sends no more messages; after `notice_s` the other ranks notice.
    death: float | None = None
    slow: float | None = None  # Share of the ranks whose computes are slow
    slow_factor: float | None = None  # Computes of a slow rank take this many times as long
    reorder: bool = True  # Whether the seed shuffles the order of tasks that are ready at the same time
    notice_s: float = 0.1  # Seconds until the other ranks notice a death
    silence_s: float = 15.0  # Seconds until the other ranks give up a rank that sends nothing
    # Deaths at given instants: pairs of virtual seconds, and the rank's number in the first world.
    kills: tuple[tuple[float, int], ...] = ()
    # Whether the other ranks go on after a loss, as processes do under `overlap run --survive`: `main` is called again
    # in a smaller world, which begins `recovery_s` seconds after the end of the world before. Real processes on one
    # host take up to 0.2 s (`python -m tests.benchmarks survive`).
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
        """Whether a value differs from its default; the seed always counts as given."""
        return name == "seed" or getattr(self, name) != getattr(_NONE_GIVEN, name)


def _check_range(name: str, value: float | None, least: float, most: float) -> None:
    """Refuse a value outside of least...most; None, for which the seed draws a value, is accepted."""
    if value is not None and not least <= value <= most:  # also for NaN
        raise UsageError(f"faults: {name} is {value!r}; expected {least:g} to {most:g}")


_NONE_GIVEN = Faults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Faults of one compute or operation of a rank."""

    late_ns: int = 0  # Delay of the compute or operation
    lost: bool = False  # Whether the operation never arrives at the other ranks
    # Share of the compute or operation after which the rank dies, from 0 to 1; None: it does not die.
    dies_at: float | None = None


class Fates:
    """Draws the faults of one run.

    Args:
        faults: Kinds and probabilities of faults.
        epoch: Number of the world, if ranks go on in a new world after a loss.

    Attributes:
        faults: Kinds and probabilities of faults.
        dead: Ranks that have died.
    """

    def __init__(self, faults: Faults, *, epoch: int = 0) -> None:
        self.faults = faults
        self._prefix = f"{faults.seed}, epoch {epoch}" if epoch else f"{faults.seed}"
        self.dead: set[int] = set()
        self._done: Counter[int] = Counter()  # computes and operations so far, by rank
        self._delay = self._draw_probability("delay", faults.delay, _DELAY_SHARES)
        self._loss = self._draw_probability("loss", faults.loss, _LOSS_SHARES)
        self._death = self._draw_probability("death", faults.death, _DEATH_SHARES)
        self._slow = self._draw_probability("slow", faults.slow, _SLOW_SHARES)
        self._delay_s = self._draw_on_scale("delay_s", faults.delay_s, _DELAY_S)
        self._slow_factor = self._draw_on_scale("slow_factor", faults.slow_factor, _SLOW_FACTOR)

    @property
    def repeat_text(self) -> str:
        """Sentence for messages on how to repeat the run."""
        text = f"the same again: clock=overlap.Virtual(faults=overlap.{self.faults})"
        return f"{text} or `overlap simulate --fault-seed {self.faults.seed}`" if self.faults.only_seeded else text

    def fault_origin(self, rank: int) -> str:
        """Return the origin of a rank's fault, for messages; subclasses may distinguish ranks."""
        return f"planned by {self.faults}"

    def draw_next_fate(self, rank: int, step: int | None = None) -> Fate:
        """Draw the faults of a rank's next compute or operation.

        Args:
            rank: The rank.
            step: The step that has issued it; for subclasses with faults in one step.
        """
        self._done[rank] += 1
        source = self._random_source(f"rank {rank}, {self._done[rank]}")
        # All four numbers are always drawn, so that no draw depends on another one.
        dies, lost, late, dying_at = (source.random() for _ in range(4))
        return Fate(
            late_ns=round(source.uniform(0, self._delay_s) * 1e9) if late < self._delay else 0,
            lost=lost < self._loss,
            dies_at=dying_at if dies < self._death else None,
        )

    def slowed_compute_ns(self, rank: int, cost_ns: int, step: int | None = None) -> int:
        """Return the time of a compute on a rank: `cost_ns`, or a multiple of it if the seed made the rank slow.

        Args:
            rank: The rank.
            cost_ns: Time of the compute without faults.
            step: The step that has issued the compute; for subclasses with faults in one step.
        """
        slow = self._random_source(f"rank {rank}").random() < self._slow
        return round(cost_ns * self._slow_factor) if slow else cost_ns

    def _random_source(self, name: str) -> Random:
        """Return a source of random numbers that depend on the seed, the epoch and `name` only."""
        return Random(f"{self._prefix}, {name}")

    def _draw_probability(self, name: str, fixed: float | None, scale: tuple[float, float]) -> float:
        """Return the probability of a kind of fault: `fixed`, or one that the seed draws, 0 in half of all cases.

        `scale` has the least and the greatest probability that is drawn.
        """
        if fixed is None and self._random_source(f"whether {name}").random() < 0.5:
            return 0.0
        return self._draw_on_scale(name, fixed, scale)

    def _draw_on_scale(self, name: str, fixed: float | None, scale: tuple[float, float]) -> float:
        """Return `fixed`, or a value that the seed draws evenly on a logarithmic scale, between the ends of `scale`."""
        least, most = scale
        share = self._random_source(name).random()
        return fixed if fixed is not None else float(least * (most / least) ** share)

    def order_tasks(self) -> AbstractContextManager[None]:
        """Return a context in which Trio runs tasks that are ready at the same time shuffled by the seed, or by age.

        Raises:
            UsageError: In the ``with``, if this version of Trio has no way to choose the order.
        """
        return ordering_tasks(self._random_source("tasks") if self.faults.reorder else _FixedOrder())


class _FixedOrder(Random):
    """A random source for Trio with which tasks run in the order in which they became ready."""

    def shuffle(self, x: MutableSequence[object]) -> None:
        """Reverse the tasks, so that the oldest is last: Trio takes them from the end."""
        x.reverse()
