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
from ..timeline.measure.intervals import (
    Merged,
    clip,
    covered_ns,
    cut_at_earlier,
    intersect,
    intersect_each,
    subtract,
    union,
)
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
    """Columns of disjoint pieces of gaps: each has one cause, and the place of an instant of a thread."""

    start_ns: Int64s
    end_ns: Int64s
    cause: NDArray[np.int8]  # index in `causes.NAMES`
    thread: Int64s  # -1 without one
    instant_ns: Int64s

    @classmethod
    def of(
        cls, cause: str, where: Merged, *, thread: Int64s | int = -1, instant_ns: Int64s | None = None
    ) -> GapPieces:  # fmt: skip
        """Return intervals as pieces of one cause; a piece's place is that of its middle, or of `instant_ns`."""
        return cls(
            where.start_ns, where.end_ns, np.full(len(where), causes.NAMES.index(cause), np.int8),
            np.broadcast_to(thread, len(where)).astype(np.int64),
            (where.start_ns + where.end_ns) // 2 if instant_ns is None else instant_ns,
        )  # fmt: skip

    @classmethod
    def concatenate(cls, parts: Sequence[GapPieces]) -> GapPieces:
        """Return the pieces of several parts, at least one."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


_EVER = np.iinfo(np.int64)


def device_gaps(profile: RankProfile, work: WorkRows, gaps: Merged, busy: Merged) -> GapPieces:
    """Divide the gaps of a device; the pieces add up to the gaps."""
    rows, found = work.rows, list[GapPieces]()
    # For each gap: the work that ends it, the launch of that work, and the work whose end began it.
    following = np.searchsorted(profile.start_ns[rows], gaps.end_ns, "left")
    ended = following < len(rows)
    row: Int64s = np.where(ended, rows[np.minimum(following, len(rows) - 1)], -1).astype(np.int64)
    launch = np.where(ended, work.launch[row], -1)
    has_launch = launch >= 0
    begin_ns = profile.start_ns[launch]
    call_ns = profile.end_ns[launch] - begin_ns
    until_ns = np.where(call_ns > LONG_CALL_NS, profile.end_ns[launch], begin_ns)
    until_ns = np.where(has_launch, np.clip(until_ns, gaps.start_ns, gaps.end_ns), gaps.start_ns)
    device_part = Merged(until_ns, gaps.end_ns)  # the device's part; may be empty
    length_ns = device_part.end_ns - device_part.start_ns
    late = has_launch & (begin_ns > gaps.start_ns)
    last = np.maximum.accumulate(profile.end_ns[rows])
    newest = np.maximum.accumulate(np.where(profile.end_ns[rows] == last, np.arange(len(rows)), 0))
    before = rows[newest[np.maximum(np.minimum(following, len(rows)) - 1, 0)]]  # the work whose end began the gap
    graphs = profile.matches(launch, GRAPH)
    in_graph = has_launch & graphs & (profile.correlation[before] == profile.correlation[row])
    limit_ns = np.where(late | (graphs & ~in_graph), LATENCY_NS, QUEUED_NS)
    is_short = has_launch & (length_ns <= limit_ns)
    crosses = has_launch & ~late & ~in_graph & (profile.thread[before] != profile.thread[row])
    is_event = crosses & (is_short | _follows_event_wait(profile, launch))
    for cause, chosen in (
        (causes.LAUNCH, is_short & late), (causes.EVENT, is_event), (causes.QUEUE, is_short & ~late & ~is_event),
        (causes.UNKNOWN, ~is_short & ~is_event),
    ):  # fmt: skip
        chosen = chosen & (length_ns > 0)
        where = Merged(device_part.start_ns[chosen], device_part.end_ns[chosen])
        launches = launch[chosen]
        thread = np.where(launches >= 0, profile.thread[launches], -1)
        found.append(GapPieces.of(cause, where, thread=thread, instant_ns=profile.start_ns[launches]))
    host = has_launch & (until_ns > gaps.start_ns)
    launchers = np.unique(profile.thread[launch[host]]).astype(np.int64)
    for thread in launchers.tolist():
        launches = host & (profile.thread[launch] == thread)
        parts = Merged(gaps.start_ns[launches], until_ns[launches])
        _divide_host_gaps(profile, work, found, parts, thread, launchers, busy)
    return GapPieces.concatenate(found)


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
    """Return a mask over launches: the call before, on its thread, lets a stream wait for an event."""
    calls = profile.rows(RUNTIME)
    calls = calls[np.lexsort((profile.start_ns[calls], profile.thread[calls]))]
    waits = profile.matches(calls, _EVENT_WAIT)
    follows = np.zeros(len(profile.kind), bool)
    follows[calls[1:]] = waits[:-1] & (profile.thread[calls[1:]] == profile.thread[calls[:-1]])
    found: NDArray[np.bool_] = follows[launch] & (launch >= 0)
    return found


def _divide_host_gaps(
    profile: RankProfile, work: WorkRows, found: list[GapPieces], parts: Merged, thread: int,
    launchers: Int64s, busy: Merged,
) -> None:  # fmt: skip
    """Add the host's parts of gaps that launches of a thread ended, by cause; earlier causes have precedence."""
    calls = _rows_of_thread(profile, profile.rows(RUNTIME), thread)
    lost = _unrecorded_work(profile, work, calls)
    found.append(GapPieces.of(causes.UNKNOWN, intersect(parts, lost)))
    parts = subtract(parts, lost)
    syncs = calls[_is_device_wait(profile, work, calls)]
    functions = _rows_of_thread(profile, profile.rows(PYTHON), thread)
    captures = rows_union(profile, profile.named(functions, _CAPTURE))
    syncs = syncs[covered_ns(profile.start_ns[syncs], profile.end_ns[syncs] + 1, captures) == 0]
    blocked_ns = covered_ns(profile.start_ns[syncs], profile.end_ns[syncs], busy)
    for cause, cover in [
        *_late_host_causes(profile, thread, calls, syncs),
        # a wait makes the host late, and for as long again as the device was busy in it
        (causes.SYNC, union(profile.start_ns[syncs], profile.end_ns[syncs] + blocked_ns)),
    ]:
        where = intersect(parts, cover)
        if cause == causes.SYNC and len(syncs):
            last = np.maximum(np.searchsorted(profile.start_ns[syncs], where.end_ns, "left") - 1, 0)
            found.append(GapPieces.of(cause, where, thread=thread, instant_ns=profile.start_ns[syncs][last]))
        else:
            found.append(GapPieces.of(cause, where, thread=thread))
        parts = subtract(parts, cover)
    operators = profile.rows(OPERATOR)
    if len(_rows_of_thread(profile, operators, thread)):
        others = operators[np.isin(profile.thread[operators], launchers)]
        idle = subtract(parts, rows_union(profile, np.concatenate([others, calls])))
        is_long = idle.end_ns - idle.start_ns >= PYTHON_NS
        idle = Merged(idle.start_ns[is_long], idle.end_ns[is_long])
        found.append(GapPieces.of(causes.PYTHON, idle, thread=thread))
        parts = subtract(parts, idle)
        parts = _cut_at_operators(profile, parts, outermost(profile, _rows_of_thread(profile, operators, thread)))
    found.append(GapPieces.of(causes.LAUNCH, parts, thread=thread))


def _cut_at_operators(profile: RankProfile, parts: Merged, rows: Rows) -> Merged:
    """Return intervals cut where some operators begin and end, so that each part has one place."""
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
    """Return the rows among `rows` that are events of one thread."""
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
    found, parts = list[GapPieces](), gaps
    thread, events = _program_thread(profile)
    for cause, cover in delays:
        where = intersect(parts, cover)
        found.append(GapPieces.of(cause, where, thread=thread))
        parts = subtract(parts, cover)
    silent = rows_union(profile, silent_modules(profile))
    found.append(GapPieces.of(causes.UNKNOWN, intersect(parts, silent)))
    parts = subtract(parts, silent)
    low_ns = high_ns = _EVER.max  # of the thread's events
    if len(events) and not unknown:
        low_ns, high_ns = int(profile.start_ns[events[0]]), int(profile.end_ns[events].max())
    found.append(GapPieces.of(causes.UNKNOWN, clip(parts, (_EVER.min, low_ns)), thread=thread))
    found.append(GapPieces.of(causes.PYTHON, clip(parts, (low_ns, high_ns)), thread=thread))
    found.append(GapPieces.of(causes.UNKNOWN, clip(parts, (high_ns, _EVER.max)), thread=thread))
    return GapPieces.concatenate(found)


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
