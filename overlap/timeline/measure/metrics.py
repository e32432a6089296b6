"""Metrics of overlap: how much communication hid behind compute, per rank and per step, in exact nanoseconds.

    wall = compute_only + overlapped + exposed + kept + copy + queued + idle
    exposed = waiting + wire

hold exactly, because every unit of time inside a window has one activity. While a program keeps the event
loop, nothing of its process goes on: that time is no communication, however many operations are in flight. The overlap
ratio is defined as in HolisticTraceAnalysis (communication_analysis.py): time both busy / communication time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from ..spans import Timeline
from .activity import COMPUTE, COPY, PROGRAM, QUEUED, WAITING, WIRE, Activity
from .steps import rank_windows, windows_by_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the wall time of one rank went, in one step (or the whole run when `step` is None)."""

    rank: int
    step: int | None  # None for the whole run, and for a rank that marks no steps
    wall_ns: int  # The length of the window
    compute_ns: int  # Time in which the rank computed
    overlapped_ns: int  # Time in which the rank computed while an operation was active
    waiting_ns: int  # Exposed time in which no bytes moved: every active operation waited for a rank
    wire_ns: int  # Exposed time in which bytes moved
    transfer_ns: int  # Time in which bytes moved, exposed or not
    queued_ns: int  # Time in which nothing else happened, and an issued operation had not started
    kept_ns: int = 0  # Time without compute in which a program kept the event loop of this rank busy
    copy_ns: int = 0  # Time in which only copies and sets of a device's memory ran

    @property
    def compute_only_ns(self) -> int:
        """Time in which the rank computed and no operation was active."""
        return self.compute_ns - self.overlapped_ns

    @property
    def comm_ns(self) -> int:
        """Time in which an operation was active: it waited for its last rank, or its bytes moved."""
        return self.overlapped_ns + self.exposed_ns

    @property
    def exposed_ns(self) -> int:
        """Time in which an operation was active and the rank did not compute: the time that overlap can remove."""
        return self.waiting_ns + self.wire_ns

    @property
    def idle_ns(self) -> int:
        """Time in which nothing was recorded and nothing queued: the program did something else, or slept."""
        return self.wall_ns - self.compute_ns - self.exposed_ns - self.kept_ns - self.copy_ns - self.queued_ns

    @property
    def overlap_ratio(self) -> float | None:
        """Overlapped time as part of communication, from 0 to 1, or None without communication."""
        return self.overlapped_ns / self.comm_ns if self.comm_ns else None


def breakdowns(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[Breakdown]:
    """Return the times of each rank by activity, in one step or in the whole run, ranks ascending.

    Args:
        timeline: The run.
        step: A step index, or None for the whole run.
        ranks: World ranks to measure; None means all that have spans, and, with a step, that recorded that step.

    Cost: a sort of the spans.

    Raises:
        UsageError: If the timeline is empty, no rank recorded that step, or `ranks` is empty or has one without spans.
    """
    return measure_windows(Activity(timeline, rank_windows(timeline, step=step, ranks=ranks)))


def breakdowns_by_step(timeline: Timeline) -> dict[int | None, list[Breakdown]]:
    """Return, by step, the times of each rank by activity. If no step is recorded: of the whole run, under key None.

    Cost: a sort of the spans, and a few microseconds for each step of each rank.

    Raises:
        UsageError: The timeline has no spans.
    """
    steps = windows_by_step(timeline)
    rows = iter(measure_windows(Activity(timeline, [window for of_step in steps.values() for window in of_step])))
    return {step: list(islice(rows, len(of_step))) for step, of_step in steps.items()}


def measure_windows(activity: Activity) -> list[Breakdown]:
    """Return the times in each window of an activity, in the order of the windows."""
    # In the order of the names in the loop below.
    activities = (COMPUTE, PROGRAM, WIRE, WAITING, QUEUED, COPY)
    chosen = [*(activity.doing == each for each in activities), activity.is_hidden, activity.moves]
    times = [activity.chosen_ns_by_window(which).tolist() for which in chosen]
    return [
        Breakdown(
            rank=window.rank, step=window.step, wall_ns=window.end_ns - window.start_ns, compute_ns=compute,
            kept_ns=kept, wire_ns=wire, waiting_ns=waiting, queued_ns=queued, copy_ns=copy, overlapped_ns=hidden,
            transfer_ns=moves,
        )
        for window, compute, kept, wire, waiting, queued, copy, hidden, moves in zip(
            activity.windows, *times, strict=True
        )
    ]  # fmt: skip
