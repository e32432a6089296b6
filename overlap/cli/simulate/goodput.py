"""Goodput of a program that goes on after losses: its own steps and losses in virtual time, then a long job of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from io import StringIO
from random import Random
from typing import Any

from topology import Cluster, TopologyError

from ... import Faults
from ...config import RunConfig
from ...cost.select import plan
from ...errors import OverlapError, UsageError
from ...planning.goodput import Goodput, Loss, RestartingJob, SurvivingJob, goodput
from ...settings import Option
from ...survival.virtual import AFTER, STATE
from ...timeline.measure.metrics import windows_of
from ...timeline.spans import Timeline
from ...units import duration, format_s
from ..options import add_options, shared_option
from ..output import field
from ..parser import Parser
from ..program import Program
from .simulation import Simulation, simulate

_LOSSES = 5  # measured losses
_CALM = Faults(delay=0.0, loss=0.0, death=0.0, slow=0.0, reorder=False, survive=True)


OPTIONS = {
    "mtbf": Option(read=duration, metavar="TIME", help="mean time between losses of the whole job, such as 3h"),
    "spares": shared_option("spares", "default: 0"),
    "repair": Option(read=duration, metavar="TIME", help="after which a lost one is a spare again; default: never"),
    "duration": Option(read=duration, metavar="TIME", help="of the job; default: 24h"),
    "recovery": Option(read=duration, metavar="TIME", help="from a loss to the next world; default: 0.3s"),
    "checkpoint": Option(read=duration, metavar="TIME", help="for the formula: of a write; default: 30s"),
    "restart": Option(read=duration, metavar="TIME", help="for the formula: of a start; default: 10min"),
}


def add_goodput(parser: Parser) -> None:
    """Add the options of a job with losses."""
    group = parser.add_argument_group("goodput of a long job that goes on after losses, as under --survive")
    add_options(group, OPTIONS, usual=("mtbf",))
    parser.set_defaults(spares=0, duration=24 * 3600.0, recovery=0.3, checkpoint=30.0, restart=600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGoodput:
    """Goodput of a job, and the measurements that it consists of."""

    goodput: Goodput
    job: SurvivingJob
    restarts: RestartingJob
    unit: str  # Part of the job that a loss takes
    steps_s: Mapping[int, float]  # Time of a step, by the number of units
    repeated_steps: tuple[int, ...]  # Number, by measured loss
    counts_ranks: bool  # Whether a step counts by its ranks, because the program does not give its samples
    errors: Mapping[int, str]  # Error of the program, by the number of units with which it cannot run

    def page(self) -> Iterator[str]:
        """Yield the lines of the page."""
        job, result = self.job, self.goodput
        steps = ", ".join(f"{format_s(step_s)} with {units}" for units, step_s in self.steps_s.items())
        pauses = [loss.pause_s for loss in job.losses]
        lost = [loss.pause_s + loss.repeated_s for loss in job.losses]
        kind, space, size = self.unit.partition(" ")
        yield f"{job.units} {kind}s{space}{size}, {job.spares} spare{'s' * (job.spares != 1)}, virtual time"
        yield from field("goodput", f"{result.share:.2%} of full speed over {_hours_text(result.duration_s)}")
        yield from field("  losses", f"{result.losses}, one in {_hours_text(job.between_s)}; spares used: "
                         f"{result.spares_used}; {result.units} of {job.units} {kind}s at the end")  # fmt: skip
        yield from field("  repeated", f"{result.repeated_share:.3%} of the time")
        yield from field("  pauses", f"{result.pause_share:.3%} of the time")
        yield from field("  smaller", f"{result.smaller_share:.2%} of full speed, after losses without a spare")
        if result.ended_s is not None:
            reason = self.errors.get(result.units, "all are lost")
            yield from field("  ended", f"after {_hours_text(result.ended_s)}: {reason}")
        yield from field("measured", f"a step takes {steps}")
        repeated = f"{_range_text(self.repeated_steps)} steps repeated"
        lost_each = f"{_range_text(lost)} lost each, of them {_range_text(pauses)} pause"
        yield from field("", f"{len(job.losses)} losses: {lost_each}; {repeated}")
        if job.join_s:
            yield from field("", f"a spare receives the state in {format_s(job.join_s)}, by the cost model")
        if self.counts_ranks:
            yield from field("assumed", "a step counts by its ranks: the program has no global samples_per_step")
        restarts = self.restarts
        for name, every_s in (("Young", restarts.young_s), ("Daly", restarts.daly_s)):
            yield from field(f"restarts, {name}", f"{restarts.share(every_s):.2%} with a checkpoint each "
                             f"{format_s(every_s)}, {format_s(restarts.write_s)} long, and restarts of "
                             f"{format_s(restarts.restart_s)}")  # fmt: skip

    def describe(self) -> dict[str, object]:
        """Return the figures for `--json`: seconds, and shares from 0 to 1."""
        restarts = self.restarts
        return {
            "goodput": asdict(self.goodput),
            "units": self.job.units,
            "unit": self.unit,
            "spares": self.job.spares,
            "mtbf_s": self.job.between_s,
            "join_s": self.job.join_s,
            "step_s": {str(units): step_s for units, step_s in self.steps_s.items()},
            "losses": [
                asdict(loss) | {"repeated_steps": steps}
                for loss, steps in zip(self.job.losses, self.repeated_steps, strict=True)
            ],
            "young": {"every_s": restarts.young_s, "share": restarts.share(restarts.young_s)},
            "daly": {"every_s": restarts.daly_s, "share": restarts.share(restarts.daly_s)},
        }


def _range_text(values: Any) -> str:
    """Return the smallest and the largest of numbers or seconds in words; one of them if both are equal."""
    write: Callable[[Any], str] = str if isinstance(next(iter(values)), int) else format_s
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


def _hours_text(duration_s: float) -> str:
    return format_s(duration_s) if duration_s < 3600 else f"{duration_s / 3600:.4g} h"


def measured_goodput(program: Program, setting: Mapping[str, Any], args: argparse.Namespace) -> MeasuredGoodput:
    """Run a program in virtual time without losses and with some; draw the losses of a long job from these.

    Raises:
        UsageError: The program marks fewer than three steps, or does not go on after a loss.
    """
    measurement = _Measurement(program, setting, args.recovery)
    losses, repeated = measurement.losses()
    job = SurvivingJob(
        units=measurement.units,
        between_s=args.mtbf,
        speed=measurement.measure_speed,
        losses=losses,
        spares=args.spares,
        join_s=measurement.join_s if args.spares or args.repair else 0.0,
        repair_s=args.repair,
    )
    return MeasuredGoodput(
        goodput=goodput(job, args.duration, seed=setting.get("seed", 0)),
        job=job,
        restarts=RestartingJob(between_s=args.mtbf, write_s=args.checkpoint, restart_s=args.restart),
        unit=measurement.unit,
        steps_s=measurement.steps_s,
        repeated_steps=repeated,
        counts_ranks=measurement.samples is None,
        errors=measurement.errors,
    )


class _Measurement:
    """Runs of a program in virtual time.

    A loss takes a node; on a cluster of one node, a rank.

    Attributes:
        units: Units at first.
        steps_s: Time of a step, by the number of units.
        samples: Samples of a step at first, if the program gives them.
        join_s: Time in which a spare receives the state.
        errors: Of the program, by the number of units with which it cannot run.
    """

    def __init__(self, program: Program, setting: Mapping[str, Any], recovery_s: float) -> None:
        self._program, self._setting, self._recovery_s = program, setting, recovery_s
        run = simulate(program, setting, change=_every_rank).runs[-1]
        cluster = run.request.cluster
        assert isinstance(cluster, Cluster)
        self._cluster, self._ranks = cluster, run.timeline.world_size
        self._each = cluster.ranks_per_node if cluster.nodes > 1 else 1
        if self._ranks % self._each:
            raise UsageError(
                f"--mtbf: {self._ranks} ranks do not fill nodes of {self._each}, of which losses take one; "
                f"choose a multiple of {self._each}"
            )
        self.units = self._ranks // self._each
        self.samples = run.outcome.samples
        self._step_ends_s = _step_ends_s(run.timeline)
        self.steps_s = {self.units: _mean_step_s(self._step_ends_s)}
        self.errors: dict[int, str] = {}
        self.join_s = 0.0

    @property
    def unit(self) -> str:
        """Name of the unit that is lost at once, for the page: a rank, or a node of so many ranks."""
        return "rank" if self._each == 1 else f"node of {self._each} ranks"

    def measure_speed(self, units: int) -> float:
        """Return the samples per second of a number of units; 0 if the program cannot run with it."""
        samples: float | None = self.samples
        if units not in self.steps_s and units not in self.errors:
            ranks = units * self._each
            try:
                run = simulate(
                    self._program, self._setting, change=lambda request: replace(_every_rank(request), ranks=ranks)
                ).runs[-1]
                self.steps_s[units] = _mean_step_s(_step_ends_s(run.timeline))
            except (OverlapError, TopologyError) as error:
                self.errors[units] = f"the program fails with {ranks} ranks: {error}"
        if units in self.errors:
            return 0.0
        return (samples or units * self._each) / self.steps_s[units]

    def losses(self) -> tuple[tuple[Loss, ...], tuple[int, ...]]:
        """Lose a unit at instants in the second half of the program; return the costs, and the repeated steps."""
        ends_s, draw = self._step_ends_s, Random(f"{self._setting.get('seed', 0)}, losses")
        first_s, last_s = ends_s[(len(ends_s) - 2) // 2], ends_s[-2]
        instants = [first_s + (last_s - first_s) * (index + draw.random()) / _LOSSES for index in range(_LOSSES)]
        costs = [self._measure_loss(instant_s, draw.randrange(self.units)) for instant_s in instants]
        return tuple(loss for loss, _ in costs), tuple(repeated for _, repeated in costs)

    def _measure_loss(self, instant_s: float, unit: int) -> tuple[Loss, int]:
        """Lose a unit at an instant; return the cost of the loss in seconds, and how many whole steps are repeated."""
        second = self._simulate_loss(instant_s, unit).runs[-1]
        after, ends_s = int(second.timeline.meta[AFTER]), _step_ends_s(second.timeline)
        whole_steps = sum(end_s <= instant_s for end_s in self._step_ends_s)
        if after == 0:
            raise UsageError(
                f"--mtbf: after a loss in step {whole_steps} the program begins again from its first step; train with "
                "parallel.DataParallel, or with parallel.Sharded(..., replicate=K) and K below that"
            )
        step_s = _mean_step_s(ends_s) if len(ends_s) > 1 else self.steps_s[self.units]
        nbytes = int(second.timeline.meta[STATE])
        if nbytes:
            self.join_s = plan("broadcast", nbytes, self._cluster, range(self._ranks)).predicted_s
        repeated_s = max(0.0, instant_s - self._step_ends_s[after - 1])
        loss = Loss(repeated_s=repeated_s, pause_s=ends_s[0] - step_s - instant_s)
        return loss, max(0, whole_steps - after)

    def _simulate_loss(self, instant_s: float, unit: int) -> Simulation:
        """Simulate the program with the ranks of a unit killed at an instant; raise `UsageError` if it ends there."""
        ranks = range(unit * self._each, (unit + 1) * self._each)

        def add_loss(request: RunConfig) -> RunConfig:
            """Return a configuration in which each rank runs, and the ranks of the unit are killed at the instant."""
            kills = tuple((instant_s, rank) for rank in ranks)
            faults = replace(_CALM, kills=kills, recovery_s=max(0.0, self._recovery_s - _CALM.notice_s))
            request = _every_rank(request)
            assert request.virtual is not None
            return replace(request, virtual=replace(request.virtual, faults=faults))

        try:
            with redirect_stderr(StringIO()):  # each loss is reported there
                simulation = simulate(self._program, self._setting, change=add_loss)
        except UsageError:
            raise
        except OverlapError as error:
            raise UsageError(f"--mtbf: the program does not go on after a loss: {error}") from error
        if len(simulation.runs) < 2:
            raise UsageError(f"--mtbf: the program has ended before the loss at {instant_s:g} s; train for more steps")
        return simulation


def _every_rank(request: RunConfig) -> RunConfig:
    """Return a configuration in which each rank runs, and nothing fails."""
    assert request.virtual is not None
    return replace(request, virtual=replace(request.virtual, alike=0, faults=None))


def _step_ends_s(timeline: Timeline) -> list[float]:
    """Return the instants at which the steps end."""
    steps = timeline.steps()
    if not steps:
        raise UsageError("--mtbf: the program marks no steps; write `with rank.step(model.steps):` around each")
    return [max(end for _, end in windows_of(timeline, step).values()) / 1e9 for step in steps]


def _mean_step_s(ends_s: list[float]) -> float:
    """Return the mean time from one end of a step to the next."""
    if len(ends_s) < 3:
        raise UsageError(f"--mtbf: the program makes {len(ends_s)} steps; measuring needs three and more")
    return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
