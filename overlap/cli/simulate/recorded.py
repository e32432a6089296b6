"""`overlap simulate FILE ...`: makes a program of recorded traces."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from topology import TopologyError

from ... import Virtual, run
from ...errors import RankFailedError, UsageError
from ...planning.recorded import Growth, Tape, growth_of, play, tape_of
from ...runtime.rank import Rank
from ...timeline.files.merge import merged
from ...timeline.files.tracefile import read_trace
from ...units import format_ns, wrapped
from ..output import field
from ..pace import pace
from ..program import Program

_ENDINGS = (".json", ".json.gz", ".et", ".et.gz")
_LOOKED_AT = 256
"""Moves of a rank between two looks at the clock."""
_FACTOR = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)x")


def add_recorded(parser: argparse.ArgumentParser) -> None:
    """Add the options of a trace."""
    of = parser.add_argument_group("a trace instead of a program: FILE ..., those of all ranks")
    of.add_argument("--compute", metavar="F", help="computes take F times as long as recorded, such as 0.5x")
    of.add_argument(
        "--grow", metavar="NAME,...", help="groups with more ranks on a larger cluster; default: dp, fsdp, data, or all"
    )


def is_recorded(args: argparse.Namespace) -> bool:
    """Return whether the command line names traces instead of a program.

    Raises:
        UsageError: If options of a trace are given without one.
    """
    if args.script is not None and args.script.endswith(_ENDINGS):
        return True
    for option in ("compute", "grow"):
        if getattr(args, option) is not None:
            raise UsageError(f"--{option}: only with a trace, FILE {' or '.join(_ENDINGS[::2])}, as the program")
    return False


def recorded(args: argparse.Namespace) -> Program:
    """Return a program that repeats the traces.

    Raises:
        UsageError: If one cannot be read or is not of one run, or an option cannot be meant.
    """
    if options := [word for word in args.args if word.startswith("-")]:
        raise UsageError(f"{options[0]}: options come before the trace files")
    factor, names = _factor(args.compute), [name.strip() for name in args.grow.split(",")] if args.grow else []
    files = [args.script, *args.args]
    tape = tape_of(merged([read_trace(file) for file in files]))

    def program() -> dict[str, object]:
        total = done = 0

        async def main(rank: Rank) -> None:
            growth = _laid(tape, rank.world_size, names, laid)
            nonlocal total
            total = total or sum(len(tape.moves[growth.like(each)]) for each in range(rank.world_size))
            await play(rank, tape, growth, factor, moved=moved)

        def moved() -> None:
            nonlocal done
            done += 1
            if not done % _LOOKED_AT:
                tell(done, total, "simulating the operations of all ranks")

        laid: dict[int, Growth] = {}
        try:
            with pace() as tell:
                run(main, ranks=tape.world_size, cluster=tape.cluster or "local", clock=Virtual(shapes_only=True))
        except RankFailedError as error:
            if isinstance(error.cause, UsageError | TopologyError):
                raise error.cause from None  # not the fault of a rank
            raise
        for growth in laid.values():
            print("\n".join(_described(files, tape, growth, factor)))
        return {}

    return program


def _laid(tape: Tape, ranks: int, names: Sequence[str], known: dict[int, Growth]) -> Growth:
    if ranks not in known:
        known[ranks] = growth_of(tape, ranks, names)
    return known[ranks]


def _factor(text: str | None) -> float:
    match = _FACTOR.fullmatch(text or "1x")
    if match is None:
        raise UsageError(f"--compute: {text!r} is not a factor; write a number and x, as in 2x or 0.5x")
    return float(match[1])


def _described(files: Sequence[str], tape: Tape, growth: Growth, factor: float) -> list[str]:
    """Return in words what was recorded, what the program does, and what is not known."""
    moves = [move for each in tape.moves.values() for move in each]
    computes, operations = (sum(m.kind in kinds for m in moves) for kinds in (("compute",), ("collective", "message")))
    several = f" and {len(files) - 1} more" if len(files) > 1 else ""
    where = f" of {tape.cluster}" if tape.cluster else ""
    step = f"{tape.steps} steps, the median one" if tape.steps else "the whole of it"
    some = "" if len(tape.moves) == tape.world_size else f" ({len(tape.moves)} recorded)"
    ranks = "rank" if tape.world_size == 1 else "ranks"
    lines = wrapped(
        f"{files[0]}{several}: {tape.world_size} {ranks}{some}{where}, {step} {format_ns(tape.step_ns)}; {computes} "
        f"computes and {operations} operations of all ranks",
        rest="  ",
    )
    taken = "what was recorded" if factor == 1 else f"{factor:g} times what was recorded"
    told = f"computes take {taken}; {_grown(growth)}; algorithms are chosen anew"
    lines += field("as a program", told)
    if growth.ranks != tape.world_size:
        lines += field("not known", "which computes more ranks would share, such as the update of ZeRO: they stay")
    for note in tape.notes:
        lines += field("not known", note)
    return lines


def _grown(growth: Growth) -> str:
    if growth.ranks == growth.recorded:
        return "groups are those of the trace"
    names = ", ".join(sorted(growth.names)) or "world"
    become = f"groups {names} of {growth.degree} ranks have {growth.grown}" if growth.degree > 1 else (
        f"{growth.ranks / growth.recorded:g} times all ranks, side by side, share {names}"
    )  # fmt: skip
    return f"{become}, all others keep their size"
