"""Injector of faults into simulated worlds: ranks die, and parts of operations arrive late or never."""

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

    Attributes:
        fates: The draws of faults.
        kernel: Kernel of the virtual time.
        members: Rank of each rank in the first world; None: the same.
        world: The world of the ranks, from its making on.
    """

    fates: Fates
    kernel: Kernel
    world: World

    def __init__(self, fates: Fates, kernel: Kernel) -> None:
        self.fates, self.kernel = fates, kernel
        self.members: Sequence[int] | None = None
        self._lives: dict[int, trio.CancelScope] = {}
        self._delayed: dict[Operation, object] = {}  # tokens of operations that arrive later

    async def live(self, program: Callable[[], Awaitable[T]], context: RankContext) -> T:
        """Run a rank's program and return its result; a rank that dies waits until the world cancels it."""
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
        raise AssertionError("this is a bug in overlap: the dead are only cancelled")

    # -- operations ----------------------------------------------------------------------------------------------------

    def arrive(self, place: Place, operation: Any) -> None:
        """Let one rank's operation arrive now, later, or never, as `Fates` draws it; kill the rank if it dies at it."""
        context = operation.context
        if context.rank in self.fates.dead:
            return
        fate = self.fates.next(context.rank, operation.step)
        operation.lock()

        def arrive_now() -> None:
            """Let the operation arrive; then kill its rank if it dies at it."""
            place.match(operation)
            if fate.dies_at is not None:
                self.kill(context, place_of(operation))

        if fate.dies_at is not None and fate.dies_at < 0.5:
            self.kill(context, place_of(operation))
        elif fate.lost:  # after `silence_s` the other ranks take the rank for lost
            self._report_loss(context, f"was not heard in {place_of(operation)}", self.fates.faults.silence_s)
        elif fate.late_ns:
            due_ns = self.kernel.now_ns + fate.late_ns
            self.kernel.call_at(due_ns, context.rank, self.delay(operation, arrive_now), order=EventOrder.WAKE)
        else:
            arrive_now()

    def delay(self, operation: Operation, arrive: Callable[[], None]) -> Callable[[], None]:
        """Return a function that lets a delayed operation arrive, unless it was withdrawn or has failed by then."""
        token = self._delayed[operation] = object()

        def arrive_late() -> None:
            """Let the operation arrive now, if it is still expected and its rank lives."""
            if self._delayed.get(operation) is token:
                del self._delayed[operation]
                if not operation.done and operation.context.rank not in self.fates.dead:
                    operation.started_ns = self.kernel.now_ns
                    arrive()

        return arrive_late

    def withdraw(self, operation: Operation) -> bool:
        """Withdraw a receive that is delayed; False if it is not."""
        return self._delayed.pop(operation, None) is not None

    def starts(self, match: Match, operation: Operation) -> bool:
        """Whether no rank of the group is dead; else all others wait."""
        return self.fates.dead.isdisjoint(operation.port.communicator.members)

    # -- deaths --------------------------------------------------------------------------------------------------------

    def kill(self, context: RankContext, event: str) -> None:
        """Kill a rank at an event or an instant; nothing happens if the rank is dead or has ended."""
        if context.rank not in self.fates.dead and not context.closed:
            self.stop(context.rank)
            self._report_loss(context, f"died at {event}", self.fates.faults.notice_s)

    def stop(self, rank: int) -> None:
        """Stop a rank without a notice to the others."""
        self.fates.dead.add(rank)
        self._lives[rank].cancel(reason="stopped by a fault")

    def _report_loss(self, context: RankContext, event: str, after_s: float) -> None:
        """Fail the other ranks after a time with `PeerLostError`, as they notice the loss of a rank."""
        error = PeerLostError(f"rank {context.rank} {event}, as {self.fates.cause(context.rank)}", culprit=context.rank)
        fail = partial(self.world.fail_elsewhere, context.rank, error, context.outstanding.lines())
        due_ns = self.kernel.now_ns + round(after_s * 1e9)
        self.kernel.call_at(due_ns, context.rank, fail, order=EventOrder.TRANSFER)


def place_of(issued: IssuedFuture[object]) -> str:
    """Return the name and the line of an operation or a compute, at which its rank dies."""
    return f"{issued.label} ({issued.call_site})"
