"""Streams: FIFO lanes of one rank, worked on a window at a time.

Why priorities cannot deadlock: operations are matched by (group, stream, sequence number), never by arrival. A stream
works on its first `window` unfinished operations in issue order, which is the same order on every rank. Everything in
the window may receive; priority only orders what is sent next. So the oldest unfinished operation is active on all
ranks and always moves, whatever timing and priorities choose.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .future import Future

if TYPE_CHECKING:
    from .operation import CollectiveFuture
    from .rank import Rank

__all__ = ["DEFAULT_WINDOW", "Stream"]

DEFAULT_WINDOW = 8


class Stream:
    """A communication stream of one rank: the lane its CC-cores work on.

    Make one with `rank.stream(name)` and pass it as `stream=`. Streams overlap each other; within a stream at most
    `window` operations are in flight, which bounds the memory they hold. A window of 1 is strict FIFO.

    Attributes:
        name: Also its lane in the timeline; the same on every rank.
        priority: Added to the priority of each of its operations; lower is more urgent.
        window: How many unfinished operations may be in flight at once.
        rank: The rank it belongs to.
    """

    __slots__ = ("_active", "_waiting", "name", "priority", "rank", "window")

    def __init__(self, rank: Rank, name: str, *, priority: int = 0, window: int = DEFAULT_WINDOW) -> None:
        if window < 1:
            raise UsageError(f"window: must be at least 1, got {window}")
        self.rank, self.name, self.priority, self.window = rank, name, priority, window
        self._active = 0
        self._waiting: deque[CollectiveFuture[object]] = deque()

    def __repr__(self) -> str:
        return f"<Stream '{self.name}' of rank {self.rank.rank}: {self._active} in flight, {len(self._waiting)} queued>"

    def enqueue(self, operation: CollectiveFuture[Any]) -> None:
        """Start `operation` now if the window has room, else when its turn comes."""
        self.rank._unfinished[operation] = None
        if self._active < self.window:
            self._active += 1
            if isinstance(operation.input, Future):
                operation.activate()
            else:  # what `activate` does, without the call: short latencies count here
                operation.active = True
                operation.port.channel.arrive(operation)
        else:
            operation.lend()
            self._waiting.append(operation)

    def finished(self, operation: CollectiveFuture[object]) -> None:
        """Take note that `operation` ended, and start the next one that waits for room."""
        rank = self.rank
        del rank._unfinished[operation]
        if rank._draining is not None or operation._failure is not None:
            rank._note_end(operation)
        waiting = self._waiting
        if not operation.active:  # it failed before its turn came
            waiting.remove(operation)
        elif waiting:
            rank._world.soon(waiting.popleft().activate_late)
        else:
            self._active -= 1
