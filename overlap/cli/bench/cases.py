"""One line of the table, with its buffers and right results; and lines as text, for processes that measure them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ... import Rank
from ...collectives.kinds import Collective
from ...collectives.reduce import Array
from ...runtime.future import Future
from . import data
from .operations import Operation, dtype_named, find
from .sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table: what is sent, and between how many ranks."""

    operation: Operation  # Which
    ranks: int  # Size of the world
    count: int  # Elements of one block, as nccl-tests counts them
    dtype: np.dtype[np.generic]  # Of the elements
    op: str = "sum"  # Reduction operator
    root: int = 0  # Rank, where there is one
    in_place: bool = False  # Whether the result goes into the memory of the input
    shared: bool = False  # Whether the result is one that ranks share
    common: bool = False  # Whether the input lies where other processes of the machine read it

    @property
    def size_bytes(self) -> int:
        """The larger of input and result."""
        return self.count * self.operation.blocks(self.ranks) * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        """What the inputs and results of all ranks take."""
        common = self._result if self.shared else 0
        return self.dtype.itemsize * (common + sum(map(self._elements, range(self.ranks))))

    @property
    def _result(self) -> int:
        return self.count * (self.ranks if self.operation.kind.traits.gathers else 1)

    def _elements(self, rank: int) -> int:
        """Return how many elements a rank has of its own."""
        source = self.count * (self.ranks if self.operation.kind.traits.scatters else 1)
        result = self._result if self.receives(rank) and not self.shared else 0
        return max(source, result) if self.in_place else source + result

    def issue(self, rank: Rank, x: Array, out: Array | None) -> tuple[Future[object], ...]:
        """Start it on one rank, with what `buffers` has made; return what to await."""
        issue = self.operation.issue_shared if self.shared else self.operation.issue
        assert issue is not None, "it has such results"
        return issue(rank, x, out, self.op, self.root)

    def buffers(self, rank: int) -> tuple[Array, Array | None]:
        """Make the filled input of `rank` and, if it gets a result of its own, the array for it."""
        kind = self.operation.kind
        source = data.tiled(data.pattern(rank, self.dtype), 0, self.count * (self.ranks if kind.traits.scatters else 1))
        if self.shared or not self.receives(rank):
            return source, None
        if self.in_place and not kind.traits.gathers:
            return source, source
        result: Array = np.zeros(self._result, self.dtype)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What the ranks of other processes are to measure."""

    cases: Sequence[Case]  # One for each row; they differ in their counts only
    sampling: Sampling  # How often
    check: bool = True  # Whether to look at the results, outside the timed loop
    turns: str = ""  # Where to wait for one's turn with each row; empty: nowhere
    name: str = ""  # Whose turn that is

    def in_turn(self) -> Iterator[Case]:
        """Yield each row when it is to be measured."""
        if not self.turns:
            yield from self.cases
            return
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.turns)
            connection.sendall(self.name.encode())
            for case in self.cases:
                if not connection.recv(1):
                    return  # whoever wanted to know has gone
                yield case
                connection.sendall(b"d")

    def to_json(self) -> str:
        """Write it as one argument of a command."""
        rows = [asdict(case) | {"operation": case.operation.name, "dtype": case.dtype.name} for case in self.cases]
        told = {"cases": rows, "sampling": asdict(self.sampling), "check": self.check}
        return json.dumps(told | {"turns": self.turns, "name": self.name})

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """Read what `to_json` has written."""
        told = json.loads(text)
        cases = [
            Case(**row | {"operation": find(row["operation"]), "dtype": dtype_named(row["dtype"])})
            for row in told["cases"]
        ]
        rest = {name: told[name] for name in ("check", "turns", "name")}
        return cls(cases=cases, sampling=Sampling(**told["sampling"]), **rest)
