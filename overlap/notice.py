"""Lines for the user on stderr. A stderr that cannot be written is no failure of the program."""

from __future__ import annotations

import sys
from contextlib import suppress

from .errors import printable

NO_MEMORY = "out of memory: allow each process more (ulimit -v), or start fewer ranks"


def notify(text: str) -> None:
    """Print a message for the user that is no output of the program, in one line or several."""
    write_stderr("\n".join(map(printable, f"overlap: {text}".split("\n"))) + "\n")


def write_stderr(text: str) -> None:
    """Write to stderr, unless it is closed or full."""
    if sys.stderr is not None:  # as it is where the shell has closed it
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
