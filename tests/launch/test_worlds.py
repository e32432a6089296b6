"""Whole worlds of several processes, started as users start them: results, traces, and every way to fail."""

import re
import signal
from pathlib import Path

import pytest

from overlap.timeline import read_trace
from tests import interpreters
from tests.interpreters import Python, environment, free_port, launch

LIMIT_S = 90  # of one run; reached only by one that hangs

TRAIN = """
import os, signal, sys
import numpy as np
import overlap

async def main(rank):
    for step in range(3):
        with rank.step(step):
            grad = rank.compute(np.full, 4, float(rank.rank + step))
            total = await rank.all_reduce(grad)
    if rank.rank == rank.world_size - 1:
        FAILURE
    everybody = await rank.all_gather(np.array([rank.rank, rank.node, rank.local_rank]))
    return total.tolist(), everybody.tolist()

if __name__ == "__main__":
    for world in range(WORLDS):
        sys.stdout.write(f"{overlap.run(main, timeout_s=60)}\\n")  # in one piece: mpiexec mixes what comes in two
"""


def program(*, failure: str = "pass", worlds: int = 1) -> str:
    return TRAIN.replace("FAILURE", failure).replace("WORLDS", str(worlds))


def hosts(count: int) -> tuple[str, ...]:
    """Return the options that start a process for each of so many hosts on this one."""
    return "--processes", str(count), "--cluster", f"local x{count}"


def results(size: int, each: int) -> list[str]:
    """What each process prints: of its own ranks, in order."""
    total = [float(sum(range(size)) + 2 * size)] * 4
    everybody = [number for rank in range(size) for number in (rank, rank // each, rank % each)]
    return [str([(total, everybody)] * each)] * (size // each)


WAYS = (
    ((), {}),
    (("--rails", "2"), {"OVERLAP_UNIX": "0"}),
    ((), {"OVERLAP_UNIX": "0", "OVERLAP_PEER_DIRECT": "0"}),
)


DIES_WHILE_WIRING = """
import os, signal
import overlap
from transports.{} import joining

def die(self, *others):
    os.kill(os.getpid(), signal.SIGKILL)  # it has told its address, and calls nobody

if os.environ["OVERLAP_NODE_RANK"] == "0":
    joining.{} = die
async def main(rank):
    raise AssertionError("the wires are not open")
overlap.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "method"),
    [
        pytest.param("efa", "SocketJoining._choose_places", marks=pytest.mark.slow),
        ("shared_memory", "Meeting.connect_all"),
    ],
)
def test_a_process_that_dies_before_its_wires_are_open_is_not_waited_for(
    tmp_path: Path, transport: str, method: str
) -> None:
    (tmp_path / "train.py").write_text(DIES_WHILE_WIRING.format(transport, method))
    command = ["-m", "overlap", "run", "--nnodes", "2", "--transport", transport]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    launchers = [Python(*command, "--node-rank", node, "train.py", cwd=tmp_path, env=environment()) for node in "01"]
    told = [launcher.communicate(timeout=LIMIT_S / 2)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [137, 1]
    *joining, lost = told[1].splitlines()
    assert lost == "overlap: process 0 is lost: its connection ended without a goodbye"
    assert joining[1:] == ["overlap: node 1 has joined"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "variables"),
    [*(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS[:2]), WAYS[2]],  # the test of traces goes the first
    ids=["Unix", "TCP, two rails", "TCP, staged"],
)
def test_two_nodes_of_two_ranks(tmp_path: Path, options: tuple[str, ...], variables: dict[str, str]) -> None:
    run = launch(tmp_path, program(), *hosts(2), "--ranks-per-process", "2", *options, **variables)
    assert (run.returncode, run.stderr) == (0, "")
    assert sorted(line.partition("] ")[2] for line in run.stdout.splitlines()) == results(4, 2)


UNSHOWABLE = """
import trio
import overlap

class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")
    __repr__ = __str__

async def child(rank):
    if rank.rank == 1:
        raise Mute

async def main(rank):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child, rank)
        await trio.sleep(100)

if __name__ == "__main__":
    overlap.run(main, SETTINGS)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "options"),
    [("ranks=2", None), ("ranks=2, clock='virtual'", None), ("", ("--processes", "2", "--ranks-per-process", "1"))],
    ids=["alone", "virtual", "two nodes"],
)
def test_an_error_that_cannot_be_shown_in_a_nursery_of_the_program_has_a_rank_and_a_line(
    tmp_path: Path, settings: str, options: tuple[str, ...] | None
) -> None:
    """The nursery shows it within Trio's loop, which dies of that."""
    text = UNSHOWABLE.replace("SETTINGS", settings)
    if options is None:
        (tmp_path / "train.py").write_text(text)
        run = interpreters.run("train.py", cwd=tmp_path, env=environment(), timeout=LIMIT_S)
    else:
        run = launch(tmp_path, text, *options)
    told = "overlap: rank 1 failed at train.py:12: RuntimeError: Mute: (its text cannot be had: ValueError)"
    assert run.returncode == 1
    assert told in run.stderr.splitlines(), run.stderr
    assert "TrioInternalError" not in run.stderr


@pytest.mark.slow
def test_four_nodes_live_through_several_worlds(tmp_path: Path) -> None:
    run = launch(tmp_path, program(worlds=2), *hosts(4), "--ranks-per-process", "1")
    assert (run.returncode, run.stderr) == (0, "")
    assert sorted(line.partition("] ")[2] for line in run.stdout.splitlines()) == 2 * results(4, 1)


OPERATOR = """
import numpy as np
import overlap
from overlap.collectives.reduce import Operator

def farther(a, b, out=None):
    out = np.empty_like(a) if out is None else out
    np.copyto(out, np.where(np.abs(a) >= np.abs(b), a, b))
    return out

overlap.OPS["farthest"] = Operator(combine=farther, reference=None)

async def main(rank):
    return await rank.all_reduce(np.array([rank.rank, -rank.rank]) - 2, op="farthest")

if __name__ == "__main__":
    print(*overlap.run(main))
"""


def test_an_operator_of_the_program_that_is_no_ufunc_works_between_processes(tmp_path: Path) -> None:
    done = launch(tmp_path, OPERATOR, "--processes", "2", "--ranks", "2", "--no-prefix")
    assert (done.returncode, done.stdout) == (0, "[-2 -3]\n" * 2), done.stderr


@pytest.mark.slow
def test_one_trace_of_all_processes(tmp_path: Path) -> None:
    run = launch(tmp_path, program(), *hosts(2), "--ranks-per-process", "2", "--trace", "run.json")
    assert run.returncode == 0, run.stderr
    assert set(results(4, 2)) <= {line.partition("] ")[2] for line in run.stdout.splitlines()}
    told = "[process 0] overlap: trace in run.json; look at it with `overlap timeline run.json` or "
    assert any(line.startswith(told) for line in run.stderr.splitlines()), run.stderr  # a busy host may be told of too
    assert [path.name for path in tmp_path.glob("*.json")] == ["run.json"]
    timeline = read_trace(tmp_path / "run.json")
    assert (timeline.ranks(), timeline.steps(), timeline.world_size) == ([0, 1, 2, 3], [0, 1, 2], 4)
    assert int(timeline.meta["clock_error_ns"]) > 0
    reduces = [span.info for span in timeline.spans if span.info and span.info.op == "all_reduce"]
    assert len(reduces) == 12
    for seq in range(3):  # when the last of all four came is known only to the merged file
        assert len({min(info.met_ns, info.end_ns) for info in reduces if info.seq == seq}) == 1


# Which of these ends how is shown by tests/runtime/test_remote.py, and without a world by test_launcher.py.
FAILURES = {
    "raises": ("raise ValueError('no such batch')", 1, "rank 3 failed at train.py:12: ValueError: no such batch"),
    "differs": (
        "await rank.all_reduce(np.zeros(5))",
        1,
        r"operation #3 on group 'world' differs between ranks: rank \d called all_\w+\(.*, rank \d called all_\w+\(",
    ),
    "leaves": ("return", 1, "rank 3 finished its program while rank [0-2].* needs it in all_gather #3"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "process 1.*SIGKILL"),
    "exits with 0": ("os._exit(0)", 1, r"process 1 .* exited with code 0 before its world had ended, as os"),
    "exits with 3": ("os._exit(3)", 3, "process 1.* 3"),
}
EVERYDAY = ("is killed",)  # that an error is told last is a test of the launcher, too


@pytest.mark.parametrize(
    "how", [how if how in EVERYDAY else pytest.param(how, marks=pytest.mark.slow) for how in FAILURES]
)
def test_a_failure_ends_all_and_names_its_culprit(tmp_path: Path, how: str) -> None:
    failure, code, told = FAILURES[how]
    run = launch(tmp_path, program(failure=failure), "--processes", "2", "--ranks-per-process", "2")
    assert run.returncode == code, run.stderr
    assert re.search(told, run.stderr), run.stderr


NEVER_AWAITED = """
import numpy as np
import overlap

def boom(x):
    raise ZeroDivisionError("boom")

async def main(rank):
    if rank.rank < 2:
        await rank.all_reduce(np.ones(2))
    rank.all_reduce(rank.compute(boom, np.ones(2)) if rank.rank == 2 else np.ones(2))
    await rank.recv(like=np.ones(2), src=0)  # which sends nothing

overlap.run(main)
"""


@pytest.mark.slow
def test_a_compute_that_nobody_awaits_is_named_by_the_ranks_of_other_processes(tmp_path: Path) -> None:
    """They know before rank 2 does: its program still waits for another operation."""
    done = launch(tmp_path, NEVER_AWAITED, "--ranks", "4", "--processes", "2")
    assert done.returncode == 1
    assert "rank 2 failed at train.py:6: ZeroDivisionError: boom" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_process_that_vanishes_fails_its_own_launcher_too(tmp_path: Path) -> None:
    """Each machine has a launcher, which knows nothing of what the other one sees."""
    (tmp_path / "train.py").write_text(program(failure="os._exit(0)"))
    endpoint = f"127.0.0.1:{free_port()}"
    command = ("-m", "overlap", "run", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--node-rank")
    launchers = [Python(*command, node, "train.py", cwd=tmp_path, env=environment()) for node in "01"]
    told = [launcher.communicate(timeout=LIMIT_S)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [1, 1]
    assert "process 1 (rank 1) is lost" in told[0]
    assert re.fullmatch(
        rf"overlap: node 1 waits for the other nodes, at {endpoint}\n"
        r"overlap: node 1 has joined\n"
        r"overlap: process 1 \(rank 1, pid \d+\) on \S+ exited with code 0 before its world had ended, "
        r"as os\._exit does\n"
        r"  rank 1 had last called all_reduce #2 of group 'world' \(train.py:10\)\n"
        r"(  rank 0 waits for it in all_gather #3 of group 'world' \(train.py:13\)\n)?",
        told[1],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "doing"),
    [
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            "had last called all_reduce #2 of group 'world' (train.py:10)",
            marks=pytest.mark.slow,
        ),
        (
            "back = rank.compute(os.kill, os.getpid(), signal.SIGKILL); await back",
            "computed 'kill' (train.py:12)",
        ),
        (
            "rank.recv(((1,), float), 0, name='late'); await rank.recv(((1,), float), 2, tag=1); "
            "os.kill(os.getpid(), signal.SIGKILL)",
            "was in late #0 from rank 0 (train.py:12)",
        ),
    ],
)
def test_a_process_that_is_killed_is_named_with_what_it_was_doing(tmp_path: Path, failure: str, doing: str) -> None:
    text = program(failure=failure)
    if "tag=1" in failure:
        text = text.replace("    everybody =", "    elif rank.rank == 2:\n" + SENDS)
    run = launch(tmp_path, text, "--processes", "2", "--ranks-per-process", "2", "--flight-dir", "flights")
    assert run.returncode == 137
    lines = run.stderr.splitlines()
    killed = next(number for number, line in enumerate(lines) if line.startswith("overlap: process 1 (ranks 2-3, pid "))
    assert re.search(
        r" was killed by SIGKILL; this launcher did not send it: somebody did, or memory ran out, it had [\d.]+ MiB "
        r"at most \(`dmesg` of that machine says\)$",
        lines[killed],
    )
    assert lines[killed + 2] == f"  rank 3 {doing}"
    assert len(lines) <= killed + 4


CATCHES = """
import os, signal
import overlap

async def main(rank):
    await rank.barrier()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await rank.barrier()

try:
    overlap.run(main)
except overlap.RankFailedError:
    pass
raise ValueError("bug in the handling of the loss")
"""


@pytest.mark.slow
def test_an_error_after_a_loss_is_shown_and_the_killed_process_is_named(tmp_path: Path) -> None:
    run = launch(tmp_path, CATCHES, "--processes", "2")
    assert run.returncode == 137
    before, _, after = run.stderr.partition("ValueError: bug in the handling of the loss\n")
    assert "Traceback" in before
    assert re.match(r"overlap: process 0 .* exited with code 1\noverlap: process 1 .* was killed by SIGKILL", after)


SENDS = """        await rank.send(np.zeros(1), 3, tag=1)
    everybody ="""
ABSENT = """
import os, overlap

async def main(rank):
    await rank.barrier()

for world in range(WORLDS):
    if os.environ["GROUP_RANK"] == "0" or world < WORLDS - 1:
        overlap.run(main)
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_process_that_ends_well_without_joining_is_not_waited_for(tmp_path: Path, worlds: int) -> None:
    program = ABSENT.replace("WORLDS", str(worlds))
    run = launch(tmp_path, program, "--processes", "2", "--join-timeout", str(10 * LIMIT_S))
    assert (run.returncode, run.stdout) == (1, "[process 1] done\n")
    assert re.fullmatch(
        r"overlap: process 1 \(rank 1, pid \d+\) exited with code 0 without joining", run.stderr.splitlines()[-1]
    )


EARLY = """
import overlap

async def main(rank):
    if rank.rank == 1:
        raise ValueError("HEAD \\x1b[31m" + "detail\\n" * 600 + "TAIL")
    await rank.barrier()

overlap.run(main)
"""


@pytest.mark.slow
def test_of_a_long_error_the_terminal_has_both_ends_and_the_log_has_all(tmp_path: Path) -> None:
    run = launch(tmp_path, EARLY, "--processes", "2", "--log-dir", "logs")
    lines = run.stderr.splitlines()
    assert (run.returncode, len(lines), lines[0]) == (1, 25, "Traceback (most recent call last):")
    assert re.fullmatch(r"  \.\.\. 5\d\d lines left out \.\.\.", lines[12])
    assert any(line.startswith("ValueError: HEAD ") for line in lines[:12])
    assert lines[-3:-1] == ["TAIL", r"overlap: rank 1 failed at train.py:6: ValueError: HEAD \x1b[31mdetail ..."]
    assert lines[-1].endswith(" exited with code 1; all it printed is in logs/process-1.log")
    log = (tmp_path / "logs/process-1.log").read_text().splitlines()
    assert log.count("detail") == 599
    assert log[-2:] == lines[-3:-1]


LONG = """
import overlap

async def main(rank):
    await rank.barrier()
    if rank.rank == 1:
        raise ValueError("HEAD " + "x" * 10_000_000)
    await rank.barrier()

overlap.run(main)
"""


@pytest.mark.slow
def test_an_error_with_a_line_of_10_mb_names_its_rank_and_its_line(tmp_path: Path) -> None:
    run = launch(tmp_path, LONG, "--processes", "2")
    lines = run.stderr.splitlines()
    assert lines[-1].startswith("overlap: rank 1 failed at train.py:7: ValueError: HEAD xxx")
    assert max(map(len, lines)) < 3000


NESTED = """
import overlap

def work():
    async def inner(rank):
        pass
    overlap.run(inner)

async def main(rank):
    await rank.compute(work)

overlap.run(main)
"""


@pytest.mark.slow
def test_a_compute_of_a_launched_job_cannot_begin_a_second_world(tmp_path: Path) -> None:
    run = launch(tmp_path, NESTED, "--processes", "2")
    told = r"overlap: rank [01] failed at train\.py:7: UsageError: run: this process is in a world of its job already"
    assert re.match(told, run.stderr.splitlines()[-1])
    assert run.returncode == 1


TELLING = """
import os, subprocess, sys
import overlap

async def main(rank):
    await rank.barrier()

for _ in range(2):
    overlap.run(main)
told = subprocess.check_output([sys.executable, "-c", "import os; print(os.environ)"], text=True)
print("correct horse" in f"{os.environ}{told}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ours", pytest.param("another", marks=pytest.mark.slow)])
def test_the_secret_is_not_left_in_the_environment_of_ranks_nor_of_what_they_start(
    tmp_path: Path, launcher: str
) -> None:
    if launcher == "ours":
        run = launch(tmp_path, TELLING, "--processes", "2", "--no-prefix", OVERLAP_SECRET="correct horse")
        assert (run.returncode, run.stdout, run.stderr) == (0, "False\nFalse\n", "")
        return
    there = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    there |= {"MASTER_PORT": str(free_port()), "OVERLAP_SECRET": "correct horse"}
    (tmp_path / "train.py").write_text(TELLING)
    ranks = [started(tmp_path, RANK=rank, LOCAL_RANK=rank, **there) for rank in "01"]
    assert [process.communicate(timeout=LIMIT_S) for process in ranks] == [("False\n", "")] * 2


def started(folder: Path, **variables: str) -> Python:
    return Python("train.py", cwd=folder, env=environment(**variables))


def test_a_script_under_another_launcher_needs_no_change(tmp_path: Path) -> None:
    """What torchrun puts into the environment of each of its processes, one rank in each."""
    (tmp_path / "train.py").write_text(program())
    port = str(free_port())
    ranks = [
        started(
            tmp_path, RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3",
            GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for rank in range(3)
    ]  # fmt: skip
    told = [process.communicate(timeout=LIMIT_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], told
    total, everybody = [9.0] * 4, [0, 0, 0, 1, 0, 1, 2, 0, 2]
    assert [out for out, _ in told] == [f"{[(total, everybody)]}\n"] * 3


@pytest.mark.slow  # test_membership*.py and tests/runtime/test_stall.py show it on a clock of the test
def test_a_node_that_stops_is_noticed_by_its_timeout(tmp_path: Path) -> None:
    stops = program(failure="os.kill(os.getpid(), signal.SIGSTOP)")
    run = launch(tmp_path, stops, "--processes", "2", "--timeout", "5", "--grace", "1")
    assert run.returncode != 0
    assert "did not finish within timeout_s=5" in run.stderr
    assert "rank 0: all_gather #3 of group 'world'" in run.stderr


@pytest.mark.slow
def test_ctrl_c_ends_all_with_130(tmp_path: Path) -> None:
    waits = program(failure="print('waiting', flush=True); import trio; await trio.sleep_forever()")
    (tmp_path / "train.py").write_text(waits)
    command = ("-m", "overlap", "run", "--processes", "2", "--ranks-per-process", "2", "train.py")
    with Python(*command, cwd=tmp_path, env=environment()) as job:
        assert job.stdout is not None
        assert "waiting" in job.stdout.readline()
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130
    assert "Traceback" not in err, err


@pytest.mark.slow
def test_a_failed_run_leaves_one_trace_of_all(tmp_path: Path) -> None:
    fails = program(failure="raise ValueError('no')")
    run = launch(tmp_path, fails, "--processes", "2", "--ranks-per-process", "2", "--trace", "run.json")
    assert run.returncode == 1
    assert [path.name for path in tmp_path.glob("*.json")] == ["run.json"], run.stderr
    timeline = read_trace(tmp_path / "run.json")
    assert (timeline.ranks(), timeline.steps(), timeline.world_size) == ([0, 1, 2, 3], [0, 1, 2], 4)
