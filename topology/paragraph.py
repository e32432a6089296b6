"""Text in lines of a given width, broken at blanks; what is too long for a line of its own is broken after a slash."""

from __future__ import annotations

import re
from collections.abc import Iterator


def paragraph(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Return the lines; `first` begins the first of them, `rest` the others."""
    lines = [first]
    begin = len(first)
    for blank, piece in _pieces(text, width - max(len(first), len(rest))):
        glue = blank if len(lines[-1]) > begin else ""
        if glue + piece and len(lines[-1]) + len(glue + piece) > width and len(lines[-1]) > begin:
            lines.append(rest)
            begin, glue = len(rest), ""
        lines[-1] += glue + piece
    return lines


def _pieces(text: str, room: int) -> Iterator[tuple[str, str]]:
    """Yield what must stay together, each with what comes before it on the same line."""
    for word in text.split():
        blank = " "
        for piece in [word] if len(word) <= room else re.findall(r"[^/]*/|[^/]+", word):
            yield blank, piece
            blank = ""
