"""Simulated backend: the same program on a modelled cluster, in deterministic simulated time.

Functions run in the event loop, and end after their stated time. Collectives move their data at once when all ranks
have met, and end after the time of their schedule on the cluster, by the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import trio
from trio.lowlevel import TrioToken

from transports import NeuronLink

from ..collectives.kinds import Shape
from ..collectives.reduce import Array
from ..errors import UsageError
from ..runtime.backend import Backend
from ..runtime.communicator import BaseEngine
from ..runtime.communicators import Communicators
from ..runtime.compute import ComputeStream
from ..runtime.context import RankContext
from ..runtime.handover import Handover
from ..runtime.memory.arrays import shape_only
from ..runtime.world import World
from .compute_cost import ComputeCosts, Profile, Roofline
from .conditions import CALM, NO_INTERFERENCE, Conditions, Interference
from .fabric import SimulatedFabric
from .faults import Fates, Faults
from .injector import FaultInjector
from .kernel import Kernel
from .simulated_compute import ComputeStarter, SimulatedCompute
from .simulated_engine import SimulatedEngine
from .symmetric_world import SymmetricCommunicators, SymmetricEngine, SymmetricWorld
from .symmetry import AlikeBy, RankClasses
from .traffic import FabricDriver

if TYPE_CHECKING:
    from topology import Cluster
    from transports import Transport

    from ..timeline.span import Clock as ClockName


@dataclass(frozen=True, slots=True, kw_only=True)
class Virtual:
    """The assumptions of a simulation: pass it as `clock=`, or "virtual" for the defaults."""

    dtype: str = "bfloat16"  # Dtype of computes, which selects the device's peak
    efficiency: float = 1.0  # Share of that peak that computes reach, more than 0 and at most 1
    memory_efficiency: float = 1.0  # Share of the memory's bandwidth that computes reach, likewise
    # A trace file of a real run: a compute takes the median time of the computes of its name there.
    profile: str | PathLike[str] | Profile | None = None
    conditions: Conditions = CALM  # Jitter, stragglers and slow wires, by seed
    # Random faults: `overlap.Faults(seed=17)`; none by default. They exclude `alike`.
    faults: Faults | None = None
    # Slow-downs of computes and communication while they overlap; none by default.
    interference: Interference = NO_INTERFERENCE
    peer_direct: bool = True  # Whether network adapters read device memory themselves
    shapes_only: bool = False  # Arrays have shape and dtype, and no data; see `overlap.shape_only`
    # Classes of ranks that behave alike. Of each class only two ranks run: the first, which stands for all, and the
    # last, as a check. 1: all ranks are one class; n: n equal blocks of consecutive ranks, such as pipeline stages, are
    # the classes; or a function that returns the class of a rank. 0: every rank runs. It needs `shapes_only`,
    # conditions without jitter, stragglers or slow wires, and groups that are rows of a grid, such as those of meshes.
    # All ranks of a class are done with an operation when the last of them is. A message is taken to be sent by all
    # ranks of the sender's class, over the same distance.
    alike: AlikeBy = 0

    def meta(self) -> dict[str, str]:
        """Return the assumptions by name, as texts that a timeline shows."""
        return {
            "dtype": self.dtype,
            "efficiency": f"{self.efficiency:g}",
            "memory efficiency": f"{self.memory_efficiency:g}",
            "peer direct": "yes" if self.peer_direct else "no",
            "conditions": str(self.conditions),
            "interference": str(self.interference),
            **({"alike": "by a function" if callable(self.alike) else str(self.alike)} if self.alike else {}),
            **({"faults": str(self.faults)} if self.faults else {}),
        }


class _SharedNotes(dict[int, list[int]]):
    """A dict of the values of an operation, by rank; unlike `dict`, it supports weak references."""

    __slots__ = ("__weakref__",)


class SimulatedBackend(Backend):
    """Backend of virtual time on a modelled cluster.

    Args:
        assumptions: The assumptions of the simulation.
        cluster: The machine.
        began_ns: Instant at which the world begins.
        epoch: Number of the world: 0, and one more after each loss.
        members: By rank of this world, the rank's number in the first world; None: this is the first world.

    Raises:
        UsageError: The profile cannot be read, or the machine has no peak for the dtype.
    """

    assumptions: Virtual
    shapes_only: bool
    traffic: FabricDriver
    fabric: SimulatedFabric

    name: ClockName = "virtual"
    cleanup_s: float = 0.0
    detects_stalls = True

    def __init__(
        self,
        assumptions: Virtual,
        cluster: Cluster,
        *,
        began_ns: int = 0,
        epoch: int = 0,
        members: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.assumptions, self.shapes_only = assumptions, assumptions.shapes_only
        self.kernel: Kernel = Kernel()
        # After a loss, time continues from the end of the world before.
        self.kernel.clock.jump_to(began_ns)
        self._alike: RankClasses | None = None
        self._newest_step: int | None = None  # Step that a rank has begun last
        self._pulse: Callable[[int, int | None], None] | None = None
        self._notes = WeakValueDictionary[tuple[object, int], _SharedNotes]()  # an entry exists while a rank holds it
        fabric = SimulatedFabric(
            cluster,
            peer_direct=assumptions.peer_direct,
            conditions=assumptions.conditions,
            interference=assumptions.interference,
        )
        self.traffic, self.fabric = FabricDriver(self.kernel, fabric), fabric
        faults = assumptions.faults
        self._injector = FaultInjector(Fates(faults, epoch=epoch), self.kernel) if faults else None
        if self._injector is not None:
            self._injector.members = members
        self._starts = ComputeStarter(
            self.traffic, _make_compute_costs(assumptions, cluster), assumptions.conditions, self._injector
        )

    def empty(self, shape: Shape, dtype: np.dtype[np.generic]) -> Array:
        """Return a new array; with `shapes_only`, one without data."""
        return shape_only(shape, dtype) if self.shapes_only else super().empty(shape, dtype)

    def make_call_later(self, handover: Handover) -> Callable[[Callable[[], None]], None]:
        """Return a function that queues a call until all tasks are blocked: a wake-up now could reorder tasks."""
        return self.kernel.late_calls.append

    def shared_integers(self, key: object, seq: int) -> dict[int, list[int]]:
        """Return the values of an operation by rank: one dict for all ranks, which exists as long as a rank holds it.

        Args:
            key: Key of the group.
            seq: Number of the operation.
        """
        return self._notes.setdefault((key, seq), _SharedNotes())

    def start_time_limit(self, timeout_s: float, stop: Callable[[], None], nursery: trio.Nursery) -> None:
        """Call `stop` after a time, if the program still runs then.

        Args:
            timeout_s: Virtual seconds.
            stop: The function, which must not block.
            nursery: Not used: the kernel calls `stop`.
        """
        self.kernel.set_limit(self.kernel.now_ns + round(timeout_s * 1e9), stop)

    def timeline_metadata(self) -> dict[str, str]:
        """Return the assumptions by name, and "peak" if some compute was priced by the device's peak."""
        return self.assumptions.meta() | ({"peak": "used"} if self._starts.rated else {})

    def beat(self, pulse: Callable[[int, int | None], None]) -> None:
        """Call `pulse` with the instant and the newest step whenever an event is due or a rank begins a step."""
        self._pulse, self.kernel.on_instant = pulse, self._send_pulse

    def _send_pulse(self) -> None:
        """Call the function that `beat` was given, if any."""
        if self._pulse is not None:
            self._pulse(self.now_ns(), self._newest_step)

    @property
    def dead(self) -> frozenset[int]:
        """Ranks that have died of faults."""
        return frozenset(self._injector.fates.dead) if self._injector is not None else frozenset()

    def now_ns(self) -> int:
        """Return the present instant, from 0."""
        return self.kernel.clock.now_ns

    def world(
        self, size: int, cluster: Cluster, *, algorithm: str | None, check: str | None = None, **settings: Any
    ) -> World:
        """Return a world in virtual time. If `assumptions.alike` is set, only representatives of the ranks run.

        Args:
            size: Number of ranks in the world.
            cluster: The machine.
            algorithm: The only algorithm to use; None: the cheapest.
            check: How arguments of ranks are compared; with `assumptions.alike` they are not.
            settings: Further arguments of `World`.

        Raises:
            UsageError: `assumptions.alike` does not fit the other assumptions, or the number of ranks.
        """
        transport, self._alike = NeuronLink(size), _classify_ranks(self.assumptions, size)
        settings |= {"algorithm": algorithm, "backend": self}
        if self._alike is not None and self._injector is None:
            return SymmetricWorld(size, cluster, transport, alike=self._alike, **settings)
        world = World(size, cluster, transport, check=check, **settings)
        if self._injector is not None:
            self._injector.world = world
        return world

    def make_communicators(self, engine: BaseEngine) -> Communicators:
        """Return the communicators of the world: such as inject faults, or such in which one rank stands for others.

        Call it after `world`, which determines the classes of ranks that behave alike.

        Args:
            engine: The engine of the world.
        """
        if self._alike is not None and self._injector is None:
            return SymmetricCommunicators(engine, self._alike)
        communicators = super().make_communicators(engine)
        if self._injector is not None:
            communicators.use_interceptor(self._injector)
        return communicators

    def make_compute_stream(self, context: RankContext, lane: str) -> ComputeStream:
        """Return a compute stream of a rank, which has no thread; `lane` is its name in timelines."""
        return SimulatedCompute(context, self._starts, lane)

    def make_engine(
        self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None
    ) -> BaseEngine:
        """Return the engine, which prices operations by the cost model.

        Args:
            transport: Not used: nothing is sent.
            cluster: The machine.
            token: Not used: nothing runs in other threads.
            algorithm: The only algorithm to use; None: the cheapest.
        """
        kind = SymmetricEngine if self.assumptions.alike else SimulatedEngine
        return kind(
            self.traffic,
            cluster,
            algorithm=algorithm,
            peer_direct=self.assumptions.peer_direct,
            shapes_only=self.shapes_only,
        )

    @contextmanager
    def apply_fault_seed(self) -> Iterator[None]:
        """In the block, order tasks by the faults' seed, and add the seed to errors; without faults do nothing."""
        if self._injector is None:
            yield
            return
        try:
            with self._injector.fates.order_tasks():
                yield
        except Exception as error:
            error.add_note(self._injector.fates.repeat_text)
            raise

    def on_step_begin(self, context: RankContext) -> None:
        """Record the step that a rank begins, and report it to the function of `beat`."""
        self._newest_step = context.step
        self._send_pulse()


def _classify_ranks(assumptions: Virtual, size: int) -> RankClasses | None:
    """Return the classes of ranks that behave alike; None if all ranks run.

    Raises `UsageError` if arrays have data, if there are faults or imperfections, or if the classes do not fit the
    ranks.
    """
    if not assumptions.alike:
        return None
    if not assumptions.shapes_only:
        raise UsageError("alike: needs shapes_only=True; without all ranks' data there are no results")
    if assumptions.faults is not None:
        raise UsageError(f"alike: ranks are not alike where things go wrong ({assumptions.faults}); leave out alike")
    if not assumptions.conditions.calm:
        raise UsageError(f"alike: ranks are not alike where there is {assumptions.conditions}; leave out alike")
    return RankClasses.of(assumptions.alike, size)


def _make_compute_costs(assumptions: Virtual, cluster: Cluster) -> ComputeCosts:
    """Return the costs of computes: of the profile, if there is one, and the cluster's roofline."""
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


def parse_clock(clock: object) -> Virtual | None:
    """Return the assumptions of the `clock` argument of `run`; None for the real clock.

    Raises:
        UsageError: The argument is neither "real", "virtual" nor a `Virtual`.
    """
    if clock == "real":
        return None
    if isinstance(clock, Virtual):
        return clock
    if clock == "virtual":
        return Virtual()
    raise UsageError(f"clock: {clock!r} is unknown; known are 'real', 'virtual' and overlap.Virtual(...)")
