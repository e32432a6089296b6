"""What a simulation found out: where the time of its median step went, read from its timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from topology import Cluster

from ...collectives.cost.parameters import measured
from ...timeline.metrics import Breakdown, breakdowns, median_step, windows_of
from ...timeline.spans import CollectiveInfo, Span, Timeline

__all__ = ["Busiest", "Shape", "StepSummary", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """What collectives have in common that cost the same.

    Attributes:
        op: Name of the collective.
        nbytes: The larger of input and result.
        dtype: Of the elements; may be empty.
        ranks: Size of the group.
    """

    op: str
    nbytes: int
    dtype: str
    ranks: int

    @classmethod
    def of(cls, info: CollectiveInfo) -> Shape:
        """Return the shape of a recorded operation."""
        return cls(op=info.op, nbytes=info.nbytes, dtype=info.dtype, ranks=len(info.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Busiest:
    """The shape whose operations took longest on a rank, added up.

    Attributes:
        shape: Which.
        algorithms: What they became.
        count: How many there were.
        transfer_ns: What they took once all ranks were there.
        wait_ns: What they waited before that for the last rank.
    """

    shape: Shape
    algorithms: tuple[str, ...]
    count: int
    transfer_ns: int
    wait_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One simulated run, measured at the longest rank of its median step.

    Attributes:
        world_size: Ranks.
        step: The median step; None if the program marks none: then it is the whole run.
        steps: How many there were.
        longest: Where the time went on the rank whose step is longest; of several the one with the most exposed
            communication, then with the most compute, then the first.
        busiest: Of the longest rank; None without communication.
        shapes: Everything that was communicated in the step, on any rank.
        extrapolated: Those outside published measurements.
        samples: That a step trains on, if the program says so.
    """

    world_size: int
    step: int | None
    steps: int
    longest: Breakdown
    busiest: Busiest | None
    shapes: tuple[Shape, ...]
    extrapolated: tuple[Shape, ...]
    samples: float | None

    @property
    def step_ns(self) -> int:
        """How long the step takes."""
        return self.longest.wall_ns

    @property
    def exposed_share(self) -> float:
        """Part of the step in which there is only communication, from 0 to 1."""
        return self.longest.exposed_ns / self.step_ns if self.step_ns else 0.0

    @property
    def samples_per_s(self) -> float | None:
        """Throughput, if the program says how many samples a step has."""
        return self.samples / (self.step_ns / 1e9) if self.samples is not None and self.step_ns else None


def measure(timeline: Timeline, cluster: Cluster, *, samples: float | None = None) -> StepSummary:
    """Read a timeline of virtual time.

    Args:
        timeline: Of one run.
        cluster: That it was simulated on.
        samples: That a step trains on, if known.

    Raises:
        UsageError: If the timeline is empty.
    """
    step = median_step(timeline)
    rows = breakdowns(timeline, step=step)
    longest = min(rows, key=lambda row: (-row.wall_ns, -row.exposed_ns, -row.compute_ns, row.rank))
    spans = list(_communicated(timeline, step))
    shapes = tuple(sorted({Shape.of(info) for span in spans if (info := span.info)}))
    return StepSummary(
        world_size=timeline.world_size,
        step=step,
        steps=len(timeline.steps()),
        longest=longest,
        busiest=_busiest(span.info for span in spans if span.rank == longest.rank),
        shapes=shapes,
        extrapolated=tuple(each for each in shapes if not _measured(cluster, each)),
        samples=samples,
    )


def _communicated(timeline: Timeline, step: int | None) -> Iterable[Span]:
    """Return the communication that began within the step of its rank."""
    comm = (span for span in timeline.spans if span.kind == "comm")
    if step is None:
        return comm
    windows = windows_of(timeline, step)
    return (s for s in comm if s.rank in windows and windows[s.rank][0] <= s.start_ns < windows[s.rank][1])


def _busiest(infos: Iterable[CollectiveInfo | None]) -> Busiest | None:
    by_shape: dict[Shape, list[CollectiveInfo]] = {}
    for info in infos:
        if info is not None:
            by_shape.setdefault(Shape.of(info), []).append(info)
    if not by_shape:
        return None
    shape, same = min(by_shape.items(), key=lambda item: (-_transfer_ns(item[1]), item[0]))
    return Busiest(
        shape=shape,
        algorithms=tuple(sorted({info.algorithm for info in same})),
        count=len(same),
        transfer_ns=_transfer_ns(same),
        wait_ns=sum(info.last_rank_wait_ns for info in same),
    )


def _transfer_ns(infos: Iterable[CollectiveInfo]) -> int:
    return sum(info.transfer_ns for info in infos)


def _measured(cluster: Cluster, shape: Shape) -> bool:
    return measured(cluster, shape.ranks, shape.op, shape.nbytes, shape.dtype)
