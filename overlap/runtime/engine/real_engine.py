"""The engine in real time: it moves matched operations through shared memory, or as programs over a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, cast

import trio
from trio.lowlevel import TrioToken

from transports import Transport

from ...collectives.call import Call
from ..communicator import BaseEngine, Communicator
from ..future import Failure
from ..match import Match
from ..operation import Operation
from .in_process import pieces, run_here
from .workers import INLINE_BYTES, Workers

if TYPE_CHECKING:
    from topology import Cluster

    from .host_memory import HostMemory
    from .programs import ProgramRunner

# What is asked for where no program is needed.
_SHORT_CUT = (None, "direct")


class RealEngine(BaseEngine):
    """Moves bytes: through shared memory, or as programs over a transport."""

    def __init__(self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None) -> None:
        self._algorithm = algorithm
        self._transport, self._cluster = transport, cluster
        self._token = token
        self._workers = Workers()
        self._in_flight = 0
        self._idle = trio.Event()

    def direct(self, members: tuple[int, ...]) -> bool:
        """Whether the short cut is taken: where it is asked for, or where memory is shared, for then it costs least.

        It takes a meeting, and reads every input and writes every output once. No program can read or write less, and
        any takes a launch and at least one message more.
        """
        if self._algorithm is None:
            return self._transport.shares_memory(members)
        return self._algorithm == "direct"

    def lend(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory that other processes of this host map, and what gives it back; None: there is none."""
        return self._transport.lend(nbytes)

    def _short(self, communicator: Communicator, call: Call) -> bool:
        """Whether ranks carry out a call out of each other's memory, if they have any in common: the one decision.

        Inside a process all of `communicator.direct` do, unless a call insists on an algorithm. Between processes
        messages and uneven blocks travel as programs.
        """
        asked = call.algorithm
        if communicator.direct:
            return asked in _SHORT_CUT
        whole = call.shared or not call.counts
        return whole and not communicator.key.messages and (asked or self._algorithm) in _SHORT_CUT

    def arrived(self, communicator: Communicator, match: Match, operation: Operation) -> bool:
        """Start what can start: all ranks are here, or this one's part of a program need not wait for them."""
        call: Call = match.pattern  # type: ignore[assignment]  # the arrival has one
        if communicator.direct and self._short(communicator, call):  # all have come
            self._run_direct(communicator, match, operation)
            return False
        if not (lock_later := operation.may_leave_at_once):
            operation.lock()
        self.start(communicator, match)
        if lock_later and not operation.done:
            operation.lock()
        return True

    def start(self, communicator: Communicator, match: Match) -> None:
        """Start the programs of the ranks that are here, once anybody has said what travels."""
        call = match.pattern
        if call is None or not call.settled:
            return
        if communicator.direct or not (
            self._short(communicator, call) and self._host_memory.start(communicator, match)
        ):
            self._programs.start(communicator, match, lasting=True)

    def at_once(self, communicator: Communicator, operation: Operation) -> bool:
        """Whether one end of an operation starts, and may end, without a task that is started or woken."""
        if communicator.key.messages:
            return self._programs.at_once(communicator, operation)
        return self._short(communicator, operation.call) and self._host_memory.at_once(communicator, operation)

    @cached_property
    def _host_memory(self) -> HostMemory:
        from .host_memory import HostMemory  # which one process never needs
        from .meeting import Common

        common = Common(
            workers=self._workers,
            token=self._token,
            fall_back=lambda communicator, match: self._programs.start(communicator, match, lasting=False),
        )
        return HostMemory(self._transport, common)

    def close(self, communicator: Communicator) -> None:
        """Give back the shared memory of a communicator."""
        if not (communicator.direct or communicator.key.messages):
            self._host_memory.close(communicator)

    async def aclose(self) -> None:
        """Wait for the reductions at hand and end the worker threads."""
        with trio.CancelScope(shield=True):
            while self._in_flight:
                self._idle = trio.Event()
                await self._idle.wait()
        self._workers.close()

    @cached_property
    def _programs(self) -> ProgramRunner:
        from .compiler import Compiler  # and with it the generators, which the short cut never needs
        from .programs import ProgramRunner

        compiler = Compiler(self._cluster, self._algorithm, far=self._transport.spans_hosts)
        return ProgramRunner(self._transport, self._workers, compiler, self._token)

    def _run_direct(self, communicator: Communicator, match: Match, last: Operation) -> None:
        met_ns = last.started_ns
        operations: list[Operation] = match.arrived  # type: ignore[assignment]  # a call of `cast` takes time
        pattern: Call = match.pattern  # type: ignore[assignment]
        if pattern.work_bytes * len(operations) <= INLINE_BYTES or _is_idle(operations):
            self._workers.quiet.run(run_here, operations, pattern)
            _complete(operations, met_ns, pattern)
            return
        last.lock()
        work = pieces(operations, pattern)
        done = partial(self._direct_done, communicator, match, met_ns)
        self._workers.submit(
            work,
            lambda error: self._token.run_sync_soon(done, error),
            priority=min(operation.urgency for operation in operations),
        )
        self._in_flight += 1  # the end is told on this thread, so it cannot come before
        for operation in operations:
            operation.moves(_WORKERS)

    def _direct_done(self, communicator: Communicator, match: Match, met_ns: int, error: BaseException | None) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()
        for operation in match.ends:
            operation.stopped()
        if error is None:
            _complete(match.ends, met_ns, cast("Call", match.pattern))
            return
        for operation in match.ends:
            operation.fail(Failure(error))


class _Working:
    """Work of worker threads, which is not stopped, but waited for."""

    def cancel(self) -> None:
        """Do nothing: its end comes soon."""


_WORKERS = _Working()


def _is_idle(operations: Sequence[Operation]) -> bool:
    """Whether there is nothing to do: a rank alone has its result where its input is."""
    return len(operations) == 1 and operations[0].out is operations[0].source is not None


def _complete(operations: list[Operation], met_ns: int, pattern: Call) -> None:
    end_ns = perf_counter_ns()
    meeting = operations[0].describe(pattern, met_ns)
    for operation in operations:
        operation.finish(end_ns, meeting)
