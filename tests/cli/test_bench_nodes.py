"""Worlds of several processes: where their ranks are, what they are told and tell, and that nothing of them is left."""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import overlap
from overlap import OverlapError
from overlap.cli import bench, children
from overlap.cli.bench import measuring
from overlap.cli.bench.cases import NAMES, Case, cases
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


def test_ranks_by_default_are_one_on_each_node():
    for argv, ranks in (
        ((), 2),
        (("--processes", "2"), 2),
        (("--processes", "3"), 3),
        (("--processes", "2", "--ranks", "4"), 4),
    ):
        assert [[case.ranks for case in world] for world in cases(parsed("allr", "-b", "8", *argv))] == [[ranks]]


def test_what_overlap_run_is_told():
    assert measuring.run_options(2, 6, algorithm="ring") == [
        *("--processes", "2", "--ranks-per-process", "3", "--cluster", "local x2", "--timeout", "600"),
        *("--algorithm", "ring"),
    ]
    assert measuring.run_options(2, 2, rows=3)[6:] == ["--timeout", "1800"]


# -- what they tell ----------------------------------------------------------------------------------------------


@pytest.fixture
def child():
    """Return a function that starts a Python program as a child."""
    return lambda program, *argv: Child([sys.executable, "-c", program, *argv], environment())


ARGV = ("allr", "-b", "8", "-e", "64K", "-f", "8192", "-w", "1", "-n", "2")
CASES = [Case(operation=NAMES["allr"], ranks=2, count=count, dtype=F32) for count in (2, 1 << 14)]


def test_rows_are_those_of_the_slowest_rank_with_all_wrong_elements(child, monkeypatch):
    asked = []
    rows = [{"told": [[0, 1000, 2000], [1, 500, 3000]]}, {"told": [[2, 70, 80], [0, 90, 60]]}]

    def start(options, program):
        asked.append((options, program))
        return child(f"import json\nfor row in {rows}: print(json.dumps(row))")

    monkeypatch.setattr(measuring, "start", start)
    args = parsed(*ARGV, "--processes", "2", "--ranks", "2,4", "--algorithm", "ring")
    expected = [(Times.of([20, 60]), 1), (Times.of([90, 80]), 2)] * 2
    measured = list(measuring.measure_cases(args, Sampling(iters=2, warmup=1)))
    assert [(row.times, row.wrong) for row in measured] == expected
    assert [row.case for row in measured[:2]] == CASES
    assert [options[-2:] for options, _ in asked] == [["--algorithm", "ring"]] * 2
    assert [json.loads(program[1])["ranks"] for _, program in asked] == [[2], [4]]


def test_in_this_process_rows_are_measured_as_asked(monkeypatch):
    asked, how = [], Sampling(iters=3, warmup=0)
    monkeypatch.setattr(measuring, "measure", lambda *args, **options: asked.append((args, options)))
    assert len(list(measuring.measure_cases(parsed(*ARGV, "--algorithm", "ring"), how))) == 2
    assert asked == [((case, how), {"algorithm": "ring"}) for case in CASES]


def told_by_a_process(monkeypatch, capsys):
    """Let one process of two ranks measure rows; return its number of worlds, and its rows."""
    worlds = []
    monkeypatch.setattr(measuring, "run", lambda main, *args: worlds.append(overlap.run(main, *args, ranks=2)))
    measuring.main(json.dumps(vars(parsed(*ARGV))))
    return len(worlds), [json.loads(line)["told"] for line in capsys.readouterr().out.splitlines()]


def test_a_process_looks_at_its_results(monkeypatch, capsys):
    monkeypatch.setattr(Case, "issuer", lambda case, rank, x, out: lambda: (rank.all_reduce(x, "max", out),))
    _, rows = told_by_a_process(monkeypatch, capsys)
    assert [[len(samples) for _, *samples in told] for told in rows] == [[2, 2], [2, 2]]
    assert [[wrong for wrong, *_ in told] for told in rows] == [[2, 2], [1 << 14, 1 << 14]]


def test_all_rows_are_of_one_world(monkeypatch, capsys):
    worlds, rows = told_by_a_process(monkeypatch, capsys)
    assert (worlds, len(rows)) == (1, len(CASES))


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
    options = ("--processes", "2", "--no-prefix")
    assert command == ["nice", sys.executable, "-m", "overlap", "run", *options, "-m", "a.module", "text"]
    assert [name for name in environ if name.startswith("OVERLAP_")] == ["OVERLAP_JOB"]
    assert not {"RANK", "WORLD_SIZE"} & set(environ)


@pytest.mark.slow
def test_two_processes_with_two_ranks_each_are_measured_and_right(overlap):
    code, out, err = overlap(
        *("bench", "allr", "-b", "8", "-e", "64K", "-f", "8192", "-n", "2", "-w", "0", "--json"),
        *("--processes", "2", "--ranks", "4"),
    )
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["processes"] == 2
    assert [(row["size_bytes"], row["ranks"], row["wrong"]) for row in told["rows"]] == [(8, 4, 0), (65536, 4, 0)]
    assert all(row["median_ns"] > 0 for row in told["rows"])
