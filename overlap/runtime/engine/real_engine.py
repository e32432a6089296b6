"""Engine in real time: it makes the plan of a call, from memory or as a program over a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, cast

import trio
from trio.lowlevel import TrioToken

from transports import Transport, TransportError
from transports.guarded import find_guarded_wire

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
    from .execution import ProgramResources
    from .host_memory import HostMemory, HostPlan

# Algorithms, of a call or of the run, that need no program if ranks have memory in common.
_IN_MEMORY = (None, "direct")


class RealEngine(BaseEngine):
    """Moves bytes: through memory that ranks share, or as programs over a transport.

    Args:
        transport: Transport of this process. It knows which ranks share memory, and carries messages of programs.
        cluster: Machine with the ranks of the world.
        token: Token of the event loop.
        algorithm: Algorithm of all collectives; "direct": through memory that ranks share, without a program; None:
            chosen for each call.
    """

    def __init__(self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None) -> None:
        self._algorithm = algorithm
        self._transport, self._cluster = transport, cluster
        self._token = token
        self._workers = Workers()
        self._wires: dict[tuple[int, int], Wire] = {}  # by world rank, and rank of the peer
        self._program_resources: dict[tuple[int, ...], ProgramResources] = {}  # by world rank and group members
        self._memory = InMemory(self._workers, token)

    def is_direct(self, members: tuple[int, ...]) -> bool:
        """Whether ranks meet before any byte moves: if the run requests "direct", or else if they share memory.

        After a meeting, every input is read once and every output written once. No program moves less, and a program
        needs a launch and at least one message more.
        """
        if self._algorithm is None:
            return self._transport.shares_memory(members)
        return self._algorithm == "direct"

    def make_plan(self, communicator: Communicator, call: Call, operation: Operation) -> CallPlan:
        """Return the plan of a rank's operations with a call: through shared memory if possible, else as a program.

        A call that requests an algorithm other than "direct" runs as a program. So do calls between processes with
        blocks of different sizes, unless the result is shared.
        """
        plan: CallPlan | None = None
        if not communicator.direct:
            plan = self._host_plan(communicator, call, operation)
        elif call.algorithm in _IN_MEMORY:
            plan = InProcessPlan(self._memory, call, communicator.local_count)
        return plan or self.make_program_plan(communicator, call, operation)

    def _host_plan(self, communicator: Communicator, call: Call, operation: Operation) -> HostPlan | None:
        """Return None if the call needs a program. Arguments: see `BaseEngine.make_plan`."""
        uneven = call.counts and not call.shared
        if (call.algorithm or self._algorithm) not in _IN_MEMORY or uneven:
            return None
        return self._host_memory.make_plan(communicator, call, operation)

    def watch_remote_call(self, communicator: Communicator, match: Match, operation: Operation) -> bool:
        """Let an operation without an array wait for a row or message with dtype and shape.

        See `BaseEngine.watch_remote_call`.
        """
        port, key = operation.port, ("look", operation.call)  # the key of the operation itself has another plan
        plan = cast("HostPlan | None", port.plans.get(key))
        if plan is None:
            plan = self._host_plan(communicator, operation.call, operation)
            if plan is None:
                self._learn_shape_from_messages(communicator, match, operation)
                return True
            port.keep_plan(key, plan)
        return plan.learn_shape_from_row(match, operation)

    def _learn_shape_from_messages(self, communicator: Communicator, match: Match, operation: Operation) -> None:
        """Start an operation without an array once a message of another rank shows dtype and shape.

        The wire is watched until then, or until the operation ends.
        """
        wire, watch = self._transport.wire(operation.context.rank), ExitStack()

        def look() -> None:
            """Compare the messages that have arrived; end the watch once the shape is known."""
            if _lacks_shape(match, operation):
                # after an error the answer of `ask_others_soon` starts the operation, or it fails by itself
                with suppress(TransportError):
                    # `compare_unmet_call` takes dtype and shape from a message that agrees, and starts the operation.
                    for message in wire.unexpected(communicator.first_transport_tag(operation.seq)):
                        communicator.compare_unmet_call(operation.seq & 0xFFFF, message.src, message.signature)
            if not _lacks_shape(match, operation):
                watch.close()

        watch.enter_context(wire.watch(partial(operation.context.call_in_turn, look)))
        look()
        if _lacks_shape(match, operation):
            # An empty array has no message, and a long call does not fit into one: ask the other processes, too.
            communicator.ask_others_soon()
            with LOCK:
                operation._add_callback(Onlooker(watch.close))

    def wire(self, context: RankContext, peer: int) -> Wire | None:
        """Return the wire for messages between a rank here and a world rank; None if they match inside this process."""
        if peer == context.rank or self.is_direct((context.rank, peer)):
            return None
        wire = self._wires.get((context.rank, peer))
        if wire is None:
            wire = self._wires[context.rank, peer] = find_guarded_wire(
                self._transport.wire(context.rank), peer, context.spawn
            )
        return wire

    def oldest_announced_message(self, rank: int, choices: Sequence[tuple[int, int]]) -> Envelope | None:
        """Return the oldest message that other processes have announced to a rank here; None if there is none.

        Args:
            rank: World rank of the receiver.
            choices: (world rank of the sender, tag) pairs that count.
        """
        try:
            return self._transport.wire(rank).announced(choices)
        except TransportError:  # `wait_for_announced_message` raises the error
            return None

    async def wait_for_announced_message(self, rank: int, choices: Sequence[tuple[int, int]]) -> Envelope:
        """Wait until another process announces a message, and return it. Arguments: see `oldest_announced_message`."""
        return await self._transport.wire(rank).wait_any(choices)

    def carry_message(self, lane: Lane, send: Message[object], receive: Message[object], pattern: Call) -> None:
        """Move the data of a message inside this process: small data at once, large data in worker threads.

        See `BaseEngine.carry_message`.
        """
        met_ns = max(send.started_ns, receive.started_ns)
        if not (2 * pattern.work_bytes <= INLINE_BYTES or receive.moves_at_once):
            match = Match([send, receive])
            match.pattern = pattern
            self._memory.start_in_workers(match, receive, pattern)
            return
        if receive.target is None:
            receive.prepare_result(pattern)
        receive.pattern = pattern
        source, target = cast("Array", send.source), cast("Array", receive.target)
        target[...] = source if source.shape == target.shape else source.reshape(target.shape)
        group = send.member.name, lane.members, send.tag
        meeting: RawMatch = P2P.text, send.algorithm, group, send.seq, pattern.nbytes, pattern.dtype, met_ns
        end_ns = perf_counter_ns()
        send.finish(end_ns, meeting)
        receive.finish(end_ns, meeting)

    def loan_shared_memory(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Loan memory that other processes of this host can read.

        Returns:
            The memory, and the function that ends the loan; None if there is no such memory.
        """
        return self._transport.loan(nbytes)

    @cached_property
    def _host_memory(self) -> HostMemory:
        """Maker of plans between processes of this host."""
        from .host_memory import HostMemory  # not at the top: a single process does not need it

        return HostMemory(self._transport, self._workers, self.make_program_plan)

    @cached_property
    def compiler(self) -> Compiler:
        """Compiler of programs over a transport. Ranks with memory in common never need it."""
        from .compiler import Compiler, cluster_for_prices  # not at the top: loads the generators of schedules

        cluster = cluster_for_prices(self._cluster, self._transport.ranks_joined_by_sockets)
        return Compiler(cluster, self._algorithm, far=self._transport.spans_hosts)

    def make_program_plan(self, communicator: Communicator, call: Call, operation: Operation) -> CallPlan:
        """Return the plan that runs a call as messages over the transport; see `BaseEngine.make_plan`.

        `operation` is not used here.
        """
        from .programs import ProgramPlan

        return ProgramPlan(self, communicator, call)

    def program_resources(self, context: RankContext, members: tuple[int, ...]) -> ProgramResources:
        """Return the wires from a rank to the other members of a group, with the workers; made once for each group."""
        from .execution import ProgramResources

        resources = self._program_resources.get((context.rank, *members))
        if resources is None:
            wire = self._transport.wire(context.rank)
            wires = {peer: find_guarded_wire(wire, peer, context.spawn) for peer in members if peer != context.rank}
            resources = ProgramResources(wires=wires, workers=self._workers, token=self._token, thread=context.thread)
            self._program_resources[context.rank, *members] = resources
        return resources

    def unmet_signatures(
        self, ranks: Iterable[int], communicators: Iterable[Communicator]
    ) -> list[tuple[int, int, PlainSignature]]:
        """Return the messages of other processes that no rank here has received, and rows that no rank here reads.

        Args:
            ranks: World ranks of this process.
            communicators: Communicators to look at.

        Returns:
            (tag, world rank of the sender, signature of the call) for each.
        """
        found = []
        for rank in ranks:
            with suppress(TransportError):  # operations on a broken wire fail by themselves
                found += [(each.tag, each.src, each.signature) for each in self._transport.wire(rank).unexpected()]
        if "_host_memory" in self.__dict__:  # only if the cached property exists already
            found += [
                row for communicator in communicators for row in self._host_memory.find_differing_rows(communicator)
            ]
        return found

    def close(self, communicator: Communicator) -> None:
        """Free the shared memory of a communicator."""
        if not communicator.direct:
            self._host_memory.close_board(communicator)

    async def aclose(self) -> None:
        """Wait for the running reductions and end the worker threads."""
        with trio.CancelScope(shield=True):
            await self._memory.wait_until_idle()
        self._workers.close()


def _lacks_shape(match: Match, operation: Operation) -> bool:
    return operation.is_unstarted and not cast("Call", match.pattern).has_all_values
