"""Our errors as torch's: what programs for PyTorch catch is a `DistBackendError`, and our sentence is its text."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["backend_error", "timed_out"]


def backend_error(error: BaseException) -> BaseException:
    """Return what to raise for an operation that failed with `error`, which becomes its cause."""
    if not isinstance(error, Exception) or isinstance(error, dist.DistError):
        return error
    told = dist.DistBackendError(str(error))
    told.__cause__ = error
    return told


def timed_out(what: str, seconds: float) -> dist.DistBackendError:
    """Return the error of an operation that took longer than it may."""
    return dist.DistBackendError(
        f"{what}: Timed out after {seconds:g} s; another rank has not come to it, or is slower than the timeout of this "
        "operation or its group allows"
    )
