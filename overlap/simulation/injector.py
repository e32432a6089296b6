"""Injector of faults into simulated worlds: ranks die, and a rank's part in an operation arrives late or never."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import trio

from ..errors import PeerLostError
from ..runtime.context import RankContext
from ..runtime.interceptor import Interceptor, Place
from ..runtime.match import Match
from ..runtime.operation import Operation
from ..runtime.outstanding import IssuedFuture
from ..runtime.world import World
from .faults import Fates
from .kernel import EventOrder, Kernel

T = TypeVar("T")


class FaultInjector(Interceptor):
    """Injector of deaths, delays and losses into the ranks of one run.

    Args:
        fates: Draws the faults.
        kernel: Kernel of the virtual time.

    Attributes:
        fates: Draws the faults.
        kernel: Kernel of the virtual time.
        members: By rank of this world, the rank's number in the first world; None: the same number.
        world: The world of the ranks; set once that is made.
    """

    fates: Fates
    kernel: Kernel
    world: World

    def __init__(self, fates: Fates, kernel: Kernel) -> None:
        self.fates, self.kernel = fates, kernel
        self.members: Sequence[int] | None = None
        self._lives: dict[int, trio.CancelScope] = {}  # cancels the program of a rank, by rank
        self._delayed: dict[Operation, object] = {}  # operations that arrive later, each with a token of its delay

    async def run_program(self, program: Callable[[], Awaitable[T]], context: RankContext) -> T:
        """Run a rank's program and return its result; if the rank dies, wait until the world cancels this task.

        Args:
            program: The program.
            context: The rank.
        """
        rank = context.rank
        for time_s, member in self.fates.faults.kills:
            if member == (rank if self.members is None else self.members[rank]):
                kill = partial(self.kill, context, f"{time_s:g} s")
                self.kernel.call_at(max(self.kernel.now_ns, round(time_s * 1e9)), rank, kill)
        try:
            with trio.CancelScope() as life:
                self._lives[rank] = life
                result = await program()
                if rank not in self.fates.dead:
                    return result
        except Exception:
            if rank not in self.fates.dead:  # errors of a dead rank's program are dropped
                raise
        await trio.sleep_forever()
        raise AssertionError("this is a bug in overlap, please report it: the dead are only cancelled")

    # -- operations ----------------------------------------------------------------------------------------------------

    def arrive(self, place: Place, operation: Any) -> None:
        """Let a rank's operation arrive now, later, or never, or kill the rank before or after it, as `Fates` draws.

        Args:
            place: Where the operation is matched.
            operation: The operation; its arrays are locked from now on. Operations of a dead rank are ignored.
        """
        context = operation.context
        if context.rank in self.fates.dead:
            return
        fate = self.fates.draw_next_fate(context.rank, operation.step)
        operation.lock_arrays()

        def arrive_now() -> None:
            """Let the operation arrive; then kill its rank if the fate says so."""
            place.match(operation)
            if fate.dies_at is not None:
                self.kill(context, describe_place(operation))

        # An arrival takes no time here, so a rank dies either before it (`dies_at` below 0.5) or after it.
        if fate.dies_at is not None and fate.dies_at < 0.5:
            self.kill(context, describe_place(operation))
        elif fate.lost:  # after `silence_s` the other ranks give the rank up
            self._report_loss(context, f"did not arrive at {describe_place(operation)}", self.fates.faults.silence_s)
        elif fate.late_ns:
            due_ns = self.kernel.now_ns + fate.late_ns
            self.kernel.call_at(due_ns, context.rank, self.delay_arrival(operation, arrive_now), order=EventOrder.WAKE)
        else:
            arrive_now()

    def delay_arrival(self, operation: Operation, arrive: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `arrive`, unless the operation was withdrawn or has ended by then."""
        token = self._delayed[operation] = object()

        def arrive_late() -> None:
            """Let the operation arrive now, if it is still expected and its rank is alive."""
            if self._delayed.get(operation) is token:
                del self._delayed[operation]
                if not operation.done and operation.context.rank not in self.fates.dead:
                    operation.started_ns = self.kernel.now_ns
                    arrive()

        return arrive_late

    def withdraw_held_receive(self, operation: Operation) -> bool:
        """Withdraw a delayed receive, so that it never arrives; return False if it is not delayed."""
        return self._delayed.pop(operation, None) is not None

    def may_start(self, match: Match, operation: Operation) -> bool:
        """Whether the operations of a match may start: only if no rank of the group is dead. Otherwise they wait."""
        return self.fates.dead.isdisjoint(operation.port.communicator.members)

    # -- deaths --------------------------------------------------------------------------------------------------------

    def kill(self, context: RankContext, event: str) -> None:
        """Kill a rank, unless it is dead or has ended; the other ranks notice after `notice_s`.

        Args:
            context: The rank.
            event: Event or instant of the death, for the error.
        """
        if context.rank not in self.fates.dead and not context.closed:
            self.stop(context.rank)
            self._report_loss(context, f"died at {event}", self.fates.faults.notice_s)

    def stop(self, rank: int) -> None:
        """Cancel the program of a rank, and count it as dead; other ranks are not notified."""
        self.fates.dead.add(rank)
        self._lives[rank].cancel(reason="stopped by a fault")

    def _report_loss(self, context: RankContext, event: str, after_s: float) -> None:
        """Fail the other ranks with a `PeerLostError` after `after_s` of virtual time, in which they notice the loss.

        `event` ends a sentence about the lost rank, such as "died at 0.5 s".
        """
        error = PeerLostError(
            f"rank {context.rank} {event}, {self.fates.fault_origin(context.rank)}", culprit=context.rank
        )
        # the rank's open operations now, for the error
        fail = partial(self.world.end_by_culprit, context.rank, error, context.outstanding.operation_lines())
        due_ns = self.kernel.now_ns + round(after_s * 1e9)
        self.kernel.call_at(due_ns, context.rank, fail, order=EventOrder.TRANSFER)


def describe_place(issued: IssuedFuture[object]) -> str:
    """Return the label and line of an operation or compute, for the error of a rank that dies at it."""
    return f"{issued.label} ({issued.call_site})"
