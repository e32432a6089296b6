"""Timelines of profiles: each file of PyTorch's profiler (Kineto) is one rank.

If events of a device are recorded, computes are its kernels, communication is the kernels of communication libraries,
and a step is the work that was launched in it: see `windows`, which `overlap why` shares. On a CPU, computes are the
outermost operators, and communication is the work of gloo's threads, or of the overlap backend from the call on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ..columnar import KINDS, NO_GROUP, IndexTable, Rows, SpanColumns, SpanGroup
from ..span import Kind
from ..spans import CUT, LEFT_OUT, ORIGIN, Timeline
from .messages import CollectiveFields
from .profile import RankProfile
from .windows import collective_messages, outermost_operators, recording_notes, select_work, step_windows

PROFILER = "PyTorch profiler"
"""Origin of the timelines that are made here."""


def profile_timeline(profile: RankProfile) -> Timeline:
    """Return the timeline of one rank's profile.

    Raises:
        UsageError: The profile has no computes and no communication.
    """
    work = select_work(profile)
    if not len(work.rows):
        raise UsageError(
            f"{profile.path}: no work of a device in it, and no operator of a host: nothing to show; "
            "record a step of the program"
        )
    texts, groups = IndexTable[str]({"": 0}), IndexTable[SpanGroup]({NO_GROUP: 0})
    names = np.array([texts[name] for name in profile.names])
    lanes = np.array([texts[f"compute {thread}".strip()] for _, thread in profile.threads])

    def make_spans(
        kind: Kind, name: Rows, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], **columns: object
    ) -> SpanColumns:
        """Return spans of one kind, by default on a lane with its name.

        `name` has indexes in `texts`; `columns` have a value for each span, or one for all.
        """
        common = {"rank": profile.rank, "kind": KINDS.index(kind), "lane": texts[kind]}
        given = {"name": name, "start_ns": start_ns, "end_ns": end_ns, **columns}
        return SpanColumns.from_named(
            {key: np.broadcast_to(np.asarray(value, np.int64), len(name)) for key, value in (common | given).items()},
            texts, groups,
        )  # fmt: skip

    def spans_of_rows(kind: Kind, rows: Rows, **columns: object) -> SpanColumns:
        return make_spans(kind, names[profile.name[rows]], profile.start_ns[rows], profile.end_ns[rows], **columns)

    compute = work.compute if work.on_device else outermost_operators(profile, work.compute)
    messages = collective_messages(profile, work.comm)
    begins_ns = profile.start_ns[work.comm]
    steps = {step: window for step, window in step_windows(profile, work).items() if step is not None}
    windows_ns = np.array([*steps.values()], np.int64).reshape(-1, 2)
    columns = SpanColumns.concatenate([
        spans_of_rows("compute", compute, lane=lanes[profile.thread[compute]]),
        spans_of_rows("copy", work.copies),
        # One lane for all streams: a collective may have different stream numbers on different ranks, but spans of one
        # operation must have one lane to be matched.
        spans_of_rows(
            "comm", work.comm, issued_ns=begins_ns, met_ns=begins_ns,
            op=[texts[each.op] for each in messages], dtype=[texts[each.dtype] for each in messages],
            seq=[each.seq for each in messages], nbytes=[each.nbytes for each in messages],
            group=[groups[_make_group(each, profile.world_size)] for each in messages],
        ),
        make_spans(
            "step", np.array([texts[f"ProfilerStep#{step}"] for step in steps], np.intp), *windows_ns.T, step=[*steps]
        ),
    ])  # fmt: skip
    notes = [note for note in recording_notes(profile, work) if not profile.cut or "cut off" not in note]
    meta = {ORIGIN: PROFILER, **({CUT: "only what is complete"} if profile.cut else {})}
    meta |= {LEFT_OUT: "; ".join(notes)} if notes else {}
    return Timeline.of_columns(columns, world_size=profile.world_size, meta=meta)


def _make_group(message: CollectiveFields, world_size: int) -> SpanGroup:
    """Return the group of a collective; its ranks are () if the profiler lists only some of them.

    Without a size, or with the size of the world, the group is the world.
    """
    size = message.group_size or len(message.ranks)
    whole = tuple(range(world_size)) if size in (0, world_size) else ()
    ranks = message.ranks if len(message.ranks) == size else ()  # the profiler cuts long lists off
    return SpanGroup(message.group or "world", ranks or whole)
