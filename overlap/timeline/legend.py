"""What the glyphs of a drawing mean."""

from __future__ import annotations

from .lanes import COMPUTE, EXPOSED, HIDDEN, Piece

_LANES_BLOCK = [("█", COMPUTE, "compute"), ("▄", HIDDEN, "hidden comm"), ("█", EXPOSED, "exposed comm")]
_LANES_ASCII = [("#", "", "compute"), ("=", "", "hidden comm"), ("!", "", "exposed comm"), (".", "", "idle")]
_ROW_ASCII = [("#", "", "compute"), ("=", "", "both"), ("!", "", "exposed comm"), (".", "", "idle")]
_ROW_PLAIN = [("▀", "", "compute"), ("█", "", "both"), ("▄", "", "exposed comm"), ("▞", "", "compute, exposed in turn")]
_ROW_COLOR = [
    ("▀", COMPUTE, "compute"),
    ("▀", f"{COMPUTE} on {HIDDEN}", "both"),
    ("▄", EXPOSED, "exposed comm"),
    ("▞", f"{EXPOSED} on {COMPUTE}", "compute, exposed in turn"),
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
