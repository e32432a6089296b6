"""What can be measured by name: each operation, its buffers, how it is issued, and its result."""

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
from . import data

__all__ = ["NAMES", "OPERATIONS", "Case", "Operation", "dtype_named", "find", "redop_named"]

Issue: TypeAlias = "Callable[[Rank, Case, Array, Array | None], tuple[Future[object], ...]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Something with a row in the table.

    Attributes:
        kind: The collective whose shapes and bus factor it has.
        names: Its name, then its short names.
        issue: Starts it on one rank, given the case, the input and where to put the result; returns what to await.
        in_place: Whether input and result may share memory.
        fewest_ranks: It needs so many.
    """

    kind: Collective
    names: tuple[str, ...]
    issue: Issue
    in_place: bool = False
    fewest_ranks: int = 1

    @property
    def name(self) -> str:
        """The long name."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table: what is sent, and between how many ranks.

    Attributes:
        operation: Which.
        ranks: Size of the world.
        count: Elements of one block, as nccl-tests counts them.
        dtype: Of the elements.
        op: Reduction operator.
        root: Rank, where there is one.
        in_place: Whether the result goes into the memory of the input.
    """

    operation: Operation
    ranks: int
    count: int
    dtype: np.dtype[np.generic]
    op: str = "sum"
    root: int = 0
    in_place: bool = False

    @property
    def size_bytes(self) -> int:
        """The larger of input and result."""
        return self.count * blocks(self.operation.kind, self.ranks) * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        """What the inputs and results of all ranks take."""
        return self.dtype.itemsize * sum(map(self._elements, range(self.ranks)))

    def _elements(self, rank: int) -> int:
        traits = self.operation.kind.traits
        source = self.count * (self.ranks if traits.scatters else 1)
        result = self.count * (self.ranks if traits.gathers else 1) if self.receives(rank) else 0
        return max(source, result) if self.in_place else source + result

    def buffers(self, rank: int) -> tuple[Array, Array | None]:
        """Make the filled input of `rank` and, if it gets a result, the array for it."""
        kind = self.operation.kind
        source = data.tiled(data.pattern(rank, self.dtype), 0, self.count * (self.ranks if kind.traits.scatters else 1))
        if not self.receives(rank):
            return source, None
        if self.in_place and not kind.traits.gathers:
            return source, source
        gathered = self.count * (self.ranks if kind.traits.gathers else 1)
        result: Array = np.zeros(gathered, self.dtype)
        if not self.in_place:
            return source, result
        own = result[rank * self.count : (rank + 1) * self.count]
        own[...] = source
        return own, result

    def receives(self, rank: int) -> bool:
        """Whether `rank` gets a result."""
        kind = self.operation.kind
        return kind is not Collective.BARRIER and (
            rank == self.root or kind not in (Collective.REDUCE, Collective.GATHER)
        )

    def expected(self, rank: int) -> Array:
        """Compute the result of a `rank` that gets one."""
        kind, count = self.operation.kind, self.count
        first = rank * count if kind.traits.scatters else 0
        if kind.traits.reduces:
            return data.tiled(data.reduction(self.ranks, self.op, self.dtype), first, count)
        if kind.traits.gathers:
            return np.concatenate([self._sent(src, first) for src in range(self.ranks)])
        if kind.traits.rooted:
            return self._sent(self.root, first)
        return self._sent((rank - 1) % self.ranks, first)

    def _sent(self, src: int, first: int) -> Array:
        return data.tiled(data.pattern(src, self.dtype), first, self.count)


def blocks(kind: Collective, ranks: int) -> int:
    """Return how many blocks the larger of input and result holds."""
    return ranks if kind.traits.scatters or kind.traits.gathers else 1


def _ring(ranks: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % ranks) for rank in range(ranks)]


def _send_recv(rank: Rank, case: Case, x: Array, out: Array | None) -> tuple[Future[object], ...]:
    assert out is not None
    ahead, behind = (rank.rank + 1) % case.ranks, (rank.rank - 1) % case.ranks
    return rank.send(x, ahead), rank.recv(out, behind)


OPERATIONS = (
    Operation(
        kind=Collective.ALL_REDUCE,
        names=("all_reduce", "allr"),
        issue=lambda rank, case, x, out: (rank.all_reduce(x, case.op, out),),
        in_place=True,
    ),
    Operation(
        kind=Collective.REDUCE_SCATTER,
        names=("reduce_scatter", "redsct"),
        issue=lambda rank, case, x, out: (rank.reduce_scatter(x, case.op, out),),
    ),
    Operation(
        kind=Collective.ALL_GATHER,
        names=("all_gather", "allg"),
        issue=lambda rank, case, x, out: (rank.all_gather(x, out),),
        in_place=True,
    ),
    Operation(
        kind=Collective.ALL_TO_ALL,
        names=("all_to_all", "alltoall"),
        issue=lambda rank, case, x, out: (rank.all_to_all(x, out),),
    ),
    Operation(
        kind=Collective.BROADCAST,
        names=("broadcast", "bcast"),
        issue=lambda rank, case, x, out: (rank.broadcast(x, case.root, out),),
        in_place=True,
    ),
    Operation(
        kind=Collective.REDUCE,
        names=("reduce", "red"),
        issue=lambda rank, case, x, out: (rank.reduce(x, case.root, case.op, out),),
        in_place=True,
    ),
    Operation(
        kind=Collective.GATHER,
        names=("gather",),
        issue=lambda rank, case, x, out: (rank.gather(x, case.root, out),),
        in_place=True,
    ),
    Operation(
        kind=Collective.SCATTER,
        names=("scatter",),
        issue=lambda rank, case, x, out: (rank.scatter(x, case.root, out),),
    ),
    Operation(
        kind=Collective.PERMUTE,
        names=("permute",),
        issue=lambda rank, case, x, out: (rank.permute(x, _ring(case.ranks), out),),
    ),
    Operation(kind=Collective.P2P, names=("send_recv", "sendrecv"), issue=_send_recv, fewest_ranks=2),
    Operation(kind=Collective.BARRIER, names=("barrier",), issue=lambda rank, case, x, out: (rank.barrier(),)),
)

NAMES = {name: operation for operation in OPERATIONS for name in operation.names}

_NCCL_DTYPES = {"float": "float32", "double": "float64", "half": "float16", "fp8e4m3": "float8_e4m3fn"}

_DTYPES = (
    "bool, int8 to int64, uint8 to uint64, float16 to float64, complex64, complex128, bfloat16, float8_e4m3fn and the "
    "other float8 types of ml_dtypes"
)


def find(name: str, others: tuple[str, ...] = ()) -> Operation:
    """Return the operation of that long or short name; `others` are further names that the caller knows.

    Raises:
        UsageError: If there is none; lists those that there are.
    """
    if name in NAMES:
        return NAMES[name]
    close = get_close_matches(name, [*NAMES, *others], n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    known = [*("/".join(operation.names) for operation in OPERATIONS), *others]
    raise UsageError(f"OP: {name!r} is unknown{meant}; known are {', '.join(known)}")


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
