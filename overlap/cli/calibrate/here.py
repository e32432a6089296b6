"""`overlap calibrate --here`: measures this computer, and writes the machine file by which `local` predicts it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...cost.fitting import Sample
from ...cost.own import OwnFit, fit_own
from ...errors import OverlapError, UsageError
from ...notice import notify
from ...planning.calibrate import own_machine_file
from ...units import format_bytes, wrapped
from ..bench.cases import Case
from ..bench.measuring import ProcessLayout, measure_cases
from ..bench.operations import find
from ..bench.sampling import Sampling
from .busy import Busyness
from .page import accuracy_lines, deliver_machine, rows_table

BETWEEN: Mapping[str, str] = {"shared_memory": "shared_memory", "sockets": "efa", "mpi": "mpi"}
"""Ways to join processes, and the transport of each; the first one is the default on one host."""

AIM = 0.15
"""Largest wanted error of predictions of our own bench."""

QUIET = 0.1
"""Processors that other programs may use before times are said to be too long."""

_OPERATIONS = ("all_reduce", "all_gather", "broadcast", "all_to_all")
_SIZES = (1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
_ROUNDS = 3  # over all worlds; the least tenth percentile counts, because other programs only make times longer
_SAMPLING = Sampling(iters=10, warmup=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """A world in which cases are measured."""

    ranks: int
    layout: ProcessLayout


def calibrate_here(args: argparse.Namespace) -> int:
    """Measure, fit, print, write; return the exit code: 0, or 1 if the file cannot be written.

    Raises:
        UsageError: If an option does not go with `--here`, or the transport is missing.
    """
    for option in ("cluster", "collective", "ranks"):
        if getattr(args, option) is not None:
            raise UsageError(f"--{option}: --here measures this computer; leave it out")
    if args.logs:
        raise UsageError(f"--here: measures this computer; got a log too: {args.logs[0]}; leave it out")
    between = args.between or next(iter(BETWEEN))
    cores = len(os.sched_getaffinity(0))
    shared = between == "shared_memory"
    busyness = Busyness(os.cpu_count() or cores)
    busyness.look()
    samples = list(_samples(_measured_worlds(BETWEEN[between])))
    busyness.look()
    fit = fit_own(samples, cores=cores, shared_memory=shared)
    print("\n".join([*_page_lines(fit, between), *busy_lines(fit, busyness)]))
    text = own_machine_file(args.name or "here", fit, between=between, cores=cores)
    return deliver_machine(text, args.output, collective_bytes="1M")


def _measured_worlds(transport: str) -> list[_World]:
    """Return the worlds to measure: two and four ranks in this process, and two processes over `transport`."""
    own, apart = ProcessLayout(), ProcessLayout(processes=2, transport=transport)
    return [_World(ranks=2, layout=own), _World(ranks=4, layout=own), _World(ranks=2, layout=apart)]


def busy_lines(fit: OwnFit, busyness: Busyness) -> list[str]:
    """Return the wider band of predictions that were fitted beside other programs; nothing where it was quiet."""
    if busyness.cores <= QUIET:
        return []
    _, middle, worst = fit.errors(left_out=True)
    wider = [f"{(1 + error) * busyness.factor - 1:.0%}" for error in (middle, worst)]
    return wrapped(
        f"BUSY: other programs used {busyness.cores:.1f} processors meanwhile, so that times may be "
        f"{busyness.factor:.1f} times too long: on a quiet computer expect predictions to be off by {wider[0]} in the "
        f"median and {wider[1]} at worst; measure again while nothing else runs",
        rest="  ",
    )


def _samples(worlds: Sequence[_World]) -> Iterator[Sample]:
    """Yield the least time of every case, measured in rounds, so that no busy moment meets all its samples."""
    least: dict[tuple[_World, str, int], float] = {}
    for number in range(_ROUNDS):
        for world in worlds:
            processes = f"{world.layout.processes} process{'es' if world.layout.processes > 1 else ''}"
            notify(f"measuring {world.ranks} ranks in {processes}, round {number + 1} of {_ROUNDS}")
            for name in _OPERATIONS:
                for nbytes, time_s in _measure_sizes(name, world):
                    case = world, name, nbytes
                    least[case] = min(time_s, least.get(case, time_s))
    for (world, name, nbytes), time_s in least.items():
        ranks, nodes = tuple(range(world.ranks)), world.layout.processes
        yield Sample(collective=name, nbytes=nbytes, ranks=ranks, processes=nodes, time_s=time_s)


def _measure_sizes(name: str, world: _World) -> Iterator[tuple[int, float]]:
    """Measure an operation once in a world: yield each size in bytes, and its 10th percentile in seconds."""
    operation, dtype = find(name), np.dtype(np.float32)
    counts = [size // operation.blocks(world.ranks) // dtype.itemsize for size in _SIZES]
    cases = [Case(operation=operation, ranks=world.ranks, count=count, dtype=dtype) for count in counts]
    try:
        for result in measure_cases(cases, _SAMPLING, world.layout, check=False):
            yield result.case.size_bytes, result.times.p10_ns / 1e9
    except OverlapError as error:
        raise UsageError(f"--here: {world.layout.describe()}: {error}") from None


def _page_lines(fit: OwnFit, between: str) -> list[str]:
    """Return the page: measured and predicted times of each row, errors, and how many rows are within the aim."""

    def describe_sample(sample: Sample) -> tuple[str, ...]:
        """Return the cells that say what was measured: collective, ranks, transport, size."""
        joined = "memory" if sample.processes == 1 else between
        return sample.collective, str(len(sample.ranks)), joined, format_bytes(sample.nbytes)

    within = sum(abs(row.error) <= AIM for row in fit.rows)
    return [
        *rows_table(("collective", "ranks", "joined by", "size"), fit, describe_sample),
        "",
        *accuracy_lines(fit),
        f"within {AIM:.0%}: {within} of {len(fit.rows)} rows; measure while nothing else runs",
    ]
