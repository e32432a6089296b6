"""Timed runs of cases on our ranks, in this process or in several, and the check of results.

`overlap run -m overlap.cli.bench.measuring ASSIGNMENT` is one process of several. The process of rank 0 prints a line
of JSON for each row. All rows are measured in one world, as the steps of a training program are: new connections for
each row would be measured while they still adapt to what they can carry.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TypeAlias

import numpy as np

from ... import Rank, run
from ...config import RunConfig, setting_environment
from ..children import read_json_lines, start
from .cases import Assignment, Case, wrong_elements
from .sampling import Sampling, Times, slowest

MEMBER = f"{__package__}.measuring"
"""The module that each process of several runs."""

_LIMIT_S = 600
"""Absolute limit for each row: it ends a world, and the bench, in which a rank waits for ever."""

RankSamples: TypeAlias = "list[list[int]]"
"""For each rank: the number of its wrong elements, then its samples in nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayout:
    """Processes of a measured world, all of them on this host, and the transport that joins them."""

    processes: int = 1  # Number of processes, over which ranks are spread evenly; 1 is this process itself
    tcp: bool = False  # Whether sockets use TCP instead of Unix sockets, which are faster on one machine
    rails: str | None = (
        None  # Number of connections between two processes, or interfaces; None: the transport's default
    )
    peer_direct: bool = True  # Whether sockets read and write the arrays themselves
    checksums: bool | None = None  # Whether received payloads are checked; None: the transport's default
    transport: str = "auto"  # "auto", "shared_memory", "sockets", or the name of another package's transport

    def options(self, ranks: int, *, rows: int = 1, algorithm: str | None = None) -> list[str]:
        """Return the options of `overlap run` for a world of `ranks` ranks that measures `rows` rows."""
        options = ["--processes", str(self.processes), "--ranks-per-process", str(ranks // self.processes)]
        options += [
            "--cluster",
            f"local x{self.processes}",
            "--timeout",
            str(rows * _LIMIT_S),
            "--transport",
            self.transport,
        ]
        options += ["--no-unix" if self.tcp else "--unix", "--peer-direct" if self.peer_direct else "--no-peer-direct"]
        options += [] if self.rails is None else ["--rails", self.rails]
        options += [] if self.checksums is None else ["--checksums" if self.checksums else "--no-checksums"]
        return options if algorithm is None else [*options, "--algorithm", algorithm]

    def describe(self) -> str:
        """Return the layout in words."""
        if self.processes == 1:
            return "ranks in one process"
        return f"ranks in {self.processes} processes of this host ({self._cluster}) joined by {self._describe_wires()}"

    @property
    def _cluster(self) -> str:
        """Cluster with a host for each process: on one host only algorithms of its memory would be chosen."""
        return f"local x{self.processes}"

    @property
    def shares_memory(self) -> bool:
        """Whether processes share memory, because no option concerns sockets only."""
        plain = not self.tcp and self.rails in (None, "1") and self.peer_direct and self.checksums is None
        return self.transport == "shared_memory" or (self.transport == "auto" and plain)

    def _describe_wires(self) -> str:
        """Return the transport between processes in words, with its options: `TCP over 4 connections`."""
        if self.shares_memory:
            return "shared memory"
        if self.transport not in ("auto", "efa", "sockets"):
            return self.transport  # of another package: which of the options it takes is its own affair
        wires = "TCP" if self.tcp else "Unix sockets"
        if self.rails is not None:
            wires += f" over {self.rails}" + (" connections" if self.rails.isdecimal() else "")
        if self.checksums is not None:
            wires += f", {'with' if self.checksums else 'without'} checksums of payloads"
        return wires if self.peer_direct else f"{wires}, through a bounce buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured row of the table."""

    case: Case  # The measured case
    times: Times  # For one operation
    wrong: int | None  # Wrong elements on all ranks; None if results were not checked

    @property
    def algbw_bytes_per_s(self) -> float:
        """Algorithm bandwidth: size of the case divided by its median time."""
        return self.times.bytes_per_s(self.case.size_bytes)

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bandwidth of the busiest wire: algbw times the operation's factor (nccl-tests, doc/PERFORMANCE.md)."""
        return self.algbw_bytes_per_s * self.case.operation.kind.bus_factor(self.case.ranks)


def measure_cases(
    cases: Sequence[Case],
    sampling: Sampling,
    layout: ProcessLayout,
    *,
    check: bool = True,
    algorithm: str | None = None,
) -> Iterator[Result]:
    """Measure cases that differ only in their counts; yield each row when it is known.

    Raises:
        OverlapError: If a process of the world fails.
    """
    if layout.processes == 1:
        for case in cases:
            yield measure(case, sampling, check=check, algorithm=algorithm)
        return
    options = layout.options(cases[0].ranks, rows=len(cases), algorithm=algorithm)
    assignment = Assignment(cases=cases, sampling=sampling, check=check)
    for case, row in zip(cases, read_json_lines([start(options, [MEMBER, assignment.to_json()])]), strict=True):
        yield summarize(case, sampling, row["told"], check=check)


def measure(
    case: Case,
    sampling: Sampling,
    *,
    check: bool = True,
    algorithm: str | None = None,
    clock_ns: Callable[[], int] = perf_counter_ns,
) -> Result:
    """Measure one case in a world of its own, in this process."""
    with setting_environment(RunConfig()):  # the settings of a launcher would change the result
        samples = run(on_rank, case, sampling, check, clock_ns, ranks=case.ranks, algorithm=algorithm)[0]
    assert samples is not None, "rank 0 gathers the samples"
    return summarize(case, sampling, samples, check=check)


def summarize(case: Case, sampling: Sampling, by_rank: RankSamples, *, check: bool) -> Result:
    """Summarise the samples of all ranks into a row; without `check`, the number of wrong elements is None."""
    times = slowest([samples for _, *samples in by_rank], batch=sampling.batch(case.size_bytes))
    return Result(case=case, times=times, wrong=sum(wrong for wrong, *_ in by_rank) if check else None)


async def on_rank(
    rank: Rank, case: Case, sampling: Sampling, check: bool = True, clock_ns: Callable[[], int] = perf_counter_ns
) -> RankSamples | None:
    """Measure a case on one rank of a world, which may span processes; return the samples of all ranks on rank 0."""
    batch = sampling.batch(case.size_bytes)
    x, out = case.buffers(rank.rank)
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        await rank.barrier()
        begun_ns = clock_ns()
        for _ in range(batch):
            for future in case.issue(rank, x, out):
                await future
        samples.append(clock_ns() - begun_ns)
    wrong = await _count_wrong(rank, case) if check else 0
    by_rank = await rank.gather(np.array([wrong, *samples[sampling.warmup :]], np.int64))
    return None if by_rank is None else [[int(number) for number in one] for one in by_rank.reshape(case.ranks, -1)]


async def _count_wrong(rank: Rank, case: Case) -> int:
    """Run the case once more on fresh data, and return the number of wrong elements on this rank."""
    x, out = case.buffers(rank.rank)
    for future in case.issue(rank, x, out):
        await future
    if out is None:
        return 0
    with np.errstate(invalid="ignore"):
        return wrong_elements(out, case.expected(rank.rank))


def main(text: str) -> None:
    """Measure every row of an assignment in one world, as one process of several."""
    run(_measure_all, Assignment.from_json(text))


async def _measure_all(rank: Rank, assignment: Assignment) -> None:
    """Measure every case in turn; rank 0 prints one line of JSON with the samples of all ranks for each."""
    for case in assignment.cases:
        by_rank = await on_rank(rank, case, assignment.sampling, assignment.check)
        if by_rank is not None:
            print(json.dumps({"told": by_rank}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
