"""The standard streams of a command, whatever the shell has made of them."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_MODES = {0: ("stdin", "r"), 1: ("stdout", "w"), 2: ("stderr", "w")}


def open_missing() -> None:
    """Open the standard streams that the shell has closed onto nothing, as `print` already takes them.

    Left closed, their numbers would go to the next pipe or socket that somebody opens, and output into it.
    """
    for descriptor, (name, mode) in _MODES.items():
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - stays open  # noqa: SIM115 - stays open


def discard(stream: TextIO) -> None:
    """Let what is still buffered go nowhere, or the interpreter complains about it as it ends."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
