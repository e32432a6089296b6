"""Calls that PyTorch has made before, issued again by a thread in few steps.

A training loop repeats its calls, and the time of an operation on its calling thread hides no communication. So the
parts that follow from the call alone are made once: checks, the port, the plan, the table that the engine executes.
An operation that is issued so is numbered, recorded, watched and ended as any other.
"""

from __future__ import annotations

from functools import partial
from types import FrameType
from typing import Any, cast

from .engine.host_memory import HostPlan, HostRun
from .operation import NOWHERE, CollectiveFuture
from .spanning import SpanningCommunicator
from .state import MATCHING
from .stream import Stream


class PreparedCall:
    """A collective between processes of one host that a rank has issued before, from a thread."""

    __slots__ = ("_call", "_communicator", "_context", "_lane", "_member", "_name", "_plan", "_port")

    def __init__(self, operation: CollectiveFuture[Any], plan: HostPlan) -> None:
        self._port, self._call, self._plan = operation.port, operation.call, plan
        self._context, self._member = operation.context, operation.member
        self._name = None if operation.name == operation.kind.text else operation.name
        self._communicator = cast("SpanningCommunicator", operation.port.communicator)
        self._lane = cast("Stream", operation.port.stream)

    @classmethod
    def of(cls, operation: object) -> PreparedCall | None:
        """Prepare the call of an operation that a thread has issued; None unless the engine alone executed it."""
        if type(operation) is not CollectiveFuture or operation.port is NOWHERE:
            return None
        communicator = operation.port.communicator
        if not isinstance(communicator, SpanningCommunicator):
            return None
        plan = operation.port.plans.get(operation.call)
        if not isinstance(plan, HostPlan) or not plan.lasts or plan.call.shared:
            return None
        return cls(operation, plan)

    def issue(
        self,
        source: int,
        target: int,
        memory: object,
        timeout_s: float,
        caller: FrameType,
        *,
        waited_for: bool = False,
    ) -> CollectiveFuture[Any] | None:
        """Issue the call again, in place of the event loop if that sleeps; None if it must be issued in full.

        `memory` owns the input at address `source` and the result at `target`, 0 for none; `caller` is the frame of the
        program's line; `waited_for` says whether this thread waits at once.
        """
        call, context = self._call, self._context
        operation: CollectiveFuture[Any] = CollectiveFuture(
            call.kind, None, None, caller, 0, self._name, call.op, call.root, None, None, call.exact
        )
        operation.call, operation.member, operation.context = call, self._member, context
        operation.step, operation.deadline_s = context.step, timeout_s
        issued = context.handover.in_place(partial(self._begin, operation, source, target, memory, waited_for), False)
        return operation if issued else None

    def _begin(
        self, operation: CollectiveFuture[Any], source: int, target: int, memory: object, waited_for: bool
    ) -> bool:
        """Issue and start an operation, as `Issuer` and the communicator do, if nothing else must come first."""
        context, port, plan, communicator = self._context, self._port, self._plan, self._communicator
        lane, timeout_s = self._lane, operation.deadline_s
        if (
            context.closed
            or not lane.has_room
            or lane.end_wakes
            or context.deadlines.wakes(timeout_s)
            or not communicator.calm
            or not plan.takes_threads()
        ):
            return False
        operation.port, operation.seq = port, port.next_seq
        port.next_seq = operation.seq + 1
        operation.priority = lane.priority
        operation.issued_ns = operation.started_ns = now_ns = context.now_ns()
        operation.record = context.flight.issued(operation, port.known, self._call, operation.seq, now_ns)
        if timeout_s is not None:
            context.expire(operation, timeout_s)
        lane.admit(operation)
        operation._enter(MATCHING)
        communicator.record_call(operation)
        run = HostRun(plan, operation)
        run.submit(source, target, memory, waited_for=waited_for)
        if not run.finish_at_once():
            run.wait(communicator.make_lone_match(operation))
        return True
