import gzip
import json
import os
import threading
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlap
from overlap.errors import UsageError
from overlap.timeline import Recorder, Timeline, read_trace, write_trace
from overlap.timeline.files import profile, reading
from overlap.timeline.files.trace import SectionWriter
from overlap.timeline.span import RoleName
from tests.errors import error_of
from tests.explain.profiles import Recording
from tests.threads import running

from .made import compute

times_ns = st.integers(0, 2**62)
texts = st.text(alphabet='ab"\n\u00b5\ud800', max_size=3)
pairs = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@st.composite
def raw_spans(draw):
    kind = draw(st.sampled_from(["compute", "comm", "step"]))
    start, end = sorted((draw(times_ns), draw(times_ns)))
    info = None
    if kind == "step":
        info = draw(st.integers(0, 9))
    elif kind == "compute" and draw(st.booleans()):
        info = (draw(texts), 0, draw(times_ns), draw(st.none() | st.integers(0, 9)))
    elif kind == "comm" and draw(st.booleans()):
        numbers = [draw(times_ns) for _ in range(4)]
        op = draw(st.sampled_from(["all_reduce", "all_gather", "send"]))
        dtype = draw(st.sampled_from(["float32", "bool", "bfloat16", "float8_e4m3fn", ""]))
        group = draw(texts)
        if draw(st.booleans()):
            group = group, tuple(draw(st.lists(st.integers(0, 9), max_size=4))), draw(st.integers(0, 3))
        meeting = (op, draw(texts), group, numbers[0], numbers[1], dtype, numbers[3])
        info = (meeting, numbers[2], -1, draw(texts), 0, None)
    return kind, draw(st.sampled_from(["compute", "comm", "tp"])), draw(texts), start, end, info


@given(st.lists(st.lists(raw_spans(), max_size=5), min_size=1, max_size=3), st.sampled_from(["real", "virtual"]))
def test_what_was_written_reads_back_to_the_nanosecond(tmp_path_factory, ranks, clock):
    recorders = [Recorder(rank, capacity=4) for rank in range(len(ranks))]
    for recorder, raws in zip(recorders, ranks, strict=True):
        for raw in raws:
            recorder.append(raw)
    timeline = Timeline.collect(recorders, world_size=9, clock=clock, meta={"µ": "\n"})
    path = tmp_path_factory.getbasetemp() / "round.trace.json"
    write_trace(timeline, path)
    assert read_trace(path) == timeline


def test_messages_keep_their_tags(tmp_path):
    async def main(rank):
        x = np.zeros(4, "f4")
        for tag in (0, 7):
            await (rank.send(x, 1, tag=tag) if rank.rank == 0 else rank.recv(src=0, tag=tag))

    overlap.run(main, ranks=2, trace=tmp_path / "t.json")
    timeline = read_trace(tmp_path / "t.json")
    assert [[span.info.tag for span in spans] for spans in map(timeline.for_rank, timeline.ranks())] == [[0, 7], [0, 7]]


def test_roles_are_kept_where_they_are_known(tmp_path):
    recorder, path = Recorder(0), tmp_path / "t.json"
    recorder.append(("compute", "compute", "update", 0, 1, None))
    recorder.append(("compute", "compute", RoleName("update", "update"), 1, 2, ("train.py:1", 0, 0, None)))
    meeting = ("all_reduce", "ring", "world", 0, 8, "float32", 2)
    recorder.append(("comm", "comm", RoleName("bucket 0", "bucket"), 2, 3, (meeting, 2, 0, "train.py:2", 0, None)))
    recorder.append(("step", "step", "step 0", 3, 4, 0))
    spans = [*recorder.spans(), compute(0, 5, 6, "update")]
    write_trace(Timeline(spans=spans, world_size=1), path)
    found = read_trace(path).spans
    assert [(span.name, span.role) for span in found] == [
        ("update", "program"), ("update", "update"), ("bucket 0", "bucket"), ("step 0", ""), ("update", ""),
    ]  # fmt: skip
    assert {type(span.name) for span in found} == {str}


def test_the_lines_of_computes_are_kept_where_they_are_known(tmp_path):
    spans = [compute(0, 0, 10, site="train.py:7"), compute(0, 10, 20, site="")]
    write_trace(Timeline(spans=spans, world_size=1), tmp_path / "t.json")
    assert [span.call_site for span in read_trace(tmp_path / "t.json").spans] == ["train.py:7", ""]
    events = json.loads((tmp_path / "t.json").read_text())
    assert [event["args"].get("site") for event in events if event["ph"] == "X"] == ["train.py:7", None]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_equal_timelines_give_equal_bytes_and_no_other_file(tmp_path, training, name):
    path = tmp_path / name
    write_trace(training(2), path)
    first = path.read_bytes()
    again = training(2)
    again.meta = dict(reversed(again.meta.items()))
    write_trace(again, path)
    assert path.read_bytes() == first
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    # A gzip header keeps the time of writing in these bytes, and a second write in the same second would hide it.
    assert (first[:8] == b"\x1f\x8b\x08\0\0\0\0\0") == name.endswith(".gz")
    assert read_trace(path) == training(2)


def slices_by_thread(events):
    threads = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    return threads


def to_events(timeline):
    text = SectionWriter().encode_spans(timeline.columns).decode()
    return json.loads(f"[{text.removeprefix(',')}]")


def check_viewable(events):
    """What viewers need: nothing crosses on a thread, and threads have names."""
    threads = slices_by_thread(events)
    for slices in threads.values():
        ordered = sorted(slices, key=lambda event: event["ts"])
        for before, after in pairwise(ordered):
            assert round((before["ts"] + before["dur"]) * 1000) <= round(after["ts"] * 1000)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(threads) == named


def test_the_events_of_a_run_are_viewable(training):
    check_viewable(to_events(training(3)))


@given(st.lists(pairs, max_size=10), st.lists(pairs, max_size=10))
def test_nothing_crosses_whatever_overlaps(comm, compute):
    recorder = Recorder(0)
    for seq, (start, end) in enumerate(comm):
        info = (("all_reduce", "ring", "world", seq, 4, "int8", start), max(start - 3, 0), 0, "", 0, None)
        recorder.append(("comm", "comm", "all_reduce", start, end, info))
    for start, end in compute:
        recorder.append(("compute", "compute", "f", start, end, None))
    for columns in (recorder.columns(), Timeline.collect([recorder], world_size=1).columns):
        check_viewable(json.loads(f"[{SectionWriter().encode_spans(columns).decode()[1:]}]"))


def test_crossing_operations_of_a_stream_move_to_further_threads():
    recorder = Recorder(0)
    for start, end in ((0, 10), (5, 15), (10, 20), (12, 13)):
        recorder.append(("comm", "comm", f"{start}", start, end, None))
    recorder.append(("step", "anything", "step 0", 0, 20, 0))
    timeline = Timeline.collect([recorder], world_size=1)
    names = {event["tid"]: event["args"]["name"] for event in to_events(timeline) if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["comm", "comm (2)", "comm (3)", "steps"]
    rows = {names[tid]: [e["name"] for e in row] for (_, tid), row in slices_by_thread(to_events(timeline)).items()}
    assert rows == {"comm": ["0", "10"], "comm (2)": ["5"], "comm (3)": ["12"], "steps": ["step 0"]}


def test_a_span_has_all_that_is_known_of_it_and_no_more(training):
    first = next(event for event in to_events(training(2)) if event.get("cat") == "comm")
    assert first == {
        "args": {
            "algorithm": "ring",
            "dtype": "float32",
            "group": "world",
            "issued_ns": 5_003_900_000,
            "met_ns": 5_004_950_000,
            "nbytes": 4096,
            "op": "all_reduce",
            "ranks": "0-1",
            "seq": 0,
            "site": "train.py:41",
            "start_ns": 5_003_950_000,
            "step": 0,
        },
        "cat": "comm",
        "dur": 3_000.0,
        "name": "all_reduce 0",
        "ph": "X",
        "pid": 0,
        "tid": first["tid"],
        "ts": 5_003_950.0,
    }


def earlier(document):
    return json.dumps(document).encode()


NO_TRACE = "not a trace of overlap or of PyTorch's profiler, and no system profile of Neuron; name one of these"
BAD = {
    "empty": (b"", "not JSON, or cut off"),
    "text": (b"hello", "not JSON, or cut off"),
    "binary": (b"\xff\xfe\x00", "is text in UTF-16 or UTF-32"),
    "other JSON": (b'{"a": 1}', NO_TRACE),
    "number": (b"3", NO_TRACE),
    "no header": (
        b'[{"ph": "X", "name": "f", "cat": "compute", "pid": 0, "tid": 1, "ts": 0, "dur": 1, "args": {"start_ns": 1}}]',
        "damaged trace file: the span 'f' of rank 0 comes before the header",
    ),
    "header": (b'{"traceEvents": [], "overlap": 3}', "damaged trace file: the field 'overlap' is not an object"),
    "version": (b'{"traceEvents": [], "overlap": {}}', "damaged trace file: Object missing required field `version`"),
    "newer": (b'{"traceEvents": [], "overlap": {"version": 2}}', "written by a newer version (format 2"),
    "newer array": (
        b'[{"ph": "M", "name": "overlap", "args": {"version": 3}}]',
        "written by a newer version (format 3",
    ),
    "no version": (b'[{"ph": "M", "name": "overlap", "args": {}}]', "missing required field `version`"),
    "clock": (
        b'{"traceEvents": [], "overlap": {"version": 1, "clock": "x"}}',
        "damaged trace file: Invalid enum value 'x' - at `$.clock`",
    ),
    "no time": (b'{"trace_events": [{"name": "cc_running"}]}', "timestamp is None, not a number of nanoseconds"),
    "deep": (b"[" * 100_000, "its values are nested too deeply"),
    "gzip": (gzip.compress(b"hello")[:-12], "not JSON, or cut off before its first event"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_clear_line(tmp_path, name):
    content, message = BAD[name]
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    error = error_of(UsageError, read_trace, path)
    assert str(error).startswith(f"{path}: ")
    assert message in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_of_a_file_cut_anywhere_comes_what_is_complete(tmp_path, training, name):
    path = tmp_path / name
    write_trace(training(1), path)
    whole, spans = path.read_bytes(), read_trace(path).spans
    found = []
    for kept in range(0, len(whole) - 4, max(len(whole) // 23, 1)):
        path.write_bytes(whole[:kept])
        try:
            part = read_trace(path)
        except UsageError:
            assert not found  # before its first event
            continue
        assert all(span in spans for span in part.spans)
        assert (part.meta["cut"], part.world_size) == ("only what is complete", 1)
        found.append(len(part.spans))
    assert found == sorted(found)
    assert found[-1] > len(spans) // 2


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("args", "start_ns"), 1.5, "event AT, field args.start_ns: Expected `int`, got `float`"),
        (("args", "met_ns"), 1 << 63, "a number in it has more than 64 bits"),
        (("args", "seq"), "x", "event AT, field args.seq: Expected `int`, got `str`"),
        (("args", "site"), None, "event AT, field args.site: Expected `str`, got `null`"),
        (("args", "ranks"), "x", "'x' is not a rank or a range such as 3-5"),
        (("args",), [], "event AT, field args: Expected `object`, got `array`"),
        (("cat",), "gpu", "event AT, field cat: Invalid enum value 'gpu'"),
        (("pid",), "a", "event AT, field pid: Expected `int`, got `str`"),
    ],
)
def test_a_damaged_event_names_its_field(tmp_path, training, place, value, message):
    path = tmp_path / "t.json"
    write_trace(training(1, late_ns=0), path)
    document = json.loads(path.read_text())
    at, target = next((at, event) for at, event in enumerate(document) if event.get("cat") == "comm")
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    path.write_text(json.dumps(document))
    error = error_of(UsageError, read_trace, path)
    assert str(error) == f"{path}: damaged trace file: {message.replace('AT', str(at))}; record it again"


def test_a_missing_file_and_an_unwritable_place_are_usage_errors(tmp_path, training):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"trace: cannot write .*: No such file"):
        write_trace(training(1), tmp_path / "none" / "t.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="trace: cannot write"):
        write_trace(training(1), tmp_path / "folder")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_TEXT_BYTES", 16 << 20)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 20)) * 200)  # 200 MiB in 200 KB
    error = error_of(UsageError, read_trace, path)
    assert str(error) == (
        f"{path}: unpacks to more than 16 MiB, and is no trace of ours: if it is a trace, unpack it with gunzip first"
    )


def test_a_trace_of_ours_is_read_in_flat_memory(tmp_path):
    """Of 12 MiB of text, memory holds a piece."""
    path, timeline = tmp_path / "t.json.gz", Timeline(spans=[compute(0, 0, 5)], world_size=1)
    plain = tmp_path / "t.json"
    write_trace(timeline, plain)
    text = plain.read_bytes()
    assert text.endswith(b"\n]\n")
    path.write_bytes(gzip.compress(b"".join([text[:-2], *[b" " * (1 << 10) + b"\n"] * (12 << 10), b"]\n"])))
    tracemalloc.start()
    try:
        assert read_trace(path) == timeline
        assert tracemalloc.get_traced_memory()[1] < 7 << 20
    finally:
        tracemalloc.stop()


def test_all_packed_files_of_a_job_have_one_limit(tmp_path, monkeypatch):
    for rank in range(3):
        text = json.dumps({"traceEvents": [], "schemaVersion": 1}).encode() + b" " * (1 << 20)
        (tmp_path / f"rank{rank}.json.gz").write_bytes(gzip.compress(text))
    monkeypatch.setenv("OVERLAP_UNPACKED", "64MiB")
    with pytest.raises(UsageError, match="no event of PyTorch's profiler"):
        overlap.why(tmp_path)
    monkeypatch.setenv("OVERLAP_UNPACKED", "512KiB")
    error = error_of(UsageError, overlap.why, tmp_path)
    assert str(error) == (
        "the files unpack to more than 512 KiB: name fewer of them, or set OVERLAP_UNPACKED=SIZE "
        "(overlap why --unpacked SIZE) if no file is a bomb"
    )


def test_a_file_of_too_many_events_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "MAX_EVENTS", 2)
    rec = Recording()
    for _ in range(4):
        rec.op("aten::mm", 0, 1)
    with pytest.raises(UsageError, match=r"t.json: more than 2 events; record fewer steps"):
        read_trace(rec.write(tmp_path / "t.json"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_text_in_another_encoding_is_named(tmp_path, encoding):
    (tmp_path / "t.json").write_bytes(json.dumps({"traceEvents": []}).encode(encoding))
    with pytest.raises(UsageError, match=r"t.json: is text in UTF-16 or UTF-32; write it again in UTF-8 \(iconv"):
        read_trace(tmp_path / "t.json")


@pytest.mark.parametrize("begin", ["", '{"overlap": ', '{"traceEvents": '])
def test_values_that_are_nested_too_deeply_are_named(tmp_path, begin):
    (tmp_path / "t.json").write_text(begin + "[" * 100_000)
    with pytest.raises(UsageError, match=r"t.json: its values are nested too deeply for a trace; name another file"):
        read_trace(tmp_path / "t.json")


def test_a_kineto_trace_gives_one_rank_with_its_kernels_and_steps(tmp_path):
    rec = Recording(rank=3, world=4)
    rec.op("aten::mm", 0, 5)
    rec.note("ProfilerStep#12", 0.5, 30.5)
    launched = {"correlation": rec.call("cudaGraphLaunch", 0.75, 1)}
    rec.add("kernel", "gemm", 1.25, 11.25, **launched)
    rec.add("kernel", "ncclDevKernel_AllReduce", 5, 15.0625, **launched)
    rec.add("kernel", "custom", 20, 21, **launched, **{"Collective name": "allreduce"})
    rec.events.append({"ph": "i", "name": "mark", "ts": 3})
    timeline = read_trace(rec.write(tmp_path / "kineto.json"))
    assert [(span.rank, span.kind, span.name, span.start_ns, span.end_ns) for span in timeline.spans] == [
        (3, "step", "ProfilerStep#12", 500, 30_500),
        (3, "compute", "gemm", 1_250, 11_250),
        (3, "comm", "ncclDevKernel_AllReduce", 5_000, 15_062),
        (3, "comm", "custom", 20_000, 21_000),
    ]
    assert (timeline.steps(), timeline.world_size) == ([12], 4)


def test_a_link_is_followed(tmp_path, training):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_trace(training(1), link)
    assert link.is_symlink()
    assert read_trace(target) == training(1)
    assert {entry.name for entry in tmp_path.iterdir()} == {"target.json", "link.json"}


def test_a_pipe_is_written_to(tmp_path, training):
    pipe, found = tmp_path / "pipe.json", []
    os.mkfifo(pipe)
    with running(threading.Thread(target=lambda: found.append(pipe.read_bytes()))):
        write_trace(training(1), pipe)
    assert pipe.is_fifo()
    (tmp_path / "same.json").write_bytes(found[0])
    assert read_trace(tmp_path / "same.json") == training(1)
