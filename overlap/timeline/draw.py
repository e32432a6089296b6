"""The picture: lanes per rank on one time axis, legend, table and conclusion, at any width from 40 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, TypeAlias

from .axis import ruler
from .intervals import Interval
from .lanes import Piece, ascii_lanes, ascii_row, block_lanes, block_row
from .lateness import arrivals
from .legend import legend
from .metrics import Coverage, coverage
from .spans import Timeline
from .table import sentences, table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

MIN_WIDTH = 40
TWO_LANES_UP_TO = 16
"""Ranks drawn with two lanes each; more get one row each."""
ROWS_WITHOUT_SCREEN = 64
"""Ranks shown where there is no screen height to go by."""
WORST = 8
_LINES_BESIDE_RANKS = 9

_Line: TypeAlias = list[Piece]


@dataclass(frozen=True, slots=True)
class _Look:
    cells: int
    ascii: bool
    color: bool
    two_lanes: bool
    window: Interval


class TimelineView:
    """A timeline that rich can print: `console.print(TimelineView(timeline, step=3))`.

    Up to 16 ranks get a compute and a communication lane each; more get one row each; more than fit on the screen are
    represented by those with the least, the median and the most exposed communication. Ranks asked for by number are
    all shown.

    Args:
        timeline: The run to draw. It is read at construction, so later changes do not show.
        step: A step index, or None for the whole run.
        ranks: World ranks to draw; None means all.
        width: Columns, at least 40; None takes the console's.
        ascii: Draw with `#`, `=`, `!` and `.` only. Dumb terminals and streams that are not UTF-8 get that anyway.

    Raises:
        UsageError: If the timeline is empty, or nobody recorded that step, or a rank is not in it.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        step: int | None = None,
        ranks: Iterable[int] | None = None,
        width: int | None = None,
        ascii: bool = False,
    ) -> None:
        self._width, self._ascii = width, ascii
        self._chosen = ranks is not None
        self._covers = coverage(timeline, step=step, ranks=ranks)
        self._breakdowns = {cover.rank: cover.breakdown() for cover in self._covers}
        self._arrivals = arrivals(timeline, step=step)
        self._title = _title(timeline, step, len(self._covers))

    def lines(
        self, *, width: int = 80, height: int | None = None, ascii: bool = False, color: bool = False
    ) -> list[list[Piece]]:
        """Return the picture as lines of (text, style in rich's notation). Needs no terminal and no rich.

        Args:
            width: Columns, used unless the view has its own.
            height: Rows of the screen, which bound the number of ranks shown; None allows 64.
            ascii: As for the view; either one suffices.
            color: Whether to set styles; without, exposed communication still differs by glyph.
        """
        columns = max(self._width or width, MIN_WIDTH)
        shown, note = self._shown(height)
        two_lanes = len(shown) <= TWO_LANES_UP_TO and not note
        labels = _labels(shown, two_lanes=two_lanes)
        window = min(c.window[0] for c in shown), max(c.window[1] for c in shown)
        edges = len(labels[0]) + 2
        look = _Look(columns - edges, ascii or self._ascii, color, two_lanes, window)
        mark = "|" if look.ascii else "╵"
        measured = list(self._breakdowns.values())
        return [
            *_lines(wrap(f"{self._title}{note}", columns), "bold" if color else ""),
            *_drawn(shown, labels, look),
            [(" " * (edges - 1) + ruler(max(window[1] - window[0], 1), look.cells, mark=mark), "")],
            *legend(columns, two_lanes=two_lanes, ascii=look.ascii, color=color),
            [],
            *_lines(table([self._breakdowns[cover.rank] for cover in shown], columns)),
            [],
            *_lines(sentences(measured, self._arrivals, columns)),
        ]

    def _shown(self, height: int | None) -> tuple[list[Coverage], str]:
        """The ranks to draw, and how they were picked if not all are."""
        room = ROWS_WITHOUT_SCREEN if height is None else max((height - _LINES_BESIDE_RANKS) // 2, 2 + WORST)
        if self._chosen or len(self._covers) <= max(room, TWO_LANES_UP_TO):
            return self._covers, ""
        ordered = sorted(self._covers, key=lambda cover: (-self._breakdowns[cover.rank].exposed_ns, cover.rank))
        picked = [ordered[-1], ordered[len(ordered) // 2], *ordered[:WORST]]
        return picked, f"; shown: least, median and {WORST} most exposed"

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


def render_text(
    timeline: Timeline,
    *,
    width: int = 80,
    ascii: bool = False,
    step: int | None = None,
    ranks: Iterable[int] | None = None,
    color: bool = False,
) -> str:
    """Draw a timeline as text that ends in a newline; arguments and errors as for `TimelineView`.

    With `color` the text holds ANSI sequences, whatever the environment says about colour.
    """
    view = TimelineView(timeline, step=step, ranks=ranks, width=width, ascii=ascii)
    lines = view.lines(width=width, color=color)
    texts = [_ansi(line) for line in lines] if color else ["".join(text for text, _ in line) for line in lines]
    return "".join(text.rstrip() + "\n" for text in texts)


def _ansi(line: _Line) -> str:
    from rich.color import ColorSystem
    from rich.style import Style

    return "".join(Style.parse(style).render(text, color_system=ColorSystem.TRUECOLOR) for text, style in line)


def _title(timeline: Timeline, step: int | None, ranks: int) -> str:
    what = "whole run" if step is None else f"step {step}"
    clock = ", virtual time" if timeline.clock == "virtual" else ""
    lost = f", {timeline.dropped} older spans not kept" if timeline.dropped else ""
    return f"{what}: {ranks} of {timeline.world_size} ranks{clock}{lost}"


def _labels(shown: Sequence[Coverage], *, two_lanes: bool) -> list[str]:
    digits = max(len(str(cover.rank)) for cover in shown)
    if not two_lanes:
        return [f"{cover.rank:>{digits}} " for cover in shown]
    return [label for cover in shown for label in (f"{cover.rank:>{digits}} compute ", f"{'':>{digits}} comm    ")]


def _drawn(shown: Sequence[Coverage], labels: Sequence[str], look: _Look) -> list[_Line]:
    bodies = [lane for cover in shown for lane in _rank_lanes(cover, look)]
    edge = "|" if look.ascii else "│"
    return [[(label + edge, ""), *body, (edge, "")] for label, body in zip(labels, bodies, strict=True)]


def _rank_lanes(cover: Coverage, look: _Look) -> Sequence[_Line]:
    if look.ascii:
        draw = ascii_lanes(cover, look.window, look.cells)
        return draw if look.two_lanes else [ascii_row(cover, look.window, look.cells)]
    if look.two_lanes:
        return block_lanes(cover, look.window, look.cells, color=look.color)
    return [block_row(cover, look.window, look.cells, color=look.color)]


def _lines(texts: Iterable[str], style: str = "") -> list[_Line]:
    return [[(text, style)] for text in texts]
