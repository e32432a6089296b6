"""Cursor of the browser: the run, lane, instant and window that the user looks at, and the moves of keys."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal, TypeAlias

from ....timeline.measure.intervals import Interval
from ....timeline.span import Span
from .track import Lane, Track

Direction: TypeAlias = Literal[-1, 1]

_NARROWEST_NS = 20
"""Width of the narrowest window, in nanoseconds."""
_AROUND = 1.5
"""The window that shows a span is so many times as wide as the span."""


class Cursor:
    """The place where the user is. Instants are nanoseconds after the origins of the tracks.

    Attributes:
        tracks: The runs.
        focus: The number of the run that the cursor is in.
        at_ns: The instant of the cursor.
        window: The visible window.
        said: A message about the last move; may be empty.
    """

    tracks: Sequence[Track]
    focus: int
    said: str

    def __init__(self, tracks: Sequence[Track], *, window_ns: Interval | None = None) -> None:
        self.tracks, self.focus, self.said = tracks, 0, ""
        self._rows = [0] * len(tracks)
        low, high = (f(track.extent_ns[at] for track in tracks) for at, f in ((0, min), (1, max)))
        self._whole = low, max(high, low + _NARROWEST_NS)
        self.window: Interval = window_ns or self._whole
        self.at_ns: int = self.window[0]
        self._matches: list[tuple[int, int, Span]] = []  # of a search: run, lane, span
        self._words = ""

    @property
    def track(self) -> Track:
        """The run that the cursor is in."""
        return self.tracks[self.focus]

    @property
    def row(self) -> int:
        """The number of the lane that the cursor is in."""
        return self._rows[self.focus]

    def row_of(self, focus: int) -> int:
        """Return the number of the lane of a run that the cursor is in, or was in when it left that run."""
        return self._rows[focus]

    @property
    def lane(self) -> Lane:
        """The lane that the cursor is in."""
        return self.track.lanes[self.row]

    def cell_ns(self, cells: int) -> int:
        """Return the nanoseconds of one cell of a window of so many cells."""
        return max((self.window[1] - self.window[0]) // max(cells, 1), 1)

    def under(self, cells: int) -> list[Span]:
        """Return the spans under the cursor, which is one of so many cells wide."""
        return self.lane.under(self.at_ns + self.track.origin_ns, self.cell_ns(cells))

    # -- moves ---------------------------------------------------------------------------------------------------------

    def move(self, cells: float, *, of: int) -> None:
        """Move by some cells of a window of `of` cells; the window follows."""
        low, high = self._whole
        self.at_ns = min(max(self.at_ns + round(cells * self.cell_ns(of)), low), high - 1)
        self._follow()

    def change_lane(self, lanes: int) -> None:
        """Go down by so many lanes, or up."""
        self._rows[self.focus] = min(max(self.row + lanes, 0), len(self.track.lanes) - 1)

    def change_track(self) -> None:
        """Go to the other run."""
        self.focus = (self.focus + 1) % len(self.tracks)

    def zoom(self, factor: float) -> None:
        """Widen or narrow the window by a factor, with the cursor where it is on the screen."""
        low, high = self.window
        whole = self._whole[1] - self._whole[0]
        length = min(max(round((high - low) * factor), _NARROWEST_NS), whole)
        start = self.at_ns - (self.at_ns - low) * length // (high - low)
        self.window = start, start + length
        self._follow()

    def show_all(self) -> None:
        """Show everything."""
        self.window = self._whole

    def show(self, span: Span) -> None:
        """Show a span and its surroundings."""
        origin = self.track.origin_ns
        whole = self._whole[1] - self._whole[0]
        length = min(max(round(span.duration_ns * _AROUND), _NARROWEST_NS), whole)
        self.at_ns = span.start_ns - origin
        start = self.at_ns - (length - span.duration_ns) // 2
        self.window = start, start + length
        self._follow()

    def _follow(self) -> None:
        """Move the window so that it contains the cursor and lies inside the run."""
        low, high = self.window
        length = high - low
        if self.at_ns < low:
            low = self.at_ns - length // 4
        elif self.at_ns >= high:
            low = self.at_ns - length * 3 // 4
        low = max(min(low, self._whole[1] - length), self._whole[0])
        self.window = low, low + length

    # -- jumps ---------------------------------------------------------------------------------------------------------

    def next_span(self, towards: Direction) -> None:
        """Go to the next span of the lane, or to the previous one."""
        self._jump([self.row], towards, lambda span: True, "no further span in this lane")

    def next_exposed(self, towards: Direction) -> None:
        """Go to the next operation whose bytes moved while its rank computed nothing."""
        self._jump(self._onwards(towards), towards, lambda span: self.track.exposed(span)[1] > 0, "nothing is exposed")

    def next_waiting(self, towards: Direction) -> None:
        """Go to the next operation that waited for a rank while its own computed nothing."""
        self._jump(self._onwards(towards), towards, lambda span: self.track.exposed(span)[0] > 0, "nothing waits")

    def _onwards(self, towards: Direction) -> Sequence[int]:
        """Return the lanes of communication from the current one on, then those before it."""
        count = len(self.track.lanes)
        rows = [(self.row + towards * step) % count for step in range(count)]
        return [row for row in rows if self.track.lanes[row].kind == "comm"]

    def _jump(self, rows: Sequence[int], towards: Direction, wanted: Callable[[Span], bool], otherwise: str) -> None:
        """Go to the first wanted span: in the cursor's own lane after it, then in the other lanes."""
        here = self.at_ns + self.track.origin_ns
        for row in rows:
            lane = self.track.lanes[row]
            first = bisect_left(lane.starts_ns, here + (towards > 0)) if row == self.row else 0
            earlier = lane.spans[: first if row == self.row else None][::-1]
            spans = lane.spans[first:] if towards > 0 else earlier
            found = next(filter(wanted, spans), None)
            if found is not None:
                self._go(row, found)
                return
        self.said = f"{otherwise} {'after' if towards > 0 else 'before'} this"

    def _go(self, row: int, span: Span) -> None:
        self._rows[self.focus] = row
        self.at_ns, self.said = span.start_ns - self.track.origin_ns, ""
        self._follow()

    # -- search --------------------------------------------------------------------------------------------------------

    def search(self, words: str) -> None:
        """Find spans by name, operation, group, algorithm or place in the program; go to the first after the cursor."""
        self._words, wanted = words, words.lower()
        self._matches = [
            (focus, row, span)
            for focus, track in enumerate(self.tracks)
            for row, lane in enumerate(track.lanes)
            for span in lane.spans
            if wanted and wanted in _text(span)
        ]
        self._matches.sort(key=lambda each: (each[0], each[2].start_ns, each[1]))
        if not self._matches:
            self.said = f"nothing is called {words!r}" if words else ""
            return
        here = self.focus, self.at_ns + self.track.origin_ns, self.row
        self._match(bisect_left([(focus, span.start_ns, row) for focus, row, span in self._matches], here))

    def next_match(self, towards: Direction) -> None:
        """Go to the next span found, or to the previous one."""
        if not self._matches:
            self.said = "search first: /"
            return
        self._match(self._place + towards)

    def _match(self, place: int) -> None:
        self._place = place % len(self._matches)
        self.focus, row, span = self._matches[self._place]
        self._go(row, span)
        self.said = f"{self._words!r}: {self._place + 1} of {len(self._matches)}"


def _text(span: Span) -> str:
    info = span.info
    told = (info.op, info.group, info.algorithm, info.call_site, info.dtype) if info else (span.call_site,)
    return " ".join(chain([span.name], told)).lower()
