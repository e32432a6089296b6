"""The command `python -m tests.benchmarks`, from the root of the checkout."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from overlap import OverlapError, UsageError
from overlap.cli.bench.sampling import Sampling
from overlap.cli.output import json_text, output_path, write_file
from tests.benchmarks.versus.contenders import CONTENDERS, Contender, contenders_named
from tests.benchmarks.versus.report import document

from . import (
    algorithms,
    connecting,
    contests,
    costs,
    gains,
    layer,
    pytorch,
    results,
    simulation,
    sockets,
    survive,
    timeline,
    truth,
    two_hosts,
)
from .figures import HEADING, Figure, line, rows, verdict
from .pytorch import busy

Contenders = Sequence[Contender]
Measure = Callable[[Sampling, Contenders], Iterator[Figure | str]]
"""Measures one figure after the other; text is a remark."""


def _engines(how: Sampling, _: Contenders) -> Iterator[Figure | str]:
    from . import engines  # needs Ray

    return engines.figures(how)


def _cost(word: str, how: Sampling, _: Contenders) -> Iterator[Figure]:
    return costs.figures(how, word)


def _all(how: Sampling, contenders: Contenders) -> Iterator[Figure | str]:
    yield from costs.figures(how)
    yield from results.figures(how)
    yield from contests.figures(how, contenders)


MEASURED: dict[str, Measure] = {
    "all": _all,
    **{cost.word: partial(_cost, cost.word) for cost in costs.COSTS},
    "results": lambda how, _: results.figures(how),
    "contests": contests.figures,
    "layer": lambda how, _: layer.figures(how),
    "connect": lambda how, _: connecting.figures(how),
    "simulation": lambda how, _: simulation.figures(how),
    "timeline": lambda how, _: timeline.figures(how),
    "gains": lambda how, _: gains.figures(how),
    "truth": lambda how, _: truth.figures(how),
    "algorithms": lambda how, _: algorithms.figures(how),
    "sockets": lambda how, _: sockets.figures(how),
    "survive": lambda how, _: survive.figures(how),
    "two_hosts": lambda how, _: two_hosts.figures(how),
    "planned": lambda how, _: two_hosts.planned.figures(how),
    "torch": lambda how, _: pytorch.lines(how),
    "busy": lambda how, _: busy.lines(how),
    "engines": _engines,
}

_DESCRIPTION = """\
Measure what this project aims at, check every result, and say which aims are met.

WHAT is
  all         (default) all of the next, but the largest proof
  issue       time until all_reduce() returns its future, alone and behind 8000; the same of computes with arrays
  span        time to record a span of the timeline, and an operation in the flight record
  start       what `import overlap` adds to trio and numpy; 32 ranks up and down; `overlap run`, quiet and crowded
  schedules   prove ring schedules of up to 4096 ranks (10 s, over 2 GB), compile and cost them, look up a cached plan
  results     all-reduces that make their results, against those that are given an array for them
  contests    all-reduces beside those of gloo and MPI
or, by itself,
  layer       what training strategies cost beside bare futures, and how much they hide on the virtual clock
  connect     8 bytes between two processes, and issuing, through overlap.connect: on the loop, and in a thread
  simulation  virtual time: messages, worlds of 1024 and 4096 ranks, costing a ring; SimPy's ring if it is installed
  sockets     every collective between 2 and 4 processes, 16 KiB to 64 MiB, in turn with gloo's (10 minutes)
  torch       PyTorch on our backend, in turn with gloo in one torchrun: training steps, single all-reduces (minutes)
  busy        all-reduces of PyTorch beside 15 busy processes on each core, in turn with gloo's (minutes)
  engines     worlds on a cluster of Ray: up, a killed actor, a lost node, steps beside overlap run (needs Ray; minutes)
  timeline    a run of a million spans packed, written, loaded, drawn; 1024 ranks folded (a minute)
  gains       what `overlap why` promises of changes to programs of PyTorch on the CPU, and what they really gain
  algorithms  each collective by each algorithm between 2 and 4 processes: do plans name the fastest? (4 minutes)
  truth       programs on the real clock, over paced links and as they are, and simulated: how far apart they are
  survive     random kills of real processes under --survive: from death to the end of the next step (minutes)
  two_hosts   a training step between two network namespaces joined by 1 Gbit/s, and PyTorch's (needs root, ip and tc)
  planned     each collective by each algorithm between those: do plans name the fastest? (4 minutes)

The exit code is 1 if a result was wrong; an aim that is missed does not change it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print each line as soon as it is known, and return the exit code."""
    args = _parser().parse_args(argv)
    try:
        if args.iters is None:
            args.iters = survive.KILLS if args.what == "survive" else 20
        if args.iters < 1:
            raise UsageError(f"--iters: expected at least 1, got {args.iters}")
        how, contenders = Sampling(iters=args.iters, warmup=args.warmup_iters), contenders_named(args.vs)
        args.json_file = output_path(args.json_file, option="--json-file")
        told = list(_told(MEASURED[args.what](how, contenders)))
        print(verdict(told), flush=True)
        lost = False
        if args.json_file is not None:
            text = json_text(document(how, {"figures": rows(told)}))
            lost = not write_file(text, args.json_file, option="--json-file")
    except OverlapError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 1 if lost or any(figure.wrong for figure in told) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs="?", choices=MEASURED, default="all", metavar="WHAT", help="what to measure; default all")
    add("--vs", default=",".join(CONTENDERS), metavar="PEERS", help="beside which libraries; default gloo,mpi")
    add("-n", "--iters", type=int, metavar="N", help="samples; default 20, and 200 kills for survive")
    add("-w", "--warmup_iters", type=int, default=5, metavar="N", help="samples before; default 5")
    add("--json-file", metavar="FILE", help="write the result as JSON there, too")
    return parser


def _told(measured: Iterable[Figure | str]) -> Iterator[Figure]:
    print(HEADING, flush=True)
    for figure in measured:
        if isinstance(figure, Figure):
            print(line(figure), flush=True)
            yield figure
        else:
            print(f"# {figure}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
