"""Goodput of a long run: steps that count, after failures, checkpoints and restarts. Pure.

A checkpoint costs `write_s` each `every_s`; a failure costs a restart and the work since the last checkpoint. Failures
are independent and equally likely at any moment, so a run of work w between checkpoints takes
exp(R / M) M (exp((w + C) / M) - 1) on average, with restart R, checkpoint C and mean time between failures M (Daly,
Future Generation Computer Systems 22, 2006, equation 13). Young's interval sqrt(2 C M) (CACM 17, 1974) and Daly's of
higher order (equation 37) are beside the best one, which is searched for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from ..cost.fitting import lowest
from ..errors import UsageError

# Interruptions by hardware or software, 419 unexpected ones in 54 days on 16,384 H100: "The Llama 3 Herd of Models",
# arXiv 2407.21783, section 3.3.4 (table 5).
LLAMA_3_CHIP_HOURS = 54 * 24 * 16384 / 419


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures that interrupt a run, and what each costs.

    Raises:
        UsageError: If a figure cannot be meant; names it.
    """

    chips: int  # Chips of the run, any of which ends it
    chip_hours: float = LLAMA_3_CHIP_HOURS  # Mean time between failures of one chip, in hours
    write_s: float = 30.0  # Of a checkpoint, while no step is made
    restart_s: float = 600.0  # From a failure to the first step after it

    def __post_init__(self) -> None:
        for name, least in (("chips", 1), ("chip_hours", 1e-9), ("write_s", 1e-9), ("restart_s", 0.0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise UsageError(f"{name}: expected {'0 or more' if least == 0 else 'more than 0'}, got {value!r}")

    @property
    def between_s(self) -> float:
        """Mean time between failures of the run, in seconds."""
        return self.chip_hours * 3600 / self.chips

    @property
    def young_s(self) -> float:
        """Young's interval of checkpoints: sqrt(2 C M)."""
        return math.sqrt(2 * self.write_s * self.between_s)

    @property
    def daly_s(self) -> float:
        """Daly's interval of higher order; the mean time between failures if a checkpoint takes twice that."""
        ratio = self.write_s / (2 * self.between_s)
        if ratio >= 1:
            return self.between_s
        return self.young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.write_s

    def share(self, every_s: float) -> float:
        """Return the share of the time in which work is done that counts, with a checkpoint after so many seconds."""
        mean_s = self.between_s
        if (self.restart_s + every_s + self.write_s) / mean_s > 700:  # no run of such work would ever end
            return 0.0
        taken_s = math.exp(self.restart_s / mean_s) * mean_s * math.expm1((every_s + self.write_s) / mean_s)
        return every_s / taken_s

    def best_s(self) -> float:
        """Return the interval with the largest share."""
        return lowest(lambda every_s: -self.share(every_s), 0.0, 10 * (self.young_s + self.write_s), steps=40)

    def simulated(self, every_s: float, *, intervals: int, seed: int = 0) -> float:
        """Return that share of a run of many intervals, whose failures are drawn one by one."""
        random, taken_s, left_s = Random(seed), 0.0, 0.0
        left_s = random.expovariate(1 / self.between_s)
        for _ in range(intervals):
            needed_s = every_s + self.write_s
            while left_s < needed_s:
                taken_s += left_s
                left_s = random.expovariate(1 / self.between_s)
                needed_s = self.restart_s + every_s + self.write_s  # a failure may come in the restart too
            taken_s += needed_s
            left_s -= needed_s
        return intervals * every_s / taken_s
