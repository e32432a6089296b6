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

from ..columnar import sum_by_index
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
    """The drawn window of time, and the width and style of the lanes."""

    window: Interval  # First and last instant
    cells: int  # Width of a lane in characters
    ascii: bool = False
    color: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What is drawn of one rank: merged intervals of each activity inside its window."""

    window: Interval
    compute: Merged
    kept: Merged  # Where a program kept the event loop, and the rank did not compute
    hidden: Merged  # Where an operation is active while the rank computes
    waiting: Merged  # Where communication is exposed and no bytes move
    wire: Merged  # Where communication is exposed and bytes move


def find_coverage(activity: Activity, window: RankWindow) -> Coverage:
    """Return what is drawn of a rank, from the activity of all ranks and the rank's window, which is one of its own."""
    compute, kept, waiting, wire = (
        activity.instants_in(window, activity.doing == doing) for doing in (COMPUTING, PROGRAM, WAITS, WIRE)
    )
    hidden = activity.instants_in(window, activity.is_hidden)
    return Coverage(
        window=(window.start_ns, window.end_ns), compute=compute, kept=kept, hidden=hidden, waiting=waiting, wire=wire
    )  # fmt: skip


def draw_lanes(cover: Coverage, canvas: Canvas, waits: Waits = NO_WAITS) -> tuple[list[Piece], list[Piece]]:
    """Return the compute lane and the communication lane of a rank, each as pieces of text with a style.

    In ASCII, `#` is compute, `%` a kept event loop, `=` hidden, `!` wire, `~` waiting and `.` idle.

    Args:
        cover: What the rank did.
        canvas: The window, width and style.
        waits: Waits of the rank. A drawn wait is labelled with the awaited rank if there is room.
    """
    compute = _draw_lane((cover.kept, cover.compute), canvas, b".%#", _compute_cell)
    return compute, _label_waits(_draw_lane(_comm_layers(cover), canvas, b".=~!", _comm_cell), waits, canvas)


def draw_stream_lane(active: Merged, cover: Coverage, canvas: Canvas) -> list[Piece]:
    """Return the lane of one stream: the rank's communication in the intervals in which the stream was active.

    Args:
        active: Intervals in which the stream was active.
        cover: What the rank did.
        canvas: The window, width and style.
    """
    return _draw_lane([intersect(layer, active) for layer in _comm_layers(cover)], canvas, b".=~!", _comm_cell)


def draw_half_block_row(cover: Coverage, canvas: Canvas) -> list[Piece]:
    """Return one row of half blocks: compute above, communication below; in ASCII, `=` is both."""
    compute = _paint_units(canvas.window, canvas.cells, cover.compute)
    comm = _paint_units(canvas.window, canvas.cells, *_comm_layers(cover))
    # Index of a glyph: 1 if computing, plus 2 for hidden communication, 4 for waiting or 6 for moving bytes.
    table = row_glyphs(ascii=canvas.ascii, color=canvas.color)
    return _join_equal_styles([table[busy + 2 * kind] for busy, kind in zip(compute, comm, strict=True)])


def _comm_layers(cover: Coverage) -> tuple[Merged, Merged, Merged]:
    """Return hidden, waiting and moving communication: later layers are drawn over earlier ones."""
    return cover.hidden, cover.waiting, cover.wire


def _label_waits(pieces: list[Piece], waits: Waits, canvas: Canvas) -> list[Piece]:
    """Write the awaited rank into each drawn wait that has room, if at least half of the waiting there is for it."""
    if not len(waits):
        return pieces
    shade = "~" if canvas.ascii else "░"
    low, length = canvas.window[0], max(canvas.window[1] - canvas.window[0], 1)
    named: list[Piece] = []
    offset = 0
    for text, style in pieces:
        # The brackets in the pattern keep the shaded runs in the result of `split`.
        for run in re.split(f"({shade}+)", text):
            if run.startswith(shade):
                first_ns, last_ns = (low + length * cell // canvas.cells for cell in (offset, offset + len(run)))
                run = _label_shaded_run(run, mostly_awaited_rank(waits, first_ns, last_ns))
            offset += len(run)
            named.append((run, style))
    return named


def mostly_awaited_rank(waits: Waits, first_ns: int, last_ns: int) -> int | None:
    """Return the rank for which at least half of the waiting between two instants is, or None without such a rank.

    Args:
        waits: Rows of (start, end, awaited rank).
        first_ns: The first instant.
        last_ns: The last instant.
    """
    shared_ns = np.minimum(waits[:, 1], last_ns) - np.maximum(waits[:, 0], first_ns)
    ranks, rank_index = np.unique(waits[shared_ns > 0, 2], return_inverse=True)
    if not len(ranks):
        return None
    sums_ns = sum_by_index(rank_index, shared_ns[shared_ns > 0], len(ranks))
    most = int(sums_ns.argmax())  # of several, the lowest rank
    return int(ranks[most]) if 2 * sums_ns[most] >= sums_ns.sum() else None


def _label_shaded_run(run: str, rank: int | None) -> str:
    """Return a shaded run with the longest label that fits, such as "░ for 3 ░"; unchanged if `rank` is None."""
    for text in (f" waits for rank {rank} ", f" for {rank} ", f"{rank}"):
        if rank is not None and len(text) + 2 <= len(run):
            return text.center(len(run), run[0])
    return run


def _paint_units(window: Interval, units: int, *layers: Merged) -> bytes:
    """Divide a window into units, and return one byte for each: the number of the last layer that covers it, or 0.

    Layers are numbered from 1.
    """
    row = np.zeros(units, np.uint8)
    low, length = window[0], max(window[1] - window[0], 1)
    # The middle of each unit; computed with Python's integers, as products may have more than 64 bits.
    edges_ns = np.array([low + -(-length * (2 * unit - 1) // (2 * units)) for unit in range(1, units + 1)], np.int64)
    for value, layer in enumerate(layers, 1):
        first = np.minimum(np.searchsorted(edges_ns, layer.start_ns, "right"), units - 1)
        last = np.maximum(np.searchsorted(edges_ns, layer.end_ns, "right"), first + 1)
        # +1 where an interval begins, -1 where it ends: the running sum is the number of intervals over each unit.
        changes = np.bincount(first, minlength=units + 1) - np.bincount(last, minlength=units + 1)
        row[np.cumsum(changes[:units]) > 0] = value
    return row.tobytes()


def _draw_lane(
    layers: Sequence[Merged], canvas: Canvas, glyphs: bytes, cell: Callable[[bytes, bool], Piece]
) -> list[Piece]:  # fmt: skip
    """Return a lane of layers, later ones over earlier ones. `glyphs` are for ASCII: for no layer, then for each.

    Otherwise `cell` makes a character from the layers of its eight units, and whether it has a colour.
    """
    if canvas.ascii:
        # `translate` needs a table of 256 bytes; only the first few are used.
        return [(_paint_units(canvas.window, canvas.cells, *layers).translate(glyphs.ljust(256)).decode("ascii"), "")]
    row = _paint_units(canvas.window, canvas.cells * _UNITS_PER_CELL, *layers)
    starts = range(0, len(row), _UNITS_PER_CELL)
    return _join_equal_styles([cell(row[at : at + _UNITS_PER_CELL], canvas.color) for at in starts])


def _join_equal_styles(cells: Sequence[Piece]) -> list[Piece]:
    """Join neighbouring cells of one style into one piece, as few pieces print faster."""
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
    """Return a cell of a compute lane: shaded if more units have a kept event loop than computes, otherwise a bar."""
    kept, busy = units.count(_KEPT), units.count(_COMPUTES)
    if kept > busy:
        return "▒", WAITING if color else ""
    return _full_height_bar(busy, COMPUTE, "", right=_leans_right(units, _COMPUTES), color=color) if busy else (" ", "")


@cache
def _comm_cell(units: bytes, color: bool) -> Piece:
    """Return a cell of a communication lane: waiting if that exceeds moving, else moving if any, else hidden."""
    hidden, waiting, exposed = units.count(_IS_HIDDEN), units.count(_WAITS), units.count(_MOVES)
    if waiting > exposed:
        return "░", WAITING if color else ""
    if exposed:
        idle = _UNITS_PER_CELL - exposed - hidden - waiting
        rest = HIDDEN if hidden > idle + waiting else ""
        rest = WAITING if waiting > idle + hidden else rest
        return _full_height_bar(exposed, EXPOSED, rest, right=_leans_right(units, _MOVES), color=color)
    halves = (half.count(_IS_HIDDEN) for half in (units[: _UNITS_PER_CELL // 2], units[_UNITS_PER_CELL // 2 :]))
    return (_half_height_bar(*halves), HIDDEN if color else "") if hidden else (" ", "")


def _leans_right(units: bytes, value: int) -> bool:
    """Whether the right half of a cell has more units of a value than the left half."""
    half = len(units) // 2
    return units[half:].count(value) > units[:half].count(value)


def _full_height_bar(eighths: int, ink: str, rest: str, *, right: bool, color: bool) -> Piece:
    """Return a cell with a full-height bar of `eighths` at its left or right edge; `rest` colours the other part.

    Without colours, a bar at the right is a half or an eighth wide.
    """
    if eighths == _UNITS_PER_CELL:
        return "█", ink if color else ""
    if not color:
        right_bar = "▐" if eighths > 2 else "▕"
        return (right_bar if right else _EIGHTHS[eighths]), ""
    if not right:
        return _EIGHTHS[eighths], f"{ink} on {rest}" if rest else ink
    # Unicode has no bars of eighths at the right edge: draw the rest from the left, and swap the two colours.
    return _EIGHTHS[8 - eighths], f"{rest} on {ink}" if rest else f"reverse {ink}"


def _half_height_bar(left: int, right: int) -> str:
    """Return a half-height bar over the half with more of its four units, or over both if each has two or more."""
    if min(left, right) >= 2:
        return "▄"
    return "▖" if left >= right else "▗"
