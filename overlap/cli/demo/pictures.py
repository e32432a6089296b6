"""What every demo draws: two programs one above the other on one time axis, by the rules of `overlap timeline`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import wrap

from rich.text import Text

from ...timeline import TimelineView

ROWS = 2
"""Of each picture: with two pictures, the figures and the verdict fit in 24 lines."""

# Of places in the program, which is the demo's own: wherever it is installed.
_FOLDERS = re.compile(r"[^\s(]*/(?=[^/\s]+\.py:\d)")


def pictures(*titled: tuple[str, TimelineView], ranks: int, width: int, ascii: bool, color: bool) -> Iterator[Text]:
    """Draw each under its title, with one ruler and one legend for all.

    The titles say how rows were chosen: as `timeline.folding` does.
    """
    length_ns, label = max(view.length_ns for _, view in titled), len(f"{ranks} like {ranks}")
    for title, view in titled:
        lines = view.lines(width=width, ascii=ascii, color=color, length_ns=length_ns, label=label)
        above = lines[: lines.index([])]  # below the blank line is a table; the demos have their own
        last = max(at for at, line in enumerate(above) if _is_lane(line))
        below = above[last + 1 :] if view is titled[-1][1] else []
        told = f"{title}: {ranks} ranks; most waited for first, alike in one row"
        yield Text(told, style="bold" if color else "", no_wrap=True, overflow="crop")
        for line in [*filter(_is_lane, above), *below]:
            yield Text.assemble(*line, no_wrap=True, overflow="crop")


def _is_lane(line: list[tuple[str, str]]) -> bool:
    return line[-1][0] in ("│", "|")


def verdict(view: TimelineView, *, width: int, what: str = "whole run") -> str:
    """Return what the program with overlap comes to, in lines of that width: at most four of 80 columns.

    Where the view is of no step, `what` says of what it is.
    """
    told = _FOLDERS.sub("", view.verdict.told(named=1)).replace("whole run", what, 1)
    return "\n".join(wrap(f"with overlap, {told}", width, break_on_hyphens=False))
