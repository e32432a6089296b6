"""A rank: one member of the world, with its compute stream, its communication streams and its timeline."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from sys import _getframe
from threading import get_ident
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import numpy as np
import numpy.typing as npt

from ..collectives.reduce import Array
from ..defaults import DEFAULT_WINDOW
from ..errors import UsageError, argument_text
from ..flight.recorder import Known
from ..timeline.recording import Recorder
from ..timeline.span import Clock as ClockName
from .backend import Backend
from .calls import GroupCalls
from .compute import ComputeFuture, ComputeStreams
from .context import STEP_OF_TASK, RankContext
from .epoch import Epoch
from .future import Future
from .group import Group, Mesh
from .memory.arrays import common_array, shape_only
from .memory.buffer_pool import BufferPoolStatistics
from .outstanding import CallSite, checked_name
from .settling import change_state
from .state import QUEUED
from .stream import Stream, Streams
from .task import Errors, TaskFuture, check_errors_option

if TYPE_CHECKING:
    from ..state.rank_state import RankState
    from .world import World

T = TypeVar("T")
Args = TypeVarTuple("Args")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatistics:
    """The result of `rank.statistics()`."""

    buffer_pool: BufferPoolStatistics  # Figures of the memory of results; one pool serves all ranks of a process


class Rank(GroupCalls):
    """The argument of `main`: this rank's place in the world, with the methods that issue its work.

    Collectives called on a rank run on the group of all ranks, `rank.world`.

    Args:
        context: What all operations of the rank share.
        backend: Real or virtual time.
        compute: Compute streams of the rank.
        world: The world of the rank.
        everybody: All world ranks.
        state_dir: Folder of saved states; None: the user has named none.

    Attributes:
        rank: Index in the world.
        world_size: Number of ranks in the world.
        local_rank: Index among the ranks of the same node.
        node: Index of the node.
        world: The group of all ranks.
        restart: How often the launcher has started the world again: 0 at first.
        epoch: Epoch of the world, which the loss of a process ends under `--survive`, and memory that outlives it.
        recorder: The spans recorded so far.
    """

    def __init__(
        self,
        context: RankContext,
        backend: Backend,
        compute: ComputeStreams,
        world: World,
        *,
        everybody: tuple[int, ...],
        node: int,
        local_rank: int,
        recorder: Recorder,
        restart: int,
        state_dir: str | None,
        epoch: Epoch | None,
    ) -> None:
        self.rank: int = context.rank
        self.world_size: int = len(everybody)
        self.node = node
        self.local_rank = local_rank
        self.recorder = recorder
        self.restart = restart
        self.epoch: Epoch = epoch or Epoch()
        self._state_dir = state_dir
        self._state: RankState | None = None
        self._rng: np.random.Generator | None = None
        self._context, self._backend, self._compute = context, backend, compute
        self._communicators = world.communicators
        self._computes = Known()
        self._streams = Streams(context)
        self.world: Group = Group(context, world, self._streams, {}, everybody, "world")
        # a call on a rank is a call on the group of all
        self._messages, self._ports = self.world._messages, self.world._ports

    def __repr__(self) -> str:
        unfinished = len(self._context.outstanding.operations)
        return f"<Rank {self.rank} of {self.world_size}: {unfinished} operations unfinished>"

    def now_ns(self) -> int:
        """Return the present instant of the world's clock, in nanoseconds: of real time, or of virtual time from 0."""
        return self._context.now_ns()

    @property
    def state(self) -> RankState:
        """State in files that survives a restart: `await rank.state.save(step, tree)` writes, `latest()` reads it."""
        if self._state is None:
            from ..state.rank_state import RankState  # and with it the formats of files, which few programs need

            self._state = RankState(
                self.world,
                self.stream("overlap.state"),
                self._state_dir,
                real=self._backend.name == "real",
                note=self._context.record_saved_step,
            )
        return self._state

    @property
    def clock(self) -> ClockName:
        """Kind of the world's clock: "real" or "virtual"."""
        return self._backend.name

    @property
    def rng(self) -> np.random.Generator:
        """Random-number generator of this rank alone: its numbers differ on every rank, and are the same in every run.

        Unlike it, the global generators of Python, numpy and PyTorch are shared by all ranks of a process, so that the
        numbers of a rank depend on the draws of the others. With a seed: `np.random.default_rng((seed, rank.rank))`.
        """
        if self._rng is None:
            self._rng = np.random.default_rng((0, self.rank))
        return self._rng

    def statistics(self) -> RankStatistics:
        """Return present figures of the memory that this rank uses."""
        return RankStatistics(buffer_pool=self._backend.buffers.statistics())

    # -- compute -----------------------------------------------------------------------------------------------

    def compute(
        self,
        fn: Callable[..., T],
        *args: object,
        name: str | None = None,
        seconds: float | None = None,
        flops: float | None = None,
        bytes_moved: float | None = None,
        stream: str | None = None,
        errors: Errors = "raise",
        call_site: CallSite | None = None,
    ) -> ComputeFuture[T]:
        """Queue `fn(*args)` on this rank's compute stream and return its future at once.

        Functions of one stream run one after the other, in the order of issue, in a thread of this rank (with one BLAS
        thread). Each further `stream` has a thread of its own and runs in parallel, as the engines of a NeuronCore do.
        Use one for work that must not wait for all queued functions, such as a cast of data to be sent.

        Futures among the arguments, also inside tuples, lists and dicts, are resolved first. A function that waits for
        its arguments delays all functions issued after it on its stream. So issue updates that wait for an all-reduce
        after the backward loop, or on another `stream`.

        Arrays among the arguments, at any depth of tuples, lists and dicts, are read-only until the function has
        returned, for the function too: several computes may read the same array. A function returns new values, or
        writes into a copy, or into arrays of an object or a closure. The result may be an argument or a view of one.
        The call takes 2 us more for one array, 52 us for a dict of 100. Other objects with memory, such as tensors,
        cannot be made read-only: do not change them before the function has returned.

        The function sees the context variables that the caller has at the call, as with `trio.to_thread.run_sync`.

        Args:
            fn: A plain function. A running function cannot be interrupted: a cancellation of the world waits for it.
            args: Arguments of the function.
            name: Name in the timeline; None: the name of the function.
            seconds: Cost on the virtual clock, in seconds; None: not stated. The real clock ignores costs.
            flops: Cost on the virtual clock, as a number of floating-point operations.
            bytes_moved: Cost on the virtual clock, as bytes of memory traffic.
            stream: Name of the compute stream, which is made at the first use; None: the default stream.
            errors: When an error of `fn` is raised if no task or thread awaits it. "raise": at once, and the error ends
                the rank. "await": at the await of the future, or at the end of the rank if nothing awaits the future.
                An error counts as awaited while a task or thread waits for the future, or for anything that has the
                future as an input. Work that threads issue, and all work under `overlap.connect`, is "await".
            call_site: Line to name in errors, verdicts and the timeline: a frame, "file.py:41", or the `place` of
                another future; None: the line of the call. Adapters pass the line of their caller.

        Raises:
            UsageError: At the call, if `fn` is not a plain function, `stream` is no name, `errors` is unknown, or
                `call_site` is no place; on the virtual clock also if there is no cost, or an invalid one.
        """
        if not callable(fn):
            advice = "pass the function itself: rank.compute(f, x), not rank.compute(f(x))"
            raise UsageError(f"fn: expected a function, got {type(fn).__name__}; {advice}")
        if inspect.iscoroutinefunction(fn):
            name = getattr(fn, "__name__", argument_text(fn))  # a partial of one has no name
            raise UsageError(f"fn: expected a plain function, got the async function {name}; await it instead")
        if stream is not None and not (isinstance(stream, str) and stream):
            raise UsageError(f"stream: expected the name of a compute stream, got {argument_text(stream)}")
        if errors != "raise":
            check_errors_option(errors)
        context, default = self._context, self._compute.default
        if context.closed:
            raise context.closed_rank_error()
        label = str(getattr(fn, "__name__", type(fn).__name__))
        if name is not None:
            label = checked_name(name, label)
        operation: ComputeFuture[T] = ComputeFuture(
            context, partial(copy_context().run, fn), args, label, _getframe(1) if call_site is None else call_site
        )
        if default.priced:
            operation.cost = default.price(label, seconds=seconds, flops=flops, bytes_moved=bytes_moved)
        on_loop = get_ident() == context.thread
        operation.stream, operation.prompt = stream, errors == "raise" and on_loop and context.program_line is None
        operation.lock_arguments()
        if on_loop:
            self._submit_compute(operation)
        else:
            context.post_to_loop(self._submit_compute, operation)
        return operation

    def _submit_compute(self, operation: ComputeFuture[T]) -> None:
        """Submit a compute to its stream; fail it if the rank has ended. On the loop's thread only.

        Raise `UsageError` if it has no valid cost on the virtual clock. It has ended then.
        """
        context = self._context
        if context.closed:
            operation.abandon(context.closed_rank_error())
        if not change_state(operation, QUEUED):  # that, or cancelled in the meantime
            return
        context.outstanding.operations[operation] = None
        operation.issued_ns = now_ns = context.now_ns()
        operation.record = context.flight.record_issue(operation, self._computes, operation.name, 0, now_ns)
        try:
            streams, name = self._compute, operation.stream
            (streams.default if name is None else streams.get_or_make(name)).submit(operation)
        except UsageError as error:
            operation.abandon(error)  # the call raises it
            raise

    def spawn(
        self,
        fn: Callable[[*Args], Awaitable[T]],
        *args: *Args,
        name: str | None = None,
        daemon: bool = False,
        errors: Errors = "raise",
        call_site: CallSite | None = None,
    ) -> Future[T]:
        """Run an async function next to the program, as a task of this rank, and return its future at once.

        At its end the rank waits for the task, and cancels a daemon first. `cancel()` of the future cancels the task at
        any time. An error of the task that nobody awaits at that moment ends the rank at once.

        Args:
            fn: An async function; `fn(*args)` is awaited.
            args: Arguments of the function.
            name: Name of the task in messages; None: the name of the function.
            daemon: Whether the task ends with the program, as a logger does. A daemon is cancelled when the program and
                all its operations have ended. If it still runs 5 s later, a message names it, and the rank waits on.
            errors: When an error that nobody awaits is raised; see `compute`.
            call_site: Line to name in errors, verdicts and the timeline; see `compute`.

        Raises:
            UsageError: At the call, if `fn` is no function, `errors` is unknown, or the call is not in the thread of
                the rank's event loop.
        """
        if not callable(fn):
            advice = "pass the function itself: rank.spawn(f, x), not rank.spawn(f(x))"
            raise UsageError(f"fn: expected an async function, got {type(fn).__name__}; {advice}")
        check_errors_option(errors)
        context = self._context
        if get_ident() != context.thread:
            raise UsageError(
                "spawn: only the thread of the rank's event loop starts tasks; call it in an async function"
            )
        if context.closed:
            raise context.closed_rank_error()
        label = str(getattr(fn, "__name__", "task"))
        caller = _getframe(1) if call_site is None else call_site
        task: TaskFuture[T] = TaskFuture(
            context,
            label if name is None else checked_name(name, label),
            caller,
            prompt=errors == "raise" and context.fails_promptly,
            daemon=bool(daemon),
        )
        task.start(fn, args)
        return task

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32, *, common: bool = False) -> Array:
        """Return a new array of zeros. In a simulation without data it has a shape and a dtype only.

        Args:
            shape: Shape of the array.
            dtype: Dtype of the array.
            common: Whether to put it in memory that other processes of this host can read, which makes collectives on
                it cheaper. A fork of this process shares it, too, rather than a copy. Where there is no (more) such
                memory, see `--shared-memory`, it is an array like any other.
        """
        if self._backend.shapes_only:
            return shape_only(shape, dtype)
        loan = self._communicators.engine.loan_shared_memory
        shared = common_array(loan, np.empty(0, dtype).dtype, shape) if common else None
        return np.zeros(shape, dtype) if shared is None else shared

    def record(self, name: str, start_ns: int, end_ns: int, *, lane: str = "compute") -> None:
        """Add a span to the timeline for work of this rank outside of `compute`. Any thread may call this.

        Args:
            name: Name of the work.
            start_ns: Start of the work, as `rank.now_ns` counts, which in real time is `time.perf_counter_ns`.
            end_ns: End of the work.
            lane: Row of the timeline: "compute", or another name for work in parallel to that.

        Raises:
            UsageError: If the instants are no integers, or `end_ns` lies before `start_ns`.
        """
        if not isinstance(start_ns, int) or not isinstance(end_ns, int):
            raise UsageError(
                "start_ns, end_ns: expected integers (nanoseconds, as rank.now_ns() returns), "
                f"got {argument_text(start_ns)}, {argument_text(end_ns)}"
            )
        if end_ns < start_ns:
            raise UsageError(f"record: end_ns {end_ns} lies before start_ns {start_ns}; pass the start first")
        self._context.record(("compute", lane, str(name), start_ns, end_ns, self._context.step))

    # -- streams, groups, meshes ---------------------------------------------------------------------------------

    def stream(self, name: str, *, priority: int = 0, window: int = DEFAULT_WINDOW) -> Stream:
        """Return this rank's communication stream of that name, making it at the first call.

        Args:
            name: The same on every rank that uses it; "comm" is the default stream.
            priority: Added to the priority of each operation of the stream; lower is more urgent.
            window: How many operations may be in flight at once; 1 is strict FIFO.

        Raises:
            UsageError: If the stream exists with other settings, or `window` is below 1.
        """
        return self._streams.open(name, priority=priority, window=window)

    def group(self, ranks: Sequence[int], *, name: str | None = None) -> Group:
        """Make a group of world ranks, in that order, without communication.

        Each member of the new group must make the same call; other ranks make none.

            evens = rank.group(range(0, rank.world_size, 2), name="evens")  # on these ranks only

        Args:
            ranks: World ranks, this one among them.
            name: Name of the group in messages and timelines; by default the list of ranks.

        Returns:
            The group, as this rank sees it.

        Raises:
            UsageError: If a rank is unknown or named twice, or this rank is not among them.
            topology.TopologyError: If the cluster has no such groups.
        """
        return self.world.group(ranks, name=name)

    async def split(self, color: int | None, key: int = 0, *, name: str | None = None) -> Group | None:
        """Cut the world into one group for each color, ordered by `key`, then by rank.

        A collective: every rank must call it. `Group.split` cuts a group.

            rows = await rank.split(rank.rank // 4, name="row")

        Args:
            color: Ranks of one color form a group; with None, this rank is in none.
            key: Order of this rank in its group; by default the order of the world.
            name: Name of the groups in messages and timelines; by default the world's name and the color.

        Returns:
            The group of this rank's color; None without a color.

        Raises:
            UsageError: If `color` or `key` is no integer of 64 bits.
        """
        return await self.world.split(color, key, name=name)

    def mesh(self, **axes: int) -> Mesh:
        """Arrange all ranks in a grid with named axes, row-major: the last axis runs fastest. No communication.

            mesh = rank.mesh(dp=2, tp=4)
            await mesh["tp"].all_reduce(x)  # over the four ranks of this row

        Args:
            axes: Size of each axis, by name, in order; every rank makes the same call.

        Returns:
            This rank's place in the grid, and the group of each axis by name.

        Raises:
            UsageError: If the sizes do not multiply to the size of the world.
        """
        return Mesh(self.world, axes)

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Mark the work that is issued inside the `with` as step `index` of the timeline, however much later it runs.

        A program may be far ahead of its operations: the step lasts until the last of its computes has ended.

        Raises:
            UsageError: If `index` is no integer.
        """
        if not isinstance(index, (int, np.integer)):
            raise UsageError(f"index: expected an integer, got {argument_text(index)}")
        index = int(index)
        context = self._context
        started_ns = context.now_ns()
        context.open_steps.append((index, started_ns))
        # `record_step` returns the step before; a spawned task gets its step from the context variable, as a copy
        before, outer = context.flight.record_step(index), context.step
        context.step, outside = index, STEP_OF_TASK.get()
        STEP_OF_TASK.set((context, index))
        self._backend.on_step_begin(context)
        try:
            yield
        finally:
            context.step = outer
            STEP_OF_TASK.set(outside)
            context.flight.record_step(before)
            context.end_step(index, started_ns)
