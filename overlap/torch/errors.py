"""Errors as torch's programs catch them."""

from __future__ import annotations

import torch.distributed as dist

from ..errors import DeadlineError


class CallError(ValueError, RuntimeError):
    """A call that can mean nothing. Nothing has been started, here or elsewhere.

    c10d raises a RuntimeError for most of such calls, and the functions above it a ValueError; this is both.
    """


def backend_error(error: BaseException) -> BaseException:
    """Return the exception for an operation that failed with `error`, which becomes its cause."""
    if not isinstance(error, Exception) or isinstance(error, dist.DistError):
        return error
    text = timed_out(error.timeout_s, error) if isinstance(error, DeadlineError) else str(error)
    told: BaseException = dist.DistBackendError(text)
    told.__cause__ = error
    return told


def timed_out(seconds: float | None, error: BaseException) -> str:
    """Return the text of an error that came of waiting too long, in the words that programs look for."""
    return f"backend 'overlap': Timed out after {seconds:g} s: {error}"
