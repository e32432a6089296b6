"""Engine of virtual time: when all ranks have met, it moves the data at once; ranks finish after the modelled time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from ..collectives.kinds import Collective
from ..collectives.uneven import UnevenSchedule, make_uneven, row_lengths
from ..cost.candidates import place_rounds_on_cluster
from ..cost.choice import Choices
from ..cost.clocks import cost
from ..cost.option import AlgorithmOption, Flat
from ..cost.placed import Placed
from ..cost.remembered import LimitedCache
from ..cost.rounds import Rounds, read_rounds
from ..cost.select import DIRECT
from ..runtime.communicator import BaseEngine, Communicator
from ..runtime.context import RankContext
from ..runtime.engine.in_process import make_result_arrays, run_in_this_thread
from ..runtime.match import Match
from ..runtime.operation import Operation
from ..runtime.plan import CallPlan
from .fabric import FabricTransfer, ReachedRanks
from .kernel import EventOrder, Kernel
from .traffic import FabricDriver

if TYPE_CHECKING:
    from topology import Cluster

    from ..collectives.call import Call
    from ..runtime.lane import Lane
    from ..runtime.message import Message


class ModelledPlan(CallPlan):
    """Plan of operations that take the modelled time; they start when all ranks have met.

    Args:
        begin: Function that moves the data of a match, and begins the time of the operation.
        communicator: Communicator of the group and stream.
        call: The call.
    """

    runs_all_ranks = True

    def __init__(self, begin: Callable[[Communicator, Match], None], communicator: Communicator, call: Call) -> None:
        super().__init__(call)
        self._begin, self._communicator = begin, communicator

    def __str__(self) -> str:
        return "model"

    def start(self, match: Match, operation: Operation) -> None:
        """Move the data, and begin the time of the operation."""
        self._begin(self._communicator, match)


class SimulatedEngine(BaseEngine):
    """Engine that moves the data of an operation when all ranks have met, and ends it after the modelled time.

    Args:
        traffic: The transfers in flight.
        cluster: The machine.
        algorithm: Name of the only algorithm to use; None: the cheapest one for each operation.
        peer_direct: Whether network adapters read device memory themselves.
        shapes_only: Whether there is no data to move.
    """

    def __init__(
        self,
        traffic: FabricDriver,
        cluster: Cluster,
        *,
        algorithm: str | None,
        peer_direct: bool,
        shapes_only: bool,
    ) -> None:
        self._traffic, self._cluster = traffic, cluster
        self._peer_direct, self._shapes_only = peer_direct, shapes_only
        self._choices = Choices(cluster, algorithm, peer_direct=peer_direct)
        self._uneven = UnevenCosts()

    def is_direct(self, members: tuple[int, ...]) -> bool:
        """Return True: the engine matches all ranks, whatever the algorithm of the model."""
        return True

    def carry_message(self, lane: Lane, send: Message[object], receive: Message[object], pattern: Call) -> None:
        """Move the data of a message now; both ends end after the modelled time, or now if `receive.moves_at_once`.

        Args:
            lane: Lane of the message.
            send: The send.
            receive: The receive.
            pattern: Call of both, with dtype and shape.
        """
        match = Match([send, receive])
        match.pattern = pattern
        if not receive.moves_at_once:
            self._move_data_and_begin(lane, match)
            return
        receive.prepare_result(pattern)  # a receive of any length gets its memory
        if not self._shapes_only:
            run_in_this_thread([send, receive], pattern)
        now_ns = self._traffic.kernel.now_ns
        meeting = send.describe_meeting(pattern, now_ns)
        for operation in (send, receive):
            operation.finish(now_ns, meeting)

    def choose_message_soon(self, context: RankContext, look: Callable[[], None]) -> None:
        """Call `look` later in this instant, when all tasks are blocked, so that the order of tasks does not matter.

        Args:
            context: The rank for which to call it: several calls are made in the order of ranks.
            look: The function, which must not block.
        """
        kernel = self._traffic.kernel
        kernel.call_at(kernel.now_ns, context.rank, look, order=EventOrder.RATES)

    def make_plan(self, communicator: Communicator, call: Call, operation: Operation) -> CallPlan:
        """Return the plan of a call, which takes the modelled time.

        Args:
            communicator: Communicator of the group and stream.
            call: The call.
            operation: The operation; the plan does not depend on it.
        """
        return ModelledPlan(self._move_data_and_begin, communicator, call)

    async def aclose(self) -> None:
        """Return at once: nothing runs in the background."""

    # -- time ----------------------------------------------------------------------------------------------------

    def _move_data_and_begin(self, communicator: Communicator | Lane, match: Match) -> None:
        """Move the data of all ranks at once, and begin the modelled time of the operation."""
        operations, pattern = cast("list[Operation]", match), cast("Call", match.pattern)  # all have arrived
        if self._shapes_only:  # there is no data to lock or to move
            make_result_arrays(operations, pattern)
        else:
            for operation in operations:
                operation.lock_arrays()
            with np.errstate(all="ignore"):
                run_in_this_thread(operations, pattern)
        self._begin_transfer(communicator, operations, pattern)

    def _begin_transfer(self, communicator: Communicator | Lane, operations: list[Operation], pattern: Call) -> None:
        """Begin the transfer of an operation; ranks finish when the fabric reports that they are done.

        `operations` are those of all ranks; of a message, the send and the receive.
        """
        arrivals_ns = [operation.started_ns for operation in operations]
        transfer = self._make_transfer(communicator, operations, pattern, arrivals_ns)
        on_reached = partial(_finish_reached_ranks, operations, pattern, max(arrivals_ns), self._traffic.kernel)
        for operation in operations:
            operation.start_moving(None)
        self._traffic.begin_transfer(transfer, on_reached)

    def _make_transfer(
        self, communicator: Communicator | Lane, operations: list[Operation], pattern: Call, arrivals_ns: list[int]
    ) -> FabricTransfer:
        """Return the transfer of a message, or of a collective with the chosen algorithm.

        Sets the name of the algorithm in the operations of a collective. `arrivals_ns` is in the order of `operations`.
        """
        fabric, name = self._traffic.fabric, str(communicator.key)
        # Numbers of messages begin at 0 again after a pair had none under way: the instant makes keys unique.
        key = ("comm", name, operations[0].seq, max(arrivals_ns))
        priority = min([operation.priority for operation in operations])
        if pattern.kind is Collective.P2P:
            (src, dst), late_ns = communicator.members, arrivals_ns[-1] - arrivals_ns[0]
            # Messages of a pair leave in the order of their sends, whatever their tags: they share one lane.
            return fabric.message_transfer(
                key, src, dst, pattern.nbytes, late_ns=late_ns, priority=priority, lane=(src, dst)
            )
        option, nbytes = self._price_operation(communicator.members, pattern)
        for operation in operations:
            operation.algorithm = option.algorithm
        met_ns = np.array(arrivals_ns, np.int64)
        return fabric.collective_transfer(
            key, pattern.kind.value, option, nbytes, communicator.members, met_ns, priority=priority, lane=name
        )

    def _choose_option(self, members: tuple[int, ...], pattern: Call, *, like: str = "") -> AlgorithmOption:
        """Return the chosen option of a call, preferably with the algorithm `like` of similar groups ("": none)."""
        return self._choices.plan(pattern, members, like=like).option

    def _price_operation(self, members: tuple[int, ...], pattern: Call) -> tuple[AlgorithmOption, float]:
        """Return the option of a collective, and the number of bytes by which to price it.

        If blocks differ in size, these are from `UnevenCosts`.
        """
        option = self._choose_option(members, pattern)
        if not pattern.counts or option.algorithm == DIRECT:
            return option, pattern.nbytes
        placed = partial(place_rounds_on_cluster, self._cluster, members, peer_direct=self._peer_direct)
        return self._uneven.price(option, pattern, members, placed)


def _finish_reached_ranks(
    operations: Sequence[Operation], pattern: Call, met_ns: int, kernel: Kernel, reached: ReachedRanks
) -> None:
    """Finish the operations of the ranks that are done with a transfer, at the kernel's present instant."""
    match, now_ns = operations[0].describe_meeting(pattern, met_ns), kernel.now_ns
    for position in reached.positions.tolist():
        operations[position].finish(now_ns, match)


# With more ranks than this, a table would take seconds: blocks are priced as equal ones with the same sum of bytes.
_MOST_TABLE_RANKS = 512
# Prices to remember: calls in a mixture of experts have new counts in every step.
_MOST_PRICES = 256

_OptionAndBytes: TypeAlias = tuple[AlgorithmOption, float]


class UnevenCosts:
    """Prices of collectives whose ranks send blocks of different sizes, remembered for one world."""

    def __init__(self) -> None:
        # Schedule for blocks of any sizes, by option and number of slices.
        self._tables = LimitedCache[tuple[AlgorithmOption, int], UnevenSchedule](_MOST_PRICES)
        # Result of `price`, by call, which has the sizes of the blocks, and world ranks.
        self._prices: LimitedCache[tuple[Call, tuple[int, ...]], _OptionAndBytes] = LimitedCache(_MOST_PRICES)

    def price(
        self, even: AlgorithmOption, call: Call, members: tuple[int, ...], placed: Callable[[Rounds], Placed]
    ) -> _OptionAndBytes:
        """Return the option, and the number of bytes, by which to price a call with blocks of different sizes.

        With more than `_MOST_TABLE_RANKS` ranks, blocks are taken to be equal: the result is `even` and the call's
        bytes.

        Args:
            even: The option of the call if blocks were equal.
            call: The call, with the sizes of the blocks.
            members: World ranks in group order.
            placed: Function that places rounds on the machine.
        """
        if len(members) > _MOST_TABLE_RANKS:
            return even, call.nbytes
        return self._prices.find_or_compute((call, members), lambda: self._compute_price(even, call, placed))

    def _compute_price(self, even: AlgorithmOption, call: Call, placed: Callable[[Rounds], Placed]) -> _OptionAndBytes:
        """Compute the result of `price`, which has the arguments.

        For an option with one phase: an option with the schedule of these blocks, and the call's bytes. For several
        phases: `even`, and the number of bytes with which equal blocks take as long as these blocks.
        """
        nbytes, is_phased = call.nbytes, len(even.parts) > 1
        # Slices that are pipelined through phases have no price as one table. So both kinds of blocks are compared in
        # one slice.
        slices = 1 if is_phased else even.price(nbytes).slices
        table = self._tables.find_or_compute((even, slices), lambda: make_uneven(even.schedule(slices)))
        uneven = placed(read_rounds(table, row_lengths(table, call.counts)))
        if not is_phased:
            return Flat(even.algorithm, even.detail, uneven, lambda: table), nbytes
        equal = placed(read_rounds(table))
        latency_s, equal_s, uneven_s = cost(equal, 0).total_s, cost(equal, nbytes).total_s, cost(uneven, nbytes).total_s
        if equal_s <= latency_s:
            return even, nbytes
        # A time is latency + bytes * factor: scale the bytes so that equal blocks take `uneven_s`.
        return even, nbytes * (uneven_s - latency_s) / (equal_s - latency_s)
