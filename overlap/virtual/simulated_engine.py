"""The engine of a simulation: moves data at once, when all ranks have met, and lets the modelled time pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

import numpy as np

from ..collectives.congruence import congruence
from ..collectives.cost import on, parameters, rounds
from ..collectives.cost.option import Flat
from ..collectives.cost.startup import Startup
from ..collectives.generators import GENERATORS, fits, generate
from ..collectives.kinds import Collective
from ..collectives.placement import place
from ..collectives.select import DIRECT, plan, size_class
from ..errors import ScheduleError
from ..runtime.engine.mover import BaseEngine
from ..runtime.engine.shared_memory import run_here
from ..runtime.future import Failure
from . import Kernel, Order, Reached, Traffic, Transfer
from .simulated_compute import ModelledCompute

if TYPE_CHECKING:
    from topology import Cluster

    from ..collectives.call import Call
    from ..collectives.cost.option import Option
    from ..collectives.select import Plan
    from ..runtime.communicator import Channel, Meeting
    from ..runtime.operation import CollectiveFuture

Operation: TypeAlias = "CollectiveFuture[object]"

__all__ = ["ModelledEngine"]


class ModelledEngine(BaseEngine):
    """Moves data at once, when all ranks have met, and lets the modelled time pass.

    Args:
        traffic: What carries it, in the model.
        cluster: The machine.
        startup: What starting programs costs.
        algorithm: The only one to use; by default the cheapest for each operation.
        peer_direct: Whether network adapters read device memory themselves.
        shapes_only: Whether there is no data to move.
    """

    _MEANT_AS: ClassVar = {Collective.BARRIER: "all_reduce"}

    def __init__(
        self,
        traffic: Traffic,
        cluster: Cluster,
        *,
        startup: Startup,
        algorithm: str | None,
        peer_direct: bool,
        shapes_only: bool,
    ) -> None:
        self._traffic, self._cluster, self._algorithm = traffic, cluster, algorithm
        self._free, self._trigger_ns = startup == Startup(), round(startup.trigger_s * 1e9)
        self._peer_direct, self._shapes_only = peer_direct, shapes_only
        self._options: dict[tuple[object, ...], Option] = {}
        self._best: dict[tuple[object, ...], str] = {}

    def direct(self, size: int) -> bool:
        """All ranks meet; what happens then is a matter of the model."""
        return True

    def arrived(self, channel: Channel, meeting: Meeting, operation: Operation) -> None:
        """Move the data of an operation that has met, and begin its time."""
        try:
            self._move(meeting)
            if self._free:
                self._begin(channel, meeting)
            else:
                _once_launched(_ends(meeting), partial(self._trigger, channel, meeting))
        except Exception as error:  # no wire joins them, or no schedule fits: that is for the ranks to hear
            channel.fail_one(meeting, operation, Failure(error))

    def start(self, channel: Channel, meeting: Meeting) -> None:
        """Never asked for: no other process takes part."""
        raise AssertionError("a modelled world is one process")

    async def aclose(self) -> None:
        """Nothing is left to wait for."""

    # -- time ----------------------------------------------------------------------------------------------------

    def _move(self, meeting: Meeting) -> None:
        operations, pattern = _ends(meeting), _pattern(meeting)
        if self._shapes_only:  # there is nothing to lend or to move
            for operation in operations:
                operation.fit(pattern)
            return
        for operation in operations:
            operation.lend()
        with np.errstate(all="ignore"):
            run_here(operations, pattern)

    def _trigger(self, channel: Channel, meeting: Meeting) -> None:
        kernel, begin = self._traffic.kernel, partial(self._begin, channel, meeting)
        kernel.at(kernel.now_ns + self._trigger_ns, channel.members[0], begin, order=Order.TRANSFER)

    def _begin(self, channel: Channel, meeting: Meeting) -> None:
        operations, pattern = _ends(meeting), _pattern(meeting)
        arrivals_ns = [operation.started_ns for operation in operations]
        transfer = self._transfer(channel, operations, pattern, arrivals_ns)
        told = partial(_reached, operations, pattern, max(arrivals_ns), self._traffic.kernel)
        self._traffic.begin(transfer, told)

    def _transfer(
        self, channel: Channel, operations: list[Operation], pattern: Call, arrivals_ns: list[int]
    ) -> Transfer:
        fabric, name = self._traffic.fabric, channel.label
        key = ("comm", name, operations[0].seq)
        priority = min([operation.priority for operation in operations])
        if pattern.kind is Collective.P2P:
            (src, dst), late_ns = channel.members, arrivals_ns[-1] - arrivals_ns[0]
            # Whatever their tags, messages of a pair leave in the order of their sends.
            return fabric.message(key, src, dst, pattern.nbytes, late_ns=late_ns, priority=priority, lane=(src, dst))
        option = self._option(channel.members, pattern)
        for operation in operations:
            operation.algorithm = option.algorithm
        met_ns = np.array(arrivals_ns, np.int64)
        return fabric.collective(
            key, pattern.kind.value, option, pattern.nbytes, channel.members, met_ns, priority=priority, lane=name
        )

    def _option(self, members: tuple[int, ...], pattern: Call, *, like: str = "") -> Option:
        """Return what an operation becomes; `like` is what it became for others, who are like these."""
        key = (pattern.kind, size_class(pattern.nbytes), pattern.dtype, pattern.root, pattern.pairs, members)
        found = self._options.get(key)
        if found is None:
            found = self._options[key] = self._chosen(members, pattern, like or self._algorithm)
        return found

    def _chosen(self, members: tuple[int, ...], pattern: Call, insisted: str | None) -> Option:
        """Choose as the compiler of real worlds does: by cost, or what is insisted on wherever it exists."""
        collective = self._MEANT_AS.get(pattern.kind, pattern.kind.value)
        choose = partial(
            plan,
            collective,
            size_class(pattern.nbytes),
            self._cluster,
            members,
            dtype="uint8" if pattern.dtype is None else str(pattern.dtype),
            root=pattern.root,
            pairs=pattern.pairs if pattern.kind is Collective.PERMUTE else None,
            peer_direct=self._peer_direct,
        )
        if insisted is None or insisted not in (DIRECT, *GENERATORS[collective]):
            return self._cheapest(choose, members, pattern)
        try:
            return choose(algorithm=insisted).option
        except ScheduleError:
            if insisted == DIRECT or not fits(insisted, len(members)):
                return self._cheapest(choose, members, pattern)
        # It does not fit these wires; in its plain form it still takes this number of ranks.
        return self._plain(collective, insisted, members, pattern)

    def _cheapest(self, choose: Callable[..., Plan], members: tuple[int, ...], pattern: Call) -> Option:
        """Choose for the first of groups that sit alike, and the same for the others: a tenth of the time."""
        alike = congruence(self._cluster, members)
        key = (pattern.kind, size_class(pattern.nbytes), pattern.dtype, pattern.root, pattern.pairs, alike)
        known = None if alike is None else self._best.get(key)
        if known is not None:
            return choose(algorithm=known).option
        option = choose().option
        self._best[key] = option.algorithm
        return option

    def _plain(self, collective: str, algorithm: str, members: tuple[int, ...], pattern: Call) -> Option:
        make = partial(generate, collective, algorithm, len(members), root=pattern.root, pairs=pattern.pairs)
        figures = parameters(self._cluster, dtype=str(pattern.dtype or "uint8"), peer_direct=self._peer_direct)
        return Flat(algorithm, "", on(place(self._cluster, members), rounds(make()), parameters=figures), make)


def _ends(meeting: Meeting) -> list[Operation]:
    return cast("list[Operation]", meeting.arrived)


def _pattern(meeting: Meeting) -> Call:
    return cast("Call", meeting.pattern)


def _reached(operations: Sequence[Operation], pattern: Call, met_ns: int, kernel: Kernel, reached: Reached) -> None:
    """Finish the operation on those ranks that are done with it."""
    meeting, now_ns = operations[0].describe(pattern, met_ns), kernel.now_ns
    for position in reached.positions.tolist():
        operations[position].finish(now_ns, meeting)


def _once_launched(operations: Sequence[Operation], then: Callable[[], None]) -> None:
    """Call `then` when the programs that the operations belong to have started on all their ranks."""
    for operation in operations:
        stream = cast(ModelledCompute, operation.port.stream.rank._compute)
        launch = stream.launch_of(operation)
        if launch is not None:
            launch._on_done(partial(_once_launched, operations, then))
            return
    then()
