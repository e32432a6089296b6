"""Simulations of a user's program in virtual time, and the measures of their median steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any
from warnings import catch_warnings, filterwarnings

from topology import Cluster

from ...config import RunConfig, overriding_config, setting_environment
from ...cost.parameters import is_measured
from ...errors import UsageError
from ...notice import notify
from ...signals import handling_signals
from ...timeline.measure.metrics import Breakdown, breakdowns
from ...timeline.measure.steps import issued_in_step, keep_ranks_with_steps, median_step, rank_windows
from ...timeline.spans import Timeline
from ...units import format_ns
from ..program import Program, restoring_argv_and_path
from .setting import revise_config


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """The shape of collectives that cost equal time."""

    op: str  # Name of the collective
    nbytes: int  # The larger of input and result
    dtype: str  # Type of the elements; may be empty
    ranks: int  # Size of the group


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One simulated run, measured at the longest rank of its median step."""

    world_size: int  # Ranks
    step: int | None  # The median step; None for the whole run, if the program marks no steps
    steps: int  # Their number
    # Where the time went on the rank whose step is longest; of several the one with the most exposed communication,
    # then with the most compute, then the first.
    longest: Breakdown
    shapes: tuple[Shape, ...]  # Everything that was communicated in the step, on any rank
    extrapolated: tuple[Shape, ...]  # Shapes outside published measurements
    rated: bool  # Whether computes were priced by the peak of the device

    @property
    def step_ns(self) -> int:
        """Time of the longest rank's step."""
        return self.longest.wall_ns

    @property
    def exposed_share(self) -> float:
        """Part of the step in which there is only communication, from 0 to 1."""
        return self.longest.exposed_ns / self.step_ns if self.step_ns else 0.0


def summarize_timeline(timeline: Timeline, cluster: Cluster) -> StepSummary:
    """Return the measures of the median step of a simulated run, see `StepSummary`.

    Args:
        timeline: Timeline of the run.
        cluster: The cluster on which the run was simulated.

    Raises:
        UsageError: If the timeline is empty.
    """
    step = median_step(timeline)
    rows = keep_ranks_with_steps(breakdowns(timeline, step=step))
    # the rank with the longest step; of equal ones, with most exposed time, most compute, the lowest rank
    longest = min(rows, key=lambda row: (-row.wall_ns, -row.exposed_ns, -row.compute_ns, row.rank))
    spans = list(timeline.chosen(issued_in_step(timeline, rank_windows(timeline, step=step), step)))
    infos = [span.info for span in spans if span.info is not None]
    shapes = sorted({Shape(op=each.op, nbytes=each.nbytes, dtype=each.dtype, ranks=len(each.ranks)) for each in infos})
    outside = [each for each in shapes if not is_measured(cluster, each.ranks, each.op, each.nbytes, each.dtype)]
    return StepSummary(
        world_size=timeline.world_size,
        step=step,
        steps=len(timeline.steps()),
        longest=longest,
        shapes=tuple(shapes),
        extrapolated=tuple(outside),
        rated="peak" in timeline.meta,
    )


# -- running ---------------------------------------------------------------------------------------------------------

_FIRST_S, _AGAIN_S = 2.0, 10.0  # before the first line of progress, and between two


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """One call of `overlap.run` in virtual time."""

    request: RunConfig  # Its configuration, by the program and the setting
    timeline: Timeline

    @cached_property
    def outcome(self) -> StepSummary:
        """Measures of its median step."""
        assert isinstance(self.request.cluster, Cluster)
        return summarize_timeline(self.timeline, self.request.cluster)


def simulate(
    program: Program,
    setting: Mapping[str, Any],
    *,
    trace: str | None = None,
    state_dir: str | None = None,
    pulse: Callable[[RunConfig, int, int | None], None] | None = None,
) -> list[SimulatedRun]:
    """Run a program once, and return the runs in virtual time that it made, in order.

    Args:
        program: Runs it.
        setting: Values of `setting.check_setting`, which win over the program.
        trace: Where to write the timelines.
        state_dir: Folder that `rank.state` names, in place of the program's.
        pulse: Called again and again with the configuration of the run, the instant in ns, and the newest step.

    Raises:
        UsageError: If it simulates nothing.
    """
    requests: list[RunConfig] = []
    timelines: list[tuple[RunConfig, Timeline]] = []

    def record_and_revise(asked: RunConfig) -> RunConfig:
        """Return the configuration of a run of the program, changed by the setting, and keep it."""
        requests.append(revise_config(setting, asked))
        return requests[-1]

    def record_timeline(timeline: Timeline) -> None:
        """Keep the timeline of a run that has ended, and its configuration: that of the last run that began."""
        timelines.append((requests[-1], timeline))

    def pass_pulse_on(now_ns: int, step: int | None) -> None:
        assert pulse is not None
        pulse(requests[-1], now_ns, step)

    wanted = RunConfig.from_environment().with_changes("--trace", trace=trace)
    if state_dir is not None:
        wanted = wanted.with_changes("--state-dir", state_dir=state_dir)
    with (
        setting_environment(wanted),
        restoring_argv_and_path(),
        overriding_config(revise=record_and_revise, watcher=record_timeline, pulse=pulse and pass_pulse_on),
    ):
        _call_program(program)
    if not timelines:
        raise UsageError(
            "simulate: the program did not call overlap.run, so there is nothing in virtual time; "
            "call it in the program"
        )
    return [SimulatedRun(request=request, timeline=timeline) for request, timeline in timelines]


@contextmanager
def showing_progress() -> Iterator[Callable[[RunConfig, int, int | None], None]]:
    """Yield a function that prints the virtual time of a long simulation, and the first time a hint how to shorten it.

    Raises:
        Terminated: If a signal ends the process; a message was printed.
    """
    due_s, is_shown = monotonic() + _FIRST_S, False

    def report_progress(request: RunConfig, now_ns: int, step: int | None) -> None:
        """Print ranks and virtual time, at most every `_AGAIN_S`; the first time with the hint."""
        nonlocal due_s, is_shown
        if monotonic() < due_s:
            return
        assert isinstance(request.cluster, Cluster)
        ranks = request.ranks or request.cluster.world_size
        hint, begun = _alike_hint(request, ranks), "" if step is None else f", step {step} has begun"
        notify(f"simulating {ranks} ranks: {format_ns(now_ns)} of virtual time{begun}{'' if is_shown else hint}")
        due_s, is_shown = monotonic() + _AGAIN_S, True

    try:
        # A block that ends well leaves the filters of the process as they were.
        with catch_warnings(), handling_signals():
            _ignore_unawaited_coroutines()
            yield report_progress
    except (KeyboardInterrupt, SystemExit):
        # The coroutines of the interrupted ranks may be collected later, when the block has restored the filters.
        _ignore_unawaited_coroutines()
        raise


def _ignore_unawaited_coroutines() -> None:
    """Ignore warnings of coroutines that an interrupt has left without an await."""
    filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)


def _alike_hint(request: RunConfig, ranks: int) -> str:
    """Return a hint to simulate two ranks for all, or "" for a run that already does, or whose ranks may differ."""
    virtual = request.virtual
    assert virtual is not None
    if ranks <= 2 or virtual.alike or virtual.faults or not virtual.conditions.calm:
        return ""
    options = "--alike 1" if virtual.shapes_only else "--shapes-only --alike 1"
    return f"; if they all do equal work, {options} runs two of them for all"


def _call_program(program: Program) -> None:
    """Run the program; an exit without an error code ends it well."""
    try:
        program()
    except SystemExit as end:
        if end.code:
            raise
