"""Simulated engine, which moves data at once, when all ranks have met, and takes the modelled time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from ..collectives.kinds import Collective
from ..collectives.uneven import UnevenSchedule, make_uneven, slots_moved
from ..cost import Placed, Rounds, cost, rounds
from ..cost.candidates import placed_on
from ..cost.choice import Choices
from ..cost.option import AlgorithmOption, Flat
from ..cost.select import DIRECT
from ..runtime.communicator import BaseEngine, Communicator
from ..runtime.context import RankContext
from ..runtime.engine.in_process import fit_all, run_here
from ..runtime.executor import Executor
from ..runtime.match import Match
from ..runtime.operation import Operation
from . import EventOrder, FabricDriver, Kernel, Reached, Transfer
from .simulated_compute import SimulatedCompute

if TYPE_CHECKING:
    from topology import Cluster

    from ..collectives.call import Call


class Modelled(Executor):
    """Executor of operations in modelled time, once all ranks have met."""

    together = True

    def __init__(self, begin: Callable[[Communicator, Match], None], communicator: Communicator) -> None:
        self._begin, self._communicator = begin, communicator

    def __str__(self) -> str:
        return "model"

    def start(self, match: Match, operation: Operation) -> None:
        """Move the data, and begin the time of the operation."""
        self._begin(self._communicator, match)


class SimulatedEngine(BaseEngine):
    """Engine that moves data at once, when all ranks have met, and takes the modelled time.

    Args:
        traffic: The transfers of the model.
        cluster: The machine.
        algorithm: The only one to use; by default the cheapest for each operation.
        peer_direct: Whether network adapters read device memory themselves.
        shapes_only: Whether there is no data to move.
        computes: The compute streams, by rank.
    """

    def __init__(
        self,
        traffic: FabricDriver,
        cluster: Cluster,
        *,
        algorithm: str | None,
        peer_direct: bool,
        shapes_only: bool,
        computes: Mapping[int, SimulatedCompute],
    ) -> None:
        self._traffic, self._cluster = traffic, cluster
        self._peer_direct, self._shapes_only, self._computes = peer_direct, shapes_only, computes
        self._choices = Choices(cluster, algorithm, peer_direct=peer_direct)
        self._uneven = UnevenCosts()

    def direct(self, members: tuple[int, ...]) -> bool:
        """Return True: all ranks are matched, whatever the algorithm of the model."""
        return True

    def choose_soon(self, context: RankContext, look: Callable[[], None]) -> None:
        """Call `look` when all tasks are blocked in this instant, whatever their order."""
        kernel = self._traffic.kernel
        kernel.at(kernel.now_ns, context.rank, look, order=EventOrder.SETTLE)

    def executor(self, communicator: Communicator, call: Call, operation: Operation) -> Executor:
        """Return the executor, which takes the time of the model."""
        return Modelled(self._execute, communicator)

    async def aclose(self) -> None:
        """Return at once, as nothing runs in the background."""

    # -- time ----------------------------------------------------------------------------------------------------

    def _execute(self, communicator: Communicator, match: Match) -> None:
        operations, pattern = _ends(match), _pattern(match)
        if self._shapes_only:  # there is no data to lock or to move
            fit_all(operations, pattern)
        else:
            for operation in operations:
                operation.lock()
            with np.errstate(all="ignore"):
                run_here(operations, pattern)
        self._begin(communicator, match)

    def _begin(self, communicator: Communicator, match: Match) -> None:
        operations, pattern = _ends(match), _pattern(match)
        arrivals_ns = [operation.started_ns for operation in operations]
        transfer = self._transfer(communicator, operations, pattern, arrivals_ns)
        on_reached = partial(_reached, operations, pattern, max(arrivals_ns), self._traffic.kernel)
        for operation in operations:
            operation.start_moving(None)
        self._traffic.begin(transfer, on_reached)

    def _transfer(
        self, communicator: Communicator, operations: list[Operation], pattern: Call, arrivals_ns: list[int]
    ) -> Transfer:
        fabric, name = self._traffic.fabric, str(communicator.key)
        # Messages count from 0 again once a pair has been at rest; the instant makes their keys unique.
        key = ("comm", name, operations[0].seq, max(arrivals_ns))
        priority = min([operation.priority for operation in operations])
        if pattern.kind is Collective.P2P:
            (src, dst), late_ns = communicator.members, arrivals_ns[-1] - arrivals_ns[0]
            # Whatever their tags, messages of a pair leave in the order of their sends.
            return fabric.message(key, src, dst, pattern.nbytes, late_ns=late_ns, priority=priority, lane=(src, dst))
        option, nbytes = self._priced(communicator.members, pattern)
        for operation in operations:
            operation.algorithm = option.algorithm
        met_ns = np.array(arrivals_ns, np.int64)
        return fabric.collective(
            key, pattern.kind.value, option, nbytes, communicator.members, met_ns, priority=priority, lane=name
        )

    def _option(self, members: tuple[int, ...], pattern: Call, *, like: str = "") -> AlgorithmOption:
        """Return the algorithm option of a call; `like` is the algorithm of groups that behave alike."""
        return self._choices.plan(pattern, members, like=like).option

    def _priced(self, members: tuple[int, ...], pattern: Call) -> tuple[AlgorithmOption, float]:
        """Return the option of an operation, and the bytes to price; blocks that differ are priced one by one."""
        option = self._option(members, pattern)
        if not pattern.counts or option.algorithm == DIRECT:
            return option, pattern.nbytes
        placed = partial(placed_on, self._cluster, members, peer_direct=self._peer_direct)
        return self._uneven.priced(option, pattern, members, placed)


def _ends(match: Match) -> list[Operation]:
    return cast("list[Operation]", match.arrived)


def _pattern(match: Match) -> Call:
    return cast("Call", match.pattern)


def _reached(operations: Sequence[Operation], pattern: Call, met_ns: int, kernel: Kernel, reached: Reached) -> None:
    """Finish an operation on the ranks that are done with it."""
    match, now_ns = operations[0].describe(pattern, met_ns), kernel.now_ns
    for position in reached.positions.tolist():
        operations[position].finish(now_ns, match)


# Beyond so many ranks tables take seconds to go through: blocks are priced as equal ones of as many bytes.
_MOST_RANKS = 512
# Calls to keep the price of, with new counts in every step, as those of experts.
_REMEMBERED = 256

_Priced: TypeAlias = tuple[AlgorithmOption, float]


class UnevenCosts:
    """Prices of calls with blocks that differ, in one world."""

    def __init__(self) -> None:
        self._tables: dict[tuple[AlgorithmOption, int], UnevenSchedule] = {}
        self._known: dict[tuple[Call, tuple[int, ...]], _Priced] = {}

    def priced(
        self, even: AlgorithmOption, call: Call, members: tuple[int, ...], placed: Callable[[Rounds], Placed]
    ) -> _Priced:
        """Return an option, and the bytes to price.

        Args:
            even: The option of the call with equal blocks.
            call: The call.
            members: World ranks in group order.
            placed: Function that places rounds on the machine.
        """
        if len(members) > _MOST_RANKS:
            return even, call.nbytes
        price = self._known.get((call, members))
        if price is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            price = self._known[call, members] = self._computed(even, call, placed)
        return price

    def _computed(self, even: AlgorithmOption, call: Call, placed: Callable[[Rounds], Placed]) -> _Priced:
        # Slices that are pipelined through phases have no price as one table; the additional bytes are those of the
        # table in one piece.
        phased = len(even.parts) > 1
        table = self._table(even, 1 if phased else even.price(call.nbytes).slices)
        differing = placed(rounds(table, slots_moved(table, call.counts)))
        if not phased:
            return Flat(even.algorithm, even.detail, differing, lambda: table), call.nbytes
        equal, nbytes = placed(rounds(table)), call.nbytes
        without_s, equal_s = cost(equal, 0).total_s, cost(equal, nbytes).total_s
        differing_s = cost(differing, nbytes).total_s
        return even, nbytes * (differing_s - without_s) / (equal_s - without_s) if equal_s > without_s else nbytes

    def _table(self, even: AlgorithmOption, slices: int) -> UnevenSchedule:
        table = self._tables.get((even, slices))
        if table is None:
            if len(self._tables) >= _REMEMBERED:
                self._tables.clear()
            table = self._tables[even, slices] = make_uneven(even.schedule(slices))
        return table
