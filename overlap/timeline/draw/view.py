"""Views of a timeline for the terminal: lanes on one time axis, legend, table and verdict, from 40 columns on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...explain.causes import WAIT
from ...explain.judgement import explain_facts
from ...explain.recorded import timeline_facts
from ...explain.spans import pieces_of_spans
from ...ranklist import format_rank_list
from ...units import wrap_text
from ..measure.activity import Activity
from ..measure.intervals import Merged, union
from ..measure.metrics import Breakdown, measure_windows
from ..measure.steps import keep_ranks_with_steps, rank_windows
from ..spans import CUT, ENDED, Timeline
from .axis import ruler_line
from .folding import Fold, fold_alike_ranks, table_lines
from .lanes import NO_WAITS, Canvas, Coverage, draw_half_block_row, draw_lanes, draw_stream_lane, find_coverage
from .theme import Piece, legend_lines

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

MIN_WIDTH = 40
TWO_LANES_UP_TO = 16
"""Rows drawn with two lanes each; more get one line each."""
ROWS_WITHOUT_SCREEN = 8
"""Largest number of rows if the height of the screen is unknown."""
STREAMS_UP_TO = 4
"""A rank with at most this many communication streams has a lane for each; more streams share one."""
_MAX_NAME = 9  # characters of the name of a stream
_LINES_PER_ROW = 3  # two lanes, and a line of the table
_LINES_BESIDE_ROWS = 9  # line of the command, title, ruler, legend, two blanks, head of the table, prompt

_Line: TypeAlias = list[Piece]


class TimelineView:
    """A timeline that rich can print: `console.print(TimelineView(timeline, step=3))`.

    Ranks that are alike share a row, which shows one of them. The ranks that others waited for most come first, on rows
    of their own. Up to 16 rows have a compute lane and a lane for each communication stream; of more rows, each has one
    line. The number of rows is the largest that fits on the screen.

    Args:
        timeline: The run to draw. It is read at construction, so later changes do not show.
        step: A step index; None: the whole run.
        ranks: World ranks to draw, each on a row of its own, in their order; None: all ranks.
        width: Columns, at least 40; None: the width of the console.
        ascii: Whether to draw with `#`, `=`, `~`, `!` and `.` only. On dumb terminals and streams that are not UTF-8
            this is always so.
        all: Whether every rank gets a row of its own, however many ranks there are.
        rows: Largest number of rows, each with two lanes, whatever the height; None: the number that fits.
        sentence: The last line; None: the sentence of `overlap.why` on the timeline.

    Attributes:
        sentence: The last line.
        counted: Number of ranks over which the sentence takes means.
        length_ns: Time of the longest rank.

    Raises:
        UsageError: If the timeline is empty, or no rank recorded that step, or a rank is not in it.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        step: int | None = None,
        ranks: Iterable[int] | None = None,
        width: int | None = None,
        ascii: bool = False,
        all: bool = False,
        rows: int | None = None,
        sentence: str | None = None,
    ) -> None:
        self._width, self._ascii, self._most_rows = width, ascii, rows
        self._shows_all_ranks = all or ranks is not None
        windows = rank_windows(timeline, step=step, ranks=ranks)
        activity = Activity(timeline, windows)
        self._covers = {window.rank: find_coverage(activity, window) for window in windows}
        self._rows = measure_windows(activity)
        pieces = pieces_of_spans(activity)
        self._waits = {
            rank: np.stack([waits.start_ns, waits.end_ns, waits.late], axis=1)
            for rank, waits in pieces.take(pieces.is_cause(WAIT) & (pieces.late >= 0)).by_rank()
        }
        counted = pieces.take(np.isin(pieces.rank, [window.rank for window in keep_ranks_with_steps(windows)]))
        self._blamed_ns = {rank: int(waits.lengths_ns.sum()) for rank, waits in counted.by_late_rank() if rank >= 0}
        self.sentence: str = (
            explain_facts(timeline_facts(timeline, activity, counted, step=step)).verdict
            if sentence is None
            else sentence
        )
        self._stream_activity = _stream_activity(timeline, self._covers)
        self.counted: int = len(keep_ranks_with_steps(windows))
        self.length_ns: int = max(row.wall_ns for row in keep_ranks_with_steps(self._rows))
        self._title = f"{_title_text(timeline, step, len(self._covers))}{_uncounted_note(self._rows)}"

    def lines(
        self,
        *,
        width: int = 80,
        height: int | None = None,
        ascii: bool = False,
        color: bool = False,
        length_ns: int = 0,
        label: int = 0,
    ) -> list[list[Piece]]:
        """Return the picture as lines of (text, style in rich's notation). Needs no terminal and no rich.

        Args:
            width: Columns, used unless the view has its own.
            height: Rows of the screen, which bound the number of rows shown; None: no screen, and at most 8 rows.
            ascii: Whether to draw in ASCII, even if the view does not.
            color: Whether to set styles. Without styles, all kinds still differ by glyph.
            length_ns: Least length of the axis, so that pictures of several runs have one scale.
            label: Least width of the labels, so that the axes of several pictures begin in one column.
        """
        columns = max(self._width or width, MIN_WIDTH)
        sentence = wrap_text(self.sentence, columns)
        folds = self._choose_rows(height, len(sentence))
        two_lanes = len(folds) <= TWO_LANES_UP_TO
        lanes = sum(len(self._stream_activity.get(fold.drawn, {})) for fold in folds)
        # Lines that are free for lanes. Without a screen, four for each row.
        free = ROWS_WITHOUT_SCREEN * 4 if height is None else height - _LINES_BESIDE_ROWS - len(sentence) - len(folds)
        streams = two_lanes and self._most_rows is None and lanes + len(folds) <= free
        covers = [self._covers[fold.drawn] for fold in folds]
        starts_ns, ends_ns = zip(*(cover.window for cover in covers), strict=True)
        start_ns = min(starts_ns)
        end_ns = max(start_ns + length_ns, *ends_ns)
        wide = max(label, *(len(fold.label) for fold in folds))
        heads = [(fold.drawn, f"{fold.label:>{wide}}") for fold in folds]
        # Width beside the lane: label, blank and an edge on both sides; with two lanes also the names, and a blank.
        names = [name[:_MAX_NAME] for fold in folds if streams for name in self._stream_activity.get(fold.drawn, {})]
        edges = wide + 3 + (max(map(len, ["compute", "comm", *names])) + 1 if two_lanes else 0)
        canvas = Canvas((start_ns, end_ns), columns - edges, ascii or self._ascii, color)
        title = _styled_lines(wrap_text(f"{self._title}{_folding_note(folds)}", columns), "bold" if color else "")
        drawn = [
            line
            for rank, head in heads
            for line in self._draw_rank(rank, head, canvas, edges - 2, two_lanes=two_lanes, streams=streams)
        ]
        mark = "|" if canvas.ascii else "╵"
        axis = " " * (edges - 1) + ruler_line(max(end_ns - start_ns, 1), canvas.cells, mark=mark)
        kept = any(len(cover.kept) for cover in covers)
        legend = legend_lines(columns, two_lanes=two_lanes, ascii=canvas.ascii, color=color, kept=kept)
        rows = [(fold, [row for row in self._rows if row.rank in fold.ranks]) for fold in folds]
        table, end = _styled_lines(table_lines(rows, columns)), _styled_lines(sentence)
        return [*title, *drawn, [(axis, "")], *legend, [], *table, [], *end]

    def _choose_rows(self, height: int | None, used_lines: int) -> list[Fold]:
        """Return the rows to draw: one for each rank if all are shown, otherwise as many as fit beside `used_lines`.

        A `height` of None is an unknown screen.
        """
        if self._shows_all_ranks:
            return [Fold(ranks=(rank,), drawn=rank, spread=0.0, culprit=False) for rank in self._covers]
        room = ROWS_WITHOUT_SCREEN if height is None else (height - _LINES_BESIDE_ROWS - used_lines) // _LINES_PER_ROW
        room = room if self._most_rows is None else self._most_rows
        return fold_alike_ranks(self._rows, self._blamed_ns, room=max(room, 1))

    def _draw_rank(
        self, rank: int, head: str, canvas: Canvas, wide: int, *, two_lanes: bool, streams: bool
    ) -> list[_Line]:  # fmt: skip
        """Return the lanes of one rank as lines, each with a name before it, `wide` together with the label, and edges.

        With `streams`, each of several communication streams has a lane.
        """
        edge, cover = "|" if canvas.ascii else "│", self._covers[rank]
        names, bodies = [""], [draw_half_block_row(cover, canvas)]
        if two_lanes:
            names, bodies = ["compute", "comm"], [*draw_lanes(cover, canvas, self._waits.get(rank, NO_WAITS))]
        active = self._stream_activity.get(rank, {})
        if streams and len(active) > 1:
            names[1:] = (name[:_MAX_NAME] for name in active)
            bodies[1:] = (draw_stream_lane(activity, cover, canvas) for activity in active.values())
        heads = [f"{head if not at else '':>{len(head)}} {name}".ljust(wide) for at, name in enumerate(names)]
        return [[(text + edge, ""), *body, (edge, "")] for text, body in zip(heads, bodies, strict=True)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = self.lines(
            width=options.max_width,
            height=console.height if console.is_terminal else None,
            ascii=options.ascii_only or console.is_dumb_terminal,
            color=console.color_system is not None and not console.no_color,
        )
        for line in lines:
            yield from (Segment(text, console.get_style(style) if style else None) for text, style in line)
            yield Segment.line()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Draw in a terminal's IPython; notebooks, which show `_repr_html_`, get the repr."""
        from rich.console import Console

        console = Console(force_jupyter=False)
        if not console.is_terminal:
            printer.text(repr(self))
            return
        with console.capture() as captured:
            console.print(self)
        printer.text(captured.get().rstrip("\n"))

    def _repr_html_(self) -> str:
        """Return the picture as notebooks show it, 100 columns wide."""
        from io import StringIO

        from rich.console import Console

        console = Console(file=StringIO(), record=True, width=100, color_system="truecolor", force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format=_IN_NOTEBOOKS)


_IN_NOTEBOOKS = '<pre style="line-height: normal; font-family: monospace">{code}</pre>'


def _title_text(timeline: Timeline, step: int | None, ranks: int) -> str:
    """Return the first part of the title: the step, the number of drawn ranks, and faults of the trace."""
    subject = "whole run" if step is None else f"step {step}"
    clock = ", virtual time" if timeline.clock == "virtual" else ""
    lost = f", {timeline.dropped} older spans not kept" if timeline.dropped else ""
    cut = ", of a file that was cut off" if CUT in timeline.meta else ""
    badly = f", of a run that {timeline.meta[ENDED]}" if ENDED in timeline.meta else ""
    return f"{subject}: {ranks} of {timeline.world_size} ranks{clock}{lost}{cut}{badly}"


def _uncounted_note(rows: Sequence[Breakdown]) -> str:
    """Return the part of the title on ranks without steps, which are drawn but not counted; "" if there are none."""
    counted = {row.rank for row in keep_ranks_with_steps(rows)}
    ranks = [row.rank for row in rows if row.rank not in counted]
    if not ranks:
        return ""
    words = ("rank", "marks", "is") if len(ranks) == 1 else ("ranks", "mark", "are")
    return f"; {words[0]} {format_rank_list(ranks)} {words[1]} no steps and {words[2]} not counted"


def _folding_note(folds: Sequence[Fold]) -> str:
    """Return the end of the title: how rows are sorted, and by how much ranks in one row differ."""
    parts = []
    if len(folds) > 1 and folds[0].culprit:
        parts.append("who is waited for most is first")
    if spread := max((one.spread for one in folds if len(one.ranks) > 1), default=None):
        parts.append(f"ranks in one row differ by at most {max(spread, 0.001):.1%} of the longest")
    elif spread is not None:
        parts.append("ranks in one row are equal")
    return "".join(f"; {text}" for text in parts)


def _stream_activity(timeline: Timeline, covers: Mapping[int, Coverage]) -> dict[int, dict[str, Merged]]:
    """Return the intervals in which each stream was active, by rank and name of the stream.

    Ranks with more than `STREAMS_UP_TO` streams are left out.
    """
    streams: dict[int, dict[str, Merged]] = {}
    columns = timeline.columns
    for rank, rows in columns.rows_by_rank(columns.is_kind("comm") & np.isin(columns.rank, list(covers))).items():
        window = covers[rank].window
        rows = rows[(columns.start_ns[rows] < window[1]) & (columns.end_ns[rows] > window[0])]
        lane_of = columns.lane[rows]
        lanes = {columns.texts[number]: rows[lane_of == number] for number in np.unique(lane_of).tolist()}
        if len(lanes) <= STREAMS_UP_TO:
            streams[rank] = {
                lane: union(columns.start_ns[on], columns.end_ns[on]) for lane, on in sorted(lanes.items())
            }
    return streams


def _styled_lines(texts: Iterable[str], style: str = "") -> list[_Line]:
    return [[(text, style)] for text in texts]
