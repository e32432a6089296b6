"""Several ranks: one clock, matched collectives, and the rank that each waited for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from ..timeline.measure.intervals import Interval, Merged, complement, intersect, length, merge
from ..timeline.measure.operations import bus_factor
from ..units import format_ns
from .causes import COMM, COMPUTE, LOOP, NAMES, UNKNOWN, WAIT, WIRE, WORDING
from .pieces import Pieces
from .rank import ProfiledCollective, RankReport
from .sites import CallSite

SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that end on no rank before all have begun: only these show clocks and late ranks."""
_OUT_OF_ORDER = 0.1
"""Part of matched collectives that may end on a rank before another has begun: with more, they are not the same."""

Match = Mapping[int, ProfiledCollective]
"""One collective by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRank:
    """A rank that others waited for in a step."""

    rank: int | None  # None: one that is not recorded
    step: int | None
    waited_ns: int  # of all other ranks, added up
    cause: str  # its main activity in that time; "" if it is unknown
    site: CallSite  # of that, or of what it had to come to

    @property
    def doing(self) -> str:
        """Activity of the rank for most of the time, with its call site."""
        where = str(self.site)
        if self.cause == COMPUTE:
            return f"compute {where}".rstrip()
        if self.cause in ("", UNKNOWN):
            is_state = not self.site.operator and not self.site.frames
            return (where if is_state else f"its program, before {where}") or "doing something that is not recorded"
        if self.cause == LOOP:
            return f"its program at {self.site.frame}"
        if self.cause in (WIRE, COMM):
            return where or "in other communication"
        named = self.site.operator or self.site.module or self.site.phase
        return f"{WORDING[self.cause]}{', ' if named else ' at '}{where}" if where else WORDING[self.cause]

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.doing})" if self.rank is not None else "a rank that is not recorded"


def late_ranks(pieces: Pieces, step: int | None) -> list[LateRank]:
    """Return the ranks that others waited for in pieces of a step, the most awaited first."""
    found = []
    for rank, waits in pieces.by_late():
        lengths_ns = waits.end_ns - waits.start_ns
        sums_ns = np.zeros((len(NAMES) + 1, len(waits.sites) + 1), np.int64)
        np.add.at(sums_ns, (waits.did, waits.site), lengths_ns)
        did = int(sums_ns.sum(axis=1).argmax())
        site = int(sums_ns[did].argmax())
        found.append(LateRank(
            rank=rank if rank >= 0 else None, step=step, waited_ns=int(lengths_ns.sum()),
            cause=NAMES[did] if did < len(NAMES) else "",
            site=waits.sites[site] if site < len(waits.sites) else CallSite(),
        ))  # fmt: skip
    return sorted(found, key=lambda each: -each.waited_ns)


def missing_ranks(reports: Sequence[RankReport]) -> list[int]:
    """Return the ranks of the world that have no file, ascending."""
    return sorted(set(range(max(report.world_size for report in reports))) - {report.rank for report in reports})


def divide_exposed(reports: Sequence[RankReport]) -> tuple[Pieces, list[str]]:
    """Return the pieces of all ranks, with exposed communication divided into waiting and wire, and notes.

    A rank waits in a collective until the last rank of it begins. That is known of collectives that all their ranks
    have recorded, if their instants fit on one clock; other exposed communication stays as it is, and a note says why.
    All instants, also those of the reports, are on the clock of the first rank from then on.
    """
    notes = _find_waits(reports) if len(reports) > 1 else []
    pieces = Pieces.concatenate([report.pieces for report in reports])
    every = _fill_gaps(reports, pieces)
    return Pieces.concatenate(replace(pieces, sites=every.sites).follow_waits(every)), notes


def _find_waits(reports: Sequence[RankReport]) -> list[str]:
    """Divide the exposed communication in the reports of several ranks, and return notes."""
    notes: list[str] = []
    matches = _match_collectives(reports, notes)
    if not matches:
        return [*notes, "collectives of the ranks cannot be matched: waiting and wire cannot be told apart"]
    _align_clocks(reports, matches, notes)
    matches = _match_collectives(reports, [])  # the same ones, on one clock
    broken = sum(
        min(call.end_ns for call in calls.values()) < max(call.start_ns for call in calls.values()) for calls in matches
    )
    if broken > _OUT_OF_ORDER * len(matches):
        return [
            *notes,
            f"{broken} of {len(matches)} matched collectives end on a rank before another has begun: clocks do not "
            "fit, or the files are of two runs; waiting and wire cannot be told apart",
        ]
    _divide_waits(reports, matches)
    return notes


def _match_collectives(reports: Sequence[RankReport], notes: list[str]) -> list[Match]:
    """Return synchronising collectives that all members of the group recorded, by rank, with fitting sizes."""
    world = max(report.world_size for report in reports)
    by_key: dict[tuple[str, str, int], dict[int, ProfiledCollective]] = {}
    several = any(report.has_subgroups for report in reports)
    if several and any(not call.group for report in reports for call in report.calls):
        notes.append("collectives that do not name their group, of which the job has several: not matched")
    for report in reports:
        for call in report.calls:
            if call.op in SYNCHRONISING and (call.group or not several):
                by_key.setdefault((call.group, call.op, call.number), {})[report.rank] = call
    complete = [
        calls
        for calls in by_key.values()
        if len(calls) == (next(iter(calls.values())).group_size or world) and len(calls) > 1
    ]
    uneven = ("all_to_all", "all_gather", "reduce_scatter")  # their sizes may differ between ranks
    same: list[Match] = [
        calls for calls in complete
        if len({call.nbytes for call in calls.values()}) == 1 or next(iter(calls.values())).op in uneven
    ]  # fmt: skip
    if len(same) < len(complete):
        notes.append(f"{len(complete) - len(same)} collectives differ in size between ranks: left out")
    return same


def _align_clocks(reports: Sequence[RankReport], matches: Sequence[Match], notes: list[str]) -> None:
    """Move the instants of all ranks to the clock of the first, by ends of collectives; add a note."""
    hosts = {str(report.header.get("host_name", "")) for report in reports}
    first = reports[0].rank
    if len(hosts) == 1 and "" not in hosts:
        notes.append("clocks: one host, one clock")
        return
    errors = []
    for report in reports[1:]:
        both = [calls for calls in matches if report.rank in calls and first in calls]
        ends = [calls[report.rank].end_ns - calls[first].end_ns for calls in both]
        ahead_ns = round(median(ends)) if ends else 0
        errors += [abs(end - ahead_ns) for end in ends]
        report.shift(-ahead_ns)
    off_ns = median(errors) if errors else 0
    why = "hosts are not named" if "" in hosts else f"{len(hosts)} hosts"
    notes.append(
        f"clocks: {why}: aligned on the ends of {len(matches)} collectives, within {format_ns(off_ns)} (median)"
    )


def _divide_waits(reports: Sequence[RankReport], matches: Sequence[Match]) -> None:
    """Divide the exposed communication of each rank that is in matched collectives into waiting and wire."""
    waits: dict[int, dict[int, list[Interval]]] = {report.rank: {} for report in reports}
    judged: dict[int, list[Interval]] = {report.rank: [] for report in reports}
    for calls in matches:
        late = max(calls, key=lambda rank: (calls[rank].start_ns, -rank))
        for rank, call in calls.items():
            judged[rank].append((call.start_ns, call.end_ns))
            until_ns = min(calls[late].start_ns, call.end_ns)
            if rank != late and until_ns > call.start_ns:
                waits[rank].setdefault(late, []).append((call.start_ns, until_ns))
    for report in reports:
        exposed = report.pieces.is_cause(COMM)
        rest, undecided = report.pieces.take(exposed).split(merge(judged[report.rank]))
        parts = [report.pieces.take(~exposed), undecided]
        for late, intervals in sorted(waits[report.rank].items()):
            waiting, rest = rest.split(merge(intervals))
            parts.append(replace(
                waiting, cause=np.full(len(waiting), NAMES.index(WAIT), np.int8), late=np.full(len(waiting), late),
                site=np.full(len(waiting), -1),
            ))  # fmt: skip
        parts.append(replace(rest, cause=np.full(len(rest), NAMES.index(WIRE), np.int8)))
        report.pieces = Pieces.concatenate(parts)


def _fill_gaps(reports: Sequence[RankReport], pieces: Pieces) -> Pieces:
    """Return the pieces of all ranks without gaps: what is not recorded is unknown, and why."""
    if not len(pieces):
        return pieces
    low_ns, high_ns = int(pieces.start_ns.min()), int(pieces.end_ns.max())
    begin_ns = min(report.begin_ns for report in reports)
    parts = [pieces]
    for report in reports:
        recorded = pieces.of_rank(report.rank, (low_ns, high_ns)).cover(*NAMES)
        gaps = intersect(complement(recorded), merge([(low_ns, high_ns)]))
        lag = f"not yet recorded (its recording begins {format_ns(report.begin_ns - begin_ns)} after the first)"
        for cover, state in ((merge([(low_ns, report.begin_ns)]), lag), (merge([(report.begin_ns, high_ns)]), "")):
            where = intersect(gaps, cover)
            sites = (CallSite(phase=state),)
            parts.append(Pieces.of(
                sites, report.rank, where.start_ns, where.end_ns, UNKNOWN, site=0 if state else -1
            ))  # fmt: skip
    return Pieces.concatenate(parts)


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
        factor = bus_factor(op, size) if size > 1 else None
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
    if not sized or (sized[0].nbytes == sized[-1].nbytes and len(sized) < 4):
        return 0
    fields = [(call.end_ns - call.start_ns, call.nbytes, call.exposed_ns) for call in sized]
    took_ns, nbytes, exposed_ns = np.array(fields, np.int64).T
    # Sorted by bytes, the largest first: the fastest so far bounds the time that the wire needs for the next.
    floor = np.minimum.accumulate(took_ns)
    floor = np.minimum(floor, took_ns.min() + 2 * nbytes * np.minimum.accumulate(took_ns / nbytes))
    return int(np.minimum(took_ns - floor, exposed_ns).sum())
