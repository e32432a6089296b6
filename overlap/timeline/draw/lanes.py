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
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..measure.activity import COMPUTE as COMPUTING
from ..measure.activity import PROGRAM, WIRE, Activity
from ..measure.activity import WAITING as WAITS
from ..measure.intervals import Interval, Merged, intersect
from ..measure.steps import RankWindow
from .theme import COMPUTE, EXPOSED, HIDDEN, WAITING, Piece, row_glyphs

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_UNITS_PER_CELL = 8
# Layers of a lane, by their numbers in a row of units; 0 is none of them.
_KEPT, _COMPUTES = 1, 2
_IS_HIDDEN, _WAITS, _MOVES = 1, 2, 3


Waits: TypeAlias = NDArray[np.int64]
"""A row for each wait: its start, its end, and the rank that was waited for."""

NO_WAITS: Waits = np.zeros((0, 3), np.int64)


@dataclass(frozen=True, slots=True)
class Canvas:
    """The drawn window of time, and the cells and the style in which lanes are drawn."""

    window: Interval
    cells: int
    ascii: bool = False
    color: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The merged intervals of one rank inside its window that are drawn."""

    window: Interval
    compute: Merged
    kept: Merged  # Where a program kept the event loop, and the rank did not compute
    hidden: Merged  # Where an operation is active while the rank computes
    waiting: Merged  # Where communication is exposed and no bytes move
    wire: Merged  # Where communication is exposed and bytes move


def coverage(activity: Activity, window: RankWindow) -> Coverage:
    """Return the intervals of one of the windows of an activity."""
    compute, kept, waiting, wire = (
        activity.cover(window, activity.doing == doing) for doing in (COMPUTING, PROGRAM, WAITS, WIRE)
    )
    hidden = activity.cover(window, activity.is_hidden)
    return Coverage(
        window=(window.start_ns, window.end_ns), compute=compute, kept=kept, hidden=hidden, waiting=waiting, wire=wire
    )  # fmt: skip


def draw_lanes(cover: Coverage, canvas: Canvas, waits: Waits = NO_WAITS) -> tuple[list[Piece], list[Piece]]:
    """Draw a compute and a communication lane; waits name their rank where it fits.

    In ASCII, `#` is compute, `%` a kept event loop, `=` hidden, `!` wire, `~` waiting and `.` idle.
    """
    compute = _draw_lane((cover.kept, cover.compute), canvas, b".%#", _compute_cell)
    return compute, _label_waits(_draw_lane(_comm_layers(cover), canvas, b".=~!", _comm_cell), waits, canvas)


def stream_lane(active: Merged, cover: Coverage, canvas: Canvas) -> list[Piece]:
    """Draw the communication of one stream: the part of `cover` in the intervals in which the stream was active."""
    return _draw_lane([intersect(layer, active) for layer in _comm_layers(cover)], canvas, b".=~!", _comm_cell)


def draw_row(cover: Coverage, canvas: Canvas) -> list[Piece]:
    """Draw one row of half blocks: compute above, communication below; in ASCII, `=` is both."""
    compute = _paint_units(canvas.window, canvas.cells, cover.compute)
    comm = _paint_units(canvas.window, canvas.cells, *_comm_layers(cover))
    table = row_glyphs(ascii=canvas.ascii, color=canvas.color)
    return _join_styles([table[busy + 2 * kind] for busy, kind in zip(compute, comm, strict=True)])


def _comm_layers(cover: Coverage) -> tuple[Merged, Merged, Merged]:
    """Return hidden, waiting and moving communication, in the order in which later ones cover earlier ones."""
    return cover.hidden, cover.waiting, cover.wire


def _label_waits(pieces: list[Piece], waits: Waits, canvas: Canvas) -> list[Piece]:
    """Write the awaited rank into each shaded run that is long enough, if one rank has half of the waiting there."""
    if not len(waits):
        return pieces
    shade = "~" if canvas.ascii else "░"
    low, length = canvas.window[0], max(canvas.window[1] - canvas.window[0], 1)
    named: list[Piece] = []
    offset = 0
    for text, style in pieces:
        for run in re.split(f"({shade}+)", text):
            if run.startswith(shade):
                first_ns, last_ns = (low + length * cell // canvas.cells for cell in (offset, offset + len(run)))
                run = _label_run(run, awaited_rank(waits, first_ns, last_ns))
            offset += len(run)
            named.append((run, style))
    return named


def awaited_rank(waits: Waits, first_ns: int, last_ns: int) -> int | None:
    """Return the rank that at least half of the waiting between two instants is for; None without such a rank."""
    shared_ns = np.minimum(waits[:, 1], last_ns) - np.maximum(waits[:, 0], first_ns)
    ranks, rank_index = np.unique(waits[shared_ns > 0, 2], return_inverse=True)
    if not len(ranks):
        return None
    sums_ns = np.zeros(len(ranks), np.int64)
    np.add.at(sums_ns, rank_index, shared_ns[shared_ns > 0])
    most = int(sums_ns.argmax())  # of several, the lowest rank
    return int(ranks[most]) if 2 * sums_ns[most] >= sums_ns.sum() else None


def _label_run(run: str, rank: int | None) -> str:
    """Return a shaded run with the longest label of a rank that fits, or unchanged if none fits or `rank` is None."""
    for text in (f" waits for rank {rank} ", f" for {rank} ", f"{rank}"):
        if rank is not None and len(text) + 2 <= len(run):
            return text.center(len(run), run[0])
    return run


def _paint_units(window: Interval, units: int, *layers: Merged) -> bytes:
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


def _draw_lane(
    layers: Sequence[Merged], canvas: Canvas, glyphs: bytes, cell: Callable[[bytes, bool], Piece]
) -> list[Piece]:  # fmt: skip
    """Return a lane: in ASCII, `glyphs` has the character of each layer; else `cell` draws each cell from its units."""
    if canvas.ascii:
        return [(_paint_units(canvas.window, canvas.cells, *layers).translate(glyphs.ljust(256)).decode("ascii"), "")]
    row = _paint_units(canvas.window, canvas.cells * _UNITS_PER_CELL, *layers)
    starts = range(0, len(row), _UNITS_PER_CELL)
    return _join_styles([cell(row[at : at + _UNITS_PER_CELL], canvas.color) for at in starts])


def _join_styles(cells: Sequence[Piece]) -> list[Piece]:
    """Join neighbouring cells of one style into one piece: few pieces print fast."""
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
    """Return a cell of a compute lane from its units: shaded if most are of a kept loop, or else a bar of computes."""
    kept, busy = units.count(_KEPT), units.count(_COMPUTES)
    if kept > busy:
        return "▒", WAITING if color else ""
    return _full_bar(busy, COMPUTE, "", right=_leans_right(units, _COMPUTES), color=color) if busy else (" ", "")


@cache
def _comm_cell(units: bytes, color: bool) -> Piece:
    """Return a cell of a communication lane: waiting if that exceeds moving, else moving if any, else hidden."""
    hidden, waiting, exposed = units.count(_IS_HIDDEN), units.count(_WAITS), units.count(_MOVES)
    if waiting > exposed:
        return "░", WAITING if color else ""
    if exposed:
        idle = _UNITS_PER_CELL - exposed - hidden - waiting
        rest = HIDDEN if hidden > idle + waiting else WAITING if waiting > idle + hidden else ""
        return _full_bar(exposed, EXPOSED, rest, right=_leans_right(units, _MOVES), color=color)
    halves = (half.count(_IS_HIDDEN) for half in (units[: _UNITS_PER_CELL // 2], units[_UNITS_PER_CELL // 2 :]))
    return (_half_bar(*halves), HIDDEN if color else "") if hidden else (" ", "")


def _leans_right(units: bytes, value: int) -> bool:
    """Whether the right half of a cell has more units of a value than the left half."""
    half = len(units) // 2
    return units[half:].count(value) > units[:half].count(value)


def _full_bar(eighths: int, ink: str, rest: str, *, right: bool, color: bool) -> Piece:
    """Return a full-height bar of some eighths of a cell, from the left or the right; `rest` colours what is left."""
    if eighths == _UNITS_PER_CELL:
        return "█", ink if color else ""
    if not color:
        return (("▐" if eighths > 2 else "▕") if right else _EIGHTHS[eighths]), ""
    if not right:
        return _EIGHTHS[eighths], f"{ink} on {rest}" if rest else ink
    # There are no right-anchored eighths: draw the rest from the left and swap the two colours.
    return _EIGHTHS[8 - eighths], f"{rest} on {ink}" if rest else f"reverse {ink}"


def _half_bar(left: int, right: int) -> str:
    """Return a half-height bar over the left half, the right half, or both if each has two units or more."""
    if min(left, right) >= 2:
        return "▄"
    return "▖" if left >= right else "▗"
