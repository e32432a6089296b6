"""Pages of a timeline on a console: pictures and tables; and the picture as a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from io import StringIO

from rich.console import Console as RichConsole
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from ...timeline.draw.view import MIN_WIDTH, TimelineView
from ...timeline.measure.critical_path import critical_path
from ...timeline.measure.operations import sum_operations_by_line
from ...timeline.spans import Timeline
from ...units import wrap_text
from ..console import Console
from ..output import write_file
from .tables import critical_path_table, operations_table


def print_pages(
    args: argparse.Namespace, timeline: Timeline, step: int | None, ranks: Sequence[int] | None, view: TimelineView
) -> None:
    """Print the wires and the picture, or the tables for which the options ask and the sentence of the picture.

    Args:
        args: Options of the command: `width`, `step`, `ops` and `critical_path`.
        timeline: The timeline.
        step: The step; None: the whole run.
        ranks: The ranks to show; None: all.
        view: The picture.
    """
    console = Console(width=args.width, highlight=False, markup=False, emoji=False)
    console.width = max(console.width, MIN_WIDTH)  # on a terminal that is too narrow, lines wrap and nothing is cut
    lines: list[str] = []
    if args.step is None and step is not None:
        shown = f"showing step {step}, the median of {len(timeline.steps())} by wall time (--step N|all)"
        lines += wrap_text(shown, console.width)
    if args.ops:
        rows = sum_operations_by_line(timeline, step=step, ranks=ranks)
        lines += [*operations_table(rows, ranks=view.counted, width=console.width), ""]
    if args.critical_path:
        path = critical_path(timeline, step=step, ranks=ranks)
        lines += [*critical_path_table(path, width=console.width), ""]
    has_tables = bool(args.ops or args.critical_path)
    lines += wrap_text(view.sentence, console.width) if has_tables else _connection_lines(timeline, ranks)
    for line in lines:
        console.print(line, soft_wrap=True)
    if not has_tables:
        console.print(view)


def _connection_lines(timeline: Timeline, ranks: Sequence[int] | None) -> list[str]:
    """Return a line for each connection that was lost or came back."""
    return [
        f"wires at {(span.start_ns - timeline.spans[0].start_ns) / 1e9:.3f} s, rank {span.rank}: {span.name}"
        for span in timeline.chosen(timeline.columns.is_kind("wires"))
        if ranks is None or span.rank in ranks
    ]


_SVG_COLUMNS = 140
"""Columns of a written picture: an axis of some 120 cells, of which each shows eighths."""


def write_svg(view: TimelineView, path: str) -> bool:
    """Write the picture as SVG, and return False if it could not be written."""
    recorder = RichConsole(file=StringIO(), record=True, width=_SVG_COLUMNS, color_system="truecolor")
    recorder.print(view)
    return write_file(recorder.export_svg(title=view.sentence, theme=DEFAULT_TERMINAL_THEME), path, option="--output")
