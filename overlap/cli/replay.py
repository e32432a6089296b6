"""`overlap replay FILE ...`: repeats a recorded run as a program, on its cluster or another."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from topology import TopologyError

from .. import Virtual, run
from ..config import RunConfig, overriding
from ..errors import RankFailedError, UsageError
from ..planning.recorded import Growth, Move, Tape, classify_ranks, infer_tape, map_growth, play
from ..runtime.rank import Rank
from ..simulation import Alike
from ..timeline.files.merge import merged
from ..timeline.files.tracefile import read_trace
from ..timeline.measure.metrics import median_step
from ..timeline.replay.prediction import steps_around
from ..timeline.spans import Timeline
from ..units import format_ns, wrapped
from .output import field
from .pace import pace
from .parser import Parser
from .program import Program
from .simulate import add_simulation, simulate_command

_LOOKED_AT = 256
"""Moves of ranks between two looks at the clock."""
_MOVES_AT_MOST = 60_000
"""Moves of all ranks that run: they take 12 s on a core that adds 10 million numbers in Python in 0.5 s."""
_RANKS_PRICED = 100
"""Ranks of a collective whose price takes as long as a move, for each rank that runs."""
_FACTOR = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)x")


_DESCRIPTION = """\
Repeat a recorded run as a program on a modelled cluster, its own or another: traces of overlap run or simulate, or the
files of all ranks of PyTorch's profiler. Computes take the time that was recorded, operations that of the cluster.
"""

_EPILOG = """\
examples:
  overlap replay run.json --cluster "trn2.48xlarge x16" --compute 0.5x     on a larger cluster, of faster cores
  overlap replay rank0.json rank1.json --cluster p5.48xlarge --sweep nodes=1,2,4
"""


def fill(parser: Parser) -> None:
    """Add the description and the options of the command to its parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace file; those of all ranks")
    parser.add_argument("--compute", metavar="F", help="computes take F times as long as recorded, such as 0.5x")
    parser.add_argument(
        "--grow",
        metavar="NAME,...",
        help="groups with more ranks on a larger cluster; default: those of buckets",
    )
    add_simulation(parser)


def main(args: argparse.Namespace) -> int:
    """Repeat the run, print its step, and return the exit code.

    Raises:
        UsageError: If a trace cannot be read, or an option cannot be meant.
        TopologyError: If there is no such cluster, or it is too small.
    """
    return simulate_command(args, lambda point: replay_program(args), prints_pace=True)


def replay_program(args: argparse.Namespace) -> Program:
    """Return a program that repeats the traces.

    Raises:
        UsageError: If one cannot be read or is not of one run, or an option cannot be meant.
    """
    factor, names = _read_factor(args.compute), [name.strip() for name in args.grow.split(",")] if args.grow else []
    files = args.files
    recording = merged([read_trace(file) for file in files])
    timeline = _some_steps(recording, _MOVES_AT_MOST)
    run_and_tape = timeline, infer_tape(timeline)

    def program() -> dict[str, object]:
        """Play the moves of all ranks in virtual time, and print a summary; mistakes of the user are raised as such."""
        replays: list[_Replay] = []

        def revise(wanted: RunConfig) -> RunConfig:
            replays.append(_fit_to_cluster(*run_and_tape, wanted, names))
            return replays[-1].with_representatives(wanted)

        async def main(rank: Rank) -> None:
            await play(rank, replays[-1].tape, replays[-1].growth, factor, moved=count_move)

        done = 0

        def count_move() -> None:
            """Count a move of any rank, and print the progress after every `_LOOKED_AT` of them."""
            nonlocal done
            done += 1
            if not done % _LOOKED_AT:
                print_pace(done, replays[-1].moves, "simulating the operations of all ranks")

        tape = run_and_tape[1]
        try:
            with pace() as print_pace, overriding(revise=revise):
                run(main, ranks=tape.world_size, cluster=tape.cluster or "local", clock=Virtual(shapes_only=True))
        except RankFailedError as error:
            if isinstance(error.cause, UsageError | TopologyError):
                raise error.cause from None  # not the fault of a rank
            raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # what its ranks were doing is nothing of the user's
        print("\n".join(_summary_lines(files, recording, replays[-1], factor)))
        return {}

    return program


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replay:
    """A recorded run on the ranks of a cluster: its moves, its growth, and the classes of equal ranks."""

    tape: Tape  # Moves of the repeated steps
    growth: Growth  # Ranks of the replay for each rank of the tape
    # Class of each rank; ranks of a class behave alike, and two of them run. None: all ranks run.
    classes: Callable[[int], int] | None

    @property
    def simulated_ranks(self) -> tuple[int, ...]:
        """World ranks that run: all, or those that represent a class."""
        ranks = range(self.growth.ranks)
        return tuple(ranks) if self.classes is None else Alike.of(self.classes, len(ranks)).simulated

    @property
    def moves(self) -> int:
        """Number of computes, collectives and messages of all ranks that run."""
        return sum(len(self._rank_moves(rank)) for rank in self.simulated_ranks)

    @property
    def priced_moves(self) -> int:
        """Number of moves, where a collective of many ranks counts as several: its price takes longer than a move."""
        if self.classes is None:
            return self.moves
        summed = sum(move.kind == "collective" for rank in self.simulated_ranks for move in self._rank_moves(rank))
        return self.moves + summed * self.growth.ranks // _RANKS_PRICED

    def _rank_moves(self, rank: int) -> Sequence[Move]:
        return self.tape.moves[self.growth.recorded_rank(rank)]

    def with_representatives(self, wanted: RunConfig) -> RunConfig:
        """Return a configuration that simulates two ranks of each class, and infers the others."""
        if self.classes is None:
            return wanted
        return replace(wanted, virtual=replace(wanted.virtual or Virtual(), alike=self.classes))


def _fit_to_cluster(timeline: Timeline, tape: Tape, wanted: RunConfig, names: Sequence[str]) -> _Replay:
    """Place a run on a cluster; above the limit of moves, run two ranks of each class, and fewer steps if needed."""
    virtual = wanted.virtual or Virtual()
    growth = map_growth(tape, wanted.ranks or tape.world_size, names)
    all_of_it = _Replay(tape=tape, growth=growth, classes=None)
    if all_of_it.moves <= _MOVES_AT_MOST:
        return all_of_it
    free = virtual.shapes_only and not virtual.alike and virtual.conditions.calm and virtual.faults is None
    found = replace(all_of_it, classes=classify_ranks(tape, growth) if free else None)
    if found.priced_moves <= _MOVES_AT_MOST or virtual.alike:
        return found
    fewer = _some_steps(timeline, _MOVES_AT_MOST * len(timeline.spans) // found.priced_moves)
    return found if fewer is timeline else replace(found, tape=infer_tape(fewer))


def _some_steps(timeline: Timeline, most_spans: int) -> Timeline:
    """Return the steps around the median one, so many that they have at most `most_spans` spans; all if these fit."""
    if len(timeline.spans) <= most_spans:
        return timeline
    return steps_around(timeline, median_step(timeline), most_spans=most_spans, steps=len(timeline.steps()))


def _read_factor(text: str | None) -> float:
    """Return the factor of `--compute`, such as 2x; 1 without the option."""
    match = _FACTOR.fullmatch(text or "1x")
    if match is None:
        raise UsageError(f"--compute: {text!r} is not a factor; write a number and x, as in 2x or 0.5x")
    return float(match[1])


def _summary_lines(files: Sequence[str], recording: Timeline, replay: _Replay, factor: float) -> list[str]:
    """Return the lines about the recording, the program made from it, and unknown parts."""
    tape, growth, steps = replay.tape, replay.growth, len(recording.steps())
    moves = [move for moves_of_rank in tape.moves.values() for move in moves_of_rank]
    computes, operations = (sum(m.kind in kinds for m in moves) for kinds in (("compute",), ("collective", "message")))
    several = f" and {len(files) - 1} more" if len(files) > 1 else ""
    where = f" of {tape.cluster}" if tape.cluster else ""
    step = f"{tape.steps} steps, the median one" if tape.steps else "the whole of it"
    if tape.steps < steps:
        step = f"{tape.steps} of {steps} steps, the median one"
    some = "" if len(tape.moves) == tape.world_size else f" ({len(tape.moves)} recorded)"
    ranks = "rank" if tape.world_size == 1 else "ranks"
    lines = wrapped(
        f"{files[0]}{several}: {tape.world_size} {ranks}{some}{where}, {step} {format_ns(tape.step_ns)}; {computes} "
        f"computes and {operations} operations of all ranks",
        rest="  ",
    )
    taken = "what was recorded" if factor == 1 else f"{factor:g} times what was recorded"
    text = f"computes take {taken}; {_growth_text(growth)}; algorithms are chosen anew"
    lines += field("as a program", text)
    if growth.ranks != tape.world_size:
        lines += field("not known", "which computes more ranks would share, such as the update of ZeRO: they stay")
    if replay.classes is not None:
        simulated = len(replay.simulated_ranks)
        run_for = f"{simulated} of {growth.ranks} ranks run, two for all that are like one of the trace"
        lines += field("for all ranks", f"{run_for}; --alike {growth.ranks} lets each run")
    for note in tape.notes:
        lines += field("not known", note)
    return lines


def _growth_text(growth: Growth) -> str:
    """Return in words which groups of ranks have another size than in the trace."""
    if growth.ranks == growth.recorded:
        return "groups are those of the trace"
    names = ", ".join(sorted(growth.names)) or "world"
    become = f"groups {names} of {growth.degree} ranks have {growth.grown_size}" if growth.degree > 1 else (
        f"{growth.ranks / growth.recorded:g} times all ranks, side by side, share {names}"
    )  # fmt: skip
    return f"{become}, all others keep their size"
