"""Errors of the classes that programs of torch catch."""

from __future__ import annotations

import torch.distributed as dist

from ..errors import DeadlineError


class CallError(ValueError, RuntimeError):
    """Invalid arguments of a call; this rank has issued no operation.

    For such calls, c10d itself mostly raises RuntimeError, and the functions above it ValueError: this error is both.
    """


def backend_error(error: BaseException) -> BaseException:
    """Return the exception for an operation that failed with `error`, which becomes its cause.

    An error of torch, and an error that is no `Exception`, such as KeyboardInterrupt, is returned unchanged.
    """
    if not isinstance(error, Exception) or isinstance(error, dist.DistError):
        return error
    text = timeout_text(error.timeout_s, error) if isinstance(error, DeadlineError) else str(error)
    translated: BaseException = dist.DistBackendError(text)
    translated.__cause__ = error
    return translated


def timeout_text(seconds: float | None, error: BaseException) -> str:
    """Return the text of an error after a time limit; programs of c10d search for "Timed out after".

    Args:
        seconds: The time limit.
        error: The error, which names the operation.
    """
    return f"backend 'overlap': Timed out after {seconds:g} s: {error}"
