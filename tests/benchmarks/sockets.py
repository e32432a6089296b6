"""Every collective between processes of this machine, at the sizes of gradient buckets, in turn with gloo's.

The line of an operation has gloo's time over ours for each size; what is aimed at is the worst row and the geometric
mean of each sweep.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, fsum, log

import numpy as np

from overlap.cli.bench.cases import NAMES, Case
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.sampling import Sampling, Times
from overlap.units import format_bytes
from tests.benchmarks.figures import over
from tests.benchmarks.versus.contenders import CONTENDERS, ContenderResult
from tests.benchmarks.versus.layout import ProcessLayout
from tests.benchmarks.versus.turns import measure_in_turn

from .figures import Figure

OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send_recv",
)
SIZES_BYTES = tuple(16 << 10 << power for power in range(0, 13, 2))
PROCESSES = (2, 4)
WORST_AIM, MEAN_AIM = 1.3, 1.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operation of one size.

    Attributes:
        case: Which.
        ours: Its times on our ranks.
        theirs: Its times on gloo's.
        wrong: Elements on either that were not as expected.
    """

    case: Case
    ours: Times
    theirs: Times
    wrong: int

    @property
    def ratio(self) -> float:
        """Their time over ours."""
        return over(self.theirs, self.ours)


def figures(sampling: Sampling) -> Iterator[Figure | str]:
    """Measure each operation on 2 and 4 processes, over Unix sockets and TCP; a sweep's figures come at its end."""
    for tcp in (False, True):
        for processes in PROCESSES:
            layout, rows = ProcessLayout(processes=processes, tcp=tcp, transport="efa"), []
            place = f"{processes} processes, {'TCP' if tcp else 'Unix'}"
            yield f"{place}: gloo/ours  {'  '.join(f'{format_bytes(size):>7}' for size in SIZES_BYTES)}"
            for name in OPERATIONS:
                measured: list[Row] = []
                for told in _measured(name, processes, sampling, layout):
                    if isinstance(told, str):
                        yield told
                    else:
                        measured.append(told)
                if measured:
                    yield f"{name:<28}  {'  '.join(f'{row.ratio:>6.2f}x' for row in measured)}"
                rows += measured
            if rows:
                yield from summary(f"sockets/{processes}_{'tcp' if tcp else 'unix'}", place, rows)


def float32_cases(name: str, processes: int, sizes: Sequence[int]) -> list[Case]:
    """Return the cases of a collective at sizes in bytes."""
    operation = NAMES[name]
    return [
        Case(
            operation=operation,
            ranks=processes,
            count=size // (4 * operation.block_count(processes)),
            dtype=np.dtype(np.float32),
            in_place=operation.in_place,
        )
        for size in sizes
    ]


def _measured(name: str, processes: int, sampling: Sampling, layout: ProcessLayout) -> Iterator[Row | str]:
    cases, remarks = float32_cases(name, processes, SIZES_BYTES), list[str]()
    ours: list[Result] = []
    theirs: list[ContenderResult] = []
    for told in measure_in_turn(cases, sampling, layout, [CONTENDERS["gloo"]], say=remarks.append):
        if isinstance(told, Result):
            ours.append(told)
        else:
            theirs = told
    yield from remarks
    for result in theirs:
        for mine, times, wrong in zip(ours, result.times, result.wrong, strict=True):
            yield Row(case=mine.case, ours=mine.times, theirs=times, wrong=wrong + (mine.wrong or 0))


def summary(name: str, place: str, rows: Sequence[Row]) -> Iterator[Figure]:
    """Return the worst row, the best, and the geometric mean of all."""
    wrong = sum(row.wrong for row in rows)
    ordered = sorted(rows, key=lambda row: row.ratio)
    for which, row, aim in (("worst", ordered[0], WORST_AIM), ("best", ordered[-1], None)):
        text = f"{place}: {which}, {row.case.operation.name} {format_bytes(row.case.size_bytes)}"
        yield _figure(f"{name}/{which}", text, row.ratio, row.theirs, aim, wrong)
    mean = exp(fsum(log(row.ratio) for row in rows) / len(rows))
    yield _figure(f"{name}/mean", f"{place}: geometric mean of {len(rows)}", mean, ordered[0].theirs, MEAN_AIM, wrong)


def _figure(name: str, text: str, value: float, times: Times, aim: float | None, wrong: int) -> Figure:
    return Figure(name=name, text=text, value=value, unit="ratio", aim=aim, times=times, wrong=wrong)
