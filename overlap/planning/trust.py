"""Trust in predictions: the errors of collectives and of steps on published rows that nothing was fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from topology import Cluster

from ..cost.parameters import is_measured
from ..cost.validation import Accuracy, Class, accuracy_classes
from .layout import Layout
from .parts import MESSAGE, StepOperation, StepParts
from .validation import StepBand, class_band


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Errors of predicted operations, as shares of the measured times."""

    typical: float  # The median one
    worst: float  # The largest
    rows: int  # Number of published rows behind them
    source: str  # Chip, place and dtype of these rows
    measured: bool  # Whether the size lies within published sizes of that very shape


def operation_band(cluster: Cluster, operation: StepOperation) -> Band:
    """Return the band of an operation, from published rows of its chip, place and dtype or the nearest known."""
    where = "across nodes" if len({cluster.place(rank).node for rank in operation.ranks}) > 1 else "one node"
    classes = _nearest_classes(
        cluster.machine.name.split()[0], f"{cluster.machine.chip.name}, {where}", operation.dtype
    )
    size, inside = operation.nbytes, False
    if operation.op != MESSAGE:
        inside = is_measured(cluster, len(operation.ranks), operation.op, size, operation.dtype)
    return _join_classes(classes, inside)


@cache
def _nearest_classes(machine: str, name: str, dtype: str) -> list[Class]:
    """Return the classes of a name and dtype; where none is known, of any dtype, then of any chip, then all."""
    known = [each for each in accuracy_classes(machine) if each.name == name and each.unseen.rows]
    if known:
        return [each for each in known if each.dtype == dtype] or known
    return _classes_at_place(name.split(", ")[1]) or _classes_at_place(None)


@cache
def _classes_at_place(place: str | None) -> list[Class]:
    """Return the classes with left-out rows: "one node", "across nodes", or both for None."""
    return [each for each in accuracy_classes(place=place) if each.unseen.rows]


def _join_classes(classes: Sequence[Class], inside: bool) -> Band:
    """Return one band over the left-out rows of several classes; `inside`: the size is within measured ones."""
    unseen = Accuracy.together(each.unseen for each in classes)
    names = (
        f"{classes[0].name}, {classes[0].dtype}" if len(classes) == 1 else _common_name([each.name for each in classes])
    )
    return Band(
        typical=unseen.median,
        worst=unseen.worst,
        rows=unseen.rows,
        source=names,
        measured=inside,
    )


def _common_name(names: Sequence[str]) -> str:
    """Return "chip, place" of class names, with "all chips" and "all" where they differ."""
    chips, places = ({name.split(", ")[part] for name in names} for part in (0, 1))
    return ", ".join(each.pop() if len(each) == 1 else other for each, other in ((chips, "all chips"), (places, "all")))


def step_band(cluster: Cluster, layout: Layout, parts: StepParts) -> StepBand:
    """Return the band of a step: of published steps, or of its communication if that is wider."""
    typical = worst = 0.0
    for operation, amount in parts.operations.items():
        if amount.wire_ns:
            band = operation_band(cluster, operation)
            typical += band.typical * amount.wire_ns / parts.step_ns
            worst += band.worst * amount.wire_ns / parts.step_ns
    published = class_band(cluster, layout.dtype)
    return replace(
        published,
        typical=max(published.typical, typical),
        covering=max(published.covering, typical),
        worst=max(published.worst, worst),
    )
