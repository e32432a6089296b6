"""Palette and glyphs of all drawings of the command, and their legend.

Okabe-Ito colours: told apart with any colour vision, and by luminance in grey (compute 0.15, hidden communication 0.42,
bytes on the wire 0.21, waiting 0.32). Nothing depends on colour alone: each kind has a glyph of its own, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Piece: TypeAlias = tuple[str, str]
"""Text, and its style in rich's notation ("" for none)."""


COMPUTE = "#0072B2"
HIDDEN = "#E69F00"
"""Communication under compute, whether it moves bytes or waits."""
EXPOSED = "#D55E00"
"""Bytes on the wire, and no compute."""
WAITING = "#CC79A7"
"""Waiting for a rank, and no compute."""


_LANES_BLOCK = [
    ("█", COMPUTE, "compute"),
    ("▄", HIDDEN, "hidden comm"),
    ("░", WAITING, "waiting for a rank"),
    ("█", EXPOSED, "on the wire"),
]
_LANES_ASCII = [
    ("#", "", "compute"),
    ("=", "", "hidden comm"),
    ("~", "", "waiting for a rank"),
    ("!", "", "on the wire"),
    (".", "", "idle"),
]
# Index of a glyph: 1 if computing, plus 2 for hidden communication, 4 for waiting or 6 for moving bytes. Compute alone
# is the upper half, bytes alone the lower; a cell with one after the other has a diagonal.
_ROW_ASCII: Sequence[Piece] = [(glyph, "") for glyph in ".#?=~~!!"]
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
_ROW_MEANINGS = {1: "compute", 3: "both", 4: "waiting for a rank", 6: "on the wire"}


def row_glyphs(*, ascii: bool, color: bool) -> Sequence[Piece]:
    """Return the eight glyphs of a row of half blocks, each with its style; see `_ROW_ASCII` for the index."""
    return _ROW_ASCII if ascii else _ROW_COLOR if color else _ROW_PLAIN


def legend_lines(columns: int, *, two_lanes: bool, ascii: bool, color: bool, kept: bool) -> list[list[Piece]]:
    """Return the legend of a drawing: each glyph with its meaning, on as many lines as needed.

    Args:
        columns: Width of a line in characters.
        two_lanes: Whether each row of the drawing has two lanes; otherwise rows are of half blocks.
        ascii: Whether the drawing is in ASCII.
        color: Whether the drawing has colours.
        kept: Whether a program kept an event loop busy: then the legend has an entry for that.
    """
    if two_lanes:
        compute, *others = _LANES_ASCII if ascii else _LANES_BLOCK
        kept_entry = [("%" if ascii else "▒", WAITING, "event loop kept")] if kept else []
        entries = [compute, *kept_entry, *others]
    else:
        glyphs = row_glyphs(ascii=ascii, color=color)
        idle, *_, in_turn = glyphs
        last = (*idle, "idle") if ascii else (*in_turn, "compute, wire in turn")
        entries = [*((*glyphs[at], meaning) for at, meaning in _ROW_MEANINGS.items()), last]
    lines: list[list[Piece]] = [[]]
    for glyph, style, meaning in entries:
        gap = "  " if lines[-1] else ""
        used = sum(len(text) for text, _ in lines[-1])
        if used + len(f"{gap}{glyph} {meaning}") > columns:
            lines.append([])
            gap = ""
        lines[-1] += [(gap, ""), (glyph, style if color else ""), (f" {meaning}", "")]
    return lines
