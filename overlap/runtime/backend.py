"""The clock of a world: what time it is, and who computes and moves bytes in that time.

`RealClock` is here; the virtual one is in `overlap.virtual`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np
import trio
from trio.lowlevel import TrioToken

from ..collectives.kinds import Shape
from ..collectives.reduce import Array
from .compute import ComputeStream, ThreadedCompute
from .engine.mover import BaseEngine, Engine
from .memory.buffer_pool import BufferPool

if TYPE_CHECKING:
    from topology import Cluster
    from transports import Transport

    from ..timeline.spans import Clock as ClockName
    from .rank import Rank

__all__ = ["Clock", "RealClock"]


class Clock(ABC):
    """What differs between real and virtual time.

    Attributes:
        name: As the timeline calls it.
        shapes_only: Whether arrays have a shape and no data.
        buffers: Where the memory of results, scratch and staging comes from: one pool a world, so that its memory goes
            with it, and its limit and its figures are the world's.
    """

    name: ClockName
    shapes_only = False

    def __init__(self) -> None:
        self.buffers = BufferPool()

    def empty(self, shape: Shape, dtype: np.dtype[np.generic]) -> Array:
        """Return a new array."""
        return self.buffers.empty(shape, dtype)

    def notes(self, key: object, seq: int) -> dict[int, list[int]]:
        """Return what ranks of this process tell each other besides an operation, by rank of its group."""
        return {}

    def limit(self, timeout_s: float, scope: trio.CancelScope) -> None:
        """Cancel a scope in so many seconds."""
        scope.deadline = trio.current_time() + timeout_s

    def meta(self) -> dict[str, str]:
        """Return what a timeline should say of it."""
        return {}

    def step_begins(self, rank: Rank) -> None:  # noqa: B027 (most clocks need not know)
        """Take note that a rank begins a step."""

    @abstractmethod
    def now_ns(self) -> int:
        """Return the present instant."""

    @abstractmethod
    def compute_stream(self, rank: Rank, token: TrioToken) -> ComputeStream:
        """Return what runs the functions of a rank."""

    @abstractmethod
    def engine(self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None) -> BaseEngine:
        """Return what runs the operations of a process's ranks."""


class RealClock(Clock):
    """Threads compute, bytes move, and it takes as long as it takes."""

    name = "real"
    now_ns = staticmethod(perf_counter_ns)

    def compute_stream(self, rank: Rank, token: TrioToken) -> ComputeStream:
        """Return a stream with a thread of its own."""
        return ThreadedCompute(rank, token)

    def engine(self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None) -> BaseEngine:
        """Return the engine that moves bytes."""
        return Engine(transport, cluster, token, algorithm=algorithm)
