"""Backend of a world: its clock, its compute threads, and its engine.

`RealBackend` is here: threads compute and bytes move. The simulated one is in `overlap.simulation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np
import trio
from trio.lowlevel import TrioToken, checkpoint

from ..collectives.kinds import Shape
from ..collectives.reduce import Array
from .communicator import BaseEngine
from .communicators import Communicators
from .compute import ComputeStream, ThreadedCompute
from .context import RankContext
from .engine.real_engine import RealEngine
from .event_loop import CallbackTurns
from .handover import Handover
from .interpreter import BlasLimit
from .memory.buffer_pool import BufferPool

if TYPE_CHECKING:
    from topology import Cluster
    from transports import Transport

    from ..timeline.span import Clock as ClockName


class Backend(ABC):
    """The differences between real and simulated time.

    Attributes:
        name: Name in the timeline.
        shapes_only: Whether arrays have a shape and no data.
        pause: Returns the checkpoint of a task that awaits an ended operation.
        buffers: Pool of memory for results, scratch and staging: one a world, so that its memory is freed with it, and
            its limit and its figures are the world's.
    """

    name: ClockName
    shapes_only = False
    pause: Callable[[], Coroutine[object, object, None]] = staticmethod(checkpoint)

    def __init__(self) -> None:
        self.buffers: BufferPool = BufferPool()

    def later(self, handover: Handover) -> Callable[[Callable[[], None]], None]:
        """Return the `Communicators.later` of a world."""
        return handover.post_if_open

    def empty(self, shape: Shape, dtype: np.dtype[np.generic]) -> Array:
        """Return a new array."""
        return self.buffers.empty(shape, dtype)

    def copy(self, array: Array) -> Array:
        """Return a C-contiguous copy."""
        return self.buffers.copy(array)

    def notes(self, key: object, seq: int) -> dict[int, list[int]]:
        """Return the values that ranks of this process pass to each other with an operation, by group rank."""
        return {}

    def limit(self, timeout_s: float, stop: Callable[[], None], nursery: trio.Nursery) -> None:
        """Call a function after a timeout, unless a nursery has been cancelled by then."""
        nursery.start_soon(_call_after, timeout_s, stop)

    def meta(self) -> dict[str, str]:
        """Return its entries in the metadata of a timeline."""
        return {}

    def step_begins(self, context: RankContext) -> None:  # noqa: B027 (no use in real time)
        """Note that a rank begins a step."""

    def communicators(self, engine: BaseEngine) -> Communicators:
        """Return the communicators of a world."""
        return Communicators(engine)

    @abstractmethod
    def now_ns(self) -> int:
        """Return the present instant."""

    @abstractmethod
    def compute_stream(self, context: RankContext, lane: str) -> ComputeStream:
        """Return a stream that runs functions of a rank in order."""

    @abstractmethod
    def engine(self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None) -> BaseEngine:
        """Return the engine of a process's ranks."""

    def close(self) -> None:
        """Undo all changes outside the world, once nothing runs any more."""
        self.buffers.close()


async def _call_after(delay_s: float, function: Callable[[], None]) -> None:
    await trio.sleep(delay_s)
    function()


class RealBackend(Backend):
    """Real time: threads compute and bytes move."""

    name: ClockName = "real"
    now_ns: staticmethod[[], int] = staticmethod(perf_counter_ns)

    def __init__(self) -> None:
        super().__init__()
        self._blas = BlasLimit()
        self.pause: Callable[[], Coroutine[object, object, None]] = CallbackTurns().pause

    def compute_stream(self, context: RankContext, lane: str) -> ComputeStream:
        """Return a stream with a thread of its own."""
        return ThreadedCompute(context, self._blas.impose, lane)

    def engine(self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None) -> BaseEngine:
        """Return the engine that moves bytes."""
        return RealEngine(transport, cluster, token, algorithm=algorithm)

    def close(self) -> None:
        """Restore the threads of BLAS."""
        super().close()
        self._blas.lift()
