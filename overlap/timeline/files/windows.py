"""The work in a profile (computes, communication, copies), and the window of time in which each step is measured."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..columnar import Int64s, Mask, Rows
from ..measure.intervals import Interval, Merged, union
from .messages import COMM_KERNEL, CollectiveFields, operation_name
from .profile import COPY, DEVICE_NOTE, KERNEL, NOTE, OPERATOR, RUNTIME, SET, RankProfile

STEP = re.compile(r"^ProfilerStep#(\d+)$")
_HOST_COMM = re.compile(r"^(gloo|overlap):\w+$")
_PEER = re.compile(r"^Memcpy.*(PtoP|Peer)")
"""Copies between devices: collectives of copy engines have no kernel."""
_ENQUEUE = re.compile(r"^(c10d::|record_param_comms|nccl:)")
_OURS, _CALL = re.compile(r"^overlap:"), re.compile(r"^c10d::")
_ALL_TO_ALL, _SEND_RECV = re.compile(r"all_?to_?all", re.IGNORECASE), re.compile(r"send_?recv", re.IGNORECASE)
GRAPH = re.compile(r"GraphLaunch")
_LAUNCH = re.compile(r"^(cuda|hip|cu)(ExtModule|Module|Ext)?Launch(Cooperative)?Kernel")
BEGIN_CAPTURE, END_CAPTURE = re.compile(r"StreamBeginCapture"), re.compile(r"StreamEndCapture")
LAG_SHARE = 0.05
"""If more than this part of the work runs outside the step that launched it, the device lags behind the host."""


LEAD_NS = 100_000
"""In a recording without steps, the host's time before the first work counts if it is longer than a launch takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRows:
    """Work of a rank, as rows of its profile in order of start."""

    compute: Rows  # kernels; without a device, operators
    comm: Rows  # communication kernels; without a device, events of gloo's threads or of the overlap backend
    copies: Rows  # copies and sets of the device's memory
    on_device: bool  # whether a device does the work, not the host
    launch: Rows  # for each row of the profile: the row of its launch, or -1
    calls: Rows  # without a device: calls of collectives and messages by the program, which may block

    @property
    def rows(self) -> Rows:
        """Rows of all work: computes, communication and copies, in order of start."""
        return np.sort(np.concatenate([self.compute, self.comm, self.copies]))


def select_work(profile: RankProfile) -> WorkRows:
    """Return the work of the device that was busy longest, or of the host if no kernel is recorded.

    Args:
        profile: The events of a rank.
    """
    device = profile.rows_of_kinds(KERNEL, COPY, SET)
    if len(device):
        # The "process" of an event on a device is the device.
        processes = np.array([str(process) for process, _ in profile.threads])[profile.thread[device]]
        lengths_ns = profile.lengths_ns(device)
        took = {each: int(lengths_ns[processes == each].sum()) for each in np.unique(processes)}
        device = device[processes == max(took, key=lambda each: took[each])]
    launch = _launch_rows(profile, device)
    if not (profile.kind[device] == KERNEL).any():
        return _host_work(profile, launch)
    comm_name = np.fromiter((bool(COMM_KERNEL.match(name)) for name in profile.names), bool, len(profile.names))
    is_comm = comm_name[profile.name[device]] | np.isin(device, list(profile.messages))
    is_kernel = profile.kind[device] == KERNEL
    is_comm |= ~is_kernel & profile.name_matches(device, _PEER)
    return WorkRows(
        compute=device[is_kernel & ~is_comm], comm=device[is_comm], copies=device[~is_kernel & ~is_comm],
        on_device=True, launch=launch, calls=device[:0],
    )  # fmt: skip


def _host_work(profile: RankProfile, launch: Rows) -> WorkRows:
    """Return the work of a host, if no kernel is recorded: operators, and communication of its threads."""
    operators, notes = profile.rows_of_kinds(OPERATOR), profile.rows_of_kinds(NOTE)
    comm = profile.rows_matching(notes, _HOST_COMM)
    compute = operators[~profile.name_matches(operators, _ENQUEUE)]
    calls = profile.rows_matching(operators, _CALL)
    return WorkRows(compute=compute, comm=comm, copies=calls[:0], on_device=False, launch=launch, calls=calls)


def _launch_rows(profile: RankProfile, device: Rows) -> Rows:
    """Return, for each row of the profile, the row of the call that launched it, by their correlation; -1 without."""
    launch = np.full(len(profile.kind), -1, np.intp)
    calls = profile.rows_of_kinds(RUNTIME)
    calls = calls[profile.correlation[calls] >= 0]
    if not len(calls):
        return launch
    # Sorted by correlation, so that a binary search finds the launch of each work.
    calls = calls[np.argsort(profile.correlation[calls], kind="stable")]
    numbers = profile.correlation[calls]
    # A number above all others is compared with the last one, and differs.
    at = np.minimum(np.searchsorted(numbers, profile.correlation[device]), len(numbers) - 1)
    same = numbers[at] == profile.correlation[device]
    launch[device[same]] = calls[at[same]]
    return launch


def step_windows(profile: RankProfile, work: WorkRows) -> dict[int | None, Interval]:
    """Return the window (start, end) of each step, from the marks of steps in the profile.

    * Without a device: the time that the step's marks cover.
    * With a device that keeps up with the host: from the step's mark on the host to the mark of the next step. So the
      host's activity before the first work of the device belongs to the step.
    * With a device that lags, so that more than `LAG_SHARE` of the work runs outside the step that launched it: from
      the step's mark on the device, or from its first work there, to the start of the next step. The last window ends
      with the work of its step.

    A recording without steps has one window, with key None: from the first event of the host, or the first work, to
    the end of the last work.
    """
    host: dict[int, Interval] = {}
    device: dict[int, Interval] = {}
    marks = {number: int(match[1]) for number, name in enumerate(profile.names) if (match := STEP.match(name))}
    for row in profile.rows_of_kinds(NOTE, DEVICE_NOTE).tolist():
        if (step := marks.get(int(profile.name[row]))) is not None:
            # A step has one mark on the host, and on the device one on each stream.
            where = host if profile.kind[row] == NOTE else device
            start_ns, end_ns = int(profile.start_ns[row]), int(profile.end_ns[row])
            first_ns, last_ns = where.get(step, (start_ns, end_ns))
            where[step] = min(first_ns, start_ns), max(last_ns, end_ns)
    if not work.on_device:
        return _sort_steps(host) or {None: _rows_extent(profile, work.rows if len(work.rows) else slice(None))}
    launched = _launched_work_extents(profile, work, host)
    windows = _extend_to_next_step({step: host[step] for step in launched})
    has_only_device_marks = bool(device) and not launched
    if not windows or has_only_device_marks or _runs_outside_windows(profile, work, windows):
        windows = _lagging_windows(profile, work, host, device or launched)
    return _sort_steps(windows) or {None: _recording_window(profile, work)}


def _runs_outside_windows(profile: RankProfile, work: WorkRows, windows: Mapping[int, Interval]) -> bool:
    """Whether more than `LAG_SHARE` of the device's work runs outside the step window that launched it.

    Work that was launched in no window, and begins in none, does not count.
    """
    rows = work.rows
    start_ns, end_ns, launch = profile.start_ns[rows], profile.end_ns[rows], work.launch[rows]
    begins, ends = np.array([windows[step] for step in sorted(windows)], np.int64).T

    def find_window(instants_ns: Int64s) -> Rows:
        """Return the index of the window that contains each instant, or -1."""
        at = np.searchsorted(begins, instants_ns, "right") - 1
        return np.where((at >= 0) & (instants_ns < ends[at]), at, -1)

    # The window in which each work was launched; -1: in none, or before the recording.
    own = np.where(launch >= 0, find_window(profile.start_ns[launch]), -1)
    counted = (own >= 0) | (find_window(start_ns) >= 0)
    total_ns = int((end_ns - start_ns)[counted].sum())
    has_own = own >= 0
    own = own[has_own]
    inside_ns = np.minimum(end_ns[has_own], ends[own]) - np.maximum(start_ns[has_own], begins[own])
    return bool(total_ns - np.maximum(inside_ns, 0).sum() > LAG_SHARE * total_ns)


def _lagging_windows(
    profile: RankProfile, work: WorkRows, host: Mapping[int, Interval], device: Mapping[int, Interval]
) -> dict[int, Interval]:
    """Return the windows of steps whose work runs long after its launch, from their marks on host and device.

    Without marks on the device, `device` has the intervals of the launched work.
    """
    windows = _extend_to_next_step(device)
    if len(windows) != 1 or (step := max(windows)) not in host:
        return windows
    (begin_ns, end_ns), (host_begin_ns, host_end_ns) = windows[step], host[step]
    # A single step before which the device was idle: its host time counts, too.
    if not (profile.start_ns[work.rows] < begin_ns).any():
        windows[step] = min(begin_ns, host_begin_ns), max(end_ns, host_end_ns)
    return windows


def _extend_to_next_step(steps: Mapping[int, Interval]) -> dict[int, Interval]:
    """Return the intervals of steps, each extended to the start of the next step; {} if steps are not in order of time.

    {1: (0, 4), 2: (6, 9)} gives {1: (0, 6), 2: (6, 9)}.
    """
    numbers = sorted(steps)
    begins = [steps[number][0] for number in numbers]
    if begins != sorted(begins):
        return {}
    following = dict(zip(numbers, begins[1:], strict=False))
    return {number: (steps[number][0], following.get(number, steps[number][1])) for number in numbers}


def _sort_steps(steps: dict[int, Interval]) -> dict[int | None, Interval]:
    """Return the windows in the order of their steps, as `step_windows` has them."""
    return {step: steps[step] for step in sorted(steps)}


def _rows_extent(profile: RankProfile, rows: Rows | slice) -> Interval:
    """Return the first start and the last end of some rows. There must be at least one."""
    return int(profile.start_ns[rows].min()), int(profile.end_ns[rows].max())


def _recording_window(profile: RankProfile, work: WorkRows) -> Interval:
    """Return the window of a recording without steps: from the first work, or the host's start before, to the end."""
    start_ns, end_ns = _rows_extent(profile, work.rows)
    # Without any launch it is unknown which of the host's events belong to the work: the whole recording counts.
    if (work.launch[work.rows] < 0).all():
        return int(profile.start_ns.min()), int(profile.end_ns.max())
    first_ns = min([start_ns, *profile.start_ns[profile.rows_of_kinds(OPERATOR, RUNTIME)[:1]].tolist()])
    return first_ns if start_ns - first_ns > LEAD_NS else start_ns, end_ns


def _launched_work_extents(profile: RankProfile, work: WorkRows, host: dict[int, Interval]) -> dict[int, Interval]:
    """Return, by step, the first start and last end of the work that was launched inside its mark on the host."""
    rows = work.rows
    rows = rows[work.launch[rows] >= 0]
    at_ns = profile.start_ns[work.launch[rows]]
    extents: dict[int, Interval] = {}
    for step, (start_ns, end_ns) in host.items():
        mine = rows[(at_ns >= start_ns) & (at_ns < end_ns)]
        if len(mine):
            extents[step] = _rows_extent(profile, mine)
    return extents


def union_of_rows(profile: RankProfile, rows: Rows) -> Merged:
    """Return the union of the intervals of some rows, as merged intervals."""
    return union(profile.start_ns[rows], profile.end_ns[rows])


def union_all(*parts: Merged) -> Merged:
    """Return the union of several unions."""
    return union(np.concatenate([each.start_ns for each in parts]), np.concatenate([each.end_ns for each in parts]))


def outermost_operators(profile: RankProfile, operators: Rows) -> Rows:
    """Return the operators that are not nested in another operator of their thread."""
    parts = [np.empty(0, np.intp)]
    for thread in profile.threads_of(operators):
        mine = profile.rows_on_thread(operators, thread)
        parts.append(mine[is_outermost(profile, mine)])
    return np.concatenate(parts)


def is_outermost(profile: RankProfile, rows: Rows) -> Mask:
    """Return a mask of the rows that are not nested in another row.

    Args:
        profile: The events.
        rows: Rows of one thread, sorted by start; of rows that start together, the longest first.
    """
    until_ns = np.maximum.accumulate(profile.end_ns[rows])
    return np.concatenate([[True], profile.start_ns[rows][1:] >= until_ns[:-1]])


def collective_messages(profile: RankProfile, comm: Rows) -> list[CollectiveFields]:
    """Return the facts on each row of communication; `seq` is counted by operation and group if it is not recorded.

    If the profiler has recorded no fields, the name of the event shows the operation. For the overlap backend, the call
    of c10d around the event shows the size.
    """
    calls: dict[int, list[int]] = {}
    if profile.name_matches(comm, _OURS).any():
        operators = profile.rows_of_kinds(OPERATOR)
        for row in profile.rows_matching(operators, _CALL).tolist():
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
    """Return, for each row of a host's communication, the row of the c10d call that issued it, or -1 if unknown.

    Events of gloo's threads do not name their call. So calls and events of one operation are paired in order, from the
    last ones backwards.

    Args:
        profile: The events.
        work: The work of the rank.
        messages: The facts on each row of `work.comm`.
    """
    calls: dict[str, list[int]] = {}
    for row in work.calls.tolist():
        name = profile.names[profile.name[row]].removeprefix("c10d::")
        calls.setdefault(operation_name(name).strip("_"), []).append(row)
    issues = np.full(len(messages), -1, np.intp)
    for op, of_op in calls.items():
        events = np.array([at for at, message in enumerate(messages) if message.op == op][-len(of_op) :], np.intp)
        issued = np.array(of_op[-len(events) :], np.intp)
        # If a call began after its event, the pairs are wrong.
        if len(events) and (profile.start_ns[issued] <= profile.start_ns[work.comm[events]]).all():
            issues[events] = issued
    return issues


def launches_without_work(profile: RankProfile, calls: Rows) -> Rows:
    """Return the calls that launched work which was not recorded.

    A launch inside a graph's capture does not count: it launches nothing. A call of the runtime and the call of the
    driver nested in it launch one piece of work, which has the correlation of only one of the two: the other call does
    not count either.

    Args:
        profile: The events.
        calls: Rows of calls of the runtime and of the driver.
    """
    launches = calls[profile.name_matches(calls, GRAPH) | profile.name_matches(calls, _LAUNCH)]
    recorded = profile.rows_of_kinds(KERNEL, COPY, SET)  # of other devices, too
    has_work = np.isin(profile.correlation[launches], profile.correlation[recorded])
    lost, with_work = launches[~has_work], launches[has_work]
    begins, ends = (profile.rows_matching(calls, pattern) for pattern in (BEGIN_CAPTURE, END_CAPTURE))
    # Rows are in order of start. Inside a capture, more captures have begun than ended.
    captures = np.searchsorted(begins, lost) > np.searchsorted(ends, lost)
    lost = lost[~captures]
    parts = [lost[:0]]
    # Keep a lost launch only if it overlaps no launch with work on its thread: then the two would be nested.
    for thread in profile.threads_of(lost):
        own, others = (profile.rows_on_thread(rows, thread) for rows in (lost, with_work))
        begins_ns = np.append(profile.start_ns[others], np.iinfo(np.int64).max)
        # For each lost launch, the first launch with work that ends after its begin.
        after = np.searchsorted(profile.end_ns[others], profile.start_ns[own], "right")
        parts.append(own[begins_ns[after] >= profile.end_ns[own]])
    return np.concatenate(parts)


def recording_notes(profile: RankProfile, work: WorkRows) -> list[str]:
    """Return sentences on the faults of a recording: events that are missing or left out, and why."""
    notes = []
    if profile.cut:
        notes.append("the file was cut off: only its complete events count")
    if profile.backwards:
        notes.append(f"{profile.backwards} events end before they start: left out")
    if profile.unreadable:
        notes.append(f"{profile.unreadable} events have fields of another type: left out")
    if not work.on_device and profile.header.get("deviceProperties"):
        notes.append("no kernel of its device is recorded (CUPTI or ROCTracer was off): only the host is seen")
    threads = profile.threads_of(profile.rows_of_kinds(KERNEL, COPY, SET))
    if (devices := len({profile.threads[thread][0] for thread in threads})) > 1:
        notes.append(f"the file has {devices} devices: only the one that did most counts")
    calls = profile.rows_of_kinds(RUNTIME)
    lost = launches_without_work(profile, calls) if work.on_device else calls[:0]
    for kind, pattern in (("CUDA graphs", GRAPH), ("kernels", _LAUNCH)):
        count, every = (int(profile.name_matches(rows, pattern).sum()) for rows in (lost, calls))
        if count:
            notes.append(f"{count} of {every} launches of {kind} have no recorded kernels: they look idle")
    if work.on_device and len(rows := work.rows):
        orphans = int((work.launch[rows] < 0).sum())
        if orphans > len(rows) // 2:
            notes.append(f"{orphans} of {len(rows)} kernels and copies have no recorded launch: gaps have no cause")
    return notes
