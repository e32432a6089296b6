import itertools
import json
import platform
from dataclasses import replace

import numpy as np
import pytest

from overlap import OverlapError
from overlap.cli.bench import aims, costs, measure, operations, schedules, session, table
from overlap.cli.bench.layout import Layout
from overlap.cli.bench.measure import Measurement
from overlap.cli.bench.operations import Case, find
from overlap.cli.bench.peers import PeerResult
from overlap.cli.bench.sampling import Sampling, Times

F32 = np.dtype(np.float32)


def clock(*steps_ns):
    """A clock that goes on by the given steps, over and over, each time somebody looks."""
    return itertools.accumulate(itertools.cycle(steps_ns)).__next__


def times(median_us, p10_us=1.0, p90_us=2.0):
    return Times(median_ns=median_us * 1e3, p10_ns=p10_us * 1e3, p90_ns=p90_us * 1e3)


def measured(name="all_reduce", count=1 << 18, ranks=4, median_us=1000.0, wrong=0, **more):
    case = Case(operation=find(name), ranks=ranks, count=count, dtype=F32, **more)
    return Measurement(case=case, times=times(median_us, 900.5, 1100.25), wrong=wrong)


def test_rows_and_columns():
    rows = [
        measured(),
        measured("redsct", count=1 << 16, median_us=99.994),
        measured("broadcast", count=2, root=3, median_us=31.5, wrong=None),
        measured("barrier", count=0, median_us=12345.6, wrong=7),
    ]
    assert (
        "\n".join([table.header(), *map(table.row, rows)])
        == """\
      size(B)      count      type  redop  root  ranks   time(us)      p10      p90  algbw(GB/s)  busbw(GB/s)  wrong
      1048576     262144   float32    sum    -1      4     1000.0    900.5   1100.2        1.049        1.573      0
      1048576      65536   float32    sum    -1      4      99.99    900.5   1100.2       10.486        7.865      0
            8          2   float32   none     3      4      31.50    900.5   1100.2        0.000        0.000    N/A
            0          0   float32   none    -1      4      12346    900.5   1100.2            -            -      7"""
    )


def test_the_title_says_how_a_time_is_taken_and_what_busbw_is():
    assert (
        table.title(measured(in_place=True).case, Sampling(iters=7, warmup=2), Layout())
        == """\
# all_reduce, in place, ranks in one process
# time: median, 10th and 90th percentile of 7 samples after 2 of warm-up;
# a sample is the slowest rank's time from a common barrier to its result; up to
# 32 KiB it is 50 operations back to back, divided by 50
# GB is 10^9 bytes; busbw = algbw * 2(n-1)/n with n ranks"""
    )


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ((0, 0), "# every result checked: none wrong"),
        ((3, 4), "# 7 wrong elements: FAILED"),
        ((0, None), "# results not checked (-c 0)"),
    ],
)
def test_the_last_line_judges_the_results(wrong, text):
    assert table.summary([measured(wrong=one) for one in wrong]) == text


def test_peers_beside_ours():
    ours = [measured(count=2, median_us=20.0), measured(median_us=500.0)]
    gloo = PeerResult(name="gloo", version="gloo of torch 2", times=(times(300.0), times(2500.0)), wrong=(0, 0))
    mpi = PeerResult(name="mpi", version="MPICH 5", times=(times(5.0), times(500.0)), wrong=(0, 0))
    assert (
        table.versus(ours, [gloo, mpi])
        == """\
# gloo is gloo of torch 2: processes, same sizes, same timing
# mpi is MPICH 5: processes, same sizes, same timing
     size(B)       ranks  overlap(us)    gloo(us)  gloo/overlap     mpi(us)  mpi/overlap
           8           4        20.00       300.0        15.00x        5.00        0.25x
     1048576           4        500.0      2500.0         5.00x       500.0        1.00x"""
    )


def test_lines_of_figures():
    ours = aims.Figure(name="a", text="issue", value=6.5e3, unit="ns", aim=15e3, times=times(6.5, 6.0, 7.0))
    peer = aims.Figure(name="b", text="  as fast as gloo", value=4.5, unit="ratio", aim=5.0, times=times(1.0))
    lines = [aims.line(one) for one in (ours, replace(ours, aim=1e3), replace(ours, aim=None), peer)]
    assert [aims.HEADING, *lines] == [
        "# figure                                                   median  p10 - p90          aim",
        "issue                                                      6.5 us  6 us - 7 us        <= 15 us   met",
        "issue                                                      6.5 us  6 us - 7 us        <= 1 us    missed",
        "issue                                                      6.5 us  6 us - 7 us",
        "  as fast as gloo                                           4.50x                     >= 5x      missed",
    ]
    assert aims.verdict([ours, peer, replace(ours, aim=None)]) == "# 1 of 2 aims met"


# -- measuring ---------------------------------------------------------------------------------------------------


def test_a_time_is_from_the_barrier_to_the_result_without_warm_up():
    """One rank looks at the clock twice in each sample: here warm-up takes 9 ms, the samples 2 and 4 ms."""
    case = Case(operation=find("allr"), ranks=1, count=1 << 14, dtype=F32)
    told = measure.measure(case, Sampling(iters=2, warmup=1), clock_ns=clock(0, 9_000_000, 5, 2_000_000, 5, 4_000_000))
    assert told == Measurement(case=case, times=Times.of([2e6, 4e6]), wrong=0)


def test_a_batch_is_divided():
    case = Case(operation=find("allr"), ranks=1, count=2, dtype=F32)
    told = measure.measure(case, Sampling(iters=1, warmup=0), check=False, clock_ns=clock(0, 50_000))
    assert told == Measurement(case=case, times=Times.of([1e3]), wrong=None)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("operation", operations.OPERATIONS, ids=lambda operation: operation.name)
def test_every_operation_runs_and_is_right(operation, in_place):
    for ranks in (2, 3):
        case = Case(
            operation=operation, ranks=ranks, count=9000, dtype=F32, in_place=in_place and operation.in_place, root=1
        )
        assert measure.measure(case, Sampling(iters=1, warmup=1)).wrong == 0


@pytest.mark.parametrize("dtype", ["int8", "bool", "bfloat16", "float8_e4m3fn", "complex64"])
@pytest.mark.parametrize("op", ["max", "prod", "mean"])
def test_every_kind_of_dtype_is_right(dtype, op):
    if (dtype, op) == ("bool", "mean"):
        op = "min"
    case = Case(operation=find("allr"), ranks=3, count=100, dtype=operations.dtype_named(dtype), op=op)
    assert measure.measure(case, Sampling(iters=1, warmup=0)).wrong == 0


@pytest.fixture
def liar(monkeypatch):
    """An all-reduce that takes the maximum, whatever it was asked for."""
    honest = find("all_reduce")
    lying = replace(honest, issue=lambda rank, case, x, out: (rank.all_reduce(x, "max", out),))
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
    assert [line.split()[5] for line in out.splitlines() if line.startswith(" ")] == ["ranks", "2", "3"]


# -- JSON --------------------------------------------------------------------------------------------------------


def test_json_on_stdout_is_all_there_is(overlap):
    code, out, err = overlap("bench", "allg", "-b", "80", "-n", "2", "-w", "0", "--ranks", "2", "--json", "-")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert list(told) == ["schema_version", "sampling", "machine", "layout", "rows", "peers"]
    assert (told["schema_version"], told["peers"]) == (1, [])
    assert told["sampling"] == {"iters": 2, "warmup": 0, "batch": 50, "batched_bytes": 32768, "seed": 1}
    assert list(told["machine"]) == ["cpu_count", "system", "processor", "python", "numpy", "trio"]
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
    code, out, _ = overlap("bench", "allr", "-b", "8", "-n", "1", "--json", "b.json")
    assert code == 0
    assert out.splitlines()[-1] == "# every result checked: none wrong"
    assert json.loads((tmp_path / "b.json").read_text())["rows"][0]["op"] == "sum"


def test_json_that_could_not_be_written_is_refused_before_measuring(overlap, monkeypatch):
    monkeypatch.setattr(session, "measure_rows", None)
    assert overlap("bench", "allr", "--json", "no/b.json") == (2, "", "overlap: --json: cannot write no/b.json\n")


# -- costs and aims ----------------------------------------------------------------------------------------------


def quick_rows(cases, sampling, layout):
    us = 10.0 if layout.nodes == 1 else 25.0 if layout.tcp else 30.0
    return [Measurement(case=case, times=times(us), wrong=0) for case in cases]


@pytest.fixture
def quick(monkeypatch):
    """Costs that are known, an all-reduce that takes 10 us (more between nodes), and a peer that takes 40 or 60 us."""
    known = {"issue": 6.0, "span": 2.0, "import": 40e3, "startup": 1e3, "run": 2e6}
    known |= {"prove": 199e3, "prove/4096": 4e6, "compile": 51e3, "cost": 9e3, "cost/loads": 101e3, "look_up": 4.0}
    fake = tuple(replace(cost, measure=lambda _, us=known[cost.name]: times(us)) for cost in costs.COSTS)
    monkeypatch.setattr(aims, "COSTS", fake)
    monkeypatch.setattr(session, "COSTS", fake)
    monkeypatch.setattr(aims, "measure_rows", quick_rows)
    answer = PeerResult(name="gloo", version="", times=(times(40.0), times(60.0)), wrong=(0, 0))
    monkeypatch.setattr(aims, "measure_peer", lambda peer, spec: answer)


def test_one_word_may_stand_for_two_costs(overlap, quick):
    assert overlap("bench", "startup") == (
        0,
        """\
# figure                                                   median  p10 - p90          aim
32 ranks up and down                                         1 ms  1 us - 2 us        <= 500 ms  met
overlap run, 4 ranks that do nothing                          2 s  1 us - 2 us        <= 1 s     missed
# 1 of 2 aims met
""",
        "",
    )


def test_the_largest_proof_is_with_the_schedules_only(overlap, quick):
    """It takes over 2 GB, which nobody expects who wants to see all speeds."""
    assert overlap("bench", "schedule") == (
        0,
        """\
# figure                                                   median  p10 - p90          aim
prove a ring all-reduce, 1024 ranks                        199 ms  1 us - 2 us        <= 200 ms  met
generate, prove, project, 64 ranks                          51 ms  1 us - 2 us        <= 50 ms   missed
cost a ring, 1024 ranks, no contention                       9 ms  1 us - 2 us        <= 20 ms   met
cost a ring, 1024 ranks, link loads                        101 ms  1 us - 2 us        <= 100 ms  missed
look up a cached plan                                        4 us  1 us - 2 us        <= 5 us    met
prove a ring all-reduce, 4096 ranks                           4 s  1 us - 2 us        <= 3 s     missed
# 3 of 6 aims met
""",
        "",
    )


def test_everything_with_its_aims(overlap, quick, tmp_path):
    assert overlap("bench", "all", "--vs", "gloo", "--json", "all.json") == (
        0,
        """\
# figure                                                   median  p10 - p90          aim
issue an all_reduce                                          6 us  1 us - 2 us        <= 15 us   met
record a span                                                2 us  1 us - 2 us        <= 1 us    missed
import overlap, beyond trio and numpy                       40 ms  1 us - 2 us        <= 50 ms   met
32 ranks up and down                                         1 ms  1 us - 2 us        <= 500 ms  met
overlap run, 4 ranks that do nothing                          2 s  1 us - 2 us        <= 1 s     missed
prove a ring all-reduce, 1024 ranks                        199 ms  1 us - 2 us        <= 200 ms  met
generate, prove, project, 64 ranks                          51 ms  1 us - 2 us        <= 50 ms   missed
cost a ring, 1024 ranks, no contention                       9 ms  1 us - 2 us        <= 20 ms   met
cost a ring, 1024 ranks, link loads                        101 ms  1 us - 2 us        <= 100 ms  missed
look up a cached plan                                        4 us  1 us - 2 us        <= 5 us    met
all_reduce, 8 B, 2 ranks                                    10 us  1 us - 2 us        <= 30 us   met
all_reduce, 8 B, 8 ranks                                    10 us  1 us - 2 us        <= 60 us   met
all_reduce, 1 MiB, 2 ranks                                  10 us  1 us - 2 us
all_reduce, 64 MiB, 2 ranks                                 10 us  1 us - 2 us
  1 MiB, 2 ranks: as fast as gloo (40 us)                   4.00x                     >= 5x      missed
  64 MiB, 2 ranks: as fast as gloo (60 us)                  6.00x                     >= 5x      met
all_reduce, 64 MiB, 4 ranks                                 10 us  1 us - 2 us
  64 MiB, 4 ranks: as fast as gloo (40 us)                  4.00x                     >= 5x      missed
all_reduce, 8 B, 2 nodes x 1, Unix                          30 us  1 us - 2 us
all_reduce, 64 MiB, 2 nodes x 1, Unix                       30 us  1 us - 2 us
  8 B, 2 nodes x 1, Unix: as fast as gloo (40 us)           1.33x                     >= 2x      missed
  64 MiB, 2 nodes x 1, Unix: as fast as gloo (60 us)        2.00x                     >= 1.7x    met
all_reduce, 64 MiB, 2 nodes x 1, TCP                        25 us  1 us - 2 us
  64 MiB, 2 nodes x 1, TCP: as fast as gloo (40 us)         1.60x                     >= 1.2x    met
all_reduce, 64 MiB, 2 nodes x 2, Unix                       30 us  1 us - 2 us
  64 MiB, 2 nodes x 2, Unix: as fast as gloo (40 us)        1.33x                     >= 2x      missed
# 11 of 19 aims met
""",
        "",
    )
    figures = json.loads((tmp_path / "all.json").read_text())["figures"]
    assert [figure["name"] for figure in figures if figure["met"] is False] == [
        "span",
        "run",
        "compile",
        "cost/loads",
        "all_reduce/1048576/2/gloo",
        "all_reduce/67108864/4/gloo",
        "all_reduce/8/2/2_unix/gloo",
        "all_reduce/67108864/4/2_unix/gloo",
    ]


@pytest.fixture
def small(monkeypatch):
    """Schedules of few ranks."""
    for name, ranks in (("RANKS", 64), ("RANKS_ONCE", 5), ("RANKS_COMPILED", 4)):
        monkeypatch.setattr(schedules, name, ranks)


@pytest.mark.parametrize("cost", costs.COSTS, ids=lambda cost: cost.name)
def test_every_cost_can_be_measured(cost, small):
    told = cost.measure(Sampling(iters=1, warmup=0))
    assert 0 < told.p10_ns <= told.median_ns <= told.p90_ns


def test_a_process_that_fails_is_no_time():
    with (
        pytest.raises(OverlapError, match=r"-c raise KeyError\('lost'\) failed: KeyError: 'lost'"),
        costs._python() as python,
    ):
        python("-c", "raise KeyError('lost')")


def test_files_of_the_current_directory_do_not_stand_in_for_modules(tmp_path, monkeypatch):
    (tmp_path / "trio.py").write_text("raise ImportError('not trio')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with costs._python() as python:
        assert python("-c", "import trio, overlap; print(overlap.OPS['sum'])") == "<ufunc 'add'>\n"
