import json
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from overlap import UsageError
from overlap.cli import children
from overlap.cli.bench import session
from overlap.cli.bench.cases import Assignment, Case
from overlap.cli.bench.operations import OPERATIONS, dtype_named, find
from overlap.cli.bench.sampling import Sampling, Times
from overlap.cli.bench.versus import contenders
from overlap.cli.bench.versus.contenders import (
    CONTENDERS,
    Contender,
    ContenderUnavailableError,
    contenders_named,
    measure_contender,
)
from overlap.cli.bench.versus.inside import LibraryRank, measure_and_tell, measure_rows
from overlap.cli.children import Child, environment

F32 = np.dtype(np.float32)
CASES = [Case(operation=find("allr"), ranks=2, count=count, dtype=F32, in_place=True) for count in (2, 1 << 14)]
ASKED = Assignment(cases=CASES, sampling=Sampling(iters=2, warmup=1))


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


@pytest.mark.parametrize(
    ("right", "check", "wrong"), [(True, True, [0, 0]), (False, True, [2, 1 << 14]), (False, False, [0, 0])]
)
def test_a_peer_samples_as_we_do_and_is_checked_too(right, check, wrong):
    cases = [Case(operation=find("allr"), ranks=1, count=count, dtype=F32) for count in (2, 1 << 14)]
    library = Alone(right=right)
    rows = measure_rows(library, Assignment(cases=cases, sampling=Sampling(iters=3, warmup=1), check=check))
    assert [row["wrong"] for row in rows] == wrong
    assert [[len(samples) for samples in row["samples_ns"]] for row in rows] == [[3], [3]]
    assert library.barriers == 2 * (4 + check)
    assert library.acts == (4 * 50 + check) + (4 * 1 + check)


def test_rank_0_tells_and_every_rank_leaves(capsys):
    class Leaving(Alone):
        left = 0

        def close(self):
            self.left += 1

    first, second = Leaving(), Leaving()
    second.rank = 1
    for rank in (second, first):
        measure_and_tell(rank, Assignment(cases=CASES, sampling=Sampling(iters=2, warmup=0), check=False).to_json())
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
    assert told.times == (Times.of([20, 60]), Times.of([90, 80]))


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


def test_a_peer_that_ignores_the_signal_is_killed(fake, started, monkeypatch):
    monkeypatch.setattr(children, "GRACE_S", 0.01)
    deaf = "import signal, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.close(1); signal.pause()"
    monkeypatch.setattr(contenders, "_told", lambda peer, ranks, errors: ranks[0].stdout.read() or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure_contender(fake(deaf), ASKED)
    assert started[0].returncode == -9


def test_a_peer_that_is_not_installed_is_told_with_the_command(fake):
    with pytest.raises(ContenderUnavailableError) as caught:
        measure_contender(fake(module="no_such_module_x"), ASKED)
    assert str(caught.value) == "fake: no_such_module_x is not installed: pip install fake-package"


EVERYDAY = ("all_reduce",)  # of the operations of real peers, each of which is a start of processes


@pytest.mark.parametrize(("op", "dtype"), [("mean", "float32"), ("sum", "bfloat16")])
def test_what_a_peer_does_not_have_is_told(fake, op, dtype):
    case = replace(CASES[0], op=op, dtype=dtype_named(dtype))
    with pytest.raises(ContenderUnavailableError, match=f"fake: has no {op} of {dtype}"):
        measure_contender(fake(), Assignment(cases=[case], sampling=ASKED.sampling))


def test_a_command_goes_on_without_a_missing_peer(overlap, fake, monkeypatch):
    monkeypatch.setattr(
        session,
        "contenders_named",
        lambda text: [fake(module="no_such_module_x"), fake(f"print({json.dumps(ANSWER)!r})")],
    )
    code, out, err = overlap(
        "bench", "allr", "-b", "8", "-e", "64K", "-f", "8192", "-n", "1", "--vs", "x", "--json", "a.json"
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "# fake: no_such_module_x is not installed: pip install fake-package" in lines
    assert "# fake is test 1: processes, same sizes, same timing" in lines
    assert [line.split()[0] for line in lines if line.endswith("x")] == ["8", "65536"]


@pytest.mark.parametrize(
    "operation",
    [pytest.param(each, id=each.name, marks=[] if each.name in EVERYDAY else pytest.mark.slow) for each in OPERATIONS],
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "gloo" else name for name in CONTENDERS]
)  # gloo's processes load torch, for seconds
def test_real_peers_are_right(name, operation):
    """Needs torch, or mpi4py and mpich, which the tests do not install."""
    if find_spec(CONTENDERS[name].module) is None:
        pytest.skip(f"{CONTENDERS[name].module} is not installed")
    case = Case(operation=operation, ranks=2, count=1000, dtype=F32, in_place=operation.in_place, root=1)
    assert measure_contender(
        CONTENDERS[name], Assignment(cases=[case], sampling=Sampling(iters=1, warmup=0))
    ).wrong == (0,)
