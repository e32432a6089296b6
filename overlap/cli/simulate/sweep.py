"""Sweeps over settings: their points, the rows that come of them, and these as a table and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import product
from typing import Any

import topology

from ...errors import UsageError
from ...launch.report import EXIT_INTERRUPTED, report
from ...notice import write_stderr
from ...units import wrapped
from .page import describe
from .setting import LOCAL, PARAMETERS, read_parameter
from .simulation import SimulatedRun, Simulation, StepSummary

_BAR = 24  # cells of the longest bar, where there is room
_BAR_HEADING = "step time"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAxis:
    """One parameter and the values that it takes."""

    name: str  # Name as the user writes it
    parameter: str | None  # Its name as a parameter of the simulation; None if it is the program's
    texts: tuple[str, ...]  # The values, as the user writes them

    @classmethod
    def parse(cls, text: str) -> SweepAxis:
        """Read `NAME=V,V,...`.

        Raises:
            UsageError: If it is something else.
        """
        name, equals, values = text.partition("=")
        texts = tuple(value.strip() for value in values.split(","))
        if not name or not equals or not all(texts):
            raise UsageError(f"--sweep: expected NAME=V,V,... such as nodes=1,2,4, got {text!r}")
        if len(set(texts)) < len(texts):
            raise UsageError(f"--sweep: {text!r} has a value twice; name each value once")
        field = name.replace("-", "_")
        return cls(name=name, parameter=field if field in PARAMETERS else None, texts=texts)

    @property
    def option(self) -> str:
        """Argument that passes a value to the program: `--name=value`."""
        return self.name if self.name.startswith("-") else "--" + self.name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination of swept values."""

    texts: Mapping[str, str]  # The value on each axis, by its name
    values: Mapping[str, object]  # Values of parameters of the simulation, with the ones common to all points
    arguments: tuple[str, ...]  # For the program, after its own


def axes(texts: Sequence[str]) -> tuple[SweepAxis, ...]:
    """Read all axes of a sweep.

    Raises:
        UsageError: If one cannot be meant, or there are two of one parameter.
    """
    swept = tuple(map(SweepAxis.parse, texts))
    options = [axis.option for axis in swept]
    for axis in swept:
        if options.count(axis.option) > 1:
            raise UsageError(f"--sweep: {axis.name} is there twice; give all its values in one list")
    return swept


def points(swept: Sequence[SweepAxis], fixed: Mapping[str, object]) -> Iterator[Point]:
    """Yield every combination, the last axis first.

    Args:
        swept: The axes.
        fixed: Parameters of the simulation that are the same at all points, unless they are swept.

    Raises:
        UsageError: If a value cannot be meant, or the fixed cluster has one already.
    """
    _check_cluster_size(swept, str(fixed.get("cluster", LOCAL)))
    for texts in product(*(axis.texts for axis in swept)):
        chosen = list(zip(swept, texts, strict=True))
        values = {axis.parameter: read_parameter(axis.parameter, text) for axis, text in chosen if axis.parameter}
        yield Point(
            texts={axis.name: text for axis, text in chosen},
            values={**fixed, **values},
            arguments=tuple(word for axis, text in chosen if not axis.parameter for word in (axis.option, text)),
        )


def _check_cluster_size(swept: Sequence[SweepAxis], cluster: str) -> None:
    """Raise `UsageError` if the swept number of nodes or cores stands in the cluster's name too."""
    for axis in swept:
        for text in axis.texts if axis.name in ("nodes", "lnc") else ():
            size: Any = {axis.name: read_parameter(axis.name, text)}
            try:
                topology.cluster(cluster, **size)
            except topology.TopologyError as error:
                if "given twice" in str(error):
                    raise UsageError(f"--sweep: {error}; leave it out of --cluster {cluster!r}") from None


# -- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """Result of a point: its run, or the error of a run that failed."""

    point: Point  # The point
    run: SimulatedRun | None = None  # The last one of the program; None if it failed
    error: str | None = None  # Why it failed, in one line; None if it did not
    wall_s: float = 0.0  # Seconds of real time that it took; 0 if it failed

    @property
    def outcome(self) -> StepSummary | None:
        """Measures of the point's run; None if it failed."""
        return self.run.outcome if self.run else None


def sweep(points: Sequence[Point], run: Callable[[Point], Simulation]) -> tuple[list[SweepRow], bool]:
    """Run all points, with a progress bar on stderr if that is a terminal.

    Returns:
        The rows, and whether Ctrl-C came before all were done.
    """
    rows: list[SweepRow] = []
    try:
        with _progress_bar(len(points)) as advance:
            for point in points:
                advance(len(rows), " ".join(f"{name}={text}" for name, text in point.texts.items()))
                rows.append(_run_point(point, run))
    except KeyboardInterrupt:
        return rows, True
    return rows, False


def best(rows: Sequence[SweepRow]) -> SweepRow | None:
    """Return the first row with the highest throughput, or, if not all have one, with the shortest step.

    None if nothing can be compared: fewer than two points have an outcome, or all have the same.
    """
    done = [(row, row.outcome) for row in rows if row.outcome is not None]
    if len(done) < 2 or _are_all_equal([outcome for _, outcome in done]):
        return None
    if all(outcome.samples_per_s is not None for _, outcome in done):
        return max(done, key=lambda pair: pair[1].samples_per_s or 0.0)[0]
    return min(done, key=lambda pair: pair[1].step_ns)[0]


def _are_all_equal(outcomes: Sequence[StepSummary]) -> bool:
    return len({(outcome.step_ns, outcome.samples_per_s) for outcome in outcomes}) == 1


def _run_point(point: Point, run: Callable[[Point], Simulation]) -> SweepRow:
    """Run one point; output of the program is not shown, its stderr is, unless it fails."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as errors:
        try:
            simulation = run(point)
        except (Exception, SystemExit, BaseExceptionGroup) as error:
            code = report(error)
            if code == EXIT_INTERRUPTED:
                raise KeyboardInterrupt from error
            return SweepRow(point=point, error=_error_line(errors.getvalue(), code))
    write_stderr(errors.getvalue())
    return SweepRow(point=point, run=simulation.runs[-1], wall_s=simulation.wall_s)


def _error_line(stderr: str, code: int) -> str:
    """Return the line that names the error: ours, or else the last one."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    ours = [line.removeprefix("overlap: ") for line in lines if line.startswith("overlap: ")]
    return (ours or lines or [f"exit code {code}"])[-1]


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """Give a function that shows the number of finished points, and the next one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, next_point: None
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)
    # Drawn between points only: a thread that draws would take time from the program.
    shown = Progress(
        *columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    with shown as progress:
        task = progress.add_task("", total=total)

        def advance(done: int, next_point: str) -> None:
            progress.update(task, completed=done, description=next_point, refresh=True)

        yield advance


# -- the rows --------------------------------------------------------------------------------------------------------


def sweep_table(rows: Sequence[SweepRow], winner: SweepRow | None, *, width: int, ascii: bool = False) -> list[str]:
    """Return one line for each point under a header, the bars as long as the steps, and a line about the best one.

    Where `width` columns are too few, bars are shorter, and where not even their heading fits there are none.
    """
    names = list(rows[0].point.texts) if rows else []
    outcomes = [row.outcome for row in rows if row.outcome]
    throughput = any(outcome.samples_per_s is not None for outcome in outcomes)
    figures = ["ranks", "step ms", "exposed", "overlap", *(["samples/s"] if throughput else [])]
    kept = slice(1 if "ranks" in names else 0, None)  # what is swept has a column already
    header = [*names, *figures[kept]]
    cells = [[*row.point.texts.values(), *_figure_cells(row.outcome, throughput=throughput)[kept]] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    longest_ns = max((outcome.step_ns for outcome in outcomes), default=0)
    room = width - 2 - sum(column + 2 for column in widths)
    bar = min(room, _BAR) if room >= len(_BAR_HEADING) else 0
    lines = [f"  {_align_right(header, widths)}" + (f"  {_BAR_HEADING}" if bar else "")]
    for row, texts in zip(rows, cells, strict=True):
        mark = "* " if row is winner else "  "
        if row.outcome is None:
            failed = f"{mark}{_align_right(texts[: len(names)], widths)}  failed: {row.error}"
            lines += wrapped(failed, width, rest="      ")
        else:
            drawn = _bar(row.outcome.step_ns, longest_ns, cells=bar, ascii=ascii)
            lines.append(f"{mark}{_align_right(texts, widths)}  {drawn}".rstrip())
    if winner is None and len(outcomes) > 1 and _are_all_equal(outcomes):
        warning = f"all rows are equal: the program may not use {', '.join(names)}"
        return [*lines, *wrapped(warning, width)]
    return [*lines, *_best_lines(winner)]


def _figure_cells(outcome: StepSummary | None, *, throughput: bool) -> list[str]:
    """Return the figures of a run as cells: ranks, step, exposed share, overlap, samples; blank ones if it failed."""
    if outcome is None:
        return [""] * (5 if throughput else 4)
    ratio = outcome.longest.overlap_ratio
    figures = [
        str(outcome.world_size),
        f"{outcome.step_ns / 1e6:.3f}",
        f"{outcome.exposed_share:.1%}",
        "n/a" if ratio is None else f"{ratio:.1%}",
    ]
    rate = outcome.samples_per_s
    return [*figures, *(["n/a" if rate is None else f"{rate:.2f}"] if throughput else [])]


def _align_right(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(text.rjust(width) for text, width in zip(texts, widths, strict=False))


def _bar(value_ns: int, longest_ns: int, *, cells: int, ascii: bool) -> str:
    """Return a bar, the longest of which has `cells` cells; values above 0 have at least an eighth of a cell."""
    eighths = -(-value_ns * cells * 8 // longest_ns) if longest_ns else 0
    if ascii:
        return "#" * -(-eighths // 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _best_lines(winner: SweepRow | None) -> list[str]:
    """Return the line that names the best point, by throughput if it is known; nothing without a best one."""
    if winner is None or winner.outcome is None:
        return []
    why = "shortest step" if winner.outcome.samples_per_s is None else "highest throughput"
    return [f"* {why}: {', '.join(f'{name}={text}' for name, text in winner.point.texts.items())}"]


def json_rows(rows: Sequence[SweepRow], winner: SweepRow | None) -> list[dict[str, object]]:
    """Return the rows as objects: parameters as text, figures as of a single simulation (null if it failed)."""
    return [
        {
            "parameters": dict(row.point.texts),
            "outcome": describe(row.outcome) if row.outcome else None,
            "error": row.error,
            "best": row is winner,
            "wall_s": row.wall_s,
        }
        for row in rows
    ]
