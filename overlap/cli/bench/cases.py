"""Cases of a benchmark: operation, size, buffers and expected results; and their JSON form for other processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from ... import OPS, Rank
from ...collectives.kinds import Collective
from ...collectives.reduce import Array
from ...runtime.future import Future
from .operations import BenchOperation, dtype_named, find
from .sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table: an operation on some data between some ranks."""

    operation: BenchOperation  # The measured operation
    ranks: int  # Size of the world
    count: int  # Elements of one block, as nccl-tests counts them
    dtype: np.dtype[np.generic]  # Type of the elements
    op: str = "sum"  # Reduction operator
    root: int = 0  # Root rank of rooted operations
    in_place: bool = False  # Whether the result is written into the memory of the input

    @property
    def size_bytes(self) -> int:
        """Bytes of the input or of the result of one rank, whichever has more: the size in the table."""
        return self.count * self.operation.blocks(self.ranks) * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        """Bytes of the inputs and results of all ranks."""
        return self.dtype.itemsize * sum(map(self._elements, range(self.ranks)))

    @property
    def _result_elements(self) -> int:
        """Return the number of elements in the result of one rank."""
        return self.count * (self.ranks if self.operation.kind.traits.gathers else 1)

    def _elements(self, rank: int) -> int:
        """Return the number of elements in the input and the result of a rank; in place they share one buffer."""
        source = self.count * (self.ranks if self.operation.kind.traits.scatters else 1)
        result = self._result_elements if self.receives(rank) else 0
        return max(source, result) if self.in_place else source + result

    def issue(self, rank: Rank, x: Array, out: Array | None) -> tuple[Future[object], ...]:
        """Issue the operation on one rank, with the arrays of `buffers`; return the futures to await."""
        return self.operation.issue(rank, x, out, self.op, self.root)

    def buffers(self, rank: int) -> tuple[Array, Array | None]:
        """Return the filled input of `rank`, and the array for its result if it gets one of its own."""
        kind = self.operation.kind
        source = repeat_pattern(pattern(rank, self.dtype), 0, self.count * (self.ranks if kind.traits.scatters else 1))
        if not self.receives(rank):
            return source, None
        if self.in_place and not kind.traits.gathers:
            return source, source
        result: Array = np.zeros(self._result_elements, self.dtype)
        if not self.in_place:
            return source, result
        own = result[rank * self.count : (rank + 1) * self.count]
        own[...] = source
        return own, result

    def receives(self, rank: int) -> bool:
        """Return whether `rank` gets a result."""
        kind = self.operation.kind
        return kind is not Collective.BARRIER and (
            rank == self.root or kind not in (Collective.REDUCE, Collective.GATHER)
        )

    def expected(self, rank: int) -> Array:
        """Return the expected result of a `rank` that gets one."""
        kind, count = self.operation.kind, self.count
        first = rank * count if kind.traits.scatters else 0
        if kind.traits.reduces:
            return repeat_pattern(reduction(self.ranks, self.op, self.dtype), first, count)
        if kind.traits.gathers:
            return np.concatenate([self._input_slice(src, first) for src in range(self.ranks)])
        if kind.traits.rooted:
            return self._input_slice(self.root, first)
        return self._input_slice((rank - 1) % self.ranks, first)

    def _input_slice(self, src: int, first: int) -> Array:
        return repeat_pattern(pattern(src, self.dtype), first, self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Cases that the ranks of other processes measure, in one world."""

    cases: Sequence[Case]  # One for each row; they differ only in their counts
    sampling: Sampling  # Number of samples
    check: bool = True  # Whether to check the results, outside the timed loop

    def to_json(self) -> str:
        """Return the assignment as one argument of a command."""
        rows = [asdict(case) | {"operation": case.operation.name, "dtype": case.dtype.name} for case in self.cases]
        return json.dumps({"cases": rows, "sampling": asdict(self.sampling), "check": self.check})

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """Read the text that `to_json` has written."""
        document = json.loads(text)
        cases = [
            Case(**row | {"operation": find(row["operation"]), "dtype": dtype_named(row["dtype"])})
            for row in document["cases"]
        ]
        return cls(cases=cases, sampling=Sampling(**document["sampling"]), check=document["check"])


# -- test data: small integers, so that every dtype holds them and every sum is exact --------------------------------

SEED = 1  # Seed of the random inputs

PERIOD = 8191
"""Elements after which the data repeats: a prime number, so that a block in a wrong place is noticed."""

_WIDE = {"b": np.bool_, "i": np.int64, "u": np.uint64, "c": np.complex128}  # floats: float64


@lru_cache(maxsize=64)
def pattern(rank: int, dtype: np.dtype[np.generic]) -> Array:
    """Return the `PERIOD` elements that the input of `rank` repeats: random 1, 2 and 3, or False and True."""
    low, high = (0, 2) if dtype.kind == "b" else (1, 4)
    return np.random.default_rng((SEED, rank)).integers(low, high, PERIOD).astype(dtype)


@lru_cache(maxsize=16)
def reduction(ranks: int, op: str, dtype: np.dtype[np.generic]) -> Array:
    """Return the reduction of the patterns of all ranks, computed in 64 bits and rounded once."""
    wide = _WIDE.get(dtype.kind, np.float64)
    total = OPS[op].reference(np.stack([pattern(rank, dtype) for rank in range(ranks)]).astype(wide))
    if OPS[op].divides and dtype.kind == "c":
        total = total.astype(dtype)  # numpy multiplies by a reciprocal, so 64 bits would round differently
    if OPS[op].divides:
        total = np.floor_divide(total, ranks) if dtype.kind in "iu" else np.true_divide(total, ranks)
    return total.astype(dtype)


def repeat_pattern(repeated: Array, first: int, count: int) -> Array:
    """Return elements `first` to `first + count` of an endlessly repeated pattern."""
    return np.resize(np.roll(repeated, -(first % PERIOD)), count)


def wrong_elements(result: Array, expected: Array) -> int:
    """Return how many elements of `result` differ from `expected`, an array of the same length."""
    return int(np.count_nonzero(result.reshape(-1) != expected))
