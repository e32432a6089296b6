"""Simulated engine, which moves data at once, when all ranks have met, and takes the modelled time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from ..collectives.kinds import Collective
from ..collectives.uneven import UnevenSchedule, make_uneven, row_lengths
from ..cost import Placed, Rounds, cost, rounds
from ..cost.candidates import place_on_cluster
from ..cost.choice import Choices
from ..cost.option import AlgorithmOption, Flat
from ..cost.select import DIRECT
from ..runtime.communicator import BaseEngine, Communicator
from ..runtime.context import RankContext
from ..runtime.engine.in_process import fit_all, run_here
from ..runtime.match import Match
from ..runtime.operation import Operation
from ..runtime.plan import CallPlan
from . import EventOrder, FabricDriver, FabricTransfer, Kernel, ReachedRanks
from .simulated_compute import SimulatedCompute

if TYPE_CHECKING:
    from topology import Cluster

    from ..collectives.call import Call
    from ..runtime.lane import Lane
    from ..runtime.message import Message


class ModelledPlan(CallPlan):
    """Plan of operations in modelled time, once all ranks have met.

    Args:
        begin: Begins the operation in modelled time.
        communicator: Of the group and stream.
        call: The call.
    """

    together = True

    def __init__(self, begin: Callable[[Communicator, Match], None], communicator: Communicator, call: Call) -> None:
        super().__init__(call)
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
        """Return True: the engine matches all ranks, whatever the algorithm of the model."""
        return True

    def carry(self, lane: Lane, send: Message[object], receive: Message[object], pattern: Call) -> None:
        """Move the data of a message at once, and take its modelled time, unless a receive must have it now."""
        match = Match([send, receive])
        match.pattern = pattern
        if not receive.at_once:
            self._move_and_begin(lane, match)
            return
        receive.fit(pattern)
        if not self._shapes_only:
            run_here([send, receive], pattern)
        now_ns = self._traffic.kernel.now_ns
        meeting = send.describe(pattern, now_ns)
        for operation in (send, receive):
            operation.finish(now_ns, meeting)

    def choose_soon(self, context: RankContext, look: Callable[[], None]) -> None:
        """Call `look` when all tasks are blocked in this instant, whatever their order."""
        kernel = self._traffic.kernel
        kernel.call_at(kernel.now_ns, context.rank, look, order=EventOrder.RATES)

    def plan(self, communicator: Communicator, call: Call, operation: Operation) -> CallPlan:
        """Return the plan, which takes the time of the model."""
        return ModelledPlan(self._move_and_begin, communicator, call)

    async def aclose(self) -> None:
        """Return at once, as nothing runs in the background."""

    # -- time ----------------------------------------------------------------------------------------------------

    def _move_and_begin(self, communicator: Communicator | Lane, match: Match) -> None:
        """Move the data of all ranks at once, and begin the modelled time of the operation."""
        operations, pattern = _arrived_operations(match), _matched_call(match)
        if self._shapes_only:  # there is no data to lock or to move
            fit_all(operations, pattern)
        else:
            for operation in operations:
                operation.lock()
            with np.errstate(all="ignore"):
                run_here(operations, pattern)
        self._begin_transfer(communicator, match)

    def _begin_transfer(self, communicator: Communicator | Lane, match: Match) -> None:
        """Begin the transfer of an operation; its ranks finish as the fabric reports them."""
        operations, pattern = _arrived_operations(match), _matched_call(match)
        arrivals_ns = [operation.started_ns for operation in operations]
        transfer = self._make_transfer(communicator, operations, pattern, arrivals_ns)
        on_reached = partial(_finish_reached, operations, pattern, max(arrivals_ns), self._traffic.kernel)
        for operation in operations:
            operation.start_moving(None)
        self._traffic.begin(transfer, on_reached)

    def _make_transfer(
        self, communicator: Communicator | Lane, operations: list[Operation], pattern: Call, arrivals_ns: list[int]
    ) -> FabricTransfer:
        """Return the transfer of a message or collective, by the chosen algorithm."""
        fabric, name = self._traffic.fabric, str(communicator.key)
        # Messages count from 0 again once a pair has been at rest; the instant makes their keys unique.
        key = ("comm", name, operations[0].seq, max(arrivals_ns))
        priority = min([operation.priority for operation in operations])
        if pattern.kind is Collective.P2P:
            (src, dst), late_ns = communicator.members, arrivals_ns[-1] - arrivals_ns[0]
            # Whatever their tags, messages of a pair leave in the order of their sends.
            return fabric.message(key, src, dst, pattern.nbytes, late_ns=late_ns, priority=priority, lane=(src, dst))
        option, nbytes = self._price_operation(communicator.members, pattern)
        for operation in operations:
            operation.algorithm = option.algorithm
        met_ns = np.array(arrivals_ns, np.int64)
        return fabric.collective_transfer(
            key, pattern.kind.value, option, nbytes, communicator.members, met_ns, priority=priority, lane=name
        )

    def _choose_option(self, members: tuple[int, ...], pattern: Call, *, like: str = "") -> AlgorithmOption:
        return self._choices.plan(pattern, members, like=like).option

    def _price_operation(self, members: tuple[int, ...], pattern: Call) -> tuple[AlgorithmOption, float]:
        """Return the option of an operation, and the bytes to price; blocks that differ are priced one by one."""
        option = self._choose_option(members, pattern)
        if not pattern.counts or option.algorithm == DIRECT:
            return option, pattern.nbytes
        placed = partial(place_on_cluster, self._cluster, members, peer_direct=self._peer_direct)
        return self._uneven.price(option, pattern, members, placed)


def _arrived_operations(match: Match) -> list[Operation]:
    return cast("list[Operation]", match)


def _matched_call(match: Match) -> Call:
    return cast("Call", match.pattern)


def _finish_reached(
    operations: Sequence[Operation], pattern: Call, met_ns: int, kernel: Kernel, reached: ReachedRanks
) -> None:
    match, now_ns = operations[0].describe(pattern, met_ns), kernel.now_ns
    for position in reached.positions.tolist():
        operations[position].finish(now_ns, match)


# Number of ranks beyond which tables take seconds: blocks are then priced as equal ones with the same sum of bytes.
_MOST_TABLE_RANKS = 512
# Prices to keep: calls of experts have new counts in every step.
_MOST_PRICES = 256

_OptionAndBytes: TypeAlias = tuple[AlgorithmOption, float]


class UnevenCosts:
    """Prices of calls with blocks that differ, in one world."""

    def __init__(self) -> None:
        self._tables: dict[tuple[AlgorithmOption, int], UnevenSchedule] = {}
        self._prices: dict[tuple[Call, tuple[int, ...]], _OptionAndBytes] = {}

    def price(
        self, even: AlgorithmOption, call: Call, members: tuple[int, ...], placed: Callable[[Rounds], Placed]
    ) -> _OptionAndBytes:
        """Return the option and the bytes by which to price a call; equal blocks are taken for many ranks.

        Args:
            even: The option of the call with equal blocks.
            call: The call.
            members: World ranks in group order.
            placed: Function that places rounds on the machine.
        """
        if len(members) > _MOST_TABLE_RANKS:
            return even, call.nbytes
        price = self._prices.get((call, members))
        if price is None:
            if len(self._prices) >= _MOST_PRICES:
                self._prices.clear()
            price = self._prices[call, members] = self._compute_price(even, call, placed)
        return price

    def _compute_price(self, even: AlgorithmOption, call: Call, placed: Callable[[Rounds], Placed]) -> _OptionAndBytes:
        """Return an option with the table of these blocks, or the even one with bytes that take as long."""
        # Slices that are pipelined through phases have no price as one table; the additional bytes are those of the
        # table in one piece.
        phased = len(even.parts) > 1
        table = self._uneven_table(even, 1 if phased else even.price(call.nbytes).slices)
        differing = placed(rounds(table, row_lengths(table, call.counts)))
        if not phased:
            return Flat(even.algorithm, even.detail, differing, lambda: table), call.nbytes
        equal, nbytes = placed(rounds(table)), call.nbytes
        without_s, equal_s = cost(equal, 0).total_s, cost(equal, nbytes).total_s
        differing_s = cost(differing, nbytes).total_s
        return even, nbytes * (differing_s - without_s) / (equal_s - without_s) if equal_s > without_s else nbytes

    def _uneven_table(self, even: AlgorithmOption, slices: int) -> UnevenSchedule:
        """Return the schedule of an option for blocks of any sizes, made once for each number of slices."""
        table = self._tables.get((even, slices))
        if table is None:
            if len(self._tables) >= _MOST_PRICES:
                self._tables.clear()
            table = self._tables[even, slices] = make_uneven(even.schedule(slices))
        return table
