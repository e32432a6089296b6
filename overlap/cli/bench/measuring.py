"""Timed runs of cases, in this process or in several, the check of results, the table and the JSON.

All rows with one number of ranks are measured in one world, as the steps of a training program are. New connections for
each row would be measured while they still adapt their rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from time import perf_counter_ns

import numpy as np

from ... import Rank, run
from ...config import RunConfig, setting_environment
from ...processes.place import find_place
from ...units import format_bytes
from ..output import print_page_or_json
from ..processes import run_processes
from .cases import Case, count_wrong_elements, list_cases
from .sampling import BATCH, BATCHED_BYTES, Sampling, Times, slowest_times

_LIMIT_S = 600
"""Longest time for each row in seconds. It ends the benchmark if a rank waits for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured row of the table."""

    case: Case  # The measured case
    times: Times  # Times of one operation
    wrong: int  # Number of wrong elements of the results of all ranks

    @property
    def algbw_bytes_per_s(self) -> float:
        """Algorithm bandwidth: size of the case divided by its median time."""
        return self.times.bytes_per_s(self.case.size_bytes)

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bandwidth of the busiest wire: algbw times the operation's factor (nccl-tests, doc/PERFORMANCE.md)."""
        return self.algbw_bytes_per_s * self.case.operation.kind.bus_factor(self.case.ranks)


def measure_and_print(args: argparse.Namespace) -> int:
    """Measure an operation over its sizes, print each row when it is measured, and return the exit code.

    Several processes are started as by `overlap run`, each with this module and the options; that of rank 0 prints.

    Raises:
        UsageError: An option has an impossible value.
        OverlapError: A rank has failed.
    """
    worlds, processes, place = list_cases(args), args.processes or 1, find_place()
    with setting_environment(RunConfig()) if place is None else nullcontext():  # settings would change the result
        if processes > 1 and place is None:
            given = {name: value for name, value in vars(args).items() if not callable(value)}
            # a host for each process: within one host, only algorithms for shared memory would be chosen
            config = RunConfig.from_values(processes=processes, cluster=f"local x{processes}", prefix=False)
            return run_processes(config, ["-m", __name__, json.dumps(given)])
        sampling, rows = Sampling(iters=args.iters, warmup=args.warmup_iters), list[Result]()

        def add_row(result: Result) -> None:
            heading = "" if rows else f"{table_heading(result.case, sampling, processes)}\n"
            rows.append(result)
            if not args.json:
                print(heading + table_row(result), flush=True)

        for world in worlds:
            run(
                measure_on_rank, world, sampling, add_row, ranks=world[0].ranks, algorithm=args.algorithm,
                timeout_s=len(world) * _LIMIT_S,
            )  # fmt: skip
    if not rows:  # rank 0 is in another process
        return 0
    wrong = sum(result.wrong for result in rows)
    verdict = f"# {wrong} wrong elements: FAILED" if wrong else "# every result checked: none wrong"
    document = {"sampling": asdict(sampling), "processes": processes, "rows": json_rows(rows)}
    print_page_or_json(args, lambda: document, lambda: [verdict], version=2)
    return int(wrong > 0)


async def measure_on_rank(
    rank: Rank, world: Sequence[Case], sampling: Sampling, add_row: Callable[[Result], object]
) -> None:
    """Measure all cases, one after the other. The program of each rank.

    Args:
        rank: The rank.
        world: The cases for this number of ranks.
        sampling: Number of samples.
        add_row: Called on rank 0 with the row of each case.
    """
    for case in world:
        by_rank = await measure_case(rank, case, sampling)
        if by_rank is not None:
            add_row(summarize_case(case, sampling, by_rank))


def summarize_case(case: Case, sampling: Sampling, by_rank: Sequence[Sequence[int]]) -> Result:
    """Return the row of a case.

    Args:
        case: The case.
        sampling: Number of samples.
        by_rank: Result of `measure_case` on rank 0.
    """
    times = slowest_times(
        [samples_ns for _, *samples_ns in by_rank], batch=sampling.operations_per_sample(case.size_bytes)
    )
    return Result(case=case, times=times, wrong=sum(wrong for wrong, *_ in by_rank))


async def measure_case(rank: Rank, case: Case, sampling: Sampling) -> list[list[int]] | None:
    """Measure a case on one rank of a world, which may span processes; every rank of the world calls it.

    A sample is the time from a common barrier to the last result of a batch of operations.

    Returns:
        On rank 0, for each rank of the world, the number of wrong elements of its result, and then its samples in
        nanoseconds without those of the warm-up; None on the others.
    """
    issue = case.make_issue_function(rank, *case.make_buffers(rank.rank))
    samples_ns: list[int] = []
    for _ in range(sampling.warmup + sampling.iters):
        await rank.barrier()
        start_ns = perf_counter_ns()
        for _ in range(sampling.operations_per_sample(case.size_bytes)):
            for future in issue():
                await future
        samples_ns.append(perf_counter_ns() - start_ns)
    wrong = await _run_and_count_wrong(rank, case)
    by_rank = await rank.gather(np.array([wrong, *samples_ns[sampling.warmup :]], np.int64))
    return None if by_rank is None else by_rank.reshape(rank.world_size, -1).tolist()


async def _run_and_count_wrong(rank: Rank, case: Case) -> int:
    """Run the case once more on fresh data, and return the number of wrong elements on this rank."""
    x, out = case.make_buffers(rank.rank)
    for future in case.make_issue_function(rank, x, out)():
        await future
    with np.errstate(invalid="ignore"):
        return 0 if out is None else count_wrong_elements(out, case.expected_result(rank.rank))


# -- the table and the JSON -------------------------------------------------------------------------------------------


COLUMNS = """\
#      size      count ranks     time      p10      p90    algbw    busbw wrong
#       (B)                      (us)     (us)     (us)   (GB/s)   (GB/s)"""


def table_heading(case: Case, sampling: Sampling, processes: int) -> str:
    """Return the operation, the way it is measured, and the names and units of columns, as lines that begin with #.

    Args:
        case: The first case of the table.
        sampling: Number of samples.
        processes: Number of processes in which the ranks live.
    """
    traits = case.operation.kind.traits
    op, root = f", {case.op}" if traits.reduces else "", f", root {case.root}" if traits.rooted else ""
    place = "in place" if case.in_place else "out of place"
    return f"""\
# {case.operation.name} of {case.dtype.name}{op}{root}, {place}, processes: {processes}
# time: median, 10th and 90th percentile of {sampling.iters} samples after {sampling.warmup} of warm-up;
# a sample is the slowest rank's time from a common barrier to its result; up to
# {format_bytes(BATCHED_BYTES)} it is {BATCH} operations back to back, divided by {BATCH}
# GB is 10^9 bytes; busbw = algbw * {traits.busbw_factor} with n ranks
{COLUMNS}"""


def table_row(measured: Result) -> str:
    """Return the line of the table for a measured case."""
    case, times = measured.case, measured.times
    spans = [format_table_number(value_ns / 1e3) for value_ns in (times.median_ns, times.p10_ns, times.p90_ns)]
    rates = [f"{rate / 1e9:.3f}" for rate in (measured.algbw_bytes_per_s, measured.busbw_bytes_per_s)]
    middle = " ".join(f"{value:>8}" for value in (*spans, *rates))
    return f" {case.size_bytes:>10} {case.count:>10} {case.ranks:>5} {middle} {measured.wrong:>5}"


def format_table_number(value: float) -> str:
    """Return a number with 2 decimals below 100, 1 decimal below 10,000, and none above."""
    decimals = 2 if value < 99.995 else int(value < 9999.95)
    return f"{value:.{decimals}f}"


def json_rows(rows: Sequence[Result]) -> list[dict[str, object]]:
    """Return rows for JSON: times in nanoseconds for one operation, bandwidths in bytes per second."""
    return [
        {name: getattr(row.case, name) for name in ("size_bytes", "count", "ranks", "in_place", "op", "root")}
        | {name: getattr(row, name) for name in ("algbw_bytes_per_s", "busbw_bytes_per_s", "wrong")}
        | {"operation": row.case.operation.name, "dtype": row.case.dtype.name, **asdict(row.times)}
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(measure_and_print(argparse.Namespace(**json.loads(sys.argv[1]))))
