"""Single benches: what they time, and what is made of their rows; programs that they run."""

import importlib.util
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import pytest

import topology
from overlap import OverlapError
from overlap.cli.bench.cases import NAMES, Case
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.sampling import Sampling, Times
from overlap.collectives.slicing import slice_long_messages
from overlap.cost.select import plan
from tests.benchmarks import children, results, schedules
from tests.benchmarks.children import Child, environment, read_json_lines
from tests.benchmarks.versus import turns
from tests.benchmarks.versus.contenders import Contender
from tests.benchmarks.versus.layout import ProcessLayout
from tests.benchmarks.versus.turns import measure_in_turn

from . import algorithms
from .algorithms import distinct
from .figures import line
from .routes import LIMITS, Count, routes_of_one_process, routes_of_processes
from .sockets import Row, summary
from .two_hosts.planned import MACHINE, OPERATIONS, SIZES_BYTES

# -- single benches: what they time, and what is made of their rows ----------------------------------------------------

# -- the bench of algorithms: what is made of its rows -----------------------------------------------------------------


def test_the_largest_regret_is_told_and_the_mean() -> None:
    times = Times(median_ns=100.0, p10_ns=100.0, p90_ns=100.0)
    rows = [(1.0, "gather 16 KiB", times), (4.0, "reduce 1 MiB", times)]
    assert [line(figure) for figure in algorithms.summary("algorithms/2", "2 processes, Unix", rows)] == [
        "2 processes, Unix: fastest over chosen, reduce 1 MiB        0.25x                     >= 0.909x  missed",
        "2 processes, Unix: fastest over chosen, mean of 2           0.50x                     >= 0.909x  missed",
    ]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_between_two_hosts_every_algorithm_can_be_cut_in_slices_and_the_chosen_one_is_measured(operation: str) -> None:
    size = SIZES_BYTES[-1]
    for ranks in (2, 4):
        cluster = topology.cluster(str(MACHINE), nodes=2, ranks=ranks)
        measured = distinct(operation, size, cluster)
        assert plan(operation, size, cluster).algorithm in measured
        for algorithm in measured:
            slice_long_messages(plan(operation, size, cluster, algorithm=algorithm).schedule(), size)


# -- the loops that make results: what each keeps alive, and that they are compared in turn and checked ----------------


class Counting:
    """A rank that makes results, and counts those that are still alive at each operation."""

    def __init__(self):
        self.made, self.alive, self.outs = [], [], []

    async def all_reduce(self, x, out=None):
        self.alive.append(sum(ref() is not None for ref in self.made))
        self.outs.append(out)
        made = x.copy() if out is None else out
        self.made.append(weakref.ref(made))
        return made


@pytest.mark.parametrize(("kind", "alive"), [("dropped", [0] * 5), ("kept", [0, 1, 2, 2, 2])])
def test_how_many_results_a_loop_keeps(kind, alive):
    counting = Counting()
    steps = results.KINDS[kind](counting, np.ones(2), np.zeros(2), 5)
    with pytest.raises(StopIteration):  # nothing in it waits
        steps.send(None)
    assert counting.alive == alive
    assert counting.outs == [None] * 5


def test_given_results_are_all_one_array():
    counting, out = Counting(), np.zeros(2)
    with pytest.raises(StopIteration):
        results.KINDS["given"](counting, np.ones(2), out, 3).send(None)
    assert [one is out for one in counting.outs] == [True] * 3


@pytest.mark.parametrize(("total", "wrong"), [(3, 0), (4, 2 * 2 * (1 << 15))])
def test_every_size_is_compared_and_checked(monkeypatch, total, wrong):
    monkeypatch.setattr(results, "SIZES_BYTES", (128 << 10,))
    monkeypatch.setattr(results, "TOTAL", total)
    given, *made = results.figures(Sampling(iters=2, warmup=1))
    assert (given.name, given.text, given.aim) == ("results/131072", "all_reduce, 128 KiB, 2 ranks, out=", None)
    assert given.wrong == wrong
    assert [figure.name for figure in made] == ["results/131072/dropped", "results/131072/kept"]
    assert [(figure.unit, figure.aim) for figure in made] == [("ratio", 1 / 1.3)] * 2


# -- warm routes have no more files and calls than `routes.LIMITS` allows ----------------------------------------------


def check(counts: dict[str, Count], names: set[str]) -> None:
    assert set(counts) == names
    longer = {
        route: count
        for route, count in counts.items()
        if count.files > LIMITS[route].files or count.calls > LIMITS[route].calls
    }
    assert not longer, f"longer than their limits: {longer}"


def test_routes_of_one_process() -> None:
    elsewhere = {route for route in LIMITS if "between" in route or "torch" in route}
    check(routes_of_one_process(), set(LIMITS) - elsewhere)


def test_routes_between_processes(tmp_path: Path) -> None:
    check(routes_of_processes(tmp_path), {route for route in LIMITS if "between" in route})


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_routes_of_torch(tmp_path: Path) -> None:
    check(routes_of_processes(tmp_path, torch=True), {route for route in LIMITS if "torch" in route})


# -- what of schedules is timed, and how often: with a clock that steps as the fakes say -------------------------------

SAMPLING = Sampling(iters=7, warmup=2)


@pytest.fixture
def calls():
    """What was done, in order."""
    return []


@pytest.fixture
def faked(calls, monkeypatch):
    """The clock goes on by 1 ms for generating, 10 for proving, 100 for projecting, for each rank."""
    now_ns = 0

    def spend(name, ranks, ms):
        nonlocal now_ns
        calls.append((name, ranks))
        now_ns += ranks * ms * 1_000_000
        return ranks

    monkeypatch.setattr(schedules, "perf_counter_ns", lambda: now_ns)
    monkeypatch.setattr(schedules, "generate", lambda *asked: spend("/".join(asked[:2]), asked[2], 1))
    monkeypatch.setattr(schedules, "verify", lambda ranks: spend("verify", ranks, 10))
    monkeypatch.setattr(schedules, "project_all", lambda ranks: spend("project", ranks, 100))


def same(ns):
    return Times(median_ns=ns, p10_ns=ns, p90_ns=ns)


def test_a_proof_is_timed_without_what_it_proves(faked, calls):
    assert schedules.measure_proof(SAMPLING) == same(1024 * 10e6)
    assert calls == [("all_reduce/ring", 1024), *[("verify", 1024)] * 5]


def test_the_largest_proof_is_done_once_whatever_was_asked_for(faked, calls):
    assert schedules.measure_proof_once(SAMPLING) == same(4096 * 10e6)
    assert calls == [("all_reduce/ring", 4096), ("verify", 4096)]


def test_programs_are_made_from_nothing_in_each_sample(faked, calls):
    assert schedules.measure_compiling(SAMPLING) == same(64 * 111e6)
    assert calls == [("all_reduce/ring", 64), ("verify", 64), ("project", 64)] * 9


@pytest.mark.parametrize(
    ("measure", "expected_ns"), [(schedules.measure_costing, 2**23), (schedules.measure_costing_loads, 2**24)]
)
def test_costing_is_in_nanoseconds_without_and_with_loads(monkeypatch, calls, measure, expected_ns):
    monkeypatch.setattr(schedules, "ring_costing_s", lambda n: calls.append(n) or (2**23 / 1e9, 2**24 / 1e9))
    assert measure(SAMPLING) == same(expected_ns)
    assert calls == [1024] * 5


def test_a_look_up_is_of_what_has_been_compiled(monkeypatch, calls):
    """A first look-up costs a second, each later one 3 us; every sample is a batch of them."""
    now_ns = 0

    class Compiler:
        def __init__(self, cluster, algorithm):
            calls.append((cluster.name, cluster.world_size, algorithm))
            self.known = set()

        def compile(self, call, members, position):
            nonlocal now_ns
            key = (call, members, position)
            now_ns += 3_000 if key in self.known else 1_000_000_000
            self.known.add(key)
            calls.append((str(call), len(members)))

    monkeypatch.setattr(schedules, "Compiler", Compiler)
    monkeypatch.setattr(schedules, "perf_counter_ns", lambda: now_ns)
    assert schedules.measure_look_up(Sampling(iters=2, warmup=0)) == same(3e3)
    assert calls[0] == ("trn2.48xlarge", 64, None)
    assert calls[1:] == [("all_reduce(float32 (1048576,), op='sum')", 64)] * 2001


# -- the sweep over sockets: what is made of its rows, and that processes take turns with them -------------------------

CASES = [
    Case(operation=NAMES["all_reduce"], ranks=2, count=count, dtype=np.dtype(np.float32), in_place=True)
    for count in (4096, 16384)
]

# A rank of a library that measures nothing, and fails if it has no turn.
PROGRAM = """
import json, sys
from tests.benchmarks.versus.assignment import AssignmentInTurn
asked = AssignmentInTurn.from_json(sys.argv[1])
rows = [{"wrong": 0, "samples_ns": [[1000 * case.count] * 2] * 2} for case in asked.in_turn()]
assert len(rows) == len(asked.cases)
print(json.dumps({"version": "1", "rows": rows}))
"""


def times(median_ns: float) -> Times:
    return Times(median_ns=median_ns, p10_ns=median_ns, p90_ns=median_ns)


def contender(program: str) -> Contender:
    def start(ranks: int, command: Sequence[str], errors: IO[bytes]) -> list[Child]:
        heard = [errors, *[subprocess.DEVNULL] * (ranks - 1)]  # what two say at the same instant may be mixed
        return [Child([sys.executable, "-c", program, command[-1]], environment(), errors=each) for each in heard]

    return Contender(name="fake", module="json", packages="fake", program="x", start=start)


def test_of_a_sweep_the_worst_row_is_told_and_the_mean() -> None:
    ratios = (4.0, 0.5)
    rows = [Row(case=c, ours=times(100.0), theirs=times(100 * r), wrong=0) for c, r in zip(CASES, ratios, strict=True)]
    assert [line(figure) for figure in summary("sockets/2_unix", "2 processes, Unix", rows)] == [
        "2 processes, Unix: worst, all_reduce 64 KiB                 0.50x                     >= 1.3x    missed",
        "2 processes, Unix: best, all_reduce 16 KiB                  4.00x",
        "2 processes, Unix: geometric mean of 2                      1.41x                     >= 1.6x    missed",
    ]


def measured(program: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[object], list[str]]:
    """Return who had turns, what was yielded, and what was remarked."""
    had: list[str] = []
    remarks: list[str] = []

    class Watched(turns.Turns):
        def let(self, name: str) -> None:
            had.append(name)
            super().let(name)

    monkeypatch.setattr(turns, "Turns", Watched)
    how = Sampling(iters=2, warmup=0)
    told = list(measure_in_turn(CASES, how, ProcessLayout(processes=2), [contender(program)], say=remarks.append))
    return had, told, remarks


@pytest.mark.slow
def test_processes_take_turns_with_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    had, (*ours, theirs), remarks = measured(PROGRAM, monkeypatch)
    assert had == ["overlap", "fake"] * 2
    assert [row.wrong for row in ours if isinstance(row, Result)] == [0, 0]
    assert isinstance(theirs, list)
    [result] = theirs
    assert [each.median_ns for each in result.times] == [1000 * 4096 / 50, 1000 * 16384]
    assert remarks == []


@pytest.mark.slow
@pytest.mark.parametrize("before", [("1000 * case.count", "1 / 0"), ("import json", "1 / 0")], ids=["in", "before"])
def test_a_library_that_fails_at_its_turn_or_before_holds_up_nobody(
    before: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    had, (*ours, theirs), remarks = measured(PROGRAM.replace(*before), monkeypatch)
    assert had == ["overlap", "fake"] * 2
    assert len(ours) == 2
    assert theirs == []
    assert remarks == ["fake: failed: ZeroDivisionError: division by zero"]


# -- programs that benchmarks run: what they say is heard at once, and nothing of them is left -------------------------

LIMIT_S = 60  # reached only by a process that outlives its end


@pytest.fixture
def child():
    """Return a function that starts a Python program as a child."""
    return lambda program, *argv: Child([sys.executable, "-c", program, *argv], environment())


def test_a_line_is_heard_before_the_next_is_said(child):
    program = "import sys\nprint('{\"a\": 1}', flush=True)\nopen(sys.argv[1]).read()\nprint('{}')"
    read, write = os.pipe()
    with os.fdopen(write, "w") as go_on:
        talker = Child([sys.executable, "-c", program, f"/proc/{os.getpid()}/fd/{read}"], environment())
        lines = read_json_lines([talker])
        assert next(lines) == {"a": 1}
        go_on.close()
        assert list(lines) == [{}]
    os.close(read)


def test_a_failure_is_an_error_after_what_was_said(child):
    heard = read_json_lines([child("print('{}')"), child("raise SystemExit(3)")])
    assert next(heard) == {}
    with pytest.raises(OverlapError, match="a process that was to be measured ended with exit code 3"):
        next(heard)


def test_who_stops_listening_leaves_no_process(child):
    talker = child("import signal\nprint('{}', flush=True)\nsignal.pause()")
    heard = read_json_lines([talker])
    assert next(heard) == {}
    heard.close()
    assert talker.returncode == -signal.SIGKILL


def test_what_is_measured_does_not_outlive_a_bench_that_is_killed():
    program = """
import signal, sys
from tests.benchmarks.children import Child, environment
child = Child([sys.executable, "-c", "import signal; print(flush=True); signal.pause()"], environment())
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment())
    with parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        waiting = select.poll()
        waiting.register(child, select.POLLIN)
        assert waiting.poll(1000 * LIMIT_S)
    finally:
        os.close(child)


def test_settings_of_the_user_do_not_reach_what_is_measured(monkeypatch):
    started = []
    monkeypatch.setattr(children, "Child", lambda command, environ: started.append((command, environ)))
    for name in ("OVERLAP_RAILS", "OVERLAP_SECRET", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    children.start(["--processes", "2"], ["a.module", "text"], before=["nice"], variables={"OVERLAP_JOB": "b"})
    [(command, environ)] = started
    options = ("--processes", "2", "--no-prefix")
    assert command == ["nice", sys.executable, "-m", "overlap", "run", *options, "-m", "a.module", "text"]
    assert [name for name in environ if name.startswith("OVERLAP_")] == ["OVERLAP_JOB"]
    assert not {"RANK", "WORLD_SIZE"} & set(environ)
