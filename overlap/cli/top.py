"""`overlap top`: the jobs that run on this host, and the work of a running job's ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from statistics import median
from time import localtime, process_time, sleep, strftime, time_ns

import numpy as np
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import UsageError
from ..explain.ranks import LateRank, late_ranks
from ..explain.spans import pieces_of_spans
from ..flight.folder import ENDING, default_folder, is_alive
from ..flight.reading import Flight, OpenRecord, RankTable
from ..flight.records import world_key
from ..flight.spans import step_length_ns, timeline_of_records
from ..settings import Option
from ..timeline.draw.folding import fold_alike_ranks
from ..timeline.draw.theme import COMPUTE, EXPOSED, HIDDEN, WAITING
from ..timeline.measure.activity import Activity
from ..timeline.measure.metrics import Breakdown, measure_windows
from ..timeline.measure.steps import RankWindow
from ..timeline.spans import Timeline
from ..units import (
    format_bytes,
    format_figure,
    format_ns,
    format_s,
    format_table,
    parse_number,
    parse_yes_no,
    table_unit,
)
from .console import Console
from .options import add_options

EVERY_S = 1.0
ON_PAPER_S = 10.0  # time between two lines if the output is no terminal
MOST_SHARE = 0.01
"""Largest share of one processor: a look that takes longer is followed by a longer pause."""
_END_S = 0.2  # longest delay until the end of the job is noticed
_LINES_BESIDE_RANKS = 5  # lines of the picture without those of ranks: title, two lines, head, the prompt
_BAR_CELLS = 12
_WAITING_SHARE = 0.01
"""Share of all ranks' time: if less of it is waiting for late ranks, no rank is named."""

DESCRIPTION = """\
Without JOB, list the jobs of this user that run on this host. With JOB, show the work of its ranks since the last look,
as `overlap timeline` measures it, the time of a step, the rank that others wait for, and bytes in flight. The command
reads the flight records of this host's processes, which costs the job nothing; on another host, run it there (ssh HOST
overlap top). A look takes at most a hundredth of a processor. Ctrl-C ends it, the job runs on.
"""

EPILOG = """\
examples:
  overlap top                       the jobs here
  overlap top 5f2c0d1e              a job, or the id of one of its processes
  overlap top train.py              the job of that program
  ssh -t node1 overlap top          the processes of a job on another host
  overlap top --every 5 | tee log   a line every 5 seconds, of the newest job
"""

OPTIONS = {
    "every": Option(read=parse_number, metavar="S", help="look every S seconds; default: 1, or 10 in a pipe"),
    "once": Option(read=parse_yes_no, help="look once"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument(
        "job", nargs="?", metavar="JOB",
        help="name of a job, its program, or id of a process; default: with --every or --once the newest job",
    )  # fmt: skip
    add_options(parser, OPTIONS)


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        UsageError: If there is no such job, or an option has an impossible value.
    """
    if args.every is not None and not 0.1 <= args.every <= 3600:
        raise UsageError(f"--every: expected 0.1 to 3600 s, got {args.every:g}")
    if args.job is None and not args.once and args.every is None:
        _print_worlds()
        return 0
    if args.job is not None and ":" in args.job:
        host = args.job.rpartition(":")[0]
        expected = f"JOB: expected the name of a job on this host, got the address {args.job!r}"
        raise UsageError(f"{expected}; its ranks are seen on the host where they run: ssh {host} overlap top")
    world, console = find_world(args.job), Console(highlight=False, markup=False, emoji=False)
    drawn = console.is_terminal and not console.is_dumb_terminal
    looks = Looks(world, every_s=args.every or (EVERY_S if drawn or args.once else ON_PAPER_S))
    try:
        if args.once:
            console.print(draw_window(looks.look_now(), world, console))
        elif drawn:
            with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
                while world.lives:
                    live.update(draw_window(looks.look_now(), world, console), refresh=True)
                    looks.wait_for_next()
        else:
            while looks.wait_for_next():
                print(f"overlap: {strftime('%H:%M:%S', localtime())} {summary_line(looks.look_now())}", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        world.close()
    return 0


# -- looks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures:
    """Figures of the ranks in a window: those of `overlap timeline`."""

    rows: Sequence[Breakdown]  # by rank
    late: Sequence[LateRank]  # ranks that others waited for, the most awaited first
    step: int | None  # the step of the rank that is furthest behind; None before the first
    step_ns: dict[int, int]  # duration of a step of each rank that has ended two
    in_flight_bytes: dict[int, int]  # of operations that have not ended
    doing: dict[int, str]  # the newest compute that runs, or else the oldest operation that has not ended


class Looks:
    """Looks at a world, each on the time since the last.

    Args:
        world: The world.
        every_s: How often, if that is cheap enough; each look covers that time.
    """

    def __init__(self, world: RunningWorld, *, every_s: float) -> None:
        self._world, self._every_s, self._spent_s = world, every_s, 0.0

    def look_now(self) -> WindowFigures:
        """Return the figures of the ranks until now."""
        start_s, now_ns = process_time(), time_ns()
        tables = {table.rank: table for record in self._world.processes for table in record.read_ranks()}
        timeline = timeline_of_records(list(tables.values()), now_ns, self._world.start.world_size)
        found = measure_window(timeline, tables, (now_ns - round(self._every_s * 1e9), now_ns))
        self._spent_s = process_time() - start_s
        return found

    def wait_for_next(self) -> bool:
        """Wait until the next look is due, or the world has ended; return whether the world still runs."""
        left_s = max(self._every_s, self._spent_s / MOST_SHARE)
        while self._world.lives and left_s > 0:
            sleep(min(left_s, _END_S))
            left_s -= _END_S
        return self._world.lives


def measure_window(timeline: Timeline, tables: dict[int, RankTable], window: tuple[int, int]) -> WindowFigures:
    """Return the figures of ranks in a window.

    Args:
        timeline: Timeline of the flight records, in which spans that have not ended end at the end of the window.
        tables: The flight record of each rank, by rank.
        window: Begin and end of the window, in nanoseconds; the end is the present time.
    """
    begin_ns, now_ns = window
    columns, begins_ns, in_flight, doing = timeline.columns, dict[int, int](), dict[int, int](), dict[int, str]()
    for rank, rows in columns.rows_by_rank(columns.rank >= 0).items():
        # Of a rank whose earlier operations are not known, the time since its oldest one counts.
        begins_ns[rank] = max(begin_ns, int(columns.end_ns[rows].min())) if tables[rank].cut else begin_ns
        under_way = rows[(columns.end_ns[rows] == now_ns) & (columns.start_ns[rows] < now_ns)]
        operations, computes = (under_way[columns.is_kind(kind)[under_way]] for kind in ("comm", "compute"))
        # The rank does its last compute, or else its oldest operation.
        candidates = [*computes[::-1], *operations[np.argsort(columns.called_ns[operations])]]
        in_flight[rank] = int(columns.nbytes[under_way].sum())
        doing[rank] = columns.texts[columns.name[candidates[0]]] if candidates and not tables[rank].left else ""
    windows = [RankWindow(rank, None, start_ns, now_ns) for rank, start_ns in begins_ns.items()]
    activity = Activity(timeline, windows) if windows else None
    return WindowFigures(
        rows=measure_windows(activity) if activity else [],
        late=late_ranks(pieces_of_spans(activity), None) if activity else [],
        step=min((table.last_step for table in tables.values() if table.last_step >= 0), default=None),
        in_flight_bytes=in_flight, doing=doing,
        step_ns={rank: ns for rank, table in tables.items() if (ns := step_length_ns(table)) is not None},
    )  # fmt: skip


# -- pictures ----------------------------------------------------------------------------------------------------------


def summary_line(look: WindowFigures) -> str:
    """Return a look in one line: the step, shares of the ranks' time, and the rank that others waited for most."""

    def total_ns(name: str) -> int:
        return sum(getattr(row, f"{name}_ns") for row in look.rows)

    names = ("compute", "exposed", "waiting", "wire")
    shares = {name: f"{total_ns(name) / (total_ns('wall') or 1):.0%}" for name in names}
    step = "no step yet" if look.step is None else f"step {look.step}"
    step += f", {format_ns(median(look.step_ns.values()))}" if look.step_ns else ""
    hidden = f" hidden {total_ns('overlapped') / total_ns('comm'):.0%}," if total_ns("comm") else ""
    text = f"{step}: compute {shares['compute']},{hidden} exposed {shares['exposed']}: "
    text += f"{shares['waiting']} waiting, {shares['wire']} wire"
    known = [late for late in look.late if late.rank is not None]
    if not known or (waited_ns := sum(late.waited_ns for late in known)) <= _WAITING_SHARE * total_ns("wall"):
        return text
    return f"{text}; waited for: {known[0]}, {known[0].waited_ns / waited_ns:.0%} of all waiting"


def draw_window(look: WindowFigures, world: RunningWorld, console: Console) -> Group:
    """Return the figures of the last period of time as text.

    The lines are the program, `summary_line`, and a table with a row for each rank or set of alike ranks.

    Args:
        look: Figures of the window.
        world: The world.
        console: Where it is shown.
    """
    start, program = world.start, os.path.basename(world.start.script) or "a program"
    title = (
        f"{program}: {start.world_size} ranks in {world.process_count_text}, {format_s(world.age_s)}; job {start.job}"
    )
    lines = [Text(title, style="bold"), *map(Text, summary_line(look).split("; ", 1))]
    if not look.rows:
        return Group(*lines)
    unit, unit_ns = table_unit(max(row.wall_ns for row in look.rows))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (f"rank/{unit}", "", "compute", "hidden", "wait", "wire", "step", "flight", "at"):
        table.add_column(name, justify="left" if name in ("", "at") else "right", no_wrap=name != "at")
    late_ns = {late.rank: late.waited_ns for late in look.late if late.rank is not None}
    rows = {row.rank: row for row in look.rows}
    room = console.height - _LINES_BESIDE_RANKS if console.is_terminal else len(rows)
    for each in fold_alike_ranks(look.rows, late_ns, room=max(room, 1)):
        row, rank = rows[each.drawn], each.drawn
        times = (row.compute_ns, row.overlapped_ns, row.waiting_ns, row.wire_ns)
        step = format_ns(look.step_ns[rank]) if rank in look.step_ns else ""
        flight = format_bytes(look.in_flight_bytes[rank]) if look.in_flight_bytes.get(rank) else ""
        cells = [*(format_figure(ns, unit_ns) for ns in times), step, flight, look.doing.get(rank, "")]
        table.add_row(each.label, _bar_text(row, plain=console.plain), *cells)
    return Group(*lines, table)


def _bar_text(row: Breakdown, *, plain: bool) -> Text:
    """Return the window of a rank as cells: compute alone and with hidden communication, waiting, and the wire."""
    text, done_ns, cells = Text(), 0, 0
    parts = ((row.compute_only_ns, "█#", COMPUTE), (row.overlapped_ns, "▄=", HIDDEN), (row.waiting_ns, "░~", WAITING))
    for part_ns, glyphs, style in (*parts, (row.wire_ns, "█!", EXPOSED), (row.wall_ns, "  ", "")):
        done_ns = min(done_ns + part_ns, row.wall_ns)
        upto = round(done_ns * _BAR_CELLS / max(row.wall_ns, 1))
        # False is the first glyph, True the second
        text.append(glyphs[plain] * (upto - cells), style)
        cells = upto
    return text


# -- worlds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunningWorld:
    """A world, as far as its processes run on this host."""

    processes: Sequence[OpenRecord]  # Their records, by their number in the world

    @property
    def start(self) -> Flight:
        """The start of the record of its first process: the job, its program, and the sizes of the world."""
        return self.processes[0].start

    @property
    def process_count_text(self) -> str:
        """Number of processes, and of processes on this host, in words."""
        count, here = self.start.processes, len(self.processes)
        return f"{count} process{'es' * (count != 1)}" + f", {here} of them here" * (here < count)

    @property
    def age_s(self) -> float:
        """Seconds since the start of the world."""
        return (time_ns() - min(each.start.started_ns for each in self.processes)) / 1e9

    @property
    def lives(self) -> bool:
        """Whether any of its processes on this host still runs; a process that ends well removes its record."""
        return any(os.path.exists(each.path) and _is_running(each) for each in self.processes)

    @property
    def pids(self) -> list[str]:
        """Process ids of the processes on this host."""
        return [str(each.start.pid) for each in self.processes]

    def runs_program(self, program: str) -> bool:
        """Whether a path, or the end of one, names the program of this world."""
        start, named = self.start, PurePath(program).parts
        path = PurePath(os.path.normpath(PurePath(start.folder, start.script))).parts
        return bool(named) and path[-len(named) :] == named

    def row_cells(self) -> list[str]:
        """Return the cells of the world's row in the list; the step is that of the slowest rank."""
        count, here = self.start.processes, len(self.processes)
        steps = [table.last_step for record in self.processes for table in record.read_ranks() if table.last_step >= 0]
        facts = self.start.world_size, str(count) if here == count else f"{here} of {count}", min(steps, default="")
        return [self.start.job, self.start.script or "?", *map(str, facts), f"{self.age_s:.0f}", ", ".join(self.pids)]

    def close(self) -> None:
        """Close the records of its processes."""
        for each in self.processes:
            each.close()


_HEADS = ("job", "program", "ranks", "processes", "step", "for/s", "process ids")


def _print_worlds() -> None:
    """Print all worlds of the user on this host as a table."""
    rows = []
    for world in find_running_worlds():
        rows.append(world.row_cells())
        world.close()
    if not rows:
        print("no world of yours runs on this host")
        return
    print("\n".join(format_table(_HEADS, rows, width=Console().width, words=[0, 1, 6], whole=[0])))


def find_running_worlds() -> list[RunningWorld]:
    """Return the worlds that run here, the newest first; the caller closes them.

    Their records are in the default folder, which has links to those in folders of `--flight-dir`, and in
    OVERLAP_FLIGHT_DIR.
    """
    records: dict[tuple[object, ...], list[OpenRecord]] = {}
    folders = [default_folder(), *([Path(named)] if (named := os.environ.get("OVERLAP_FLIGHT_DIR")) else [])]
    for path in sorted({path.resolve() for each in folders for path in each.glob(f"*{ENDING}") if path.is_file()}):
        with suppress(UsageError):  # it is just being made or removed, or it is of another version
            record = OpenRecord(path)
            if _is_running(record):
                records.setdefault(world_key(record.start), []).append(record)
            else:
                record.close()
    worlds = [RunningWorld(sorted(each, key=lambda one: one.start.process)) for each in records.values()]
    return sorted(worlds, key=lambda world: world.age_s)


def find_world(name: str | None) -> RunningWorld:
    """Return the running world whose job, process id or program is `name`, and close the other worlds.

    Args:
        name: The name; None: the newest world.

    Raises:
        UsageError: There is none, or the program has several.
    """
    worlds = find_running_worlds()
    fitting = [world for world in worlds if name in (None, world.start.job, *world.pids)]
    of_program = [] if fitting or name is None else [world for world in worlds if world.runs_program(name)]
    if len({world.start.job for world in of_program}) < 2:
        fitting += of_program
    for world in worlds:
        if world not in fitting[:1]:
            world.close()
    if fitting:
        return fitting[0]
    if of_program:
        jobs = ", ".join(
            f"{each.start.job} ({each.start.world_size} ranks, for {each.age_s:.0f} s)" for each in of_program
        )
        raise UsageError(f"JOB: {name!r} is the program of several running jobs, name one of them: {jobs}")
    if name is None:
        raise UsageError("no world of yours runs on this host; start one with `overlap run`")
    known = ", ".join(world.start.job for world in worlds) or "none"
    raise UsageError(f"JOB: {name!r} is no running job, program or process of one; running on this host: {known}")


def _is_running(record: OpenRecord) -> bool:
    """Whether the process of a record runs in the world of that record."""
    return not record.has_ended and is_alive(record.start.host, record.start.pid, record.start.born)
