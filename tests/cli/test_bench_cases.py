import argparse

import ml_dtypes
import numpy as np
import pytest

from overlap import OPS, UsageError
from overlap.cli import bench
from overlap.cli.bench import cases as data
from overlap.cli.bench.cases import NAMES, OPERATIONS, Case, cases, dtype_named
from overlap.cli.bench.sampling import Sampling, Times, slowest


def parsed(*argv):
    parser = argparse.ArgumentParser()
    bench.fill(parser)
    return parser.parse_args(argv)


def sizes(*argv):
    [world] = cases(parsed("all_reduce", *argv))
    return [case.size_bytes for case in world]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("-b", "1M"), [1 << 20]),
        (("-b", "8", "-e", "64"), [8, 16, 32, 64]),
        (("-b", "8", "-e", "300", "-f", "4"), [8, 32, 128]),
        (("-e", "16"), [8, 16]),
        (("--minbytes", "1MB",), [10**6]),
        (("-b", "10"), [8]),
        (("-b", "1"), [4]),
        (("-b", "8", "-e", "12", "-f", "1.01"), [8, 8, 8, 8, 12]),
    ],
)  # fmt: skip
def test_sizes(argv, expected):
    assert sizes(*argv) == expected


def test_sizes_by_default_go_from_8_bytes_to_64_mib():
    assert sizes() == [1 << power for power in range(3, 27)]


@pytest.mark.parametrize(
    ("name", "count", "size"),
    [
        ("all_reduce", 25, 100),
        ("broadcast", 25, 100),
        ("reduce", 25, 100),
        ("sendrecv", 25, 100),
        ("allg", 8, 96),
        ("redsct", 8, 96),
        ("alltoall", 8, 96),
        ("gather", 8, 96),
        ("scatter", 8, 96),
    ],
)
def test_counts_are_of_one_block_and_sizes_of_all_as_in_nccl_tests(name, count, size):
    [[case]] = cases(parsed(name, "-b", "100", "--ranks", "3"))
    assert (case.count, case.size_bytes) == (count, size)


def test_every_size_of_the_world():
    assert [[case.ranks for case in world] for world in cases(parsed("allr", "-b", "8", "--ranks", "2,4"))] == [
        [2],
        [4],
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("allr", "-b", "4X"), "--minbytes: '4X' is not a size"),
        (("allr", "-e", "4X"), "--maxbytes: '4X' is not a size"),
        (("allr", "-b", "0"), "--minbytes, --maxbytes: expected 1 <= minbytes <= maxbytes, got 0 and 0"),
        (("allr", "-b", "9", "-e", "8"), "--minbytes, --maxbytes: expected 1 <= minbytes <= maxbytes, got 9 and 8"),
        (("allr", "-f", "1"), "--stepfactor: expected 1.01 or more, so that sizes grow, got 1"),
        (("allr", "-f", "inf"), "--stepfactor: expected 1.01 or more, so that sizes grow, got inf"),
        (("sendrecv", "--ranks", "1"), "--ranks: expected 2 or more, in multiples of --processes 1, got 1"),
        (("bcast", "-r", "2"), "--root: expected a rank from 0 to 1, got 2"),
        (("allr", "-d", "float99"), "--datatype: 'float99' is no number type of numpy or ml_dtypes"),
        (("allr", "-d", "object"), "--datatype: 'object' is no number type"),
        (("allr", "-o", "avg"), f"op: 'avg' is unknown; known are {', '.join(OPS)}"),
        (("allr", "-o", "xor"), f"op: 'xor' is unknown; known are {', '.join(OPS)}"),
        (("allr", "-d", "bool"), "op: 'sum' is not defined for bool"),
        (("redsct", "--in-place"), "--in-place: reduce_scatter cannot, because it writes where it still reads"),
    ],
)
def test_options_that_cannot_be_meant(argv, message):
    with pytest.raises(UsageError) as caught:
        cases(parsed(*argv))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float", np.float32),
        ("half", np.float16),
        ("double", np.float64),
        ("int8", np.int8),
        ("bfloat16", ml_dtypes.bfloat16),
        ("fp8e4m3", ml_dtypes.float8_e4m3fn),
    ],
)
def test_dtypes_by_the_names_of_numpy_and_of_nccl_tests(name, dtype):
    assert dtype_named(name) == dtype


def test_names_are_unambiguous():
    assert len(NAMES) == sum(len({operation.name, operation.short}) for operation in OPERATIONS)
    assert [NAMES[name] for name in ("allr", "redsct", "allg", "alltoall", "sendrecv")] == [
        NAMES[name] for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send_recv")
    ]


# -- data and right answers --------------------------------------------------------------------------------------


def case(name, ranks, count, dtype="float32", **more):
    return Case(operation=NAMES[name], ranks=ranks, count=count, dtype=dtype_named(dtype), **more)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "complex64", "float8_e4m3fn"])
def test_data_are_1_2_3_different_on_every_rank_and_aperiodic_up_to_a_prime(dtype):
    x = [case("allr", 2, 2 * data.PERIOD, dtype).buffers(rank)[0] for rank in range(2)]
    assert set(x[0].astype(complex).tolist()) == {1, 2, 3}
    assert (x[0] != x[1]).any()
    assert (x[0][: data.PERIOD] == x[0][data.PERIOD :]).all()
    for shift in (1, 3, 512, 4096, data.PERIOD - 1):
        assert data.wrong_elements(np.roll(x[0], shift), x[0]) > data.PERIOD


def test_expected_results_of_every_operation_for_two_ranks():
    a, b = (data.pattern(rank, np.dtype("float32"))[:4] for rank in range(2))
    pairs = {operation.name: case(operation.name, 2, 2) for operation in OPERATIONS}
    told = {name: [c.expected(rank).tolist() for rank in range(2) if c.receives(rank)] for name, c in pairs.items()}
    total = a + b
    assert told == {
        "all_reduce": [total[:2].tolist()] * 2,
        "reduce_scatter": [total[:2].tolist(), total[2:].tolist()],
        "all_gather": [[*a[:2], *b[:2]]] * 2,
        "all_to_all": [[*a[:2], *b[:2]], [*a[2:], *b[2:]]],
        "broadcast": [a[:2].tolist()] * 2,
        "reduce": [total[:2].tolist()],
        "gather": [[*a[:2], *b[:2]]],
        "scatter": [a[:2].tolist(), a[2:].tolist()],
        "send_recv": [b[:2].tolist(), a[:2].tolist()],
    }


@pytest.mark.parametrize(("op", "expected"), [("sum", 1 + 3), ("prod", 3), ("max", 3), ("min", 1), ("mean", 2)])
@pytest.mark.parametrize("dtype", ["float32", "int16", "uint8", "float16"])
def test_reductions(monkeypatch, op, expected, dtype):
    monkeypatch.setattr(data, "pattern", lambda rank, dtype: np.array([1, 3][rank % 2 :][:1], dtype))
    data.reduction.cache_clear()
    try:
        assert data.reduction(2, op, np.dtype(dtype)).tolist() == [expected]
        assert data.reduction(2, op, np.dtype(dtype)).dtype == dtype
    finally:
        data.reduction.cache_clear()


def test_in_place_means_the_same_memory():
    x, out = case("allr", 2, 5, in_place=True).buffers(1)
    assert x is out
    x, out = case("allg", 2, 5, in_place=True).buffers(1)
    assert out[5:].tolist() == x.tolist() == case("allg", 2, 5).buffers(1)[0].tolist()
    assert np.shares_memory(x, out)
    x, out = case("allr", 2, 5).buffers(1)
    assert not np.shares_memory(x, out)
    assert case("reduce", 2, 5, in_place=True, root=0).buffers(1)[1] is None


# -- times -------------------------------------------------------------------------------------------------------


def test_a_sample_is_the_slowest_ranks_divided_by_its_batch():
    assert slowest([[100, 400, 300], [200, 100, 700]], batch=10) == Times.of([20, 40, 70])


def test_percentiles_are_interpolated():
    assert Times.of([50, 10, 20, 30, 40, 0, 60, 70, 80, 90, 100]) == Times(median_ns=50, p10_ns=10, p90_ns=90)
    assert Times.of([10, 20]) == Times(median_ns=15, p10_ns=11, p90_ns=19)


def test_small_messages_are_sampled_in_batches():
    assert [Sampling().batch(size) for size in (8, 32 << 10, (32 << 10) + 1)] == [50, 50, 1]


def test_bandwidth_is_size_over_time():
    assert Times(median_ns=2e3, p10_ns=0, p90_ns=0).bytes_per_s(1000) == 0.5e9
