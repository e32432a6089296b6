"""One call of `overlap bench`: measures what was asked for, and prints each line as soon as it is known."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence

from . import report, table
from .aims import HEADING, Figure, cost_figure, figures, line, verdict
from .costs import COSTS
from .measure import Measurement, measure
from .operations import Case
from .peer import Spec
from .peers import PEERS, Peer, PeerResult, PeerUnavailableError, measure_peer, peers_named
from .sampling import Sampling
from .sweep import cases, sampling

__all__ = ["EVERYTHING", "WORDS", "measure_collective", "measure_costs", "measure_everything"]

WORDS = tuple(dict.fromkeys(cost.word for cost in COSTS))
EVERYTHING = "all"

_WRONG_EXIT = 1

Say = Callable[[str], None]


def measure_collective(args: argparse.Namespace) -> int:
    """Measure a collective over its sizes, then peers over the same ones; return the exit code."""
    worlds, how = cases(args, others=(*WORDS, EVERYTHING)), sampling(args)
    peers = [] if args.vs is None else peers_named(args.vs)
    report.check_path(args.json)
    say = _printer(args.json)
    say(table.title(worlds[0][0], how))
    say(table.header())
    rows, told = [], []
    for world in worlds:
        ours = _measure_rows(args, world, how, say)
        results = list(_measure_peers(peers, world, how, say))
        if results:
            say(table.versus(ours, results))
        rows += ours
        told += report.peer_rows(world[0].ranks, results)
    say(table.summary(rows))
    _write(args.json, how, {"rows": report.measured_rows(rows), "peers": told})
    return _WRONG_EXIT if any(row.wrong for row in rows) else 0


def measure_costs(args: argparse.Namespace) -> int:
    """Measure what one word stands for; return the exit code."""
    how = sampling(args)
    return _tell_figures(args, how, (cost_figure(cost, how) for cost in COSTS if cost.word == args.operation))


def measure_everything(args: argparse.Namespace) -> int:
    """Measure every figure with an aim, against all peers that are installed; return the exit code."""
    how = sampling(args)
    return _tell_figures(args, how, figures(how, peers_named(args.vs or ",".join(PEERS))))


def _measure_rows(args: argparse.Namespace, world: Sequence[Case], how: Sampling, say: Say) -> list[Measurement]:
    rows = []
    for case in world:
        rows.append(measure(case, how, check=bool(args.check), algorithm=args.algorithm))
        say(table.row(rows[-1]))
    return rows


def _measure_peers(peers: Iterable[Peer], world: Sequence[Case], how: Sampling, say: Say) -> Iterator[PeerResult]:
    for peer in peers:
        try:
            yield measure_peer(peer, Spec.of(world, how))
        except PeerUnavailableError as reason:
            say(f"# {reason}")


def _tell_figures(args: argparse.Namespace, how: Sampling, measured: Iterable[Figure | str]) -> int:
    report.check_path(args.json)
    say = _printer(args.json)
    say(HEADING)
    told = []
    for figure in measured:
        if isinstance(figure, Figure):
            told.append(figure)
            say(line(figure))
        else:
            say(f"# {figure}")
    say(verdict(told))
    _write(args.json, how, {"figures": report.figure_rows(told)})
    return _WRONG_EXIT if any(figure.wrong for figure in told) else 0


def _printer(json_path: str | None) -> Say:
    """Return what prints a line at once, into pipes too; nothing may come between the JSON on stdout."""
    return (lambda text: None) if json_path == "-" else (lambda text: print(text, flush=True))


def _write(path: str | None, how: Sampling, parts: dict[str, object]) -> None:
    if path is not None:
        report.write(report.document(how, parts), path)
