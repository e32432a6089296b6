"""How operations that have met become moved bytes: by the short cut through shared memory, or as programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextvars import copy_context
from functools import cached_property, partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import trio
from trio.lowlevel import TrioToken

from transports import Transport

from ...collectives.call import Call
from ...collectives.host import short_cut_wins
from ..future import Failure
from .shared_memory import pieces, run_here
from .workers import INLINE_BYTES, Workers

if TYPE_CHECKING:
    from topology import Cluster

    from ..communicator import Channel, Meeting
    from ..operation import CollectiveFuture
    from .program_runner import Programs

Operation: TypeAlias = "CollectiveFuture[object]"

__all__ = ["BaseEngine", "Engine"]


class BaseEngine(ABC):
    """Runs the operations of one process's ranks."""

    @abstractmethod
    def direct(self, size: int) -> bool:
        """Whether operations of a group of that size start when all its ranks have met, for they need no program."""

    @abstractmethod
    def arrived(self, channel: Channel, meeting: Meeting, operation: Operation) -> None:
        """Start what can start, now that one more rank has come to a meeting."""

    @abstractmethod
    def start(self, channel: Channel, meeting: Meeting) -> None:
        """Start the programs of the ranks that are here, once anybody has said what travels."""

    @abstractmethod
    async def aclose(self) -> None:
        """Wait for the work at hand and end all threads."""


class Engine(BaseEngine):
    """Moves bytes: through shared memory, or as programs over a transport."""

    def __init__(self, transport: Transport, cluster: Cluster, token: TrioToken, *, algorithm: str | None) -> None:
        self._algorithm = algorithm
        self._transport, self._cluster = transport, cluster
        self._token = token
        self._workers = Workers()
        self._in_flight = 0
        # An infinite gradient is the program's business, not a warning of ours. numpy keeps that setting in the
        # context; entering one made beforehand costs a tenth of `np.errstate` each time.
        self._quiet = copy_context()
        self._quiet.run(np.seterr, all="ignore")
        self._idle = trio.Event()

    def direct(self, size: int) -> bool:
        """Whether the short cut is taken: where it is asked for, or where it exists and costs least."""
        if self._algorithm is None:
            return self._transport.shares_memory(self._transport.ranks) and short_cut_wins(size)
        return self._algorithm == "direct"

    def arrived(self, channel: Channel, meeting: Meeting, operation: Operation) -> None:
        """Start what can start: all ranks are here, or this one's part of a program need not wait for them."""
        if channel.direct:
            self._run_direct(meeting, operation)
            return
        operation.lend()
        self.start(channel, meeting)

    def start(self, channel: Channel, meeting: Meeting) -> None:
        """Start the programs of the ranks that are here, once anybody has said what travels."""
        if meeting.pattern is not None and meeting.pattern.settled:
            self._programs.start(channel, meeting)

    async def aclose(self) -> None:
        """Wait for the reductions at hand and end the worker threads."""
        with trio.CancelScope(shield=True):
            while self._in_flight:
                self._idle = trio.Event()
                await self._idle.wait()
        self._workers.close()

    @cached_property
    def _programs(self) -> Programs:
        from .compiler import Compiler  # and with it the generators, which the short cut never needs
        from .program_runner import Programs

        return Programs(self._transport, self._workers, Compiler(self._cluster, self._algorithm))

    def _run_direct(self, meeting: Meeting, last: Operation) -> None:
        met_ns = last.started_ns
        operations, pattern = cast("list[Operation]", meeting.arrived), cast("Call", meeting.pattern)
        if pattern.nbytes * len(operations) <= INLINE_BYTES:
            self._quiet.run(run_here, operations, pattern)
            _complete(operations, met_ns, pattern)
            return
        last.lend()
        work = pieces(operations, pattern)
        for operation in operations:
            operation.running = True
        self._in_flight += 1
        done = partial(self._direct_done, operations, met_ns, pattern)
        self._workers.submit(
            work,
            lambda error: self._token.run_sync_soon(done, error),
            priority=min(operation.urgency for operation in operations),
        )

    def _direct_done(
        self, operations: list[Operation], met_ns: int, pattern: Call, error: BaseException | None
    ) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()
        for operation in operations:
            operation.stopped()
        if error is None:
            _complete(operations, met_ns, pattern)
            return
        for operation in operations:
            operation.fail(Failure(error))


def _complete(operations: list[Operation], met_ns: int, pattern: Call) -> None:
    end_ns = perf_counter_ns()
    meeting = operations[0].describe(pattern, met_ns)
    for operation in operations:
        operation.finish(end_ns, meeting)
