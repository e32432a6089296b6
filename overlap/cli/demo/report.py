"""Report of the demo: progress, figures, pictures of both programs, and the verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from rich.console import Console
from rich.text import Text

from ...timeline import Timeline, TimelineView, breakdowns
from ...units import format_ns, wrap_text
from .training import ALGORITHM, COMM_PER_COMPUTE, DemoComparison, Task

_SHOWN_DIGITS = 16  # digits of a digest, of 64: chance agreement of two is one in 2**64

ROWS = 2
"""Rows of each picture: two pictures, the figures and the verdict fit in 24 lines."""

_FOLDERS = re.compile(r"[^\s(]*/(?=[^/\s]+\.py:\d)")  # of places in the demo's own files, wherever these are

PROGRESS_LINES = 4  # lines of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step; each figure is that of the rank where it is largest.

    Waiting for other ranks counts as communication: ranks share the cores of this machine, and are late for that
    reason.
    """

    index: int
    wall_ns: int
    comm_ns: int
    overlapped_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MedianSteps:
    """The median steps of both trainings, by their wall times."""

    without: StepTimes  # Without overlap
    overlapped: StepTimes  # With it
    counted: int  # Number of steps behind each median


def median_steps(comparison: DemoComparison) -> MedianSteps:
    """Return the median steps; the first step of each training does not count, if there are others."""
    counted = range(min(1, comparison.steps - 1), comparison.steps)
    kinds = [step_times(comparison.timeline, (first + step for step in counted)) for first in (0, comparison.steps)]
    # of an even number of steps the shorter middle one: a step that can be drawn
    without, overlapped = (sorted(steps, key=lambda one: one.wall_ns)[(len(steps) - 1) // 2] for steps in kinds)
    return MedianSteps(without=without, overlapped=overlapped, counted=len(counted))


def step_times(timeline: Timeline, steps: Iterable[int]) -> list[StepTimes]:
    """Return the times of the steps of a timeline; each figure is the largest of any rank."""
    names = ("wall_ns", "comm_ns", "overlapped_ns")
    rows = {step: breakdowns(timeline, step=step) for step in steps}
    return [
        StepTimes(index=step, **{name: max(getattr(row, name) for row in rows[step]) for name in names})
        for step in rows
    ]


# -- text --------------------------------------------------------------------------------------------------------------


def introduction_text(task: Task, *, images: int, width: int) -> str:
    """Return the task in words, in lines of that width."""
    text = (
        f"{task.ranks} ranks learn {images} images of handwritten digits with {task.weights:,} weights. "
        f"Links: {task.bandwidth_bytes_per_s / 1e6:.4g} MB/s each way between any two ranks (chosen to make "
        f"communication take {COMM_PER_COMPUTE:g} of compute here). "
        f"All-reduce: {ALGORITHM}, mean, float32. "
        f"Two equal models take turns for {task.steps} steps each: the first communicates after its backward pass, "
        "the second under it."
    )
    return "\n".join(wrap_text(text, width))


def summary_text(comparison: DemoComparison, steps: MedianSteps) -> str:
    """Return the figures as lines of at most 79 characters."""
    before, after = steps.without, steps.overlapped
    times = [
        (f"step (median of {steps.counted})", before.wall_ns, after.wall_ns),
        ("communication", before.comm_ns, after.comm_ns),
        ("  hidden under compute", before.overlapped_ns, after.overlapped_ns),
    ]
    return "\n".join(
        [
            f"{'':28}{'without overlap':>16}{'with overlap':>16}",
            *(f"{name:28}{format_ns(first):>16}{format_ns(second):>16}" for name, first, second in times),
            *_weights_lines(comparison),
            f"speed-up           {before.wall_ns / after.wall_ns:.2f}x; "
            f"test accuracy {comparison.right / comparison.tests:.1%} of {comparison.tests} images",
        ]
    )


def _weights_lines(comparison: DemoComparison) -> Iterator[str]:
    """Yield lines on whether all ranks have equal weights after both trainings, with digests if they have not."""
    if comparison.identical:
        digest = comparison.digests[0][0][:_SHOWN_DIGITS]
        yield f"identical weights  yes, bit by bit on all {len(comparison.digests)} ranks; SHA-256 {digest}"
        return
    yield "identical weights  NO; SHA-256 of all weights:"
    for rank, (a, b) in enumerate(comparison.digests):
        yield f"  rank {rank:<13}{a[:_SHOWN_DIGITS]}    {b[:_SHOWN_DIGITS]}"


# -- pictures ----------------------------------------------------------------------------------------------------------


def draw_median_steps(
    comparison: DemoComparison, steps: MedianSteps, *, width: int, ascii: bool, color: bool
) -> Iterator[Text]:
    """Draw the median step without overlap above the one with it, with one ruler and one legend for both.

    Args:
        comparison: Both trainings.
        steps: The median steps.
        width: Columns of the picture.
        ascii: Whether to draw with plain characters.
        color: Whether to draw in colours.
    """
    views = {
        f"{title}, step {step.index}": TimelineView(comparison.timeline, step=step.index, rows=ROWS)
        for title, step in (("without overlap", steps.without), ("with overlap", steps.overlapped))
    }
    ranks, length_ns = comparison.timeline.world_size, max(view.length_ns for view in views.values())
    for number, (title, view) in enumerate(views.items(), 1):
        lines = view.lines(
            width=width, ascii=ascii, color=color, length_ns=length_ns, label=len(f"{ranks} like {ranks}")
        )
        above = lines[: lines.index([])]  # below the blank line is a table of figures, which `summary_text` gives
        last = max(at for at, line in enumerate(above) if _is_lane(line))
        below = above[last + 1 :] if number == len(views) else []
        heading = f"{title}: {ranks} ranks; most waited for first, alike in one row"  # as `timeline` folds rows
        yield Text(heading, style="bold" if color else "", no_wrap=True, overflow="crop")
        for line in [*filter(_is_lane, above), *below]:
            yield Text.assemble(*line, no_wrap=True, overflow="crop")


def _is_lane(line: list[tuple[str, str]]) -> bool:
    """Whether a line of a picture shows ranks: it ends with the border of the lane."""
    return line[-1][0] in ("│", "|")


def verdict_text(view: TimelineView, *, width: int) -> str:
    """Return the losses of a picture's sentence in lines of that width; places are without their folders."""
    losses = _FOLDERS.sub("", view.sentence.partition("; try: ")[0])
    return "\n".join(wrap_text(f"with overlap, {losses}", width))


# -- progress ----------------------------------------------------------------------------------------------------------


def make_step_printer(console: Console, *, steps: int) -> Callable[[float], None]:
    """Return a function that counts a step, and prints a line with its loss for `PROGRESS_LINES` of all steps.

    Only that function prints, between steps, so that it takes no time from the measured steps.
    """
    counted = count(1)

    def show_step(loss: float) -> None:
        done = next(counted)
        # the steps are cut into `PROGRESS_LINES` parts: a line for the step that completes the next one
        if done * PROGRESS_LINES // steps > (done - 1) * PROGRESS_LINES // steps:
            console.print(f"step {done} of {steps}, loss {loss:.3f}", soft_wrap=True)

    return show_step
