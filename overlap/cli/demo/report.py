"""What the demo found out, as figures and as text. Pure, except that rich draws."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
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
        spread_ns: By how much, in the median, the wall time of a step differs from the median step of its kind; of the
            kind where that is more.
    """

    accuracy: float
    tests: int
    digests: list[tuple[str, str]]
    without: Step
    overlapped: Step
    counted: int
    spread_ns: int

    @property
    def identical(self) -> bool:
        """Whether all weights are the same, bit by bit, on all ranks and in both trainings."""
        return len({digest for pair in self.digests for digest in pair}) == 1

    @property
    def speed_up(self) -> float:
        """How many times as fast a step is with overlap."""
        return self.without.wall_ns / self.overlapped.wall_ns

    @property
    def possible_ns(self) -> int:
        """What ideal overlap would save on the step without."""
        return self.without.wall_ns - self.without.ideal_wall_ns

    @property
    def saved_ns(self) -> int:
        """What overlap has saved."""
        return self.without.wall_ns - self.overlapped.wall_ns

    @property
    def share(self) -> float | None:
        """What was saved as part of what ideal overlap would save; None where the steps cannot say so.

        They cannot where they differ among themselves by as much as there is to save, and where more is saved than
        that: whatever else made the steps with overlap shorter may have made any part of the difference.
        """
        told = self.possible_ns > self.spread_ns and self.saved_ns <= self.possible_ns
        return self.saved_ns / self.possible_ns if told else None


def figures(run: Run) -> Figures:
    """Measure a finished run; the first step of each training only warms up, if there are others."""
    counted = range(min(1, run.steps - 1), run.steps)
    without = measured(run.timeline, counted)
    overlapped = measured(run.timeline, (run.steps + step for step in counted))
    return Figures(
        accuracy=run.outcome.right / run.tests,
        tests=run.tests,
        digests=run.outcome.digests,
        without=median(without),
        overlapped=median(overlapped),
        counted=len(counted),
        spread_ns=max(spread_ns(without), spread_ns(overlapped)),
    )


def median(steps: Sequence[Step]) -> Step:
    """Return the step with the median wall time; of two, the shorter."""
    return sorted(steps, key=lambda one: one.wall_ns)[(len(steps) - 1) // 2]


def spread_ns(steps: Sequence[Step]) -> int:
    """Return the median absolute deviation of the wall times: unlike most measures, a few slow steps do not raise it.

    Of two it is half their difference; of one it is 0, for nothing is known then.
    """
    walls_ns = [step.wall_ns for step in steps]
    middle_ns = statistics.median(walls_ns)
    return round(statistics.median(abs(wall_ns - middle_ns) for wall_ns in walls_ns))


def measured(timeline: Timeline, steps: Iterable[int]) -> list[Step]:
    """Measure steps."""
    return [_step(step, breakdowns(timeline, step=step)) for step in steps]


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
    before, after = found.without, found.overlapped
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
            textwrap.fill(f"possible gain      {_gain(found)}", 79, subsequent_indent=" " * 19),
            f"test accuracy      {found.accuracy:.1%} of {found.tests} images",
            f"identical weights  {'yes, bit by bit' if found.identical else 'NO'}; SHA-256 of all weights:",
            *(f"  rank {rank:<13}{a[:_SHOWN]}    {b[:_SHOWN]}" for rank, (a, b) in enumerate(found.digests)),
        ]
    )


def _gain(found: Figures) -> str:
    saved, possible, spread = map(format_ns, (found.saved_ns, found.possible_ns, found.spread_ns))
    if found.share is not None:
        return f"{found.share:.0%}: {saved} of the {possible} that ideal overlap saves"
    if found.possible_ns == 0:
        return "n/a: there is no communication to hide"
    if found.possible_ns <= found.spread_ns:
        return f"n/a: ideal overlap saves {possible} of {format_ns(found.without.wall_ns)}, steps differ by {spread}"
    return f"about all: {saved} of the {possible} that ideal overlap saves; steps differ by {spread}"


def drawings(run: Run, found: Figures, *, width: int, ascii: bool, color: bool) -> Iterator[Text]:
    """Draw the median step without overlap and the one with it."""
    from rich.text import Text

    ranks = range(min(DRAWN_RANKS, run.timeline.world_size))
    for title, step in (("without overlap", found.without), ("with overlap", found.overlapped)):
        picture = TimelineView(run.timeline, step=step.index, ranks=ranks).lines(width=width, ascii=ascii, color=color)
        picture[0] = [(f"\n{title}, ", ""), *picture[0]]
        for line in picture[: picture.index([])]:  # below the blank line is a table; the summary has one
            yield Text.assemble(*line, no_wrap=True, overflow="crop")
