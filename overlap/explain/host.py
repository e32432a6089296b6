"""Gaps of a device, divided by the host's activity in them.

A gap ends with the work N, and L is the launch of N. Up to the start of L the host is the cause, whose thread of L
shows what it did; from there on the device is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..timeline.files.profile import NOTE, OPERATOR, PYTHON, RUNTIME, Int64s, RankProfile
from ..timeline.files.windows import GRAPH, STEP, Rows, WorkRows, lost_launches, outermost, rows_union, union_all
from ..timeline.measure.intervals import Merged, covered_ns, cut_at_earlier, intersect, intersect_each, subtract, union
from . import causes

QUEUED_NS = 20_000
"""A device begins queued work within this time of the end of the last."""
LATENCY_NS = 100_000
"""Time from a launch to its start on an idle device; with more, something else delayed it."""
LONG_CALL_NS = 1_000_000
"""A launch that takes longer does something besides: it loads code, or the queue is full."""
STARTUP_NS = 10_000_000
"""A call of the runtime that takes longer and neither waits nor allocates is start-up."""
PYTHON_NS = 200_000
"""Time without an operator on the launching thread; less is a part of eager launching."""
BLOCKING_COPY_NS = 50_000

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
_BEGIN_CAPTURE = re.compile(r"StreamBeginCapture")
_END_CAPTURE = re.compile(r"StreamEndCapture")
_EVENT_WAIT = re.compile(r"StreamWaitEvent")
_MODULE = re.compile(r"^nn\.Module: ")
_TO_HOST = re.compile(r"DtoH|Device -> (Pageable|Pinned|Host)")
_INSTANTIATE = re.compile(r"GraphInstantiate")


class GapPieces(NamedTuple):
    """Columns of disjoint pieces of gaps: each has one cause, and the call site of an instant of a thread."""

    start_ns: Int64s
    end_ns: Int64s
    cause: NDArray[np.int8]  # index in `causes.NAMES`
    thread: Int64s  # -1 without one
    instant_ns: Int64s

    @classmethod
    def of(
        cls, cause: str | Rows, where: Merged, *, thread: Int64s | int = -1, instant_ns: Int64s | None = None
    ) -> GapPieces:  # fmt: skip
        """Return intervals as pieces, of one cause or of one each; by default with the call sites of their middles.

        Args:
            cause: A name, or the index of each piece's cause in `causes.NAMES`.
            where: The intervals.
            thread: Thread of the call sites.
            instant_ns: Instants of the call sites.
        """
        number = causes.NAMES.index(cause) if isinstance(cause, str) else cause
        return cls(
            where.start_ns, where.end_ns, np.broadcast_to(number, len(where)).astype(np.int8),
            np.broadcast_to(thread, len(where)).astype(np.int64),
            where.start_ns + (where.end_ns - where.start_ns) // 2 if instant_ns is None else instant_ns,
        )  # fmt: skip

    @classmethod
    def concatenate(cls, parts: Sequence[GapPieces]) -> GapPieces:
        """Return the pieces of several parts, at least one."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


class _Division:
    """Division of gaps among causes, each of which takes its part of what is left.

    Args:
        left: The gaps.
        thread: Thread whose activity shows the call sites.

    Attributes:
        pieces: The parts that were taken.
        left: What no cause has taken yet.
    """

    def __init__(self, left: Merged, thread: int) -> None:
        self.left, self._thread = left, thread
        self.pieces: list[GapPieces] = []

    def take(self, cause: str, cover: Merged, *, begins_ns: Int64s | None = None, has_site: bool = True) -> None:
        """Give a cause the part of what is left that a union covers.

        Args:
            cause: The cause.
            cover: When it held.
            begins_ns: A part has the call site of the last of these instants before its end; None: of its middle.
            has_site: Whether the parts have a call site.
        """
        where = intersect(self.left, cover)
        if begins_ns is not None:
            begins_ns = begins_ns[np.maximum(np.searchsorted(begins_ns, where.end_ns, "left") - 1, 0)]
        thread = self._thread if has_site else -1
        self.pieces.append(GapPieces.of(cause, where, thread=thread, instant_ns=begins_ns))
        self.left = subtract(self.left, where)


def device_gaps(profile: RankProfile, work: WorkRows, gaps: Merged, busy: Merged) -> GapPieces:
    """Divide the gaps of a device; the pieces add up to the gaps.

    A gap ends with some work. Until the host launches it, the host is late: what its thread does is the cause. From
    then on the device delays it. That is usual for some time after a launch and between queued work; or the work waits
    for another stream; or nothing shows why.

    Args:
        profile: The events.
        work: The work of the device.
        gaps: Times in which the device did nothing.
        busy: Times in which it did something.
    """
    rows = work.rows
    following = np.searchsorted(profile.start_ns[rows], gaps.end_ns, "left")
    row = np.append(rows, -1)[following]  # the work that ends each gap; -1: the recording ends it
    before = _last_ended(profile, rows)[np.maximum(np.minimum(following, len(rows)) - 1, 0)]
    launch = np.where(row >= 0, work.launch[row], -1)
    launched, by_graph = launch >= 0, profile.matches(launch, GRAPH)
    thread, begin_ns, end_ns = profile.thread[launch], profile.start_ns[launch], profile.end_ns[launch]

    # The host's part lasts until the launch begins; one that takes long is a part of it.
    host_ends_ns = np.where(end_ns - begin_ns > LONG_CALL_NS, end_ns, begin_ns)
    host_ends_ns = np.where(launched, np.clip(host_ends_ns, gaps.start_ns, gaps.end_ns), gaps.start_ns)

    is_late = launched & (begin_ns > gaps.start_ns)
    in_graph = launched & by_graph & (profile.correlation[before] == profile.correlation[row])
    usual_ns = np.where(is_late | (by_graph & ~in_graph), LATENCY_NS, QUEUED_NS)
    is_usual = launched & (gaps.end_ns - host_ends_ns <= usual_ns)
    is_event = launched & ~is_late & ~in_graph & (profile.thread[before] != profile.thread[row])
    is_event &= is_usual | _follows_event_wait(profile, launch)
    names = (causes.EVENT, causes.LAUNCH, causes.QUEUE, causes.UNKNOWN)
    event, late, queue, unknown = map(causes.NAMES.index, names)
    cause = np.select([is_event, is_usual & is_late, is_usual], [event, late, queue], unknown)
    device = host_ends_ns < gaps.end_ns
    parts = [
        GapPieces.of(
            cause[device], Merged(host_ends_ns[device], gaps.end_ns[device]), instant_ns=begin_ns[device],
            thread=np.where(launched, thread, -1)[device],
        )
    ]  # fmt: skip
    host = launched & (host_ends_ns > gaps.start_ns)
    launchers = np.unique(thread[host]).astype(np.int64)
    for each in launchers.tolist():
        mine = host & (thread == each)
        parts += _late_host_pieces(
            profile, work, Merged(gaps.start_ns[mine], host_ends_ns[mine]), each, launchers, busy
        )
    return GapPieces.concatenate(parts)


def _last_ended(profile: RankProfile, rows: Rows) -> Rows:
    """Return, for each row of work in order of start, the row that ends last among it and those before it."""
    ends_ns = profile.end_ns[rows]
    is_last = ends_ns == np.maximum.accumulate(ends_ns)
    found: Rows = rows[np.maximum.accumulate(np.where(is_last, np.arange(len(rows)), 0))]
    return found


def work_pieces(profile: RankProfile, work: WorkRows, rows: Rows, cause: str, where: Merged) -> tuple[GapPieces, Rows]:
    """Return the time of some work, divided among its rows, and the row of each piece.

    An instant at which several run belongs to the one that began first.

    Args:
        profile: The events.
        work: The work of the device, or of the host.
        rows: Rows of the work, in order of start.
        cause: Cause of the pieces.
        where: Instants that count.
    """
    row, start_ns, end_ns = cut_at_earlier(profile.start_ns[rows], profile.end_ns[rows])
    at, start_ns, end_ns = intersect_each(start_ns, end_ns, where)
    rows = rows[row[at]]
    source = work.launch[rows] if work.on_device else rows
    thread = np.where(source >= 0, profile.thread[source], -1).astype(np.int64)
    pieces = GapPieces.of(cause, Merged(start_ns, end_ns), thread=thread, instant_ns=profile.start_ns[source])
    return pieces, rows


def _follows_event_wait(profile: RankProfile, launch: Rows) -> NDArray[np.bool_]:
    """Return a mask over launches: whether the thread's call before it lets a stream wait for an event."""
    calls = profile.rows(RUNTIME)
    calls = calls[np.lexsort((profile.start_ns[calls], profile.thread[calls]))]
    waits = profile.matches(calls, _EVENT_WAIT)
    follows = np.zeros(len(profile.kind), bool)
    follows[calls[1:]] = waits[:-1] & (profile.thread[calls[1:]] == profile.thread[calls[:-1]])
    found: NDArray[np.bool_] = follows[launch] & (launch >= 0)
    return found


def _late_host_pieces(
    profile: RankProfile, work: WorkRows, parts: Merged, thread: int, launchers: Int64s, busy: Merged
) -> list[GapPieces]:  # fmt: skip
    """Return the host's parts of gaps by cause; earlier causes have precedence.

    Args:
        profile: The events.
        work: The work of the device.
        parts: The host's parts of the gaps that launches of a thread ended.
        thread: The thread.
        launchers: All threads that were late with a launch.
        busy: Times in which the device did something.
    """
    gaps = _Division(parts, thread)
    calls = _rows_of_thread(profile, profile.rows(RUNTIME), thread)
    gaps.take(causes.UNKNOWN, _unrecorded_work(profile, work, calls), has_site=False)
    syncs = calls[_is_device_wait(profile, work, calls)]
    functions = _rows_of_thread(profile, profile.rows(PYTHON), thread)
    captures = rows_union(profile, profile.named(functions, _CAPTURE))
    syncs = syncs[covered_ns(profile.start_ns[syncs], profile.end_ns[syncs] + 1, captures) == 0]
    for cause, cover in _late_host_causes(profile, thread, calls, syncs):
        gaps.take(cause, cover)
    # A wait makes the host late, and for as long again as the device was busy in it.
    blocked_ns = covered_ns(profile.start_ns[syncs], profile.end_ns[syncs], busy)
    waits = union(profile.start_ns[syncs], profile.end_ns[syncs] + blocked_ns)
    gaps.take(causes.SYNC, waits, begins_ns=profile.start_ns[syncs])
    operators = profile.rows(OPERATOR)
    if len(own := _rows_of_thread(profile, operators, thread)):
        others = operators[np.isin(profile.thread[operators], launchers)]
        idle = subtract(gaps.left, rows_union(profile, np.concatenate([others, calls])))
        is_long = idle.end_ns - idle.start_ns >= PYTHON_NS
        gaps.take(causes.PYTHON, Merged(idle.start_ns[is_long], idle.end_ns[is_long]))
        gaps.left = _cut_at_operators(profile, gaps.left, outermost(profile, own))
    gaps.take(causes.LAUNCH, gaps.left)
    return gaps.pieces


def _cut_at_operators(profile: RankProfile, parts: Merged, rows: Rows) -> Merged:
    """Return intervals cut where some operators begin and end, so that each part has one call site."""
    # A bound strictly inside an interval is the end of one part and the start of the next.
    bounds_ns = np.unique(np.concatenate([profile.start_ns[rows], profile.end_ns[rows]]))
    at = np.searchsorted(parts.end_ns, bounds_ns, "left")
    at, bounds_ns = at[at < len(parts)], bounds_ns[at < len(parts)]
    bounds_ns = bounds_ns[(parts.start_ns[at] < bounds_ns) & (bounds_ns < parts.end_ns[at])]
    return Merged(*(np.sort(np.concatenate([each, bounds_ns])) for each in (parts.start_ns, parts.end_ns)))


def _unrecorded_work(profile: RankProfile, work: WorkRows, calls: Rows) -> Merged:
    """Return the times from launches without recorded work to the next launch with it: the device may be busy."""
    known = np.isin(calls, work.launch[work.rows])
    lost = lost_launches(profile, work, calls)
    begins_ns = np.append(profile.start_ns[calls[known]], profile.end_ns.max())
    return union(profile.start_ns[lost], begins_ns[np.searchsorted(begins_ns[:-1], profile.start_ns[lost], "right")])


def _rows_of_thread(profile: RankProfile, rows: Rows, thread: int) -> Rows:
    found: Rows = rows[profile.thread[rows] == thread]
    return found


def _is_device_wait(profile: RankProfile, work: WorkRows, calls: Rows) -> NDArray[np.bool_]:
    """Return a mask over calls: synchronisations with the device, and long copies to the host."""
    copies = profile.named(work.copies, _TO_HOST)
    is_long = profile.end_ns[calls] - profile.start_ns[calls] >= BLOCKING_COPY_NS
    copies_long = profile.matches(calls, _ASYNC_COPY) & is_long & np.isin(calls, work.launch[copies])
    found: NDArray[np.bool_] = profile.matches(calls, _SYNC) | copies_long
    return found


def _late_host_causes(profile: RankProfile, thread: int, calls: Rows, syncs: Rows) -> Iterator[tuple[str, Merged]]:
    """Yield causes of a late host, and when they held on a thread, in order of precedence."""
    events = _rows_of_thread(profile, profile.rows(OPERATOR, NOTE, PYTHON), thread)
    begins, ends = profile.named(calls, _BEGIN_CAPTURE), profile.named(calls, _END_CAPTURE)
    after = np.searchsorted(profile.start_ns[ends], profile.start_ns[begins], "left")
    whole = after < len(ends)
    captures = union(profile.start_ns[begins[whole]], profile.end_ns[ends[after[whole]]])
    capturing = [profile.named(events, _CAPTURE), profile.named(calls, _INSTANTIATE)]  # with garbage, and waits
    yield causes.CAPTURE, union_all(captures, *(rows_union(profile, rows) for rows in capturing))
    allocations = profile.named(calls, _ALLOCATOR)
    other = calls[~np.isin(calls, np.concatenate([allocations, syncs]))]
    took_ns = profile.end_ns[other] - profile.start_ns[other]
    rows_of = {
        causes.GC: profile.named(events, _GC),
        causes.COMPILE: profile.named(events, _COMPILE),
        causes.ALLOCATOR: allocations,
        causes.STARTUP: other[profile.matches(other, _LOADS) | (took_ns >= STARTUP_NS)],
        causes.DATA: profile.named(events, _DATA),
        causes.COPY: other[profile.matches(other, _ASYNC_COPY) & (took_ns >= BLOCKING_COPY_NS)],
        causes.LOCK: profile.named(events, _LOCK),
        causes.FILES: profile.named(events, _FILES),
    }
    yield from ((cause, rows_union(profile, rows)) for cause, rows in rows_of.items())


def delay_causes(profile: RankProfile) -> list[tuple[str, Merged]]:
    """Return causes that delay a host also while operators run, and when they held on any thread, by precedence."""
    around, operators = profile.rows(OPERATOR, NOTE, PYTHON), profile.rows(OPERATOR)
    thread, events = _program_thread(profile)
    elsewhere = rows_union(profile, operators[profile.thread[operators] != thread])
    anywhere = ((causes.DATA, _DATA), (causes.GC, _GC), (causes.COMPILE, _COMPILE))
    found = [(cause, rows_union(profile, profile.named(around, pattern))) for cause, pattern in anywhere]
    for cause, pattern in ((causes.LOCK, _LOCK), (causes.FILES, _FILES)):  # other threads may wait all the time
        found.append((cause, subtract(rows_union(profile, profile.named(events, pattern)), elsewhere)))
    return found


def host_gaps(profile: RankProfile, gaps: Merged, delays: Sequence[tuple[str, Merged]], *, unknown: bool) -> GapPieces:
    """Divide the time in which a host without a device ran no operator; the pieces add up to the gaps.

    Args:
        profile: The events.
        gaps: Times without computes and communication.
        delays: Causes that also hold while operators run, each with its times, by precedence.
        unknown: Whether a device was at work whose events are not recorded.
    """
    thread, events = _program_thread(profile)
    division = _Division(gaps, thread)
    for cause, cover in delays:
        division.take(cause, cover)
    division.take(causes.UNKNOWN, rows_union(profile, silent_modules(profile)), has_site=False)
    if len(events) and not unknown:  # Python runs between the thread's first and last event
        division.take(causes.PYTHON, Merged(profile.start_ns[events[:1]], profile.end_ns[events].max(keepdims=True)))
    division.take(causes.UNKNOWN, division.left)
    return GapPieces.concatenate(division.pieces)


def _program_thread(profile: RankProfile) -> tuple[int, Rows]:
    """Return the thread of the program, and its functions, or operators if no function is recorded.

    It marks the steps, or else has the most operators: functions of other threads may run all the time.
    """
    functions, operators, notes = (profile.rows(kind) for kind in (PYTHON, OPERATOR, NOTE))
    events = functions if len(functions) else operators
    if not len(events):
        return -1, events
    marks = profile.named(notes, STEP)
    # Score of a thread: its time in operators, or infinite if it marks the steps.
    took_ns = (profile.end_ns - profile.start_ns)[operators].astype(np.float64)
    score = np.bincount(profile.thread[operators], took_ns, len(profile.threads)).astype(np.float64)
    score[profile.thread[marks]] = np.inf
    threads = np.unique(profile.thread[events])
    thread = int(threads[score[threads].argmax()])
    return thread, _rows_of_thread(profile, events, thread)


def silent_modules(profile: RankProfile) -> Rows:
    """Return the rows of modules that run on threads without any recorded operator."""
    functions = profile.rows(PYTHON)
    modules = profile.named(functions, _MODULE)
    return modules[~np.isin(profile.thread[modules], profile.thread[profile.rows(OPERATOR)])]
