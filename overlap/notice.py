"""Lines for the user on stderr. That nobody can be told is no failure of what was to be told."""

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
