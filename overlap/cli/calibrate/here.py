"""`overlap calibrate --here`: measure this computer, and write the machine file by which `local` predicts it."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...cost.fitting import Fitted, Sample
from ...cost.own import OwnFit, fit_own
from ...errors import OverlapError, UsageError
from ...notice import notify
from ...units import format_bytes, format_ns
from ..bench.cases import Case
from ..bench.measuring import NodeLayout, measure_cases
from ..bench.operations import find
from ..bench.sampling import Sampling
from ..output import written

BETWEEN: Mapping[str, str] = {"shared_memory": "shared_memory", "sockets": "efa", "mpi": "mpi"}
"""What may join processes, and the transport's name; first what joins those of one host if nobody says otherwise."""

AIM = 0.15
"""Error that predictions of our own bench are to stay within."""

_OPERATIONS = ("all_reduce", "all_gather", "broadcast", "all_to_all")
_SIZES = (1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
_ROUNDS = 3  # over all worlds; of their tenth percentiles the least counts: what else runs only makes times longer
_SAMPLING = Sampling(iters=10, warmup=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """Where cases are measured."""

    ranks: int
    layout: NodeLayout


def calibrate_here(args: argparse.Namespace) -> int:
    """Measure, fit, print, write; return the exit code: 0, or 1 if the file cannot be written.

    Raises:
        UsageError: If an option does not go with `--here`, or nothing joins processes as is asked.
    """
    for option in ("cluster", "op", "ranks"):
        if getattr(args, option) is not None:
            raise UsageError(f"--{option}: --here measures this computer; leave it out")
    if args.logs:
        raise UsageError(f"--here: measures this computer; got a log too: {args.logs[0]}")
    between = args.between or next(iter(BETWEEN))
    cores = len(os.sched_getaffinity(0))
    shared = between == "shared_memory"
    found = fit_own(list(_samples(_worlds(BETWEEN[between]))), cores=cores, shared_memory=shared)
    print("\n".join(_page(found, between)))
    text = _toml(args.name or "here", found, between, cores)
    if args.output is None:
        print("\n" + text, end="")
        return 0
    if not written(text, args.output, option="--output"):
        return 1
    print(f"\nmachine in {args.output}; plan with it:")
    print(f"overlap plan all_reduce --bytes 1M --cluster {args.output}")
    return 0


def _worlds(transport: str) -> list[_World]:
    own, apart = NodeLayout(), NodeLayout(nodes=2, transport=transport)
    return [_World(ranks=2, layout=own), _World(ranks=4, layout=own), _World(ranks=2, layout=apart)]


def _samples(worlds: Sequence[_World]) -> Iterator[Sample]:
    """Measure every case in rounds, so that no busy moment meets all of one, and give the least."""
    least: dict[tuple[_World, str, int], float] = {}
    for number in range(_ROUNDS):
        for world in worlds:
            processes = f"{world.layout.nodes} process{'es' if world.layout.nodes > 1 else ''}"
            notify(f"measuring {world.ranks} ranks in {processes}, round {number + 1} of {_ROUNDS}")
            for name in _OPERATIONS:
                for nbytes, time_s in _round(name, world):
                    case = world, name, nbytes
                    least[case] = min(time_s, least.get(case, time_s))
    for (world, name, nbytes), time_s in least.items():
        ranks, nodes = tuple(range(world.ranks)), world.layout.nodes
        yield Sample(collective=name, nbytes=nbytes, ranks=ranks, processes=nodes, time_s=time_s)


def _round(name: str, world: _World) -> Iterator[tuple[int, float]]:
    operation, dtype = find(name), np.dtype(np.float32)
    counts = [size // operation.blocks(world.ranks) // dtype.itemsize for size in _SIZES]
    cases = [Case(operation=operation, ranks=world.ranks, count=count, dtype=dtype) for count in counts]
    try:
        for result in measure_cases(cases, _SAMPLING, world.layout, check=False):
            yield result.case.size_bytes, result.times.p10_ns / 1e9
    except OverlapError as error:
        raise UsageError(f"--here: {world.layout.describe()}: {error}") from None


def _page(found: OwnFit, between: str) -> list[str]:
    lines = [
        f"{'collective':<11} {'ranks':>5} {'joined by':<13} {'size':>8} {'measured':>9} {'predicted':>9} {'error':>7}"
    ]
    lines += [_line(row, between) for row in found.rows]
    fitted, left = (found.errors(left_out=out) for out in (False, True))
    within = sum(abs(row.error) <= AIM for row in found.rows)
    return [
        *lines,
        "",
        f"rows fitted: {fitted[0]}, median error {fitted[1]:.1%}, worst {fitted[2]:.1%}",
        f"rows left out: {left[0]}, median error {left[1]:.1%}, worst {left[2]:.1%}",
        f"within {AIM:.0%}: {within} of {len(found.rows)} rows; measure while nothing else runs",
    ]


def _line(row: Fitted, between: str) -> str:
    of = row.sample
    joined = "memory" if of.processes == 1 else between
    times = f"{format_ns(of.time_s * 1e9):>9} {format_ns(row.predicted_s * 1e9):>9} {row.error:>+7.1%}"
    out = "  left out" if row.left_out else ""
    return f"{of.collective:<11} {len(of.ranks):>5} {joined:<13} {format_bytes(of.nbytes):>8} {times}{out}"


def _toml(name: str, found: OwnFit, between: str, cores: int) -> str:
    count, middle, worst = found.errors(left_out=True)
    origin = 'source = "measured: overlap calibrate --here", confidence = "D"'

    def line(key: str, value: float) -> str:
        return f"{key} = {{ value = {value:.6g}, {origin} }}"

    apart = found.between
    wire = ("step_s", "gap_s", "incast_s", "busy_s", "busy_bytes_per_s")
    own = ("meeting_s", "phase_s", "memory_bytes_per_s", "launch_s", "reducer_bytes_per_s")
    between_nodes = [
        "[collectives.between_nodes]",
        f"shared_memory = {'true' if 'phase_s' in apart else 'false'}",
        line("cores", cores),
        *(line(key, apart[key]) for key in own if key in apart),
        "",
    ]
    if "step_s" in apart:
        between_nodes += [
            "[collectives.between_nodes.wires.efa]",
            *(line(key, apart["step_s" if key in ("gap_s", "incast_s") else key]) for key in wire),
            "",
        ]
    return "\n".join(
        [
            f"# Written by `overlap calibrate --here` on {platform.machine()}, {cores} processors, Python "
            f"{platform.python_version()}; processes joined by {between}.",
            f"# {count} rows that were left out: median error {middle:.1%}, worst {worst:.1%}.",
            'extends = "local"',
            f'name = "{name}"',
            "",
            "[collectives]",
            *(line(key, value) for key, value in found.inside.items()),
            'inline_bytes = { value = 2097152, source = "overlap/runtime/engine/workers.py", confidence = "A" }',
            "",
            *(between_nodes if found.between else []),
        ]
    )
