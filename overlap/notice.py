"""Lines for the user on stderr. A stderr that cannot be written is no failure of the program."""

from __future__ import annotations

import sys
from contextlib import suppress

from .errors import printable


def notify(text: str) -> None:
    """Tell the user something that is not the program's output, in one line or several."""
    say("\n".join(map(printable, f"overlap: {text}".split("\n"))) + "\n")


def say(text: str) -> None:
    """Write to stderr, unless it is closed, full, or nobody reads it."""
    if sys.stderr is not None:  # as it is where the shell has closed it
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
