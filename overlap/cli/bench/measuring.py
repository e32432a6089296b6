"""The timed loop on our ranks, wherever they are, and the check of results outside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TypeAlias, cast

import numpy as np

from ... import Rank, run
from ...collectives.reduce import Array
from ...config import RunConfig, imposed
from ..children import hear, start
from . import data
from .cases import Assignment, Case
from .layout import NodeLayout
from .sampling import Sampling, Times, slowest

MEMBER = f"{__package__}.member"
"""The module that each process of several runs."""

Told: TypeAlias = "list[list[int]]"
"""Of each rank: how many elements were wrong, then its samples in nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table."""

    case: Case  # What was measured
    times: Times  # For one operation
    wrong: int | None  # Elements on all ranks that were not as expected, None if nobody looked

    @property
    def algbw_bytes_per_s(self) -> float:
        """Size over time."""
        return self.times.bytes_per_s(self.case.size_bytes)

    @property
    def busbw_bytes_per_s(self) -> float:
        """What the busiest wire would carry: algbw times the operation's factor (nccl-tests, doc/PERFORMANCE.md)."""
        return self.algbw_bytes_per_s * self.case.operation.kind.bus_factor(self.case.ranks)


def measure_cases(
    cases: Sequence[Case], sampling: Sampling, layout: NodeLayout, *, check: bool = True, algorithm: str | None = None
) -> Iterator[Result]:
    """Run cases that differ in their counts only, between processes in one world; yield each row when it is known.

    Raises:
        OverlapError: If a process of the world fails.
    """
    if layout.nodes == 1:
        for case in cases:
            yield measure(case, sampling, check=check, algorithm=algorithm)
        return
    options = layout.options(cases[0].ranks, rows=len(cases), algorithm=algorithm)
    assignment = Assignment(cases=cases, sampling=sampling, check=check)
    for case, row in zip(cases, hear([start(options, [MEMBER, assignment.to_json()])]), strict=True):
        yield summarised(case, sampling, row["told"], check=check)


def measure(
    case: Case,
    sampling: Sampling,
    *,
    check: bool = True,
    algorithm: str | None = None,
    clock_ns: Callable[[], int] = perf_counter_ns,
) -> Result:
    """Run one case in a world of its own, in this process."""
    with imposed(RunConfig()):  # a launcher's would change what is measured
        told = run(on_rank, case, sampling, check, clock_ns, ranks=case.ranks, algorithm=algorithm)[0]
    assert told is not None, "rank 0 is told"
    return summarised(case, sampling, told, check=check)


def summarised(case: Case, sampling: Sampling, told: Told, *, check: bool) -> Result:
    """Summarise what rank 0 was told by all."""
    times = slowest([samples for _, *samples in told], batch=sampling.batch(case.size_bytes))
    return Result(case=case, times=times, wrong=sum(wrong for wrong, *_ in told) if check else None)


async def on_rank(
    rank: Rank, case: Case, sampling: Sampling, check: bool = True, clock_ns: Callable[[], int] = perf_counter_ns
) -> Told | None:
    """Measure a case on one rank of a world, which may span processes; tell rank 0."""
    batch = sampling.batch(case.size_bytes)
    x, out = _buffers(rank, case)
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        await rank.barrier()
        begun_ns = clock_ns()
        for _ in range(batch):
            for future in case.issue(rank, x, out):
                await future
        samples.append(clock_ns() - begun_ns)
    wrong = await _count_wrong(rank, case) if check else 0
    told = await rank.gather(np.array([wrong, *samples[sampling.warmup :]], np.int64))
    return None if told is None else [[int(number) for number in one] for one in told.reshape(case.ranks, -1)]


def _buffers(rank: Rank, case: Case) -> tuple[Array, Array | None]:
    """Make the filled input and the array for the result, in memory that processes have in common if that is asked."""
    x, out = case.buffers(rank.rank)
    if not case.common:
        return x, out
    private = out if case.in_place and out is not None else x
    common = rank.empty(private.size, private.dtype, common=True)
    common[...] = private
    if private is x:
        return common, common if out is x else out
    return common[rank.rank * x.size :][: x.size], common  # a block of what is gathered


async def _count_wrong(rank: Rank, case: Case) -> int:
    """Run the case once more on fresh data and count the wrong elements of this rank."""
    x, out = _buffers(rank, case)
    results = [await future for future in case.issue(rank, x, out)]
    got = cast("Array | None", results[-1] if case.shared else out)
    if got is None:
        return 0
    with np.errstate(invalid="ignore"):
        return data.wrong_elements(got, case.expected(rank.rank))
