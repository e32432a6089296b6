"""Cases that a command line asks for, and the layout of their ranks. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from ... import UsageError
from ...cost.select import check_algorithm
from ...settings import format_setting
from ...units import format_bytes, parse_bytes
from .cases import Case
from .measuring import ProcessLayout
from .operations import BenchOperation, dtype_named, find, redop_named
from .sampling import Sampling

DEFAULT_MIN_BYTES = 8
DEFAULT_MAX_BYTES = 64 << 20
_MOST_ROWS = 1000


def cases(args: argparse.Namespace) -> list[list[Case]]:
    """Return the cases that the options ask for, for each size of the world.

    Raises:
        UsageError: If an option cannot be meant.
    """
    operation = find(args.operation)
    if args.algorithm is not None:
        check_algorithm(args.algorithm)
    dtype = dtype_named(args.datatype)
    op = redop_named(args.op, dtype) if operation.kind.traits.reduces else "sum"
    if args.in_place and not operation.in_place:
        raise UsageError(f"--in-place: {operation.name} cannot, because it writes where it still reads; leave it out")
    sizes = _sizes_bytes(args) if operation.name != "barrier" else [0]
    return [
        [
            Case(
                operation=operation,
                ranks=ranks,
                count=_count(size, operation, ranks, dtype.itemsize),
                dtype=dtype,
                op=op,
                root=_check_root(args.root, ranks),
                in_place=bool(args.in_place),
            )
            for size in sizes
        ]
        for ranks in world_sizes(_ranks(args), fewest=operation.fewest_ranks, processes=args.processes)
    ]


def sampling(args: argparse.Namespace) -> Sampling:
    """Return the number of samples that the options ask for.

    Raises:
        UsageError: If no sample would be counted.
    """
    if args.iters < 1:
        raise UsageError(f"--iters: expected at least 1, got {args.iters}")
    if args.warmup_iters < 0:
        raise UsageError(f"--warmup_iters: expected at least 0, got {args.warmup_iters}")
    return Sampling(iters=args.iters, warmup=args.warmup_iters)


def layout(args: argparse.Namespace) -> ProcessLayout:
    """Return the processes of the worlds that the options ask for, and the transport between them.

    Raises:
        UsageError: If an option concerns several processes, and there is only this one.
    """
    processes = args.processes or 1
    if processes == 1:
        _check_one_process(args)
    return ProcessLayout(
        processes=processes,
        tcp=bool(args.tcp),
        rails=None if args.rails is None else format_setting(args.rails),
        peer_direct=args.peer_direct is not False,
        checksums=args.checksums,
        transport=args.transport or "auto",
    )


def check_memory(worlds: Sequence[Sequence[Case]], there_bytes: int) -> None:
    """Refuse cases with more inputs and results than fit into the memory of this machine.

    Raises:
        UsageError: If the largest case does not fit.
    """
    most = max((case for world in worlds for case in world), key=lambda case: case.memory_bytes)
    if most.memory_bytes > there_bytes:
        raise UsageError(
            f"--maxbytes: {most.operation.name} of {format_bytes(most.size_bytes)} on {most.ranks} ranks needs "
            f"{format_bytes(most.memory_bytes)} for inputs and results, this machine has {format_bytes(there_bytes)}; "
            "lower --maxbytes"
        )


def world_sizes(text: str, *, fewest: int = 1, processes: int | None = None) -> list[int]:
    """Return the sizes of worlds from a list such as `2,4`.

    Raises:
        UsageError: If the text is no such list, a world is too small, or its ranks cannot be divided.
    """
    words = text.split(",")
    for word in words:
        if not word.strip().isdecimal() or int(word) < fewest:
            raise UsageError(f"--ranks: expected integers of at least {fewest} such as 2,4, got {text!r}")
        if processes is not None and int(word) % processes:
            raise UsageError(
                f"--ranks: {word} ranks cannot be divided among --processes {processes}; choose multiples of that"
            )
    return [int(word) for word in words]


def _ranks(args: argparse.Namespace) -> str:
    """Return the text of `--ranks`; by default one rank in each process, and at least two."""
    return args.ranks or str(max(2, args.processes or 1))


def _check_one_process(args: argparse.Namespace) -> None:
    """Raise `UsageError` if an option about the transport between processes is given, as there is only one process."""
    for name in ("tcp", "rails", "peer_direct", "checksums", "transport"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: concerns what joins processes; give --processes 2 too")


def _sizes_bytes(args: argparse.Namespace) -> list[int]:
    """Return the sizes of `--minbytes` to `--maxbytes`; raise `UsageError` for an empty range or too many sizes."""
    low, high = _size_range(args)
    if low < 1 or high < low:
        raise UsageError(f"--minbytes, --maxbytes: expected 1 <= minbytes <= maxbytes, got {low} and {high}")
    if not args.stepfactor > 1:
        raise UsageError("--stepfactor: sizes must grow; give a factor above 1")
    sizes = list(_growing_sizes(low, high, args.stepfactor))
    if len(sizes) == _MOST_ROWS:
        raise UsageError(f"--stepfactor: {_MOST_ROWS} sizes or more; take a larger one")
    return sizes


def _size_range(args: argparse.Namespace) -> tuple[int, int]:
    """Return the smallest and the largest size; the smallest one alone is the only size."""
    low = DEFAULT_MIN_BYTES if args.minbytes is None else parse_bytes(args.minbytes, argument="--minbytes")
    if args.maxbytes is not None:
        return low, parse_bytes(args.maxbytes, argument="--maxbytes")
    return (low, DEFAULT_MAX_BYTES) if args.minbytes is None else (low, low)


def _growing_sizes(low: int, high: int, factor: float) -> Iterator[int]:
    """Yield sizes from `low` to `high`, each `factor` times the previous one and at least 1 larger."""
    size = low
    for _ in range(_MOST_ROWS):
        if size > high:
            return
        yield size
        size = max(size + 1, int(size * factor))


def _count(size: int, operation: BenchOperation, ranks: int, itemsize: int) -> int:
    """Return the elements of a block, at least one, such that all blocks together have at most `size` bytes."""
    return max(1, size // (itemsize * operation.blocks(ranks))) if size else 0


def _check_root(root: int, ranks: int) -> int:
    """Return the root if it is one of `ranks` ranks; raise `UsageError` if not."""
    if not 0 <= root < ranks:
        raise UsageError(f"--root: expected a rank from 0 to {ranks - 1}, got {root}")
    return root
