"""Validation of the model: every published measurement next to the model's prediction.

Errors are errors of times, also if a bandwidth was published. A row that a figure was fitted to proves little; the rows
that the model has not seen count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from topology import cluster

from ..errors import UsageError
from .measurements import (
    COLLECTIVES,
    KNEES,
    TRAINING,
    Knee,
    Measurement,
    Training,
    at_library_version,
    measured_cluster,
)
from .select import plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyGoal:
    """Required accuracy of predictions of rows that the model has not seen."""

    median: float  # median error, as a share of the measured value
    worst: float  # largest error, as a share of the measured value


_NEURON = AccuracyGoal(median=0.08, worst=0.20)
_BY_DATA = AccuracyGoal(median=0.15, worst=0.50)

_START_BYTES, _START_DTYPE = 32 << 10, "bfloat16"
# Crossovers are searched in this many octaves around the published one, and found to a hundredth of the size.
_OCTAVES = 3
_CLOSE = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRow:
    """A published figure and the model's prediction."""

    of: Measurement | Training  # the row
    measured: float  # the published value in seconds; of a training run the ratio of its two throughputs
    predicted: float  # the prediction, in that unit
    fits: str  # the figure of the model that was fitted to this row, empty if the model has not seen it
    # whether no rows that figures were fitted to enclose this one: same machine, ranks and operation, and sizes below
    # and above.
    extrapolated: bool

    @property
    def error(self) -> float:
        """Error of the prediction, as a share of the measured value."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Size at which an algorithm takes over from another."""

    knee: Knee  # the published change of algorithm
    # the size from which the model chooses the second one; None if it does not change from the one to the other
    # anywhere near.
    predicted_bytes: int | None

    @property
    def inside(self) -> bool:
        """Whether the predicted size is in the published range."""
        return self.predicted_bytes is not None and (
            self.knee.least_bytes <= self.predicted_bytes <= self.knee.most_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Errors of some rows, as shares."""

    errors: tuple[float, ...]  # the absolute error of each row

    @classmethod
    def of(cls, rows: Sequence[ValidationRow]) -> Accuracy:
        """Return the absolute errors of some rows."""
        return cls(errors=tuple(abs(row.error) for row in rows))

    @classmethod
    def together(cls, parts: Iterable[Accuracy]) -> Accuracy:
        """Return the errors of several accuracies as one."""
        return cls(errors=tuple(error for part in parts for error in part.errors))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.errors)

    @property
    def median(self) -> float:
        """Median error; 0 without rows."""
        return median(self.errors) if self.errors else 0.0

    @property
    def worst(self) -> float:
        """Largest error; 0 without rows."""
        return max(self.errors, default=0.0)

    def meets(self, goal: AccuracyGoal) -> bool:
        """Return whether median and worst error meet a goal."""
        return self.median <= goal.median and self.worst <= goal.worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Class:
    """Rows of one chip, network or not, and one dtype, with the planner's accuracy on them."""

    name: str  # the chip, and whether nodes are joined
    dtype: str  # type of the elements
    asked: AccuracyGoal  # required accuracy of the unseen rows
    unseen: Accuracy  # accuracy on rows without fitted figures
    fitted: int  # number of rows to which figures were fitted
    all: Accuracy  # accuracy on all rows, fitted and unseen

    @property
    def as_asked(self) -> bool:
        """Whether the unseen rows meet the goal."""
        return self.unseen.meets(self.asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All published figures of some machines, with the model's predictions."""

    collectives: tuple[ValidationRow, ...]  # one for each measured collective
    training: ValidationRow | None  # the training run, where its machine was asked for
    crossovers: tuple[Crossover, ...]  # one for each published change of algorithm

    @property
    def rows(self) -> tuple[ValidationRow, ...]:
        """All rows with an error."""
        return (*self.collectives, *((self.training,) if self.training else ()))

    @property
    def all(self) -> Accuracy:
        """Accuracy over all rows."""
        return Accuracy.of(self.rows)

    @property
    def unseen(self) -> Accuracy:
        """Accuracy of the planner over the rows without fitted figures."""
        return Accuracy.of([row for row in self.collectives if not row.fits])

    @property
    def classes(self) -> tuple[Class, ...]:
        """The planner's accuracy by chip, nodes and dtype, of collectives only."""
        return _accuracy_by_class(self.collectives)

    @property
    def as_asked(self) -> bool:
        """Whether every class meets its goal and all crossovers are inside."""
        return all(c.as_asked for c in self.classes) and all(crossover.inside for crossover in self.crossovers)


def validate(machine: str | None = None) -> Validation:
    """Predict every published measurement, and return rows, crossovers and accuracy.

    Args:
        machine: Only rows of this machine, with any number of nodes unless it names one; all by default.

    Raises:
        UsageError: If nothing is published of the machine.
    """
    known = sorted({_machine_name(row.machine) for row in COLLECTIVES})
    if machine is not None and _machine_name(machine) not in known:
        raise UsageError(f"machine: nothing is published of {machine!r}; known are {', '.join(known)}")
    return Validation(
        collectives=tuple(_predict_collective(row) for row in COLLECTIVES if _is_of_machine(row.machine, machine)),
        training=_predict_training() if _is_of_machine(TRAINING.machine, machine) else None,
        crossovers=tuple(_predict_crossover(knee) for knee in KNEES if _is_of_machine(knee.machine, machine)),
    )


def accuracy_classes(machine: str | None = None, *, place: str | None = None) -> tuple[Class, ...]:
    """Predict published collectives alone, and return the accuracy by class; a part of `validate`.

    Args:
        machine: Only rows of this machine; all by default. Without published rows the result is empty.
        place: Only "one node", or "across nodes"; both by default.
    """
    rows = [row for row in COLLECTIVES if _is_of_machine(row.machine, machine) and place in (None, _node_scope(row))]
    return _accuracy_by_class([_predict_collective(row) for row in rows])


def _accuracy_by_class(collectives: Sequence[ValidationRow]) -> tuple[Class, ...]:
    """Group rows by chip, nodes and dtype, and return the planner's accuracy on each, with the one asked for."""
    by_class: dict[tuple[str, str, bool], list[ValidationRow]] = {}
    for row in collectives:
        assert isinstance(row.of, Measurement)
        machine = measured_cluster(row.of.machine, strict=False).machine
        name = f"{machine.chip.name}, {_node_scope(row.of)}"
        by_class.setdefault((name, row.of.dtype, machine.wires.link not in ("nvlink", "xgmi")), []).append(row)
    return tuple(
        Class(
            name=name,
            dtype=dtype,
            asked=_NEURON if closely else _BY_DATA,
            unseen=Accuracy.of([row for row in rows if not row.fits]),
            fitted=sum(bool(row.fits) for row in rows),
            all=Accuracy.of(rows),
        )
        for (name, dtype, closely), rows in by_class.items()
    )


def _node_scope(row: Measurement) -> str:
    return "across nodes" if " x" in row.machine else "one node"


def _machine_name(machine: str) -> str:
    return machine.split(" x")[0]


def _is_of_machine(machine: str, only: str | None) -> bool:
    return only in (None, machine, _machine_name(machine))


def _predict_collective(row: Measurement) -> ValidationRow:
    """Predict a published collective; extrapolated: its size is outside those that figures were fitted to."""
    fitted = [other.nbytes for other in COLLECTIVES if other.fits and _have_equal_shape(other, row)]
    return ValidationRow(
        of=row,
        measured=row.measured_s,
        predicted=_predicted_s(row),
        fits=row.fits,
        extrapolated=not fitted or not min(fitted) <= row.nbytes <= max(fitted),
    )


def _have_equal_shape(one: Measurement, other: Measurement) -> bool:
    """Return whether two rows differ only in their size and figure."""

    def shape(row: Measurement) -> tuple[object, ...]:
        return row.machine, row.ranks, row.group, row.collective, row.dtype, row.peer_direct

    return shape(one) == shape(other)


def _predicted_s(row: Measurement) -> float:
    """Return the planned time of a row; for a published difference of two sizes, the difference of their times."""
    whole_s = _planned_s(row, row.nbytes)
    return whole_s - _planned_s(row, row.beyond_bytes) if row.beyond_bytes else whole_s


def _planned_s(row: Measurement, nbytes: int) -> float:
    """Return the price of the planner's choice, among the library's algorithms if they are known."""
    group, machine = row.group or None, measured_cluster(row.machine, strict=False)
    machine = at_library_version(machine, row.version) if row.version else machine
    return plan(row.collective, nbytes, machine, group, dtype=row.dtype, peer_direct=row.peer_direct).predicted_s


def _predict_training() -> ValidationRow:
    """Predict the ratio of two throughputs where all that a step takes is its communication.

    ZeRO-2 reduces and scatters the gradients and gathers the parameters. This is the ratio without any compute, which
    brings it nearer to 1: with compute calibrated on one of the two throughputs of the published batch, the other is
    missed by far (examples/08_bert_peer_direct.py).
    """
    nbytes, machine = round(TRAINING.parameters * TRAINING.itemsize), cluster(TRAINING.machine)
    host_s, direct_s = (
        sum(plan(op, nbytes, machine, peer_direct=direct).predicted_s for op in ("reduce_scatter", "all_gather"))
        for direct in (False, True)
    )
    return ValidationRow(
        of=TRAINING,
        measured=TRAINING.peer_direct / TRAINING.host_copies,
        predicted=host_s / direct_s,
        fits="",
        extrapolated=True,
    )


def _predict_crossover(knee: Knee) -> Crossover:
    """Search for the size at which the cheapest algorithm changes; its bytes are None if none is near the published."""
    machine, ranks = cluster(knee.machine), tuple(range(knee.ranks))

    def cheapest_algorithm(nbytes: int) -> str:
        return plan(knee.collective, nbytes, machine, ranks).cheapest

    below, above = knee.least_bytes >> _OCTAVES, knee.most_bytes << _OCTAVES
    while above > below * _CLOSE:
        middle = round(sqrt(below * above))
        below, above = (middle, above) if _wins_before(cheapest_algorithm(middle), knee) else (below, middle)
    changes = (cheapest_algorithm(below), cheapest_algorithm(above)) == (knee.below, knee.above)
    return Crossover(knee=knee, predicted_bytes=above if changes else None)


# Algorithms in the order of the sizes at which they win.
_BY_SIZE = ("one_shot", "mesh", "rdh", "kangaring")


def _wins_before(algorithm: str, knee: Knee) -> bool:
    """Return whether an algorithm belongs to sizes below a knee, by the order `_BY_SIZE`."""
    return algorithm in _BY_SIZE[: _BY_SIZE.index(knee.above)]
