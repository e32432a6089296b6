"""Windows of steps on the device, and the work on it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..measure.intervals import Interval, Merged, union
from .messages import COMM_KERNEL, CollectiveFields, operation_name
from .profile import COPY, DEVICE_NOTE, KERNEL, NOTE, OPERATOR, RUNTIME, SET, Int64s, RankProfile

Rows = NDArray[np.intp]
STEP = re.compile(r"^ProfilerStep#(\d+)$")
_HOST_COMM = re.compile(r"^(gloo|overlap):\w+$")
_PEER = re.compile(r"^Memcpy.*(PtoP|Peer)")
"""Copies between devices: collectives of copy engines have no kernel."""
_ENQUEUE = re.compile(r"^(c10d::|record_param_comms|nccl:)")
_OURS, _CALL = re.compile(r"^overlap:"), re.compile(r"^c10d::")
_ALL_TO_ALL, _SEND_RECV = re.compile(r"all_?to_?all", re.IGNORECASE), re.compile(r"send_?recv", re.IGNORECASE)
GRAPH = re.compile(r"GraphLaunch")
_LAUNCH = re.compile(r"^(cuda|hip|cu)(ExtModule|Module|Ext)?Launch(Cooperative)?Kernel")
_BEGIN_CAPTURE, _END_CAPTURE = re.compile(r"StreamBeginCapture"), re.compile(r"StreamEndCapture")
LAG_SHARE = 0.05
"""Part of the work from which on a device lags behind the host by so much that marks on the host say nothing of it."""


LEAD_NS = 100_000
"""Without steps: the host's time before the first work of the device counts if it is more than a launch takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRows:
    """Work of a rank: rows of a profile, in order of start. On a CPU, operators and events of gloo's threads."""

    compute: Rows
    comm: Rows
    copies: Rows
    on_device: bool
    launch: Rows  # for each row of the profile: the row of its launch, or -1
    calls: Rows  # of a host: calls of collectives and messages, which may block

    @property
    def rows(self) -> Rows:
        """Rows of all work: computes, communication and copies, in order of start."""
        return np.sort(np.concatenate([self.compute, self.comm, self.copies]))


def select_work(profile: RankProfile) -> WorkRows:
    """Return the work of the device that was busy longest, or of the host if no kernel is recorded."""
    device = profile.rows(KERNEL, COPY, SET)
    if len(device):
        processes = np.array([str(process) for process, _ in profile.threads])[profile.thread[device]]
        lengths_ns = profile.end_ns[device] - profile.start_ns[device]
        took = {each: int(lengths_ns[processes == each].sum()) for each in np.unique(processes)}
        device = device[processes == max(took, key=lambda each: took[each])]
    launch = _launch_rows(profile, device)
    if not (profile.kind[device] == KERNEL).any():
        return _host_work(profile, launch)
    comm_name = np.fromiter((bool(COMM_KERNEL.match(name)) for name in profile.names), bool, len(profile.names))
    is_comm = comm_name[profile.name[device]] | np.isin(device, list(profile.messages))
    is_kernel = profile.kind[device] == KERNEL
    is_comm |= ~is_kernel & profile.matches(device, _PEER)
    return WorkRows(
        compute=device[is_kernel & ~is_comm], comm=device[is_comm], copies=device[~is_kernel & ~is_comm],
        on_device=True, launch=launch, calls=device[:0],
    )  # fmt: skip


def _host_work(profile: RankProfile, launch: Rows) -> WorkRows:
    operators, notes = profile.rows(OPERATOR), profile.rows(NOTE)
    comm = profile.named(notes, _HOST_COMM)
    compute = operators[~profile.matches(operators, _ENQUEUE)]
    calls = profile.named(operators, _CALL)
    return WorkRows(compute=compute, comm=comm, copies=calls[:0], on_device=False, launch=launch, calls=calls)


def _launch_rows(profile: RankProfile, device: Rows) -> Rows:
    """Return, for each row of the profile, the row of the launch of the same correlation; -1 where none is."""
    calls = profile.rows(RUNTIME)
    calls = calls[profile.correlation[calls] >= 0]
    launch = np.full(len(profile.kind), -1, np.intp)
    if len(calls) and len(device):
        calls = calls[np.argsort(profile.correlation[calls], kind="stable")]
        # Sorted by correlation: the position of a work's number is that of its launch, if the numbers are equal.
        numbers = profile.correlation[calls]
        at = np.minimum(np.searchsorted(numbers, profile.correlation[device]), len(numbers) - 1)
        same = numbers[at] == profile.correlation[device]
        launch[device[same]] = calls[at[same]]
    return launch


def step_windows(profile: RankProfile, work: WorkRows) -> dict[int | None, Interval]:
    """Return the windows of steps: what the profiler's marks on the host cover, each up to the begin of the next.

    So what the host does before the first work of the device is in its step. Where a device lags so far behind that
    more than `LAG_SHARE` of the work runs outside of the step that launched it, a window is from the first work that a
    step launched to that of the next one, or to the end of its work.
    Without steps there is one window, None: from the first event of the host, or work, to the last work.
    """
    host: dict[int, Interval] = {}
    device: dict[int, Interval] = {}
    marks = {number: int(match[1]) for number, name in enumerate(profile.names) if (match := STEP.match(name))}
    for row in profile.rows(NOTE, DEVICE_NOTE).tolist():
        if (step := marks.get(int(profile.name[row]))) is not None:
            where = host if profile.kind[row] == NOTE else device  # a device has a mark on each stream
            start_ns, end_ns = int(profile.start_ns[row]), int(profile.end_ns[row])
            first_ns, last_ns = where.get(step, (start_ns, end_ns))
            where[step] = min(first_ns, start_ns), max(last_ns, end_ns)
    if not work.on_device:
        return _sort_steps(host) or {None: _rows_extent(profile, work.rows if len(work.rows) else slice(None))}
    launched = _launched_extents(profile, work, host)
    marked = _chain_windows({step: host[step] for step in launched})
    if not marked or (device and not launched) or _device_lags(profile, work, marked):
        marked = _lagging_windows(profile, work, host, device or launched)
    return _sort_steps(marked) or {None: _recording_window(profile, work)}


def _device_lags(profile: RankProfile, work: WorkRows, windows: Mapping[int, Interval]) -> bool:
    """Whether more than `LAG_SHARE` of the work in some windows, or launched in them, runs outside of its own one."""
    rows = work.rows
    start_ns, end_ns, launch = profile.start_ns[rows], profile.end_ns[rows], work.launch[rows]
    begins, ends = (np.array([windows[step][at] for step in sorted(windows)], np.int64) for at in (0, 1))

    def window_of(instants_ns: Int64s) -> Rows:
        at = np.searchsorted(begins, instants_ns, "right") - 1
        return np.where((at >= 0) & (instants_ns < ends[at]), at, -1)

    own = np.where(launch >= 0, window_of(profile.start_ns[launch]), -1)  # unknown: before the recording
    counted = (own >= 0) | (window_of(start_ns) >= 0)
    inside_ns = np.minimum(end_ns, ends[own]) - np.maximum(start_ns, begins[own])
    inside_ns = np.where(own >= 0, np.maximum(inside_ns, 0), 0)
    total_ns = int((end_ns - start_ns)[counted].sum())
    return bool(total_ns - inside_ns[counted].sum() > LAG_SHARE * total_ns)


def _lagging_windows(
    profile: RankProfile, work: WorkRows, host: Mapping[int, Interval], device: Mapping[int, Interval]
) -> dict[int, Interval]:
    """Return the windows of steps whose work runs long after its launch."""
    found = _chain_windows(device)
    if len(found) != 1 or (last := max(found)) not in host:
        return found
    begin_ns, end_ns = found[last]
    if not (profile.start_ns[work.rows] < begin_ns).any():
        found[last] = min(begin_ns, host[last][0]), max(end_ns, host[last][1])  # the device was idle before
    return found


def _chain_windows(steps: Mapping[int, Interval]) -> dict[int, Interval]:
    """Return intervals of steps, each extended to the begin of the next; none if they are out of order."""
    numbers = sorted(steps)
    begins = [steps[number][0] for number in numbers]
    if begins != sorted(begins):
        return {}
    following = dict(zip(numbers, begins[1:], strict=False))
    return {number: (steps[number][0], following.get(number, steps[number][1])) for number in numbers}


def _sort_steps(steps: dict[int, Interval]) -> dict[int | None, Interval]:
    return {step: steps[step] for step in sorted(steps)}


def _rows_extent(profile: RankProfile, rows: Rows | slice) -> Interval:
    return int(profile.start_ns[rows].min()), int(profile.end_ns[rows].max())


def _recording_window(profile: RankProfile, work: WorkRows) -> Interval:
    """Return the window of a recording without steps: its work, and what the host did before."""
    start_ns, end_ns = _rows_extent(profile, work.rows)
    if (work.launch[work.rows] < 0).all():  # nothing shows which part of the recording the work belongs to
        return int(profile.start_ns.min()), int(profile.end_ns.max())
    first_ns = min([start_ns, *profile.start_ns[profile.rows(OPERATOR, RUNTIME)[:1]].tolist()])
    return first_ns if start_ns - first_ns > LEAD_NS else start_ns, end_ns


def _launched_extents(profile: RankProfile, work: WorkRows, host: dict[int, Interval]) -> dict[int, Interval]:
    """Return, by step, the extent of the work that calls inside the step's mark on the host launched."""
    rows = work.rows
    rows = rows[work.launch[rows] >= 0]
    at_ns = profile.start_ns[work.launch[rows]]
    extents: dict[int, Interval] = {}
    for step, (start_ns, end_ns) in host.items():
        mine = rows[(at_ns >= start_ns) & (at_ns < end_ns)]
        if len(mine):
            extents[step] = _rows_extent(profile, mine)
    return extents


def rows_union(profile: RankProfile, rows: Rows) -> Merged:
    """Return the union of the intervals of some rows."""
    return union(profile.start_ns[rows], profile.end_ns[rows])


def union_all(*parts: Merged) -> Merged:
    """Return the union of several unions."""
    return union(np.concatenate([each.start_ns for each in parts]), np.concatenate([each.end_ns for each in parts]))


def outermost(profile: RankProfile, operators: Rows) -> Rows:
    """Return the operators that are inside no other of their thread."""
    parts = [np.empty(0, np.intp)]
    for thread in np.unique(profile.thread[operators]).tolist():
        mine = operators[profile.thread[operators] == thread]
        parts.append(mine[is_outermost(profile, mine)])
    return np.concatenate(parts)


def is_outermost(profile: RankProfile, rows: Rows) -> NDArray[np.bool_]:
    """Return a mask over rows of one thread, sorted by start, the longest first: those inside no other."""
    until_ns = np.maximum.accumulate(profile.end_ns[rows])
    return np.concatenate([[True], profile.start_ns[rows][1:] >= until_ns[:-1]])


def collective_messages(profile: RankProfile, comm: Rows) -> list[CollectiveFields]:
    """Return the message of each row of communication, numbered within its operation and group.

    Without fields of the profiler, the name shows the operation; of ours, the call of c10d around it shows the size.
    """
    calls: dict[int, list[int]] = {}
    if profile.matches(comm, _OURS).any():
        operators = profile.rows(OPERATOR)
        for row in profile.named(operators, _CALL).tolist():
            calls.setdefault(int(profile.thread[row]), []).append(row)
    numbers: dict[tuple[str, str], int] = {}
    messages = []
    sends = not profile.names_matching(_ALL_TO_ALL).any()  # NCCL has one kernel for messages and all-to-alls
    for row in comm.tolist():
        name, message = profile.names[profile.name[row]], profile.messages.get(row)
        if message is None:
            around = calls.get(int(profile.thread[row]), [])
            at = bisect_right(around, profile.start_ns[row], key=lambda call: profile.start_ns[call]) - 1
            inside = at >= 0 and profile.start_ns[row] <= profile.end_ns[around[at]]
            call = profile.messages.get(around[at]) if inside else None
            op = "send_recv" if sends and _SEND_RECV.search(name) else operation_name(name)
            message = replace(call or CollectiveFields(op=""), op=op)
        key = message.op, message.group
        numbers[key] = numbers.get(key, -1) + 1
        messages.append(message if message.seq is not None else replace(message, seq=numbers[key]))
    return messages


def issuing_calls(profile: RankProfile, work: WorkRows, messages: Sequence[CollectiveFields]) -> Rows:
    """Return, for each row of a host's communication, the row of the c10d call that issued it, or -1.

    Threads of gloo do not name the call; the last events of an operation belong to its last calls, in their order.
    """
    calls: dict[str, list[int]] = {}
    for row in work.calls.tolist():
        name = profile.names[profile.name[row]].removeprefix("c10d::")
        calls.setdefault(operation_name(name).strip("_"), []).append(row)
    issues = np.full(len(messages), -1, np.intp)
    for op, of_op in calls.items():
        events = np.array([at for at, message in enumerate(messages) if message.op == op][-len(of_op) :], np.intp)
        issued = np.array(of_op[-len(events) :], np.intp)
        if len(events) and (profile.start_ns[issued] <= profile.start_ns[work.comm[events]]).all():
            issues[events] = issued
    return issues


def lost_launches(profile: RankProfile, work: WorkRows, calls: Rows) -> Rows:
    """Return the calls that launched unrecorded work; a launch inside a graph's capture launches nothing.

    A call of the driver inside one of the runtime launches the same work, which names one of them.
    """
    launches = calls[profile.matches(calls, GRAPH) | profile.matches(calls, _LAUNCH)]
    recorded = profile.rows(KERNEL, COPY, SET)  # of other devices, too
    lost = launches[~np.isin(profile.correlation[launches], profile.correlation[recorded])]
    begins, ends = (profile.named(calls, pattern) for pattern in (_BEGIN_CAPTURE, _END_CAPTURE))
    captures = np.searchsorted(begins, lost) > np.searchsorted(ends, lost)
    lost = lost[~captures]
    named = launches[np.isin(profile.correlation[launches], profile.correlation[recorded])]
    parts = [lost[:0]]
    for thread in np.unique(profile.thread[lost]).tolist():
        mine, others = (rows[profile.thread[rows] == thread] for rows in (lost, named))
        begins_ns = np.append(profile.start_ns[others], np.iinfo(np.int64).max)
        after = np.searchsorted(profile.end_ns[others], profile.start_ns[mine], "right")
        parts.append(mine[begins_ns[after] >= profile.end_ns[mine]])
    return np.concatenate(parts)


def recording_notes(profile: RankProfile, work: WorkRows) -> list[str]:
    """Return notes on what the recording lacks, each with the reason."""
    notes = []
    if profile.cut:
        notes.append("the file was cut off: only its complete events count")
    if profile.backwards:
        notes.append(f"{profile.backwards} events end before they start: left out")
    if profile.unreadable:
        notes.append(f"{profile.unreadable} events have fields of another type: left out")
    if not work.on_device and profile.header.get("deviceProperties"):
        notes.append("no kernel of its device is recorded (CUPTI or ROCTracer was off): only the host is seen")
    threads = np.unique(profile.thread[profile.rows(KERNEL, COPY, SET)]).tolist()
    if (devices := len({profile.threads[thread][0] for thread in threads})) > 1:
        notes.append(f"the file has {devices} devices: only the one that did most counts")
    calls = profile.rows(RUNTIME)
    lost = lost_launches(profile, work, calls) if work.on_device else calls[:0]
    for kind, pattern in (("CUDA graphs", GRAPH), ("kernels", _LAUNCH)):
        count, every = (int(profile.matches(rows, pattern).sum()) for rows in (lost, calls))
        if count:
            notes.append(f"{count} of {every} launches of {kind} have no recorded kernels: they look idle")
    if work.on_device and len(rows := work.rows):
        orphans = int((work.launch[rows] < 0).sum())
        if orphans > len(rows) // 2:
            notes.append(f"{orphans} of {len(rows)} kernels and copies have no recorded launch: gaps have no cause")
    return notes
