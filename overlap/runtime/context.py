"""What operations, streams and engines need of the rank they work for and of its world: nothing else reaches them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import trio
from trio.lowlevel import checkpoint

from ..collectives.kinds import Shape
from ..collectives.reduce import Array
from ..flight.recorder import NOT_RECORDED, RankFlight
from ..timeline.spans import RawSpan
from .deadlines import Deadlines, Expiring
from .ending import Ending
from .handover import Handover
from .memory.buffer_locks import BufferLocks
from .outstanding import Outstanding

__all__ = ["Arrays", "RankContext"]


class Arrays(Protocol):
    """Where arrays come from.

    Attributes:
        shapes_only: Whether they have a shape and no data.
    """

    shapes_only: bool

    def empty(self, shape: Shape, dtype: np.dtype[np.generic]) -> Array:
        """Return a new array; what is in it is not defined."""

    def copy(self, array: Array) -> Array:
        """Return a C-contiguous copy."""


@dataclass(slots=True, kw_only=True, eq=False)
class RankContext:
    """One rank, as what works for it sees it.

    Attributes:
        rank: World rank.
        now_ns: Returns the present instant.
        soon: Calls back at once, or after the callback that is running: chains of operations must not recurse.
        record: Takes a span of this rank's timeline.
        flight: Takes what the flight record keeps.
        arrays: Where results come from.
        locks: Which arrays are in flight.
        outstanding: What is unfinished.
        ending: How the world ends, once it does.
        handover: To the event loop, for other threads.
        thread: Ident of the event loop's thread.
        nursery: For tasks of this rank; open as long as it lives.
        step: Index of the step that it is in, if any.
        kept_step: Of the newest state or checkpoint that all ranks have on the disk, if there is one.
        closed: Whether it has ended: nothing may be issued any more.
        deadlines: Of its operations.
        pause: What a task does that awaits what has ended.
        elsewhere: Returns "file:line" of its program, where that runs in another thread than the event loop.
    """

    rank: int
    now_ns: Callable[[], int]
    soon: Callable[[Callable[[], None]], None]
    record: Callable[[RawSpan], None]
    arrays: Arrays
    locks: BufferLocks
    outstanding: Outstanding
    ending: Ending
    handover: Handover
    thread: int
    flight: RankFlight = NOT_RECORDED
    nursery: trio.Nursery | None = None
    step: int | None = None
    kept_step: int | None = None
    closed: bool = False
    deadlines: Deadlines = field(default_factory=Deadlines)
    pause: Callable[[], Coroutine[object, object, None]] = checkpoint
    elsewhere: Callable[[], str] | None = None

    def keep_step(self, step: int) -> None:
        """Note that what this step left is on the disk, of all ranks."""
        self.kept_step = step

    def from_thread(self, function: Callable[..., None], *args: object) -> None:
        """Let the event loop call a function, soon: in the order in which threads have asked.

        Raises:
            PeerFailedError: If there is no loop any more.
        """
        try:
            self.handover.post(function, *args)
        except trio.RunFinishedError:
            raise self.ending.peer_failed() from None

    def expire(self, operation: Expiring, timeout_s: float) -> None:
        """Let an operation of this rank expire when so much time has gone by."""
        self.deadlines.add(operation, timeout_s, self.spawn, self.now_ns)

    def spawn(self, function: Callable[..., object], *args: object) -> None:
        """Start a task of this rank."""
        assert self.nursery is not None, "only a rank that lives starts programs"
        self.nursery.start_soon(function, *args)  # type: ignore[arg-type]
