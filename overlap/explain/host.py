"""Gaps of a device (times in which it does nothing), divided among causes.

A gap ends when some work begins, which the host has launched. Until that launch the host is the cause of the gap, and
the launching thread shows what it did. After the launch the device is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..timeline.columnar import Int64s, Mask, Rows
from ..timeline.files.profile import NOTE, OPERATOR, PYTHON, RUNTIME, RankProfile
from ..timeline.files.windows import (
    BEGIN_CAPTURE,
    END_CAPTURE,
    GRAPH,
    STEP,
    WorkRows,
    launches_without_work,
    outermost_operators,
    union_all,
    union_of_rows,
)
from ..timeline.measure.intervals import Merged, covered_ns, cut_overlaps, intersect, intersect_each, subtract, union
from . import causes

QUEUED_NS = 20_000
"""A device begins queued work within this time of the end of the work before."""
LATENCY_NS = 100_000
"""Longest usual time from a launch to the start of the work on an idle device."""
LONG_CALL_NS = 1_000_000
"""A launch that takes longer does something besides: it loads code, or the queue is full."""
STARTUP_NS = 10_000_000
"""A call of the runtime that takes longer and neither waits nor allocates is start-up."""
PYTHON_NS = 200_000
"""If the launching thread runs no operator for this long, Python is the cause; less is usual in eager launching."""
BLOCKING_COPY_NS = 50_000
"""An asynchronous copy whose call takes at least this long has blocked the host."""

_SYNC = re.compile(r"Synchronize|MemcpyWithStream|^(cuda|hip)Memcpy(_\w+)?$|^synchronize(Stream)?$")
_ASYNC_COPY = re.compile(r"^(cuda|hip)Memcpy\w*Async|^cuMemcpy\w*Async")
_ALLOCATOR = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|HostFree|ExtMalloc)|^cuMem(Alloc|Free|Create|Map|Release|Add)"
)
_LOADS = re.compile(r"ModuleLoad|LibraryLoad|ModuleGetFunction|LinkCreate|LinkComplete")
_GC = re.compile(
    r"gc\.collect|built-in (function|method) collect|gc_callback|garbage|^gc( \(dynamo_timed\))?$", re.IGNORECASE
)
_COMPILE = re.compile(  # names of functions, for other functions of these files run at every call
    r"torch/_dynamo/convert_frame|torch/_inductor/\w+\.py\(\d+\): _?(compile|fx_codegen|codegen)|^_compile\.|"
    r"dynamo_timed|^(dynamo|entire_frame_compile)$|"
    r"triton/\S*\.py\(\d+\): (compile|_do_compile|make_\w+|_bench|do_bench\w*|_init_handles)$|"
    r"torch/_inductor/runtime/\S*\.py\(\d+\): (autotune|benchmark|bench)"
)
_DATA = re.compile(
    r"^enumerate\(DataLoader\)|torch/utils/data/dataloader\.py\(\d+\): __next__|DataLoaderIter.*__next__"
)
_LOCK = re.compile(
    r"(method|function) '?(acquire|wait|__enter__)'? of '?<?(_thread|_multiprocessing|unlocked|locked)|"
    r"threading\.py\(\d+\): (wait|acquire|join|_wait_for_tstate_lock)$|(^|/)queue\.py\(\d+\): (get|put|join)$"
)
_FILES = re.compile(
    r"'(read|read1|readinto|readline|readlines|write|writelines|flush)' of '_io\.|built-in method (read|readinto|write|"
    r"flush) of _io\.|built-in (function|method) (io\.|_io\.|posix\.)?(open|fsync|fdatasync|sendfile|pread|pwrite)\b|"
    r"torch/serialization\.py\(\d+\): (load|save)$|numpy/lib/\S*npyio\S*\.py\(\d+\): (load|save|savez\w*|fromfile)$|"
    r"safetensors/\S*\.py\(\d+\): (load|save)_file$"
)
_CAPTURE = re.compile(r"torch/cuda/graphs\.py\(\d+\): (?!replay|reset)")
_EVENT_WAIT = re.compile(r"StreamWaitEvent")
_MODULE = re.compile(r"^nn\.Module: ")
_TO_HOST = re.compile(r"DtoH|Device -> (Pageable|Pinned|Host)")
_INSTANTIATE = re.compile(r"GraphInstantiate")


class GapPieces(NamedTuple):
    """Columns of disjoint pieces of gaps. The call site of a piece is what `thread` did at `instant_ns`."""

    start_ns: Int64s
    end_ns: Int64s
    cause: NDArray[np.int8]  # index in `causes.NAMES`
    thread: Int64s  # -1: no call site
    instant_ns: Int64s

    @classmethod
    def of_intervals(
        cls, cause: str | Rows, where: Merged, *, thread: Int64s | int = -1, instant_ns: Int64s | None = None
    ) -> GapPieces:  # fmt: skip
        """Return intervals as pieces.

        Args:
            cause: The name of one cause for all, or the index of each piece's cause in `causes.NAMES`.
            where: The intervals.
            thread: Thread of the call sites; -1: no call sites.
            instant_ns: Instants of the call sites; None: the middles of the intervals.
        """
        number = causes.NAMES.index(cause) if isinstance(cause, str) else cause
        return cls(
            where.start_ns, where.end_ns, np.broadcast_to(number, len(where)).astype(np.int8),
            np.broadcast_to(thread, len(where)).astype(np.int64),
            where.start_ns + (where.end_ns - where.start_ns) // 2 if instant_ns is None else instant_ns,
        )  # fmt: skip

    @classmethod
    def concatenate(cls, parts: Sequence[GapPieces]) -> GapPieces:
        """Return the pieces of several tables, at least one, in one table."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


class _GapDivision:
    """Division of gaps among causes. Each cause in turn gets its part of the time that earlier causes have left.

    Attributes:
        pieces: The pieces that have a cause.
        left: The time without a cause so far; at the start, the gaps.

    Args:
        left: The gaps.
        thread: Thread whose activity gives the call sites.
    """

    def __init__(self, left: Merged, thread: int) -> None:
        self.unassigned, self._thread = left, thread
        self.pieces: list[GapPieces] = []

    def assign_cause(
        self, cause: str, cover: Merged, *, begins_ns: Int64s | None = None, has_site: bool = True
    ) -> None:
        """Give a cause the part of the unassigned time in which it held.

        `begins_ns` are starts of calls, ascending: a piece has the call site of the last before its end. None: the site
        of its middle.
        """
        where = intersect(self.unassigned, cover)
        if begins_ns is not None:
            begins_ns = begins_ns[np.maximum(np.searchsorted(begins_ns, where.end_ns, "left") - 1, 0)]
        thread = self._thread if has_site else -1
        self.pieces.append(GapPieces.of_intervals(cause, where, thread=thread, instant_ns=begins_ns))
        self.unassigned = subtract(self.unassigned, where)


def divide_device_gaps(profile: RankProfile, work: WorkRows, gaps: Merged, busy: Merged) -> GapPieces:
    """Divide the gaps of a device among causes; the pieces add up to the gaps.

    A gap ends with some work. Until the host launches this work, the host is late, and the activity of the launching
    thread is the cause. From the launch on, the device delays the work. Such a delay is usual for some time after a
    launch and between queued work. A longer delay is a wait for another stream, or its cause is unknown.

    Args:
        profile: The events.
        work: The work of the device.
        gaps: Times in which the device did nothing.
        busy: Times in which it did something.
    """
    rows = work.rows  # in order of start
    # For each gap: the work that ends it, the work that ran last before it, and the launch of the former.
    following = np.searchsorted(profile.start_ns[rows], gaps.end_ns, "left")
    row = np.append(rows, -1)[following]  # the work that ends each gap; -1: the recording ends it
    row_before = _last_ended_rows(profile, rows)[np.maximum(np.minimum(following, len(rows)) - 1, 0)]
    launch = np.where(row >= 0, work.launch[row], -1)  # -1: no launch is recorded
    is_launched, by_graph = launch >= 0, profile.name_matches(launch, GRAPH)
    thread, begin_ns, end_ns = profile.thread[launch], profile.start_ns[launch], profile.end_ns[launch]

    # The host's part of a gap lasts until the launch begins; if the launch takes long, until it ends.
    host_ends_ns = np.where(end_ns - begin_ns > LONG_CALL_NS, end_ns, begin_ns)
    host_ends_ns = np.where(is_launched, np.clip(host_ends_ns, gaps.start_ns, gaps.end_ns), gaps.start_ns)

    # The cause of the device's part of a gap.
    is_late = is_launched & (begin_ns > gaps.start_ns)  # launched after the gap began: nothing was queued
    in_same_graph = is_launched & by_graph & (profile.correlation[row_before] == profile.correlation[row])
    usual_ns = np.where(is_late | (by_graph & ~in_same_graph), LATENCY_NS, QUEUED_NS)
    is_usual = is_launched & (gaps.end_ns - host_ends_ns <= usual_ns)
    is_event = is_launched & ~is_late & ~in_same_graph & (profile.thread[row_before] != profile.thread[row])
    is_event &= is_usual | _follows_event_wait(profile, launch)
    names = (causes.EVENT, causes.LAUNCH, causes.QUEUE, causes.UNKNOWN)
    event, late, queue, unknown = map(causes.NAMES.index, names)
    cause = np.select([is_event, is_usual & is_late, is_usual], [event, late, queue], unknown)

    by_device = host_ends_ns < gaps.end_ns  # gaps that the device has a part of
    parts = [
        GapPieces.of_intervals(
            cause[by_device], Merged(host_ends_ns[by_device], gaps.end_ns[by_device]), instant_ns=begin_ns[by_device],
            thread=np.where(is_launched, thread, -1)[by_device],
        )
    ]  # fmt: skip
    by_host = is_launched & (host_ends_ns > gaps.start_ns)
    launchers = profile.threads_of(launch[by_host])
    for launcher in launchers:
        of_launcher = by_host & (thread == launcher)
        host_parts = Merged(gaps.start_ns[of_launcher], host_ends_ns[of_launcher])
        parts += _divide_late_host_gaps(profile, work, host_parts, launcher, launchers, busy)
    return GapPieces.concatenate(parts)


def _last_ended_rows(profile: RankProfile, rows: Rows) -> Rows:
    """Return, for each row in order of start, the row that ends last among it and those before.

    Rows 0, 1, 2 that end at 9, 5, 12 give 0, 0, 2.
    """
    ends_ns = profile.end_ns[rows]
    is_last = ends_ns == np.maximum.accumulate(ends_ns)
    return rows[np.maximum.accumulate(np.where(is_last, np.arange(len(rows)), 0))]


def work_pieces(profile: RankProfile, work: WorkRows, rows: Rows, cause: str, where: Merged) -> tuple[GapPieces, Rows]:
    """Divide the time of some work among its rows: an instant at which several run belongs to the one that began first.

    Args:
        profile: The events.
        work: The work of the device, or of the host.
        rows: Rows of the work, in order of start.
        cause: Cause of the pieces.
        where: Times that count; others are left out.

    Returns:
        The pieces, and the row of each piece.
    """
    row, start_ns, end_ns = cut_overlaps(profile.start_ns[rows], profile.end_ns[rows])
    at, start_ns, end_ns = intersect_each(start_ns, end_ns, where)
    rows = rows[row[at]]
    source = work.launch[rows] if work.on_device else rows
    thread = np.where(source >= 0, profile.thread[source], -1).astype(np.int64)
    pieces = GapPieces.of_intervals(cause, Merged(start_ns, end_ns), thread=thread, instant_ns=profile.start_ns[source])
    return pieces, rows


def _follows_event_wait(profile: RankProfile, launch: Rows) -> Mask:
    """Return, for each launch, whether the call before it on its thread made a stream wait for an event.

    False for row -1, which is no launch.
    """
    calls = profile.rows_of_kinds(RUNTIME)
    calls = calls[np.lexsort((profile.start_ns[calls], profile.thread[calls]))]
    waits = profile.name_matches(calls, _EVENT_WAIT)
    follows = np.zeros(len(profile.kind), bool)
    follows[calls[1:]] = waits[:-1] & (profile.thread[calls[1:]] == profile.thread[calls[:-1]])
    return follows[launch] & (launch >= 0)


def _divide_late_host_gaps(
    profile: RankProfile, work: WorkRows, parts: Merged, thread: int, launchers: Sequence[int], busy: Merged
) -> list[GapPieces]:  # fmt: skip
    """Divide the host's parts of gaps that ended with a launch of `thread` among causes, in the order below.

    `launchers` are all threads that were late; `busy` are times in which the device did something.
    """
    gaps = _GapDivision(parts, thread)
    calls = profile.rows_on_thread(profile.rows_of_kinds(RUNTIME), thread)
    gaps.assign_cause(causes.UNKNOWN, _unrecorded_work_times(profile, work, calls), has_site=False)
    syncs = calls[_is_device_wait(profile, work, calls)]
    functions = profile.rows_on_thread(profile.rows_of_kinds(PYTHON), thread)
    captures = union_of_rows(profile, profile.rows_matching(functions, _CAPTURE))
    # Waits inside a capture count as the capture. The 1 ns makes waits without length comparable.
    syncs = syncs[covered_ns(profile.start_ns[syncs], profile.end_ns[syncs] + 1, captures) == 0]
    for cause, cover in _late_host_causes(profile, thread, calls, syncs):
        gaps.assign_cause(cause, cover)
    # A wait for the device makes the host late while it lasts. After it the host must launch again what it could have
    # queued while the device was busy: the same time is counted once more.
    blocked_ns = covered_ns(profile.start_ns[syncs], profile.end_ns[syncs], busy)
    waits = union(profile.start_ns[syncs], profile.end_ns[syncs] + blocked_ns)
    gaps.assign_cause(causes.SYNC, waits, begins_ns=profile.start_ns[syncs])
    operators = profile.rows_of_kinds(OPERATOR)
    if len(own := profile.rows_on_thread(operators, thread)):
        others = operators[np.isin(profile.thread[operators], launchers)]
        idle = subtract(gaps.unassigned, union_of_rows(profile, np.concatenate([others, calls])))
        is_long = idle.end_ns - idle.start_ns >= PYTHON_NS
        gaps.assign_cause(causes.PYTHON, Merged(idle.start_ns[is_long], idle.end_ns[is_long]))
        gaps.unassigned = _cut_at_operators(profile, gaps.unassigned, outermost_operators(profile, own))
    # In the rest of the time the host was launching, too slowly.
    gaps.assign_cause(causes.LAUNCH, gaps.unassigned)
    return gaps.pieces


def _cut_at_operators(profile: RankProfile, parts: Merged, rows: Rows) -> Merged:
    """Return intervals, cut where operators begin and end, so that each part has one call site.

    The interval 0-10 and an operator from 3 to 6 give 0-3, 3-6 and 6-10.
    """
    # A bound strictly inside an interval is the end of one part and the start of the next.
    bounds_ns = np.concatenate([profile.start_ns[rows], profile.end_ns[rows]])
    at = np.searchsorted(parts.end_ns, bounds_ns, "left")
    at, bounds_ns = at[at < len(parts)], bounds_ns[at < len(parts)]
    bounds_ns = np.unique(bounds_ns[(parts.start_ns[at] < bounds_ns) & (bounds_ns < parts.end_ns[at])])
    return Merged(*(np.sort(np.concatenate([edges_ns, bounds_ns])) for edges_ns in (parts.start_ns, parts.end_ns)))


def _unrecorded_work_times(profile: RankProfile, work: WorkRows, calls: Rows) -> Merged:
    """Return the times in which the device may be busy with work that was not recorded.

    Each lasts from a launch without recorded work to the next launch with recorded work, or to the end of the profile.
    """
    with_work = calls[np.isin(calls, work.launch[work.rows])]
    lost_ns = profile.start_ns[launches_without_work(profile, calls)]
    following = np.searchsorted(profile.start_ns[with_work], lost_ns, "right")
    return union(lost_ns, np.append(profile.start_ns[with_work], profile.end_ns.max())[following])


def _is_device_wait(profile: RankProfile, work: WorkRows, calls: Rows) -> Mask:
    """Return a mask over calls: those that wait for the device, by synchronising or by a long copy to the host."""
    copies = profile.rows_matching(work.copies, _TO_HOST)
    is_long = profile.lengths_ns(calls) >= BLOCKING_COPY_NS
    is_long_copy = profile.name_matches(calls, _ASYNC_COPY) & is_long & np.isin(calls, work.launch[copies])
    return profile.name_matches(calls, _SYNC) | is_long_copy


def _late_host_causes(profile: RankProfile, thread: int, calls: Rows, syncs: Rows) -> Iterator[tuple[str, Merged]]:
    """Yield (cause, times in which it held) for a late host on a thread, in order of precedence.

    `syncs` are its calls that wait for the device.
    """
    events = profile.rows_on_thread(profile.rows_of_kinds(OPERATOR, NOTE, PYTHON), thread)
    # Each begin of a capture with the next end.
    begins, ends = profile.rows_matching(calls, BEGIN_CAPTURE), profile.rows_matching(calls, END_CAPTURE)
    following = np.searchsorted(profile.start_ns[ends], profile.start_ns[begins], "left")
    has_end = following < len(ends)
    captures = union(profile.start_ns[begins[has_end]], profile.end_ns[ends[following[has_end]]])
    capturing = [profile.rows_matching(events, _CAPTURE), profile.rows_matching(calls, _INSTANTIATE)]
    yield causes.CAPTURE, union_all(captures, *(union_of_rows(profile, rows) for rows in capturing))
    allocations = profile.rows_matching(calls, _ALLOCATOR)
    other = calls[~np.isin(calls, np.concatenate([allocations, syncs]))]
    took_ns = profile.lengths_ns(other)
    rows_of = {
        causes.GC: profile.rows_matching(events, _GC),
        causes.COMPILE: profile.rows_matching(events, _COMPILE),
        causes.ALLOCATOR: allocations,
        causes.STARTUP: other[profile.name_matches(other, _LOADS) | (took_ns >= STARTUP_NS)],
        causes.DATA: profile.rows_matching(events, _DATA),
        causes.COPY: other[profile.name_matches(other, _ASYNC_COPY) & (took_ns >= BLOCKING_COPY_NS)],
        causes.LOCK: profile.rows_matching(events, _LOCK),
        causes.FILES: profile.rows_matching(events, _FILES),
    }
    yield from ((cause, union_of_rows(profile, rows)) for cause, rows in rows_of.items())


def delay_causes(profile: RankProfile) -> list[tuple[str, Merged]]:
    """Return (cause, times in which it held) for causes that delay a host even while operators run, by precedence.

    Waits for locks and files count only on the program's thread, and only while no other thread runs operators.
    """
    events, operators = profile.rows_of_kinds(OPERATOR, NOTE, PYTHON), profile.rows_of_kinds(OPERATOR)
    thread, functions = _program_thread(profile)
    other_operators = union_of_rows(profile, operators[profile.thread[operators] != thread])
    on_any_thread = ((causes.DATA, _DATA), (causes.GC, _GC), (causes.COMPILE, _COMPILE))
    delays = [
        (cause, union_of_rows(profile, profile.rows_matching(events, pattern))) for cause, pattern in on_any_thread
    ]
    for cause, pattern in ((causes.LOCK, _LOCK), (causes.FILES, _FILES)):  # helper threads may wait all the time
        delays.append(
            (cause, subtract(union_of_rows(profile, profile.rows_matching(functions, pattern)), other_operators))
        )
    return delays


def divide_host_gaps(
    profile: RankProfile, gaps: Merged, delays: Sequence[tuple[str, Merged]], *, unknown: bool
) -> GapPieces:
    """Divide the time in which a host without a device ran no operator among causes; the pieces add up to the gaps.

    Args:
        profile: The events.
        gaps: Times without computes and communication.
        delays: (cause, times in which it held), by precedence: the result of `delay_causes`.
        unknown: Whether the machine has a device whose events were not recorded.
    """
    thread, events = _program_thread(profile)
    division = _GapDivision(gaps, thread)
    for cause, cover in delays:
        division.assign_cause(cause, cover)
    division.assign_cause(causes.UNKNOWN, union_of_rows(profile, modules_without_operators(profile)), has_site=False)
    if len(events) and not unknown:
        # Python runs from the start of the thread's first event to its last end: one interval.
        division.assign_cause(
            causes.PYTHON, Merged(profile.start_ns[events[:1]], profile.end_ns[events].max(keepdims=True))
        )
    division.assign_cause(causes.UNKNOWN, division.unassigned)
    return GapPieces.concatenate(division.pieces)


def _program_thread(profile: RankProfile) -> tuple[int, Rows]:
    """Return the thread that runs the program, and the rows of its functions, or of its operators without functions.

    That is the thread that marks the steps; without marks, the one with the most time in operators. Time in functions
    does not count, as functions of helper threads may run all the time. Without any event it is -1.
    """
    functions, operators, notes = (profile.rows_of_kinds(kind) for kind in (PYTHON, OPERATOR, NOTE))
    events = functions if len(functions) else operators
    if not len(events):
        return -1, events
    marks = profile.rows_matching(notes, STEP)
    # Score of a thread: its time in operators, or infinite if it marks the steps.
    took_ns = (profile.end_ns - profile.start_ns)[operators].astype(np.float64)
    score = np.bincount(profile.thread[operators], took_ns, len(profile.threads)).astype(np.float64)
    score[profile.thread[marks]] = np.inf
    thread = max(profile.threads_of(events), key=lambda each: score[each])
    return thread, profile.rows_on_thread(events, thread)


def modules_without_operators(profile: RankProfile) -> Rows:
    """Return the rows of modules (`nn.Module`) that run on threads without any recorded operator."""
    functions = profile.rows_of_kinds(PYTHON)
    modules = profile.rows_matching(functions, _MODULE)
    return modules[~np.isin(profile.thread[modules], profile.thread[profile.rows_of_kinds(OPERATOR)])]
