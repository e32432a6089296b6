"""Cases of a benchmark: operation, size, buffers and expected results; and the cases that options request. Pure."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from ... import Rank, UsageError
from ...collectives.kinds import Collective
from ...collectives.reduce import OPS, Array, check_dtype, find_reducer
from ...runtime.forms import dtype_of
from ...runtime.future import Future
from ...units import format_bytes, parse_bytes

_MOST_SAMPLES = 1_000_000  # of the smallest message they take minutes; a row has 600 s
MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of the machine


@dataclass(frozen=True, slots=True)
class BenchOperation:
    """An operation with a row in the table."""

    kind: Collective  # The operation, with its shapes and its bus factor
    name: str  # Long name, as in the table and of the method of a rank: all_reduce
    short: str  # Short name; the long name if there is none
    in_place: bool = False  # Whether input and result may share memory

    def block_count(self, ranks: int) -> int:
        """Return the number of blocks in the input or the result of a rank, whichever has more."""
        return ranks if self.kind.traits.scatters or self.kind.traits.gathers else 1


OPERATIONS = (
    BenchOperation(Collective.ALL_REDUCE, "all_reduce", "allr", in_place=True),
    BenchOperation(Collective.REDUCE_SCATTER, "reduce_scatter", "redsct"),
    BenchOperation(Collective.ALL_GATHER, "all_gather", "allg", in_place=True),
    BenchOperation(Collective.ALL_TO_ALL, "all_to_all", "alltoall"),
    BenchOperation(Collective.BROADCAST, "broadcast", "bcast", in_place=True),
    BenchOperation(Collective.REDUCE, "reduce", "red", in_place=True),
    BenchOperation(Collective.GATHER, "gather", "gather", in_place=True),
    BenchOperation(Collective.SCATTER, "scatter", "scatter"),
    BenchOperation(Collective.P2P, "send_recv", "sendrecv"),
)

NAMES = {name: operation for operation in OPERATIONS for name in (operation.name, operation.short)}

_NCCL_DTYPES = {"float": "float32", "double": "float64", "half": "float16", "fp8e4m3": "float8_e4m3fn"}


def find_dtype(name: str) -> np.dtype[np.generic]:
    """Return the dtype with a name of numpy, ml_dtypes or nccl-tests, such as float32, bfloat16 or half.

    Raises:
        UsageError: There is no such dtype, or collectives do not support it.
    """
    try:
        dtype = dtype_of(_NCCL_DTYPES.get(name, name))
        check_dtype(dtype)
    except (TypeError, ValueError, UsageError):
        raise UsageError(f"--datatype: expected a type of numpy or ml_dtypes, such as float32, got {name!r}") from None
    return dtype


# -- cases and their buffers ------------------------------------------------------------------------------------------


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
        return self.count * self.operation.block_count(self.ranks) * self.dtype.itemsize

    def make_issue_function(self, rank: Rank, x: Array, out: Array | None) -> Callable[[], tuple[Future[object], ...]]:
        """Return a function that issues the operation on one rank, and returns the futures to await.

        Everything but the call of the rank's method is done before, so that it is not measured.

        Args:
            rank: The rank.
            x: Input of the rank, from `make_buffers`.
            out: Array for the result of the rank, from `make_buffers`; None: the rank gets no result.
        """
        if out is not None and self.operation.kind is Collective.P2P:
            # a ring: each rank sends to the next one
            return lambda: (rank.send(x, (rank.rank + 1) % self.ranks), rank.recv(out, (rank.rank - 1) % self.ranks))
        options: dict[str, object] = {"op": self.op} if self.operation.kind.traits.reduces else {}
        options |= {"root": self.root} if self.operation.kind.traits.rooted else {}
        call = partial(getattr(rank, self.operation.name), x, out=out, **options)
        return lambda: (call(),)

    def make_buffers(self, rank: int) -> tuple[Array, Array | None]:
        """Return the filled input of `rank`, and the array for its result; None: the rank gets no result.

        In place, the two share memory.
        """
        kind = self.operation.kind
        source = repeat_pattern(
            input_pattern(rank, self.dtype), 0, self.count * (self.ranks if kind.traits.scatters else 1)
        )
        if not self.gets_result(rank):
            return source, None
        if self.in_place and not kind.traits.gathers:
            return source, source
        result: Array = np.zeros(self.count * (self.ranks if kind.traits.gathers else 1), self.dtype)
        if not self.in_place:
            return source, result
        own = result[rank * self.count : (rank + 1) * self.count]
        own[...] = source
        return own, result

    def gets_result(self, rank: int) -> bool:
        """Return whether `rank` gets a result."""
        return rank == self.root or self.operation.kind not in (Collective.REDUCE, Collective.GATHER)

    def expected_result(self, rank: int) -> Array:
        """Return the expected result of `rank`, which must be one that gets a result."""
        kind, count = self.operation.kind, self.count
        first = rank * count if kind.traits.scatters else 0
        if kind.traits.reduces:
            return repeat_pattern(expected_reduction(self.ranks, self.op, self.dtype), first, count)
        if kind.traits.gathers:
            return np.concatenate([self._input_slice(src, first) for src in range(self.ranks)])
        if kind.traits.rooted:
            return self._input_slice(self.root, first)
        return self._input_slice((rank - 1) % self.ranks, first)

    def _input_slice(self, src: int, first: int) -> Array:
        """Return the part of a rank's input that begins at element `first` and has the length of a block."""
        return repeat_pattern(input_pattern(src, self.dtype), first, self.count)


# -- test data: small integers, so that every dtype holds them and every sum is exact --------------------------------

SEED = 1  # Seed of the random inputs

PERIOD = 8191
"""Elements after which the data repeats: a prime number, so that a block in a wrong place is noticed."""

_WIDE = {"b": np.bool_, "i": np.int64, "u": np.uint64, "c": np.complex128}  # floats: float64


@lru_cache(maxsize=64)
def input_pattern(rank: int, dtype: np.dtype[np.generic]) -> Array:
    """Return the `PERIOD` elements of which the input of `rank` is made: random 1, 2 and 3, or False and True."""
    low, high = (0, 2) if dtype.kind == "b" else (1, 4)
    return np.random.default_rng((SEED, rank)).integers(low, high, PERIOD).astype(dtype)


@lru_cache(maxsize=16)
def expected_reduction(ranks: int, op: str, dtype: np.dtype[np.generic]) -> Array:
    """Return the reduction of the patterns of all ranks, computed in 64 bits and rounded once to `dtype`.

    Args:
        ranks: Number of ranks.
        op: The reduction operator, such as "sum".
        dtype: Type of the elements.
    """
    wide = _WIDE.get(dtype.kind, np.float64)
    total = OPS[op].reference(np.stack([input_pattern(rank, dtype) for rank in range(ranks)]).astype(wide))
    if OPS[op].divides and dtype.kind == "c":
        total = total.astype(dtype)  # numpy multiplies by a reciprocal, so 64 bits would round differently
    if OPS[op].divides:
        total = np.floor_divide(total, ranks) if dtype.kind in "iu" else np.true_divide(total, ranks)
    return total.astype(dtype)


def repeat_pattern(repeated: Array, first: int, count: int) -> Array:
    """Return elements `first` to `first + count` of an endlessly repeated pattern."""
    return np.resize(np.roll(repeated, -(first % PERIOD)), count)


def count_wrong_elements(result: Array, expected: Array) -> int:
    """Return how many elements of `result` differ from `expected`, an array of the same length."""
    return int(np.count_nonzero(result.reshape(-1) != expected))


# -- cases that options request ---------------------------------------------------------------------------------------


def list_cases(args: argparse.Namespace) -> list[list[Case]]:
    """Return the cases that the options request: a list for each number of ranks, with a case for each size.

    Raises:
        UsageError: An option has an impossible value.
    """
    for flag, samples in (("--iters", args.iters), ("--warmup_iters", args.warmup_iters)):
        if samples > _MOST_SAMPLES:
            raise UsageError(f"{flag}: expected at most {_MOST_SAMPLES}, got {samples}")
    operation, dtype, processes = NAMES[args.operation], find_dtype(args.datatype), args.processes or 1
    if operation.kind.traits.reduces:
        find_reducer(args.op, dtype)
    if args.in_place and not operation.in_place:
        raise UsageError(f"--in-place: {operation.name} cannot, because it writes where it still reads; leave it out")
    worlds, sizes = [], _list_sizes_bytes(args)
    for ranks in args.ranks or [max(2, processes)]:
        if ranks % processes or (ranks == 1 and operation.kind is Collective.P2P):
            least = 2 if operation.kind is Collective.P2P else 1
            raise UsageError(f"--ranks: expected {least} or more, in multiples of --processes {processes}, got {ranks}")
        if not 0 <= args.root < ranks:
            raise UsageError(f"--root: expected a rank from 0 to {ranks - 1}, got {args.root}")
        place = {"root": args.root, "in_place": bool(args.in_place)}
        one = Case(operation=operation, ranks=ranks, count=1, dtype=dtype, op=args.op, **place)
        worlds.append([replace(one, count=max(1, size // one.size_bytes)) for size in sizes])
        if (needed := 2 * ranks * worlds[-1][-1].size_bytes) > MEMORY_BYTES:
            sizes_text = f"need {format_bytes(needed)}, this machine has {format_bytes(MEMORY_BYTES)}"
            raise UsageError(f"--maxbytes: inputs and results on {ranks} ranks {sizes_text}; lower --maxbytes")
    return worlds


def _list_sizes_bytes(args: argparse.Namespace) -> list[int]:
    """Return the sizes from `--minbytes`, each `--stepfactor` times the last, at least 1 byte more.

    Without `--maxbytes`, `--minbytes` is the only one. Raises `UsageError` for options that are no sizes, or do not
    grow.
    """
    size = parse_bytes(args.minbytes or "8", argument="--minbytes")
    high = parse_bytes(args.maxbytes or args.minbytes or "64M", argument="--maxbytes")
    if not 1 <= size <= high:
        raise UsageError(f"--minbytes, --maxbytes: expected 1 <= minbytes <= maxbytes, got {size} and {high}")
    if not 1.01 <= args.stepfactor <= 1e9:
        raise UsageError(f"--stepfactor: expected 1.01 or more, so that sizes grow, got {args.stepfactor:g}")
    sizes = []
    while size <= high:
        sizes.append(size)
        size = max(size + 1, int(size * args.stepfactor))
    return sizes
