"""Chakra execution traces: messages written here by hand, by the schema, and figures that were worked out on paper."""

import gzip
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.errors import UsageError
from overlap.timeline import TimelineView, breakdowns, merged, read_trace, verdict_of
from overlap.timeline.replay.changes import parse_change
from overlap.timeline.replay.prediction import predict

METADATA, COMPUTE, SEND, COLLECTIVE = 1, 4, 5, 7


def varint(number):
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def whole(number, value):
    return varint(number << 3) + varint(value) if value else b""  # protobuf leaves zeros out


def block(number, data):
    data = data.encode() if isinstance(data, str) else data
    return varint(number << 3 | 2) + varint(len(data)) + data


def attribute(name, kind, value):
    if kind == 29:
        return block(10, block(1, name) + block(29, value))
    if kind == 3:
        return block(10, block(1, name) + varint(3 << 3 | 1) + struct.pack("<d", value))
    return block(10, block(1, name) + varint(kind << 3) + varint(value))


def node(id, name, kind, us=0, after=(), start_us=0, said=(), **attributes):
    kinds = {bool: 27, str: 29, float: 3, int: 9}
    told = [attribute(each, kinds[type(value)], value) for each, value in attributes.items()]
    inputs = block(8, b"".join(block(1, text) for text in said)) if said else b""
    deps = block(5, b"".join(map(varint, after))) if after else b""
    times = whole(6, start_us) + whole(7, us)
    return whole(1, id) + block(2, name) + whole(3, kind) + deps + times + inputs + b"".join(told)


def encoded(*nodes):
    return b"".join(varint(len(each)) + each for each in (block(1, "1.1.1"), *nodes))


GROUPS = json.dumps(json.dumps([{"pg_name": "3", "ranks": [0, 1]}, {"pg_name": "4", "ranks": []}]))


def training(late_us=0):
    """The second kernel runs beside the first half of the collective, which needs the first kernel."""
    host = {"is_cpu_op": True, "tid": 1}
    return encoded(
        node(0, "## process_group:init ##", METADATA, said=[GROUPS]),
        node(1, "aten::mm", COMPUTE, 5 + late_us, **host),
        node(2, "gemm", COMPUTE, 30, [1], is_cpu_op=False, stream=7),
        node(3, "c10d::allreduce_", COMPUTE, 2, [1], **host),
        node(4, "nccl", COLLECTIVE, 40, [3, 2], stream=20, comm_type=0, comm_size=4096, pg_name="3"),
        node(5, "gemm", COMPUTE, 20, [1], is_cpu_op=False, stream=7),
    )


def written(tmp_path, data, name="run.0.et"):
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


def times(timeline):
    return [(span.kind, span.name, span.start_ns, span.end_ns) for span in timeline.spans]


def test_operations_begin_as_soon_as_their_dependencies_and_their_stream_allow(tmp_path):
    timeline = read_trace(written(tmp_path, training()))
    assert times(timeline) == [
        ("compute", "gemm", 5_000, 35_000),
        ("comm", "nccl", 35_000, 75_000),
        ("compute", "gemm", 35_000, 55_000),
    ]
    (row,) = breakdowns(timeline)
    assert (row.wall_ns, row.compute_ns, row.comm_ns, row.overlapped_ns) == (70_000, 50_000, 40_000, 20_000)
    info = next(span.info for span in timeline.spans if span.info)
    assert (info.op, info.nbytes, info.group, info.ranks, info.seq) == ("all_reduce", 4096, "3", (0, 1), 0)
    title = TimelineView(timeline).lines()[0][0][0]
    assert title == "whole run: 1 of 2 ranks, times from dependencies"


def test_the_files_of_two_ranks_are_one_run_with_verdict_and_what_ifs(tmp_path):
    files = [written(tmp_path, training(30 * rank), f"run.{rank}.et") for rank in (0, 1)]
    timeline = merged([read_trace(file) for file in files])
    assert (timeline.world_size, timeline.ranks()) == (2, [0, 1])
    assert "waiting for rank 1 (compute 'gemm')" in str(verdict_of(timeline))
    assert predict(timeline, [parse_change("compute=0.5x")]).gain_ns > 0


def test_recorded_times_are_taken_as_they_are(tmp_path):
    data = encoded(
        node(1, "gemm", COMPUTE, 30, start_us=100),
        node(2, "gather", COLLECTIVE, 10, [1], start_us=110, comm_type=2, comm_size=8, pg_name="4"),
    )
    timeline = read_trace(written(tmp_path, data, "a.1.et"))
    assert times(timeline) == [("compute", "gemm", 100_000, 130_000), ("comm", "gather", 110_000, 120_000)]
    info = timeline.spans[1].info
    assert (info.op, info.nbytes, info.ranks) == ("all_gather", 16, (0, 1))  # what comes out, as everywhere
    assert "replayed" not in timeline.meta


def test_without_a_device_the_host_computes(tmp_path):
    host = {"is_cpu_op": True}
    data = encoded(node(1, "mm", COMPUTE, 5, **host), node(2, "gloo", COLLECTIVE, 7, [1], comm_type=7, **host))
    timeline = read_trace(written(tmp_path, data))
    assert times(timeline) == [("compute", "mm", 0, 5_000), ("comm", "gloo", 5_000, 12_000)]
    assert timeline.spans[1].info.op == "reduce_scatter"


def test_the_flavour_in_json(tmp_path):
    graph = [
        {"Id": 1, "Name": "mm", "NodeType": 4, "runtime": 5, "is_cpu_op": False},
        {"Id": 2, "Name": "sum", "NodeType": "COMM_COLL_NODE", "runtime": 3, "data_deps": [1], "comm_type": 0,
         "comm_size": 64},
    ]  # fmt: skip
    timeline = read_trace(written(tmp_path, json.dumps({"workload_graph": graph}).encode(), "w.0.json"))
    assert times(timeline) == [("compute", "mm", 0, 5_000), ("comm", "sum", 5_000, 8_000)]


def test_compressed_files_are_read_and_cut_ones_as_far_as_they_go(tmp_path):
    data = training()
    assert times(read_trace(written(tmp_path, gzip.compress(data), "z.0.et.gz"))) == times(
        read_trace(written(tmp_path, data))
    )
    assert "cut" not in read_trace(tmp_path / "run.0.et").meta
    shorter = read_trace(written(tmp_path, data[:-1]))
    assert [name for _, name, _, _ in times(shorter)] == ["gemm", "nccl"]
    assert shorter.meta["cut"] == "only what is complete"


@given(st.integers(0, 400), st.binary(max_size=4))
def test_whatever_a_file_holds_it_is_read_or_refused_in_a_sentence(tmp_path_factory, at, instead):
    data = training()
    path = tmp_path_factory.mktemp("damaged") / "run.0.et"
    path.write_bytes(data[: at % len(data)] + instead + data[at % len(data) + len(instead) :])
    said = f"{path}: read"
    try:
        read_trace(path)
    except UsageError as error:
        said = str(error)
    assert said.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a Chakra trace without durations: a workload for a simulator, not what was measured; convert one that "
         "PyTorch's profiler has timed"),
        (encoded(node(1, "a", COMPUTE, 1, [2]), node(2, "b", COMPUTE, 1, [1]), node(3, "c", COMPUTE, 1)),
         "2 of its 3 operations never begin: their dependencies go round in a circle"),
        (encoded(b"\x0b"), "damaged trace file: a field of kind 3, which there is none of"),
        (encoded(b"\x12\x09a"), "damaged trace file: a field of 9 bytes in a message that has 1 left"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(tmp_path, data, message):
    path = written(tmp_path, data)
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}: {message}"
