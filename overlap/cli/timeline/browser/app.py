"""Terminal application of the browser: draws tracks and details, and hands keys to the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input, Static

from ....timeline.draw.axis import scale
from ....timeline.draw.theme import legend
from ....timeline.measure.intervals import Interval
from ....units import wrapped
from .cursor import Cursor, Direction
from .track import Lane, Track, details

_DETAIL_LINES = 9
_KEYS = (
    "arrows move  +/- zoom  z span  0 all  e/w next exposed/waiting  [/] span\n"
    "/ search  n/N match  tab other run  pgup/pgdn pan  ? legend  q quit"
)
_KEYS_ASIDE = "E and W go back; home and end go to the ends; the wheel zooms, a click moves the cursor"


class TimelineApp(App[None]):
    """Shows one run, or two above each other, on one axis.

    Args:
        tracks: The runs.
        window_ns: The window to show first; None for all.
        ascii: Draw with plain characters only.
    """

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = ""
    CSS = f"""
    Screen {{ layout: vertical; }}
    #verdict {{ height: auto; max-height: 13%; }}
    TrackView {{ height: 1fr; }}
    #details {{ height: {_DETAIL_LINES}; max-height: 38%; }}
    #search {{ display: none; height: 1; border: none; padding: 0; }}
    #keys {{ height: 2; }}
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)"),
        Binding("right", "move(1)"),
        Binding("up", "lane(-1)"),
        Binding("down", "lane(1)"),
        Binding("pageup", "pan(-1)"),
        Binding("pagedown", "pan(1)"),
        Binding("home", "end(-1)"),
        Binding("end", "end(1)"),
        Binding("plus,equals_sign", "zoom(0.5)"),
        Binding("minus", "zoom(2.0)"),
        Binding("0", "all"),
        Binding("z,enter", "span"),
        Binding("e", "exposed(1)"),
        Binding("E", "exposed(-1)"),
        Binding("w", "waiting(1)"),
        Binding("W", "waiting(-1)"),
        Binding("right_square_bracket", "next(1)"),
        Binding("left_square_bracket", "next(-1)"),
        Binding("slash", "search"),
        Binding("n", "match(1)"),
        Binding("N", "match(-1)"),
        Binding("tab", "track", priority=True),
        Binding("question_mark", "help"),
        Binding("escape", "close"),
        Binding("q", "quit"),
    ]

    def __init__(self, tracks: Sequence[Track], *, window_ns: Interval | None = None, ascii: bool = False) -> None:
        super().__init__()
        self.cursor_at: Cursor = Cursor(tracks, window_ns=window_ns)
        self._plain = ascii
        self._helped = False
        self._views = [TrackView(self.cursor_at, number, ascii=ascii) for number in range(len(tracks))]

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static(id="verdict", markup=False)
        yield from self._views
        yield Static(id="details", markup=False)
        yield Input(id="search", placeholder="a name, an operation, an algorithm, a place in the program")
        yield Static(_KEYS, id="keys", markup=False)

    def on_mount(self) -> None:
        """Show the first screen."""
        self._show()

    def on_resize(self, event: events.Resize) -> None:
        """Draw anew in another size."""
        self.call_after_refresh(self._show)

    @property
    def cells(self) -> int:
        """Number of cells of an axis."""
        return self._views[0].cells

    def _show(self) -> None:
        for view in self._views:
            view.refresh()
        width = max(self.size.width, 20)
        said = wrapped(f"{self.cursor_at.track.title}: {self.cursor_at.track.verdict}", width)
        self.query_one("#verdict", Static).update("\n".join(said[:3]))
        self.query_one("#details", Static).update("\n".join(self._told(width)))

    def _told(self, width: int) -> list[str]:
        cursor = self.cursor_at
        if self._helped:
            entries = legend(width, two_lanes=True, ascii=self._plain, color=False, kept=True)
            return ["".join(text for text, _ in line) for line in entries] + wrapped(_KEYS_ASIDE, width)
        found = details(cursor.track, cursor.lane, cursor.at_ns, cursor.under(self.cells))
        lines = [line for text in found for line in wrapped(text, width, rest="  ")]
        room = _DETAIL_LINES - bool(cursor.said)
        if len(lines) > room:
            lines = [*lines[: room - 1], f"{lines[room - 1][: width - 4]} ..."]
        return [*lines, cursor.said] if cursor.said else lines

    # -- keys --------------------------------------------------------------------------------------------------------

    def action_move(self, cells: int) -> None:
        """Move along the lane."""
        self.cursor_at.move(cells, of=self.cells)
        self._moved()

    def action_pan(self, screens: int) -> None:
        """Move by most of a screen."""
        self.cursor_at.move(screens * self.cells * 3 // 4, of=self.cells)
        self._moved()

    def action_end(self, towards: int) -> None:
        """Go to the first instant, or the last."""
        self.cursor_at.move(towards * float("1e9"), of=self.cells)
        self._moved()

    def action_lane(self, lanes: int) -> None:
        """Go to another lane."""
        self.cursor_at.change_lane(lanes)
        self._moved()

    def action_zoom(self, factor: float) -> None:
        """Show more, or less."""
        self.cursor_at.zoom(factor)
        self._moved()

    def action_all(self) -> None:
        """Show everything."""
        self.cursor_at.show_all()
        self._moved()

    def action_span(self) -> None:
        """Show the span under the cursor, and its surroundings."""
        if found := self.cursor_at.under(self.cells):
            self.cursor_at.show(found[0])
        self._moved()

    def action_exposed(self, towards: Direction) -> None:
        """Go to the next exposed operation."""
        self.cursor_at.next_exposed(towards)
        self._show()

    def action_waiting(self, towards: Direction) -> None:
        """Go to the next operation that waits."""
        self.cursor_at.next_waiting(towards)
        self._show()

    def action_next(self, towards: Direction) -> None:
        """Go to the next span of the lane."""
        self.cursor_at.next_span(towards)
        self._show()

    def action_match(self, towards: Direction) -> None:
        """Go to the next span that the search found."""
        self.cursor_at.next_match(towards)
        self._show()

    def action_track(self) -> None:
        """Go to the other run."""
        self.cursor_at.change_track()
        self._moved()

    def action_help(self) -> None:
        """Show the legend, or the details again."""
        self._helped = not self._helped
        self._show()

    def action_search(self) -> None:
        """Open the search field."""
        field = self.query_one("#search", Input)
        field.display = True
        field.focus()

    def action_close(self) -> None:
        """Close the search."""
        field = self.query_one("#search", Input)
        field.display = False
        self.set_focus(None)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Search for the text in the field."""
        self.action_close()
        self.cursor_at.search(event.value)
        self._show()

    def _moved(self) -> None:
        self.cursor_at.said = ""
        self._show()


class TrackView(Widget):
    """The lanes of one run that fit, under its ruler."""

    def __init__(self, cursor: Cursor, number: int, *, ascii: bool) -> None:
        super().__init__()
        self._cursor, self._number, self._plain, self._top = cursor, number, ascii, 0
        self._track = cursor.tracks[number]
        names = [_label(lane, 4) for lane in self._track.lanes]
        self._edge = max(map(len, names)) + 1

    @property
    def cells(self) -> int:
        """Number of cells of the axis."""
        return max(self.size.width - self._edge - 1, 1)

    def render(self) -> Text:
        """Draw it."""
        window, cursor = self._cursor.window, self._cursor
        room, row = max(self.size.height - 1, 1), cursor.row_of(self._number)
        self._top = min(max(self._top, row - room + 1), row)
        mark, edge = ("|", "|") if self._plain else ("╵", "│")
        ruler = scale(*window, self.cells, mark=mark)
        lines = [Text(f"{self._track.title[: self._edge]:{self._edge}} {ruler}", no_wrap=True)]
        for number, lane in enumerate(self._track.lanes[self._top : self._top + room], self._top):
            pieces = self._track.drawn(lane, window, self.cells, ascii=self._plain)
            line = Text.assemble(f"{_label(lane, 4):{self._edge}}{edge}", *pieces, no_wrap=True)
            if number == row:
                self._mark(line)
            lines.append(line)
        return Text("\n").join(lines)

    def _mark(self, line: Text) -> None:
        """Mark the cursor, or only its lane if the cursor is in the other run."""
        line.stylize("bold", 0, self._edge)
        if self._cursor.focus == self._number:
            line.stylize("reverse", 0, self._edge)
            low, high = self._cursor.window
            at = self._edge + 1 + (self._cursor.at_ns - low) * self.cells // (high - low)
            if at < len(line):
                line.stylize("reverse", at, at + 1)

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the place."""
        cursor = self._cursor
        cursor.focus = self._number
        cursor.change_lane(self._top + event.y - 1 - cursor.row)
        low, _ = cursor.window
        cursor.move((low - cursor.at_ns) / cursor.cell_ns(self.cells) + event.x - self._edge - 1, of=self.cells)
        self.app.action_lane(0)  # type: ignore[attr-defined]

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Show less."""
        self.app.action_zoom(0.8)  # type: ignore[attr-defined]

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Show more."""
        self.app.action_zoom(1.25)  # type: ignore[attr-defined]


def _label(lane: Lane, wide: int) -> str:
    return f"{lane.rank:>{wide}} {lane.name[:12]}"
