"""The command `python -m tests.benchmarks.versus`: the options of `overlap bench`, and what to compare."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

from overlap import OverlapError, UsageError
from overlap.cli import bench
from overlap.cli.bench.cases import Case, list_cases
from overlap.cli.bench.measuring import COLUMNS, Result, format_table_number, json_rows, table_row
from overlap.cli.bench.sampling import Sampling
from overlap.cli.options import add_options
from overlap.cli.output import output_path
from tests.benchmarks.figures import over

from . import comparison
from .assignment import AssignmentInTurn
from .contenders import Contender, ContenderResult, ContenderUnavailableError, contenders_named, measure_contender
from .layout import OPTIONS, ProcessLayout, layout, measure_cases
from .report import finish, place_of, printer, remark, summary, title
from .turns import measure_in_turn

_DESCRIPTION = """\
Measure an operation on our ranks and through other libraries (--vs gloo,mpi), in place where all can, or with a setting
off and on, side by side (--compare peer-direct, --compare checksums). All other options are those of `overlap bench`.

Without OP, --compare peer-direct measures all_reduce, all_gather and reduce_scatter at 32 MB.
"""

Say = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print each line as soon as it is known, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.versus")
    add_arguments(parser)
    try:
        return _measure(parser.parse_args(argv))
    except OverlapError as error:
        print(f"versus: {error}", file=sys.stderr)
        return 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options of the command to its parser."""
    bench.add_arguments(parser)
    operation = next(action for action in parser._actions if action.dest == "operation")
    operation.nargs, operation.required = "?", False
    add_options(parser, OPTIONS)
    parser.description, parser.epilog = _DESCRIPTION, None
    parser.add_argument("--vs", metavar="PEERS", help="libraries to measure too: gloo, mpi")
    settings = [one.option for one in comparison.COMPARISONS]
    parser.add_argument("--json-file", metavar="FILE", help="write the result as JSON there, too")
    parser.add_argument("--compare", choices=settings, help="setting to compare, off and on")


def _measure(args: argparse.Namespace) -> int:
    args.json_file = output_path(args.json_file, option="--json-file")
    compared = comparison.chosen(args)
    if compared is not None:
        return _compare(args, compared)
    if args.operation is None or args.vs is None:
        flags = ", ".join(f"--compare {one.option}" for one in comparison.COMPARISONS)
        raise UsageError(f"name the operation and --vs, or {flags}")
    return _measure_beside(args)


def _measure_beside(args: argparse.Namespace) -> int:
    """Measure a collective over its sizes on our ranks, and over the same sizes on those of other libraries."""
    worlds = [[_in_place(case) for case in world] for world in list_cases(args)]
    how, where, contenders = (
        Sampling(iters=args.iters, warmup=args.warmup_iters),
        layout(args),
        contenders_named(args.vs),
    )
    say = printer(args)
    first = worlds[0][0]
    text = f"{first.operation.name} of {first.dtype.name}, {place_of(first)}, {where.describe()}"
    say(title(text, how, f"GB is 10^9 bytes; busbw = algbw * {first.operation.kind.traits.busbw_factor} with n ranks"))
    say(COLUMNS)
    rows: list[Result] = []
    others: list[dict[str, object]] = []
    for world in worlds:
        ours: list[Result] = []
        results: list[ContenderResult] = []
        for each in _measured(args, world, how, where, contenders, say):
            if isinstance(each, Result):
                ours.append(each)
                say(table_row(each))
            else:
                results += each
        if results:
            say(beside(ours, results))
        rows += ours
        others += contender_rows(world[0].ranks, results)
    say(summary(rows))
    return finish(args, how, {"layout": asdict(where), "rows": json_rows(rows), "peers": others}, rows)


def _in_place(case: Case) -> Case:
    return replace(case, in_place=case.operation.in_place)


def _measured(
    args: argparse.Namespace,
    world: Sequence[Case],
    how: Sampling,
    layout: ProcessLayout,
    contenders: Sequence[Contender],
    say: Say,
) -> Iterator[Result | list[ContenderResult]]:
    """Measure the rows of one world, and last those of other libraries; processes take turns with each row."""
    if contenders and layout.processes > 1:
        remarks = partial(_remark, say)
        yield from measure_in_turn(world, how, layout, contenders, algorithm=args.algorithm, say=remarks)
        return
    yield from measure_cases(world, how, layout, algorithm=args.algorithm)
    yield list(_measure_contenders(contenders, AssignmentInTurn(cases=world, sampling=how), say))


def _remark(say: Say, reason: str) -> None:
    say(remark(reason))


def _measure_contenders(
    contenders: Iterable[Contender], assignment: AssignmentInTurn, say: Say
) -> Iterator[ContenderResult]:
    for contender in contenders:
        try:
            yield measure_contender(contender, assignment)
        except ContenderUnavailableError as reason:
            say(remark(str(reason)))


def _compare(args: argparse.Namespace, compared: comparison.Comparison) -> int:
    """Measure each operation with the setting off, then on."""
    worlds, how = comparison.worlds(args), Sampling(iters=args.iters, warmup=args.warmup_iters)
    without, with_it = comparison.layouts(args, compared)
    say = printer(args)
    say(comparison.title(worlds[0][0], how, replace(with_it, checksums=None)))
    say(compared.heading)
    pairs = []
    for world in worlds:
        for pair in comparison.measure(world, how, without, with_it):
            pairs.append(pair)
            say(compared.line(pair))
    rows = [each for pair in pairs for each in pair]
    say(summary(rows))
    told = {name: json_rows([pair[side] for pair in pairs]) for side, name in enumerate(compared.keys)}
    return finish(args, how, {"layout": asdict(with_it), **told}, rows)


# -- tables of libraries -----------------------------------------------------------------------------------------


def beside(ours: Sequence[Result], others: Sequence[ContenderResult]) -> str:
    """Return the table of ours against libraries that measured the same rows: times, and how many times faster we are.

    That is also how many times our bandwidth is larger.
    """
    names = ["size(B)", "ranks", "overlap(us)"]
    for other in others:
        names += [f"{other.name}(us)", f"{other.name}/overlap"]
    lines = [remark(f"{other.name} is {other.version}: processes, same sizes, same timing") for other in others]
    lines.append("".join(f"{name:>{_width(name)}}" for name in names))
    for index, one in enumerate(ours):
        values = [str(one.case.size_bytes), str(one.case.ranks), format_table_number(one.times.median_ns / 1e3)]
        for other in others:
            times = other.times[index]
            values += [format_table_number(times.median_ns / 1e3), f"{over(times, one.times):.2f}x"]
        lines.append("".join(f"{value:>{_width(name)}}" for name, value in zip(names, values, strict=True)))
    return "\n".join(lines)


def _width(name: str) -> int:
    return max(len(name), 5 if name == "ranks" else 8) + 2


def contender_rows(ranks: int, results: Sequence[ContenderResult]) -> list[dict[str, object]]:
    """Tell what other libraries measured for the rows of one size of the world."""
    return [
        {
            "name": result.name,
            "version": result.version,
            "ranks": ranks,
            "rows": [asdict(times) | {"wrong": wrong} for times, wrong in zip(result.times, result.wrong, strict=True)],
        }
        for result in results
    ]


if __name__ == "__main__":
    sys.exit(main())
