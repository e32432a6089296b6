"""Timelines of profiles: each file of PyTorch's profiler (Kineto) is one rank.

Where events of a device are recorded, computes are its kernels, communication is the kernels of the communication
libraries, and a step is what was launched in it: see `why.windows`, which `overlap why` shares. On a CPU, computes are
the outermost operators and communication is what gloo's threads do, or our backend from the call of an operation on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import UsageError
from ..columnar import KINDS, NO_GROUP, NONE, SpanColumns, SpanGroup, Table
from ..spans import CUT, LEFT_OUT, ORIGIN, Timeline
from .profile import RankProfile
from .windows import collective_messages, outermost, recording_notes, select_work, step_windows

PROFILER = "PyTorch profiler"
"""Origin of the timelines that are made here."""


def profile_timeline(profile: RankProfile) -> Timeline:
    """Return the timeline of a profile, one rank of its run.

    Raises:
        UsageError: It shows no work.
    """
    work = select_work(profile)
    if not len(work.rows):
        raise UsageError(
            f"{profile.path}: no work of a device in it, and no operator of a host: nothing to show; "
            "record a step of the program"
        )
    notes = [note for note in recording_notes(profile, work) if not profile.cut or "cut off" not in note]
    meta = {ORIGIN: PROFILER, **({CUT: "only what is complete"} if profile.cut else {})}
    compute = work.compute if work.on_device else outermost(profile, work.compute)
    steps = {step: window for step, window in step_windows(profile, work).items() if step is not None}
    rows = np.concatenate([compute, work.copies, work.comm])
    count, operations = len(rows) + len(steps), slice(len(rows) - len(work.comm), len(rows))
    texts, groups = Table[str]({name: number for number, name in enumerate(profile.names)}), Table[SpanGroup]()
    columns: dict[str, Any] = {
        name: np.zeros(count, np.int64) for name in ("met_ns", "seq", "nbytes", "priority", "role")
    }
    columns |= {name: np.full(count, texts[""]) for name in ("algorithm", "dtype", "call_site")}
    columns |= {name: np.full(count, NONE) for name in ("issued_ns", "awaited_ns", "step")}
    lanes = [texts[f"compute {thread}".strip()] for _, thread in profile.threads]
    lane, step_lane = np.array(lanes)[profile.thread[compute]], texts["step"]
    low_ns, high_ns = (np.array([window[at] for window in steps.values()], np.int64) for at in (0, 1))
    parts = (len(compute), len(work.copies), len(work.comm), len(steps))
    columns |= {
        "rank": np.full(count, profile.rank),
        "kind": np.repeat([KINDS.index(kind) for kind in ("compute", "copy", "comm", "step")], parts),
        "lane": np.concatenate([lane, np.repeat([texts["copy"], texts["comm"], step_lane], parts[1:])]),
        "name": np.concatenate([profile.name[rows], [texts[f"ProfilerStep#{step}"] for step in steps]]),
        "start_ns": profile.base_ns + np.concatenate([profile.start_ns[rows], low_ns]),
        "end_ns": profile.base_ns + np.concatenate([profile.end_ns[rows], high_ns]),
        "op": np.full(count, -1), "group": np.full(count, groups[NO_GROUP]),
    }  # fmt: skip
    columns["step"][len(rows) :] = list(steps)
    # Streams of one collective have other numbers on other ranks: one lane, for they must be matched.
    messages = collective_messages(profile, work.comm)
    columns["op"][operations] = [texts[message.op] for message in messages]
    columns["dtype"][operations] = [texts[message.dtype] for message in messages]
    for name in ("seq", "nbytes"):
        columns[name][operations] = [getattr(message, name) for message in messages]
    world = tuple(range(profile.world_size))
    columns["group"][operations] = [
        groups[SpanGroup(message.group or "world", message.ranks or world * (message.group_size in (0, len(world))))]
        for message in messages
    ]
    for name in ("issued_ns", "met_ns"):
        columns[name][operations] = columns["start_ns"][operations]
    spans = SpanColumns.from_named(columns, texts, groups)
    meta |= {LEFT_OUT: "; ".join(notes)} if notes else {}
    return Timeline.of_columns(spans, world_size=len(world), meta=meta)
