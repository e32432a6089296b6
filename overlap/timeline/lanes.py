"""Lanes as characters: intervals are painted onto a row of small units, and units are read back as cells.

Exposed communication differs from hidden communication by glyph, not only by colour: it stands at full height where
hidden communication stays low. Compute and exposed communication have edges at an eighth of a cell, hidden
communication at half a cell; in plain ASCII, and with one row per rank, the unit is the cell. An interval shorter than
a unit is still drawn as one, and exposed wins over hidden: the drawing errs on the side of showing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

from .intervals import Interval, Merged
from .metrics import Coverage

Piece: TypeAlias = tuple[str, str]
"""Text, and its style in rich's notation ("" for none)."""

# Okabe-Ito colours: told apart with any colour vision, and by luminance (0.15, 0.42, 0.21) in grey.
COMPUTE, HIDDEN, EXPOSED = "#0072B2", "#E69F00", "#D55E00"

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_UNITS_PER_CELL = 8


def ascii_lanes(cover: Coverage, window: Interval, cells: int) -> tuple[list[Piece], list[Piece]]:
    """Draw a compute and a communication lane with `#`, `=` (hidden), `!` (exposed) and `.` (idle)."""
    compute = _paint(window, cells, cover.compute)
    comm = _paint(window, cells, cover.overlapped, cover.exposed)
    return [(_translated(compute, b".#"), "")], [(_translated(comm, b".=!"), "")]


def ascii_row(cover: Coverage, window: Interval, cells: int) -> list[Piece]:
    """Draw one row: `#` compute alone, `=` both, `!` exposed communication, `.` idle."""
    return [(_translated(_states(cover, window, cells), b".#?=!!"), "")]


def block_lanes(cover: Coverage, window: Interval, cells: int, *, color: bool) -> tuple[list[Piece], list[Piece]]:
    """Draw a compute and a communication lane with block characters."""
    units = cells * _UNITS_PER_CELL
    compute = _paint(window, units, cover.compute)
    comm = _paint(window, units, cover.overlapped, cover.exposed)
    return _cells(compute, _compute_cell, color=color), _cells(comm, _comm_cell, color=color)


def block_row(cover: Coverage, window: Interval, cells: int, *, color: bool) -> list[Piece]:
    """Draw one row of half blocks: compute above, communication below."""
    table = _ROW_COLOR if color else _ROW_PLAIN
    return _joined([table[state] for state in _states(cover, window, cells)])


# Indexed by `_states`: compute alone is the upper half, exposed alone the lower, both in one cell by chance a diagonal.
_ROW_PLAIN: Sequence[Piece] = [(" ", ""), ("▀", ""), ("▄", ""), ("█", ""), ("▄", ""), ("▞", "")]
_ROW_COLOR: Sequence[Piece] = [
    (" ", ""),
    ("▀", COMPUTE),
    ("▄", HIDDEN),
    ("▀", f"{COMPUTE} on {HIDDEN}"),
    ("▄", EXPOSED),
    ("▞", f"{EXPOSED} on {COMPUTE}"),
]


def _states(cover: Coverage, window: Interval, cells: int) -> bytes:
    """One byte a cell: 1 if computing, plus 2 for hidden or 4 for exposed communication."""
    compute = _paint(window, cells, cover.compute)
    comm = _paint(window, cells, cover.overlapped, cover.exposed)
    return bytes(busy + 2 * kind for busy, kind in zip(compute, comm, strict=True))


def _paint(window: Interval, units: int, *layers: Merged) -> bytes:
    """Return one byte per unit: the number (from 1) of the last layer that covers it, 0 where none does."""
    row = bytearray(units)
    low, length = window[0], max(window[1] - window[0], 1)
    for value, layer in enumerate(layers, 1):
        for start, end in layer:
            first = min(((start - low) * units * 2 + length) // (2 * length), units - 1)
            last = max(((end - low) * units * 2 + length) // (2 * length), first + 1)
            row[first:last] = bytes([value]) * (last - first)
    return bytes(row)


def _translated(row: bytes, glyphs: bytes) -> str:
    return row.translate(glyphs.ljust(256)).decode("ascii")


def _cells(row: bytes, cell: Callable[[bytes, bool], Piece], *, color: bool) -> list[Piece]:
    starts = range(0, len(row), _UNITS_PER_CELL)
    return _joined([cell(row[at : at + _UNITS_PER_CELL], color) for at in starts])


def _joined(cells: Sequence[Piece]) -> list[Piece]:
    """Join neighbours of one style: few pieces are what makes printing fast."""
    pieces: list[Piece] = []
    text, style = "", ""
    for glyph, ink in cells:
        if ink != style and text:
            pieces.append((text, style))
            text = ""
        text, style = text + glyph, ink
    return [*pieces, (text, style)]


@cache
def _compute_cell(units: bytes, color: bool) -> Piece:
    busy = units.count(1)
    return _solid(busy, COMPUTE, "", right=_leans_right(units, 1), color=color) if busy else (" ", "")


@cache
def _comm_cell(units: bytes, color: bool) -> Piece:
    hidden, exposed = units.count(1), units.count(2)
    if exposed:
        rest = HIDDEN if hidden > _UNITS_PER_CELL - exposed - hidden else ""
        return _solid(exposed, EXPOSED, rest, right=_leans_right(units, 2), color=color)
    return (_low(units[:4].count(1), units[4:].count(1)), HIDDEN if color else "") if hidden else (" ", "")


def _leans_right(units: bytes, value: int) -> bool:
    half = len(units) // 2
    return units[half:].count(value) > units[:half].count(value)


def _solid(eighths: int, ink: str, rest: str, *, right: bool, color: bool) -> Piece:
    """A full-height bar that fills part of a cell from the left or from the right."""
    if eighths == _UNITS_PER_CELL:
        return "█", ink if color else ""
    if not color:
        return (("▐" if eighths > 2 else "▕") if right else _EIGHTHS[eighths]), ""
    if not right:
        return _EIGHTHS[eighths], f"{ink} on {rest}" if rest else ink
    # There are no right-anchored eighths: draw the rest from the left and swap the two colours.
    return _EIGHTHS[8 - eighths], f"{rest} on {ink}" if rest else f"reverse {ink}"


def _low(left: int, right: int) -> str:
    """A half-height bar over the left half, the right half, or both; what is less than half full gives way."""
    if min(left, right) >= 2:
        return "▄"
    return "▖" if left >= right else "▗"
