"""Timed runs of cases on our ranks, in this process or in several, the check of results, the table and the JSON.

`overlap run -m overlap.cli.bench.measuring OPTIONS` is one process of several. The process of rank 0 prints a line of
JSON for each row. All rows are measured in one world, as the steps of a training program are: new connections for each
row would be measured while they still adapt to what they can carry.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter_ns

import numpy as np

from ... import Rank, run
from ...config import RunConfig, setting_environment
from ...units import format_bytes
from ..children import read_json_lines, start
from ..output import show
from .cases import Case, cases, wrong_elements
from .sampling import BATCH, BATCHED_BYTES, Sampling, Times, slowest

MEMBER = f"{__package__}.measuring"
"""Module that each process of several runs."""

_LIMIT_S = 600
"""Absolute limit for each row: it ends a world, and the bench, in which a rank waits for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured row of the table."""

    case: Case  # The measured case
    times: Times  # For one operation
    wrong: int  # Wrong elements on all ranks

    @property
    def algbw_bytes_per_s(self) -> float:
        """Algorithm bandwidth: size of the case divided by its median time."""
        return self.times.bytes_per_s(self.case.size_bytes)

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bandwidth of the busiest wire: algbw times the operation's factor (nccl-tests, doc/PERFORMANCE.md)."""
        return self.algbw_bytes_per_s * self.case.operation.kind.bus_factor(self.case.ranks)


def measure_and_print(args: argparse.Namespace) -> int:
    """Measure an operation over its sizes, print each row when it is known, and return the exit code."""
    sampling, rows = Sampling(iters=args.iters, warmup=args.warmup_iters), list[Result]()
    for result in measure_cases(args, sampling):
        text = row(result) if rows else f"{heading(result.case, sampling, args.processes or 1)}\n{row(result)}"
        rows.append(result)
        if not args.json:
            print(text, flush=True)
    wrong = sum(result.wrong for result in rows)
    verdict = f"# {wrong} wrong elements: FAILED" if wrong else "# every result checked: none wrong"
    document = {"sampling": asdict(sampling), "processes": args.processes or 1, "rows": describe_rows(rows)}
    return show(args, lambda: document, lambda: [verdict], version=2) or int(wrong > 0)


def measure_cases(args: argparse.Namespace, sampling: Sampling) -> Iterator[Result]:
    """Measure the cases that options ask for; yield each row when it is known.

    Raises:
        UsageError: If an option cannot be meant.
        OverlapError: If a process of a world fails.
    """
    for world in cases(args):
        if args.processes in (None, 1):
            yield from (measure(case, sampling, algorithm=args.algorithm) for case in world)
            continue
        given = {name: value for name, value in vars(args).items() if not callable(value)} | {"ranks": [world[0].ranks]}
        options = run_options(args.processes, world[0].ranks, rows=len(world), algorithm=args.algorithm)
        lines = read_json_lines([start(options, [MEMBER, json.dumps(given)])])
        yield from (summarize(case, sampling, line["told"]) for case, line in zip(world, lines, strict=True))


def run_options(processes: int, ranks: int, *, rows: int = 1, algorithm: str | None = None) -> list[str]:
    """Return the options of `overlap run` for a world that measures `rows` rows.

    Its cluster has a host for each process: on one host only algorithms of its memory would be chosen.
    """
    options = ["--processes", str(processes), "--ranks-per-process", str(ranks // processes)]
    options += ["--cluster", f"local x{processes}", "--timeout", str(rows * _LIMIT_S)]
    return options if algorithm is None else [*options, "--algorithm", algorithm]


def measure(case: Case, sampling: Sampling, *, algorithm: str | None = None) -> Result:
    """Measure one case in a world of its own, in this process."""
    with setting_environment(RunConfig()):  # the settings of a launcher would change the result
        samples = run(on_rank, case, sampling, ranks=case.ranks, algorithm=algorithm)
    return summarize(case, sampling, samples[0] or [])


def summarize(case: Case, sampling: Sampling, by_rank: Sequence[Sequence[int]]) -> Result:
    """Summarise into a row, for each rank, the number of its wrong elements and then its samples in nanoseconds."""
    times = slowest([samples for _, *samples in by_rank], batch=sampling.batch(case.size_bytes))
    return Result(case=case, times=times, wrong=sum(wrong for wrong, *_ in by_rank))


async def on_rank(rank: Rank, case: Case, sampling: Sampling) -> list[list[int]] | None:
    """Measure a case on one rank of a world, which may span processes; return the samples of all ranks on rank 0."""
    batch = sampling.batch(case.size_bytes)
    issue, samples = case.issuer(rank, *case.buffers(rank.rank)), []
    for _ in range(sampling.warmup + sampling.iters):
        await rank.barrier()
        begun_ns = perf_counter_ns()
        for _ in range(batch):
            for future in issue():
                await future
        samples.append(perf_counter_ns() - begun_ns)
    by_rank = await rank.gather(np.array([await _count_wrong(rank, case), *samples[sampling.warmup :]], np.int64))
    return None if by_rank is None else by_rank.reshape(case.ranks, -1).tolist()


async def _count_wrong(rank: Rank, case: Case) -> int:
    """Run the case once more on fresh data, and return the number of wrong elements on this rank."""
    x, out = case.buffers(rank.rank)
    for future in case.issuer(rank, x, out)():
        await future
    with np.errstate(invalid="ignore"):
        return 0 if out is None else wrong_elements(out, case.expected(rank.rank))


# -- the table and the JSON -------------------------------------------------------------------------------------------


COLUMNS = """\
#      size      count ranks     time      p10      p90    algbw    busbw wrong
#       (B)                      (us)     (us)     (us)   (GB/s)   (GB/s)"""


def heading(case: Case, sampling: Sampling, processes: int) -> str:
    """Return the operation, the way it is measured, and the names and units of columns, as lines that begin with #."""
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


def row(measured: Result) -> str:
    """Return the line of the table for a measured case."""
    case, times = measured.case, measured.times
    spans = [number(value_ns / 1e3) for value_ns in (times.median_ns, times.p10_ns, times.p90_ns)]
    rates = [f"{rate / 1e9:.3f}" for rate in (measured.algbw_bytes_per_s, measured.busbw_bytes_per_s)]
    middle = " ".join(f"{value:>8}" for value in (*spans, *rates))
    return f" {case.size_bytes:>10} {case.count:>10} {case.ranks:>5} {middle} {measured.wrong:>5}"


def number(value: float) -> str:
    """Return a figure with two decimals if it is small, and none if it is large."""
    return f"{value:.2f}" if value < 99.995 else f"{value:.1f}" if value < 9999.95 else f"{value:.0f}"


def describe_rows(rows: Sequence[Result]) -> list[dict[str, object]]:
    """Return rows for JSON: times in nanoseconds for one operation, bandwidths in bytes per second."""
    return [
        {name: getattr(row.case, name) for name in ("size_bytes", "count", "ranks", "in_place", "op", "root")}
        | {name: getattr(row, name) for name in ("algbw_bytes_per_s", "busbw_bytes_per_s", "wrong")}
        | {"operation": row.case.operation.name, "dtype": row.case.dtype.name, **asdict(row.times)}
        for row in rows
    ]


# -- one process of several -------------------------------------------------------------------------------------------


async def measure_on_rank(rank: Rank, world: Sequence[Case], sampling: Sampling) -> None:
    """Measure every case in turn; rank 0 prints one line of JSON with the samples of all ranks for each."""
    for case in world:
        by_rank = await on_rank(rank, case, sampling)
        if by_rank is not None:
            print(json.dumps({"told": by_rank}), flush=True)


def main(text: str) -> None:
    """Measure the cases of options in one world, as one process of several."""
    args = argparse.Namespace(**json.loads(text))
    run(measure_on_rank, cases(args)[0], Sampling(iters=args.iters, warmup=args.warmup_iters))


if __name__ == "__main__":
    main(*sys.argv[1:])
