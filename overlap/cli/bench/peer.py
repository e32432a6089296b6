"""One rank of a peer: `python -m overlap.cli.bench.peer gloo|mpi SPEC` measures what `measure` does, with their means.

Rank 0 prints one line of JSON. This is a program of its own because torch and MPI want a process for each rank.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from ...collectives.reduce import Array
from . import data
from .operations import Case, dtype_named, find
from .sampling import Sampling

__all__ = ["Fabric", "Spec", "measure_rows"]

Action = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the ranks of other processes measure: the table's rows, as text for a command line.

    Attributes:
        operation: Name.
        ranks: Size of the world.
        counts: Elements of a block, one for each row.
        dtype: Name.
        op: Reduction operator.
        root: Rank.
        in_place: Whether results go into the memory of inputs.
        iters: Samples.
        warmup: Samples before those.
        check: Whether to look at the results, outside the timed loop.
    """

    operation: str
    ranks: int
    counts: tuple[int, ...]
    dtype: str
    op: str
    root: int
    in_place: bool
    iters: int
    warmup: int
    check: bool = True

    @classmethod
    def of(cls, cases: Sequence[Case], sampling: Sampling, *, check: bool = True) -> Spec:
        """Ask for these rows, which differ in their counts only."""
        first = cases[0]
        return cls(
            operation=first.operation.name,
            ranks=first.ranks,
            counts=tuple(case.count for case in cases),
            dtype=first.dtype.name,
            op=first.op,
            root=first.root,
            in_place=first.in_place,
            iters=sampling.iters,
            warmup=sampling.warmup,
            check=check,
        )

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Read what `to_json` has written."""
        fields = json.loads(text)
        return cls(**fields | {"counts": tuple(fields["counts"])})

    def to_json(self) -> str:
        """Write it as one argument of a command."""
        return json.dumps(asdict(self))

    def sampling(self) -> Sampling:
        """Return how often."""
        return Sampling(iters=self.iters, warmup=self.warmup)

    def cases(self) -> list[Case]:
        """Return the rows."""
        return [
            Case(
                operation=find(self.operation),
                ranks=self.ranks,
                count=count,
                dtype=dtype_named(self.dtype),
                op=self.op,
                root=self.root,
                in_place=self.in_place,
            )
            for count in self.counts
        ]


class Fabric(ABC):
    """What a peer offers to one of its ranks.

    Attributes:
        rank: Index in the world.
        version: Which library, for the table.
    """

    rank: int
    version: str

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @abstractmethod
    def action(self, case: Case, x: Array, out: Array | None) -> Action:
        """Return the function that does the operation once, from `x` into `out`, and returns when it is done.

        Raises:
            LookupError: If this peer has no such operation, operator or dtype.
        """

    @abstractmethod
    def gather(self, numbers: NDArray[np.int64]) -> list[list[int]]:
        """Return the numbers of all ranks, on every rank."""

    @abstractmethod
    def close(self) -> None:
        """Leave the world."""


def measure_rows(fabric: Fabric, spec: Spec) -> list[dict[str, object]]:
    """Measure every row; a row has `samples_ns` for each rank, and the count of wrong elements."""
    return [_measure(fabric, case, spec.sampling(), check=spec.check) for case in spec.cases()]


def _measure(fabric: Fabric, case: Case, sampling: Sampling, *, check: bool) -> dict[str, object]:
    act = fabric.action(case, *case.buffers(fabric.rank))
    batch = sampling.batch(case.size_bytes)
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        fabric.barrier()
        begun_ns = perf_counter_ns()
        for _ in range(batch):
            act()
        samples.append(perf_counter_ns() - begun_ns)
    wrong = _count_wrong(fabric, case) if check else 0
    told = fabric.gather(np.array([wrong, *samples[sampling.warmup :]], np.int64))
    return {"wrong": sum(numbers[0] for numbers in told), "samples_ns": [numbers[1:] for numbers in told]}


def _count_wrong(fabric: Fabric, case: Case) -> int:
    x, out = case.buffers(fabric.rank)
    fabric.barrier()
    fabric.action(case, x, out)()
    return 0 if out is None else data.wrong_elements(out, case.expected(fabric.rank))


def main(name: str, text: str) -> None:
    """Be one rank of the peer `name`."""
    spec = Spec.from_json(text)
    fabric: Fabric
    if name == "gloo":
        from .peer_gloo import Gloo

        fabric = Gloo()
    else:
        from .peer_mpi import Mpi

        fabric = Mpi()
    rows = measure_rows(fabric, spec)
    if fabric.rank == 0:
        print(json.dumps({"version": fabric.version, "rows": rows}), flush=True)
    fabric.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
