"""`overlap test`: run a program of `torch.distributed` with many ranks in this process, seed after seed."""

from __future__ import annotations

import argparse
import faulthandler
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from transports.patience import usable_cores

from ..settings import Option
from ..units import parse_count, parse_yes_no
from .options import add_options, shared_option
from .output import print_page_or_json
from .parser import Parser
from .program import find_module_spec

if TYPE_CHECKING:
    from ..testing.run import Run
    from ..testing.running import Setting

# A program that holds Python's lock has that many seconds beyond --timeout, so that a verdict can come first.
_LOCKED_S = 5.0

DESCRIPTION = """\
Run an unchanged PyTorch program with many ranks in this process, in virtual time, once for each seed.

A seed decides how fast the ranks are and in which order they take turns, and which faults happen. The first seed that
fails is made smaller and explained: ranks, operations, lines.
"""

EPILOG = """\
examples:
  overlap test train.py --ranks 8 --seeds 200 --same
  overlap test train.py --ranks 4 --faults die,late
  overlap test train.py --ranks 2 --faults "die(rank=1, at=3)" -- --steps 5
"""


OPTIONS = {
    "ranks": shared_option("ranks", "default: 2"),
    "seeds": Option(read=parse_count, metavar="N", help="how many seeds; default: 1"),
    "seed": shared_option("seed", "the first one; 0 disturbs nothing; default: 0"),
    "cluster": shared_option("cluster", "whose wires are modelled; default: local"),
    "faults": Option(read=str, metavar="WHICH", help="kinds of faults that seeds draw, or faults as data"),
    "same": Option(read=parse_yes_no, help="fail unless all ranks end with the same weights"),
    "same_updates": Option(read=parse_yes_no, help="fail unless all ranks have the same weights after each update"),
    "as_one": Option(read=parse_yes_no, help="compare gradients with those of one rank on the joined batch"),
    "json": shared_option("json"),
    "timeout": shared_option("timeout_s", "of real time, for a run; default: 60"),
}


def add_arguments(parser: Parser) -> None:
    """Declare the command line."""
    parser.doubles_separator = True
    parser.usage = f"{parser.prog} [options] (SCRIPT | -m MODULE) [options] [-- ARGS ...]"
    _add_test_options(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="run MODULE, as python -m does")
    parser.add_argument("program", metavar="SCRIPT", help="Python file")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the program, after `--`")


def _add_test_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, which may stand before the program and behind it."""
    add_options(parser, OPTIONS, usual=OPTIONS.keys() - {"same_updates", "timeout"})
    parser.set_defaults(ranks=2, seeds=1, seed=0, cluster="local", faults="", timeout=60.0)
    parser.add_argument("-v", "--verbose", action="store_true", help="show what the ranks print")


def _split_off_program_arguments(args: argparse.Namespace) -> list[str]:
    """Read the options that stand behind the program's name, and return the program's own arguments."""
    words = args.rest
    later = Parser("overlap test")
    _add_test_options(later)
    end = words.index("--") if "--" in words else len(words)
    # the separator itself is no argument: it stands at the end of the options, once or twice
    program_words = [word for number, word in enumerate(words[end:]) if number > 1 or word != "--"]
    _, unknown = later.parse_known_args(words[:end], args)
    if unknown:
        last = shlex.join([*unknown, *program_words])
        later.error(
            f"unrecognized arguments: {' '.join(unknown)}; if they are the program's, end the line with -- {last}"
        )
    return program_words


def main(args: argparse.Namespace) -> int:
    """Run the command, and return 1 if a seed fails."""
    from ..testing import Ranks, RanksFailed

    arguments, began_s = _split_off_program_arguments(args), time.perf_counter()
    path, package = args.program, None
    if args.module:
        sys.path.insert(0, os.getcwd())
        spec = find_module_spec(args.program, "test")
        path, package = spec.origin, spec.parent
    try:
        with _ending_if_locked(args.timeout + _LOCKED_S):
            run = Ranks(repeating=partial(_repeat_command, ["-m", args.program] if args.module else None)).program(
                path, arguments, package=package, ranks=args.ranks, seeds=args.seeds, seed=args.seed,
                cluster=args.cluster, faults=args.faults or (), as_one=args.as_one, real_timeout_s=args.timeout,
            )  # fmt: skip
    except RanksFailed as failed:
        run = failed.run
        lines = [f"{args.program} is wrong with {run.size} ranks, seed {run.seed}", str(failed)]
        print_page_or_json(args, partial(_json_document, args, run), lambda: lines)
        return 1
    problem = ""
    if (args.same or args.same_updates) and run.error is None:
        problem = run.same("model weights after each update" if args.same_updates else "model weights").problem
    took_s = time.perf_counter() - began_s
    print_page_or_json(
        args, partial(_json_document, args, run, problem), partial(_page_lines, args, run, problem, took_s)
    )
    return int(bool(problem))


def _page_lines(args: argparse.Namespace, run: Run, problem: str, took_s: float) -> Iterator[str]:
    """Yield the page of a run in which no rank has failed. `problem` is a difference between ranks, or "".

    `took_s` is the real time of all seeds.
    """
    if args.verbose:
        for rank, text in enumerate(run.output):
            yield from (f"[r{rank}] {line}" for line in text.splitlines())
    if problem:
        yield f"{args.program} is wrong with {run.size} ranks: {problem}"
        return
    seeds = f"{args.seeds} seeds" if args.seeds > 1 else "1 seed"
    yield (
        f"{args.program} is well with {run.size} ranks and {seeds}: {len(run.record.issues)} operations, "
        f"{run.exposed:.0%} of the time exposed, {run.sent_bytes:,} bytes sent by a rank ({took_s:.1f} s)"
    )
    if run.as_one:
        yield str(run.as_one)
    if args.faults:
        ended = f", and the run ended so: {run.verdict}" if run.verdict is not None else ""
        yield run.tried or f"{', '.join(map(str, run.faults))} happened{ended}"


def _json_document(args: argparse.Namespace, run: Run, problem: str = "") -> dict[str, object]:
    """Return a run for JSON; `problem` is a difference between ranks, or ""."""
    return {
        "program": args.program, "ranks": run.size, "seed": run.seed, "verdicts": list(map(asdict, run.verdicts)),
        "as_one": run.as_one, "problem": problem, "operations": len(run.record.issues), "exposed": run.exposed,
        "sent_bytes": run.sent_bytes, "repeat": run.line,
    }  # fmt: skip


@contextmanager
def _ending_if_locked(seconds: float) -> Iterator[None]:
    """End the process, with the lines at which its threads are, if no Python code runs for `seconds`.

    That is so where a program waits in C without giving back Python's global lock: only a thread of C can act then. It
    cannot read how long this process waits for a processor, so the time is longer by the load of the host.
    """
    over = threading.Event()

    def postpone_end() -> None:
        """Postpone the end by `seconds` once a second, as long as Python code can run."""
        while not over.wait(1.0):
            crowding = max(1.0, os.getloadavg()[0] / len(usable_cores()))
            faulthandler.dump_traceback_later(crowding * seconds, exit=True, file=2)  # sys.stderr may be a rank's
        faulthandler.cancel_dump_traceback_later()

    thread = threading.Thread(target=postpone_end, name="overlap hold off", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _repeat_command(
    module: Sequence[str] | None, path: str | os.PathLike[str], args: Sequence[str], setting: Setting
) -> str:
    """Return the command line that repeats a run; `module` has the words of a module, or is None for `path`."""
    words = ["overlap", "test", *(module or [os.fspath(path)]), "--ranks", str(setting.ranks)]
    words += ["--cluster", str(setting.cluster)] if setting.cluster != "local" else []
    words += ["--seed", str(setting.seed)] if setting.seed else []
    words += ["--as-one"] if setting.as_one else []
    words += ["--faults", ", ".join(map(str, setting.faults))] if setting.faults else []
    words += (
        ["--timeout", f"{setting.real_timeout_s:g}"] if setting.real_timeout_s != type(setting)().real_timeout_s else []
    )
    return shlex.join([*words, *(["--", *args] if args else [])])
