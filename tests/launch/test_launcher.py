"""The launcher with real processes: programs that read their environment, print, fail, wait and are killed."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from overlap.cli import processes
from overlap.cli.processes import open_listener
from overlap.processes.sockets import ListenError
from tests.faults.job import ends
from tests.interpreters import ROOT, environment

LIMIT_S = 60  # of one step of a test; reached only by a launcher that hangs
HEAD = "import os, signal, sys, time\nnode = int(os.environ['GROUP_RANK'])\n"


class Job:
    """`overlap run` as a process of its own, which starts the nodes of a program."""

    def __init__(self, process):
        self.process = process

    def lines(self, count):
        return sorted(self.process.stdout.readline().decode() for _ in range(count))

    def end(self, given=b""):
        out, err = self.process.communicate(given, timeout=LIMIT_S)
        return self.process.returncode, out.decode(errors="replace"), err.decode()


@pytest.fixture
def job(tmp_path, start_python):
    """Return a function that starts a program, on two nodes if it is not told how."""

    def start(program, *options, **variables):
        (tmp_path / "train.py").write_text(f"{HEAD}{program}\n# reads sys.argv\n")
        command = ("-m", "overlap", "run", *(options or ("--processes", "2")), "train.py", "a", "--processes")
        return Job(start_python(*command, env=environment(**variables), stdin=subprocess.PIPE, text=False))

    return start


# -- starting ----------------------------------------------------------------------------------------------------

SHOW = """
import hashlib, json, socket
from overlap.config import RunConfig
from overlap.processes.place import find_place
place = find_place()
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
listener = place.listener and socket.socket(fileno=os.dup(place.listener))
print(json.dumps({
    "argv": sys.argv, "torch": [int(os.environ[name]) for name in names], "ranks": list(place.ranks),
    "endpoint": place.endpoint, "job": place.job, "secret": hashlib.sha256(place.secret).hexdigest(),
    "leads": os.getpgrp() == os.getpid(), "OVERLAP_RANKS": os.environ.get("OVERLAP_RANKS"),
    "rails": RunConfig.from_environment().rails,
    "port": listener and listener.getsockname()[1],
}))
"""


def test_each_node_finds_its_place(job):
    code, out, err = job(SHOW, "--processes", "2", "--ranks-per-process", "4", "--no-prefix", "--rails", "3").end()
    assert (code, err) == (0, "")
    first, second = sorted(map(json.loads, out.splitlines()), key=lambda shown: shown["torch"])
    assert (first.pop("torch"), second.pop("torch")) == ([0, 8, 0, 4, 0], [4, 8, 0, 4, 1])
    assert (first.pop("ranks"), second.pop("ranks")) == ([0, 1, 2, 3], [4, 5, 6, 7])
    host, port = first["endpoint"]
    assert (first.pop("port"), second.pop("port")) == (port, None)
    assert first == second
    assert (first["argv"], first["leads"], first["rails"]) == (["train.py", "a", "--processes"], True, 3)
    assert (host, first["OVERLAP_RANKS"], first["job"] != "overlap") == ("127.0.0.1", None, True)


def test_one_node_of_several_machines(job):
    where = ("--nnodes", "4", "--node-rank", "3", "--ranks", "8", "--rdzv-endpoint", "10.9.8.7:29500")
    code, out, err = job(SHOW, *where, "--no-prefix", OVERLAP_SECRET="correct horse").end()
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert (shown["torch"], shown["ranks"]) == ([6, 8, 0, 2, 3], [6, 7])
    assert (shown["endpoint"], shown["job"], shown["port"]) == (["10.9.8.7", 29500], "overlap", None)


@pytest.mark.slow
def test_what_a_member_starts_is_a_world_of_its_own(job, tmp_path):
    (tmp_path / "inner.py").write_text("from overlap.processes.place import find_place\nprint(find_place())")
    program = "import subprocess\nsubprocess.run([sys.executable, '-m', 'overlap', 'run', 'inner.py'], check=True)"
    code, out, err = job(program).end()
    assert (code, sorted(out.splitlines()), err) == (0, ["[process 0] None", "[process 1] None"], "")


def test_a_port_in_use_is_told_before_anything_starts(job):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        code, out, err = job("print('started')", "--processes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}").end()
    assert (code, out) == (2, "")
    assert err.startswith(f"overlap: --rdzv-endpoint: cannot listen at 127.0.0.1:{port}: port {port} is taken")
    assert err.count("\n") == 1


class Clock:
    """Time that passes only in a sleep."""

    def __init__(self, at_s, then):
        self.now_s, self._at_s, self._then = 0.0, at_s, then

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        if self.now_s >= self._at_s:
            self._then()


@pytest.mark.parametrize(("leaves_s", "until_s"), [(4.0, 4.0), (math.inf, 5.0)])
def test_a_port_is_waited_for_until_its_holder_leaves_or_the_time_is_over(monkeypatch, leaves_s, until_s):
    """As where a launcher takes the place of one that was killed, whose processes listen a moment longer."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        endpoint, clock = holder.getsockname(), Clock(leaves_s, holder.close)
        monkeypatch.setattr(processes, "time", clock)
        if leaves_s < math.inf:
            open_listener(endpoint, 5.0).close()
        else:
            with pytest.raises(ListenError, match="something else in this process listens there"):
                open_listener(endpoint, 5.0)
        assert until_s <= clock.now_s < until_s + 0.2


# -- output ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lines_are_whole_and_in_order(job):
    program = """
for number in range(200):
    os.write(1, b"%d " % number)
    os.write(1, b"x" * (number * 37 % 5000) + b"\\n")
os.write(1, b"\\xff\\x00last")
os.write(2, b"one\\r\\ntwo")
"""
    code, out, err = job(program, "--processes", "3").end()
    wanted = [f"{number} {'x' * (number * 37 % 5000)}" for number in range(200)] + ["\ufffd\x00last"]
    for node in range(3):
        begin = f"[process {node}] "
        assert [line[len(begin) :] for line in out.split("\n") if line.startswith(begin)] == wanted
        assert [line[len(begin) :] for line in err.split("\n") if line.startswith(begin)] == ["one", "two"]
    assert (code, out.count("\n"), err.count("\n")) == (0, 3 * len(wanted), 6)


@pytest.mark.slow
def test_the_first_node_reads_what_the_launcher_is_given(job):
    code, out, err = job("print(repr(sys.stdin.read()))").end(b"words")
    assert (code, sorted(out.splitlines()), err) == (0, ["[process 0] 'words'", "[process 1] ''"], "")


@pytest.mark.slow
def test_log_files_instead_of_the_terminal(job, tmp_path):
    program = "print('hello', node)\nif node:\n    raise ValueError('no')"
    code, out, err = job(program, "--processes", "2", "--log-dir", "logs/a").end()
    assert (code, out) == (1, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("exited with code 1; all it printed is in logs/a/process-1.log\n")
    logs = [(tmp_path / f"logs/a/process-{node}.log").read_text() for node in range(2)]
    assert logs[0] == "hello 0\n"
    assert logs[1].startswith("hello 1\nTraceback")
    assert logs[1].endswith("ValueError: no\n")


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_nodes(job):
    one = job("while True:\n    print(node, os.getpid())")
    one.lines(1)
    one.process.stdout.close()
    assert one.process.stderr.read() == b""
    assert one.process.wait(LIMIT_S) == 141


# -- failure -----------------------------------------------------------------------------------------------------

LAST = "print('bye', flush=True)\n"


def test_the_error_of_the_culprit_is_told_last_and_ends_the_others(job):
    code, out, err = job(f"{LAST}if node:\n    raise ValueError('no')\ntime.sleep(600)").end()
    assert (code, sorted(out.splitlines())) == (1, ["[process 0] bye", "[process 1] bye"])
    lines = err.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", '  File "train.py", line 5, in <module>']
    assert lines[-2] == "ValueError: no"
    assert lines[-1].startswith("overlap: process 1 (rank 1, pid ")
    assert lines[-1].endswith(") exited with code 1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        pytest.param("sys.exit(3)", 3, ") exited with code 3", marks=pytest.mark.slow),
        ("os._exit(4)", 4, ") exited with code 4, without saying why"),
        pytest.param("os.kill(os.getpid(), 9)", 137, ") was killed by SIGKILL; ", marks=pytest.mark.slow),
        pytest.param("os.kill(os.getpid(), 11)", 139, ") was killed by SIGSEGV", marks=pytest.mark.slow),
    ],
)
def test_the_exit_code_of_the_culprit_is_ours(job, tmp_path, how, code, told):
    os.mkfifo(tmp_path / "fifo")
    program = f"""
if node:
    held = os.open("fifo", os.O_WRONLY)
    {how}
open("fifo").read()  # to the end of the other process
"""
    found, _, err = job(program, "--processes", "2", "--ranks-per-process", "2").end()
    assert found == code
    assert err.count("\n") == 1
    assert err.startswith("overlap: process 1 (ranks 2-3, pid ")
    assert told in err


@pytest.mark.slow
def test_a_victim_that_ends_first_is_not_blamed(job, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    program = """
from overlap.errors import PeerFailedError
if node == 0:
    held = os.open("fifo", os.O_WRONLY)
    raise PeerFailedError("rank 1 failed", culprit=1)
open("fifo").read()  # to the end of the other process
sys.exit("the reason")
"""
    code, _, err = job(program).end()
    lines = err.splitlines()
    assert (code, lines[0], len(lines)) == (1, "the reason", 2)
    assert lines[1].startswith("overlap: process 1 ")


@pytest.mark.slow
def test_what_a_process_leaves_in_its_group_is_ended(job):
    program = """
import subprocess
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(left.pid)
"""
    code, out, err = job(program, "--processes", "2", "--no-prefix").end()
    assert (code, err) == (0, "")
    assert [ends(int(line)) for line in out.split()] == [True, True]


# -- the end that is asked for -----------------------------------------------------------------------------------


def without_patience(err):
    """The lines of stderr, but for the one that says that the launcher waits: it comes when a machine is slow."""
    return [line for line in err.splitlines() if not line.startswith("overlap: waiting up to ")]


WAIT = "print('up')\ntime.sleep(600)"


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "ended by SIGTERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, "the terminal is gone", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_nodes_in_peace(job, number, code, told):
    one = job(WAIT)
    assert one.lines(2) == ["[process 0] up\n", "[process 1] up\n"]
    one.process.send_signal(number)
    found, out, err = one.end()
    assert (found, out, without_patience(err)) == (code, "", [f"overlap: {told}"])


@pytest.mark.slow
def test_a_signal_to_one_process_names_it(job):
    one = job("print(os.getpid())\ntime.sleep(600)")
    pids = {line.split()[1]: int(line.split()[2]) for line in one.lines(2)}
    os.kill(pids["1]"], signal.SIGINT)
    code, _, err = one.end()
    named = f"overlap: process 1 (rank 1, pid {pids['1]']}) was interrupted by a SIGINT that its launcher had not sent"
    assert (code, without_patience(err)) == (130, [named])


DEAF = """
def deaf(*_):
    print("no", flush=True)
signal.signal(signal.SIGINT, deaf)
print(os.getpid(), flush=True)
while True:
    time.sleep(600)
"""


@pytest.mark.slow
def test_the_second_ctrl_c_ends_them_at_once(job):
    one = job(DEAF, "--processes", "2", "--no-prefix", "--grace", "3600")
    pids = [int(line) for line in one.lines(2)]
    one.process.send_signal(signal.SIGINT)
    assert one.lines(2) == ["no\n", "no\n"]
    one.process.send_signal(signal.SIGINT)
    code, out, err = one.end()
    assert (code, out) == (130, "")
    assert err.endswith("overlap: interrupted\n")
    assert all(ends(pid) for pid in pids)


@pytest.mark.slow
def test_after_the_grace_they_are_killed(job):
    one = job(DEAF, "--processes", "2", "--no-prefix", "--grace", "0.1")
    one.lines(2)
    one.process.send_signal(signal.SIGINT)
    code, _, err = one.end()
    assert code == 130
    *told, last = without_patience(err)
    # first the one that has waited less for a processor
    assert sorted(told) == [f"overlap: process {node} did not end within 0.1 s and is killed" for node in range(2)]
    assert last == "overlap: interrupted"


# -- the launcher's own end --------------------------------------------------------------------------------------

ENDLESS = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
if node == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
sum(range(10**15))  # one call of C code, which keeps the GIL
"""


def test_nothing_survives_a_launcher_that_is_killed(job):
    one = job(ENDLESS, "--processes", "2", "--no-prefix")
    pids = [int(word) for line in one.lines(2) for word in line.split()]
    assert len(set(pids)) == 4
    one.process.kill()
    assert one.process.wait(LIMIT_S) == -9
    assert all(ends(pid) for pid in pids)


STUCK_START = """
import os
if os.environ.get("OVERLAP_LIFELINE_FD"):
    print(os.getpid(), flush=True)
    sum(range(10**15))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets the kernel send the signal")
def test_nor_does_a_process_that_has_not_begun_to_run_our_code(job, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(STUCK_START)
    one = job("", "--processes", "2", "--no-prefix", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    pids = [int(line) for line in one.lines(2)]
    one.process.kill()
    assert all(ends(pid) for pid in pids)
