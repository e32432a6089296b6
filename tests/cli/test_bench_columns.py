import itertools
import json

import numpy as np
import pytest

import overlap
from overlap.cli.bench import cases, measuring
from overlap.cli.bench.cases import NAMES, Case
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.sampling import Sampling, Times

F32 = np.dtype(np.float32)


def clock(*steps_ns):
    """A clock that goes on by the given steps, over and over, each time somebody looks."""
    return itertools.accumulate(itertools.cycle(steps_ns)).__next__


def times(median_us, p10_us=1.0, p90_us=2.0):
    return Times(median_ns=median_us * 1e3, p10_ns=p10_us * 1e3, p90_ns=p90_us * 1e3)


def measured(name="all_reduce", count=1 << 18, ranks=4, median_us=1000.0, wrong=0, **more):
    case = Case(operation=NAMES[name], ranks=ranks, count=count, dtype=F32, **more)
    return Result(case=case, times=times(median_us, 900.5, 1100.25), wrong=wrong)


def test_rows_and_columns():
    rows = [
        measured(),
        measured("redsct", count=1 << 16, median_us=99.994),
        measured("broadcast", count=2, root=3, median_us=31.5, wrong=0),
        measured("sendrecv", count=2, median_us=12345.6, wrong=7),
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
        measuring.table_heading(measured(in_place=True).case, Sampling(iters=7, warmup=2), 1)
        == f"""\
# all_reduce of float32, sum, in place, processes: 1
# time: median, 10th and 90th percentile of 7 samples after 2 of warm-up;
# a sample is the slowest rank's time from a common barrier to its result; up to
# 32 KiB it is 50 operations back to back, divided by 50
# GB is 10^9 bytes; busbw = algbw * 2(n-1)/n with n ranks
{measuring.COLUMNS}"""
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reduce", "# reduce of float32, sum, root 3, out of place"),
        ("all_gather", "# all_gather of float32, out of place"),
    ],
)
def test_the_heading_names_what_all_rows_have_in_common(name, text):
    told = measuring.table_heading(measured(name, root=3).case, Sampling(), 2)
    assert told.startswith(f"{text}, processes: 2\n")
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
    assert told == Result(case=case, times=Times.of([2e6, 4e6]), wrong=0)


def test_a_batch_is_divided(monkeypatch):
    case = Case(operation=NAMES["allr"], ranks=1, count=2, dtype=F32)
    monkeypatch.setattr(measuring, "perf_counter_ns", clock(0, 50_000))
    assert measure(case, Sampling(iters=1, warmup=0)) == Result(case=case, times=Times.of([1e3]), wrong=0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("operation", cases.OPERATIONS, ids=lambda operation: operation.name)
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
    case = Case(operation=NAMES["allr"], ranks=3, count=100, dtype=cases.dtype_named(dtype), op=op)
    assert measure(case, Sampling(iters=1, warmup=0)).wrong == 0


@pytest.fixture
def liar(monkeypatch):
    """All-reduces take the maximum, whatever they are asked for."""
    monkeypatch.setattr(Case, "issuer", lambda case, rank, x, out: lambda: (rank.all_reduce(x, "max", out),))


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
