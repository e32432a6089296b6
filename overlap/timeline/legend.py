"""What the glyphs of a drawing mean."""

from __future__ import annotations

from .lanes import Piece
from .theme import COMPUTE, EXPOSED, HIDDEN, WAITING

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
_ROW_ASCII = [
    ("#", "", "compute"),
    ("=", "", "both"),
    ("~", "", "waiting for a rank"),
    ("!", "", "on the wire"),
    (".", "", "idle"),
]
_ROW_PLAIN = [
    ("▀", "", "compute"),
    ("█", "", "both"),
    ("░", "", "waiting for a rank"),
    ("▄", "", "on the wire"),
    ("▞", "", "compute, wire in turn"),
]
_ROW_COLOR = [
    ("▀", COMPUTE, "compute"),
    ("▀", f"{COMPUTE} on {HIDDEN}", "both"),
    ("░", WAITING, "waiting for a rank"),
    ("▄", EXPOSED, "on the wire"),
    ("▞", f"{EXPOSED} on {COMPUTE}", "compute, wire in turn"),
]


def legend(columns: int, *, two_lanes: bool, ascii: bool, color: bool) -> list[list[Piece]]:
    """Return glyphs and their meaning, on as many lines as they need."""
    if two_lanes:
        entries = _LANES_ASCII if ascii else _LANES_BLOCK
    else:
        entries = _ROW_ASCII if ascii else _ROW_COLOR if color else _ROW_PLAIN
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
