"""Operations that can be measured, by name, with their types and reduction operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeAlias

import numpy as np

from ... import OPS, Rank, UsageError
from ...collectives.kinds import Collective
from ...collectives.reduce import Array, check_dtype, reducer
from ...runtime.future import Future

Issue: TypeAlias = "Callable[[Rank, Array, Array | None, str, int], tuple[Future[object], ...]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOperation:
    """An operation with a row in the table."""

    kind: Collective  # The collective whose shapes and bus factor it has
    names: tuple[str, ...]  # Its name, then its short names
    # Starts it on one rank, given the input, where to put the result, the operator and the root; returns what to await.
    issue: Issue
    in_place: bool = False  # Whether input and result may share memory
    fewest_ranks: int = 1  # Smallest world

    @property
    def name(self) -> str:
        """Long name of the operation, as in the table: all_reduce."""
        return self.names[0]

    def blocks(self, ranks: int) -> int:
        """Return the number of blocks in the input or the result of a rank, whichever has more."""
        return ranks if self.kind.traits.scatters or self.kind.traits.gathers else 1


def _ring(ranks: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % ranks) for rank in range(ranks)]


def _send_recv(rank: Rank, x: Array, out: Array | None, op: str, root: int) -> tuple[Future[object], ...]:
    """Send to the next rank of a circle, and receive from the previous one."""
    assert out is not None
    ahead, behind = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
    return rank.send(x, ahead), rank.recv(out, behind)


OPERATIONS = (
    BenchOperation(
        kind=Collective.ALL_REDUCE,
        names=("all_reduce", "allr"),
        issue=lambda rank, x, out, op, root: (rank.all_reduce(x, op, out),),
        in_place=True,
    ),
    BenchOperation(
        kind=Collective.REDUCE_SCATTER,
        names=("reduce_scatter", "redsct"),
        issue=lambda rank, x, out, op, root: (rank.reduce_scatter(x, op, out),),
    ),
    BenchOperation(
        kind=Collective.ALL_GATHER,
        names=("all_gather", "allg"),
        issue=lambda rank, x, out, op, root: (rank.all_gather(x, out),),
        in_place=True,
    ),
    BenchOperation(
        kind=Collective.ALL_TO_ALL,
        names=("all_to_all", "alltoall"),
        issue=lambda rank, x, out, op, root: (rank.all_to_all(x, out),),
    ),
    BenchOperation(
        kind=Collective.BROADCAST,
        names=("broadcast", "bcast"),
        issue=lambda rank, x, out, op, root: (rank.broadcast(x, root, out),),
        in_place=True,
    ),
    BenchOperation(
        kind=Collective.REDUCE,
        names=("reduce", "red"),
        issue=lambda rank, x, out, op, root: (rank.reduce(x, root, op, out),),
        in_place=True,
    ),
    BenchOperation(
        kind=Collective.GATHER,
        names=("gather",),
        issue=lambda rank, x, out, op, root: (rank.gather(x, root, out),),
        in_place=True,
    ),
    BenchOperation(
        kind=Collective.SCATTER,
        names=("scatter",),
        issue=lambda rank, x, out, op, root: (rank.scatter(x, root, out),),
    ),
    BenchOperation(
        kind=Collective.PERMUTE,
        names=("permute",),
        issue=lambda rank, x, out, op, root: (rank.permute(x, _ring(rank.world_size), out),),
    ),
    BenchOperation(kind=Collective.P2P, names=("send_recv", "sendrecv"), issue=_send_recv, fewest_ranks=2),
    BenchOperation(kind=Collective.BARRIER, names=("barrier",), issue=lambda rank, x, out, op, root: (rank.barrier(),)),
)

NAMES = {name: operation for operation in OPERATIONS for name in operation.names}

_NCCL_DTYPES = {"float": "float32", "double": "float64", "half": "float16", "fp8e4m3": "float8_e4m3fn"}

_DTYPES = (
    "bool, int8 to int64, uint8 to uint64, float16 to float64, complex64, complex128, bfloat16, float8_e4m3fn and the "
    "other float8 types of ml_dtypes"
)


def find(name: str) -> BenchOperation:
    """Return the operation of that long or short name.

    Raises:
        UsageError: If there is none; lists those that there are.
    """
    if name in NAMES:
        return NAMES[name]
    close = get_close_matches(name, NAMES, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    known = ", ".join("/".join(operation.names) for operation in OPERATIONS)
    raise UsageError(f"OP: {name!r} is unknown{meant}; known are {known}")


def dtype_named(name: str) -> np.dtype[np.generic]:
    """Return the dtype of a name of numpy, ml_dtypes or nccl-tests, such as float32, bfloat16, half.

    Raises:
        UsageError: If there is none, or no collective carries it.
    """
    import ml_dtypes

    plain = _NCCL_DTYPES.get(name, name)
    try:
        dtype = np.dtype(getattr(ml_dtypes, plain, plain))
        check_dtype(dtype)
    except (TypeError, UsageError):
        raise UsageError(f"--datatype: {name!r} is unknown; known are {_DTYPES}") from None
    return dtype


def redop_named(name: str, dtype: np.dtype[np.generic]) -> str:
    """Return the reduction operator of a name, checked against the dtype.

    Raises:
        UsageError: If there is none, or it is not defined for the dtype.
    """
    if name not in OPS:
        raise UsageError(f"--op: {name!r} is unknown; known are {', '.join(OPS)}")
    reducer(name, dtype)
    return name
