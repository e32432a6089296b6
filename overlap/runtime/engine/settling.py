"""How one rank's end of an operation that spans processes is settled, whatever moved its bytes."""

from __future__ import annotations

from threading import get_ident
from typing import cast

from transports import TransportError

from ...collectives.call import Call
from ..communicator import Communicator
from ..future import Failure
from ..match import Match
from ..operation import Operation

__all__ = ["settle"]


def settle(communicator: Communicator, match: Match, operation: Operation, error: BaseException | None) -> None:
    """Finish an operation, or fail it and tell the others; its bytes have stopped moving."""
    if error is not None and get_ident() != operation.context.thread:  # the others are told by the loop
        operation.context.from_thread(settle, communicator, match, operation, error)
        return
    if isinstance(error, TransportError):
        error.operation = f"{operation.label} ({operation.call_site})"
    if error is not None and not operation.done:
        communicator.fail_one(match, operation, Failure(error))
    elif not operation.done:
        met_ns = operation.started_ns if communicator.here == 1 else max(end.started_ns for end in match.ends)
        operation.finish(operation.context.now_ns(), operation.describe(cast("Call", match.pattern), met_ns))
    communicator.ended(match, operation)
