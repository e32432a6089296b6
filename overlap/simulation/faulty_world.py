"""Simulated worlds with faults: ranks die, and parts of operations arrive late or never."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from ..errors import PeerLostError
from ..runtime.blame.reports import call_program
from ..runtime.communicator import BaseEngine
from ..runtime.communicators import Communicators
from ..runtime.context import RankContext
from ..runtime.inbox import Inbox
from ..runtime.interceptor import Interceptor
from ..runtime.match import Match
from ..runtime.message import Message
from ..runtime.operation import Operation
from ..runtime.outstanding import IssuedFuture
from ..runtime.port import Port
from ..runtime.rank import Rank
from ..runtime.world import World
from .faults import Fates
from .kernel import EventOrder, Kernel

if TYPE_CHECKING:
    from topology import Cluster
    from transports import Transport


T = TypeVar("T")


class FaultInjector:
    """Injector of deaths and losses into the ranks of one run.

    Attributes:
        fates: The draws of faults.
        kernel: Kernel of the virtual time.
        members: Rank of each rank in the first world; None: the same.
    """

    fates: Fates
    kernel: Kernel

    def __init__(self, fates: Fates, kernel: Kernel) -> None:
        self.fates, self.kernel = fates, kernel
        self.members: Sequence[int] | None = None
        self.world: FaultyWorld | None = None
        self._lives: dict[int, trio.CancelScope] = {}

    async def live(self, main: Callable[..., Awaitable[T]], rank: Rank, *args: object) -> T:
        """Run a rank's program and return its result; a rank that dies waits until the world cancels it."""
        try:
            with trio.CancelScope() as life:
                self._lives[rank.rank] = life
                result = await call_program(main, rank, args)
                if rank.rank not in self.fates.dead:
                    return result
        except Exception:
            if rank.rank not in self.fates.dead:  # errors of a dead rank's program are dropped
                raise
        await trio.sleep_forever()
        raise AssertionError("unreachable: the dead are only cancelled")

    def let_arrive(
        self,
        operation: Operation,
        arrive: Callable[[], None],
        delay: Callable[[Operation, Callable[[], None]], Callable[[], None]],
    ) -> None:
        """Let one rank's operation arrive now, later, or never, as its fate says.

        Args:
            operation: The operation.
            arrive: Lets it arrive.
            delay: Takes the operation and what lets it arrive late; returns the function to call then.
        """
        context = operation.context
        if context.rank in self.fates.dead:
            return
        fate = self.fates.next(context.rank, operation.step)
        operation.lock()
        dies = fate.dies_at is not None

        def arrive_now() -> None:
            """Let the operation arrive; then kill its rank if it dies at it."""
            arrive()
            if dies:
                self.kill(context, operation)

        if fate.dies_at is not None and fate.dies_at < 0.5:
            self.kill(context, operation)
        elif fate.lost:
            self.lose(context, operation)
        elif fate.late_ns:
            due_ns = self.kernel.now_ns + fate.late_ns
            self.kernel.call_at(due_ns, context.rank, delay(operation, arrive_now), order=EventOrder.WAKE)
        else:
            arrive_now()

    def kill(self, context: RankContext, issued: IssuedFuture[Any]) -> None:
        """Kill a rank at a compute or an operation; nothing happens if the rank is dead or has ended."""
        if context.rank in self.fates.dead or context.closed:
            return
        self.fates.dead.add(context.rank)
        self._lives[context.rank].cancel(reason=f"{self.fates.faults}")
        self._report_loss(context, f"died at {issued.label} ({issued.call_site})", self.fates.faults.notice_s)

    def schedule(self, contexts: Sequence[RankContext], members: Sequence[int]) -> None:
        """Kill ranks at the instants that the faults give, or at once if an instant has passed.

        Args:
            contexts: Contexts of the ranks.
            members: Rank of each of them in the first world.
        """
        for time_s, member in self.fates.faults.kills:
            if member in members:
                context = contexts[members.index(member)]
                time_ns = max(self.kernel.now_ns, round(time_s * 1e9))
                self.kernel.call_at(time_ns, context.rank, partial(self._kill_at, context, time_s))

    def _kill_at(self, context: RankContext, time_s: float) -> None:
        """Kill a rank at an instant; nothing happens if the rank is dead or has ended."""
        if context.rank in self.fates.dead or context.closed:
            return
        self.stop(context.rank)
        self._report_loss(context, f"died at {time_s:g} s", self.fates.faults.notice_s)

    def stop(self, rank: int) -> None:
        """Stop a rank without a notice to the others."""
        self.fates.dead.add(rank)
        self._lives[rank].cancel(reason="stopped by a fault")

    def lose(self, context: RankContext, operation: Operation) -> None:
        """Lose a rank's part in an operation: after `silence_s` the other ranks take the rank for lost."""
        self._report_loss(
            context, f"was not heard in {operation.label} ({operation.call_site})", self.fates.faults.silence_s
        )

    def _report_loss(self, context: RankContext, event: str, after_s: float) -> None:
        """Fail the other ranks after a time with `PeerLostError`, as they notice the loss of a rank."""
        error = PeerLostError(f"rank {context.rank} {event}, as {self.fates.cause(context.rank)}", culprit=context.rank)
        doing = context.outstanding.lines()
        assert self.world is not None
        fail = partial(self.world.fail_elsewhere, context.rank, error, doing)
        kernel = self.kernel
        kernel.call_at(kernel.now_ns + round(after_s * 1e9), context.rank, fail, order=EventOrder.TRANSFER)


class FaultyWorld(World):
    """A world with ranks that may die.

    Args:
        injector: Injector of the faults.
        settings: Further arguments of `World`.
    """

    def __init__(
        self, size: int, cluster: Cluster, transport: Transport, *, injector: FaultInjector, **settings: Any
    ) -> None:
        self._injector = injector
        injector.world = self
        super().__init__(size, cluster, transport, **settings)

    @property
    def contexts(self) -> list[RankContext]:
        """Contexts of the ranks."""
        return [member.context for member in self._members]

    async def live(
        self, main: Callable[..., Awaitable[T]], args: tuple[object, ...], timeout_s: float | None
    ) -> list[T]:
        """Run `main` on every rank, for as long as it lives."""
        self._injector.schedule(self.contexts, self._injector.members or range(self.size))
        return await super().live(partial(self._injector.live, main), args, timeout_s)


class FaultyArrivals(Interceptor):
    """Collectives that arrive late or never."""

    def __init__(self, injector: FaultInjector) -> None:
        self._injector, self._dead = injector, injector.fates.dead

    def arrive(self, port: Port, operation: Operation) -> None:
        """Let one rank's operation arrive now, later, or never, as its fate says."""
        self._injector.let_arrive(operation, partial(port.match, operation), self.delay)

    def delay(self, operation: Operation, arrive: Callable[[], None]) -> Callable[[], None]:
        """Return a function that lets a delayed operation arrive, unless it has failed by then."""

        def arrive_late() -> None:
            if not operation.done and operation.context.rank not in self._dead:
                operation.started_ns = self._injector.kernel.now_ns
                arrive()

        return arrive_late

    def starts(self, match: Match, operation: Operation) -> bool:
        """Whether no rank of the group is dead; else all others wait."""
        return self._dead.isdisjoint(operation.port.communicator.members)


class FaultyCommunicators(Communicators):
    """Communicators in which ranks arrive late or never."""

    def __init__(self, engine: BaseEngine, injector: FaultInjector) -> None:
        self.injector: FaultInjector = injector
        super().__init__(engine)
        self.intercept = FaultyArrivals(injector)

    def make_inbox(self) -> Inbox:
        """Return the inbox, in which messages arrive late or never."""
        return FaultyInbox(self, self.engine)


class FaultyInbox(Inbox):
    """An inbox in which messages arrive late or never."""

    def __init__(self, shared: FaultyCommunicators, engine: BaseEngine) -> None:
        super().__init__(shared, engine)
        self._injector, self._dead = shared.injector, shared.injector.fates.dead
        self._delayed: dict[Operation, object] = {}  # tokens of messages that arrive later

    def arrive(self, message: Message[object]) -> None:
        """Let a message arrive now, later, or never, as its fate says."""
        self._injector.let_arrive(message, partial(super().arrive, message), self.delay_arrival)

    def delay_arrival(self, operation: Operation, arrive: Callable[[], None]) -> Callable[[], None]:
        """Return a function that adds a delayed message, unless it was withdrawn or has failed by then."""
        token = self._delayed[operation] = object()

        def arrive_late() -> None:
            """Add the message now, if it is still expected and its rank lives."""
            if self._delayed.get(operation) is token:
                del self._delayed[operation]
                if not operation.done and operation.context.rank not in self._dead:
                    operation.started_ns = self._injector.kernel.now_ns
                    arrive()

        return arrive_late

    def withdraw_receive(self, receive: Message[object], later: Callable[[], None]) -> bool | None:
        """Withdraw a receive, delayed or arrived; see `Inbox.withdraw_receive`."""
        return self._delayed.pop(receive, None) is not None or super().withdraw_receive(receive, later)
