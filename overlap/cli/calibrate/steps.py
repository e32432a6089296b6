"""`overlap calibrate --published steps`: predictions of training steps beside published ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import median

from ...errors import UsageError
from ...planning.validation import StepComparison, compare_steps, published_steps, record
from ...units import columns, format_s, wrapped
from ..output import print_result


def show_steps(args: argparse.Namespace) -> int:
    """Print the comparison, and return the exit code.

    Raises:
        UsageError: If nothing is published of the machine.
    """
    rows = [row for row in published_steps() if args.machine in (None, row.cluster.machine.name)]
    if not rows:
        known = sorted({row.cluster.machine.name for row in published_steps()})
        raise UsageError(f"no step is published of {args.machine!r}; known are {', '.join(known)}")
    judged = compare_steps(rows)
    if args.record:
        print(f"wrote {record(judged).name}")
    print_result(args, lambda: {"steps": [_json_step(row) for row in judged]}, lambda: _page_lines(judged))
    return 0


def _page_lines(judged: Sequence[StepComparison]) -> Iterator[str]:
    """Yield the page: a table of steps, their notes, and a table of errors by class."""
    heads = ("published step", "class", "measured", "predicted", "error", "left out", "fits")
    yield from columns(heads, [_step_cells(row) for row in judged], width=120, words=[0, 1])
    yield ""
    for row in judged:
        if row.published.noted:
            yield from wrapped(f"{row.published.id}: {row.published.noted}", rest="  ")
    yield ""
    classes = {
        of: [row for row in judged if row.published.step_class == of]
        for of in dict.fromkeys(row.published.step_class for row in judged)
    }
    totals = ("class", "rows", "median", "worst", "left out: median", "worst")
    yield from columns(
        totals, [_class_cells(*one) for one in (*classes.items(), ("all", judged))], width=120, words=[0]
    )
    yield ""
    yield from wrapped("left out: each step predicted with the share `sustained` fitted to all others.", rest="  ")


def _step_cells(row: StepComparison) -> tuple[str, ...]:
    """Return the cells of a training step: its times, its errors, and whether it fits into memory."""
    fits = {True: "yes", False: "NO", None: "unknown"}[row.fits]
    measured, predicted = format_s(row.published.measured_s), format_s(row.predicted_s)
    return (
        row.published.id,
        row.published.step_class,
        measured,
        predicted,
        f"{row.error:+.1%}",
        f"{row.unseen:+.1%}",
        fits,
    )


def _class_cells(of: str, rows: Sequence[StepComparison]) -> tuple[str, ...]:
    """Return the cells of a class of steps: number of rows, and median and worst errors, seen and left out."""
    errors = [abs(row.error) for row in rows], [abs(row.unseen) for row in rows]
    return of, str(len(rows)), *(f"{figure(sizes):.1%}" for sizes in errors for figure in (median, max))


def _json_step(row: StepComparison) -> dict[str, object]:
    """Return a step for JSON: seconds, and errors as shares of the measured time."""
    return {
        "id": row.published.id,
        "source": row.published.source,
        "class": row.published.step_class,
        "noted": row.published.noted,
        "measured_s": row.published.measured_s,
        "predicted_s": row.predicted_s,
        "left_out_s": row.left_out_s,
        "error": row.error,
        "left_out_error": row.unseen,
        "fits": row.fits,
    }
