"""Several ranks: one clock, matched collectives, and the rank that each waited for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from ..timeline.measure.intervals import Interval, Merged, clip, intersect, length, merge, subtract
from ..units import format_ns
from .causes import COMM, COMPUTE, WAIT, WIRE, WORDING
from .rank import ProfiledCollective, RankReport

SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that end on no rank before all have begun: only these show clocks and late ranks."""
_OUT_OF_ORDER = 0.1
"""Part of matched collectives that may end on a rank before another has begun: with more, they are not the same."""


@dataclass(slots=True, kw_only=True)
class LateRank:
    """A rank that others waited for in a step."""

    rank: int
    step: int | None
    waited_ns: int = 0  # of all other ranks, added up
    did: Counter[str] = field(default_factory=Counter)  # in that time: nanoseconds of each cause, or of other states
    places: dict[str, Counter[str]] = field(default_factory=dict)  # of each cause
    ops: Counter[str] = field(default_factory=Counter)
    costs_ns: Mapping[str, int] = field(default_factory=dict)  # of its step, by cause
    others_ns: Mapping[str, int] = field(default_factory=dict)  # the same of the other ranks, medians

    @property
    def cause(self) -> str:
        """Name of the rank's main activity while others waited for it; "" if it is unknown."""
        return self.did.most_common(1)[0][0] if self.did else ""

    @property
    def doing(self) -> str:
        """Activity of the rank for most of the time, with the place."""
        if self.cause not in WORDING:
            return self.cause or "doing something that is not recorded"
        place = next((text for text, _ in self.places.get(self.cause, Counter()).most_common(1)), "")
        where = f" ({place})" if place else ""
        return f"{'idle: ' * (self.cause != COMPUTE)}{WORDING[self.cause]}{where}"

    def __str__(self) -> str:
        return f"rank {self.rank}, which was {self.doing}"


@dataclass(slots=True, kw_only=True)
class MatchedRanks:
    """Matches of the collectives of several ranks. It divides their exposed communication: see `divide_exposed`."""

    reports: list[RankReport]
    late: dict[tuple[int, int | None], LateRank] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        """Ranks of the world that have no file, ascending."""
        world = max(report.world_size for report in self.reports)
        return sorted(set(range(world)) - {report.rank for report in self.reports})

    def divide_exposed(self) -> None:
        """Divide the exposed communication of each rank and step into waiting and wire, where it can be known."""
        if len(self.reports) < 2:
            return
        matches = self._match_collectives()
        if not matches:
            self.notes.append("collectives of the ranks cannot be matched: waiting and wire cannot be told apart")
            return
        offsets = self._clock_offsets(matches)
        waits: dict[int, dict[int, list[Interval]]] = {report.rank: {} for report in self.reports}
        judged: dict[int, list[Interval]] = {report.rank: [] for report in self.reports}
        lateness: list[tuple[int, str, int, int]] = []  # the late rank, the operation, and from when to when it was
        broken = 0
        for calls in matches:
            starts = {rank: call.start_ns - offsets[rank] for rank, call in calls.items()}
            late = max(starts, key=lambda rank: (starts[rank], -rank))
            met_ns = starts[late]
            broken += any(call.end_ns - offsets[rank] < met_ns for rank, call in calls.items())
            for rank, call in calls.items():
                judged[rank].append((call.start_ns, call.end_ns))
                until_ns = min(met_ns + offsets[rank], call.end_ns)
                if rank != late and until_ns > call.start_ns:
                    waits[rank].setdefault(late, []).append((call.start_ns, until_ns))
            first_ns = min(starts.values())
            lateness.append((late, calls[late].op, first_ns + offsets[late], met_ns + offsets[late]))
        if broken > _OUT_OF_ORDER * len(matches):
            self.notes.append(
                f"{broken} of {len(matches)} matched collectives end on a rank before another has begun: clocks do "
                "not fit, or the files are of two runs; waiting and wire cannot be told apart"
            )
            return
        for report in self.reports:
            self._divide_rank(report, waits[report.rank], merge(judged[report.rank]))
        self._describe_late(lateness, offsets)

    def _match_collectives(self) -> list[dict[int, ProfiledCollective]]:
        """Return synchronising collectives that all members of the group recorded, by rank, with fitting sizes."""
        world = max(report.world_size for report in self.reports)
        by_key: dict[tuple[str, str, int], dict[int, ProfiledCollective]] = {}
        several = any(report.has_groups for report in self.reports)
        if several and any(not call.group for report in self.reports for call in report.calls):
            self.notes.append("collectives that do not name their group, of which the job has several: not matched")
        for report in self.reports:
            for call in report.calls:
                if call.op in SYNCHRONISING and (call.group or not several):
                    by_key.setdefault((call.group, call.op, call.number), {})[report.rank] = call
        complete = [
            calls
            for calls in by_key.values()
            if len(calls) == (next(iter(calls.values())).group_size or world) and len(calls) > 1
        ]
        same = [calls for calls in complete if len({call.nbytes for call in calls.values()}) == 1 or _is_uneven(calls)]
        if len(same) < len(complete):
            self.notes.append(f"{len(complete) - len(same)} collectives differ in size between ranks: left out")
        return same

    def _clock_offsets(self, matches: Sequence[dict[int, ProfiledCollective]]) -> dict[int, int]:
        """Return, by rank, how far its clock is ahead of the first rank's, by ends of collectives; adds a note."""
        hosts = {report.host for report in self.reports}
        first = self.reports[0].rank
        if len(hosts) == 1 and "" not in hosts:
            self.notes.append("clocks: one host, one clock")
            return {report.rank: 0 for report in self.reports}
        offsets, errors = {first: 0}, []
        for report in self.reports[1:]:
            ends = [
                calls[report.rank].end_ns - calls[first].end_ns
                for calls in matches
                if report.rank in calls and first in calls
            ]
            offsets[report.rank] = round(median(ends)) if ends else 0
            errors += [abs(end - offsets[report.rank]) for end in ends]
        off_ns = median(errors) if errors else 0
        why = "hosts are not named" if "" in hosts else f"{len(hosts)} hosts"
        self.notes.append(
            f"clocks: {why}: aligned on the ends of {len(matches)} collectives, within {format_ns(off_ns)} (median)"
        )
        return offsets

    def _divide_rank(self, report: RankReport, waits: dict[int, list[Interval]], judged: Merged) -> None:
        """Replace one rank's exposed communication, in its costs, by waiting, wire and undecided time."""
        exposed = merge(report.exposed)
        for step, window in report.windows.items():
            undivided = clip(exposed, window)
            undecided_ns = length(subtract(undivided, judged))
            undivided = intersect(undivided, judged)
            waited_ns = 0
            for late, intervals in sorted(waits.items(), key=lambda each: each[0]):
                cover = merge(intervals)
                ns = length(intersect(undivided, cover))
                undivided = subtract(undivided, cover)
                waited_ns += ns
                if ns:
                    self.late.setdefault((late, step), LateRank(rank=late, step=step)).waited_ns += ns
            costs = report.costs_ns[step]
            costs.pop(COMM, None)
            for cause, ns in ((COMM, undecided_ns), (WAIT, waited_ns), (WIRE, length(undivided))):
                if ns:
                    costs[cause] = ns

    def _describe_late(self, lateness: Sequence[tuple[int, str, int, int]], offsets: Mapping[int, int]) -> None:
        """Add the activity of late ranks between the first rank's arrival and their own."""
        reports = {report.rank: report for report in self.reports}
        for late, op, first_ns, met_ns in lateness:
            report = reports[late]
            step = next((step for step, (low, high) in report.windows.items() if low <= met_ns < high), None)
            entry = self.late.get((late, step))
            if entry is None or met_ns <= first_ns:
                continue
            entry.ops[op] += met_ns - first_ns
            low_ns = report.windows[step][0]
            if first_ns < low_ns:
                lag_ns = (
                    report.begin_ns
                    - offsets[late]
                    - min(other.begin_ns - offsets[other.rank] for other in self.reports)
                )
                unseen_ns = max(min(report.begin_ns, low_ns) - first_ns, 0)
                entry.did[f"not yet recorded (its recording begins {format_ns(lag_ns)} after the first)"] += unseen_ns
                entry.did["not yet at work on its device in this step"] += low_ns - first_ns - unseen_ns
                first_ns = low_ns
            rest_ns = met_ns - first_ns
            for start_ns, end_ns, cause, place in report.pieces:
                ns = min(end_ns, met_ns) - max(start_ns, first_ns)
                if ns > 0:
                    entry.did[cause] += ns
                    entry.places.setdefault(cause, Counter())[str(place)] += ns * bool(str(place))
                    rest_ns -= ns
            comm = clip(merge(report.exposed), (first_ns, met_ns))
            entry.did["in other communication"] += length(comm)
            entry.did[COMPUTE] += max(rest_ns - length(comm), 0)
            others = [other.costs_ns[step] for other in self.reports if other is not report and step in other.costs_ns]
            entry.costs_ns = report.costs_ns[step]
            entry.others_ns = {
                cause: round(median(other.get(cause, 0) for other in others)) for cause in entry.costs_ns
            }


def _is_uneven(calls: dict[int, ProfiledCollective]) -> bool:
    """Whether sizes of a collective may differ between ranks."""
    return next(iter(calls.values())).op in ("all_to_all", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All calls of one operation on one group, by a rank in a step."""

    op: str
    group: str
    group_size: int
    calls: int
    nbytes: int  # of all calls
    total_ns: int
    exposed_ns: int
    algorithm_gb_s: float | None  # of the fastest call, by bytes, of those that carry the most
    bus_gb_s: float | None
    link_gb_s: float | None  # of the device's links to others of its host, one direction, if the group is inside one
    waits_at_least_ns: int  # longer than a larger message of the same kind took


_BUS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Bus bandwidth is algorithm bandwidth times this and (n - 1) / n (nccl-tests, doc/PERFORMANCE.md)."""


_LINKS_GB_S = (
    (r"V100-SXM", 150), (r"A100-(SXM|PG)", 300), (r"H100 80GB HBM3|H100 SXM|H200", 450), (r"\bG?B[23]00", 900),
    (r"MI300X", 448), (r"MI355X", 535.5),
)  # fmt: skip
"""Links of a device to the others of its host, one direction (vendors' pages; stas00/ml-engineering, network)."""
MAX_HOST_DEVICES = 8
"""Devices of one host at most: a job with as many ranks, or fewer, is taken to be inside one."""


def link_gb_s(device: str, world_size: int) -> float | None:
    """Return the GB/s of a device's links to others of its host; None if unknown, or if the job has several hosts."""
    if world_size > MAX_HOST_DEVICES:
        return None
    return next((float(speed) for pattern, speed in _LINKS_GB_S if re.search(pattern, device)), None)


def sum_traffic(calls: Sequence[ProfiledCollective], exposed: Merged, link: float | None = None) -> list[Traffic]:
    """Return sums of calls by operation and group, the most exposed first; calls in parallel are exposed once."""
    kinds: dict[tuple[str, str], list[ProfiledCollective]] = {}
    for call in calls:
        kinds.setdefault((call.op, call.group), []).append(call)
    traffics = []
    for (op, group), of_kind in kinds.items():
        most = max(call.nbytes for call in of_kind)
        best_ns = min(call.end_ns - call.start_ns for call in of_kind if call.nbytes == most)
        size = of_kind[0].group_size
        speed = most / best_ns if most and best_ns else None
        exposed_ns = length(intersect(merge((call.start_ns, call.end_ns) for call in of_kind), exposed))
        factor = _BUS.get(op, 1.0) * (size - 1) / size if size > 1 else None
        traffics.append(Traffic(
            op=op, group=group, group_size=size, calls=len(of_kind), nbytes=sum(call.nbytes for call in of_kind),
            total_ns=sum(call.end_ns - call.start_ns for call in of_kind),
            exposed_ns=exposed_ns, algorithm_gb_s=speed,
            bus_gb_s=speed * factor if speed is not None and factor is not None else None,
            link_gb_s=link, waits_at_least_ns=min(_least_wait(of_kind), exposed_ns),
        ))  # fmt: skip
    return sorted(traffics, key=lambda each: (-each.exposed_ns, -each.total_ns))


def _least_wait(calls: Sequence[ProfiledCollective]) -> int:
    """Return the nanoseconds that calls must have waited at least: calls of as many bytes or more took less time.

    A call takes a start, at most as long as the shortest call, and its bytes, at most twice as long for each as in a
    larger call: that is the share of bandwidth of NCCL's protocol for small messages (nccl, src/graph/tuning.cc).
    """
    sized = sorted((call for call in calls if call.nbytes), key=lambda call: -call.nbytes)
    if len({call.nbytes for call in sized}) < 2 and len(sized) < 4:
        return 0
    took = np.array([call.end_ns - call.start_ns for call in sized], np.int64)
    nbytes = np.array([call.nbytes for call in sized], np.int64)
    # Sorted by bytes, the largest first: the fastest so far bounds the time that the wire needs for the next.
    floor = np.minimum.accumulate(took) if len(took) else took
    if len(took):
        floor = np.minimum(floor, took.min() + 2 * nbytes * np.minimum.accumulate(took / nbytes))
    exposed = np.array([call.exposed_ns for call in sized], np.int64)
    return int(np.minimum(took - floor, exposed).sum())
