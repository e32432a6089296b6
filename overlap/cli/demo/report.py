"""What the demo found out, as figures and as text. Pure, except that rich draws."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.text import Text

from ...timeline import Timeline, TimelineView, breakdowns
from ...units import format_ns
from .pictures import ROWS, pictures, verdict
from .training import ALGORITHM, COMM_PER_COMPUTE, Comparison, Task

_SHOWN = 16  # of 64: chance agreement of two digests is one in 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step, measured by its longest rank in each respect.

    Ideal is if the shorter of compute and communication hid behind the longer. Waiting for other ranks counts as
    communication: these share the cores of a machine, and come late for that reason.
    """

    index: int
    wall_ns: int
    ideal_wall_ns: int
    compute_ns: int
    comm_ns: int
    overlapped_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What overlap saves."""

    without: StepTimes  # The median step without overlap
    overlapped: StepTimes  # The median step with it
    counted: int  # Steps of each that the medians are of
    # By how much, in the median, the wall time of a step differs from the median step of its kind; of the kind where
    # that is more.
    spread_ns: int

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

    def __str__(self) -> str:
        """Say it in words."""
        saved, possible, spread = map(format_ns, (self.saved_ns, self.possible_ns, self.spread_ns))
        if self.share is not None:
            return f"{self.share:.0%}: {saved} of the {possible} that ideal overlap saves"
        if self.possible_ns == 0:
            return "n/a: there is no communication to hide"
        if self.possible_ns <= self.spread_ns:
            return f"n/a: ideal overlap saves {possible}, steps differ by {spread}"
        return f"about all: {saved} of {possible}; steps differ by {spread}"


def gain(found: Comparison) -> Gain:
    """Measure a comparison; the first step of each training only warms up, if there are others."""
    counted = range(min(1, found.steps - 1), found.steps)
    kinds = [measured(found.timeline, (first + step for step in counted)) for first in (0, found.steps)]
    without, overlapped = (sorted(steps, key=lambda one: one.wall_ns)[(len(steps) - 1) // 2] for steps in kinds)
    return Gain(without=without, overlapped=overlapped, counted=len(counted), spread_ns=max(map(spread_ns, kinds)))


def measured(timeline: Timeline, steps: Iterable[int]) -> list[StepTimes]:
    """Measure steps."""
    names = ("wall_ns", "compute_ns", "comm_ns", "overlapped_ns")
    rows = {step: breakdowns(timeline, step=step) for step in steps}
    return [
        StepTimes(
            index=step,
            ideal_wall_ns=max(max(row.compute_ns, row.comm_ns) + row.idle_ns for row in rows[step]),
            **{name: max(getattr(row, name) for row in rows[step]) for name in names},
        )
        for step in rows
    ]


def spread_ns(steps: list[StepTimes]) -> int:
    """Return the median absolute deviation of the wall times: unlike most measures, a few slow steps do not raise it.

    Of two it is half their difference; of one it is 0, for nothing is known then.
    """
    walls_ns = [step.wall_ns for step in steps]
    middle_ns = statistics.median(walls_ns)
    return round(statistics.median(abs(wall_ns - middle_ns) for wall_ns in walls_ns))


# -- text --------------------------------------------------------------------------------------------------------------


def introduction(task: Task, *, images: int, chosen: bool) -> str:
    """Say what is going to happen, in lines of at most 79 characters."""
    why = f" (chosen to make communication take {COMM_PER_COMPUTE:g} of compute here)" if chosen else ""
    among, between = f"{task.ranks} ranks", "any two ranks"
    if task.nodes > 1:
        among += f" on {task.nodes} nodes, which are processes of this machine,"
        between += " of different nodes"
    said = (
        f"{among} learn {images} images of handwritten digits with {task.weights:,} weights. "
        f"Links: {task.bandwidth_bytes_per_s / 1e6:.4g} MB/s each way between {between}{why}. "
        f"All-reduce: {ALGORITHM}, mean, float32. "
        f"Two equal models take turns for {task.steps} steps each: the first communicates after its backward pass, "
        "the second under it."
    )
    return textwrap.fill(said, 79)


def summary(found: Comparison, of: Gain) -> str:
    """Write the figures as lines of at most 79 characters."""
    before, after = of.without, of.overlapped
    times = [
        (f"step (median of {of.counted})", before.wall_ns, after.wall_ns),
        ("communication", before.comm_ns, after.comm_ns),
        ("  hidden under compute", before.overlapped_ns, after.overlapped_ns),
    ]
    return "\n".join(
        [
            f"{'':28}{'without overlap':>16}{'with overlap':>16}",
            *(f"{name:28}{format_ns(first):>16}{format_ns(second):>16}" for name, first, second in times),
            *_weights(found),
            f"speed-up           {before.wall_ns / after.wall_ns:.2f}x; "
            f"test accuracy {found.right / found.tests:.1%} of {found.tests} images",
            f"possible gain      {of}",
        ]
    )


def _weights(found: Comparison) -> Iterator[str]:
    """Say whether all ranks have the same weights after both trainings; of which they differ if they do."""
    if found.identical:
        digest = found.digests[0][0][:_SHOWN]
        yield f"identical weights  yes, bit by bit on all {len(found.digests)} ranks; SHA-256 {digest}"
        return
    yield "identical weights  NO; SHA-256 of all weights:"
    for rank, (a, b) in enumerate(found.digests):
        yield f"  rank {rank:<13}{a[:_SHOWN]}    {b[:_SHOWN]}"


def drawings(found: Comparison, of: Gain, *, width: int, ascii: bool, color: bool) -> Iterator[Text]:
    """Draw the median step without overlap and the one with it."""
    views = {
        f"{title}, step {step.index}": TimelineView(found.timeline, step=step.index, rows=ROWS)
        for title, step in (("without overlap", of.without), ("with overlap", of.overlapped))
    }
    ranks = found.timeline.world_size
    yield from pictures(*views.items(), ranks=ranks, width=width, ascii=ascii, color=color)


def judged(found: Comparison, of: Gain, *, width: int) -> str:
    """Return the verdict on the median step with overlap."""
    return verdict(TimelineView(found.timeline, step=of.overlapped.index), width=width)
