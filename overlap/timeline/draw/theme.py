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
# By 1 if computing, plus 2 for hidden communication, 4 for waiting or 6 for moving bytes: compute alone is the upper
# half, bytes alone the lower, both by chance in one cell a diagonal.
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
    """Return the eight glyphs of a row of half blocks, each with its style."""
    return _ROW_ASCII if ascii else _ROW_COLOR if color else _ROW_PLAIN


def legend_lines(columns: int, *, two_lanes: bool, ascii: bool, color: bool, kept: bool) -> list[list[Piece]]:
    """Return glyphs and their meaning, on as many lines as they need; `kept`: whether an event loop was kept."""
    if two_lanes:
        entries = _LANES_ASCII if ascii else _LANES_BLOCK
        if kept:
            entries = [entries[0], ("%" if ascii else "▒", WAITING, "event loop kept"), *entries[1:]]
    else:
        glyphs = row_glyphs(ascii=ascii, color=color)
        last = (*glyphs[0], "idle") if ascii else (*glyphs[7], "compute, wire in turn")
        entries = [*((*glyphs[at], meaning) for at, meaning in _ROW_MEANINGS.items()), last]
    lines: list[list[Piece]] = [[]]
    used = 0
    for glyph, style, meaning in entries:
        gap = "  " if lines[-1] else ""
        if used + len(f"{gap}{glyph} {meaning}") > columns:
            lines.append([])
            gap, used = "", 0
        lines[-1] += [(gap, ""), (glyph, style if color else ""), (f" {meaning}", "")]
        used += len(f"{gap}{glyph} {meaning}")
    return lines
