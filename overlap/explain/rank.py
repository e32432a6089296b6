"""Measures of one rank's profile: costs of steps by cause, call sites, collectives and facts about its kernels.

Each file is measured in a process of its own, so the result is small: it is sent to the process that asked.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..timeline.columnar import IndexTable, Rows
from ..timeline.files.messages import operation_name
from ..timeline.files.profile import ProfiledRank, RankProfile, read_profile
from ..timeline.files.windows import (
    GRAPH,
    WorkRows,
    collective_messages,
    issuing_calls,
    outermost_operators,
    recording_notes,
    select_work,
    step_windows,
    union_all,
    union_of_rows,
)
from ..timeline.measure.intervals import Interval, Merged, covered_ns, merge, subtract
from ..units import format_ns
from .causes import COMM, COMPUTE, COPY, NAMES, UNKNOWN
from .host import (
    LATENCY_NS,
    GapPieces,
    delay_causes,
    divide_device_gaps,
    divide_host_gaps,
    modules_without_operators,
    work_pieces,
)
from .pieces import Pieces
from .sites import CallSite, CallSites

EARLY_NS = 1_000_000
"""Work launched within this time of the first event may belong to a step that began before the recording."""
TINY_KERNEL_NS = 20_000
"""A kernel that is shorter takes less time than its launch."""

_WORKERS = re.compile(r"_MultiProcessingDataLoaderIter")
_KERNEL_CLASSES = (
    ("softmax", re.compile(r"softmax", re.IGNORECASE)),
    ("elementwise", re.compile(r"elementwise|reduce_kernel|CatArray|layer_?norm|rms_?norm|index|vectorized", re.I)),
    ("optimizer", re.compile(r"multi_tensor_apply|FusedOptimizer|adam", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|cutlass|_s\d+|bmm|matmul|ampere_|sm\d\d_|Cijk|nvjet", re.IGNORECASE)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCollective:
    """One collective of a rank in a profile; times are on the rank's clock."""

    op: str
    group: str
    group_size: int
    nbytes: int
    number: int  # index among the calls of `op` on `group` in this file, or the profiler's `Seq`
    start_ns: int
    end_ns: int
    exposed_ns: int
    step: int | None  # step in which it began
    site: CallSite
    waiter: CallSite  # call site of the compute that was queued before the collective ended, and began just after it


@dataclass(slots=True, kw_only=True)
class RankReport(ProfiledRank):
    """Measures of one rank's profile; instants are on the clock of its host until `shift_clock`."""

    begin_ns: int  # start of the first event
    on_device: bool  # whether a device runs the computes, not the host
    windows: dict[int | None, Interval]  # start and end of each step
    pieces: Pieces  # where the rank's time went
    calls: list[ProfiledCollective]
    kernels: dict[int | None, int]  # number of kernels, by step
    kernel_median_ns: dict[int | None, int]  # median length of kernels, by step
    graph_share: float  # part of the kernels that graphs launched
    kernel_classes_ns: dict[str, int]  # time by class: "softmax", "elementwise", "optimizer", "matmul", "other"
    notes: list[str]  # faults of the recording, as sentences
    has_python: bool  # whether Python functions are recorded
    has_workers: bool  # whether a data loader has worker processes

    def shift_clock(self, by_ns: int) -> None:
        """Move all instants to another clock: add `by_ns` to each of them."""
        self.begin_ns += by_ns
        self.windows = {step: (low + by_ns, high + by_ns) for step, (low, high) in self.windows.items()}
        pieces, calls = self.pieces, self.calls
        self.pieces = replace(pieces, start_ns=pieces.start_ns + by_ns, end_ns=pieces.end_ns + by_ns)
        self.calls = [replace(call, start_ns=call.start_ns + by_ns, end_ns=call.end_ns + by_ns) for call in calls]


def measure_file(path: str | os.PathLike[str]) -> RankReport:
    """Read and measure a file of PyTorch's profiler.

    Raises:
        UsageError: The file cannot be read, or is no such trace.
    """
    return measure_profile(read_profile(path))


def measure_profile(profile: RankProfile) -> RankReport:
    """Return the report on a profile: pieces of its time with their call sites, collectives, and facts on kernels."""
    work = select_work(profile)
    windows = step_windows(profile, work)
    comm, compute = (
        union_of_rows(profile, np.concatenate([work.comm, work.calls])),
        union_of_rows(profile, work.compute),
    )
    copies = union_of_rows(profile, work.copies)
    delays = [] if work.on_device else delay_causes(profile)
    for _, cover in delays:
        # While a delay such as garbage collection lasts, the operators around it compute nothing.
        compute = subtract(compute, cover)
    # Intervals in this order of precedence: compute, communication, copies; then gaps.
    exposed = subtract(comm, compute)
    busy = union_all(compute, comm, copies)
    gaps = subtract(merge(windows.values()), busy)
    if work.on_device:
        gap_pieces = divide_device_gaps(profile, work, gaps, busy)
    else:
        gap_pieces = divide_host_gaps(profile, gaps, delays, unknown=bool(profile.header.get("deviceProperties")))
    sites = CallSites(profile)
    calls = _collective_calls(profile, work, windows, exposed, sites)
    computes = work.compute if work.on_device else np.sort(outermost_operators(profile, work.compute))
    copied = work_pieces(profile, work, work.copies, COPY, subtract(subtract(copies, compute), comm))
    pieces = Pieces.concatenate([
        _pieces_with_sites(profile, sites, gap_pieces),
        _pieces_with_sites(profile, sites, *work_pieces(profile, work, computes, COMPUTE, compute)),
        _pieces_with_sites(profile, sites, *copied, copies=True),
        _comm_pieces(profile, work, exposed, calls),
    ])  # fmt: skip
    launch, begins_ns = work.launch[work.compute], profile.start_ns[work.compute]
    lengths_ns = profile.lengths_ns(work.compute)
    are_of_graphs = profile.name_matches(launch, GRAPH) & (launch >= 0)
    kernels_ns = {step: lengths_ns[slice(*np.searchsorted(begins_ns, window))] for step, window in windows.items()}
    return RankReport(
        path=profile.path, header=profile.header, on_device=work.on_device, begin_ns=int(profile.start_ns[0]),
        windows=windows, pieces=pieces, calls=calls,
        kernels={step: len(each) for step, each in kernels_ns.items()},
        kernel_median_ns={step: int(np.median(each)) if len(each) else 0 for step, each in kernels_ns.items()},
        graph_share=float(are_of_graphs.mean()) if len(launch) else 0.0,
        kernel_classes_ns=_sum_kernel_classes(profile, work.compute, lengths_ns), has_python=sites.has_python,
        has_workers=bool(profile.names_matching(_WORKERS).any()),
        notes=[
            *_mid_recording_note(profile, gap_pieces), *recording_notes(profile, work),
            *([] if work.on_device else _silent_modules_note(profile)),
        ],
    )  # fmt: skip


def _sum_kernel_classes(profile: RankProfile, rows: Rows, lengths_ns: NDArray[np.int64]) -> dict[str, int]:
    """Return the nanoseconds of kernels by class: the first of `_KERNEL_CLASSES` that fits the name, else "other"."""
    sums_ns = np.bincount(profile.name[rows], lengths_ns, len(profile.names))
    classes: Counter[str] = Counter()
    for number in np.flatnonzero(sums_ns).tolist():
        name = profile.names[number]
        kind = next((kind for kind, pattern in _KERNEL_CLASSES if pattern.search(name)), "other")
        classes[kind] += int(sums_ns[number])
    return dict(classes)


def _silent_modules_note(profile: RankProfile) -> list[str]:
    """Return a note if modules run on threads without recorded operators, in a list; otherwise []."""
    if not (count := len(profile.threads_of(modules_without_operators(profile)))):
        return []
    return [
        f"modules run on {count} thread{'s' * (count > 1)} without recorded operators: "
        "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True) records them"
    ]


def _mid_recording_note(profile: RankProfile, pieces: GapPieces) -> list[str]:
    """Return a note if the profile begins in the middle of the program's work, in a list; otherwise [].

    Then the first recorded work was launched before recording began, or just after. The work of the device before it
    was not recorded, and looks like a gap without a cause.
    """
    has_launch = pieces.thread >= 0
    is_launched_early = pieces.instant_ns < profile.start_ns.min() + EARLY_NS
    has_no_cause = pieces.cause == NAMES.index(UNKNOWN)
    early = has_launch & is_launched_early & has_no_cause
    if (ns := int((pieces.end_ns - pieces.start_ns)[early].sum())) < EARLY_NS:
        return []  # too short to matter
    return [
        f"recording began in the middle: {format_ns(ns)} of the device's time are not recorded, before work that was "
        "launched as recording began"
    ]


def _pieces_with_sites(
    profile: RankProfile, sites: CallSites, part: GapPieces, rows: Rows | None = None, *, copies: bool = False
) -> Pieces:
    """Return pieces with the call sites of their instants; a kernel without one has its name.

    `rows` has the work of each piece, None for gaps. Of copies, the call site names the kind.
    """
    labels, number = sites.find_with_index(part.thread.astype(np.int32), part.instant_ns)
    if copies and rows is not None:
        # Copies of several kinds under one call site have a call site for each kind.
        pairs, number = np.unique(np.stack([number, profile.name[rows]]), axis=1, return_inverse=True)
        number = number.reshape(-1)
        labels = [
            replace(labels[at], phase=profile.names[name].split(" (")[-1].rstrip(")") or "copy")
            for at, name in pairs.T.tolist()
        ]
    elif rows is not None:
        # Kernels without a call site have one for each name.
        is_empty = np.array([not str(site) for site in labels], bool)[number]
        names, index = np.unique(profile.name[rows[is_empty]], return_inverse=True)
        number[is_empty] = len(labels) + index
        labels += [CallSite(operator=_short_kernel_name(profile.names[each])) for each in names.tolist()]
    number = np.where(np.array([bool(str(site)) for site in labels], bool)[number], number, -1)
    return Pieces.of_one_rank(labels, profile.rank, part.start_ns, part.end_ns, part.cause, site=number)


def _comm_pieces(
    profile: RankProfile, work: WorkRows, exposed: Merged, calls: Sequence[ProfiledCollective]
) -> Pieces:  # fmt: skip
    """Return the pieces of exposed communication; the call site is the operation and the calling functions.

    An instant with several operations belongs to the one that began first. `calls` has the collective of each row of
    `work.comm`; `work.calls` are calls of c10d on the host, which may block.
    """
    part, rows = work_pieces(profile, work, np.sort(np.concatenate([work.comm, work.calls])), COMM, exposed)
    collective_of_row = dict(zip(work.comm.tolist(), calls, strict=True))
    labels = IndexTable[CallSite]()
    site = []
    for row in rows.tolist():
        if (call := collective_of_row.get(row)) is not None:
            label = CallSite(operator=call.op, frames=call.site.frames)
        else:  # a call that blocks its thread: only its name is known, such as "c10d::allreduce_"
            op = operation_name(profile.names[profile.name[row]].removeprefix("c10d::")).strip("_")
            label = CallSite(operator=op)
        site.append(labels[label])
    site_numbers = np.array(site, np.int64)
    return Pieces.of_one_rank(tuple(labels), profile.rank, part.start_ns, part.end_ns, part.cause, site=site_numbers)


def _short_kernel_name(kernel: str) -> str:
    """Return the name of a kernel without types, template parameters and arguments: "void f<4>(int)" gives "f"."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name, maxsplit=1)[0] or kernel[:80]


def _collective_calls(
    profile: RankProfile, work: WorkRows, windows: dict[int | None, Interval], exposed: Merged, sites: CallSites
) -> list[ProfiledCollective]:
    """Return the collectives, each with the step in which it began, or None."""
    rows = work.comm
    exposed_ns = covered_ns(profile.start_ns[rows], profile.end_ns[rows], exposed)
    messages = collective_messages(profile, rows)
    sources = work.launch[rows]
    if not work.on_device:
        calls = issuing_calls(profile, work, messages)
        sources = np.where(calls >= 0, calls, sources)
    waiters = _waiting_computes(profile, work, rows)
    steps = np.full(len(rows), None, object)
    for step, window in windows.items():
        steps[slice(*np.searchsorted(profile.start_ns[rows], window))] = step
    times = (profile.start_ns[rows], profile.end_ns[rows], exposed_ns, steps)
    found = sites.find_for_rows(sources), sites.find_for_rows(np.where(waiters >= 0, work.launch[waiters], -1))
    return [
        ProfiledCollective(
            op=message.op, group=message.group, group_size=message.group_size, nbytes=message.nbytes,
            number=message.seq or 0, start_ns=start_ns, end_ns=end_ns, exposed_ns=ns, step=step, site=site,
            waiter=waiter,
        )
        for start_ns, end_ns, ns, step, site, waiter, message in zip(
            *(column.tolist() for column in times), *found, messages, strict=True
        )
    ]  # fmt: skip


def _waiting_computes(profile: RankProfile, work: WorkRows, comm: Rows) -> Rows:
    """Return, for each row of communication, the row of the compute that waited for its end, or -1.

    That compute was launched before the end, and began within `LATENCY_NS` after it.
    """
    waiters = np.full(len(comm), -1, np.intp)
    if not len(work.compute):
        return waiters
    end_ns = profile.end_ns[comm]
    at = np.searchsorted(profile.start_ns[work.compute], end_ns, "left")
    following = work.compute[np.minimum(at, len(work.compute) - 1)]
    launch = work.launch[following]
    # A compute that was launched before the communication ended was queued behind it.
    queued = (at < len(work.compute)) & (launch >= 0) & (profile.start_ns[launch] < end_ns)
    waits = queued & (profile.start_ns[following] - end_ns <= LATENCY_NS)
    waiters[waits] = following[waits]
    return waiters
