"""What one rank of another library does: the timed loop and the check of `overlap.cli.bench.measuring`, by its means.

It is a process of its own, because torch and MPI want one for each rank; rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from overlap.cli.bench.cases import Case, count_wrong_elements
from overlap.cli.bench.sampling import Sampling
from overlap.collectives.reduce import Array

from .assignment import AssignmentInTurn

Action = Callable[[], object]


class LibraryRank(ABC):
    """What a library offers to one of its ranks."""

    rank: int  # Index in the world
    version: str  # Which library, for the table

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @abstractmethod
    def action(self, case: Case, x: Array, out: Array | None) -> Action:
        """Return the function that does the operation once, from `x` into `out`, and returns when it is done.

        Raises:
            LookupError: If this library has no such operation, operator or dtype.
        """

    @abstractmethod
    def gather(self, numbers: NDArray[np.int64]) -> list[list[int]]:
        """Return the numbers of all ranks, on every rank."""

    @abstractmethod
    def close(self) -> None:
        """Leave the world."""


def measure_rows(library: LibraryRank, assignment: AssignmentInTurn) -> list[dict[str, object]]:
    """Measure every row; a row has `samples_ns` for each rank, and the count of wrong elements."""
    return [_measure(library, case, assignment.sampling) for case in assignment.in_turn()]


def _measure(library: LibraryRank, case: Case, sampling: Sampling) -> dict[str, object]:
    act = library.action(case, *case.make_buffers(library.rank))
    batch = sampling.operations_per_sample(case.size_bytes)
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        library.barrier()
        begun_ns = perf_counter_ns()
        for _ in range(batch):
            act()
        samples.append(perf_counter_ns() - begun_ns)
    wrong = _count_wrong(library, case)
    told = library.gather(np.array([wrong, *samples[sampling.warmup :]], np.int64))
    return {"wrong": sum(numbers[0] for numbers in told), "samples_ns": [numbers[1:] for numbers in told]}


def _count_wrong(library: LibraryRank, case: Case) -> int:
    x, out = case.make_buffers(library.rank)
    library.barrier()
    library.action(case, x, out)()
    return 0 if out is None else count_wrong_elements(out, case.expected_result(library.rank))


def measure_and_tell(library: LibraryRank, text: str) -> None:
    """Be one rank: measure the assignment, and leave."""
    rows = measure_rows(library, AssignmentInTurn.from_json(text))
    if library.rank == 0:
        print(json.dumps({"version": library.version, "rows": rows}), flush=True)
    library.close()
