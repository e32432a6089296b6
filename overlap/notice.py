"""Lines for the user on stderr. Errors in writing to stderr are ignored."""

from __future__ import annotations

import sys
from contextlib import suppress

from .errors import escape_control_characters

NO_MEMORY = "out of memory: allow each process more (ulimit -v), or start fewer ranks"


def notify(text: str) -> None:
    """Print a message of overlap to stderr, after "overlap: "; control characters are escaped, newlines kept."""
    write_stderr("\n".join(map(escape_control_characters, f"overlap: {text}".split("\n"))) + "\n")


def write_stderr(text: str) -> None:
    """Write to stderr, unless it is closed or full."""
    if sys.stderr is not None:  # None: the shell has closed it
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
