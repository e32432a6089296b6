"""Goodput of a long job: the share of its full speed that is left after losses. Pure.

`goodput` draws the losses of a job that goes on without a restart, whose costs have been measured. `RestartingJob` has
the formula for a job that saves a checkpoint each `every_s` and starts again from it. Failures are independent and
equally likely at any moment, so work w between checkpoints takes exp(R / M) M (exp((w + C) / M) - 1) on average, with
restart R, checkpoint C and mean time between failures M (Daly, Future Generation Computer Systems 22, 2006, equation
13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from ..errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartingJob:
    """Job that starts again from its last checkpoint after each failure.

    Raises:
        UsageError: A figure is no positive number; names it.
    """

    between_s: float  # Mean time between failures
    write_s: float  # Time of a checkpoint, while no step is made
    restart_s: float  # Time from a failure to the first step after it

    def __post_init__(self) -> None:
        for name in ("between_s", "write_s", "restart_s"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise UsageError(f"{name}: expected more than 0, got {value!r}")

    @property
    def young_s(self) -> float:
        """Young's interval of checkpoints: sqrt(2 C M) (CACM 17, 1974)."""
        return math.sqrt(2 * self.write_s * self.between_s)

    @property
    def daly_s(self) -> float:
        """Daly's interval of higher order (equation 37); M if a checkpoint takes 2 M or longer."""
        ratio = self.write_s / (2 * self.between_s)
        if ratio >= 1:
            return self.between_s
        return self.young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.write_s

    def share(self, every_s: float) -> float:
        """Return the share of the time that goes into lasting work, with a checkpoint every `every_s` seconds."""
        mean_s = self.between_s
        if (self.restart_s + every_s + self.write_s) / mean_s > 700:  # exp() ends there, and so does all progress
            return 0.0
        taken_s = math.exp(self.restart_s / mean_s) * mean_s * math.expm1((every_s + self.write_s) / mean_s)
        return every_s / taken_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Measured cost of one loss."""

    repeated_s: float  # Time before the loss whose work does not count
    pause_s: float  # Time from the loss to the beginning of the next step


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivingJob:
    """Job that goes on after losses, with measured speeds and costs.

    A loss takes one unit, such as a node. A spare takes its place at once; without one the job goes on smaller.
    """

    units: int  # Units at first
    between_s: float  # Mean time between losses of the whole job; a smaller one has fewer
    speed: Callable[[int], float]  # From a number of units to samples per second; 0: it cannot run with that number
    losses: Sequence[Loss]  # Measured losses; each loss costs one of them
    spares: int = 0
    join_s: float = 0.0  # Pause in which a spare receives the state
    repair_s: float | None = None  # Time after which a lost unit is a spare again; None: never


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Outcome of a job of some length."""

    duration_s: float
    share: float  # Lasting work, as a share of the work at full speed
    repeated_share: float  # Shares of the time: repeated work,
    pause_share: float  # no step is made,
    smaller_share: float  # and speed that a smaller job lacks, as a share of the work at full speed
    losses: int
    spares_used: int
    units: int  # Units at the end
    ended_s: float | None = None  # Instant at which the job could not go on


def goodput(job: SurvivingJob, duration_s: float, *, seed: int = 0) -> Goodput:
    """Simulate `duration_s` of a job with losses at random instants; the same seed draws the same losses."""
    draw = Random(f"{seed}, goodput")
    full = speed = job.speed(job.units)
    units, spares, used, losses = job.units, job.spares, 0, 0
    now_s = resumes_s = work = repeated_s = paused_s = smaller = 0.0
    repairs: list[float] = []
    ended_s: float | None = None
    while now_s < duration_s:
        loss_s = now_s + draw.expovariate(units / (job.units * job.between_s))
        event_s = min(loss_s, duration_s, *repairs[:1])
        runs_s = max(0.0, event_s - max(now_s, resumes_s))
        paused_s += event_s - now_s - runs_s
        wasted_s = 0.0
        if event_s == loss_s:
            cost = draw.choice(job.losses)
            wasted_s = min(runs_s, cost.repeated_s)
            resumes_s = event_s + cost.pause_s
        lasting_s = runs_s - wasted_s
        repeated_s += wasted_s
        work += lasting_s * speed
        smaller += lasting_s * (full - speed)
        now_s = event_s
        if event_s == loss_s:
            losses += 1
            if job.repair_s is not None:
                repairs.append(event_s + job.repair_s)
            if spares:
                spares, used, resumes_s = spares - 1, used + 1, resumes_s + job.join_s
            else:
                units -= 1
        elif repairs and event_s == repairs[0]:
            del repairs[0]
            if units < job.units:
                units, resumes_s = units + 1, max(resumes_s, event_s) + job.losses[0].pause_s + job.join_s
            else:
                spares += 1
        speed = job.speed(units) if units else 0.0
        if speed == 0.0:
            ended_s = now_s
            paused_s += duration_s - now_s
            break
    return Goodput(
        duration_s=duration_s,
        share=work / (full * duration_s),
        repeated_share=repeated_s / duration_s,
        pause_share=paused_s / duration_s,
        smaller_share=smaller / (full * duration_s),
        losses=losses,
        spares_used=used,
        units=units,
        ended_s=ended_s,
    )
