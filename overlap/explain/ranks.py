"""Profiles of several ranks: their clocks are aligned, collectives matched, and late ranks found."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from ..timeline.measure.intervals import Interval, Merged, complement, intersect, merge, total_length_ns
from ..timeline.measure.operations import bus_factor
from ..units import format_ns
from .causes import COMM, COMPUTE, LOOP, NAMES, UNKNOWN, WAIT, WIRE, WORDING
from .pieces import Pieces
from .rank import ProfiledCollective, RankReport
from .sites import CallSite

SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank can end before all have begun: only these show differences of clocks, and late ranks."""
_UNEVEN = ("all_to_all", "all_gather", "reduce_scatter")
"""Collectives whose sizes may differ between ranks."""
_OUT_OF_ORDER = 0.1
"""If more than this part of the matched collectives end on a rank before another has begun, the match is wrong."""

Match = Mapping[int, ProfiledCollective]
"""One collective by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRank:
    """A rank that others waited for in a step."""

    rank: int | None  # None: a rank that is not recorded
    step: int | None
    waited_ns: int  # time that other ranks waited for this one, added up
    cause: str  # what this rank spent most of that time on, one of `causes.NAMES`; "" if unknown
    site: CallSite  # call site of the cause; without a cause, of the operation that the rank was late for

    @property
    def doing(self) -> str:
        """Main activity of the rank in that time, with its call site, such as "compute 'loss' at train.py:41"."""
        where = str(self.site)
        if self.cause == COMPUTE:
            return f"compute {where}".rstrip()
        if self.cause in ("", UNKNOWN):
            # A site with only a phase is a state, such as "not yet recorded".
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
    """Return the ranks that others waited for in pieces of a step, the most awaited first.

    The cause of a late rank is the one with most of the waiting time, and its call site the one with most of that.
    """
    found = []
    for rank, waits in pieces.by_late_rank():
        lengths_ns = waits.lengths_ns
        # Time by cause and call site. One more row and column: the index -1, unknown, means the last one.
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


def divide_exposed_time(reports: Sequence[RankReport]) -> tuple[Pieces, list[str]]:
    """Return the pieces of all ranks, with exposed communication divided into waiting and wire, and notes.

    A rank waits in a collective until the last rank begins it. This is known only for collectives that all members
    have recorded, and if the clocks can be aligned. Other exposed communication stays undivided, and a note gives the
    reason. The reports are changed: all instants are moved to the clock of the first rank.
    """
    notes = _split_wait_and_wire(reports) if len(reports) > 1 else []
    pieces = Pieces.concatenate([report.pieces for report in reports])
    every = _fill_gaps(reports, pieces)
    return Pieces.concatenate(replace(pieces, sites=every.sites).follow_waits(every)), notes


def _split_wait_and_wire(reports: Sequence[RankReport]) -> list[str]:
    """Split the exposed communication of each report, in place, into waiting for a rank and time on the wire.

    Returns notes: how clocks were aligned, and why communication could not be split.
    """
    matches, notes = _match_collectives(reports)
    if not matches:
        return [*notes, "collectives of the ranks cannot be matched: waiting and wire cannot be told apart"]
    notes.append(_align_clocks(reports, matches))
    matches, _ = _match_collectives(reports)  # the same collectives, now on one clock
    # A synchronising collective cannot end before all ranks have begun: then the match or the clock is wrong.
    broken = sum(
        min(call.end_ns for call in calls.values()) < max(call.start_ns for call in calls.values()) for calls in matches
    )
    if broken > _OUT_OF_ORDER * len(matches):
        return [
            *notes,
            f"{broken} of {len(matches)} matched collectives end on a rank before another has begun: clocks do not "
            "fit, or the files are of two runs; waiting and wire cannot be told apart",
        ]
    _split_exposed_of_matches(reports, matches)
    return notes


def _match_collectives(reports: Sequence[RankReport]) -> tuple[list[Match], list[str]]:
    """Match the synchronising collectives of ranks by group, kind and number; return notes on the others, too.

    Only those count that all members recorded, with equal sizes where these must be equal.
    """
    world, notes = max(report.world_size for report in reports), list[str]()
    several = any(report.has_subgroups for report in reports)
    if several and any(not call.group for report in reports for call in report.calls):
        notes.append("collectives that do not name their group, of which the job has several: not matched")
    by_key: dict[tuple[str, str, int], dict[int, ProfiledCollective]] = {}
    for report in reports:
        for call in report.calls:
            if call.op in SYNCHRONISING and (call.group or not several):
                by_key.setdefault((call.group, call.op, call.number), {})[report.rank] = call
    complete, same = 0, list[Match]()
    for (_, op, _), calls in by_key.items():
        # Size 0: the size of the group is not recorded, and it counts as the world.
        if len(calls) == (next(iter(calls.values())).group_size or world) and len(calls) > 1:
            complete += 1
            if op in _UNEVEN or len({call.nbytes for call in calls.values()}) == 1:
                same.append(calls)
    if len(same) < complete:
        notes.append(f"{complete - len(same)} collectives differ in size between ranks: left out")
    return same, notes


def _align_clocks(reports: Sequence[RankReport], matches: Sequence[Match]) -> str:
    """Move the instants of all reports to the clock of the first rank, and return a note on it.

    A rank's clock is ahead by the median difference between ends of the same collective. Ranks of one host have one
    clock already.
    """
    hosts = {str(report.header.get("host_name", "")) for report in reports}
    if len(hosts) == 1 and "" not in hosts:
        return "clocks: one host, one clock"
    first, errors = reports[0].rank, list[int]()
    for report in reports[1:]:
        both = [calls for calls in matches if report.rank in calls and first in calls]
        ends = [calls[report.rank].end_ns - calls[first].end_ns for calls in both]
        ahead_ns = round(median(ends)) if ends else 0
        errors += [abs(end - ahead_ns) for end in ends]
        report.shift_clock(-ahead_ns)
    off_ns = median(errors) if errors else 0
    why = "hosts are not named" if "" in hosts else f"{len(hosts)} hosts"
    return f"clocks: {why}: aligned on the ends of {len(matches)} collectives, within {format_ns(off_ns)} (median)"


def _split_exposed_of_matches(reports: Sequence[RankReport], matches: Sequence[Match]) -> None:
    """Split the exposed communication of each report, in place, as far as it is in matched collectives."""
    # By rank: its waits, by the rank that it waits for; and all times in matched collectives.
    waits: dict[int, dict[int, list[Interval]]] = {report.rank: {} for report in reports}
    judged: dict[int, list[Interval]] = {report.rank: [] for report in reports}
    for calls in matches:
        # The rank that begins last; of several, the lowest.
        late = max(calls, key=lambda rank: (calls[rank].start_ns, -rank))
        for rank, call in calls.items():
            judged[rank].append((call.start_ns, call.end_ns))
            until_ns = min(calls[late].start_ns, call.end_ns)
            if rank != late and until_ns > call.start_ns:
                waits[rank].setdefault(late, []).append((call.start_ns, until_ns))
    for report in reports:
        exposed = report.pieces.is_cause(COMM)
        rest, undecided = report.pieces.take(exposed).split_by_cover(merge(judged[report.rank]))
        parts = [report.pieces.take(~exposed), undecided]
        for late, intervals in sorted(waits[report.rank].items()):
            # `split_by_cover` takes the instants away, so that each counts for one late rank only.
            waiting, rest = rest.split_by_cover(merge(intervals))
            parts.append(replace(
                waiting, cause=np.full(len(waiting), NAMES.index(WAIT), np.int8), late=np.full(len(waiting), late),
                site=np.full(len(waiting), -1),
            ))  # fmt: skip
        parts.append(replace(rest, cause=np.full(len(rest), NAMES.index(WIRE), np.int8)))
        report.pieces = Pieces.concatenate(parts)


def _fill_gaps(reports: Sequence[RankReport], pieces: Pieces) -> Pieces:
    """Return the pieces of all ranks, with pieces of unknown cause in the gaps between them.

    Before a rank's recording begins, the call site of such a piece is the text that it is not yet recorded.
    """
    if not len(pieces):
        return pieces
    low_ns, high_ns = int(pieces.start_ns.min()), int(pieces.end_ns.max())
    begin_ns = min(report.begin_ns for report in reports)
    parts = [pieces]
    for report in reports:
        recorded = pieces.cut_to_rank_window(report.rank, (low_ns, high_ns)).instants_of_causes(*NAMES)
        gaps = intersect(complement(recorded), merge([(low_ns, high_ns)]))
        lag = f"not yet recorded (its recording begins {format_ns(report.begin_ns - begin_ns)} after the first)"
        for cover, state in ((merge([(low_ns, report.begin_ns)]), lag), (merge([(report.begin_ns, high_ns)]), "")):
            where = intersect(gaps, cover)
            sites = (CallSite(phase=state),)
            parts.append(Pieces.of_one_rank(
                sites, report.rank, where.start_ns, where.end_ns, UNKNOWN, site=0 if state else -1
            ))  # fmt: skip
    return Pieces.concatenate(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All calls of one operation on one group by a rank in a step; of timelines, at one line, averaged over ranks."""

    op: str
    group: str
    group_size: int
    calls: int
    nbytes: int  # of all calls together
    total_ns: int  # of all calls together, exposed or hidden
    exposed_ns: int
    algorithm_gb_s: float | None  # bytes over time, of the fastest of the calls with the most bytes
    bus_gb_s: float | None  # the same as bus bandwidth, see `bus_factor`
    link_gb_s: float | None  # of a device's links to others of its host, one direction; None: unknown, several hosts
    waits_at_least_ns: int  # part of the exposed time that must be waiting, see `_least_wait_ns`


_LINKS_GB_S = (
    (r"V100-SXM", 150), (r"A100-(SXM|PG)", 300), (r"H100 80GB HBM3|H100 SXM|H200", 450), (r"\bG?B[23]00", 900),
    (r"MI300X", 448), (r"MI355X", 535.5),
)  # fmt: skip
"""Links of a device to the others of its host, one direction (vendors' pages; stas00/ml-engineering, network)."""
MAX_HOST_DEVICES = 8
"""A job with at most this many ranks is taken to run on one host."""


def link_gb_s(device: str, world_size: int) -> float | None:
    """Return the GB/s of a device's links to others of its host, or None if unknown or if there are several hosts."""
    if world_size > MAX_HOST_DEVICES:
        return None
    return next((float(speed) for pattern, speed in _LINKS_GB_S if re.search(pattern, device)), None)


def sum_traffic(calls: Sequence[ProfiledCollective], exposed: Merged, link: float | None = None) -> list[Traffic]:
    """Add up calls by operation and group; the sum with the most exposed time is first.

    The exposed time of calls in parallel counts once.

    Args:
        calls: Calls of one rank in one step.
        exposed: Times at which communication is exposed.
        link: GB/s of the links of a device; None: unknown.
    """
    kinds: dict[tuple[str, str], list[ProfiledCollective]] = {}
    for call in calls:
        kinds.setdefault((call.op, call.group), []).append(call)
    traffics = []
    for (op, group), of_kind in kinds.items():
        most = max(call.nbytes for call in of_kind)
        best_ns = min(call.end_ns - call.start_ns for call in of_kind if call.nbytes == most)
        size = of_kind[0].group_size
        # A byte per nanosecond is a GB per second.
        speed = most / best_ns if most and best_ns else None
        exposed_ns = total_length_ns(intersect(merge((call.start_ns, call.end_ns) for call in of_kind), exposed))
        factor = bus_factor(op, size) if size > 1 else None
        traffics.append(Traffic(
            op=op, group=group, group_size=size, calls=len(of_kind), nbytes=sum(call.nbytes for call in of_kind),
            total_ns=sum(call.end_ns - call.start_ns for call in of_kind),
            exposed_ns=exposed_ns, algorithm_gb_s=speed,
            bus_gb_s=speed * factor if speed is not None and factor is not None else None,
            link_gb_s=link, waits_at_least_ns=min(_least_wait_ns(of_kind), exposed_ns),
        ))  # fmt: skip
    return sorted(traffics, key=lambda each: (-each.exposed_ns, -each.total_ns))


def _least_wait_ns(calls: Sequence[ProfiledCollective]) -> int:
    """Return the nanoseconds that calls of one kind must have waited, added up: their time above a bound.

    A call without waits takes no longer than a call with as many bytes or more. Nor does it take longer than the
    shortest call plus twice the time per byte of a larger call: NCCL's protocol for small messages has half the
    bandwidth (nccl, src/graph/tuning.cc). The smaller bound counts. 0 if too few calls are comparable.
    """
    sized = sorted((call for call in calls if call.nbytes), key=lambda call: -call.nbytes)
    if not sized or (sized[0].nbytes == sized[-1].nbytes and len(sized) < 4):
        return 0
    fields = [(call.end_ns - call.start_ns, call.nbytes, call.exposed_ns) for call in sized]
    took_ns, nbytes, exposed_ns = np.array(fields, np.int64).T
    # The largest calls come first, so the running minimum is the fastest call with as many bytes or more.
    floor = np.minimum.accumulate(took_ns)
    floor = np.minimum(floor, took_ns.min() + 2 * nbytes * np.minimum.accumulate(took_ns / nbytes))
    return int(np.minimum(took_ns - floor, exposed_ns).sum())
