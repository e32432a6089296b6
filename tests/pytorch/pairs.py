"""Process groups of several ranks in one process, each used by a thread of its own."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from overlap import Connection, connect
from overlap.torch import ProcessGroup


class Ranks:
    """The process groups of all ranks of one world."""

    def __init__(self, groups: list[ProcessGroup]) -> None:
        self.groups = groups

    def do(self, function: Callable[[ProcessGroup], Any]) -> list[Any]:
        """Return what `function(group)` returns, or the error that it raises, for each rank."""
        return do([partial(function, group) for group in self.groups])


def do(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call each function in a thread of its own; return what they return, or the errors that they raise."""
    found: list[Any] = [None] * len(functions)

    def one(index: int) -> None:
        try:
            found[index] = functions[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@contextmanager
def connected(size: int, store: Any) -> Iterator[list[Connection]]:
    """Connect ranks, and let them leave together."""
    worlds = do([partial(connect, rank, size, store=store) for rank in range(size)])
    try:
        yield worlds
    finally:
        do([world.close for world in worlds])


@contextmanager
def ranks(size: int = 2, timeout_s: float = 30) -> Iterator[Ranks]:
    """Let process groups stand on connections."""
    store, limit = dist.HashStore(), timedelta(seconds=timeout_s)
    with connected(size, store) as worlds:
        yield Ranks([ProcessGroup(store, each.rank.world, limit, leave=_never, abort=_never) for each in worlds])


def _never() -> None:
    raise AssertionError("nobody leaves or aborts these")
