"""When the arrays of an operation are locked: before its bytes move, unless they have moved at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from transports.common import PAYLOAD_BYTES

from ..operation import Operation

P = ParamSpec("P")


def start_locked(operation: Operation, start: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Start an operation; what is small is copied at once, and may be over at once."""
    source = operation.source
    if operation.out is not None or source is None or source.nbytes > PAYLOAD_BYTES:
        operation.lock()
        start(*args, **kwargs)
        return
    start(*args, **kwargs)
    if not operation.done:
        operation.lock()
