"""Starting a world again: what is said of each attempt, when it gives up, and that training ends with the same bits."""

import re
import signal
from dataclasses import replace
from types import MappingProxyType

import pytest

from overlap.config import RunConfig
from overlap.launch import restarts
from overlap.launch.jobs import Job as Ended
from overlap.launch.jobs import LaunchSpec
from overlap.launch.launcher import LaunchOutcome
from overlap.processes.status import Status
from tests import interpreters
from tests.interpreters import environment, free_port, launch

LIMIT_S = 240  # of a job; reached only by one that hangs

# -- the loop ------------------------------------------------------------------------------------------------------

KILLED = Ended(node=1, ranks=range(2, 4), pid=4711, returncode=-11)
RAISED = Ended(
    node=0, ranks=range(2), pid=4710, returncode=1,
    status=Status(cause=True, rank=1, text="Traceback ...\noverlap: rank 1 failed at train.py:8: ValueError: no\n"),
)  # fmt: skip
WELL = Ended(node=0, ranks=range(2), pid=4710, returncode=0)
CRASH = "process 1 (ranks 2-3, pid 4711) was killed by SIGSEGV"


class Story:
    """Launches that end as told, and the steps that are kept after each of them."""

    def __init__(self, *endings, most=10, steps=(), place="state", asked=None, kept=MappingProxyType({}), signs=()):
        self.endings, self.steps, self.lines = list(endings), [None, *steps], []
        self.attempts, self.pauses_s, self.asked = [], [], asked
        self.signs, self.kept, self.place = dict(signs), kept, place
        self.config = RunConfig(max_restarts=most, state_dir=place)

    def tell(self):
        what = LaunchSpec(
            command=[], environ={"HOME": "/"}, nodes=2, here=range(2), ranks_per_node=2,
            endpoint=("", 0), listener=None,
            job="", secret=b"", prefix=False, colour=False, log_dir="logs", grace_s=1, report=self.lines.append,
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(restarts, "newest_step", lambda folder: self.step() if folder else None)
            patch.setattr(restarts, "recorded_steps", lambda files: (self.step(), self.kept.get(len(self.attempts))))
            patch.setattr(restarts, "last_signs_of_process", lambda pid, folder: self.signs.get(pid, []))
            patch.setattr(restarts.time, "sleep", lambda pause_s: pause_s and self.pauses_s.append(pause_s))
            patch.setattr(restarts.trio, "run", lambda launch, what: self._once(what))
            self.outcome = restarts.launch_with_restarts(what, self.config, self.place)
        return self

    def step(self):
        return self.steps[min(len(self.attempts), len(self.steps) - 1)]

    def _once(self, what):
        assert what.environ == {"HOME": "/", "OVERLAP_RESTART": str(len(self.attempts))}
        assert list(what.here) == [0, 1]
        self.attempts.append(what.log_path(1))
        return LaunchOutcome(endings=[self.endings.pop(0)], first_signal=self.asked)


def test_checkpoints_in_a_folder_of_the_program_are_told():
    """The second attempt ends before it has saved anything."""
    story = Story(KILLED, KILLED, WELL, place=None, steps=[41, 43], kept={1: 40}).tell()
    assert [line.partition(":")[0] for line in story.lines] == [
        "restart 1 of 10, from step 40", "restart 2 of 10, from step 40",
    ]  # fmt: skip


def test_an_error_with_details_is_told_by_its_headline():
    text = "overlap: the world did not finish within timeout_s=9: ranks 0, 2 wait for rank 1\n  rank 0: recv\n"
    story = Story(replace(RAISED, status=Status(cause=True, text=text)), WELL, steps=[None]).tell()
    [line] = story.lines
    assert line.endswith(": the world did not finish within timeout_s=9: ranks 0, 2 wait for rank 1")


def test_each_attempt_is_told_in_one_line():
    story = Story(KILLED, RAISED, KILLED, WELL, steps=[None, 40, 50]).tell()
    assert story.outcome.endings == [WELL]
    assert story.lines == [
        f"restart 1 of 10 in 1 s, from the beginning (no complete state in state): {CRASH}",
        "restart 2 of 10, from step 40: rank 1 failed at train.py:8: ValueError: no",
        f"restart 3 of 10, from step 50: {CRASH}",
    ]
    assert story.attempts == [f"logs/process-1{again}.log" for again in ("", ".restart-1", ".restart-2", ".restart-3")]


def test_what_a_process_was_doing_that_died_without_a_word_is_told():
    signs = {4711: ["rank 2 of 4711 was in x", "rank 3 was in y"]}
    story = Story(KILLED, RAISED, WELL, steps=[40, 50], signs=signs).tell()
    assert story.lines == [
        f"restart 1 of 10, from step 40: {CRASH}; rank 2 of 4711 was in x",
        "restart 2 of 10, from step 50: rank 1 failed at train.py:8: ValueError: no",
    ]


def test_without_a_folder_it_says_what_keeps_a_state():
    story = Story(KILLED, WELL, steps=[7], place=None).tell()
    assert story.lines == [
        f"restart 1 of 10, from the beginning (no complete state; --state-dir or Checkpoints keep one): {CRASH}"
    ]


def test_it_waits_longer_each_time_and_gives_up_where_there_is_no_progress():
    story = Story(*[KILLED] * 9, steps=[40, 40, 40, 40, 40]).tell()
    assert story.outcome.endings == [KILLED]
    assert story.lines[1:] == [
        f"restart 2 of 10 in 1 s, from step 40: {CRASH}",
        f"restart 3 of 10 in 2 s, from step 40: {CRASH}",
        "gives up: 3 attempts in a row ended without progress",
    ]
    assert story.pauses_s == [1.0, 2.0]


def test_progress_begins_the_count_anew():
    story = Story(*[KILLED] * 9, steps=[1, 1, 1, 2, 2, 2, 2]).tell()
    assert len(story.attempts) == 7
    assert story.pauses_s == [1.0, 2.0, 1.0, 2.0]


@pytest.mark.parametrize(("most", "times"), [(1, "once"), (2, "2 times")])
def test_it_gives_up_when_all_restarts_are_used_up(most, times):
    story = Story(*[KILLED] * 9, steps=[1, 2, 3, 4], most=most).tell()
    assert len(story.attempts) == most + 1
    assert story.lines[-1] == f"gives up: it has been started again {times}, and --max-restarts allows no more"


def test_bad_usage_is_not_tried_again():
    story = Story(replace(RAISED, returncode=2)).tell()
    assert (len(story.attempts), story.lines) == (1, [])


def test_an_error_of_usage_is_not_tried_again():
    text = "overlap: rank 1 failed at train.py:8: UsageError: op: 'summ' is unknown\n"
    wrong = Status(cause=True, rank=1, text=text)
    story = Story(*[replace(RAISED, status=wrong)] * 4).tell()
    assert len(story.attempts) == 1
    assert story.lines[-1] == "gives up: an error of usage would come again"


def test_who_asks_it_to_end_is_obeyed():
    story = Story(KILLED, asked=signal.SIGTERM).tell()
    assert story.outcome.first_signal == signal.SIGTERM
    assert (len(story.attempts), story.lines) == (1, [])


# -- with processes ------------------------------------------------------------------------------------------------

TRAIN = """
import os, random, signal, sys, threading, time
import numpy as np
import overlap

KILLS, STEPS = int(sys.argv[1]), 120  # an attempt gets five steps further at most: enough for 20 kills

def die(after_s):
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)

async def main(rank):
    state = await rank.state.latest()
    weights, begin = (state.tree["weights"], state.step) if state else (np.linspace(0, 1, 1000), 0)
    chance = random.Random(1000 * KILLS + rank.restart)
    victim, last = chance.randrange(rank.world_size), begin + chance.randrange(1, 3)
    death = threading.Thread(target=die, args=[chance.uniform(0, 0.02)])
    for step in range(begin, STEPS):
        with rank.step(step):
            if rank.restart < KILLS and rank.rank == victim and step == last:
                death.start()
            elif death.ident is not None and step > last + 1:
                death.join()
            gradient = rank.compute(lambda w=weights: np.sin(w * (step + 1) + rank.rank))
            weights = weights - 0.1 * await rank.all_reduce(gradient, op="mean")
            await rank.state.save(step + 1, {"weights": weights})
    if rank.rank == 0:
        print("restarts", rank.restart, "weights", weights.tobytes().hex())

overlap.run(main, ranks=2)
"""


@pytest.fixture
def start(tmp_path, start_python):
    """Return a function that starts a job in a folder of its own."""

    def start(name, *options, kills, **variables):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(TRAIN)
        command = ("-m", "overlap", "run", "--state-dir", "state", *options, "train.py", kills)
        return start_python(
            *command, cwd=folder, env=environment(OVERLAP_FLIGHT_DIR=str(folder / "records"), **variables)
        )

    return start


def end(process):
    """Return the code with which it ends, the words of its output, and the lines of its errors."""
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out.split(), err.splitlines()


def check_kills(start, tmp_path, kills, *options):
    """Kill at random moments, and compare with what was never disturbed."""
    undisturbed = end(start("undisturbed", "--no-prefix", *options, kills=0))
    code, said, lines = end(start("killed", "--no-prefix", "--max-restarts", str(kills), *options, kills=kills))
    assert (code, said[:2]) == (0, ["restarts", str(kills)]), lines
    assert said[2:] == undisturbed[1][2:]
    told = [line for line in lines if line.startswith("overlap: restart ")]
    assert [line.split()[2:5] for line in told] == [[str(n), "of", f"{kills},"] for n in range(1, kills + 1)]
    assert all(" was killed by SIGKILL" in line for line in told)
    stays = [path.name for path in (tmp_path / "killed" / "records").iterdir()]
    attempts = {int(re.findall(r"-attempt(\d+)-", name)[0]) for name in stays}
    assert attempts == {*range(kills)}  # of the attempt that ended well nothing stays


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_kills_leave_the_same_bits(start, tmp_path, kills):
    check_kills(start, tmp_path, kills)


@pytest.mark.slow
def test_kills_of_one_node_of_two_leave_the_same_bits(start, tmp_path):
    check_kills(start, tmp_path, 3, "--processes", "2")


@pytest.mark.parametrize("kills", [pytest.param(6, marks=pytest.mark.slow), pytest.param(18, marks=pytest.mark.kills)])
def test_many_kills_of_one_node_of_four_leave_the_same_bits(start, tmp_path, kills):
    check_kills(start, tmp_path, kills, "--processes", "4", "--ranks-per-process", "2")


@pytest.mark.slow
def test_a_program_that_always_fails_ends_with_its_error_last(tmp_path):
    ended = launch(tmp_path, "raise ValueError('no')", "--max-restarts", "1", timeout=LIMIT_S)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert lines[0].startswith(
        "overlap: restart 1 of 1 in 1 s, from the beginning (no complete state; --state-dir or Checkpoints keep one): "
    )
    assert lines[1] == "overlap: gives up: it has been started again once, and --max-restarts allows no more"
    assert lines[-2] == "ValueError: no"


def test_who_does_not_start_the_processes_cannot_start_them_again(start):
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    code, _, lines = end(start("refused", "--max-restarts", "1", kills=0, **rank))
    message = "torchrun has started this process, and would have to start it again; leave it out"
    assert (code, lines) == (2, [f"overlap: --max-restarts: {message}"])


FURTHER = """
import os, signal
import overlap

async def main(rank):
    for step in range(5):
        with rank.step(step):
            await rank.barrier()
            if step == rank.restart < 4:
                os.kill(os.getpid(), signal.SIGKILL)

overlap.run(main)
"""


@pytest.mark.slow
def test_without_a_state_the_step_that_was_reached_is_the_progress(tmp_path):
    ended = launch(tmp_path, FURTHER, "--max-restarts", "4", "--flight-dir", "records", timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    told = [line.partition(": the process (pid ")[0] for line in ended.stderr.splitlines()]
    assert told == [
        f"overlap: restart {n} of 4, from the beginning (no complete state; --state-dir or Checkpoints keep one)"
        for n in range(1, 5)
    ]
    attempts = [int(re.findall(r"-attempt(\d)-", path.name)[0]) for path in (tmp_path / "records").iterdir()]
    assert sorted(attempts) == [0, 1, 2, 3]  # those that failed
    told = interpreters.run("-m", "overlap", "why", "records", cwd=tmp_path, timeout=LIMIT_S).stdout
    told = " ".join(told.split())
    assert re.match(r"job \S+, attempt 3: 2 ranks, 1 process, train.py, begun \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", told)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_lost_with_its_launcher_is_replaced_by_another(start, lost):
    """As on two machines: each has a launcher; one is gone, and another takes its place with the same secret."""
    secret = "00" * 32

    def start_node(node, kills):
        where = ("--nnodes", "2", "--node-rank", str(node), "--rdzv-endpoint", endpoint)
        return start("by-hand", "--no-prefix", "--max-restarts", "4", *where, kills=kills, OVERLAP_SECRET=secret)

    undisturbed = end(start("undisturbed", "--no-prefix", "--processes", "2", kills=0))
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [start_node(0, kills=2), start_node(1, kills=2)]
    while "overlap: node 1 " in nodes[lost].stderr.readline():
        pass  # then it has failed once: the others count one attempt more than who comes now
    nodes[lost].kill()
    nodes[lost] = start_node(lost, kills=2)
    codes, said = zip(*(end(node)[:2] for node in nodes), strict=True)
    assert codes == (0, 0)
    assert said[0][2:] == undisturbed[1][2:]
