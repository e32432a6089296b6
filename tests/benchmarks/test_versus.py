import argparse
import json
import socket
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

import overlap
from overlap import StallError, UsageError
from overlap.cli.bench.cases import NAMES, OPERATIONS, Case, find_dtype
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.sampling import Sampling, Times
from tests.benchmarks.children import Child, environment
from tests.benchmarks.figures import over
from tests.benchmarks.versus import __main__ as command
from tests.benchmarks.versus import comparison, contenders, member
from tests.benchmarks.versus.assignment import AssignmentInTurn
from tests.benchmarks.versus.contenders import (
    CONTENDERS,
    Contender,
    ContenderResult,
    ContenderUnavailableError,
    contenders_named,
    measure_contender,
)
from tests.benchmarks.versus.inside import LibraryRank, measure_and_tell, measure_rows
from tests.benchmarks.versus.layout import ProcessLayout, layout
from tests.benchmarks.versus.turns import Turns
from tests.threads import running


def parsed(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(argv)


F32 = np.dtype(np.float32)
CASES = [Case(operation=NAMES["allr"], ranks=2, count=count, dtype=F32, in_place=True) for count in (2, 1 << 14)]
ASKED = AssignmentInTurn(cases=CASES, sampling=Sampling(iters=2, warmup=1))


def test_peers_by_name():
    assert [peer.name for peer in contenders_named("mpi,gloo,mpi")] == ["mpi", "gloo"]
    with pytest.raises(UsageError, match=r"--vs: 'nccl' is unknown; known are gloo, mpi"):
        contenders_named("gloo,nccl")


# -- inside a peer -----------------------------------------------------------------------------------------------


class Alone(LibraryRank):
    """A world of one rank, which copies; it counts what it is asked for."""

    rank, version = 0, "alone"

    def __init__(self, *, right=True):
        self.right, self.barriers, self.acts = right, 0, 0

    def barrier(self):
        self.barriers += 1

    def action(self, case, x, out):
        def act():
            self.acts += 1
            out[...] = x if self.right else 0

        return act

    def gather(self, numbers):
        return [numbers.tolist()]

    def close(self):
        pass


@pytest.mark.parametrize(("right", "wrong"), [(True, [0, 0]), (False, [2, 1 << 14])])
def test_a_peer_samples_as_we_do_and_is_checked_too(right, wrong):
    cases = [Case(operation=NAMES["allr"], ranks=1, count=count, dtype=F32) for count in (2, 1 << 14)]
    library = Alone(right=right)
    rows = measure_rows(library, AssignmentInTurn(cases=cases, sampling=Sampling(iters=3, warmup=1)))
    assert [row["wrong"] for row in rows] == wrong
    assert [[len(samples) for samples in row["samples_ns"]] for row in rows] == [[3], [3]]
    assert library.barriers == 2 * (4 + 1)
    assert library.acts == (4 * 50 + 1) + (4 * 1 + 1)


def test_rank_0_tells_and_every_rank_leaves(capsys):
    class Leaving(Alone):
        left = 0

        def close(self):
            self.left += 1

    first, second = Leaving(), Leaving()
    second.rank = 1
    for rank in (second, first):
        measure_and_tell(rank, AssignmentInTurn(cases=CASES, sampling=Sampling(iters=2, warmup=0)).to_json())
    assert (first.left, second.left) == (1, 1)
    [line] = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert told["version"] == "alone"
    assert [[len(samples) for samples in row["samples_ns"]] for row in told["rows"]] == [[2], [2]]


# -- their processes ---------------------------------------------------------------------------------------------

ANSWER = {
    "version": "test 1",
    "rows": [
        {"wrong": 0, "samples_ns": [[1000, 2000], [500, 3000]]},
        {"wrong": 3, "samples_ns": [[70, 80], [90, 60]]},
    ],
}


@pytest.fixture
def started():
    """The processes that `fake` has started."""
    return []


@pytest.fixture
def fake(started):
    """Return a function that makes a peer whose ranks are the given programs."""

    def make(*programs, module="json"):
        def start(ranks, command, errors):
            started.extend(Child([sys.executable, "-c", program], environment(), errors=errors) for program in programs)
            return started

        return Contender(name="fake", module=module, packages="fake-package", program="x", start=start)

    return make


def test_the_slowest_rank_counts_and_batches_are_divided(fake):
    told = measure_contender(fake(f"print({json.dumps(ANSWER)!r})", "pass"), ASKED)
    assert (told.name, told.version, told.wrong) == ("fake", "test 1", (0, 3))
    assert told.times == (Times.of_samples([20, 60]), Times.of_samples([90, 80]))


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (("raise ValueError('no network')", "pass"), "fake: failed: ValueError: no network"),
        (("print('{}')", "raise SystemExit(3)"), r"fake: failed: exit codes \[0, 3\]"),
    ],
)
def test_a_peer_that_fails_is_a_remark(fake, programs, message):
    with pytest.raises(ContenderUnavailableError, match=message):
        measure_contender(fake(*programs), ASKED)


def test_a_peer_that_hangs_is_ended_with_all_its_processes(fake, started, monkeypatch):
    monkeypatch.setattr(contenders, "TIMEOUT_S", 0.01)
    endless = "import threading; threading.Event().wait()"
    with pytest.raises(ContenderUnavailableError, match=r"fake: not finished after 0\.01 s, given up"):
        measure_contender(fake(endless, endless), ASKED)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_a_peer_that_ignores_signals_is_killed(fake, started, monkeypatch):
    deaf = "import signal, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.close(1); signal.pause()"
    monkeypatch.setattr(contenders, "_told", lambda peer, ranks, errors: ranks[0].stdout.read() or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure_contender(fake(deaf), ASKED)
    assert started[0].returncode == -9


def test_a_peer_that_is_not_installed_is_told_with_the_command(fake):
    with pytest.raises(ContenderUnavailableError) as caught:
        measure_contender(fake(module="no_such_module_x"), ASKED)
    assert str(caught.value) == "fake: no_such_module_x is not installed: pip install fake-package"


@pytest.mark.parametrize(("op", "dtype"), [("mean", "float32"), ("sum", "bfloat16")])
def test_what_a_peer_does_not_have_is_told(fake, op, dtype):
    case = replace(CASES[0], op=op, dtype=find_dtype(dtype))
    with pytest.raises(ContenderUnavailableError, match=f"fake: has no {op} of {dtype}"):
        measure_contender(fake(), AssignmentInTurn(cases=[case], sampling=ASKED.sampling))


def test_a_command_goes_on_without_a_missing_peer(fake, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        command,
        "contenders_named",
        lambda text: [fake(module="no_such_module_x"), fake(f"print({json.dumps(ANSWER)!r})")],
    )
    argv = ["allr", "-b", "8", "-e", "64K", "-f", "8192", "-n", "1", "--vs", "x", "--json-file"]
    assert command.main([*argv, str(tmp_path / "a.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "# fake: no_such_module_x is not installed: pip install fake-package" in lines
    assert "# fake is test 1: processes, same sizes, same timing" in lines
    assert [line.split()[0] for line in lines if line.endswith("x")] == ["8", "65536"]
    told = json.loads((tmp_path / "a.json").read_text())
    assert [peer["name"] for peer in told["peers"]] == ["fake"]
    assert [row["in_place"] for row in told["rows"]] == [True, True]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("allr",), "name the operation and --vs, or --compare peer-direct, --compare checksums"),
        (
            ("--compare", "peer-direct", "--ranks", "3"),
            "--ranks: expected 1 or more, in multiples of --processes 2, got 3",
        ),
    ],
)
def test_options_that_cannot_be_meant(capsys, argv, message):
    assert command.main(argv) == 2
    assert message in capsys.readouterr().err


def times(median_us):
    return Times(median_ns=median_us * 1e3, p10_ns=1e3, p90_ns=2e3)


def test_peers_beside_ours():
    case = Case(operation=NAMES["all_reduce"], ranks=4, count=1 << 18, dtype=F32)
    ours = [
        Result(case=replace(case, count=2), times=times(20.0), wrong=0),
        Result(case=case, times=times(500.0), wrong=0),
    ]
    gloo = ContenderResult(name="gloo", version="gloo of torch 2", times=(times(300.0), times(2500.0)), wrong=(0, 0))
    mpi = ContenderResult(name="mpi", version="MPICH 5", times=(times(5.0), times(500.0)), wrong=(0, 0))
    assert (
        command.beside(ours, [gloo, mpi])
        == """\
# gloo is gloo of torch 2: processes, same sizes, same timing
# mpi is MPICH 5: processes, same sizes, same timing
   size(B)  ranks  overlap(us)  gloo(us)  gloo/overlap   mpi(us)  mpi/overlap
         8      4        20.00     300.0        15.00x      5.00        0.25x
   1048576      4        500.0    2500.0         5.00x     500.0        1.00x"""
    )


# -- turns ---------------------------------------------------------------------------------------------------------


def told_by(monkeypatch, capsys, **assigned):
    """Let one process of two ranks measure rows; return its number of worlds and of printed rows."""
    worlds = []
    monkeypatch.setattr(member, "run", lambda main, *args: worlds.append(overlap.run(main, *args, ranks=2)))
    member.main(AssignmentInTurn(cases=CASES, sampling=Sampling(iters=2, warmup=1), **assigned).to_json())
    return len(worlds), len(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_rows_are_measured_in_turn_until_nobody_wants_to_know(monkeypatch, capsys, rows):
    def let() -> None:
        with turns:
            turns.admit("we", 1, lambda: True)
            for _ in range(rows):
                turns.let("we")

    turns = Turns()
    with running(threading.Thread(target=let)):
        assert told_by(monkeypatch, capsys, turns=turns.path, name="we") == (1, rows)


def test_a_world_that_fails_does_not_wait_for_its_turn_to_end(tmp_path):
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "turns"))
        door.listen()
        told = AssignmentInTurn(cases=CASES, sampling=Sampling(iters=1, warmup=0), turns=door.getsockname(), name="we")
        with pytest.raises(StallError):
            overlap.run(member.measure, told, ranks=2, timeout_s=0.1)
        waiting, _ = door.accept()
        with waiting:
            assert waiting.recv(64) == b"we"
            waiting.shutdown(socket.SHUT_WR)
            assert waiting.recv(1) == b""  # the thread that was left behind has ended


@pytest.mark.parametrize("operation", [pytest.param(each, id=each.name) for each in OPERATIONS])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.engines if name == "mpi" else pytest.mark.slow) for name in CONTENDERS],
)
def test_real_peers_are_right(name, operation):
    """gloo needs torch; mpi needs mpi4py and mpich, which `.ci/run engines` installs."""
    if find_spec(CONTENDERS[name].module) is None:
        pytest.skip(f"{CONTENDERS[name].module} is not installed")
    case = Case(operation=operation, ranks=2, count=1000, dtype=F32, in_place=operation.in_place, root=1)
    assert measure_contender(
        CONTENDERS[name], AssignmentInTurn(cases=[case], sampling=Sampling(iters=1, warmup=0))
    ).wrong == (0,)


# -- layouts of processes ----------------------------------------------------------------------------------------


ON_THIS_HOST = "ranks in {0} processes of this host (local x{0}) joined by "


@pytest.mark.parametrize(
    ("options", "expected", "joined"),
    [
        ("", ProcessLayout(), ""),
        ("--processes 1", ProcessLayout(), ""),
        ("--processes 2", ProcessLayout(processes=2), "shared memory"),
        ("--processes 2 --transport efa", ProcessLayout(processes=2, transport="efa"), "Unix sockets"),
        (
            "--processes 3 --tcp --rails 4 --no-peer-direct",
            ProcessLayout(processes=3, tcp=True, rails="4", peer_direct=False),
            "TCP over 4 connections, through a bounce buffer",
        ),
        (
            "--processes 2 --tcp --rails eth0,eth1 --peer-direct",
            ProcessLayout(processes=2, tcp=True, rails="eth0,eth1"),
            "TCP over eth0,eth1",
        ),
        (
            "--processes 2 --checksums",
            ProcessLayout(processes=2, checksums=True),
            "Unix sockets, with checksums of payloads",
        ),
        (
            "--processes 2 --no-checksums --no-peer-direct",
            ProcessLayout(processes=2, checksums=False, peer_direct=False),
            "Unix sockets, without checksums of payloads, through a bounce buffer",
        ),
    ],
)
def test_layouts(options, expected, joined):
    assert layout(parsed("allr", *options.split())) == expected
    alone = expected.processes == 1
    text = "ranks in one process" if alone else ON_THIS_HOST.format(expected.processes) + joined
    assert expected.describe() == text


def test_a_transport_of_another_package_is_named():
    told = ProcessLayout(processes=2, transport="pigeon").describe()
    assert told == "ranks in 2 processes of this host (local x2) joined by pigeon"


def test_what_overlap_run_is_told():
    layout = ProcessLayout(processes=2, tcp=True, rails="4", peer_direct=False, transport="efa")
    assert layout.options(6, algorithm="ring") == [
        *("--processes", "2", "--ranks-per-process", "3", "--cluster", "local x2", "--timeout", "600"),
        *("--transport", "efa", "--rails", "4", "--algorithm", "ring"),
    ]
    assert layout.variables == {"OVERLAP_UNIX": "0", "OVERLAP_PEER_DIRECT": "0"}
    for checksums, option in ((True, "--checksums"), (False, "--no-checksums")):
        assert ProcessLayout(processes=2, checksums=checksums).options(2)[-1] == option
    assert ProcessLayout(processes=2).options(2, rows=3)[6:8] == ["--timeout", "1800"]
    assert ProcessLayout(processes=2).options(2)[8:] == ["--transport", "auto"]
    assert ProcessLayout(processes=2).variables == {"OVERLAP_UNIX": "1", "OVERLAP_PEER_DIRECT": "1"}


def test_what_joins_processes_needs_several(capsys):
    for argv in (("--tcp",), ("--rails", "2"), ("--no-peer-direct",), ("--checksums",), ("--transport", "efa")):
        assert command.main(["allr", "--vs", "gloo", "-b", "8", *argv]) == 2
        assert capsys.readouterr().err.endswith(": concerns what joins processes; give --processes 2 too\n")


# -- Peer Direct -------------------------------------------------------------------------------------------------


def test_both_are_off_and_on_on_two_nodes_joined_by_sockets_unless_told():
    peer_direct, checksums = comparison.COMPARISONS
    assert comparison.layouts(parsed("--compare", "peer-direct"), peer_direct) == (
        ProcessLayout(processes=2, peer_direct=False, transport="efa"),
        ProcessLayout(processes=2, transport="efa"),
    )
    four = comparison.layouts(parsed("--compare", "checksums", "--processes", "4"), checksums)
    assert [(each.processes, each.checksums) for each in four] == [(4, False), (4, True)]


def test_the_operations_of_the_document_at_32_mb_by_default():
    worlds = comparison.worlds(parsed("--compare", "peer-direct", "--ranks", "4"))
    assert [[(case.operation.name, case.ranks, case.size_bytes) for case in world] for world in worlds] == [
        [("all_reduce", 4, 32_000_000)],
        [("all_gather", 4, 32_000_000)],
        [("reduce_scatter", 4, 32_000_000)],
    ]
    one = comparison.worlds(parsed("allg", "--compare", "peer-direct", "-b", "1K", "-e", "2K"))
    assert [[(case.operation.name, case.size_bytes) for case in world] for world in one] == [
        [("all_gather", 1024), ("all_gather", 2048)]
    ]
    with pytest.raises(UsageError, match="--ranks: expected 1 or more, in multiples of --processes 2, got 3"):
        comparison.worlds(parsed("--compare", "peer-direct", "--ranks", "3"))


PEER_DIRECT = """\
# out of place, ranks in 2 processes of this host (local x2) joined by Unix
# sockets
# time: median, 10th and 90th percentile of 20 samples after 5 of warm-up;
# a sample is the slowest rank's time from a common barrier to its result; up to
# 32 KiB it is 50 operations back to back, divided by 50
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
def test_both_side_by_side(capsys, monkeypatch, tmp_path, wrong, code, verdict):
    """Each operation takes 32 ms through the host, and 8 ms with Peer Direct."""

    def measure_cases(rows, sampling, layout):
        times = Times(median_ns=8e6 if layout.peer_direct else 32e6, p10_ns=0, p90_ns=0)
        return [Result(case=case, times=times, wrong=wrong if layout.peer_direct else 0) for case in rows]

    monkeypatch.setattr(comparison, "measure_cases", measure_cases)
    assert command.main(["--compare", "peer-direct", "--json-file", str(tmp_path / "p.json")]) == code
    assert capsys.readouterr().out == PEER_DIRECT + verdict
    told = json.loads((tmp_path / "p.json").read_text())
    assert [row["median_ns"] for row in told["host_copies"]] == [32e6] * 3
    assert [row["median_ns"] for row in told["peer_direct"]] == [8e6] * 3


# -- checksums ---------------------------------------------------------------------------------------------------


def test_what_checksums_cost(capsys, monkeypatch, tmp_path):
    """An operation takes 4 ms without, and 5 ms with them."""

    def measure_cases(rows, sampling, layout):
        times = Times(median_ns=5e6 if layout.checksums else 4e6, p10_ns=0, p90_ns=0)
        return [Result(case=case, times=times, wrong=0) for case in rows]

    monkeypatch.setattr(comparison, "measure_cases", measure_cases)
    path = str(tmp_path / "p.json")
    assert command.main(["allr", "--compare", "checksums", "--tcp", "-b", "32MB", "-n", "20", "--json-file", path]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "# out of place, ranks in 2 processes of this host (local x2) joined by TCP"
    assert out.splitlines()[-3:] == [
        "# MB/s             size(B)  ranks  no checksums     checksums    ratio",
        "all_reduce        32000000      2         8,000         6,400    0.80x",
        "# every result checked: none wrong",
    ]
    told = json.loads((tmp_path / "p.json").read_text())
    assert [row["median_ns"] for row in told["no_checksums"]] == [4e6]
    assert [row["median_ns"] for row in told["checksums"]] == [5e6]


def test_times_are_compared_by_their_medians():
    assert over(Times.of_samples([30]), Times.of_samples([20])) == 1.5
