"""The reader of profiles: pieces of any size, all ways in which files are written, and damaged files."""

import gzip
import json
import tarfile

import numpy as np
import pytest

import overlap
from overlap.errors import UsageError
from overlap.timeline.files import events as module
from overlap.timeline.files.profile import MAX_NAME_CHARS, read_profile
from tests.explain.profiles import Recording


def recording():
    rec = Recording()
    for at in range(0, 4_000, 100):
        rec.op('aten::odd } ] " , {', at, at + 50, **{"Input Dims": [[1, 2], []], "nested": [{"a": 1}, {"b": [{}]}]})
        rec.kernel(at + 40, at + 90, launch=at + 30)
    rec.collective(4_000, 4_100)
    rec.events.insert(3, {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 1.5, "cat": "ac2g", "name": "ac2g"})
    return rec


def one_line(rec):
    return json.dumps({**rec.header, "traceEvents": rec.events, "traceName": "x"})


def indented(rec):
    return json.dumps({**rec.header, "traceEvents": rec.events, "traceName": "x"}, indent=2)


def sorted_keys(rec):
    return json.dumps({"traceEvents": rec.events, **rec.header}, sort_keys=True)


def header_last(rec):
    return json.dumps({"schemaVersion": 1, "traceEvents": rec.events, **rec.header})


WAYS = {"profiler": Recording.text, "line": one_line, "indented": indented, "sorted": sorted_keys, "last": header_last}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("piece_bytes", [50, 333, 4096, 1 << 22])
def test_a_file_reads_alike_in_pieces_of_any_size(tmp_path, monkeypatch, way, piece_bytes):
    rec = recording()
    path = tmp_path / "t.json"
    path.write_text(WAYS[way](rec))
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    found = read_profile(path)
    events = sorted((e for e in rec.events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
    assert [found.names[name] for name in found.name] == [event["name"] for event in events]
    assert found.start_ns.tolist() == [event["ts"] * 1000 for event in events]
    assert (found.end_ns - found.start_ns).tolist() == [event["dur"] * 1000 for event in events]
    assert (found.cut, found.unreadable, found.backwards) == (False, 0, 0)
    assert found.header["host_name"] == "node"
    (message,) = found.messages.values()
    assert (message.op, message.nbytes, message.group_size) == ("all_reduce", 4 << 20, 2)


def test_a_packed_file_reads_alike(tmp_path):
    plain = read_profile(recording().write(tmp_path / "t.json"))
    packed = read_profile(recording().write(tmp_path / "t.json.gz"))
    assert np.array_equal(plain.start_ns, packed.start_ns)


@pytest.mark.parametrize("packed", [False, True])
def test_of_a_file_that_was_cut_off_the_complete_events_count(tmp_path, packed):
    data = recording().text().encode()[:6_000]
    path = tmp_path / "t.json"
    path.write_bytes(gzip.compress(data)[:-40] if packed else data)
    found = overlap.why(path)
    assert "the file was cut off: only its complete events count" in found.undecided
    assert "aten" not in found.verdict or found.step_ns


def test_events_that_end_before_they_start_are_left_out(tmp_path):
    rec = recording()
    rec.op("aten::mm", 500, 400)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert "1 events end before they start: left out" in found.undecided


def test_fields_of_other_types_cost_only_their_event(tmp_path):
    rec = recording()
    rec.events += [
        {"ph": "X", "cat": "cpu_op", "name": "bad", "ts": "soon", "dur": 1, "pid": 1, "tid": 1},
        {"ph": "X", "cat": "kernel", "name": "odd", "ts": 5_000, "dur": 1, "pid": "Spans", "args": {"Seq": "x"}},
        7,
    ]  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(one_line(rec))
    found = read_profile(path)
    assert found.unreadable == 2
    assert "odd" in found.names
    assert "bad" not in found.names


def test_long_names_are_shortened(tmp_path):
    rec = recording()
    rec.op("x" * (1 << 20), 10, 20)
    found = read_profile(rec.write(tmp_path / "t.json"))
    assert max(map(len, found.names)) == MAX_NAME_CHARS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schemaVersion": 1, "traceEvents": []}', "no event of PyTorch's profiler"),
        ('{"schemaVersion": 1, "traceEvents": [{"ph": "X", "ca', "no event of PyTorch's profiler in it before"),
        ("", "not JSON, or cut off"),
        ('{"a": 1}', "not a trace of overlap or of PyTorch"),
    ],
)
def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path, text, message):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        overlap.why(path)


def test_an_archive_is_refused(tmp_path):
    recording().write(tmp_path / "t.json")
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "t.json")
    with pytest.raises(UsageError, match="tar archive: unpack it"):
        overlap.why(tmp_path / "t.tar.gz")


def test_an_empty_folder_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no trace and no dump"):
        overlap.why(tmp_path)
    with pytest.raises(UsageError, match="no such file"):
        overlap.why(tmp_path / "none.json")


@pytest.mark.parametrize(
    "event",
    [{"ts": 1e300}, {"dur": 1e300}, {"name": "half \ud800"}, {"args": {"n": 1e999}}, {"ts": 1e999},
     {"args": {"correlation": 1 << 70}}],
)  # fmt: skip
def test_events_at_times_that_no_clock_shows_are_left_out(tmp_path, event):
    rec = recording()
    rec.events.append({"ph": "X", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 1, "ts": 1, "dur": 1, **event})
    found = read_profile(rec.write(tmp_path / "t.json"))
    assert found.unreadable == (1 if {"ts", "dur"} & event.keys() else 0)


def test_notes_alone_have_no_cause(tmp_path):
    rec = Recording(device="")
    rec.note("anything", 0, 100)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert [(cause.cause, cause.duration_ns) for cause in found.causes] == [("unrecorded", 100_000)]


def test_a_recording_without_length_is_refused(tmp_path):
    rec = Recording(device="")
    rec.note("anything", 5, 5)
    with pytest.raises(UsageError, match="takes no time"):
        overlap.why(rec.write(tmp_path / "t.json"))
