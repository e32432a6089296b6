"""Runs operations as programs: each rank's part of a compiled collective, run on a CC-core of that rank."""

from __future__ import annotations

from contextvars import copy_context
from functools import partial
from math import prod
from typing import cast

import numpy as np
import trio

from transports import Starter, Transport

from ...collectives.call import Call
from ...collectives.generators.rank_order import ONLY_FOR_ORDER
from ...collectives.kinds import Collective
from ...collectives.program import Kind, Program
from ...collectives.reduce import Array, reducer
from ...collectives.schedule import Buffer
from ...collectives.uneven import UnevenSchedule, block_starts
from ...diagnostics import first
from ..communicator import Communicator
from ..match import Match
from ..operation import Operation
from .cc_core import Buffers, Execution, UnevenBuffers
from .compiler import MESSAGE_ALGORITHM, Compiled, Compiler
from .laid_out import lay_out
from .message_run import MessageRun
from .settling import settle
from .thin_buffers import ThinBuffers, runs_touched
from .wire_driven import WireDrivenExecution
from .workers import Workers

__all__ = ["ProgramRunner"]

# What barriers send, get, and make of both: always zero, so all may use the same.
_NOTHING, _NOTHING_COMES = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
_MOST = reducer("max", np.dtype(np.uint8))


class ProgramRunner:
    """Runs operations whose bytes must travel over a transport, each rank's part beside what the rank computes."""

    def __init__(self, transport: Transport, workers: Workers, compiler: Compiler) -> None:
        self._transport, self._workers, self._compiler = transport, workers, compiler
        self._starters: dict[tuple[int, ...], dict[int, Starter] | None] = {}  # by a rank and the members
        # An infinite gradient is the program's business, not a warning of ours; `np.errstate` takes longer each time.
        self._quiet = copy_context()
        self._quiet.run(np.seterr, all="ignore")

    def start(self, communicator: Communicator, match: Match) -> None:
        """Start the programs of all ranks that are ready and not under way."""
        for operation in match.arrived:
            if operation is not None and not (operation.running or operation.done):
                self._begin(communicator, match, operation)

    def _begin(self, communicator: Communicator, match: Match, operation: Operation) -> None:
        """Do what needs no waiting at once: small messages are on their way before any task starts."""
        operation.running, pattern = True, cast("Call", match.pattern)
        try:
            operation.fit(pattern)
            starters = self._starters_of(communicator.members, operation.port.position)
            if pattern.kind is Collective.P2P and starters:
                over = self._begin_message(starters, communicator, match, operation)
                if over:
                    self._over(communicator, match, operation)
                return
            compiled = self._compiler.compile(pattern, communicator.members, operation.port.position)
            operation.algorithm = compiled.schedule.algorithm
            begin = self._begin_task if starters is None else partial(self._begin_driven, starters)
            over = begin(communicator, match, operation, compiled)
        except Exception as error:
            self._end(communicator, match, operation, error)
            return
        if over:
            self._over(communicator, match, operation)

    def _over(self, communicator: Communicator, match: Match, operation: Operation) -> None:
        """End what was over as soon as it began."""
        if match.count == communicator.here:
            self._end(communicator, match, operation, None)
        else:  # one may come who means something else
            operation.context.spawn(self._end_soon, communicator, match, operation)

    def _starters_of(self, members: tuple[int, ...], position: int) -> dict[int, Starter] | None:
        """Return what starts messages to the other members without a task, if that is so for all of them."""
        key = (members[position], *members)
        if key not in self._starters:
            endpoint = self._transport.endpoint(members[position])
            found = {peer: endpoint.starter(peer) for peer in members if peer != members[position]}
            known = {peer: starter for peer, starter in found.items() if starter is not None}
            self._starters[key] = known if len(known) == len(found) else None
        return self._starters[key]

    def _begin_message(
        self, starters: dict[int, Starter], communicator: Communicator, match: Match, operation: Operation
    ) -> bool:
        """Send or receive a message; True if it is over."""
        operation.algorithm = MESSAGE_ALGORITHM
        ((peer, starter),) = starters.items()
        tag = communicator.tag(cast("Call", match.pattern), operation.seq)
        operation.scope = run = MessageRun(starter, peer, tag, spawn=operation.context.spawn)
        ended = partial(self._end, communicator, match, operation)
        source, target = operation.source, operation.target
        if operation.port.position == 0:
            over = run.send(cast("Array", source), operation.urgency, ended)
        else:
            over = run.receive(cast("Array", target), ended)
        operation.look = None if over else run.look
        return over

    def _begin_driven(
        self,
        starters: dict[int, Starter],
        communicator: Communicator,
        match: Match,
        operation: Operation,
        compiled: Compiled,
    ) -> bool:
        """Let the wires drive it; True if it is over."""
        members, position = communicator.members, operation.port.position
        buffers, in_place = _buffers(compiled, operation)
        laid = compiled.laid.get(in_place)
        if laid is None:
            laid = compiled.laid[in_place] = lay_out(compiled.program, buffers, members)
        execution = WireDrivenExecution(
            laid,
            buffers,
            position,
            starters,
            tag=communicator.tag(cast("Call", match.pattern), operation.seq),
            priority=operation.urgency,
            workers=self._workers,
            quiet=self._quiet,
            spawn=operation.context.spawn,
        )
        operation.scope = execution
        over = execution.begin(partial(self._end, communicator, match, operation))
        operation.look = None if over else execution.look
        return over

    def _begin_task(self, communicator: Communicator, match: Match, operation: Operation, compiled: Compiled) -> bool:
        """Run it in a task, unless it is over at once; True if it is."""
        members, position = communicator.members, operation.port.position
        execution = Execution(
            compiled.program,
            _buffers(compiled, operation)[0],
            self._transport.endpoint(members[position]),
            members=members,
            tag=communicator.tag(cast("Call", match.pattern), operation.seq),
            priority=operation.urgency,
            workers=self._workers,
            fans_out=not self._transport.shares_memory(members),
        )
        over = execution.begin()
        if not over:
            operation.scope = scope = trio.CancelScope()
            operation.context.spawn(self._run, communicator, match, operation, execution, scope)
        return over

    async def _run(
        self,
        communicator: Communicator,
        match: Match,
        operation: Operation,
        execution: Execution,
        scope: trio.CancelScope,
    ) -> None:
        failure: BaseException | None = None
        try:
            with scope:
                await execution.run()
        except* Exception as group:
            failure = first(group)
        finally:
            operation.stopped()
        settle(communicator, match, operation, failure)

    async def _end_soon(self, communicator: Communicator, match: Match, operation: Operation) -> None:
        try:
            await trio.lowlevel.checkpoint()
        finally:
            operation.stopped()
        settle(communicator, match, operation, None)

    def _end(self, communicator: Communicator, match: Match, operation: Operation, error: BaseException | None) -> None:
        operation.stopped()
        settle(communicator, match, operation, error)


def _buffers(compiled: Compiled, operation: Operation) -> tuple[Buffers, bool]:
    """Return an operation's arrays as the schedule's buffers, and whether input and result share memory."""
    schedule, arrays = compiled.schedule, operation.context.arrays
    source, target, combine = operation.source, operation.target, operation.call.reducer
    if operation.kind is Collective.BARRIER:
        source, target, combine = _NOTHING, _NOTHING_COMES, _MOST
    like = source if source is not None else target
    assert like is not None, "a rank that neither gives nor gets takes no part"
    flat_in = np.empty(0, like.dtype) if source is None else source.reshape(-1)
    flat_out = np.empty(0, like.dtype) if target is None else target.reshape(-1)
    block = flat_in.size // schedule.blocks[0] if source is not None else flat_out.size // schedule.blocks[1]
    in_place = source is not None and target is not None
    if in_place and source is not target:
        in_place = np.may_share_memory(source, target)
    if in_place and not schedule.in_place and not _lies_in_its_block(compiled, operation, flat_in, flat_out, block):
        flat_in, in_place = arrays.copy(flat_in), False
    accumulator = like.dtype if combine is None else combine.accumulator
    if isinstance(schedule, UnevenSchedule):
        starts = block_starts(schedule, operation.port.position, operation.call.counts, prod(like.shape[1:]))
        room = starts[Buffer.SCRATCH][-1]
    elif schedule.algorithm in ONLY_FOR_ORDER:  # whose tables have a place for the pieces of all ranks
        layout = block, schedule.slots_per_block, combine, schedule.size
        runs = runs_touched(compiled.program)
        size = ThinBuffers((flat_in, flat_out, flat_out), *layout, runs).elements()
        return ThinBuffers((flat_in, flat_out, arrays.empty((size,), accumulator)), *layout, runs), in_place
    else:
        starts, room = (), schedule.blocks[2] * block
    shared = schedule.in_place and flat_out.size == room and flat_out.dtype == accumulator
    scratch: Array = flat_out if shared else arrays.empty((room,), accumulator)
    laid = (flat_in, flat_out, scratch), block, schedule.slots_per_block, combine, schedule.size
    return UnevenBuffers(*laid, starts) if starts else Buffers(*laid), in_place


def _lies_in_its_block(compiled: Compiled, operation: Operation, source: Array, target: Array, block: int) -> bool:
    """Whether an input is the very block of the result that it ends up in, and nothing else is put there before."""
    schedule, position = compiled.schedule, operation.port.position
    gathers = operation.kind in (Collective.ALL_GATHER, Collective.GATHER)
    if not gathers or isinstance(schedule, UnevenSchedule) or source.dtype != target.dtype:
        return False
    own = target[position * block : (position + 1) * block]
    if source.__array_interface__["data"][0] != own.__array_interface__["data"][0] or source.size != own.size:
        return False
    if compiled.keeps_own is None:
        compiled.keeps_own = _keeps_own(compiled.program, schedule.slots_per_block, position)
    return compiled.keeps_own


def _keeps_own(program: Program, slots: int, position: int) -> bool:
    """Whether nothing is put into a rank's own block of the result but what its input has at that very place."""
    first = position * slots
    for step in (step for queue in program.queues for step in queue if step.kind is not Kind.SEND):
        dst, src = step.dst, step.src
        apart = dst.buffer != Buffer.OUT or dst.slot + dst.count <= first or first + slots <= dst.slot
        same = step.kind is Kind.LOCAL and src.buffer == Buffer.IN and src.slot == dst.slot - first
        if not (apart or same):
            return False
    return True
