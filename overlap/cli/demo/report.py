"""What the demo found out, as figures and as text. Pure, except that rich draws."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...timeline import Breakdown, Timeline, TimelineView, breakdowns
from ...units import format_ns
from .training import ALGORITHM, COMM_PER_COMPUTE, Lesson, Run, Wires

if TYPE_CHECKING:
    from rich.text import Text

DRAWN_RANKS = 4  # all ranks of a step look alike; the trace file has them all
_SHOWN = 16  # of 64: chance agreement of two digests is one in 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, measured by its longest rank in each respect.

    Attributes:
        index: In the timeline.
        wall_ns: From the common start to the end.
        ideal_wall_ns: The same if the shorter of compute and communication hid entirely behind the longer.
        compute_ns: Computing.
        comm_ns: Communicating, from the start of the first all-reduce to the end of the last one.
        overlapped_ns: Both.
    """

    index: int
    wall_ns: int
    ideal_wall_ns: int
    compute_ns: int
    comm_ns: int
    overlapped_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the demo shows.

    Attributes:
        accuracy: Part of the test images that the model knows, from 0 to 1.
        tests: How many test images there are.
        digests: For each rank, SHA-256 of all weights, trained without and with overlap.
        without: The median step without overlap.
        overlapped: The median step with overlap.
        counted: Steps of each that the medians are of.
    """

    accuracy: float
    tests: int
    digests: list[tuple[str, str]]
    without: Step
    overlapped: Step
    counted: int

    @property
    def identical(self) -> bool:
        """Whether all weights are the same, bit by bit, on all ranks and in both trainings."""
        return len({digest for pair in self.digests for digest in pair}) == 1

    @property
    def speed_up(self) -> float:
        """How many times as fast a step is with overlap."""
        return self.without.wall_ns / self.overlapped.wall_ns

    @property
    def share(self) -> float | None:
        """What was saved as part of what ideal overlap would save on the step without; None if there is nothing."""
        possible_ns = self.without.wall_ns - self.without.ideal_wall_ns
        return (self.without.wall_ns - self.overlapped.wall_ns) / possible_ns if possible_ns else None


def figures(run: Run) -> Figures:
    """Measure a finished run; the first step of each training only warms up, if there are others."""
    counted = range(min(1, run.steps - 1), run.steps)
    return Figures(
        accuracy=run.outcome.right / run.tests,
        tests=run.tests,
        digests=run.outcome.digests,
        without=median(run.timeline, counted),
        overlapped=median(run.timeline, (run.steps + step for step in counted)),
        counted=len(counted),
    )


def median(timeline: Timeline, steps: Iterable[int]) -> Step:
    """Return the step with the median wall time; of two, the shorter."""
    measured = sorted((_step(step, breakdowns(timeline, step=step)) for step in steps), key=lambda one: one.wall_ns)
    return measured[(len(measured) - 1) // 2]


def _step(index: int, rows: list[Breakdown]) -> Step:
    return Step(
        index=index,
        wall_ns=max(row.wall_ns for row in rows),
        ideal_wall_ns=max(row.ideal_wall_ns for row in rows),
        compute_ns=max(row.compute_ns for row in rows),
        comm_ns=max(row.comm_ns for row in rows),
        overlapped_ns=max(row.overlapped_ns for row in rows),
    )


# -- text --------------------------------------------------------------------------------------------------------------


def introduction(lesson: Lesson, wires: Wires, *, chosen: bool) -> str:
    """Say what is going to happen, in lines of at most 79 characters."""
    why = f" (chosen to make communication take {COMM_PER_COMPUTE:g} of compute here)" if chosen else ""
    among, between = f"{wires.ranks} ranks", "any two ranks"
    if wires.nodes > 1:
        among += f" on {wires.nodes} nodes, which are processes joined by sockets,"
        between += " of different nodes"
    said = (
        f"{among} learn {len(lesson.labels)} images of handwritten digits with {lesson.weights:,} weights. "
        f"Links: {wires.bandwidth_bytes_per_s / 1e6:.4g} MB/s each way between {between}{why}. "
        f"All-reduce: {ALGORITHM}, mean, float32. "
        f"Two equal models take turns for {lesson.steps} steps each: the first communicates after its backward pass, "
        "the second under it."
    )
    return textwrap.fill(said, 79)


def summary(found: Figures) -> str:
    """Write the figures as lines of at most 79 characters."""
    share = "n/a" if found.share is None else f"{found.share:.0%}"
    before, after = found.without, found.overlapped
    saved, possible = map(format_ns, (before.wall_ns - after.wall_ns, before.wall_ns - before.ideal_wall_ns))
    times = [
        (f"step (median of {found.counted})", before.wall_ns, after.wall_ns),
        ("  compute", before.compute_ns, after.compute_ns),
        ("  communication", before.comm_ns, after.comm_ns),
        ("    hidden under compute", before.overlapped_ns, after.overlapped_ns),
    ]
    return "\n".join(
        [
            f"{'':28}{'without overlap':>16}{'with overlap':>16}",
            *(f"{name:28}{format_ns(first):>16}{format_ns(second):>16}" for name, first, second in times),
            "",
            f"speed-up           {found.speed_up:.2f}x",
            f"possible gain      {share}: {saved} of the {possible} that ideal overlap saves",
            f"test accuracy      {found.accuracy:.1%} of {found.tests} images",
            f"identical weights  {'yes, bit by bit' if found.identical else 'NO'}; SHA-256 of all weights:",
            *(f"  rank {rank:<13}{a[:_SHOWN]}    {b[:_SHOWN]}" for rank, (a, b) in enumerate(found.digests)),
        ]
    )


def drawings(run: Run, found: Figures, *, width: int, ascii: bool, color: bool) -> Iterator[Text]:
    """Draw the median step without overlap and the one with it."""
    from rich.text import Text

    ranks = range(min(DRAWN_RANKS, run.timeline.world_size))
    for title, step in (("without overlap", found.without), ("with overlap", found.overlapped)):
        picture = TimelineView(run.timeline, step=step.index, ranks=ranks).lines(width=width, ascii=ascii, color=color)
        picture[0] = [(f"\n{title}, ", ""), *picture[0]]
        for line in picture[: picture.index([])]:  # below the blank line is a table; the summary has one
            yield Text.assemble(*line, no_wrap=True, overflow="crop")
