"""`overlap bench`: its cases, its columns, and the worlds that it measures."""

import argparse
import itertools
import json

import ml_dtypes
import numpy as np
import pytest

import overlap
from overlap import OPS, UsageError
from overlap.cli import bench
from overlap.cli.bench import cases as bench_cases
from overlap.cli.bench import measuring
from overlap.cli.bench.cases import NAMES, OPERATIONS, Case, find_dtype, list_cases
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.sampling import Sampling, Times, slowest_times
from tests import interpreters
from tests.errors import error_of

# -- bench cases -------------------------------------------------------------------------------------------------------


def parsed(*argv):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(argv)


def sizes(*argv):
    [world] = list_cases(parsed("all_reduce", *argv))
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
        *((name, 25, 100) for name in ("all_reduce", "broadcast", "reduce", "sendrecv")),
        *((name, 8, 96) for name in ("allg", "redsct", "alltoall", "gather", "scatter")),
    ],
)
def test_counts_are_of_one_block_and_sizes_of_all_as_in_nccl_tests(name, count, size):
    [[case]] = list_cases(parsed(name, "-b", "100", "--ranks", "3"))
    assert (case.count, case.size_bytes) == (count, size)


def test_every_size_of_the_world():
    worlds = list_cases(parsed("allr", "-b", "8", "--ranks", "2,4"))
    assert [[case.ranks for case in world] for world in worlds] == [[2], [4]]


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
        (("allr", "-d", "float9"), "--datatype: expected a type of numpy or ml_dtypes, such as float32, got 'float9'"),
        (("allr", "-d", "object"), "--datatype: expected a type of numpy or ml_dtypes, such as float32, got 'object'"),
        (("allr", "-d", "1_0"), "--datatype: expected a type of numpy or ml_dtypes, such as float32, got '1_0'"),
        (("allr", "-o", "avg"), f"op: 'avg' is unknown; known are {', '.join(OPS)}"),
        (("allr", "-o", "xor"), f"op: 'xor' is unknown; known are {', '.join(OPS)}"),
        (("allr", "-d", "bool"), "op: 'sum' is not defined for bool"),
        (("redsct", "--in-place"), "--in-place: reduce_scatter cannot, because it writes where it still reads"),
    ],
)
def test_options_that_cannot_be_meant(argv, message):
    assert str(error_of(UsageError, list_cases, parsed(*argv))).startswith(message)


DTYPES = {"float": np.float32, "half": np.float16, "double": np.float64, "int8": np.int8}
DTYPES |= {"bfloat16": ml_dtypes.bfloat16, "fp8e4m3": ml_dtypes.float8_e4m3fn}


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_dtypes_by_the_names_of_numpy_and_of_nccl_tests(name, dtype):
    assert find_dtype(name) == dtype


def test_names_are_unambiguous():
    assert len(NAMES) == sum(len({operation.name, operation.short}) for operation in OPERATIONS)
    assert [NAMES[name] for name in ("allr", "redsct", "allg", "alltoall", "sendrecv")] == [
        NAMES[name] for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send_recv")
    ]


# -- data and right answers --------------------------------------------------------------------------------------


def case(name, ranks, count, dtype="float32", **more):
    return Case(operation=NAMES[name], ranks=ranks, count=count, dtype=find_dtype(dtype), **more)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "complex64", "float8_e4m3fn"])
def test_data_are_1_2_3_different_on_every_rank_and_aperiodic_up_to_a_prime(dtype):
    x = [case("allr", 2, 2 * bench_cases.PERIOD, dtype).make_buffers(rank)[0] for rank in range(2)]
    assert set(x[0].astype(complex).tolist()) == {1, 2, 3}
    assert (x[0] != x[1]).any()
    assert (x[0][: bench_cases.PERIOD] == x[0][bench_cases.PERIOD :]).all()
    for shift in (1, 3, 512, 4096, bench_cases.PERIOD - 1):
        assert bench_cases.count_wrong_elements(np.roll(x[0], shift), x[0]) > bench_cases.PERIOD


def test_expected_results_of_every_operation_for_two_ranks():
    a, b = (bench_cases.input_pattern(rank, np.dtype("float32"))[:4] for rank in range(2))
    pairs = {operation.name: case(operation.name, 2, 2) for operation in OPERATIONS}
    told = {
        name: [c.expected_result(rank).tolist() for rank in range(2) if c.gets_result(rank)]
        for name, c in pairs.items()
    }
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
    monkeypatch.setattr(bench_cases, "input_pattern", lambda rank, dtype: np.array([1, 3][rank % 2 :][:1], dtype))
    bench_cases.expected_reduction.cache_clear()
    try:
        assert bench_cases.expected_reduction(2, op, np.dtype(dtype)).tolist() == [expected]
        assert bench_cases.expected_reduction(2, op, np.dtype(dtype)).dtype == dtype
    finally:
        bench_cases.expected_reduction.cache_clear()


def test_in_place_means_the_same_memory():
    x, out = case("allr", 2, 5, in_place=True).make_buffers(1)
    assert x is out
    x, out = case("allg", 2, 5, in_place=True).make_buffers(1)
    assert out[5:].tolist() == x.tolist() == case("allg", 2, 5).make_buffers(1)[0].tolist()
    assert np.shares_memory(x, out)
    x, out = case("allr", 2, 5).make_buffers(1)
    assert not np.shares_memory(x, out)
    assert case("reduce", 2, 5, in_place=True, root=0).make_buffers(1)[1] is None


# -- times -------------------------------------------------------------------------------------------------------


def test_a_sample_is_the_slowest_ranks_divided_by_its_batch():
    assert slowest_times([[100, 400, 300], [200, 100, 700]], batch=10) == Times.of_samples([20, 40, 70])


def test_percentiles_are_interpolated():
    assert Times.of_samples([50, 10, 20, 30, 40, 0, 60, 70, 80, 90, 100]) == Times(median_ns=50, p10_ns=10, p90_ns=90)
    assert Times.of_samples([10, 20]) == Times(median_ns=15, p10_ns=11, p90_ns=19)


def test_small_messages_are_sampled_in_batches():
    assert [Sampling().operations_per_sample(size) for size in (8, 32 << 10, (32 << 10) + 1)] == [50, 50, 1]


def test_bandwidth_is_size_over_time():
    assert Times(median_ns=2e3, p10_ns=0, p90_ns=0).bytes_per_s(1000) == 0.5e9


# -- bench columns -----------------------------------------------------------------------------------------------------

F32 = np.dtype(np.float32)


def clock(*steps_ns):
    """A clock that goes on by the given steps, over and over, each time somebody looks."""
    return itertools.accumulate(itertools.cycle(steps_ns)).__next__


def times(median_us, p10_us=1.0, p90_us=2.0):
    return Times(median_ns=median_us * 1e3, p10_ns=p10_us * 1e3, p90_ns=p90_us * 1e3)


def result_of(name="all_reduce", count=1 << 18, median_us=1000.0, wrong=0, **more):
    case = Case(operation=NAMES[name], ranks=4, count=count, dtype=F32, **more)
    return Result(case=case, times=times(median_us, 900.5, 1100.25), wrong=wrong)


def test_rows_and_columns():
    rows = [
        result_of(),
        result_of("redsct", count=1 << 16, median_us=99.994),
        result_of("broadcast", count=2, root=3, median_us=31.5),
        result_of("sendrecv", count=2, median_us=12345.6, wrong=7),
    ]
    assert (
        "\n".join([measuring.COLUMNS, *map(measuring.table_row, rows)])
        == """\
#      size      count ranks     time      p10      p90    algbw    busbw wrong
#       (B)                      (us)     (us)     (us)   (GB/s)   (GB/s)
    1048576     262144     4   1000.0    900.5   1100.2    1.049    1.573     0
    1048576      65536     4    99.99    900.5   1100.2   10.486    7.865     0
          8          2     4    31.50    900.5   1100.2    0.000    0.000     0
          8          2     4    12346    900.5   1100.2    0.000    0.000     7"""
    )


def test_the_heading_says_how_a_time_is_taken_and_what_busbw_is():
    assert (
        measuring.table_heading(result_of(in_place=True).case, Sampling(iters=7, warmup=2), 1)
        == f"""\
# all_reduce of float32, sum, in place, processes: 1
# time: median, 10th and 90th percentile of 7 samples after 2 of warm-up;
# a sample is the slowest rank's time from a common barrier to its result; up to
# 32 KiB it is 50 operations back to back, divided by 50
# GB is 10^9 bytes; busbw = algbw * 2(n-1)/n with n ranks
{measuring.COLUMNS}"""
    )


@pytest.mark.parametrize(("name", "text"), [("reduce", "float32, sum, root 3"), ("all_gather", "float32")])
def test_the_heading_names_what_all_rows_have_in_common(name, text):
    told = measuring.table_heading(result_of(name, root=3).case, Sampling(), 2)
    assert told.startswith(f"# {name} of {text}, out of place, processes: 2\n")
    assert max(map(len, told.splitlines())) <= 80


# -- measuring ---------------------------------------------------------------------------------------------------


def measure(case, sampling):
    """Return the row of a case in a world of its own."""
    rows = []
    overlap.run(measuring.measure_on_rank, [case], sampling, rows.append, ranks=case.ranks)
    return rows[0]


def test_a_time_is_from_the_barrier_to_the_result_without_warm_up(monkeypatch):
    """One rank looks at the clock twice in each sample: here warm-up takes 9 ms, the samples 2 and 4 ms."""
    case = Case(operation=NAMES["allr"], ranks=1, count=1 << 14, dtype=F32)
    monkeypatch.setattr(measuring, "perf_counter_ns", clock(0, 9_000_000, 5, 2_000_000, 5, 4_000_000))
    told = measure(case, Sampling(iters=2, warmup=1))
    assert told == Result(case=case, times=Times.of_samples([2e6, 4e6]), wrong=0)


def test_a_batch_is_divided(monkeypatch):
    case = Case(operation=NAMES["allr"], ranks=1, count=2, dtype=F32)
    monkeypatch.setattr(measuring, "perf_counter_ns", clock(0, 50_000))
    assert measure(case, Sampling(iters=1, warmup=0)) == Result(case=case, times=Times.of_samples([1e3]), wrong=0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("operation", bench_cases.OPERATIONS, ids=lambda operation: operation.name)
def test_every_operation_runs_and_is_right(operation, in_place):
    for ranks in (2, 3):
        case = Case(
            operation=operation, ranks=ranks, count=9000, dtype=F32, in_place=in_place and operation.in_place, root=1
        )
        assert measure(case, Sampling(iters=1, warmup=1)).wrong == 0


@pytest.mark.parametrize("dtype", ["int8", "bool", "bfloat16", "float8_e4m3fn", "complex64"])
@pytest.mark.parametrize("op", ["max", "prod", "mean"])
def test_every_kind_of_dtype_is_right(dtype, op):
    if (dtype, op) == ("bool", "mean"):
        op = "min"
    case = Case(operation=NAMES["allr"], ranks=3, count=100, dtype=bench_cases.find_dtype(dtype), op=op)
    assert measure(case, Sampling(iters=1, warmup=0)).wrong == 0


@pytest.fixture
def liar(monkeypatch):
    """All-reduces take the maximum, whatever they are asked for."""
    monkeypatch.setattr(
        Case, "make_issue_function", lambda case, rank, x, out: lambda: (rank.all_reduce(x, "max", out),)
    )


def test_wrong_results_are_counted_on_all_ranks_and_fail(overlap, liar):
    code, out, err = overlap("bench", "all_reduce", "-b", "400", "-n", "1", "-w", "0")
    assert (code, err) == (1, "")
    assert out.splitlines()[-2].split()[-1] == "200"  # 1 + 1 and more on both ranks: no maximum is a sum
    assert out.splitlines()[-1] == "# 200 wrong elements: FAILED"


def test_the_worlds_of_a_bench_obey_its_own_options_only(overlap, monkeypatch):
    monkeypatch.setenv("OVERLAP_RANKS", "5")
    code, out, _ = overlap("bench", "allr", "-b", "8", "-n", "1", "-w", "0", "--ranks", "2,3")
    assert code == 0
    assert [line.split()[2] for line in out.splitlines() if line.startswith(" ")] == ["2", "3"]


# -- JSON --------------------------------------------------------------------------------------------------------


def test_json_on_stdout_is_all_there_is(overlap):
    code, out, err = overlap("bench", "allg", "-b", "80", "-n", "2", "-w", "0", "--ranks", "2", "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert set(told) == {"schema_version", "sampling", "processes", "rows"}
    assert (told["schema_version"], told["processes"]) == (2, 1)
    assert told["sampling"] == {"iters": 2, "warmup": 0}
    [row] = told["rows"]
    told_times = {name: row.pop(name) for name in ("median_ns", "p10_ns", "p90_ns")}
    assert row.pop("busbw_bytes_per_s") * 2 == row.pop("algbw_bytes_per_s") == 80 / (told_times["median_ns"] / 1e9)
    assert row == {
        "operation": "all_gather",
        "size_bytes": 80,
        "count": 10,
        "dtype": "float32",
        "op": "sum",
        "root": 0,
        "ranks": 2,
        "in_place": False,
        "wrong": 0,
    }


# -- worlds of a bench: where their ranks are, in this process and in several, and what they find ----------------------


def test_ranks_by_default_are_one_on_each_node():
    two, three = ("--processes", "2"), ("--processes", "3")
    for argv, ranks in (((), 2), (two, 2), (three, 3), ((*two, "--ranks", "4"), 4)):
        assert [[case.ranks for case in world] for world in list_cases(parsed("allr", "-b", "8", *argv))] == [[ranks]]


ARGV = ("allr", "-b", "8", "-e", "64K", "-f", "8192", "-w", "1", "-n", "2", "--json")


def measured(monkeypatch, capsys, *argv):
    """Measure in this process; return the exit code, the options of each world, and the rows."""
    worlds = []

    def run(main, *args, **options):
        worlds.append(options)
        return overlap.run(main, *args, **options)

    monkeypatch.setattr(measuring, "run", run)
    code = measuring.measure_and_print(parsed(*ARGV, *argv))
    return code, worlds, json.loads(capsys.readouterr().out)["rows"]


def test_all_rows_of_a_size_are_of_one_world(monkeypatch, capsys):
    code, worlds, rows = measured(monkeypatch, capsys, "--ranks", "2,4", "--algorithm", "ring")
    assert worlds == [{"ranks": ranks, "algorithm": "ring", "timeout_s": 1200} for ranks in (2, 4)]
    assert [(row["ranks"], row["size_bytes"], row["wrong"]) for row in rows] == [
        (ranks, nbytes, 0) for ranks in (2, 4) for nbytes in (8, 65536)
    ]
    assert code == 0


def test_wrong_elements_of_all_ranks_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(
        Case, "make_issue_function", lambda case, rank, x, out: lambda: (rank.all_reduce(x, "max", out),)
    )
    code, _, rows = measured(monkeypatch, capsys)
    assert [row["wrong"] for row in rows] == [4, 1 << 15]
    assert code == 1


def test_a_row_is_that_of_the_slowest_rank():
    [[case]] = list_cases(parsed("allr", "-b", "8", "-n", "2"))
    row = measuring.summarize_case(case, measuring.Sampling(iters=2), [[0, 1000, 2000], [1, 500, 3000]])
    assert (row.times, row.wrong) == (measuring.Times.of_samples([20, 60]), 1)


@pytest.mark.slow
def test_two_processes_with_two_ranks_each_are_measured_and_right(tmp_path):
    options = ("-b", "8", "-e", "64K", "-f", "8192", "-n", "2", "-w", "0", "--processes", "2", "--ranks", "4,2")
    ended = interpreters.run("-m", "overlap", "bench", "allr", *options, "--json", cwd=tmp_path, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    told = json.loads(ended.stdout)
    assert told["processes"] == 2
    assert [(row["size_bytes"], row["ranks"], row["wrong"]) for row in told["rows"]] == [
        (nbytes, ranks, 0) for ranks in (4, 2) for nbytes in (8, 65536)
    ]
    assert all(row["median_ns"] > 0 for row in told["rows"])
