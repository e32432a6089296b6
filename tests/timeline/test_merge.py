"""Timelines of several processes become one, on one clock."""

from __future__ import annotations

import pytest

from overlap import UsageError
from overlap.timeline import CollectiveInfo, Span, Timeline, merged
from overlap.timeline.merge import shifted
from overlap.timeline.tracefile import pack_trace, unpack_trace


def comm(rank: int, start_ns: int, end_ns: int, *, met_ns: int | None = None, seq: int = 0) -> Span:
    info = CollectiveInfo(
        op="all_reduce", algorithm="ring", group="world", seq=seq, nbytes=8, dtype="float32", issued_ns=start_ns - 1,
        met_ns=start_ns if met_ns is None else met_ns, priority=0, call_site="train.py:1", start_ns=start_ns,
        end_ns=end_ns, ranks=(0, 1),
    )  # fmt: skip
    return Span(rank=rank, kind="comm", lane="comm", name="all_reduce", start_ns=start_ns, end_ns=end_ns, info=info)


def part(*spans: Span, world_size: int = 2, **meta: str) -> Timeline:
    return Timeline(spans=list(spans), world_size=world_size, meta=meta)


def test_shifting_moves_every_instant_and_notes_the_error() -> None:
    step = Span(rank=1, kind="step", lane="step", name="step 0", start_ns=5, end_ns=50, step=0)
    moved = shifted(part(comm(1, 10, 40), step), offset_ns=1000, error_ns=7)
    assert moved.spans == [
        comm(1, 1010, 1040),
        Span(rank=1, kind="step", lane="step", name="step 0", start_ns=1005, end_ns=1050, step=0),
    ]
    assert moved.meta == {"clock_error_ns": "7"}


def test_the_last_rank_of_all_processes_is_known_only_afterwards() -> None:
    one = merged([part(comm(0, 10, 40), script="a"), shifted(part(comm(1, 25, 41)), offset_ns=0, error_ns=3)])
    assert one.spans == [comm(0, 10, 40, met_ns=25), comm(1, 25, 41, met_ns=25)]
    assert one.meta == {"script": "a", "clock_error_ns": "3"}
    assert one.spans[0].info is not None
    assert one.spans[0].info.last_rank_wait_ns == 15


def test_clocks_that_are_a_little_off_never_make_a_span_end_before_it_met() -> None:
    one = merged([part(comm(0, 10, 20)), part(comm(1, 22, 41))])
    assert [span.info.met_ns for span in one.spans if span.info] == [20, 22]


def test_a_meeting_that_is_not_wholly_here_stays_as_it_was() -> None:
    assert merged([part(comm(0, 10, 20))]).spans == [comm(0, 10, 20)]


def test_what_is_not_of_one_run_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^not of one run: 2 ranks on the real clock, and 4 on the real clock$"):
        merged([part(), part(world_size=4)])
    with pytest.raises(UsageError, match=r"^not parts of one run: rank 0 is in two of them$"):
        merged([part(comm(0, 1, 2)), part(comm(0, 1, 2))])


def test_a_timeline_travels_as_bytes() -> None:
    timeline = part(comm(0, 10, 20), script="a")
    data = pack_trace(timeline)
    assert unpack_trace(data) == timeline
    with pytest.raises(UsageError, match=r"^a trace of more than 10 bytes$"):
        unpack_trace(data, limit_bytes=10)
    for damaged in (b"", data[:40], b"not gzip", data[:-9] + b"\0"):
        with pytest.raises(UsageError, match=r"^damaged trace: "):
            unpack_trace(damaged)
