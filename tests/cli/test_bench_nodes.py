"""Worlds of several processes: where their ranks are, what they are told and tell, and that nothing of them is left."""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import overlap
from overlap import OverlapError
from overlap.cli import bench, children
from overlap.cli.bench import measuring, operations
from overlap.cli.bench.cases import Assignment, Case
from overlap.cli.bench.measuring import ProcessLayout, Result
from overlap.cli.bench.operations import find
from overlap.cli.bench.options import cases, layout
from overlap.cli.bench.sampling import Sampling, Times
from overlap.cli.children import Child, environment, read_json_lines

ROOT = str(Path(__file__).parents[2])
LIMIT_S = 60  # reached only by a process that outlives its end
F32 = np.dtype(np.float32)


def parsed(*argv):
    parser = argparse.ArgumentParser()
    bench.fill(parser)
    return parser.parse_args(argv)


# -- where the ranks are -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "expected", "text"),
    [
        ((), ProcessLayout(), "ranks in one process"),
        (("--processes", "1"), ProcessLayout(), "ranks in one process"),
        (
            ("--processes", "2"),
            ProcessLayout(processes=2),
            "ranks in 2 processes of this host (local x2) joined by shared memory",
        ),
        (
            ("--processes", "2", "--transport", "efa"),
            ProcessLayout(processes=2, transport="efa"),
            "ranks in 2 processes of this host (local x2) joined by Unix sockets",
        ),
        (
            ("--processes", "3", "--tcp", "--rails", "4", "--no-peer-direct"),
            ProcessLayout(processes=3, tcp=True, rails="4", peer_direct=False),
            "ranks in 3 processes of this host (local x3) joined by TCP over 4 connections, through a bounce buffer",
        ),
        (
            ("--processes", "2", "--tcp", "--rails", "eth0,eth1", "--peer-direct"),
            ProcessLayout(processes=2, tcp=True, rails="eth0,eth1"),
            "ranks in 2 processes of this host (local x2) joined by TCP over eth0,eth1",
        ),
        (
            ("--processes", "2", "--checksums"),
            ProcessLayout(processes=2, checksums=True),
            "ranks in 2 processes of this host (local x2) joined by Unix sockets, with checksums of payloads",
        ),
        (
            ("--processes", "2", "--no-checksums", "--no-peer-direct"),
            ProcessLayout(processes=2, checksums=False, peer_direct=False),
            "ranks in 2 processes of this host (local x2) joined by Unix sockets, without checksums of payloads, "
            "through a bounce buffer",
        ),
    ],
)
def test_layouts(argv, expected, text):
    assert layout(parsed("allr", *argv)) == expected
    assert expected.describe() == text


def test_a_transport_of_another_package_is_named():
    told = ProcessLayout(processes=2, transport="pigeon").describe()
    assert told == "ranks in 2 processes of this host (local x2) joined by pigeon"


def test_ranks_by_default_are_one_on_each_node():
    for argv, ranks in (
        ((), 2),
        (("--processes", "2"), 2),
        (("--processes", "3"), 3),
        (("--processes", "2", "--ranks", "4"), 4),
    ):
        assert [[case.ranks for case in world] for world in cases(parsed("allr", "-b", "8", *argv))] == [[ranks]]


def test_something_has_to_be_measured(overlap):
    assert overlap("bench")[::2] == (
        2,
        "overlap: OP: name the operation to measure (`overlap bench --help` explains)\n",
    )


def test_what_overlap_run_is_told():
    layout = ProcessLayout(processes=2, tcp=True, rails="4", peer_direct=False, transport="efa")
    assert layout.options(6, algorithm="ring") == [
        *("--processes", "2", "--ranks-per-process", "3", "--cluster", "local x2", "--timeout", "600"),
        *("--transport", "efa"),
        *("--no-unix", "--no-peer-direct", "--rails", "4", "--algorithm", "ring"),
    ]
    for checksums, option in ((True, "--checksums"), (False, "--no-checksums")):
        assert ProcessLayout(processes=2, checksums=checksums).options(2)[-1] == option
    assert ProcessLayout(processes=2).options(2, rows=3)[6:8] == ["--timeout", "1800"]
    assert ProcessLayout(processes=2).options(2)[8:] == ["--transport", "auto", "--unix", "--peer-direct"]


# -- what they tell ----------------------------------------------------------------------------------------------


@pytest.fixture
def child():
    """Return a function that starts a Python program as a child."""
    return lambda program, *argv: Child([sys.executable, "-c", program, *argv], environment())


CASES = [Case(operation=find("allr"), ranks=2, count=count, dtype=F32) for count in (2, 1 << 14)]


def test_rows_are_those_of_the_slowest_rank_with_all_wrong_elements(child, monkeypatch):
    asked = []
    rows = [{"told": [[0, 1000, 2000], [1, 500, 3000]]}, {"told": [[2, 70, 80], [0, 90, 60]]}]

    def start(options, program):
        asked.append((options, program))
        return child(f"import json\nfor row in {rows}: print(json.dumps(row))")

    monkeypatch.setattr(measuring, "start", start)
    how, layout = Sampling(iters=2, warmup=0), ProcessLayout(processes=2)
    assert list(measuring.measure_cases(CASES, how, layout)) == [
        Result(case=CASES[0], times=Times.of([20, 60]), wrong=1),
        Result(case=CASES[1], times=Times.of([90, 80]), wrong=2),
    ]
    assert [row.wrong for row in measuring.measure_cases(CASES, how, layout, check=False, algorithm="ring")] == [
        None,
        None,
    ]
    first, second = (Assignment.from_json(program[1]).check for _, program in asked)
    assert (first, second) == (True, False)
    assert [options[-2:] for options, _ in asked] == [["--unix", "--peer-direct"], ["--algorithm", "ring"]]


def test_in_this_process_rows_are_measured_as_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(measuring, "measure", lambda *args, **options: asked.append((args, options)))
    how = Sampling(iters=3, warmup=0)
    assert len(list(measuring.measure_cases(CASES, how, ProcessLayout(), check=False, algorithm="ring"))) == 2
    assert asked == [((case, how), {"check": False, "algorithm": "ring"}) for case in CASES]


@pytest.mark.parametrize(("check", "wrong"), [(True, [2, 1 << 14]), (False, [0, 0])])
def test_a_process_looks_at_its_results_if_it_is_told_to(monkeypatch, capsys, check, wrong):
    honest = find("all_reduce")
    lying = replace(honest, issue=lambda rank, x, out, op, root: (rank.all_reduce(x, "max", out),))
    monkeypatch.setitem(operations.NAMES, "all_reduce", lying)
    measuring.main(Assignment(cases=CASES, sampling=Sampling(iters=2, warmup=1), check=check).to_json())
    rows = [json.loads(line)["told"] for line in capsys.readouterr().out.splitlines()]
    assert [[len(samples) for _, *samples in told] for told in rows] == [[2, 2], [2, 2]]
    assert [[wrong for wrong, *_ in told] for told in rows] == [[each, each] for each in wrong]


def test_all_rows_are_of_one_world(monkeypatch, capsys):
    worlds = []
    monkeypatch.setattr(measuring, "run", lambda main, *args: worlds.append(overlap.run(main, *args, ranks=2)))
    measuring.main(Assignment(cases=CASES, sampling=Sampling(iters=2, warmup=1)).to_json())
    assert len(worlds) == 1
    assert len(capsys.readouterr().out.splitlines()) == len(CASES)


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
    assert talker.returncode == -signal.SIGTERM


def test_the_deaf_are_killed(child, monkeypatch):
    monkeypatch.setattr(children, "GRACE_S", 0.01)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('{}', flush=True)\nsignal.pause()"
    talker = child(deaf)
    heard = read_json_lines([talker])
    assert next(heard) == {}
    heard.close()
    assert talker.returncode == -signal.SIGKILL


def test_what_is_measured_does_not_outlive_a_bench_that_is_killed():
    program = """
import signal, sys
from overlap.cli.children import Child, environment
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
    options = ("--processes", "2", "--no-prefix", "--unannounced")
    assert command == ["nice", sys.executable, "-m", "overlap", "run", *options, "-m", "a.module", "text"]
    assert [name for name in environ if name.startswith("OVERLAP_")] == ["OVERLAP_JOB"]
    assert not {"RANK", "WORLD_SIZE"} & set(environ)


@pytest.mark.slow
def test_two_processes_with_two_ranks_each_are_measured_and_right(overlap):
    code, out, err = overlap(
        *("bench", "allr", "-b", "8", "-e", "64K", "-f", "8192", "-n", "2", "-w", "0", "--json"),
        *("--processes", "2", "--ranks", "4", "--tcp", "--rails", "2"),
    )
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["layout"] == {
        "processes": 2,
        "tcp": True,
        "rails": "2",
        "peer_direct": True,
        "checksums": None,
        "transport": "auto",
    }
    assert [(row["size_bytes"], row["ranks"], row["wrong"]) for row in told["rows"]] == [(8, 4, 0), (65536, 4, 0)]
    assert all(row["median_ns"] > 0 for row in told["rows"])
