"""Errors as torch's programs catch them."""

from __future__ import annotations

import torch.distributed as dist

from ..errors import DeadlineError


class CallError(ValueError, RuntimeError):
    """Invalid arguments of a call. No rank has started an operation.

    c10d raises a RuntimeError for most of such calls, and the functions above it a ValueError; this is both.
    """


def backend_error(error: BaseException) -> BaseException:
    """Return the exception for an operation that failed with `error`, which becomes its cause."""
    if not isinstance(error, Exception) or isinstance(error, dist.DistError):
        return error
    text = timed_out(error.timeout_s, error) if isinstance(error, DeadlineError) else str(error)
    translated: BaseException = dist.DistBackendError(text)
    translated.__cause__ = error
    return translated


def timed_out(seconds: float | None, error: BaseException) -> str:
    """Return the text of an error after a time limit, in the words that programs of c10d search for."""
    return f"backend 'overlap': Timed out after {seconds:g} s: {error}"
