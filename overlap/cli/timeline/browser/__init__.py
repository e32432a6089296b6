"""`overlap timeline -i FILE`: a timeline to scroll, zoom, search and look at, in the terminal.

`track` is one run as rows, `cursor` the place that is looked at and how it moves, `details` what is said of a span;
none of them knows a terminal. `app` draws them and reads keys, with textual, an optional extra.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from ....errors import UsageError
from ....version import install_command
from .track import Track

__all__ = ["browse", "check_terminal"]


def check_terminal() -> None:
    """Refuse to begin where nobody could look at it, or textual is missing.

    Raises:
        UsageError: If stdin or stdout is no terminal, or the extra is not installed.
    """
    for name, stream in (("stdout", sys.stdout), ("stdin", sys.stdin)):
        if not stream.isatty():
            raise UsageError(f"-i: {name} is no terminal; leave -i out, or write a page with --html")
    if find_spec("textual") is None:
        raise UsageError(f"-i: textual is not installed: {install_command('interactive')}")


def browse(tracks: Sequence[Track], *, window_ns: tuple[int, int] | None, ascii: bool) -> None:
    """Show runs above each other until the user leaves.

    Args:
        tracks: One or two.
        window_ns: What to show first, counted from where the tracks begin; None for all.
        ascii: Draw with plain characters only.
    """
    from .app import TimelineApp

    TimelineApp(tracks, window_ns=window_ns, ascii=ascii).run()
