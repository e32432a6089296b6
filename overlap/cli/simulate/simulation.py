"""One simulation: the user's program, run in virtual time under a setting, and the timelines that it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from topology import Cluster

from ...config import RunConfig, imposed, overriding
from ...errors import UsageError
from ...timeline.spans import Timeline
from ..program import Program, as_main
from .setting import Setting
from .step_summary import StepSummary, measure

SAMPLES = "samples_per_step"
"""Global name by which a program says how many samples, of all ranks together, one step trains on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """One call of `overlap.run` in virtual time."""

    request: RunConfig  # What it was asked to be, by the program and by the setting
    timeline: Timeline  # What happened
    outcome: StepSummary  # What that says


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a program did in virtual time."""

    runs: tuple[SimulatedRun, ...]  # In order
    wall_s: float  # Seconds of real time that it took


def simulate(program: Program, setting: Setting, *, trace: str | None = None) -> Simulation:
    """Run a program once.

    Args:
        program: Runs it.
        setting: Of which cluster, under which assumptions; it wins over what the program asks for.
        trace: Where to write the timelines.

    Raises:
        UsageError: If it simulates nothing, or what it says of its samples cannot be meant.
    """
    requests: list[RunConfig] = []
    seen: list[tuple[RunConfig, Timeline]] = []

    def revise(asked: RunConfig) -> RunConfig:
        requests.append(setting.revise(asked))
        return requests[-1]

    def watch(timeline: Timeline) -> None:
        seen.append((requests[-1], timeline))

    begun_s = perf_counter()
    wanted = RunConfig.from_environment().changed("--trace", trace=trace)
    with imposed(wanted), as_main(), overriding(revise=revise, watcher=watch):
        names = _run(program)
    wall_s = perf_counter() - begun_s
    if not seen:
        raise UsageError("simulate: the program did not call overlap.run, so there is nothing in virtual time")
    samples = _samples(names.get(SAMPLES))
    return Simulation(runs=tuple(_judged(request, timeline, samples) for request, timeline in seen), wall_s=wall_s)


def _judged(request: RunConfig, timeline: Timeline, samples: float | None) -> SimulatedRun:
    assert isinstance(request.cluster, Cluster)
    outcome = measure(timeline, request.cluster, samples=samples)
    return SimulatedRun(request=request, timeline=timeline, outcome=outcome)


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
