"""What torch asks for besides tensors: reductions and time limits, in our words."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_Op = dist.ReduceOp.RedOpType
# By `op.op`: a ReduceOp equals its RedOpType, but has another hash.
_NAMES = {
    _Op.SUM: "sum",
    _Op.AVG: "mean",
    _Op.PRODUCT: "prod",
    _Op.MIN: "min",
    _Op.MAX: "max",
    _Op.BAND: "band",
    _Op.BOR: "bor",
    _Op.BXOR: "bxor",
}


def reduction(op: Any) -> tuple[str, Any]:
    """Return the name of a reduction, and the factor by which each rank multiplies first, or None.

    Raises:
        ValueError: If it is none.
    """
    kind = getattr(op, "op", op)
    name = _NAMES.get(kind)
    if name is not None:
        return name, None
    if kind == _Op.PREMUL_SUM and isinstance(op, dist.ReduceOp):
        return "sum", op.__getstate__()[1]  # `op.factor` came with later versions than 2.7
    raise ValueError(f"op: backend 'overlap' reduces by {', '.join(sorted(k.name for k in _NAMES))}, got {kind}")


def seconds(timeout: timedelta | None, default: timedelta) -> float:
    """Return a limit in seconds; what is not positive means the default."""
    if timeout is None or timeout <= timedelta(0):
        timeout = default
    return timeout.total_seconds()
