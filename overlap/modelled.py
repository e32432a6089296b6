"""A world on the virtual clock: the same program, on a modelled cluster, in deterministic simulated time.

Functions run at once, in the event loop, and take what they are stated to cost. Collectives move their data at once,
when all ranks have met, and take what the cost model says of the schedule that they become on the cluster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

import numpy as np
from trio.lowlevel import TrioToken

from .clock import Clock
from .collectives.kinds import Collective, Shape
from .collectives.reduce import Array
from .collectives.select import plan, size_class
from .compute import ComputeFuture, ComputeStream
from .direct import run_here
from .engine import BaseEngine
from .errors import UsageError
from .future import Failure, pending_in, resolve
from .shapes import shape_only
from .virtual import (
    CALM,
    NO_INTERFERENCE,
    ComputeCosts,
    Conditions,
    Fabric,
    Interference,
    Kernel,
    Profile,
    Reached,
    Roofline,
    Traffic,
    Transfer,
)

if TYPE_CHECKING:
    from topology import Cluster
    from transports import Transport

    from .collectives.call import Call
    from .collectives.cost.option import Option
    from .meeting import Channel, Meeting
    from .operation import CollectiveFuture
    from .rank import Rank

Operation: TypeAlias = "CollectiveFuture[object]"

__all__ = ["ModelledClock", "Virtual", "virtual_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Virtual:
    """The assumptions of a simulation: pass it as `clock=`, or "virtual" for the defaults.

    Attributes:
        dtype: That ranks compute in; their device's peak for it counts.
        efficiency: Share of that peak that computes reach, more than 0 and at most 1.
        memory_efficiency: Share of the memory's bandwidth that they reach.
        profile: A trace file of a real run: computes take what those of their name took there.
        conditions: Jitter, stragglers and slow wires, by seed.
        interference: How computes and communication slow each other down while they overlap; not at all by default.
        peer_direct: Whether network adapters read device memory themselves.
        shapes_only: Arrays have shape and dtype, and no data; see `overlap.shape_only`.
    """

    dtype: str = "bfloat16"
    efficiency: float = 1.0
    memory_efficiency: float = 1.0
    profile: str | PathLike[str] | Profile | None = None
    conditions: Conditions = CALM
    interference: Interference = NO_INTERFERENCE
    peer_direct: bool = True
    shapes_only: bool = False

    def meta(self) -> dict[str, str]:
        """Return what a timeline should say of it."""
        return {
            "dtype": self.dtype,
            "efficiency": f"{self.efficiency:g}",
            "memory efficiency": f"{self.memory_efficiency:g}",
            "peer direct": "yes" if self.peer_direct else "no",
            "conditions": str(self.conditions),
            "interference": str(self.interference),
        }


class ModelledClock(Clock):
    """Virtual time, and who works in it.

    Args:
        assumptions: Of the simulation.
        cluster: The machine.

    Raises:
        UsageError: If the profile cannot be read, or the machine has no peak for the dtype.
    """

    name = "virtual"

    def __init__(self, assumptions: Virtual, cluster: Cluster) -> None:
        self.assumptions = assumptions
        self.kernel = Kernel()
        fabric = Fabric(
            cluster,
            dtype=assumptions.dtype,
            peer_direct=assumptions.peer_direct,
            conditions=assumptions.conditions,
            interference=assumptions.interference,
        )
        self.traffic, self.fabric = Traffic(self.kernel, fabric), fabric
        self.costs = _costs(assumptions, cluster)

    @property
    def shapes_only(self) -> bool:  # type: ignore[override]
        """Whether arrays have a shape and no data."""
        return self.assumptions.shapes_only

    def empty(self, shape: Shape, dtype: np.dtype[np.generic]) -> Array:
        """Return a new array, or the shape of one."""
        return shape_only(shape, dtype) if self.shapes_only else super().empty(shape, dtype)

    def meta(self) -> dict[str, str]:
        """Return the assumptions."""
        return self.assumptions.meta()

    def now_ns(self) -> int:
        """Return the present instant, from 0."""
        return self.kernel.clock.now_ns

    def compute_stream(self, rank: Rank, token: TrioToken) -> ComputeStream:
        """Return a stream without a thread."""
        return ModelledCompute(rank, self)

    def engine(self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None) -> BaseEngine:
        """Return the engine that prices what it moves."""
        return ModelledEngine(self, cluster, algorithm)


def _costs(assumptions: Virtual, cluster: Cluster) -> ComputeCosts:
    profile = assumptions.profile
    if profile is not None and not isinstance(profile, Profile):
        profile = Profile.read(profile)
    roofline = Roofline.of(
        cluster,
        dtype=assumptions.dtype,
        efficiency=assumptions.efficiency,
        memory_efficiency=assumptions.memory_efficiency,
    )
    return ComputeCosts(roofline=roofline, profile=profile)


class ModelledCompute(ComputeStream):
    """A rank's compute stream in virtual time: functions run at their start, and end when their cost is over."""

    def __init__(self, rank: Rank, clock: ModelledClock) -> None:
        super().__init__(rank)
        self._clock, self._number = clock, 0
        self._luck = clock.assumptions.conditions.luck(rank.rank)
        self._queue: deque[ComputeFuture[object]] = deque()
        self._busy = self._stopped = False

    def price(
        self, name: str, *, seconds: float | None, flops: float | None, bytes_moved: float | None
    ) -> tuple[int, str] | None:
        """Return what a function takes, and what limits it.

        Raises:
            UsageError: If nothing says so, or a figure cannot be meant.
        """
        return self._clock.costs.duration_ns(name, seconds=seconds, flops=flops, bytes_moved=bytes_moved)

    def submit(self, operation: ComputeFuture[object]) -> None:
        """Append a function."""
        self._queue.append(operation)
        if not self._busy:
            self._next()

    def stop(self) -> None:
        """Let no other function start."""
        self._stopped = True

    async def ended(self) -> None:
        """Nothing runs on its own here."""

    def _next(self) -> None:
        """Start the first function, as soon as its arguments exist."""
        self._busy = False
        if not self._queue or self._stopped:
            return
        self._busy = True
        pending = pending_in(self._queue[0].args)
        if pending:
            pending[0]._on_done(partial(self._rank._world.soon, self._next))
        else:
            self._start(self._queue.popleft())

    def _start(self, operation: ComputeFuture[object]) -> None:
        if operation.done:  # given up
            self._next()
            return
        started_ns = self._clock.now_ns()
        args, failure = resolve(operation.args)
        if failure is not None:
            self._end(operation, None, failure)
            return
        value = None
        assert operation.function is not None
        assert operation.cost is not None
        try:
            value = operation.function(*cast("tuple[object, ...]", args))
        except Exception as error:
            failure = Failure(error)
        operation.function, operation.args = None, ()
        cost_ns, kind = operation.cost
        done = partial(self._done, operation, started_ns, value, failure)
        self._take(self._luck.compute_ns(cost_ns), kind, done)

    def _take(self, duration_ns: int, kind: str, done: Callable[[], None]) -> None:
        """Let time pass; where computes and communication slow each other down, the fabric knows how much."""
        clock, rank = self._clock, self._rank.rank
        if clock.fabric.interference.off:
            clock.kernel.at(clock.now_ns() + duration_ns, rank, done)
            return
        self._number += 1
        transfer = clock.fabric.compute(("compute", str(rank), self._number), kind, rank, duration_ns)
        clock.traffic.begin(transfer, lambda _: done())

    def _done(self, operation: ComputeFuture[object], started_ns: int, value: object, failure: Failure | None) -> None:
        self._rank.record(("compute", "compute", operation.name, started_ns, self._clock.now_ns(), None))
        self._end(operation, value, failure)

    def _end(self, operation: ComputeFuture[object], value: object, failure: Failure | None) -> None:
        if not operation.done:  # the world may have given it up meanwhile
            operation._settle(value, failure)
            self._ended(operation)
        self._next()


class ModelledEngine(BaseEngine):
    """Moves data at once, when all ranks have met, and lets the modelled time pass."""

    _MEANT_AS: ClassVar = {Collective.BARRIER: "all_reduce"}

    def __init__(self, clock: ModelledClock, cluster: Cluster, algorithm: str | None) -> None:
        self._clock, self._cluster, self._algorithm = clock, cluster, algorithm
        self._options: dict[tuple[object, ...], Option] = {}

    def direct(self, size: int) -> bool:
        """All ranks meet; what happens then is a matter of the model."""
        return True

    def arrived(self, channel: Channel, meeting: Meeting, operation: Operation) -> None:
        """Move the data of an operation that has met, and begin its time."""
        operations, pattern = cast("list[Operation]", meeting.arrived), cast("Call", meeting.pattern)
        operation.lend()
        if self._clock.shapes_only:
            for end in operations:
                end.fit(pattern)
        else:
            with np.errstate(all="ignore"):
                run_here(operations, pattern)
        transfer = self._transfer(channel, operations, pattern)
        self._clock.traffic.begin(transfer, partial(self._reached, operations, pattern))

    def start(self, channel: Channel, meeting: Meeting) -> None:
        """Never asked for: no other process takes part."""
        raise AssertionError("a modelled world is one process")

    async def aclose(self) -> None:
        """Nothing is left to wait for."""

    def _transfer(self, channel: Channel, operations: list[Operation], pattern: Call) -> Transfer:
        fabric, key = self._clock.fabric, ("comm", str(channel.key), operations[0].seq)
        if pattern.kind is Collective.P2P:
            (src, dst), (first, second) = channel.members, operations
            return fabric.message(key, src, dst, pattern.nbytes, late_ns=second.started_ns - first.started_ns)
        option = self._option(channel.members, pattern)
        for operation in operations:
            operation.algorithm = option.algorithm
        arrivals_ns = np.array([operation.started_ns for operation in operations], np.int64)
        return fabric.collective(key, pattern.kind.value, option, pattern.nbytes, channel.members, arrivals_ns)

    def _option(self, members: tuple[int, ...], pattern: Call) -> Option:
        key = (pattern.kind, size_class(pattern.nbytes), pattern.dtype, pattern.root, pattern.pairs, members)
        found = self._options.get(key)
        if found is None:
            found = self._options[key] = self._chosen(members, pattern)
        return found

    def _chosen(self, members: tuple[int, ...], pattern: Call) -> Option:
        choose = partial(
            plan,
            self._MEANT_AS.get(pattern.kind, pattern.kind.value),
            size_class(pattern.nbytes),
            self._cluster,
            members,
            dtype="uint8" if pattern.dtype is None else str(pattern.dtype),
            root=pattern.root,
            pairs=pattern.pairs if pattern.kind is Collective.PERMUTE else None,
            peer_direct=self._clock.assumptions.peer_direct,
        )
        return choose().option if self._algorithm is None else choose(algorithm=self._algorithm).option

    def _reached(self, operations: list[Operation], pattern: Call, reached: Reached) -> None:
        """Some ranks are done."""
        met_ns = max(operation.started_ns for operation in operations)
        meeting, now_ns = operations[0].describe(pattern, met_ns), self._clock.now_ns()
        for position in reached.positions.tolist():
            operations[position].finish(now_ns, meeting)


def virtual_of(clock: object) -> Virtual | None:
    """Read the `clock` argument of `run`: None is the real clock.

    Raises:
        UsageError: If it cannot be meant.
    """
    if clock == "real":
        return None
    if isinstance(clock, Virtual):
        return clock
    if clock == "virtual":
        return Virtual()
    raise UsageError(f"clock: {clock!r} is unknown; known are 'real', 'virtual' and overlap.Virtual(...)")
