"""One call of `overlap bench`: measures what was asked for, and prints each line as soon as it is known."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from ... import UsageError
from . import columns, jsonfile, peer_direct
from .cases import Assignment
from .measuring import measure_cases
from .options import cases, check_memory, layouts, sampling
from .sampling import Sampling
from .versus.contenders import (
    Contender,
    ContenderResult,
    ContenderUnavailableError,
    contenders_named,
    measure_contender,
)

__all__ = ["measure"]

_WRONG_EXIT = 1
_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of the machine

Say = Callable[[str], None]


def measure(args: argparse.Namespace) -> int:
    """Measure what the options ask for; return the exit code."""
    if args.peer_direct == "both":
        return _compare_peer_direct(args)
    if args.operation is None:
        raise UsageError("OP: say what to measure, or --peer-direct both (`overlap bench --help` explains)")
    return _measure_collective(args)


def _measure_collective(args: argparse.Namespace) -> int:
    """Measure a collective over its sizes, then other libraries over the same ones."""
    worlds, how, [layout] = cases(args), sampling(args), layouts(args)
    contenders = [] if args.vs is None else contenders_named(args.vs)
    jsonfile.check_path(args.json)
    check_memory(worlds, _MEMORY_BYTES)
    say = _printer(args.json)
    say(columns.title(worlds[0][0], how, layout))
    say(columns.header())
    rows, others = [], []
    for world in worlds:
        ours = []
        for row in measure_cases(world, how, layout, check=bool(args.check), algorithm=args.algorithm):
            ours.append(row)
            say(columns.row(row))
        assignment = Assignment(cases=world, sampling=how, check=bool(args.check))
        results = list(_measure_contenders(contenders, assignment, say))
        if results:
            say(columns.versus(ours, results))
        rows += ours
        others += jsonfile.contender_rows(world[0].ranks, results)
    say(columns.summary(rows))
    told_all = _write(args.json, how, {"layout": asdict(layout), "rows": jsonfile.measured_rows(rows), "peers": others})
    return _WRONG_EXIT if not told_all or any(row.wrong for row in rows) else 0


def _measure_contenders(contenders: Iterable[Contender], assignment: Assignment, say: Say) -> Iterator[ContenderResult]:
    for contender in contenders:
        try:
            yield measure_contender(contender, assignment)
        except ContenderUnavailableError as reason:
            say(f"# {reason}")


def _compare_peer_direct(args: argparse.Namespace) -> int:
    """Measure each operation through a bounce buffer, then with Peer Direct."""
    how, [staged, direct] = sampling(args), layouts(args)
    worlds = peer_direct.worlds(args)
    jsonfile.check_path(args.json)
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
    say(columns.summary(rows))
    sides = (("host_copies", 0), ("peer_direct", 1))
    told = {name: jsonfile.measured_rows([pair[side] for pair in pairs]) for name, side in sides}
    told_all = _write(args.json, how, {"layout": asdict(direct), **told})
    return _WRONG_EXIT if not told_all or any(row.wrong for row in rows) else 0


def _printer(json_path: str | None) -> Say:
    """Return what prints a line at once, into pipes too; nothing may come between the JSON on stdout."""
    return (lambda text: None) if json_path == "-" else (lambda text: print(text, flush=True))


def _write(path: str | None, how: Sampling, parts: dict[str, object]) -> bool:
    return path is None or jsonfile.write(jsonfile.document(how, parts), path)
