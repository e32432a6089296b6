"""One call of `overlap bench`: measures what was asked for, and prints each line as soon as it is known."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

from ... import UsageError
from . import columns, comparison, jsonfile
from .cases import Assignment, Case
from .layout import NodeLayout
from .measuring import Result, measure_cases
from .options import cases, check_memory, layouts, sampling
from .sampling import Sampling
from .turns import measure_in_turn
from .versus.contenders import (
    Contender,
    ContenderResult,
    ContenderUnavailableError,
    contenders_named,
    measure_contender,
)

_WRONG_EXIT = 1
_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of the machine

Say = Callable[[str], None]


def measure(args: argparse.Namespace) -> int:
    """Measure what the options ask for; return the exit code."""
    compared = comparison.chosen(args)
    if compared is not None:
        return _compare(args, compared)
    if args.operation is None:
        flags = ", ".join(one.flag for one in comparison.COMPARISONS)
        raise UsageError(f"OP: say what to measure, or {flags} (`overlap bench --help` explains)")
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
        ours, results = [], []
        for row in _measured(args, world, how, layout, contenders, say):
            if isinstance(row, Result):
                ours.append(row)
                say(columns.row(row))
            else:
                results += row
        if results:
            say(columns.versus(ours, results))
        rows += ours
        others += jsonfile.contender_rows(world[0].ranks, results)
    say(columns.summary(rows))
    told_all = _write(args.json, how, {"layout": asdict(layout), "rows": jsonfile.measured_rows(rows), "peers": others})
    return _WRONG_EXIT if not told_all or any(row.wrong for row in rows) else 0


def _measured(
    args: argparse.Namespace,
    world: Sequence[Case],
    how: Sampling,
    layout: NodeLayout,
    contenders: Sequence[Contender],
    say: Say,
) -> Iterator[Result | list[ContenderResult]]:
    """Measure the rows of one world, and last those of other libraries; processes take turns with each row."""
    check = bool(args.check)
    if contenders and layout.nodes > 1:
        remark = partial(_remark, say)
        yield from measure_in_turn(world, how, layout, contenders, check=check, algorithm=args.algorithm, say=remark)
        return
    yield from measure_cases(world, how, layout, check=check, algorithm=args.algorithm)
    yield list(_measure_contenders(contenders, Assignment(cases=world, sampling=how, check=check), say))


def _remark(say: Say, reason: str) -> None:
    say(columns.remark(reason))


def _measure_contenders(contenders: Iterable[Contender], assignment: Assignment, say: Say) -> Iterator[ContenderResult]:
    for contender in contenders:
        try:
            yield measure_contender(contender, assignment)
        except ContenderUnavailableError as reason:
            say(columns.remark(str(reason)))


def _compare(args: argparse.Namespace, compared: comparison.Comparison) -> int:
    """Measure each operation without what is compared, then with it."""
    how, [without, with_it] = sampling(args), layouts(args)
    worlds = comparison.worlds(args)
    jsonfile.check_path(args.json)
    check_memory(worlds, _MEMORY_BYTES)
    say = _printer(args.json)
    say(comparison.title(worlds[0][0], how, replace(with_it, checksums=None)))
    say(compared.heading)
    pairs = []
    for world in worlds:
        for pair in comparison.measure(world, how, without, with_it, check=bool(args.check)):
            pairs.append(pair)
            say(compared.line(pair))
    rows = [row for pair in pairs for row in pair]
    say(columns.summary(rows))
    told = {name: jsonfile.measured_rows([pair[side] for pair in pairs]) for side, name in enumerate(compared.keys)}
    told_all = _write(args.json, how, {"layout": asdict(with_it), **told})
    return _WRONG_EXIT if not told_all or any(row.wrong for row in rows) else 0


def _printer(json_path: str | None) -> Say:
    """Return what prints a line at once, into pipes too; nothing may come between the JSON on stdout."""
    return (lambda text: None) if json_path == "-" else (lambda text: print(text, flush=True))


def _write(path: str | None, how: Sampling, parts: dict[str, object]) -> bool:
    return path is None or jsonfile.write(jsonfile.document(how, parts), path)
