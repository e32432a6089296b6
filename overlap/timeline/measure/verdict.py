"""Verdicts: how long a step takes, how much of it is exposed or could be hidden, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ...errors import printable
from ...units import figure, figure_unit, format_bytes
from ..spans import ORIGIN, Timeline
from .late import Reason, Reasons, kept_loops, queues, reasons
from .metrics import Breakdown, Coverage, coverage, issued_in, of_steps

_NAMED_SHARE = 0.25
"""A rank is named if it alone caused this part of the waiting; the others are counted together."""
_MENTIONED_SHARE = 0.001
"""Part of the time of all ranks: less waiting is not mentioned next to bytes on the wire."""

_MENTION_DIVISOR = 20
"""A loss is mentioned from this part of the time of all ranks on: a twentieth."""
_SIMILAR_SHARE = 0.01
"""Part of the longest rank's time: means of the ranks that are so near to it add up to it, as far as people read."""
MANY_STEP_CALLS = 50
"""Calls of one operation in a step from which on they are mentioned, if they are small."""
SMALL_CALL_BYTES = 64 * 1024
"""Bytes of a small operation: on most wires, fewer bytes take no less time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of one operation at one place in the program."""

    name: str  # The one that all calls have, or else the operation
    call_site: str  # "file:line", or ""
    number: int  # calls of each rank, on average
    nbytes: int  # bytes of each call, on average

    def __str__(self) -> str:
        at = f" at {self.call_site}" if self.call_site else ""
        return f"{self.number:,} calls of {format_bytes(self.nbytes)} ({self.name}{at})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Totals of a step or a run over its ranks, in nanoseconds; as text, the verdict has the means of a rank."""

    step: int | None  # The step's index; None if it is the whole run
    ranks: int  # How many were measured: of a step, those that mark steps
    wall_ns: int  # Wall time of the rank that took longest
    walls_ns: int  # Wall times of all ranks, added up, as all figures below are
    compute_ns: int  # Computing
    comm_ns: int  # Communicating, hidden under compute or exposed
    exposed_ns: int  # Only communicating: `waiting_ns` plus `wire_ns`
    waiting_ns: int  # Waiting for a rank
    wire_ns: int  # Exposed while bytes moved
    transfer_ns: int  # Moving bytes, exposed or not
    hideable_ns: int  # The part of communication for which each rank had compute, were it free to move
    kept_ns: int  # Not computing, while a program kept the event loop
    queued_ns: int  # Nothing was busy, while an operation was queued
    idle_ns: int  # Nothing was busy, and nothing was queued
    copy_ns: int = 0  # Only copies and sets of a device's memory ran
    causes: tuple[Reason, ...]  # reasons for exposed communication over all ranks, the most expensive first
    kept: tuple[Reason, ...]  # The ranks and lines that kept event loops, the most expensive first
    queues: tuple[Reason, ...]  # The operations that were queued while nothing was busy, the longest first
    small: Calls | None  # The operation that is called most, if it is called often and carries little
    issued: bool = False  # Whether operations were issued in it, whenever these ran
    torch: bool = False  # Whether it is a program of `torch.distributed`
    foreign: bool = False  # Whether another tool recorded it, which may not have recorded all
    partial: bool = False  # Whether waiting and wire cannot be told apart: other ranks' parts are not in the trace

    @property
    def exposed_share(self) -> float:
        """Exposed communication as part of the time of all ranks, from 0 to 1."""
        return self.exposed_ns / self.walls_ns if self.walls_ns else 0.0

    @property
    def hidden_share(self) -> float | None:
        """The part of communication that was under compute; None if there was none."""
        return 1 - self.exposed_ns / self.comm_ns if self.comm_ns else None

    @property
    def possible_share(self) -> float | None:
        """The part of communication for which its rank had compute; None if there was none."""
        return self.hideable_ns / self.comm_ns if self.comm_ns else None

    def blamed(self) -> list[tuple[int | None, Reason, int]]:
        """Return the ranks that others waited for, their main activity then, and how long; most expensive first."""
        return _sum_by_rank([cause for cause in self.causes if cause.rank is not None or cause.doing == "unknown"])

    def moved(self) -> list[tuple[Reason, int]]:
        """Return the operations with bytes exposed on the wire, by place, most expensive first."""
        return _sum_by_place(cause for cause in self.causes if cause.doing == "wire" and cause.rank is None)

    def __str__(self) -> str:
        """Return the verdict in one line, times in the unit of the step."""
        return self.text()

    def _repr_html_(self) -> str:
        """Return the verdict as notebooks show it, with lines as long as the page allows."""
        return f'<pre style="white-space: pre-wrap">{escape(str(self))}</pre>'

    def text(self, *, named: int = 4) -> str:
        """Return the verdict in one line, times in the unit of the step.

        Args:
            named: Name at most so many of the ranks that were waited for; with 1, name no queued operation either.
        """
        name, unit_ns = figure_unit(self.wall_ns)
        subject = "whole run" if self.step is None else "step"
        if not self.ranks:
            return f"{subject}: nothing was recorded"
        mean = self._mean(self.walls_ns, unit_ns)
        longest = figure(self.wall_ns, unit_ns)
        alike = self.wall_ns - self.walls_ns / self.ranks < _SIMILAR_SHARE * self.wall_ns
        mean = "" if alike else f" on the longest of {self.ranks} ranks; {mean} on average"
        parts = [f"{subject} {longest} {name}{mean}: compute {self._mean(self.compute_ns, unit_ns)}"]
        if not self.comm_ns:
            copies = [f", copies {self._mean(self.copy_ns, unit_ns)}"] if self.copy_ns else []
            short_parts = [
                parts[0],
                *self._kept_part(unit_ns),
                *copies,
                f", {self._idle_word} {self._mean(self.idle_ns, unit_ns)}",
            ]
            none = "what was issued in it ran before" if self.issued else "none recorded"
            none = "none while the event loop was free" if self.kept_ns else none
            return printable(f"{''.join(short_parts)}; communication: {none}")
        parts += self._kept_part(unit_ns)
        parts.append(f", exposed {self._mean(self.exposed_ns, unit_ns)} ({self.exposed_share:.0%})")
        waits = (
            self._wait_parts(unit_ns, named)
            if self.waiting_ns >= _MENTIONED_SHARE * self.walls_ns or not self.wire_ns
            else []
        )
        if why := [*waits, *self._wire_parts(unit_ns)]:
            parts.append(f": {', '.join(why)}")
        if self.small is not None and (self.exposed_ns + self.queued_ns) * _MENTION_DIVISOR >= self.walls_ns:
            parts.append(f"; {self.small}")
        for lost, ns in (("copies", self.copy_ns), ("queued", self.queued_ns), (self._idle_word, self.idle_ns)):
            if ns * _MENTION_DIVISOR >= self.walls_ns or ns > max(self.compute_ns, self.exposed_ns, self.kept_ns):
                where = _name_largest(self.queues) if lost == "queued" and named > 1 else ""
                parts.append(f"; {lost} {self._mean(ns, unit_ns)}{where}")
        if not self.compute_ns:
            parts.append("; no compute is recorded, so nobody can tell what was hidden")
            parts += ["; overlap.torch.record(model, optimizer) records that of modules"] if self.torch else []
        elif self.hidden_share is not None and self.possible_share is not None:
            parts.append(f"; hidden {self.hidden_share:.0%} of {self.possible_share:.0%} possible")
        return printable("".join(parts))

    @property
    def _idle_word(self) -> str:
        return "idle or not recorded" if self.foreign else "idle"

    def _mean(self, sum_ns: int, unit_ns: int) -> str:
        """Return a rank's mean of a sum over ranks, as text in a unit; tiny means keep one significant digit."""
        mean_ns = sum_ns / self.ranks
        return f"{mean_ns / unit_ns:.1g}" if 0 < 20 * mean_ns < unit_ns else figure(mean_ns, unit_ns)

    def _kept_part(self, unit_ns: int) -> list[str]:
        """Return the part on event loops that programs kept, with the worst rank and line; nothing if it was short."""
        if self.kept_ns < _MENTIONED_SHARE * self.walls_ns or not self.kept:
            return []
        places: dict[tuple[int | None, str], int] = {}
        for cause in self.kept:
            key = cause.rank, cause.call_site
            places[key] = places.get(key, 0) + cause.duration_ns
        (rank, place), ns = max(places.items(), key=lambda each: (each[1], each[0][1]))
        most = "" if len(places) == 1 else f"{self._mean(ns, unit_ns)} "
        share = self.kept_ns / self.walls_ns
        return [f", event loop kept {self._mean(self.kept_ns, unit_ns)} ({share:.0%}): {most}by rank {rank} at {place}"]

    def _wait_parts(self, unit_ns: int, named: int) -> list[str]:
        """Return the parts on awaited ranks: at most `named` with enough of the waiting by name, then the rest."""
        parts, rest_ns, rest_count = [], 0, 0
        for place, (rank, cause, ns) in enumerate(self.blamed()):
            if place and (ns < _NAMED_SHARE * self.waiting_ns or place >= named):
                rest_ns, rest_count = rest_ns + ns, rest_count + 1
            elif rank is None:
                parts.append(f"{self._mean(ns, unit_ns)} waiting for a rank that is not recorded")
            else:
                parts.append(f"{self._mean(ns, unit_ns)} waiting for rank {rank} ({cause})")
        if rest_ns:
            parts.append(f"{self._mean(rest_ns, unit_ns)} for {rest_count} other{'s' if rest_count > 1 else ''}")
        return parts

    def _wire_parts(self, unit_ns: int) -> list[str]:
        """Return the part on exposed bytes on the wire, with the largest operation; nothing if none was exposed."""
        moves = [cause for cause in self.causes if cause.doing == "wire" and cause.rank is None]
        where = "on the wire or waiting for a rank that is not in the trace" if self.partial else "on the wire"
        return [f"{self._mean(self.wire_ns, unit_ns)} {where}{_name_largest(moves)}"] if moves else []


def _sum_by_place(causes: Iterable[Reason]) -> list[tuple[Reason, int]]:
    """Return causes summed by name and call site, the most expensive first, each with the first cause of its kind."""
    sums: dict[tuple[str, str], tuple[Reason, int]] = {}
    for cause in causes:
        first, ns = sums.get((cause.name, cause.call_site), (cause, 0))
        sums[cause.name, cause.call_site] = first, ns + cause.duration_ns
    return sorted(sums.values(), key=lambda each: (-each[1], str(each[0])))


def _name_largest(causes: Iterable[Reason]) -> str:
    """Return the most expensive operation in brackets, "mostly" if there are others; "" without operations."""
    places = _sum_by_place(causes)
    return f" ({'mostly ' * (len(places) > 1)}{places[0][0]})" if places else ""


def verdict_of(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> Verdict:
    """Judge a timeline; arguments and errors as for `metrics.coverage`."""
    covers = coverage(timeline, step=step, ranks=ranks)
    return judge(timeline, covers, reasons(timeline, covers), step=step)


def judge(timeline: Timeline, covers: Sequence[Coverage], stretches: Reasons, *, step: int | None) -> Verdict:
    """Return the verdict on some ranks, given their intervals and why communication was exposed.

    Ranks that mark no steps while others do count in no figure of a step; they may be waited for.
    """
    covers = of_steps(covers)
    rows = [cover.breakdown() for cover in covers]
    counted = {cover.rank for cover in covers}
    return Verdict(
        step=step,
        ranks=len(rows),
        wall_ns=max((row.wall_ns for row in rows), default=0),
        walls_ns=sum(row.wall_ns for row in rows),
        hideable_ns=sum(min(row.comm_ns, row.compute_ns) for row in rows),
        causes=tuple(cause for cause in stretches.causes() if cause.victim in counted),
        kept=tuple(kept_loops(timeline, covers)),
        queues=tuple(queues(timeline, covers)),
        small=_most_frequent_calls(timeline, covers),
        issued=bool(rows) and bool(issued_in(timeline, {each.rank: each.window for each in covers}, step).any()),
        torch="torch" in timeline.meta,
        foreign=ORIGIN in timeline.meta,
        partial=is_partial(timeline),
        **{name: _sum_field(rows, name) for name in _SUMMED},
    )


def is_partial(timeline: Timeline) -> bool:
    """Whether the trace lacks arrivals of other ranks: it is of another tool, and not of all ranks."""
    return ORIGIN in timeline.meta and len(np.unique(timeline.columns.rank)) < timeline.world_size


def _most_frequent_calls(timeline: Timeline, covers: Sequence[Coverage]) -> Calls | None:
    """Return the calls of the operation called most in the step; None if they are few or carry much."""
    columns = timeline.columns
    windows = {cover.rank: cover.window for cover in covers}
    if not windows:
        return None
    operations = columns.take(issued_in(timeline, windows, covers[0].step) & (columns.nbytes > 0))
    keys = np.stack([operations.op, operations.call_site])  # of buckets, each has a name of its own
    ops, kind = np.unique(keys, axis=1, return_inverse=True)
    if not ops.size:
        return None
    counts = np.bincount(kind.reshape(-1))
    most = int(counts.argmax())
    number, nbytes = round(counts[most] / len(windows)), int(operations.nbytes[kind.reshape(-1) == most].mean())
    if number < MANY_STEP_CALLS or nbytes >= SMALL_CALL_BYTES:
        return None
    op, site = ops[:, most].tolist()
    names = np.unique(operations.name[kind.reshape(-1) == most]).tolist()
    name, site = operations.texts[names[0] if len(names) == 1 else op], operations.texts[site]
    return Calls(name=name, call_site=site, number=number, nbytes=nbytes)


_SUMMED = tuple(
    f"{name}_ns"
    for name in ("compute", "comm", "exposed", "waiting", "wire", "transfer", "kept", "copy", "queued", "idle")
)


def _sum_field(rows: Sequence[Breakdown], name: str) -> int:
    return sum(getattr(row, name) for row in rows)


def _sum_by_rank(causes: Sequence[Reason]) -> list[tuple[int | None, Reason, int]]:
    """Return causes summed by rank, each with its most expensive reason, the most expensive rank first."""
    totals: dict[int | None, int] = {}
    did: dict[int | None, dict[str, tuple[int, Reason]]] = {}
    for cause in causes:
        totals[cause.rank] = totals.get(cause.rank, 0) + cause.duration_ns
        of = did.setdefault(cause.rank, {})
        ns, first = of.get(str(cause), (0, cause))
        of[str(cause)] = ns + cause.duration_ns, first
    most = {rank: max(of.values(), key=lambda each: (each[0], str(each[1])))[1] for rank, of in did.items()}
    return sorted(((rank, most[rank], ns) for rank, ns in totals.items()), key=lambda each: (-each[2], str(each[0])))
