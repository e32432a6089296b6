"""Process groups of several ranks in one process, each used by a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from overlap import connect
from overlap.torch import ProcessGroup

__all__ = ["Ranks", "ranks"]


class Ranks:
    """The process groups of all ranks of one world."""

    def __init__(self, groups: list[ProcessGroup]) -> None:
        self.groups = groups

    def do(self, function: Callable[[ProcessGroup], Any]) -> list[Any]:
        """Return what `function(group)` returns, or the error that it raises, for each rank."""
        found: list[Any] = [None] * len(self.groups)

        def one(index: int) -> None:
            try:
                found[index] = function(self.groups[index])
            except Exception as error:
                found[index] = error

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(self.groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


@contextmanager
def ranks(size: int = 2, timeout_s: float = 30) -> Iterator[Ranks]:
    """Connect ranks, and let them leave together."""
    store, worlds = dist.HashStore(), [None] * size

    def join(rank: int) -> None:
        worlds[rank] = connect(rank, size, store=store)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    limit = timedelta(seconds=timeout_s)
    made = [ProcessGroup(store, world.rank.world, limit, leave=world.close, abort=_never) for world in worlds]
    try:
        yield Ranks(made)
    finally:
        Ranks(made).do(ProcessGroup.shutdown)


def _never() -> None:
    raise AssertionError("nobody aborts these")
