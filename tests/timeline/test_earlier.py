"""Trace files of earlier versions are still read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from overlap import UsageError
from overlap.timeline import Span, Timeline, read_trace
from overlap.timeline.files import events

from .made import comm, compute

FILE = Path(__file__).with_name("earlier.json")


def spans():
    """Return the spans that version 1 has written into the file."""
    bucket = comm(0, 10, 12, 30, issued=9, awaited=20, nbytes=4096)
    message = comm(1, 40, 42, 50, ranks=(0, 1), op="send/recv")
    return [
        replace(compute(0, 0, 8), role="program", issued_ns=-3, step=7),
        replace(bucket, role="bucket", step=7, lane="grads"),
        replace(message, info=replace(message.info, tag=5)),
        comm(2, 45, 45, 46, seq=3, ranks=()),
        Span(rank=1, kind="step", lane="step", name="step 7", start_ns=-5, end_ns=2**62, step=7),
        Span(rank=2, kind="program", lane="program", name="a\ud800", start_ns=1, end_ns=2),
    ]


def test_a_file_of_version_1_is_read_to_the_nanosecond():
    expected = Timeline(spans=spans(), world_size=3, clock="virtual", dropped=4, meta={"script": "µ"})
    assert read_trace(FILE) == expected


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
def test_of_one_that_was_cut_off_comes_what_is_complete(tmp_path, share):
    text = FILE.read_bytes()
    begin = text.index(b'"traceEvents"')
    (tmp_path / "t.json").write_bytes(text[: begin + int(share * (len(text) - begin))])
    found = read_trace(tmp_path / "t.json")
    assert found.meta["cut"] == "only what is complete"
    assert all(span in read_trace(FILE).spans for span in found.spans)


def test_a_span_that_ends_before_it_starts_is_left_out(tmp_path):
    document = json.loads(FILE.read_text())
    work = next(event for event in document["traceEvents"] if event["name"] == "work")
    work["args"]["end_ns"] = -1
    (tmp_path / "t.json").write_text(json.dumps(document))
    assert (
        read_trace(tmp_path / "t.json").meta["left_out"].startswith("1 span ends before it starts ('work' of rank 0)")
    )


@pytest.mark.parametrize("piece_bytes", [events.PIECE_BYTES, 600])
def test_a_damaged_field_is_named(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(events, "PIECE_BYTES", piece_bytes)
    document = json.loads(FILE.read_text())
    written = document["traceEvents"]
    number = next(number for number, event in enumerate(written) if event["name"] == "work")
    written[number]["args"]["start_ns"] = 1.5
    (tmp_path / "t.json").write_text(json.dumps(document))
    place = rf"event {number}, field args\.start_ns: Expected `int`, got `float`"
    with pytest.raises(UsageError, match=f"damaged trace file: {place}; record it again"):
        read_trace(tmp_path / "t.json")


def test_a_span_without_its_start_is_named(tmp_path):
    document = json.loads(FILE.read_text())
    del next(event for event in document["traceEvents"] if event["name"] == "work")["args"]["start_ns"]
    (tmp_path / "t.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"span \d+ \('work'; spans count from 0\) has no start_ns"):
        read_trace(tmp_path / "t.json")
