"""Starts and settles one rank's end of an operation, whichever way its bytes move."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import ParamSpec

from transports import TransportError
from transports.common import PAYLOAD_BYTES

from ...collectives.call import Call
from ..communicator import Communicator
from ..future import Failure
from ..match import Match
from ..operation import Operation


def settle(communicator: Communicator, match: Match, operation: Operation, error: BaseException | None) -> None:
    """Finish an operation, or fail it and tell the others; its bytes have stopped moving."""
    if error is not None:
        if get_ident() != operation.context.thread:  # the others are told by the loop
            operation.context.from_thread(settle, communicator, match, operation, error)
            return
        if isinstance(error, TransportError):
            error.operation = f"{operation.label} ({operation.call_site})"
        if not operation.done:
            communicator.fail_one(match, operation, Failure(error))
    else:
        met_ns = operation.started_ns if communicator.here == 1 else max(end.started_ns for end in match.ends)
        pattern: Call = match.pattern  # type: ignore[assignment]  # what has ended had one
        operation.finish(operation.context.now_ns(), operation.describe(pattern, met_ns))
    communicator.ended(match, operation)


P = ParamSpec("P")


def start_locked(operation: Operation, start: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Start an operation and lock its arrays; a small input is copied at once, and may never need a lock."""
    source = operation.source
    if operation.out is not None or source is None or source.nbytes > PAYLOAD_BYTES:
        operation.lock()
        start(*args, **kwargs)
        return
    start(*args, **kwargs)
    if not operation.done:
        operation.lock()
