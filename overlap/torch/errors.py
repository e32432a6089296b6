"""Our errors as torch's: what programs for PyTorch catch is a `DistBackendError`, and our sentence is its text."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["backend_error"]


def backend_error(error: BaseException) -> BaseException:
    """Return what to raise for an operation that failed with `error`, which becomes its cause."""
    if not isinstance(error, Exception) or isinstance(error, dist.DistError):
        return error
    told: BaseException = dist.DistBackendError(str(error))
    told.__cause__ = error
    return told
