"""Goes through the points of a sweep: one that fails is a row too, and an interrupt keeps the rows that are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

from ...notice import say
from ..failure import EXIT_INTERRUPTED, report
from .points import Point
from .simulation import SimulatedRun, Simulation
from .step_summary import StepSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """What became of a point."""

    point: Point  # Which
    run: SimulatedRun | None = None  # The last one of the program; None if it failed
    error: str | None = None  # Why it failed, in one line; None if it did not
    wall_s: float = 0.0  # Seconds of real time that it took; 0 if it failed

    @property
    def outcome(self) -> StepSummary | None:
        """What the run says; None if it failed."""
        return self.run.outcome if self.run else None


def sweep(points: Sequence[Point], run: Callable[[Point], Simulation]) -> tuple[list[SweepRow], bool]:
    """Run all points, with a progress bar on stderr if that is a terminal.

    Returns:
        The rows, and whether Ctrl-C came before all were done.
    """
    rows: list[SweepRow] = []
    try:
        with _progress(len(points)) as advance:
            for point in points:
                advance(len(rows), " ".join(f"{name}={text}" for name, text in point.texts.items()))
                rows.append(_row(point, run))
    except KeyboardInterrupt:
        return rows, True
    return rows, False


def best(rows: Sequence[SweepRow]) -> SweepRow | None:
    """Return the row with the highest throughput, if all tell theirs, or else with the shortest step; the first such.

    None if nothing can be compared: fewer than two points have an outcome.
    """
    done = [(row, row.outcome) for row in rows if row.outcome is not None]
    if len(done) < 2:
        return None
    if all(outcome.samples_per_s is not None for _, outcome in done):
        return max(done, key=lambda pair: pair[1].samples_per_s or 0.0)[0]
    return min(done, key=lambda pair: pair[1].step_ns)[0]


def _row(point: Point, run: Callable[[Point], Simulation]) -> SweepRow:
    """Run one point; what the program prints is not shown, what it complains about is, unless it fails."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as told:
        try:
            simulation = run(point)
        except (Exception, SystemExit, BaseExceptionGroup) as error:
            code = report(error)
            if code == EXIT_INTERRUPTED:
                raise KeyboardInterrupt from error
            return SweepRow(point=point, error=_in_one_line(told.getvalue(), code))
    say(told.getvalue())
    return SweepRow(point=point, run=simulation.runs[-1], wall_s=simulation.wall_s)


def _in_one_line(told: str, code: int) -> str:
    """Return the line that says what was wrong: ours, or else the last one."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    ours = [line.removeprefix("overlap: ") for line in lines if line.startswith("overlap: ")]
    return (ours or lines or [f"exit code {code}"])[-1]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """Give a function that shows how many points are done, and which one is next."""
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
