"""Timelines of several processes become one, on one clock."""

from __future__ import annotations

import io
import zlib
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap import UsageError
from overlap.cli import main
from overlap.timeline import CollectiveInfo, Span, Timeline, merged, read_trace, write_trace
from overlap.timeline.columnar import INT32_COLUMNS, KINDS, TEXTS
from overlap.timeline.files import parts
from overlap.timeline.files.merge import merged_columns, merged_header, with_clock_error
from overlap.timeline.files.parts import Part, pack_part
from overlap.timeline.why.verdict import verdict_of


def comm(rank: int, start_ns: int, end_ns: int, *, met_ns: int | None = None, seq: int = 0) -> Span:
    info = CollectiveInfo(
        op="all_reduce", algorithm="ring", group="world", seq=seq, nbytes=8, dtype="float32", issued_ns=start_ns - 1,
        met_ns=start_ns if met_ns is None else met_ns, priority=0, call_site="train.py:1", start_ns=start_ns,
        end_ns=end_ns, ranks=(0, 1),
    )  # fmt: skip
    return Span(rank=rank, kind="comm", lane="comm", name="all_reduce", start_ns=start_ns, end_ns=end_ns, info=info)


def part(*spans: Span, world_size: int = 2, **meta: str) -> Timeline:
    return Timeline(spans=spans, world_size=world_size, meta=meta)


def test_names_with_halves_of_characters_cost_no_trace() -> None:
    odd = Span(rank=0, kind="compute", lane="a\ud800", name="\udfffb", start_ns=1, end_ns=2)
    read = Part(io.BytesIO(pack_part(part(odd, origin="x\ud800"))))
    assert read.header.meta == {"origin": "x?"}
    (columns,) = read.columns()
    assert [(span.lane, span.name) for span in columns.spans()] == [("a?", "?b")]


def test_shifting_moves_every_instant_and_notes_the_error() -> None:
    step = Span(rank=1, kind="step", lane="step", name="step 0", start_ns=5, end_ns=50, step=0)
    moved = with_clock_error(part(comm(1, 10, 40), step), error_ns=7).shifted(1000)
    assert moved.spans == [
        Span(rank=1, kind="step", lane="step", name="step 0", start_ns=1005, end_ns=1050, step=0),
        comm(1, 1010, 1040),
    ]
    assert moved.meta == {"clock_error_ns": "7"}


def test_the_last_rank_of_all_processes_is_known_only_afterwards() -> None:
    one = merged([part(comm(0, 10, 40), script="a"), with_clock_error(part(comm(1, 25, 41)), error_ns=3)])
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
    parts = [unpacked(pack_part(each)) for each in (sent, received)]
    for rank, columns in enumerate(merged_columns(parts)):
        spans = list(columns.spans())
        assert [span.info.met_ns for span in spans if span.info] == [20, 42, 60], rank
    assert merged([sent, received]).spans[0].info == message(1, 1, 23, tag=0, met_ns=20).info


def test_a_send_that_ended_before_its_receiver_came_has_not_waited() -> None:
    one = merged([part(message(0, 10, 12, tag=0)), part(message(1, 500, 501, tag=0))])
    assert [span.info.met_ns for span in one.spans if span.info] == [10, 500]
    verdict = verdict_of(one)
    assert (verdict.waiting_ns, verdict.wire_ns) == (0, 3)


def test_what_is_not_of_one_run_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r"^not of one run: 2 ranks on the real clock, and 4 on the real clock; name the files of one run$",
    ):
        merged([part(), part(world_size=4)])
    with pytest.raises(
        UsageError, match=r"^not parts of one run: rank 0 is in two of them; name the files of one run$"
    ):
        merged([part(comm(0, 1, 2)), part(comm(0, 1, 2))])


# -- parts, as bytes -----------------------------------------------------------------------------------------------


def unpacked(data: bytes) -> Part:
    return Part(io.BytesIO(data))


def spans_of(data: bytes) -> list[Span]:
    return [span for columns in unpacked(data).columns() for span in columns.spans()]


STEP = Span(rank=1, kind="step", lane="step", name="step 0", start_ns=-5, end_ns=2**62, step=0)
LONE = Span(rank=0, kind="comm", lane="tp", name="send", start_ns=5, end_ns=50)


def test_a_part_travels_as_bytes() -> None:
    timeline = part(LONE, comm(0, 10, 20), STEP, script="a")
    data = pack_part(timeline)
    assert spans_of(data) == [LONE, comm(0, 10, 20), STEP]
    header = unpacked(data).header
    assert (header.world_size, header.clock, header.ranks, header.meta) == (2, "real", (0, 1), {"script": "a"})
    assert spans_of(pack_part(part())) == []


def test_it_is_read_on_the_common_clock() -> None:
    timeline = part(LONE, comm(0, 10, 20), comm(1, 11, 21))
    assert spans_of(pack_part(timeline, offset_ns=-7)) == timeline.shifted(-7).spans


def test_parts_are_merged_a_rank_at_a_time_into_what_timelines_are() -> None:
    one, other = part(comm(0, 10, 40), LONE), with_clock_error(part(comm(1, 25, 41), STEP), error_ns=3)
    parts = [unpacked(pack_part(other)), unpacked(pack_part(one))]
    whole = merged([one, other])
    assert [list(columns.spans()) for columns in merged_columns(parts)] == list(whole.by_rank().values())
    assert merged_header([parts[1].header, parts[0].header]).meta == whole.meta
    with pytest.raises(
        UsageError, match=r"^not parts of one run: rank 0 is in two of them; name the files of one run$"
    ):
        list(merged_columns([parts[1], parts[1]]))


def test_what_is_damaged_is_refused() -> None:
    data = pack_part(part(comm(0, 10, 20), comm(1, 11, 21)))
    for damaged in (b"", data[:30], data[:-9], b"\0\0\0\7garbage", data[:-2] + b"??", b"\xff" * 99):
        with pytest.raises(UsageError, match=r"^damaged part of a trace: "):
            spans_of(damaged)


def test_a_rank_that_no_column_can_hold_is_refused() -> None:
    timeline = part(comm(0, 10, 20))
    begin, block = parts.begin_stream(timeline), parts.stream_block(next(iter(unpacked(pack_part(timeline)).columns())))
    last = (1 << 31) - 1
    (span,) = parts.read_stream(begin + last.to_bytes(8, "big") + block[8:]).spans
    assert span.rank == last
    with pytest.raises(UsageError, match=r"^damaged part of a trace: rank 2147483648; record it again$"):
        parts.read_stream(begin + (last + 1).to_bytes(8, "big") + block[8:])


@pytest.mark.parametrize("count", [0, 1, 3, -1, 1 << 40])
def test_columns_of_another_length_than_their_block_says_are_refused(count: int) -> None:
    """Fewer and more of them: numpy would read what is there."""
    data = pack_part(part(comm(0, 10, 20), comm(0, 30, 40)))
    header_end = 4 + int.from_bytes(data[:4], "big")
    block = zlib.decompress(data[header_end + 4 :])
    end = 4 + int.from_bytes(block[:4], "big")
    told = msgpack.unpackb(block[4:end])
    assert told["count"] == 2
    other = msgpack.packb(told | {"count": count})
    packed = zlib.compress(len(other).to_bytes(4, "big") + other + block[end:])
    with pytest.raises(UsageError, match=r"^damaged part of a trace: .*columns that do not fit"):
        spans_of(data[:header_end] + len(packed).to_bytes(4, "big") + packed)


@pytest.mark.parametrize(("column", "wrong"), [*product(["kind", "group", *TEXTS], [-2, 99])])
def test_an_index_that_its_table_does_not_have_is_refused(column: str, wrong: int) -> None:
    data = pack_part(part(comm(0, 10, 20)))
    header_end = 4 + int.from_bytes(data[:4], "big")
    block = bytearray(zlib.decompress(data[header_end + 4 :]))
    at = len(block) - 4 * (len(INT32_COLUMNS) - INT32_COLUMNS.index(column))
    block[at : at + 4] = wrong.to_bytes(4, "little", signed=True)
    packed = zlib.compress(block)
    with pytest.raises(UsageError, match=rf"^damaged part of a trace: .*an index in column '{column}' that its table"):
        spans_of(data[:header_end] + len(packed).to_bytes(4, "big") + packed)


def test_of_a_table_the_last_entry_has_the_highest_index() -> None:
    data = pack_part(part(comm(0, 10, 20)))
    header_end = 4 + int.from_bytes(data[:4], "big")
    block = zlib.decompress(data[header_end + 4 :])
    tables = msgpack.unpackb(block[4 : 4 + int.from_bytes(block[:4], "big")])

    def taken(column: str, index: int) -> bool:
        at = len(block) - 4 * (len(INT32_COLUMNS) - INT32_COLUMNS.index(column))
        packed = zlib.compress(block[:at] + index.to_bytes(4, "little") + block[at + 4 :])
        with suppress(UsageError):
            return bool(spans_of(data[:header_end] + len(packed).to_bytes(4, "big") + packed))
        return False

    counts = {"kind": len(KINDS), "group": len(tables["groups"])} | dict.fromkeys(TEXTS, len(tables["texts"]))
    assert {column: [taken(column, count - 1), taken(column, count)] for column, count in counts.items()} == (
        {column: [True, False] for column in counts}
    )


@given(st.data())
def test_bytes_from_anybody_give_spans_or_are_refused(data: st.DataObject) -> None:
    """Whatever the blocks hold: no other error, and no span that is not one."""
    good = pack_part(part(comm(0, 10, 20), LONE, comm(1, 11, 21)))
    blocks = []
    while good:
        end = 4 + int.from_bytes(good[:4], "big")
        blocks.append(bytearray(zlib.decompress(good[4:end])))
        good = good[end:]
    block = data.draw(st.sampled_from(blocks))
    block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    packed = b"".join(len(z).to_bytes(4, "big") + z for z in map(zlib.compress, blocks))
    with suppress(UsageError):
        for span in spans_of(packed):
            assert span.start_ns <= span.end_ns
            assert span.kind in ("compute", "comm", "step")


def test_a_block_that_unpacks_to_more_than_a_rank_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack_part(part(comm(0, 10, 20)))
    monkeypatch.setattr(parts, "BLOCK_BYTES", 100)
    with pytest.raises(UsageError, match=r"^damaged part of a trace: "):
        spans_of(data)


def test_files_of_parts_become_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = part(comm(0, 10, 40), LONE, script="a"), with_clock_error(part(comm(1, 25, 41), STEP), error_ns=3)
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
        == "overlap: not parts of one run: rank 1 is in two of them; name the files of one run\n"
    )


def test_a_part_keeps_where_and_when_computes_were_issued() -> None:
    def compute(issued_ns: int | None, call_site: str) -> Span:
        return Span(
            rank=0, kind="compute", lane="compute", name="f", start_ns=500, end_ns=600, issued_ns=issued_ns,
            call_site=call_site, step=3,
        )  # fmt: skip

    spans = [compute(400, "train.py:7"), compute(None, ""), compute(0, "train.py:8")]
    for offset_ns in (0, -300, 10**15):
        (columns,) = Part(io.BytesIO(pack_part(part(*spans), offset_ns=offset_ns))).columns()
        assert list(columns.spans()) == part(*spans).shifted(offset_ns).spans
