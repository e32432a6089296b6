"""Worlds of several processes: where their ranks are, what they are told and tell, and that nothing of them is left."""

import argparse
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import overlap
from overlap import OverlapError, StallError, UsageError
from overlap.cli import bench, children
from overlap.cli.bench import columns, comparison, measuring, member, operations, session
from overlap.cli.bench.cases import Assignment, Case
from overlap.cli.bench.layout import NodeLayout
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.operations import find
from overlap.cli.bench.options import cases, layouts
from overlap.cli.bench.sampling import Sampling, Times
from overlap.cli.bench.turns import Turns
from overlap.cli.children import Child, environment, hear

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
        ((), NodeLayout(), "ranks in one process"),
        (("--nnodes", "1"), NodeLayout(), "ranks in one process"),
        (
            ("--nnodes", "2"),
            NodeLayout(nodes=2),
            "ranks on 2 nodes (processes of this machine) joined by shared memory",
        ),
        (
            ("--nnodes", "2", "--transport", "efa"),
            NodeLayout(nodes=2, transport="efa"),
            "ranks on 2 nodes (processes of this machine) joined by Unix sockets",
        ),
        (
            ("--nnodes", "3", "--tcp", "--rails", "4", "--peer-direct", "off"),
            NodeLayout(nodes=3, tcp=True, rails="4", peer_direct=False),
            "ranks on 3 nodes (processes of this machine) joined by TCP over 4 connections, through a bounce buffer",
        ),
        (
            ("--nnodes", "2", "--tcp", "--rails", "eth0,eth1", "--peer-direct", "on"),
            NodeLayout(nodes=2, tcp=True, rails="eth0,eth1"),
            "ranks on 2 nodes (processes of this machine) joined by TCP over eth0,eth1",
        ),
        (
            ("--nnodes", "2", "--checksums", "on"),
            NodeLayout(nodes=2, checksums=True),
            "ranks on 2 nodes (processes of this machine) joined by Unix sockets, with checksums of payloads",
        ),
        (
            ("--nnodes", "2", "--checksums", "off", "--peer-direct", "off"),
            NodeLayout(nodes=2, checksums=False, peer_direct=False),
            "ranks on 2 nodes (processes of this machine) joined by Unix sockets, without checksums of payloads, "
            "through a bounce buffer",
        ),
        (
            ("--nnodes", "2", "--transport", "mpi"),
            NodeLayout(nodes=2, transport="mpi"),
            "ranks on 2 nodes (processes of this machine) joined by MPI",
        ),
    ],
)
def test_layouts(argv, expected, text):
    assert layouts(parsed("allr", *argv)) == (expected,)
    assert expected.describe() == text


def test_both_are_without_and_with_peer_direct_on_two_nodes_unless_told():
    both = ("--peer-direct", "both")
    assert layouts(parsed(*both)) == (
        NodeLayout(nodes=2, peer_direct=False, transport="efa"),
        NodeLayout(nodes=2, transport="efa"),
    )
    assert [layout.nodes for layout in layouts(parsed(*both, "--nnodes", "4"))] == [4, 4]


def test_ranks_by_default_are_one_on_each_node():
    for argv, ranks in (
        ((), 2),
        (("--nnodes", "2"), 2),
        (("--nnodes", "3"), 3),
        (("--nnodes", "2", "--ranks", "4"), 4),
    ):
        assert [[case.ranks for case in world] for world in cases(parsed("allr", "-b", "8", *argv))] == [[ranks]]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--tcp",), "--tcp: concerns what joins several nodes; give --nnodes too, such as --nnodes 2"),
        (("--rails", "2"), "--rails: concerns"),
        (("--nnodes", "1", "--peer-direct", "off"), "--peer-direct: concerns"),
        (("--checksums", "on"), "--checksums: concerns"),
        (("--transport", "efa"), "--transport: concerns"),
        (
            ("--peer-direct", "both", "--checksums", "both"),
            "--peer-direct both, --checksums both: compare one thing at a time\n",
        ),
        (("--nnodes", "2", "--rails", "0"), "--rails: expected a positive number, or different interfaces"),
        (("--nnodes", "2", "--ranks", "4,3"), "--ranks: 3 ranks cannot be divided among --nnodes 2"),
    ],
)
def test_options_that_cannot_be_meant(overlap, monkeypatch, argv, message):
    monkeypatch.setattr(session, "measure_cases", None)
    code, out, err = overlap("bench", "allr", "-b", "8", *argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"overlap: {message}")


def test_something_has_to_be_measured(overlap):
    assert overlap("bench")[::2] == (
        2,
        "overlap: OP: say what to measure, or --peer-direct both, --checksums both (`overlap bench --help` explains)\n",
    )


def test_what_overlap_run_is_told():
    layout = NodeLayout(nodes=2, tcp=True, rails="4", peer_direct=False, transport="efa")
    assert layout.options(6, algorithm="ring") == [
        *("--nnodes", "2", "--nproc-per-node", "3", "--timeout", "600", "--transport", "efa"),
        *("--no-unix", "--no-peer-direct", "--rails", "4", "--algorithm", "ring"),
    ]
    for checksums, option in ((True, "--checksums"), (False, "--no-checksums")):
        assert NodeLayout(nodes=2, checksums=checksums).options(2)[-1] == option
    assert NodeLayout(nodes=2).options(2, rows=3)[4:6] == ["--timeout", "1800"]
    assert NodeLayout(nodes=2).options(2)[6:] == ["--transport", "auto", "--unix", "--peer-direct"]


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
    how, layout = Sampling(iters=2, warmup=0), NodeLayout(nodes=2)
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
    assert len(list(measuring.measure_cases(CASES, how, NodeLayout(), check=False, algorithm="ring"))) == 2
    assert asked == [((case, how), {"check": False, "algorithm": "ring"}) for case in CASES]


def test_results_that_ranks_share_are_looked_at(monkeypatch):
    case = Case(operation=find("all_gather"), ranks=2, count=5, dtype=F32, shared=True)
    how = Sampling(iters=2, warmup=1)
    assert measuring.measure(case, how).wrong == 0
    lying = replace(find("all_gather"), issue_shared=lambda rank, x, out, op, root: (rank.all_gather(-x, shared=True),))
    assert measuring.measure(replace(case, operation=lying), how).wrong == 20


@pytest.mark.parametrize(("check", "wrong"), [(True, [2, 1 << 14]), (False, [0, 0])])
def test_a_process_looks_at_its_results_if_it_is_told_to(monkeypatch, capsys, check, wrong):
    honest = find("all_reduce")
    lying = replace(honest, issue=lambda rank, x, out, op, root: (rank.all_reduce(x, "max", out),))
    monkeypatch.setitem(operations.NAMES, "all_reduce", lying)
    member.main(Assignment(cases=CASES, sampling=Sampling(iters=2, warmup=1), check=check).to_json())
    rows = [json.loads(line)["told"] for line in capsys.readouterr().out.splitlines()]
    assert [[len(samples) for _, *samples in told] for told in rows] == [[2, 2], [2, 2]]
    assert [[wrong for wrong, *_ in told] for told in rows] == [[each, each] for each in wrong]


def told_by(monkeypatch, capsys, **assigned):
    """Let one process of two ranks measure rows; return how many worlds it has had, and how many rows it tells."""
    worlds = []
    monkeypatch.setattr(member, "run", lambda main, *args: worlds.append(overlap.run(main, *args, ranks=2)))
    member.main(Assignment(cases=CASES, sampling=Sampling(iters=2, warmup=1), **assigned).to_json())
    return len(worlds), len(capsys.readouterr().out.splitlines())


def test_all_rows_are_of_one_world(monkeypatch, capsys):
    assert told_by(monkeypatch, capsys) == (1, len(CASES))


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_rows_are_measured_in_turn_until_nobody_wants_to_know(monkeypatch, capsys, rows):
    def let() -> None:
        with turns:
            turns.admit("we", 1, lambda: True)
            for _ in range(rows):
                turns.let("we")

    turns = Turns()
    others = threading.Thread(target=let)
    others.start()
    assert told_by(monkeypatch, capsys, turns=turns.path, name="we") == (1, rows)
    others.join()


def test_a_world_that_fails_does_not_wait_for_its_turn_to_end(tmp_path):
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "turns"))
        door.listen()
        told = Assignment(cases=CASES, sampling=Sampling(iters=1, warmup=0), turns=door.getsockname(), name="we")
        with pytest.raises(StallError):
            overlap.run(member._measure, told, ranks=2, timeout_s=0.1)
        waiting, _ = door.accept()
        with waiting:
            assert waiting.recv(64) == b"we"
            waiting.shutdown(socket.SHUT_WR)
            assert waiting.recv(1) == b""  # the thread that was left behind has ended


def test_a_line_is_heard_before_the_next_is_said(child):
    program = "import sys\nprint('{\"a\": 1}', flush=True)\nopen(sys.argv[1]).read()\nprint('{}')"
    read, write = os.pipe()
    with os.fdopen(write, "w") as go_on:
        talker = Child([sys.executable, "-c", program, f"/proc/{os.getpid()}/fd/{read}"], environment())
        lines = hear([talker])
        assert next(lines) == {"a": 1}
        go_on.close()
        assert list(lines) == [{}]
    os.close(read)


def test_a_failure_is_an_error_after_what_was_said(child):
    heard = hear([child("print('{}')"), child("raise SystemExit(3)")])
    assert next(heard) == {}
    with pytest.raises(OverlapError, match="a process that was to be measured ended with exit code 3"):
        next(heard)


def test_who_stops_listening_leaves_no_process(child):
    talker = child("import signal\nprint('{}', flush=True)\nsignal.pause()")
    heard = hear([talker])
    assert next(heard) == {}
    heard.close()
    assert talker.returncode == -signal.SIGTERM


def test_the_deaf_are_killed(child, monkeypatch):
    monkeypatch.setattr(children, "GRACE_S", 0.01)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('{}', flush=True)\nsignal.pause()"
    talker = child(deaf)
    heard = hear([talker])
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
    children.start(["--nnodes", "2"], ["a.module", "text"], before=["nice"], variables={"OVERLAP_JOB": "b"})
    [(command, environ)] = started
    options = ("--nnodes", "2", "--no-prefix", "--unannounced")
    assert command == ["nice", sys.executable, "-m", "overlap", "run", *options, "-m", "a.module", "text"]
    assert [name for name in environ if name.startswith("OVERLAP_")] == ["OVERLAP_JOB"]
    assert not {"RANK", "WORLD_SIZE"} & set(environ)


@pytest.mark.slow
def test_two_processes_with_two_ranks_each_are_measured_and_right(overlap):
    code, out, err = overlap(
        *("bench", "allr", "-b", "8", "-e", "64K", "-f", "8192", "-n", "2", "-w", "0", "--json", "-"),
        *("--nnodes", "2", "--ranks", "4", "--tcp", "--rails", "2"),
    )
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["layout"] == {
        "nodes": 2,
        "tcp": True,
        "rails": "2",
        "peer_direct": True,
        "checksums": None,
        "transport": "auto",
    }
    assert [(row["size_bytes"], row["ranks"], row["wrong"]) for row in told["rows"]] == [(8, 4, 0), (65536, 4, 0)]
    assert all(row["median_ns"] > 0 for row in told["rows"])


# -- Peer Direct -------------------------------------------------------------------------------------------------


def test_the_operations_of_the_document_at_32_mb_by_default():
    worlds = comparison.worlds(parsed("--peer-direct", "both", "--ranks", "4"))
    assert [[(case.operation.name, case.ranks, case.size_bytes) for case in world] for world in worlds] == [
        [("all_reduce", 4, 32_000_000)],
        [("all_gather", 4, 32_000_000)],
        [("reduce_scatter", 4, 32_000_000)],
    ]
    one = comparison.worlds(parsed("allg", "--peer-direct", "both", "-b", "1K", "-e", "2K"))
    assert [[(case.operation.name, case.size_bytes) for case in world] for world in one] == [
        [("all_gather", 1024), ("all_gather", 2048)]
    ]
    with pytest.raises(UsageError, match="3 ranks cannot be divided among --nnodes 2"):
        comparison.worlds(parsed("--peer-direct", "both", "--ranks", "3"))


PEER_DIRECT = f"""\
# out of place, ranks on 2 nodes (processes of this machine) joined by Unix
# sockets
{columns.title(CASES[0], Sampling(), NodeLayout()).split(chr(10), 1)[1].rsplit(chr(10), 1)[0]}
# MB is 10^6 bytes; bandwidth is that of the network (busbw)
# MB/s             size(B)  ranks   host copies   Peer Direct    ratio
all_reduce        32000000      2         1,000         4,000    4.00x
all_gather        32000000      2           500         2,000    4.00x
reduce_scatter    32000000      2           500         2,000    4.00x
"""


@pytest.mark.parametrize(
    ("wrong", "code", "verdict"),
    [(0, 0, "# every result checked: none wrong\n"), (5, 1, "# 15 wrong elements: FAILED\n")],
)
def test_both_side_by_side(overlap, monkeypatch, tmp_path, wrong, code, verdict):
    """Each operation takes 32 ms through the host, and 8 ms with Peer Direct."""

    def measure_cases(rows, sampling, layout, *, check):
        times = Times(median_ns=8e6 if layout.peer_direct else 32e6, p10_ns=0, p90_ns=0)
        return [Result(case=case, times=times, wrong=wrong if layout.peer_direct else 0) for case in rows]

    monkeypatch.setattr(comparison, "measure_cases", measure_cases)
    assert overlap("bench", "--peer-direct", "both", "--json", "p.json") == (code, PEER_DIRECT + verdict, "")
    told = json.loads((tmp_path / "p.json").read_text())
    assert [row["median_ns"] for row in told["host_copies"]] == [32e6] * 3
    assert [row["median_ns"] for row in told["peer_direct"]] == [8e6] * 3


# -- checksums ---------------------------------------------------------------------------------------------------


def test_what_checksums_cost(overlap, monkeypatch, tmp_path):
    """An operation takes 4 ms without, and 5 ms with them."""

    def measure_cases(rows, sampling, layout, *, check):
        times = Times(median_ns=5e6 if layout.checksums else 4e6, p10_ns=0, p90_ns=0)
        return [Result(case=case, times=times, wrong=0) for case in rows]

    monkeypatch.setattr(comparison, "measure_cases", measure_cases)
    argv = ("bench", "allr", "--checksums", "both", "--tcp", "-b", "32MB", "-n", "20", "--json", "p.json")
    code, out, err = overlap(*argv)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "# out of place, ranks on 2 nodes (processes of this machine) joined by TCP"
    assert out.splitlines()[-3:] == [
        "# MB/s             size(B)  ranks  no checksums     checksums    ratio",
        "all_reduce        32000000      2         8,000         6,400    0.80x",
        "# every result checked: none wrong",
    ]
    told = json.loads((tmp_path / "p.json").read_text())
    assert [row["median_ns"] for row in told["no_checksums"]] == [4e6]
    assert [row["median_ns"] for row in told["checksums"]] == [5e6]
