"""What becomes of connections in a process that is forked from one that has some: they are not its own."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["Forkable", "keep"]


class Forkable(Protocol):
    """What does not survive in a fork."""

    def forked(self) -> None:
        """Take note that this process is a fork: the thread that does the work is not here."""


_kept: WeakSet[Forkable] = WeakSet()


def keep(one: Forkable) -> None:
    """Tell it, in any process that is forked from this one."""
    _kept.add(one)


def _in_child() -> None:
    for each in list(_kept):
        each.forked()
    _kept.clear()


os.register_at_fork(after_in_child=_in_child)
