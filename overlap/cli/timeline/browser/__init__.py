"""`overlap timeline -i FILE`: a timeline to scroll, zoom, search and look at, in the terminal.

`track` has one run as rows of lanes, and describes its spans; `cursor` has the place that the user looks at; neither
knows a terminal. `app` draws them and reads keys, with textual, an optional extra.
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
    """Check that there is a terminal, and that textual is installed.

    Raises:
        UsageError: Stdin or stdout is no terminal, or the extra is not installed.
    """
    for name, stream in (("stdout", sys.stdout), ("stdin", sys.stdin)):
        if not stream.isatty():
            raise UsageError(f"-i: {name} is no terminal; leave -i out, or write a page with --html")
    if find_spec("textual") is None:
        raise UsageError(f"-i: textual is not installed: {install_command('interactive')}")


def browse(tracks: Sequence[Track], *, window_ns: tuple[int, int] | None, ascii: bool) -> None:
    """Show runs above each other until the user leaves.

    Args:
        tracks: One or two runs.
        window_ns: The window to show first, counted from the origin of the tracks; None for all.
        ascii: Draw with plain characters only.
    """
    from .app import TimelineApp

    TimelineApp(tracks, window_ns=window_ns, ascii=ascii).run()
