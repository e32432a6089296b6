"""Timelines of several processes become one, on one clock."""

from dataclasses import replace
from pathlib import Path

import pytest

from overlap import UsageError
from overlap.cli import main
from overlap.timeline import CollectiveInfo, Span, Timeline, breakdowns, merged, read_trace, write_trace


def comm(rank: int, start_ns: int, end_ns: int, *, met_ns: int | None = None, seq: int = 0) -> Span:
    info = CollectiveInfo(
        op="all_reduce", algorithm="ring", group="world", seq=seq, nbytes=8, dtype="float32", issued_ns=start_ns - 1,
        met_ns=start_ns if met_ns is None else met_ns, priority=0, call_site="train.py:1", start_ns=start_ns,
        end_ns=end_ns, ranks=(0, 1),
    )  # fmt: skip
    return Span(rank=rank, kind="comm", lane="comm", name="all_reduce", start_ns=start_ns, end_ns=end_ns, info=info)


def part(*spans: Span, world_size: int = 2, **meta: str) -> Timeline:
    return Timeline(spans=spans, world_size=world_size, meta=meta)


def test_the_last_rank_of_all_processes_is_known_only_afterwards() -> None:
    one = merged([part(comm(0, 10, 40), script="a"), part(comm(1, 25, 41), clock_error_ns="3")])
    assert one.spans == [comm(0, 10, 40, met_ns=25), comm(1, 25, 41, met_ns=25)]
    assert one.meta == {"script": "a", "clock_error_ns": "3"}
    assert one.spans[0].info is not None
    assert one.spans[0].info.last_rank_wait_ns == 15


def test_clocks_that_are_a_little_off_never_make_a_span_end_before_it_met() -> None:
    one = merged([part(comm(0, 10, 20)), part(comm(1, 22, 41))])
    assert [span.info.met_ns for span in one.spans if span.info] == [20, 22]


def test_a_meeting_that_is_not_wholly_here_stays_as_it_was() -> None:
    assert merged([part(comm(0, 10, 20))]).spans == [comm(0, 10, 20)]


def message(rank: int, start_ns: int, end_ns: int, *, tag: int, met_ns: int | None = None, seq: int = 0) -> Span:
    """Return rank 0's or rank 1's end of a message from rank 0 to rank 1."""
    span, name = comm(rank, start_ns, end_ns, met_ns=met_ns, seq=seq), "recv" if rank else "send"
    assert span.info is not None
    return replace(span, name=name, info=replace(span.info, op="send/recv", tag=tag))


def test_messages_of_several_tags_meet_those_of_their_own_tag() -> None:
    """All are numbered from 0."""
    sent = part(message(0, 20, 22, tag=0), message(0, 42, 44, tag=1), message(0, 60, 63, tag=1, seq=1))
    received = part(message(1, 1, 23, tag=0), message(1, 24, 45, tag=1), message(1, 46, 62, tag=1, seq=1))
    both = merged([sent, received])
    for rank in both.ranks():
        assert [span.info.met_ns for span in both.for_rank(rank) if span.info] == [20, 42, 60], rank
    assert merged([sent, received]).spans[0].info == message(1, 1, 23, tag=0, met_ns=20).info


def test_a_send_that_ended_before_its_receiver_came_has_not_waited() -> None:
    one = merged([part(message(0, 10, 12, tag=0)), part(message(1, 500, 501, tag=0))])
    assert [span.info.met_ns for span in one.spans if span.info] == [10, 500]
    rows = breakdowns(one)
    assert [sum(getattr(row, name) for row in rows) for name in ("waiting_ns", "wire_ns")] == [0, 3]


def test_what_is_not_of_one_run_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r"^not of one run: trace 1 has 2 ranks on the real clock, trace 2 has 4 on the real clock; name the",
    ):
        merged([part(), part(world_size=4)])
    with pytest.raises(
        UsageError, match=r"^not parts of one run: rank 0 is in traces 1 and 2; name the files of one run$"
    ):
        merged([part(comm(0, 1, 2)), part(comm(0, 1, 2))])


STEP = Span(rank=1, kind="step", lane="step", name="step 0", start_ns=-5, end_ns=2**62, step=0)
LONE = Span(rank=0, kind="comm", lane="tp", name="send", start_ns=5, end_ns=50)


def test_files_of_parts_become_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = part(comm(0, 10, 40), LONE, script="a"), part(comm(1, 25, 41), STEP, clock_error_ns="3")
    names = [str(tmp_path / name) for name in ("a.json", "b.json.gz", "c.json")]
    write_trace(one, names[0])
    write_trace(other, names[1])
    assert main(["timeline", *names[:2], "-o", names[2]]) == 0
    assert read_trace(names[2]) == merged([one, other])
    write_trace(merged([one, other]), names[0])
    assert Path(names[0]).read_bytes() == Path(names[2]).read_bytes()
    assert main(["timeline", names[0], names[1], "-o", names[2]]) == 2
    assert (
        capsys.readouterr().err
        == "overlap: not parts of one run: rank 1 is in traces 1 and 2; name the files of one run\n"
    )
