"""Every algorithm of every collective between processes of this machine, and whether the plan names the fastest one.

What is told of each size is the regret: the time of the algorithm that `overlap plan` names, over that of the fastest,
both medians. Algorithms that are the same table are one.
Each process runs `python -m tests.benchmarks.algorithms`. A sample is as in the sweep over sockets: from a barrier on,
and small messages back to back. All algorithms take turns in one world, in an order drawn anew each time, so that
whatever drifts meets them alike; each has two samples in a row, of which the first does not count, for it finds caches
and connections as another one has left them.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import exp, fsum, log
from random import Random
from time import perf_counter_ns
from typing import TypeAlias, cast

import numpy as np

import topology
from overlap import Rank, run
from overlap.cli.bench.cases import Case
from overlap.cli.bench.sampling import Sampling, Times, slowest_times
from overlap.collectives.generators import GENERATORS
from overlap.collectives.generators.rank_order import ONLY_FOR_ORDER
from overlap.collectives.schedule import COLUMNS, Schedule
from overlap.cost.select import plan
from overlap.errors import ScheduleError
from overlap.runtime.future import Future
from overlap.units import format_bytes, format_ns
from tests.benchmarks.children import Child, read_json_lines, start
from tests.benchmarks.figures import over
from tests.benchmarks.versus.assignment import AssignmentInTurn
from tests.benchmarks.versus.layout import ProcessLayout

from .figures import Figure
from .sockets import SIZES_BYTES, float32_cases

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter")
PROCESSES = (2, 4)
REGRET_AIM = 1.1

Begin: TypeAlias = "Callable[[Sequence[str]], Sequence[Child]]"


def figures(sampling: Sampling) -> Iterator[Figure | str]:
    """Measure each collective by each algorithm on 2 and 4 processes joined by Unix sockets."""
    for processes in PROCESSES:
        cluster = topology.cluster("local", nodes=processes, ranks=processes)
        options = ProcessLayout(processes=processes, transport="efa").options(processes)
        place = f"{processes} processes, Unix"
        begin = partial(_begun, options)
        yield from regrets(f"algorithms/{processes}", place, OPERATIONS, SIZES_BYTES, cluster, sampling, begin)


def _begun(options: Sequence[str], program: Sequence[str]) -> list[Child]:
    return [start(options, program)]


def regrets(
    name: str,
    place: str,
    operations: Sequence[str],
    sizes: Sequence[int],
    cluster: topology.Cluster,
    sampling: Sampling,
    begin: Begin,
) -> Iterator[Figure | str]:
    """Measure collectives by each algorithm where ranks are placed as on a cluster.

    Args:
        name: Of the figures.
        place: The same for people.
        operations: The collectives.
        sizes: In bytes.
        cluster: By which plans choose.
        sampling: How often.
        begin: Starts the module of a process and its arguments on all of them, that of rank 0 first.
    """
    yield f"{place}: regret  {'  '.join(f'{format_bytes(size):>7}' for size in sizes)}"
    told: list[tuple[float, str, Times]] = []
    for operation in operations:
        rows = _measured(operation, sizes, cluster, sampling, begin)
        found = [_regret(operation, cluster, size, times) for size, times in zip(sizes, rows, strict=True)]
        yield f"{operation:<25}  {'  '.join(f'{regret:>6.2f}x' for regret, *_ in found)}"
        for (regret, text, times), size in zip(found, sizes, strict=True):
            told.append((regret, f"{operation} {format_bytes(size)}", times))
            if regret > REGRET_AIM:
                yield f"  {operation} {format_bytes(size)}: {text}"
    yield from summary(name, place, told)


def summary(name: str, place: str, told: Sequence[tuple[float, str, Times]]) -> Iterator[Figure]:
    """Return the largest regret, and the geometric mean of all; aims are met from below, so they are turned around."""
    regret, row, times = max(told, key=lambda each: each[0])
    mean = exp(fsum(log(each[0]) for each in told) / len(told))
    for which, text, value in (
        ("worst", f"{place}: fastest over chosen, {row}", 1 / regret),
        ("mean", f"{place}: fastest over chosen, mean of {len(told)}", 1 / mean),
    ):
        yield Figure(name=f"{name}/{which}", text=text, value=value, unit="ratio", aim=1 / REGRET_AIM, times=times)


def _regret(name: str, cluster: topology.Cluster, size: int, measured: dict[str, Times]) -> tuple[float, str, Times]:
    """Return the regret, what was chosen and what is fastest, and the times of the former."""
    chosen = distinct(name, size, cluster)[plan(name, size, cluster).algorithm]
    fastest = min(measured, key=lambda algorithm: measured[algorithm].median_ns)
    told = f"{chosen} {_told(measured[chosen])}, {fastest} {_told(measured[fastest])}"
    return over(measured[chosen], measured[fastest]), told, measured[chosen]


def _told(times: Times) -> str:
    return f"{format_ns(times.median_ns)} ({format_ns(times.p10_ns)} - {format_ns(times.p90_ns)})"


def _measured(
    name: str, sizes: Sequence[int], cluster: topology.Cluster, sampling: Sampling, begin: Begin
) -> list[dict[str, Times]]:
    """Return the times of each size by algorithm."""
    cases = float32_cases(name, cluster.world_size, sizes)
    each = [list(dict.fromkeys(distinct(name, size, cluster).values())) for size in sizes]
    program = [
        f"{__package__}.algorithms",
        AssignmentInTurn(cases=cases, sampling=sampling).to_json(),
        json.dumps(each),
    ]
    told = read_json_lines(begin(program))
    rows = [
        {
            algorithm: slowest_times(next(told)["told"], batch=sampling.operations_per_sample(case.size_bytes))
            for algorithm in algorithms
        }
        for case, algorithms in zip(cases, each, strict=True)
    ]
    next(told, None)  # which sees them end
    return rows


def distinct(name: str, nbytes: int, cluster: topology.Cluster) -> dict[str, str]:
    """Return those that a group of processes can run, and of each the first that is the same table."""
    found, first = dict[str, str](), dict[bytes, str]()
    for algorithm in GENERATORS[name]:
        try:
            table = plan(name, nbytes, cluster, algorithm=algorithm).schedule()
        except ScheduleError:
            continue
        if algorithm not in ONLY_FOR_ORDER:
            found[algorithm] = first.setdefault(_bytes_of(table), algorithm)
    return found


def _bytes_of(table: Schedule) -> bytes:
    """Return all that a table says; a row that is a group by itself is in none."""
    _, which, rows = np.unique(table.group, return_inverse=True, return_counts=True)
    group = np.where(rows[which] > 1, table.group, -1)
    return b"".join((group if column == "group" else getattr(table, column)).tobytes() for column in COLUMNS)


# -- one process -----------------------------------------------------------------------------------------------------


async def _sampled(
    rank: Rank, case: Case, sampling: Sampling, algorithms: Sequence[str]
) -> list[list[list[int]]] | None:
    """Return the samples of each algorithm by rank, on rank 0."""
    x, out = case.make_buffers(rank.rank)
    samples: dict[str, list[int]] = {algorithm: [] for algorithm in algorithms}
    order = Random(case.size_bytes)  # the same on all ranks
    for _ in range(sampling.warmup + sampling.iters):
        for algorithm in order.sample(algorithms, len(algorithms)):
            issue = case.make_issue_function(cast("Rank", _Insisting(rank, algorithm)), x, out)
            for taken in [], samples[algorithm]:
                await rank.barrier()
                begun_ns = perf_counter_ns()
                for _ in range(sampling.operations_per_sample(case.size_bytes)):
                    for future in issue():
                        await future
                taken.append(perf_counter_ns() - begun_ns)
    told = await rank.gather(np.array([each[sampling.warmup :] for each in samples.values()], np.int64))
    if told is None:
        return None
    return told.reshape(case.ranks, len(algorithms), -1).swapaxes(0, 1).tolist()


class _Insisting:
    """A rank all whose collectives are of one algorithm."""

    def __init__(self, rank: Rank, algorithm: str) -> None:
        self._rank, self._algorithm = rank, algorithm

    def __getattr__(self, name: str) -> Callable[..., Future[object]]:
        return partial(getattr(self._rank, name), algorithm=self._algorithm)


def main(text: str, algorithms: str) -> None:
    """Measure every row by every algorithm, each row in a world of its own; the process of rank 0 prints them."""
    assignment = AssignmentInTurn.from_json(text)
    for case, names in zip(assignment.cases, json.loads(algorithms), strict=True):
        for told in run(_sampled, case, assignment.sampling, names)[0] or ():
            print(json.dumps({"told": told}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
