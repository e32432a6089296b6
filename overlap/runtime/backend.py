"""Backend of a world: its clock, its compute streams and its engine.

`RealBackend` is here: threads compute and bytes move. The backend for virtual time is in `overlap.simulation`.
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
from .event_loop import FairPauses
from .handover import Handover
from .interpreter import BlasLimit
from .memory.buffer_pool import BufferPool

if TYPE_CHECKING:
    from topology import Cluster
    from transports import Transport

    from ..timeline.span import Clock as ClockName


class Backend(ABC):
    """All that differs between real and virtual time.

    Attributes:
        name: Kind of the clock, for the timeline: "real" or "virtual".
        shapes_only: Whether arrays have a shape and no data.
        cleanup_s: Seconds in which programs of a stopped world may still use the world to clean up; 0: none.
        detects_stalls: Whether the clock itself stops a world whose tasks are all blocked; if all programs then go on
            and finish, the stop does not count. If False, a watch looks for worlds without progress.
        pause: Makes the checkpoint that a task passes when it awaits an operation that has ended.
        buffers: Pool of memory for results and temporary buffers. Each world has its own: the pool's memory is freed at
            the end of the world, and its limit and statistics are those of the world.
    """

    name: ClockName
    shapes_only = False
    cleanup_s: float = 5.0
    detects_stalls = False
    pause: Callable[[], Coroutine[object, object, None]] = staticmethod(checkpoint)

    def __init__(self) -> None:
        self.buffers: BufferPool = BufferPool()

    def make_call_later(self, handover: Handover) -> Callable[[Callable[[], None]], None]:
        """Return the function for `Communicators.call_later`: it lets the event loop call another function soon."""
        return handover.post_if_open

    def empty(self, shape: Shape, dtype: np.dtype[np.generic]) -> Array:
        """Return a new array of undefined content."""
        return self.buffers.empty(shape, dtype)

    def copy(self, array: Array) -> Array:
        """Return a C-contiguous copy of an array."""
        return self.buffers.copy(array)

    def shared_integers(self, key: object, seq: int) -> dict[int, list[int]]:
        """Return a dict in which the ranks of an operation leave integers for each other, by group rank.

        In a simulation without data all ranks get the same dict, because arrays carry no values there. In real time
        arrays carry them, and this is a new, empty dict.

        Args:
            key: Key of the group.
            seq: Number of the operation.
        """
        return {}

    def start_time_limit(self, timeout_s: float, stop: Callable[[], None], nursery: trio.Nursery) -> None:
        """Call `stop` on the event loop after a timeout, unless a nursery has been cancelled by then.

        Args:
            timeout_s: The timeout in seconds of this backend's clock.
            stop: The function.
            nursery: Runs the task that waits for the timeout.
        """
        nursery.start_soon(_call_after, timeout_s, stop)

    def timeline_metadata(self) -> dict[str, str]:
        """Return the entries that this backend adds to the metadata of a timeline."""
        return {}

    def on_step_begin(self, context: RankContext) -> None:  # noqa: B027 (no use in real time)
        """Record that a rank has begun the step `context.step`."""

    def make_communicators(self, engine: BaseEngine) -> Communicators:
        """Return the communicators of a world."""
        return Communicators(engine)

    @abstractmethod
    def now_ns(self) -> int:
        """Return the present instant in nanoseconds."""

    @abstractmethod
    def make_compute_stream(self, context: RankContext, lane: str) -> ComputeStream:
        """Return a new compute stream of a rank, with the name `lane`; it runs functions in the order of issue."""

    @abstractmethod
    def make_engine(
        self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None
    ) -> BaseEngine:
        """Return the engine for the ranks of this process.

        Args:
            transport: Carries bytes between ranks.
            cluster: The hosts and devices that the ranks run on.
            token: Token of the event loop.
            algorithm: Algorithm of all collectives; None: one is chosen for each collective.
        """

    def close(self) -> None:
        """Free what the backend holds, and restore settings of the process, once nothing of the world runs."""
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
        self.pause: Callable[[], Coroutine[object, object, None]] = FairPauses().pause

    def make_compute_stream(self, context: RankContext, lane: str) -> ComputeStream:
        """Return a compute stream with a thread of its own; see `Backend.make_compute_stream`."""
        return ThreadedCompute(context, self._blas.impose, lane)

    def make_engine(
        self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None
    ) -> BaseEngine:
        """Return the engine that moves bytes; see `Backend.make_engine`."""
        return RealEngine(transport, cluster, token, algorithm=algorithm)

    def close(self) -> None:
        """Free the pool of memory, and restore the number of threads of BLAS."""
        super().close()
        self._blas.lift()
