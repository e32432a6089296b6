"""Lanes of characters: intervals are painted onto a row of small units, and units are read back as cells.

Exposed communication differs from hidden communication by glyph, not only by colour: bytes on the wire stand at full
height, waiting for a rank is shaded, and hidden communication stays low. Compute and bytes have edges at an eighth of a
cell, hidden communication at half a cell, waiting at the cell; in plain ASCII, and with one row per rank, the unit is
the cell. An interval shorter than a unit is still drawn as one; exposed communication is drawn over hidden
communication, and bytes over waiting, so that nothing exposed is overlooked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..measure.intervals import Interval, Merged, intersect
from ..measure.metrics import Coverage
from .theme import COMPUTE, EXPOSED, HIDDEN, WAITING, Piece

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_UNITS_PER_CELL = 8


Waits: TypeAlias = NDArray[np.int64]
"""A row for each wait: its start, its end, and the rank that was waited for."""

NO_WAITS: Waits = np.zeros((0, 3), np.int64)


def ascii_lanes(
    cover: Coverage, window: Interval, cells: int, waits: Waits = NO_WAITS
) -> tuple[list[Piece], list[Piece]]:
    """Draw both lanes with `#`, `%` (event loop kept), `=` (hidden), `!` (wire), `~` (waiting) and `.` (idle)."""
    compute = _paint(window, cells, cover.kept, cover.compute)
    comm = _translated(_paint(window, cells, *_layers(cover)), b".=~!")
    return [(_translated(compute, b".%#"), "")], _named([(comm, "")], "~", waits, window, cells)


def ascii_row(cover: Coverage, window: Interval, cells: int) -> list[Piece]:
    """Draw one row: `#` compute alone, `=` both, `!` bytes on the wire, `~` waiting, `.` idle."""
    return [(_translated(_states(cover, window, cells), b".#?=~~!!"), "")]


def block_lanes(
    cover: Coverage, window: Interval, cells: int, waits: Waits = NO_WAITS, *, color: bool
) -> tuple[list[Piece], list[Piece]]:
    """Draw a compute and a communication lane with block characters; waits name their rank where it fits."""
    units = cells * _UNITS_PER_CELL
    compute = _paint(window, units, cover.kept, cover.compute)
    comm = _cells(_paint(window, units, *_layers(cover)), _comm_cell, color=color)
    return _cells(compute, _compute_cell, color=color), _named(comm, "░", waits, window, cells)


def stream_lane(
    active: Merged, cover: Coverage, window: Interval, cells: int, *, ascii: bool, color: bool
) -> list[Piece]:
    """Draw the communication of one stream: the part of `cover` in the intervals in which the stream was active."""
    layers = [intersect(layer, active) for layer in _layers(cover)]
    if ascii:
        return [(_translated(_paint(window, cells, *layers), b".=~!"), "")]
    return _cells(_paint(window, cells * _UNITS_PER_CELL, *layers), _comm_cell, color=color)


def _layers(cover: Coverage) -> tuple[Merged, Merged, Merged]:
    return cover.overlapped, cover.waiting, cover.wire


def _named(pieces: list[Piece], shade: str, waits: Waits, window: Interval, cells: int) -> list[Piece]:
    """Write the rank that is waited for into shaded runs, where it is mostly one and the run is long enough."""
    if not len(waits):
        return pieces
    low, length = window[0], max(window[1] - window[0], 1)
    named: list[Piece] = []
    offset = 0
    for text, style in pieces:
        for run in re.split(f"({shade}+)", text):
            if run.startswith(shade):
                first_ns, last_ns = (low + length * cell // cells for cell in (offset, offset + len(run)))
                run = _label(run, whom(waits, first_ns, last_ns))
            offset += len(run)
            named.append((run, style))
    return named


def whom(waits: Waits, first_ns: int, last_ns: int) -> int | None:
    """Return the rank that is waited for in at least half of the waiting between two instants."""
    shared_ns = np.minimum(waits[:, 1], last_ns) - np.maximum(waits[:, 0], first_ns)
    ranks, of = np.unique(waits[shared_ns > 0, 2], return_inverse=True)
    if not len(ranks):
        return None
    sums_ns = np.zeros(len(ranks), np.int64)
    np.add.at(sums_ns, of, shared_ns[shared_ns > 0])
    most = int(sums_ns.argmax())  # of several, the lowest rank
    return int(ranks[most]) if 2 * sums_ns[most] >= sums_ns.sum() else None


def _label(run: str, rank: int | None) -> str:
    for text in (f" waits for rank {rank} ", f" for {rank} ", f"{rank}"):
        if rank is not None and len(text) + 2 <= len(run):
            return text.center(len(run), run[0])
    return run


def block_row(cover: Coverage, window: Interval, cells: int, *, color: bool) -> list[Piece]:
    """Draw one row of half blocks: compute above, communication below."""
    table = _ROW_COLOR if color else _ROW_PLAIN
    return _joined([table[state] for state in _states(cover, window, cells)])


# Indexed by `_states`: compute alone is the upper half, bytes alone the lower, both in one cell by chance a diagonal.
_ROW_PLAIN: Sequence[Piece] = [(" ", ""), ("▀", ""), ("▄", ""), ("█", ""), ("░", ""), ("░", ""), ("▄", ""), ("▞", "")]
_ROW_COLOR: Sequence[Piece] = [
    (" ", ""),
    ("▀", COMPUTE),
    ("▄", HIDDEN),
    ("▀", f"{COMPUTE} on {HIDDEN}"),
    ("░", WAITING),
    ("░", WAITING),
    ("▄", EXPOSED),
    ("▞", f"{EXPOSED} on {COMPUTE}"),
]


def _states(cover: Coverage, window: Interval, cells: int) -> bytes:
    """One byte a cell: 1 if computing, plus 2 for hidden communication, 4 for waiting or 6 for bytes on the wire."""
    compute = _paint(window, cells, cover.compute)
    comm = _paint(window, cells, *_layers(cover))
    return bytes(busy + 2 * kind for busy, kind in zip(compute, comm, strict=True))


def _paint(window: Interval, units: int, *layers: Merged) -> bytes:
    """Return one byte per unit: the number (from 1) of the last layer that covers it, 0 where none does."""
    row = np.zeros(units, np.uint8)
    low, length = window[0], max(window[1] - window[0], 1)
    # from which instant on each unit is the nearest one; the product may have more than 64 bits
    edges_ns = np.array([low + -(-length * (2 * unit - 1) // (2 * units)) for unit in range(1, units + 1)], np.int64)
    for value, layer in enumerate(layers, 1):
        first = np.minimum(np.searchsorted(edges_ns, layer.start_ns, "right"), units - 1)
        last = np.maximum(np.searchsorted(edges_ns, layer.end_ns, "right"), first + 1)
        changes = np.bincount(first, minlength=units + 1) - np.bincount(last, minlength=units + 1)
        row[np.cumsum(changes[:units]) > 0] = value
    return row.tobytes()


def _translated(row: bytes, glyphs: bytes) -> str:
    return row.translate(glyphs.ljust(256)).decode("ascii")


def _cells(row: bytes, cell: Callable[[bytes, bool], Piece], *, color: bool) -> list[Piece]:
    starts = range(0, len(row), _UNITS_PER_CELL)
    return _joined([cell(row[at : at + _UNITS_PER_CELL], color) for at in starts])


def _joined(cells: Sequence[Piece]) -> list[Piece]:
    """Join neighbours of one style: few pieces print fast."""
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
    kept, busy = units.count(1), units.count(2)
    if kept > busy:
        return "▒", WAITING if color else ""
    return _solid(busy, COMPUTE, "", right=_leans_right(units, 2), color=color) if busy else (" ", "")


@cache
def _comm_cell(units: bytes, color: bool) -> Piece:
    hidden, waiting, exposed = units.count(1), units.count(2), units.count(3)
    if waiting > exposed:
        return "░", WAITING if color else ""
    if exposed:
        idle = _UNITS_PER_CELL - exposed - hidden - waiting
        rest = HIDDEN if hidden > idle + waiting else WAITING if waiting > idle + hidden else ""
        return _solid(exposed, EXPOSED, rest, right=_leans_right(units, 3), color=color)
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
    """A half-height bar over the left half, the right half, or both; a half with less than two units stays empty."""
    if min(left, right) >= 2:
        return "▄"
    return "▖" if left >= right else "▗"
