"""Parts of a simulated step's time, by dimension and by operation; sums that can be extrapolated. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from ..timeline.measure.critical_path import critical_path
from ..timeline.measure.intervals import Merged, intersect, length, merge, subtract
from ..timeline.measure.metrics import Coverage, coverage
from ..timeline.span import Span
from ..timeline.spans import Timeline
from .program import DIMENSIONS

MESSAGE = "send/recv"
"""Name of point-to-point operations in a timeline."""


class StepOperation(NamedTuple):
    """Key of collectives, or messages, of one shape on one group."""

    dimension: str  # Axis of parallelism
    op: str  # Name of the collective, or `MESSAGE`
    nbytes: int  # The larger of input and result
    dtype: str  # Dtype of the elements
    # World ranks of the group; of messages the senders and receivers among the simulated ranks.
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Time of one operation on a rank, averaged over the simulated ranks, in nanoseconds."""

    count: float = 0.0  # Number of operations
    busy_ns: float = 0.0  # Time in which bytes moved, added up over operations
    wire_ns: float = 0.0  # Part of the exposed time in which bytes moved
    waiting_ns: float = 0.0  # Part of the exposed time in which it waited for its last rank

    @property
    def exposed_ns(self) -> float:
        """Exposed time, on wires and waiting."""
        return self.wire_ns + self.waiting_ns

    def plus(self, other: Amount, times: float = 1.0) -> Amount:
        """Return the sum of this amount and `times` another."""
        return Amount(
            count=self.count + times * other.count,
            busy_ns=self.busy_ns + times * other.busy_ns,
            wire_ns=self.wire_ns + times * other.wire_ns,
            waiting_ns=self.waiting_ns + times * other.waiting_ns,
        )


Path: TypeAlias = tuple[str, str]
"""Link of the critical path: (kind of work, its name)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A step: `step_ns` = `compute_ns` + exposed time of operations + `idle_ns`, on average over ranks."""

    step_ns: float  # From its beginning to the end of the last rank
    compute_ns: float  # Time in which a rank computed
    overlapped_ns: float  # Part of `compute_ns` in which bytes of the rank's operations moved
    idle_ns: float  # Time in which a rank did nothing, whether or not an operation was queued
    ranks: tuple[int, ...]  # Ranks that were simulated
    operations: Mapping[StepOperation, Amount]  # Bytes of each operation, and its exposed time
    path: Mapping[Path, float]  # Nanoseconds of the critical path by link

    @classmethod
    def of(cls, timeline: Timeline) -> StepParts:
        """Return the parts of a timeline of one step."""
        covers, overlapped_ns = coverage(timeline), 0.0
        amounts: dict[StepOperation, Amount] = {}
        for cover, spans in zip(covers, timeline.by_rank().values(), strict=True):
            comm = [span for span in spans if span.kind == "comm"]
            moving = merge([_transfer_interval(span) for span in comm])
            overlapped_ns += length(subtract(moving, cover.exposed)) / len(covers)
            for operation, amount in _split_exposed_time(cover, comm).items():
                amounts[operation] = amounts.get(operation, Amount()).plus(amount, 1 / len(covers))
        rows = [cover.breakdown() for cover in covers]
        path: dict[Path, float] = {}
        for link in critical_path(timeline):
            key = (link.doing, link.name)
            path[key] = path.get(key, 0.0) + link.duration_ns
        return cls(
            step_ns=float(max(row.wall_ns for row in rows)),
            compute_ns=sum(row.compute_ns for row in rows) / len(rows),
            overlapped_ns=overlapped_ns,
            idle_ns=sum(row.idle_ns + row.queued_ns for row in rows) / len(rows),
            ranks=tuple(row.rank for row in rows),
            operations=amounts,
            path=path,
        )

    def extrapolate(self, longer: StepParts, times: int) -> StepParts:
        """Return `longer` plus `times` the difference between `longer` and these parts."""

        def extrapolated(a: float, b: float) -> float:
            """Return `b` plus `times` the difference between it and `a`."""
            return b + times * (b - a)

        operations = {
            operation: amount.plus(amount, times).plus(self.operations.get(operation, Amount()), -times)
            for operation, amount in longer.operations.items()
        }
        return StepParts(
            step_ns=extrapolated(self.step_ns, longer.step_ns),
            compute_ns=extrapolated(self.compute_ns, longer.compute_ns),
            overlapped_ns=extrapolated(self.overlapped_ns, longer.overlapped_ns),
            idle_ns=extrapolated(self.idle_ns, longer.idle_ns),
            ranks=self.ranks,
            operations=operations,
            path={what: max(0.0, extrapolated(self.path.get(what, 0.0), ns)) for what, ns in longer.path.items()},
        )

    def unfold(self, inside: Sequence[tuple[StepParts, float]], named: str) -> StepParts:
        """Return the parts with each compute of a folded step replaced by the parts of that step.

        Args:
            inside: Steps, and how many of each a rank has on average.
            named: The first word of the names of those computes.
        """
        operations, folded_ns = dict(self.operations), 0.0
        compute_ns, overlapped_ns, idle_ns = self.compute_ns, self.overlapped_ns, self.idle_ns
        inside_path: dict[Path, float] = {}
        for parts, times in inside:
            folded_ns += times * parts.step_ns
            compute_ns += times * (parts.compute_ns - parts.step_ns)
            overlapped_ns += times * parts.overlapped_ns
            idle_ns += times * parts.idle_ns
            for operation, amount in parts.operations.items():
                operations[operation] = operations.get(operation, Amount()).plus(amount, times)
            for what, ns in parts.path.items():
                inside_path[what] = inside_path.get(what, 0.0) + times * ns
        path = {what: ns for what, ns in self.path.items() if not what[1].startswith(named)}
        share = (sum(self.path.values()) - sum(path.values())) / folded_ns if folded_ns else 0.0
        for what, ns in inside_path.items():
            path[what] = path.get(what, 0.0) + share * ns
        return replace(
            self,
            compute_ns=compute_ns,
            overlapped_ns=overlapped_ns,
            idle_ns=idle_ns,
            operations={operation: amount for operation, amount in operations.items() if amount.count > 1e-9},
            path=path,
        )

    def by_dimension(self) -> dict[str, Amount]:
        """Return the amounts of each dimension that occurs, in the order of `DIMENSIONS`."""
        amounts: dict[str, Amount] = {}
        for operation, amount in self.operations.items():
            amounts[operation.dimension] = amounts.get(operation.dimension, Amount()).plus(amount)
        return {each: amounts[each] for each in DIMENSIONS if each in amounts}

    @property
    def wire_ns(self) -> float:
        """Time of the step in which bytes moved and nothing was computed."""
        return sum(amount.wire_ns for amount in self.operations.values())


def _split_exposed_time(cover: Coverage, spans: list[Span]) -> dict[StepOperation, Amount]:
    """Assign each exposed instant to one operation: first to those that move bytes, in the order of dimensions."""
    spans_by: dict[StepOperation, list[Span]] = {}
    for span in spans:
        spans_by.setdefault(_operation_key(span), []).append(span)
    ordered = sorted(spans_by, key=lambda operation: (DIMENSIONS.index(operation.dimension), operation))
    left, wire = cover.exposed, {}
    for operation in ordered:
        wire[operation], left = _claim_time(left, [_transfer_interval(span) for span in spans_by[operation]])
    amounts: dict[StepOperation, Amount] = {}
    for operation in ordered:
        waited, left = _claim_time(left, [(span.start_ns, span.end_ns) for span in spans_by[operation]])
        busy = sum(end - start for start, end in map(_transfer_interval, spans_by[operation]))
        amounts[operation] = Amount(
            count=len(spans_by[operation]), busy_ns=busy, wire_ns=wire[operation], waiting_ns=waited
        )
    return amounts


def _claim_time(left: Merged, intervals: list[tuple[int, int]]) -> tuple[int, Merged]:
    """Return the nanoseconds of `left` that lie in intervals, and the rest of `left`."""
    claimed = intersect(left, merge(intervals))
    return length(claimed), subtract(left, claimed)


def _transfer_interval(span: Span) -> tuple[int, int]:
    """Return the interval in which the bytes of an operation moved, in nanoseconds."""
    return span.moved_ns, span.end_ns


def _operation_key(span: Span) -> StepOperation:
    """Return the key that a span shares with operations of the same shape."""
    info = span.info
    assert info is not None
    return StepOperation(span.lane, info.op, info.nbytes, info.dtype, info.ranks)
