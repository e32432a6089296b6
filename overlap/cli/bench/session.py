"""One call of `overlap bench`: measures what was asked for, and prints each line as soon as it is known."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from ... import UsageError
from . import hosts, peer_direct, report, simulation, table, truth
from .aims import HEADING, Figure, cost_figure, figures, line, verdict
from .costs import COSTS
from .hosts import TWO_HOSTS
from .nodes import measure_rows
from .peer import Spec
from .peers import PEERS, Peer, PeerResult, PeerUnavailableError, measure_peer, peers_named
from .sampling import Sampling
from .simulation import SIMULATE
from .sweep import cases, check_figure_options, check_memory, layouts, sampling
from .truth import TRUTH

__all__ = ["measure"]

EVERYTHING = "all"

COST_WORDS = tuple(dict.fromkeys(cost.word for cost in COSTS))
WORDS = (*COST_WORDS, TWO_HOSTS, SIMULATE, TRUTH, EVERYTHING)

_WRONG_EXIT = 1
_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of the machine

Say = Callable[[str], None]


def measure(args: argparse.Namespace) -> int:
    """Measure what the options ask for; return the exit code."""
    if args.operation in WORDS:
        check_figure_options(args)
    if args.operation in COST_WORDS:
        return _measure_costs(args)
    if args.operation == EVERYTHING:
        return _measure_everything(args)
    if args.operation == TWO_HOSTS:
        return _measure_two_hosts(args)
    if args.operation in (SIMULATE, TRUTH):
        return _measure_simulation(args)
    if args.peer_direct == "both":
        return _compare_peer_direct(args)
    if args.operation is None:
        raise UsageError("OP: say what to measure, or --peer-direct both (`overlap bench --help` explains)")
    return _measure_collective(args)


def _measure_collective(args: argparse.Namespace) -> int:
    """Measure a collective over its sizes, then peers over the same ones."""
    worlds, how, [layout] = cases(args, others=WORDS), sampling(args), layouts(args)
    peers = [] if args.vs is None else peers_named(args.vs)
    report.check_path(args.json)
    check_memory(worlds, _MEMORY_BYTES)
    say = _printer(args.json)
    say(table.title(worlds[0][0], how, layout))
    say(table.header())
    rows, told = [], []
    for world in worlds:
        ours = []
        for row in measure_rows(world, how, layout, check=bool(args.check), algorithm=args.algorithm):
            ours.append(row)
            say(table.row(row))
        results = list(_measure_peers(peers, Spec.of(world, how, check=bool(args.check)), say))
        if results:
            say(table.versus(ours, results))
        rows += ours
        told += report.peer_rows(world[0].ranks, results)
    say(table.summary(rows))
    _write(args.json, how, {"layout": asdict(layout), "rows": report.measured_rows(rows), "peers": told})
    return _WRONG_EXIT if any(row.wrong for row in rows) else 0


def _measure_peers(peers: Iterable[Peer], spec: Spec, say: Say) -> Iterator[PeerResult]:
    for peer in peers:
        try:
            yield measure_peer(peer, spec)
        except PeerUnavailableError as reason:
            say(f"# {reason}")


def _compare_peer_direct(args: argparse.Namespace) -> int:
    """Measure each operation through a bounce buffer, then with Peer Direct."""
    how, [staged, direct] = sampling(args), layouts(args)
    worlds = peer_direct.worlds(args)
    report.check_path(args.json)
    check_memory(worlds, _MEMORY_BYTES)
    say = _printer(args.json)
    say(peer_direct.title(worlds[0][0], how, direct))
    say(peer_direct.HEADING)
    pairs = []
    for world in worlds:
        for pair in peer_direct.measure(world, how, staged, direct, check=bool(args.check)):
            pairs.append(pair)
            say(peer_direct.line(pair))
    rows = [row for pair in pairs for row in pair]
    say(table.summary(rows))
    sides = (("host_copies", 0), ("peer_direct", 1))
    told = {name: report.measured_rows([pair[side] for pair in pairs]) for name, side in sides}
    _write(args.json, how, {"layout": asdict(direct), **told})
    return _WRONG_EXIT if any(row.wrong for row in rows) else 0


def _measure_costs(args: argparse.Namespace) -> int:
    how = sampling(args)
    return _tell_figures(args, how, (cost_figure(cost, how) for cost in COSTS if cost.word == args.operation))


def _measure_everything(args: argparse.Namespace) -> int:
    """Measure every figure with an aim, against all peers that are installed."""
    how = sampling(args)
    return _tell_figures(args, how, figures(how, peers_named(args.vs or ",".join(PEERS))))


def _measure_two_hosts(args: argparse.Namespace) -> int:
    how = sampling(args)
    return _tell_figures(args, how, hosts.figures(how))


def _measure_simulation(args: argparse.Namespace) -> int:
    how = sampling(args)
    return _tell_figures(args, how, (simulation if args.operation == SIMULATE else truth).figures(how))


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
