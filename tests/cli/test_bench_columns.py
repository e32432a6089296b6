import itertools
import json
import platform
from dataclasses import replace

import numpy as np
import pytest

from overlap.cli.bench import measuring, operations, report
from overlap.cli.bench.cases import Case
from overlap.cli.bench.measuring import ProcessLayout, Result
from overlap.cli.bench.operations import find
from overlap.cli.bench.sampling import Sampling, Times

F32 = np.dtype(np.float32)


def clock(*steps_ns):
    """A clock that goes on by the given steps, over and over, each time somebody looks."""
    return itertools.accumulate(itertools.cycle(steps_ns)).__next__


def times(median_us, p10_us=1.0, p90_us=2.0):
    return Times(median_ns=median_us * 1e3, p10_ns=p10_us * 1e3, p90_ns=p90_us * 1e3)


def measured(name="all_reduce", count=1 << 18, ranks=4, median_us=1000.0, wrong=0, **more):
    case = Case(operation=find(name), ranks=ranks, count=count, dtype=F32, **more)
    return Result(case=case, times=times(median_us, 900.5, 1100.25), wrong=wrong)


def test_rows_and_columns():
    rows = [
        measured(),
        measured("redsct", count=1 << 16, median_us=99.994),
        measured("broadcast", count=2, root=3, median_us=31.5, wrong=None),
        measured("barrier", count=0, median_us=12345.6, wrong=7),
    ]
    assert (
        "\n".join([report.header(), *map(report.row, rows)])
        == """\
#      size      count ranks     time      p10      p90    algbw    busbw wrong
#       (B)                      (us)     (us)     (us)   (GB/s)   (GB/s)
    1048576     262144     4   1000.0    900.5   1100.2    1.049    1.573     0
    1048576      65536     4    99.99    900.5   1100.2   10.486    7.865     0
          8          2     4    31.50    900.5   1100.2    0.000    0.000   N/A
          0          0     4    12346    900.5   1100.2        -        -     7"""
    )


def test_the_title_says_how_a_time_is_taken_and_what_busbw_is():
    assert (
        report.title(measured(in_place=True).case, Sampling(iters=7, warmup=2), ProcessLayout())
        == """\
# all_reduce of float32, sum, in place, ranks in one process
# time: median, 10th and 90th percentile of 7 samples after 2 of warm-up;
# a sample is the slowest rank's time from a common barrier to its result; up to
# 32 KiB it is 50 operations back to back, divided by 50
# GB is 10^9 bytes; busbw = algbw * 2(n-1)/n with n ranks"""
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reduce", "# reduce of float32, sum, root 3, out of place"),
        ("all_gather", "# all_gather of float32, out of place"),
        ("barrier", "# barrier, out of place"),
    ],
)
def test_the_title_names_what_all_rows_have_in_common(name, text):
    told = report.title(measured(name, root=3).case, Sampling(), ProcessLayout())
    assert told.startswith(f"{text}, ranks in one process\n")


def test_everything_said_fits_in_80_columns():
    layout = ProcessLayout(processes=2, tcp=True, rails="4", peer_direct=False, checksums=True)
    told = report.title(measured("reduce_scatter").case, Sampling(), layout).splitlines()
    assert told[:3] == [
        "# reduce_scatter of float32, sum, out of place, ranks in 2 processes of this",
        "# host (local x2) joined by TCP over 4 connections, with checksums of payloads,",
        "# through a bounce buffer",
    ]
    assert max(map(len, told)) <= 80


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ((0, 0), "# every result checked: none wrong"),
        ((3, 4), "# 7 wrong elements: FAILED"),
        ((0, None), "# results not checked (-c 0)"),
    ],
)
def test_the_last_line_judges_the_results(wrong, text):
    assert report.summary([measured(wrong=one) for one in wrong]) == text


# -- measuring ---------------------------------------------------------------------------------------------------


def test_a_time_is_from_the_barrier_to_the_result_without_warm_up():
    """One rank looks at the clock twice in each sample: here warm-up takes 9 ms, the samples 2 and 4 ms."""
    case = Case(operation=find("allr"), ranks=1, count=1 << 14, dtype=F32)
    told = measuring.measure(
        case, Sampling(iters=2, warmup=1), clock_ns=clock(0, 9_000_000, 5, 2_000_000, 5, 4_000_000)
    )
    assert told == Result(case=case, times=Times.of([2e6, 4e6]), wrong=0)


def test_a_batch_is_divided():
    case = Case(operation=find("allr"), ranks=1, count=2, dtype=F32)
    told = measuring.measure(case, Sampling(iters=1, warmup=0), check=False, clock_ns=clock(0, 50_000))
    assert told == Result(case=case, times=Times.of([1e3]), wrong=None)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("operation", operations.OPERATIONS, ids=lambda operation: operation.name)
def test_every_operation_runs_and_is_right(operation, in_place):
    for ranks in (2, 3):
        case = Case(
            operation=operation, ranks=ranks, count=9000, dtype=F32, in_place=in_place and operation.in_place, root=1
        )
        assert measuring.measure(case, Sampling(iters=1, warmup=1)).wrong == 0


@pytest.mark.parametrize("dtype", ["int8", "bool", "bfloat16", "float8_e4m3fn", "complex64"])
@pytest.mark.parametrize("op", ["max", "prod", "mean"])
def test_every_kind_of_dtype_is_right(dtype, op):
    if (dtype, op) == ("bool", "mean"):
        op = "min"
    case = Case(operation=find("allr"), ranks=3, count=100, dtype=operations.dtype_named(dtype), op=op)
    assert measuring.measure(case, Sampling(iters=1, warmup=0)).wrong == 0


@pytest.fixture
def liar(monkeypatch):
    """An all-reduce that takes the maximum, whatever it was asked for."""
    honest = find("all_reduce")
    lying = replace(honest, issue=lambda rank, x, out, op, root: (rank.all_reduce(x, "max", out),))
    monkeypatch.setitem(operations.NAMES, "all_reduce", lying)


def test_wrong_results_are_counted_on_all_ranks_and_fail(overlap, liar):
    code, out, err = overlap("bench", "all_reduce", "-b", "400", "-n", "1", "-w", "0")
    assert (code, err) == (1, "")
    assert out.splitlines()[-2].split()[-1] == "200"  # 1 + 1 and more on both ranks: no maximum is a sum
    assert out.splitlines()[-1] == "# 200 wrong elements: FAILED"


def test_nobody_looks_without_a_check(overlap, liar):
    code, out, _ = overlap("bench", "all_reduce", "-b", "400", "-n", "1", "-w", "0", "-c", "0")
    assert code == 0
    assert out.splitlines()[-2].split()[-1] == "N/A"


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
    assert set(told) == {"schema_version", "sampling", "machine", "layout", "rows"}
    assert told["schema_version"] == 1
    assert told["sampling"] == {"iters": 2, "warmup": 0, "batch": 50, "batched_bytes": 32768, "seed": 1}
    assert set(told["machine"]) == {"cpu_count", "system", "processor", "python", "numpy", "trio"}
    assert told["machine"]["python"] == platform.python_version()
    [row] = told["rows"]
    told_times = {name: row.pop(name) for name in ("median_ns", "p10_ns", "p90_ns")}
    assert row.pop("busbw_bytes_per_s") * 2 == row.pop("algbw_bytes_per_s") == 80 / (told_times["median_ns"] / 1e9)
    assert row == {
        "operation": "all_gather",
        "size_bytes": 80,
        "count": 10,
        "dtype": "float32",
        "op": None,
        "root": None,
        "ranks": 2,
        "in_place": False,
        "wrong": 0,
    }


def test_json_in_a_file_comes_with_the_table(overlap, tmp_path):
    code, out, _ = overlap("bench", "allr", "-b", "8", "-n", "1", "--json-file", "b.json")
    assert code == 0
    assert out.splitlines()[-1] == "# every result checked: none wrong"
    assert json.loads((tmp_path / "b.json").read_text())["rows"][0]["op"] == "sum"


def test_json_that_could_not_be_written_is_refused_before_measuring(overlap, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "measure_cases", None)
    assert overlap("bench", "allr", "--json-file", "no/b.json") == (
        2,
        "",
        f"overlap: --json-file: cannot write into {tmp_path / 'no'}; name a folder of yours\n",
    )
