"""Watch for stalls: reports that nothing moves and which rank the others wait for, and ends hopeless worlds.

At each look the watch compares the last span and the number of unfinished operations of each rank with those of the
look before. So operations do no work for it.

Only certain deadlocks are ended, after 300 s. In any other stall a rank may wait for a program that hangs, or for one
that writes a checkpoint for six minutes: these look alike, and no healthy run may be ended. A deadlock is certain if
ranks can never go on, whatever the others do (`waits.judge`), and no task of these ranks waits for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

from transports.delays import Instant

from ...notice import notify

if TYPE_CHECKING:
    from ...processes.control import ControlPlane
    from ...waits.ends import RankView
    from ...waits.judge import WaitVerdict
    from .reports import LocalRank

#: A step rarely takes longer, and people do not look at a silent terminal for much longer without asking.
STALL_S = 10.0
#: Half of the ten minutes after which PyTorch gives up any wait, healthy or not; long enough to read the
#: report and start a debugger.
HOPELESS_S = 300.0
#: Each report of a run doubles the patience before the next, up to this factor, lest a slow job fill its log.
_MOST_PATIENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """Limits of the time without progress. Each process counts its own time (`transports.delays`)."""

    report_s: float = STALL_S  # Time until a report on waiting ranks
    give_up_s: float | None = None  # Time until the world is ended; None: `HOPELESS_S`, and only for certain deadlocks


class StallWatch:
    """Watches the ranks of one process for stalls; `look_for_stall` is called again and again.

    Args:
        ranks: The ranks of this process, by world rank.
        limits: Limits of the time without progress.
        give_up: Ends the world; takes the number of seconds without progress.
        size: Number of ranks of the world.
        others: The other processes; None if there are none.
    """

    def __init__(
        self,
        ranks: Mapping[int, LocalRank],
        limits: StallLimits,
        others: ControlPlane | None,
        give_up: Callable[[float], None],
        *,
        size: int,
    ) -> None:
        self._ranks, self._limits, self._others, self._give_up, self._size = ranks, limits, others, give_up, size
        self._marks: dict[int, tuple[object, int]] = {}  # `progress_mark` of each rank at the last look
        self._since: dict[int, Instant] = {}  # first look at which each rank had that mark
        # For each quiet rank, (number, absent ranks) of its operations, as last sent to the other processes.
        self._sent: dict[int, list[tuple[int, tuple[int, ...] | None]]] = {}
        self._began: Instant | None = None  # first look at the present stall, which had lasted for `report_s` by then
        self._certain_since: Instant | None = None  # first look since which the deadlock is certain
        self._reported = False  # whether the present stall was reported
        self._patience_s = limits.report_s  # time without progress until the next report

    @property
    def period_s(self) -> float:
        """Seconds between two looks."""
        return min(1.0, self._limits.report_s / 10)

    def look_for_stall(self) -> None:
        """Look for ranks without progress, and report or end a stall. Only the loop's thread may call this."""
        now = Instant.now(perf_counter_ns)
        quiet = [rank for rank, watched in self._ranks.items() if self._is_quiet(rank, watched, now)]
        if not quiet and not self._sent and self._began is None and self._others is None:
            return
        views = {rank: self._ranks[rank].view(now.wall_ns) for rank in quiet}
        if self._others is not None:
            waits = {rank: [(end.seq, end.lacks) for end in view.ends] for rank, view in views.items()}
            if waits != self._sent:
                self._sent = waits
                self._others.send_quiet(list(views.values()))
            if not self._others.reports_for_all:
                return
            views = {**self._others.quiet_views(), **views}
        from .views import find_stall

        self._report_or_end_stall(find_stall(views, self._size), views, now)

    def _is_quiet(self, rank: int, watched: LocalRank, now: Instant) -> bool:
        """Whether a rank has made no progress for `report_s`. Its progress is compared with that at the last look."""
        mark, last = watched.progress_mark(), self._marks.get(rank)
        if last is None or last[0] is not mark[0] or last[1] != mark[1]:
            self._marks[rank], self._since[rank] = mark, now
        # If an error is known that no task awaited, a waiting rank counts as quiet sooner.
        quiet_s = 2 * self.period_s if watched.has_unseen_error else self._limits.report_s
        return now.own_seconds_since(self._since[rank]) >= quiet_s

    def _report_or_end_stall(self, stall: WaitVerdict | None, views: Mapping[int, RankView], now: Instant) -> None:
        """Report a stall that lasts, and end the world at the time limit. With None there is no stall any more.

        The world ends at once if no rank can ever go on, because of errors that nobody awaits. `views` are those of the
        ranks without progress of all processes.
        """
        if stall is None:
            self._end_stall(now)
            return
        from .views import stall_lines

        sentence, errors, table = stall_lines(stall, views)
        if stall.is_certain and errors:  # none of them can go on, because of these errors
            self._give_up(2 * self.period_s)
            return
        # `_began`: since when there is a stall. `_certain_since`: since when no rank can ever go on. `quiet_s`: how
        # long no rank has made progress. `_patience_s`: how long that may last until the next report, which doubles it.
        self._began = self._began or now
        # a thread may be about to issue an operation at one look: the deadlock must be certain for a time
        self._certain_since = (self._certain_since or now) if stall.is_certain else None
        quiet_s = self._limits.report_s + now.own_seconds_since(self._began)
        limit_s, limited_since = self._limits.give_up_s, self._began
        if limit_s is None and self._certain_since is not None:
            limit_s, limited_since = HOPELESS_S, self._certain_since
        delay_s = 2 * self.period_s if self._others is not None else 0.0  # until reports of other processes are here
        if not self._reported and quiet_s >= self._patience_s + delay_s:
            self._reported = True
            head = f"no progress for {self._patience_s:g} s: {sentence}"
            self._patience_s = min(2 * self._patience_s, _MOST_PATIENT * self._limits.report_s)
            notify("\n  ".join([head, *errors, *table, _describe_end_of_stall(limit_s)]))
        if limit_s is not None and self._limits.report_s + now.own_seconds_since(limited_since) >= limit_s:
            self._give_up(limit_s)

    def _end_stall(self, now: Instant) -> None:
        """Record that there is no stall any more; print a notice if the last one was reported."""
        if self._reported and self._began is not None:
            quiet_s = self._limits.report_s + now.own_seconds_since(self._began)
            notify(f"goes on, after {quiet_s:.0f} s without progress")
        self._reported, self._began, self._certain_since = False, None, None


def _describe_end_of_stall(limit_s: float | None) -> str:
    """Return the last line of a report on a stall: when the run will be ended, or how to end it."""
    if limit_s is None:
        return "the run waits on; Ctrl-C ends it, as --stall-timeout SECONDS would"
    return f"the run is given up when that has lasted {limit_s:g} s (--stall-timeout)"
