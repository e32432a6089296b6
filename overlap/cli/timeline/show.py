"""Pages of a timeline on a console: pictures and tables; and the picture as a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from io import StringIO

from rich.console import Console as RichConsole
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from ...timeline.draw.view import MIN_WIDTH, TimelineView
from ...timeline.measure.critical_path import critical_path
from ...timeline.measure.operations import operations
from ...timeline.span import Span
from ...timeline.spans import Timeline
from ...units import wrapped
from ..console import Console
from ..output import write_file
from .tables import (
    critical_path_table,
    operations_table,
)


def console(args: argparse.Namespace) -> Console:
    """Return the console of the command; on a terminal that is too narrow, lines wrap and nothing is cut."""
    on = Console(width=args.width, highlight=False, markup=False, emoji=False)
    on.width = max(on.width, MIN_WIDTH)
    return on


def view(
    args: argparse.Namespace, timeline: Timeline, step: int | None, ranks: Sequence[int] | None, sentence: str | None
) -> TimelineView:
    """Return the picture that the options ask for, which ends with a sentence, or else with that on the timeline."""
    return TimelineView(timeline, step=step, ranks=ranks, ascii=args.ascii, all=args.all, sentence=sentence)


def picture(on: Console, shown: TimelineView, timeline: Timeline, ranks: Sequence[int] | None) -> None:
    """Print the picture, and before it the connections that were lost or came back."""
    for span in wires(timeline, ranks):
        at_s = (span.start_ns - timeline.spans[0].start_ns) / 1e9
        on.print(f"wires at {at_s:.3f} s, rank {span.rank}: {span.name}", soft_wrap=True)
    on.print(shown)


def wires(timeline: Timeline, ranks: Sequence[int] | None) -> list[Span]:
    """Return the events of connections: rails that were lost, and rails that came back."""
    return [
        span for span in timeline.chosen(timeline.columns.is_kind("wires")) if (ranks is None or span.rank in ranks)
    ]


def tables(
    on: Console,
    args: argparse.Namespace,
    timeline: Timeline,
    step: int | None,
    ranks: Sequence[int] | None,
    view: TimelineView,
) -> None:
    """Print the tables that the options ask for, and the last line of the picture."""
    lines: list[str] = []
    if args.ops:
        rows = operations(timeline, step=step, ranks=ranks)
        lines += [*operations_table(rows, ranks=view.counted, width=on.width), ""]
    if args.critical_path:
        path = critical_path(timeline, step=step, ranks=ranks)
        lines += [*critical_path_table(path, width=on.width), ""]
    for line in lines:
        on.print(line, soft_wrap=True)
    _print_sentence(on, view.sentence)


def _print_sentence(on: Console, text: str) -> None:
    """Print a sentence, wrapped between words."""
    for line in wrapped(text, on.width):
        on.print(line, soft_wrap=True)


_SVG_COLUMNS = 140
"""Columns of a written picture: an axis of some 120 cells, of which each shows eighths."""


def write_svg(view: TimelineView, path: str) -> bool:
    """Write the picture as SVG; return False if it could not be written."""
    recorder = RichConsole(file=StringIO(), record=True, width=_SVG_COLUMNS, color_system="truecolor")
    recorder.print(view)
    return write_file(recorder.export_svg(title=view.sentence, theme=DEFAULT_TERMINAL_THEME), path, option="--output")
