"""Pictures of a timeline: rectangles and texts in pixels, written as SVG that needs no font, style or script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Literal

from ...errors import printable
from ...units import unit_for, wrapped
from ..measure.intervals import Interval
from .axis import tick_step_ns
from .lanes import Waits, painted, whom
from .theme import COMPUTE, EXPOSED, HIDDEN, WAITING
from .view import TimelineView

INK = "#222222"
LINE = "#BBBBBB"
PAPER = "#FFFFFF"

FONT = 13
"""Height of the letters in pixels."""
_WIDTH = 1000
_EDGE = 12
_LANE, _GAP, _TEXT = 16, 4, 18
_LETTER = 8
"""Pixels that a letter takes at most, so that texts fit whatever the font."""
_CELLS_OF_TICKS = 10  # pixels that count as a cell when ticks are chosen


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; stripes mean waiting (upright) or a kept event loop (level), which must not depend on colour."""

    x: int
    y: int
    width: int
    height: int
    colour: str
    stripes: Literal["", "upright", "level"] = ""


@dataclass(frozen=True, slots=True)
class Label:
    """A text whose first letter stands on a base line."""

    x: int
    y: int
    text: str
    bold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A picture."""

    width: int  # In pixels
    height: int  # In pixels
    title: str  # For readers who cannot see it
    boxes: Sequence[Box]  # Later ones over earlier ones
    labels: Sequence[Label]  # Over all boxes


def scene_of(view: TimelineView, *, width: int = _WIDTH) -> Scene:
    """Lay out a timeline as in the terminal: ranks that are waited for first, ranks that are alike in one row.

    An interval shorter than a pixel is drawn as one, and exposed communication over hidden communication. Cost: that
    of the pixels, and a look at each interval.
    """
    title, rows = view.rows()
    letters = (width - 2 * _EDGE) // _LETTER
    boxes, labels, y = list[Box](), list[Label](), _EDGE + FONT
    for text in wrapped(title, letters):
        labels.append(Label(_EDGE, y, text, bold=True))
        y += _TEXT
    left = _EDGE + _LETTER * (max(len(label) for label, _, _ in rows) + len(" compute "))
    start_ns = min(cover.window[0] for _, cover, _ in rows)
    window = start_ns, max(start_ns + 1, *(cover.window[1] for _, cover, _ in rows))
    pixels, top = width - _EDGE - left, y
    for name, cover, waits in rows:
        for lane, units in zip(("compute", "comm"), painted(cover, window, pixels), strict=True):
            labels.append(Label(_EDGE, y + FONT - 1, name if lane == "compute" else ""))
            labels.append(Label(left - _LETTER * len("compute "), y + FONT - 1, lane))
            found = list(_runs(units, left, y, comm=lane == "comm"))
            boxes += found
            labels += _named(found, waits, window, left, pixels) if lane == "comm" else ()
            y += _LANE + 2
        y += _GAP
    boxes[:0] = _ticks(window, left, pixels, top, y)
    labels += _tick_labels(window, left, pixels, y + FONT)
    y += _TEXT + _GAP
    y = _legend(boxes, labels, y, width=width, kept=any(len(cover.kept) for _, cover, _ in rows))
    for text in wrapped(str(view.verdict), letters):
        labels.append(Label(_EDGE, y + FONT, text))
        y += _TEXT
    return Scene(
        width=width, height=y + _EDGE, title=f"{title}. {view.verdict}", boxes=boxes,
        labels=[label for label in labels if label.text],
    )  # fmt: skip


def _runs(units: bytes, left: int, y: int, *, comm: bool) -> Iterator[Box]:
    at = 0
    for kind, run in groupby(units):
        length = sum(1 for _ in run)
        if kind and not comm:
            yield Box(left + at, y, length, _LANE, *((WAITING, "level") if kind == 1 else (COMPUTE, "")))
        elif kind == 1:
            yield Box(left + at, y + _LANE // 2, length, _LANE - _LANE // 2, HIDDEN)
        elif kind:
            yield Box(left + at, y, length, _LANE, *((WAITING, "upright") if kind == 2 else (EXPOSED, "")))
        at += length


def _named(boxes: Sequence[Box], waits: Waits, window: Interval, left: int, pixels: int) -> Iterator[Label]:
    """Write the rank that is waited for into wide stretches of waiting."""
    length_ns = window[1] - window[0]
    for box in boxes:
        if box.stripes:
            first_ns, last_ns = (window[0] + length_ns * (x - left) // pixels for x in (box.x, box.x + box.width))
            rank = whom(waits, first_ns, last_ns)
            if rank is not None and _LETTER * len(f" for {rank} ") <= box.width:
                middle = box.x + (box.width - _LETTER * len(f"for {rank}")) // 2
                yield Label(middle, box.y + FONT - 1, f"for {rank}")


def _instants(window: Interval, left: int, pixels: int) -> Iterator[tuple[int, int]]:
    length_ns = window[1] - window[0]
    for at_ns in range(0, length_ns, tick_step_ns(length_ns, pixels // _CELLS_OF_TICKS)):
        yield left + at_ns * pixels // length_ns, at_ns


def _ticks(window: Interval, left: int, pixels: int, top: int, bottom: int) -> list[Box]:
    return [Box(x, top, 1, bottom - top, LINE) for x, _ in _instants(window, left, pixels)]


def _tick_labels(window: Interval, left: int, pixels: int, y: int) -> Iterator[Label]:
    name, unit_ns = unit_for(window[1] - window[0])
    for x, at_ns in _instants(window, left, pixels):
        text = f"{at_ns / unit_ns:g} {name}"
        if x + _LETTER * len(text) <= left + pixels + _EDGE:
            yield Label(x, y, text)


_LEGEND = (
    ("compute", "compute", 2),
    ("event loop kept", "compute", 1),
    ("hidden comm", "comm", 1),
    ("waiting for a rank", "comm", 2),
    ("on the wire", "comm", 3),
)


def _legend(boxes: list[Box], labels: list[Label], y: int, *, width: int, kept: bool) -> int:
    """Add the meaning of boxes, on as many lines as needed; return where it ends."""
    x = _EDGE
    for text, lane, kind in (each for each in _LEGEND if kept or each[1:] != ("compute", 1)):
        wide = _LANE + 6 + _LETTER * len(text)
        if x + wide > width - _EDGE:
            x, y = _EDGE, y + _TEXT
        boxes += _runs(bytes([kind]) * _LANE, x, y, comm=lane == "comm")
        labels.append(Label(x + _LANE + 6, y + FONT - 1, text))
        x += wide + 2 * _LETTER
    return y + _TEXT + _GAP


STRIPE = 4
"""Pixels from one stripe of waiting to the next; a stripe has one."""


def svg(scene: Scene) -> str:
    """Return the text of the file; equal scenes give equal texts."""
    return "\n".join([*_lines(scene), ""])


def _lines(scene: Scene) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{scene.width}" height="{scene.height}" '
        f'viewBox="0 0 {scene.width} {scene.height}" role="img" font-family="sans-serif" font-size="{FONT}">'
    )
    yield f"<title>{_text(scene.title)}</title>"
    yield (
        f'<defs><pattern id="upright" width="{STRIPE}" height="{STRIPE}" patternUnits="userSpaceOnUse">'
        f'<rect width="1" height="{STRIPE}" fill="{PAPER}"/></pattern>'
        f'<pattern id="level" width="{STRIPE}" height="{STRIPE}" patternUnits="userSpaceOnUse">'
        f'<rect width="{STRIPE}" height="1" fill="{PAPER}"/></pattern></defs>'
    )
    yield f'<rect width="{scene.width}" height="{scene.height}" fill="{PAPER}"/>'
    for box in scene.boxes:
        yield _box(box, box.colour)
        if box.stripes:
            yield _box(box, f"url(#{box.stripes})")
    for label in scene.labels:
        bold = ' font-weight="bold"' if label.bold else ""
        yield f'<text x="{label.x}" y="{label.y}" fill="{INK}"{bold}>{_text(label.text)}</text>'
    yield "</svg>"


def _text(line: str) -> str:
    return escape(printable(line))  # XML has no place for control characters, not even escaped


def _box(box: Box, fill: str) -> str:
    return f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" fill="{fill}"/>'
