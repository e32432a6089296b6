"""The model against what was published: every row of `measurements` beside what the model says of it.

Errors are of times, also where a bandwidth was published. A row that a figure was fitted to says little; what counts
are the rows that the model has not seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from topology import TopologyWarning, cluster

from ...errors import UsageError
from ..select import plan
from .measurements import COLLECTIVES, KNEES, STARTS, TRAINING
from .published import Knee, Measurement, Start, Training
from .startup import startup
from .switched import P5

__all__ = ["MEDIAN_ASKED", "WORST_ASKED", "Accuracy", "Crossover", "Judged", "Validation", "validate"]

MEDIAN_ASKED = 0.15
"""Median error that is asked of the model on rows that it has not seen."""

WORST_ASKED = 0.35
"""Largest error that is asked of it on those rows."""

_START_BYTES, _START_DTYPE = 32 << 10, "bfloat16"
# Crossovers are looked for in this many octaves around what is published, and found to a hundredth of the size.
_OCTAVES = 3
_CLOSE = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A published figure and what the model says of it.

    Attributes:
        of: the row.
        measured: seconds; for a training run the ratio of its two throughputs.
        predicted: in the same unit.
        fits: the figure of the model that was fitted to this row, empty if the model has not seen it.
        extrapolated: whether no rows that figures were fitted to enclose this one: same machine, ranks and operation,
            and sizes below and above.
    """

    of: Measurement | Start | Training
    measured: float
    predicted: float
    fits: str
    extrapolated: bool

    @property
    def error(self) -> float:
        """The prediction's, as a share of what was measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Where an algorithm takes over from another.

    Attributes:
        knee: what is published.
        predicted_bytes: the size from which the model chooses the second one; None if it does not change from the one
            to the other anywhere near.
    """

    knee: Knee
    predicted_bytes: int | None

    @property
    def inside(self) -> bool:
        """Whether that is in the published range."""
        return self.predicted_bytes is not None and (
            self.knee.least_bytes <= self.predicted_bytes <= self.knee.most_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Errors of some rows, as shares.

    Attributes:
        rows: how many.
        median: of the absolute errors; 0 without rows.
        worst: the largest of them.
    """

    rows: int
    median: float
    worst: float

    @property
    def as_asked(self) -> bool:
        """Whether median and worst are what is asked."""
        return self.median <= MEDIAN_ASKED and self.worst <= WORST_ASKED


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Everything published of some machines, beside the model.

    Attributes:
        collectives: one for each measured collective.
        starts: one for each measured execution of a program.
        training: the training run, where its machine was asked for.
        crossovers: one for each published change of algorithm.
    """

    collectives: tuple[Judged, ...]
    starts: tuple[Judged, ...]
    training: Judged | None
    crossovers: tuple[Crossover, ...]

    @property
    def rows(self) -> tuple[Judged, ...]:
        """All rows with an error."""
        return (*self.collectives, *self.starts, *((self.training,) if self.training else ()))

    @property
    def all(self) -> Accuracy:
        """Accuracy over all rows."""
        return _accuracy(self.rows)

    @property
    def unseen(self) -> Accuracy:
        """Accuracy over the rows that nothing was fitted to."""
        return _accuracy([row for row in self.rows if not row.fits])

    @property
    def as_asked(self) -> bool:
        """Whether unseen rows and all crossovers are as asked."""
        return self.unseen.as_asked and all(each.inside for each in self.crossovers)


def validate(machine: str | None = None) -> Validation:
    """Predict everything that was published.

    Args:
        machine: Only rows of this one, with any number of nodes unless it names one; all by default.

    Raises:
        UsageError: If nothing is published of it.
    """
    known = sorted({_base(row.machine) for row in COLLECTIVES})
    if machine is not None and _base(machine) not in known:
        raise UsageError(f"machine: nothing is published of {machine!r}; known are {', '.join(known)}")
    return Validation(
        collectives=tuple(_collective(row) for row in COLLECTIVES if _asked(row.machine, machine)),
        starts=tuple(_start(row) for row in STARTS if _asked(row.machine, machine)),
        training=_training() if _asked(TRAINING.machine, machine) else None,
        crossovers=tuple(_crossover(knee) for knee in KNEES if _asked(knee.machine, machine)),
    )


def _base(machine: str) -> str:
    return machine.split(" x")[0]


def _asked(machine: str, wanted: str | None) -> bool:
    return wanted in (None, machine, _base(machine))


def _accuracy(rows: Sequence[Judged]) -> Accuracy:
    errors = [abs(row.error) for row in rows]
    return Accuracy(rows=len(rows), median=median(errors) if errors else 0.0, worst=max(errors, default=0.0))


def _collective(row: Measurement) -> Judged:
    fitted = [other.nbytes for other in COLLECTIVES if other.fits and _alike(other, row)]
    return Judged(
        of=row,
        measured=row.measured_s,
        predicted=_collective_s(row),
        fits=row.fits,
        extrapolated=not fitted or not min(fitted) <= row.nbytes <= max(fitted),
    )


def _alike(one: Measurement, other: Measurement) -> bool:
    def shape(row: Measurement) -> tuple[object, ...]:
        return row.machine, row.ranks, row.collective, row.dtype, row.peer_direct

    return shape(one) == shape(other)


def _collective_s(row: Measurement) -> float:
    if _base(row.machine) == "p5.48xlarge":
        return P5.all_reduce_s(row.ranks // P5.gpus, row.nbytes)
    found = plan(row.collective, row.nbytes, cluster(row.machine), dtype=row.dtype, peer_direct=row.peer_direct)
    return found.predicted_s


def _start(row: Start) -> Judged:
    fitted = [each.ranks for each in STARTS if each.fits and _alike_starts(each, row)]
    return Judged(
        of=row,
        measured=row.figure_ms / 1e3,
        predicted=_start_s(row),
        fits=row.fits,
        extrapolated=not fitted or not min(fitted) <= row.ranks <= max(fitted),
    )


def _alike_starts(one: Start, other: Start) -> bool:
    return (one.machine, one.operations) == (other.machine, other.operations)


def _start_s(row: Start) -> float:
    machine = cluster(row.machine, strict=False)
    with warnings.catch_warnings():
        # Two ranks of trn2 were timed, which its rules do not list.
        warnings.simplefilter("ignore", TopologyWarning)
        operation = plan("all_reduce", _START_BYTES, machine, tuple(range(row.ranks)), dtype=_START_DTYPE)
    return startup(machine).program_s(row.ranks, row.operations, operation.predicted_s)


def _training() -> Judged:
    """Predict the ratio of two throughputs where all that a step takes is its communication.

    ZeRO-2 reduces and scatters the gradients and gathers the parameters. The published run states no batch, so its
    compute cannot be known: this is the ratio without any, which compute beside communication only brings nearer to 1.
    """
    nbytes, machine = round(TRAINING.parameters * TRAINING.itemsize), cluster(TRAINING.machine)
    host_s, direct_s = (
        sum(plan(op, nbytes, machine, peer_direct=direct).predicted_s for op in ("reduce_scatter", "all_gather"))
        for direct in (False, True)
    )
    return Judged(
        of=TRAINING,
        measured=TRAINING.peer_direct / TRAINING.host_copies,
        predicted=host_s / direct_s,
        fits="",
        extrapolated=True,
    )


def _crossover(knee: Knee) -> Crossover:
    machine, ranks = cluster(knee.machine), tuple(range(knee.ranks))

    def chosen(nbytes: int) -> str:
        return plan(knee.collective, nbytes, machine, ranks).algorithm

    below, above = knee.least_bytes >> _OCTAVES, knee.most_bytes << _OCTAVES
    while above > below * _CLOSE:
        middle = round(sqrt(below * above))
        below, above = (middle, above) if _before(chosen(middle), knee) else (below, middle)
    found = (chosen(below), chosen(above)) == (knee.below, knee.above)
    return Crossover(knee=knee, predicted_bytes=above if found else None)


# In the order of sizes: an algorithm before the one that takes over is below the knee.
_BY_SIZE = ("one_shot", "mesh", "rdh", "kangaring")


def _before(algorithm: str, knee: Knee) -> bool:
    return algorithm in _BY_SIZE[: _BY_SIZE.index(knee.above)]
