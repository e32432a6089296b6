"""Engine in real time: it makes the plan of a call, from memory or as a program over a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from time import perf_counter_ns
from typing import TYPE_CHECKING, cast

import trio
from trio.lowlevel import TrioToken

from transports import Transport, TransportError
from transports.guarded import guard

from ...collectives.call import Call
from ...collectives.kinds import P2P
from ...defaults import INLINE_BYTES
from ..communicator import BaseEngine, Communicator
from ..match import Match
from ..operation import Operation
from ..plan import CallPlan
from ..settling import LOCK, Onlooker
from .in_process import InMemory, InProcessPlan
from .workers import Workers

if TYPE_CHECKING:
    from topology import Cluster
    from transports import Envelope, PlainSignature, Wire

    from ...collectives.reduce import Array
    from ...timeline.recording import RawMatch
    from ..context import RankContext
    from ..lane import Lane
    from ..message import Message
    from .compiler import Compiler
    from .execution import Station
    from .host_memory import HostMemory, HostPlan

# Algorithms, of a call or of the run, that need no program if ranks have memory in common.
_IN_MEMORY = (None, "direct")


class RealEngine(BaseEngine):
    """Moves bytes: out of shared memory, or as programs over a transport.

    Args:
        cluster: Where the ranks run.
        token: Of the loop.
        algorithm: Algorithm of all collectives; None: chosen for each.
    """

    def __init__(self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None) -> None:
        self._algorithm = algorithm
        self._transport, self._cluster = transport, cluster
        self._token = token
        self._workers = Workers()
        self._wires: dict[tuple[int, int], Wire] = {}  # by world rank, and rank of the peer
        self._stations: dict[tuple[int, ...], Station] = {}  # by world rank and group members
        self._memory = InMemory(self._workers, token)

    def direct(self, members: tuple[int, ...]) -> bool:
        """Whether ranks meet: if that is requested, or if they share memory, because a meeting costs least then.

        A meeting reads every input and writes every output once. No program can read or write less, and any program
        takes a launch and at least one message more.
        """
        if self._algorithm is None:
            return self._transport.shares_memory(members)
        return self._algorithm == "direct"

    def plan(self, communicator: Communicator, call: Call, operation: Operation) -> CallPlan:
        """Make the plan of a rank's operations with a call: memory, if the ranks have any in common.

        Inside a process all ranks do, unless the call requests an algorithm. Between processes uneven blocks travel as
        programs.
        """
        plan: CallPlan | None = None
        if not communicator.direct:
            plan = self._host_plan(communicator, call, operation)
        elif call.algorithm in _IN_MEMORY:
            plan = InProcessPlan(self._memory, call, communicator.here)
        return plan or self.program(communicator, call, operation)

    def _host_plan(self, communicator: Communicator, call: Call, operation: Operation) -> HostPlan | None:
        """Return the plan of a call out of the memory of this host; None: it needs a program."""
        uneven = call.counts and not call.shared
        if (call.algorithm or self._algorithm) not in _IN_MEMORY or uneven:
            return None
        return self._host_memory.plan(communicator, call, operation)

    def look(self, communicator: Communicator, match: Match, operation: Operation) -> bool:
        """Let an operation without an array wait for a row or message with the call; whether it does."""
        plan = self._host_plan(communicator, operation.call, operation)
        if plan is not None:
            return plan.look(match, operation)
        self._watch_for_call(communicator, match, operation)
        return True

    def _watch_for_call(self, communicator: Communicator, match: Match, operation: Operation) -> None:
        """Compare the first message of an operation without an array, which shows the call of the others."""
        wire, context, tag = (
            self._transport.wire(operation.context.rank),
            operation.context,
            communicator.tag(operation.seq),
        )
        watch, looks_soon = ExitStack(), False

        def look() -> None:
            nonlocal looks_soon
            looks_soon = False
            if operation.can_start and not cast("Call", match.pattern).has_all_values:
                with suppress(TransportError):  # the answer to its question starts it, or it fails itself
                    for each in wire.unexpected(tag):
                        communicator.compare_unmet(operation.seq & 0xFFFF, each.src, each.signature)
            if not operation.can_start or cast("Call", match.pattern).has_all_values:
                watch.close()

        def notify() -> None:
            nonlocal looks_soon
            if not looks_soon:
                looks_soon = True
                context.soon(look)

        watch.enter_context(wire.watch(notify))
        look()
        if operation.can_start and not cast("Call", match.pattern).has_all_values:
            with LOCK:
                operation._add_callback(Onlooker(watch.close))

    def wire(self, context: RankContext, peer: int) -> Wire | None:
        """Return the wire of the messages with a world rank; None: they match inside this process."""
        if peer == context.rank or self.direct((context.rank, peer)):
            return None
        wire = self._wires.get((context.rank, peer))
        if wire is None:
            wire = self._wires[context.rank, peer] = guard(self._transport.wire(context.rank), peer, context.spawn)
        return wire

    def oldest_announced(self, rank: int, choices: Sequence[tuple[int, int]]) -> Envelope | None:
        """Return the oldest message of some senders and tags that other processes have announced; or None."""
        try:
            return self._transport.wire(rank).announced(choices)
        except TransportError:  # `wait_announced` raises the error
            return None

    async def wait_announced(self, rank: int, choices: Sequence[tuple[int, int]]) -> Envelope:
        """Wait until another process announces a message of some senders and tags; return that message."""
        return await self._transport.wire(rank).wait_any(choices)

    def carry(self, lane: Lane, send: Message[object], receive: Message[object], pattern: Call) -> None:
        """Move the data of a message inside this process: small ones here, large ones in worker threads."""
        met_ns = max(send.started_ns, receive.started_ns)
        if not (2 * pattern.work_bytes <= INLINE_BYTES or receive.at_once):
            match = Match([send, receive])
            match.pattern = pattern
            self._memory.begin(match, receive, pattern)
            return
        if receive.target is None:
            receive.fit(pattern)
        receive.pattern = pattern
        source, target = cast("Array", send.source), cast("Array", receive.target)
        target[...] = source if source.shape == target.shape else source.reshape(target.shape)
        group = send.member.name, lane.members, send.tag
        meeting: RawMatch = P2P.text, send.algorithm, group, send.seq, pattern.nbytes, pattern.dtype, met_ns
        end_ns = perf_counter_ns()
        send.finish(end_ns, meeting)
        receive.finish(end_ns, meeting)

    def loan(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory that other processes of this host map, and the function to return it; None without it."""
        return self._transport.loan(nbytes)

    @cached_property
    def _host_memory(self) -> HostMemory:
        from .host_memory import HostMemory  # not needed by a single process

        return HostMemory(self._transport, self._workers, self.program)

    @cached_property
    def compiler(self) -> Compiler:
        """Compiler of programs over a transport; ranks with memory in common never need it."""
        from .compiler import Compiler, joined_by  # with the generators, not needed by ranks with memory in common

        cluster = joined_by(self._cluster, self._transport.socket_placement)
        return Compiler(cluster, self._algorithm, far=self._transport.spans_hosts)

    def program(self, communicator: Communicator, call: Call, operation: Operation) -> CallPlan:
        """Return the plan of one rank's operations with a call as programs over a transport."""
        from .programs import ProgramPlan

        return ProgramPlan(self, communicator, call)

    def station(self, context: RankContext, members: tuple[int, ...]) -> Station:
        """Return the wires of a rank's messages to other members of a group, and its workers."""
        from .execution import Station

        station = self._stations.get((context.rank, *members))
        if station is None:
            wire = self._transport.wire(context.rank)
            wires = {peer: guard(wire, peer, context.spawn) for peer in members if peer != context.rank}
            station = Station(wires=wires, workers=self._workers, token=self._token, thread=context.thread)
            self._stations[context.rank, *members] = station
        return station

    def unmet(
        self, ranks: Iterable[int], communicators: Iterable[Communicator]
    ) -> list[tuple[int, int, PlainSignature]]:
        """Return the messages of other processes that no rank here has met, and rows that none reads."""
        found = []
        for rank in ranks:
            with suppress(TransportError):  # operations on it fail themselves
                found += [(each.tag, each.src, each.signature) for each in self._transport.wire(rank).unexpected()]
        if "_host_memory" in self.__dict__:
            found += [row for communicator in communicators for row in self._host_memory.unmet(communicator)]
        return found

    def close(self, communicator: Communicator) -> None:
        """Free the shared memory of a communicator."""
        if not communicator.direct:
            self._host_memory.close(communicator)

    async def aclose(self) -> None:
        """Wait for the running reductions and end the worker threads."""
        with trio.CancelScope(shield=True):
            await self._memory.until_idle()
        self._workers.close()
