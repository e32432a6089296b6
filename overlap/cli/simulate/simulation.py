"""One simulation: the user's program, run in virtual time under a setting, and the timelines that it leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

from ... import settings
from ...errors import UsageError
from ...request import overriding
from ...timeline.spans import Timeline
from ..program import Program, as_main
from .outcome import Outcome, measure
from .setting import Setting

__all__ = ["SAMPLES", "Simulation", "simulate"]

SAMPLES = "samples_per_step"
"""Global name by which a program says how many samples, of all ranks together, one step trains on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a program did in virtual time.

    Attributes:
        timelines: Of each `overlap.run` that it called, in order.
        outcomes: What they say.
        wall_s: Seconds of real time that it took.
    """

    timelines: tuple[Timeline, ...]
    outcomes: tuple[Outcome, ...]
    wall_s: float


def simulate(program: Program, setting: Setting, *, trace: str | None = None) -> Simulation:
    """Run a program once.

    Args:
        program: Runs it.
        setting: Of which cluster, under which assumptions; it wins over what the program asks for.
        trace: Where to write the timelines.

    Raises:
        UsageError: If it simulates nothing, or what it says of its samples cannot be meant.
    """
    timelines: list[Timeline] = []
    wanted = settings.from_environment()
    wanted = replace(wanted, trace=trace, algorithm=setting.algorithm or wanted.algorithm)
    begun_s = perf_counter()
    with settings.imposed(wanted), as_main(), overriding(
        virtual=setting.virtual, cluster=setting.cluster, ranks=setting.ranks, watcher=timelines.append
    ):  # fmt: skip
        names = _run(program)
    wall_s = perf_counter() - begun_s
    if not timelines:
        raise UsageError("simulate: the program did not call overlap.run, so there is nothing in virtual time")
    samples = _samples(names.get(SAMPLES))
    outcomes = tuple(measure(timeline, setting.cluster, samples=samples) for timeline in timelines)
    return Simulation(timelines=tuple(timelines), outcomes=outcomes, wall_s=wall_s)


def _run(program: Program) -> dict[str, object]:
    try:
        return program()
    except SystemExit as end:
        if end.code:
            raise
        return {}


def _samples(told: object) -> float | None:
    if told is None:
        return None
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 < told < float("inf"):
        raise UsageError(f"{SAMPLES}: expected a positive number, got {told!r}")
    return float(told)
