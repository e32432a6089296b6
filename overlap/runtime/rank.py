"""A rank: one member of the world, with its compute stream, its communication streams and its timeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from sys import _getframe
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from ..collectives.reduce import Array
from ..errors import UsageError
from ..timeline.spans import Recorder
from .calls import Calls
from .compute import ComputeFuture
from .future import Failure, Future
from .group import Group
from .memory.buffer_pool import BufferPoolStatistics
from .mesh import Mesh
from .operation import CollectiveFuture
from .shapes import shape_only
from .stream import DEFAULT_WINDOW, Stream

if TYPE_CHECKING:
    from .world import World

T = TypeVar("T")

__all__ = ["Rank", "RankStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatistics:
    """What `rank.statistics()` tells.

    Attributes:
        buffer_pool: Where the memory of results comes from; one pool serves all ranks of a process.
    """

    buffer_pool: BufferPoolStatistics


Issued: TypeAlias = "CollectiveFuture[object] | ComputeFuture[object]"

_LISTED = 4  # how many unfinished operations of a rank a report names


class Rank(Calls):
    """What `main` is given: this rank's place in the world and everything it can issue.

    Collectives called on a rank run on the group of all ranks, `rank.world`.

    Attributes:
        rank: Index in the world.
        world_size: Number of ranks in the world.
        local_rank: Index among the ranks of the same node.
        node: Index of the node.
        world: The group of all ranks.
        recorder: The spans recorded so far.
    """

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.world_size = rank, world.size
        self.node, self.local_rank = world.place(rank)
        self.recorder = Recorder(rank)
        self.record = self.recorder.append
        self._world = world
        self._unfinished: dict[Issued, None] = {}
        self._doing: list[str] = []  # what was unfinished when it was abandoned
        self._draining: trio.Event | None = None
        self._unseen: list[Issued] = []
        self._streams: dict[str, Stream] = {}
        self._groups: dict[tuple[int, ...], int] = {}
        self._compute = world.clock.compute_stream(self, world.token)
        self._default = self.stream("comm")
        self._nursery: trio.Nursery
        self.world = self._comm = self._new_group(world.everybody, "world")

    def __repr__(self) -> str:
        return f"<Rank {self.rank} of {self.world_size}: {len(self._unfinished)} operations unfinished>"

    # -- compute -----------------------------------------------------------------------------------------------

    def compute(
        self,
        fn: Callable[..., T],
        *args: object,
        name: str | None = None,
        seconds: float | None = None,
        flops: float | None = None,
        bytes_moved: float | None = None,
    ) -> Future[T]:
        """Queue `fn(*args)` on this rank's compute stream and return its future at once.

        Functions run one after the other, in the order they were issued, in a thread of this rank's own (with one BLAS
        thread). Futures among the arguments, also inside tuples, lists and dicts, are resolved first.

        Arrays among the arguments, at any depth of tuples, lists and dicts, are read-only until the function has
        returned, for the function too: several computes may read the same array. A function that has something new
        returns it, or writes into a copy, or into what it reaches through an object or a closure. What it returns may
        be its argument or a view of it. The call takes 2 us more for one array, 52 us for a dict of 100. Other objects
        that hold memory, such as tensors, cannot be made read-only: leave them alone until then.

        Args:
            fn: A plain function. It cannot be interrupted: cancelling the world waits for the one that runs.
            args: Its arguments.
            name: For the timeline; by default the function's name.
            seconds: What it costs on the virtual clock, in seconds. Ignored on the real clock.
            flops: The same as floating-point operations.
            bytes_moved: The same as bytes of memory traffic.

        Raises:
            UsageError: At the call, if `fn` is not a plain function; on the virtual clock also if nothing says what
                it costs, or a cost cannot be meant.
        """
        if not callable(fn):
            raise UsageError(f"fn: expected a function, got {type(fn).__name__}; pass its arguments separately")
        if inspect.iscoroutinefunction(fn):
            raise UsageError(f"fn: expected a plain function, got the async function {fn.__name__}; await it instead")
        if self._world.failure is not None:
            raise self._world.peer_failed()
        label = name or str(getattr(fn, "__name__", type(fn).__name__))
        operation: ComputeFuture[T] = ComputeFuture(fn, args, label, _getframe(1))
        operation.cost = self._compute.price(label, seconds=seconds, flops=flops, bytes_moved=bytes_moved)
        self._compute.lend(operation)
        self._unfinished[operation] = None
        self._compute.submit(operation)
        return operation

    def statistics(self) -> RankStatistics:
        """Return figures of what this rank stands on; they change from moment to moment."""
        return RankStatistics(buffer_pool=self._world.clock.buffers.statistics())

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> Array:
        """Return a new array of zeros; in a simulation without data, one that has only shape and dtype.

        Args:
            shape: Of the array.
            dtype: Of the array.
        """
        if self._world.clock.shapes_only:
            return shape_only(shape, dtype)
        return np.zeros(shape, dtype)

    # -- streams, groups, meshes ---------------------------------------------------------------------------------

    def stream(self, name: str, *, priority: int = 0, window: int = DEFAULT_WINDOW) -> Stream:
        """Return this rank's communication stream of that name, making it at the first call.

        Args:
            name: The same on every rank that uses it; "comm" is the default stream.
            priority: Added to that of each operation; lower is more urgent.
            window: How many operations may be in flight at once; 1 is strict FIFO.

        Raises:
            UsageError: If the stream exists with other settings, or `window` is below 1.
        """
        known = self._streams.get(name)
        if known is None:
            known = self._streams[name] = Stream(self, name, priority=priority, window=window)
        elif (priority, window) not in ((known.priority, known.window), (0, DEFAULT_WINDOW)):
            raise UsageError(
                f"stream '{name}' has priority={known.priority}, window={known.window}; "
                f"got priority={priority}, window={window}"
            )
        return known

    def group(self, ranks: Sequence[int], *, name: str | None = None) -> Group:
        """Make a group of world ranks, in that order; every member must make the same call. No communication."""
        return self.world.group(ranks, name=name)

    async def split(self, color: int | None, key: int = 0, *, name: str | None = None) -> Group | None:
        """Cut the world into one group for each color; see `Group.split`."""
        return await self.world.split(color, key, name=name)

    def mesh(self, **axes: int) -> Mesh:
        """Arrange all ranks in a grid with named axes, such as `rank.mesh(dp=2, tp=4)`.

        Raises:
            UsageError: If the sizes do not multiply to the size of the world.
        """
        return Mesh(self, axes)

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Mark everything inside the `with` as step `index` of the timeline.

        Raises:
            UsageError: If `index` is no integer.
        """
        if not isinstance(index, (int, np.integer)):
            raise UsageError(f"index: expected an integer, got {index!r}")
        index = int(index)
        started_ns = self._world.now_ns()
        self._world.clock.step_begins(self)
        try:
            yield
        finally:
            self.record(("step", "step", f"step {index}", started_ns, self._world.now_ns(), index))

    # -- for the streams and the world -----------------------------------------------------------------------------

    def _new_group(self, ranks: tuple[int, ...], name: str | None) -> Group:
        if len(set(ranks)) < len(ranks):
            raise UsageError(f"ranks: {list(ranks)} names a rank twice")
        if self.rank not in ranks:
            raise UsageError(f"ranks: {list(ranks)} does not contain this rank, {self.rank}")
        self._world.check_group(ranks)
        occurrence = self._groups.get(ranks, 0)
        self._groups[ranks] = occurrence + 1
        return Group(self, ranks, name=name or "-".join(map(str, ranks)), occurrence=occurrence)

    def _find_stream(self, stream: Stream | str | None) -> Stream:
        if stream is None:
            return self._default
        if isinstance(stream, Stream):
            if stream.rank is not self:
                raise UsageError(f"stream: '{stream.name}' is rank {stream.rank.rank}'s, this is rank {self.rank}")
            return stream
        if stream not in self._streams:
            raise UsageError(f"stream: {stream!r} is unknown; known are {', '.join(self._streams)}")
        return self._streams[stream]

    def _note_end(self, operation: Issued) -> None:
        """Keep an operation that failed, in case nobody asks for it, and let `_drain` look again."""
        if operation._failure is not None:
            self._unseen.append(operation)
        if self._draining is not None and (not self._unfinished or self._unseen):
            self._draining.set()

    def _abandon(self, error: Callable[[], BaseException]) -> None:
        """Fail everything unfinished; let no further compute start."""
        self._compute.stop()
        self._doing = self._doing or self._unfinished_lines()
        for operation in reversed(list(self._unfinished)):  # else room made by the first would start the next
            if isinstance(operation, ComputeFuture):
                self._compute.abandon(operation, error())
            else:
                operation.abandon(error())

    def _unfinished_lines(self, detail: Callable[[CollectiveFuture[object]], str] | None = None) -> list[str]:
        """Name the unfinished operations, oldest first, and what they wait for."""
        operations = list(self._unfinished)
        lines = [
            f"{operation._label()} ({operation.call_site})"
            + (detail(operation) if detail and isinstance(operation, CollectiveFuture) else "")
            for operation in operations[:_LISTED]
        ]
        rest = len(operations) - _LISTED
        return [*lines, f"and {rest} more"] if rest > 0 else lines

    async def _drain(self) -> None:
        """Wait for everything issued; raise the first error that nobody has seen."""
        while self._unfinished and not self._first_unseen():
            self._draining = trio.Event()
            await self._draining.wait()
        unseen = self._first_unseen()
        if unseen is not None:
            unseen.seen = True
            raise unseen.error

    def _first_unseen(self) -> Failure | None:
        return next((o._failure for o in self._unseen if o._failure is not None and not o._failure.seen), None)
