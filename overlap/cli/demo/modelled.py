"""The demos on modelled instances: both programs in virtual time, what a step takes in each, and how that is told."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.text import Text

from ... import Rank, Virtual, run
from ...requested import overriding
from ...timeline import Timeline, TimelineView, breakdowns
from ...units import format_ns
from .pictures import ROWS, pictures, verdict
from .strategies import STRATEGIES, Strategy

STEPS = 3
"""That are looked at: one before them fills the pipes, and one after them is still under way when they end."""

EFFICIENCY = 0.4  # of the peak of the matrix engines, as large models reach it


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One program's steps in the middle of its run, when each is like the one before."""

    # What all ranks did from the first compute of the first of them to that of the step after the last.
    timeline: Timeline
    wall_ns: int  # That time for one step; `compute_ns`, `comm_ns` and `overlapped_ns` are the first rank's
    compute_ns: int
    comm_ns: int
    overlapped_ns: int


def simulated(strategy: Strategy, *, overlapped: bool) -> Run:
    """Run one of the two programs."""
    seen: list[Timeline] = []

    async def main(rank: Rank) -> None:
        await strategy.train(rank, STEPS + 2, overlapped)

    with overriding(watcher=seen.append):
        run(main, cluster=strategy.cluster, clock=Virtual(efficiency=EFFICIENCY, shapes_only=not strategy.has_data))
    return _middle(seen[0])


def _middle(timeline: Timeline) -> Run:
    first_ns, last_ns = (_begin_ns(timeline, step) for step in (1, STEPS + 1))
    spans = [
        replace(span, start_ns=max(span.start_ns, first_ns), end_ns=min(span.end_ns, last_ns))
        for span in timeline.spans
        if span.kind != "step" and span.start_ns < last_ns and span.end_ns > first_ns
    ]
    middle = replace(timeline, spans=spans)
    row = next(row for row in breakdowns(middle) if row.rank == 0)
    each = {name: getattr(row, name) // STEPS for name in ("compute_ns", "comm_ns", "overlapped_ns")}
    return Run(timeline=middle, wall_ns=(last_ns - first_ns) // STEPS, **each)


def _begin_ns(timeline: Timeline, step: int) -> int:
    return min(s.start_ns for s in timeline.spans if (s.rank, s.kind, s.step) == (0, "compute", step) and s.duration_ns)


# -- text --------------------------------------------------------------------------------------------------------------


def listing() -> str:
    """Return a line for each demo."""
    digits = "real time, real bytes: a classifier of handwritten digits learns over paced links (the default)"
    rows = {"digits": digits} | {name: strategy.title for name, strategy in STRATEGIES.items()}
    wide = max(map(len, rows)) + 2
    return "\n".join(
        textwrap.fill(f"{name:{wide}}{title}", 79, subsequent_indent=" " * wide) for name, title in rows.items()
    )


def introduction(strategy: Strategy, ranks: int) -> str:
    """Say what is going to happen, in lines of at most 79 characters."""
    said = (
        f"{strategy.title[0].upper()}{strategy.title[1:]}. {ranks} ranks of {strategy.cluster}, in virtual time; "
        f"computes reach {EFFICIENCY:.0%} of the peak. The first program {strategy.without}; the second "
        f"{strategy.overlapped}."
    )
    return textwrap.fill(said, 79)


def drawings(before: Run, after: Run, *, width: int, ascii: bool, color: bool) -> Iterator[Text]:
    """Draw the steps of both."""
    views = {
        f"{title}, {STEPS} steps": TimelineView(one.timeline, rows=ROWS)
        for title, one in (("without overlap", before), ("with overlap", after))
    }
    ranks = after.timeline.world_size
    yield from pictures(*views.items(), ranks=ranks, width=width, ascii=ascii, color=color)


def figures(before: Run, after: Run) -> str:
    """Write what a step takes in both."""
    rows = (
        ("step", before.wall_ns, after.wall_ns),
        ("  compute", before.compute_ns, after.compute_ns),
        ("  communication", before.comm_ns, after.comm_ns),
        ("    hidden under compute", before.overlapped_ns, after.overlapped_ns),
    )
    gain = (
        f"a step takes {format_ns(after.wall_ns)} instead of {format_ns(before.wall_ns)}: "
        f"{before.wall_ns / after.wall_ns:.2f}x as fast; {after.compute_ns / after.wall_ns:.0%} of it is compute"
    )
    table = [f"{name:28}{format_ns(first):>16}{format_ns(second):>16}" for name, first, second in rows]
    return "\n".join([f"{'of rank 0':28}{'without overlap':>16}{'with overlap':>16}", *table, gain])


def judged(after: Run, *, width: int) -> str:
    """Write the verdict on the steps with overlap, which is last."""
    return verdict(TimelineView(after.timeline), what=f"{STEPS} steps", width=width)
