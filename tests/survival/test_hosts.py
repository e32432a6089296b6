"""Real processes of several hosts: the others go on when a host is lost; what they read in the witness; one trace."""

import os
import re
import shutil
import signal
import socket
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

import pytest
import trio

from overlap.errors import UsageError
from overlap.processes import shared_folder
from overlap.processes.place import ProcessPlace
from overlap.processes.shared_folder import check_shared_folder, host_file_path
from overlap.timeline.files.reading import read_trace
from tests.faults.job import Job, children
from tests.interpreters import free_port

# -- real processes of several launchers, one for each host: the others go on when a whole host is lost ----------------

PROGRAM = str(Path(__file__).with_name("looping.py"))


@pytest.fixture
def start(tmp_path):
    jobs = []
    (tmp_path / "shared").mkdir()

    def begin(*options, hosts=2, last_epoch=1, witness="shared", each_its_own=False):
        endpoint = f"127.0.0.1:{free_port()}"
        common = ["--survive", "--nnodes", str(hosts), "--rdzv-endpoint", endpoint, "--grace", "1", *options]
        for host in range(hosts):
            own = f"{witness}-{host}" if each_its_own else witness
            (tmp_path / own).mkdir(exist_ok=True)
            options = [*common, "--node-rank", str(host), *["--witness", own] * bool(witness)]
            jobs.append(Job(tmp_path, *options, program=PROGRAM, arguments=[str(last_epoch)]))
        return jobs[-hosts:]

    yield begin
    for job in jobs:
        job.kill()


def pid_of(job, member):
    return int(re.search(rf"pid (\d+) of member {member} epoch 0", job.out)[1])


def kill_host(job):
    """Kill a launcher and all that it has started, at once."""
    for pid in [job.process.pid, *children(job.process.pid)]:
        with suppress(ProcessLookupError):  # the kernel ends the processes of a launcher that has ended
            os.kill(pid, signal.SIGKILL)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(
    ("options", "each"),
    [(["--processes", "2"], 2), (["--processes", "2", "--shared-memory", "0"], 2), ([], 1)],
    ids=["2x2", "sockets", "2x1"],
)
def test_the_others_go_on_when_a_host_is_lost(start, tmp_path, options, each, lost):
    hosts = start(*options)
    for job in hosts:
        job.until("goes on 0")
    kill_host(hosts[lost])
    other = hosts[1 - lost]
    assert other.end() == 0, other.err
    alive = tuple(range((1 - lost) * each, (2 - lost) * each))
    assert other.out.count(f"result {[(alive, [2 * each, each])]}") == each
    other.check_nothing_is_left()
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["witness-overlap"]


@pytest.mark.slow
def test_hosts_go_on_after_the_loss_of_a_process(start, tmp_path):
    hosts = start("--processes", "2")
    for job in hosts:
        job.until("goes on 0")
    os.kill(pid_of(hosts[0], 0), signal.SIGKILL)
    assert [job.end() for job in hosts] == [0, 0], hosts[0].err + hosts[1].err
    assert sum(job.out.count(f"result {[((1, 2, 3), [4, 3])]}") for job in hosts) == 3
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.slow
def test_a_process_that_was_stopped_finds_itself_out(start):
    hosts = start("--lost-after", "2", hosts=3)
    for job in hosts:
        job.until("goes on 0")
    stopped = pid_of(hosts[1], 1)
    os.kill(stopped, signal.SIGSTOP)
    assert [hosts[host].end() for host in (0, 2)] == [0, 0], hosts[0].err + hosts[2].err
    os.kill(stopped, signal.SIGCONT)
    assert hosts[1].end() == 1
    assert "overlap: process 1 was stopped or cut off: processes [0, 2] went on without it" in hosts[1].err
    assert "result" not in hosts[1].out


@pytest.mark.slow
def test_a_host_without_the_folder_ends(start, tmp_path):
    hosts = start("--lost-after", "2")
    for job in hosts:
        job.until("goes on 0")
    shutil.rmtree(tmp_path / "shared" / "witness-overlap")
    kill_host(hosts[0])
    assert hosts[1].end() == 1
    assert "overlap: process 1 cannot reach the witness in" in hosts[1].err
    assert "goes on 1" not in hosts[1].out


@pytest.mark.slow
def test_hosts_refuse_folders_that_they_do_not_share(start, tmp_path):
    hosts = start("--processes", "2", "--join-timeout", "2", last_epoch=0, each_its_own=True)
    assert [job.end() for job in hosts] == [2, 2], hosts[0].out + hosts[1].out
    name = socket.gethostname()
    refusal = f"--witness: node 1 ({name}) does not read in "
    for job in hosts:
        assert refusal in job.err
        assert "result" not in job.out
        job.check_nothing_is_left()


def test_several_hosts_need_a_folder(start, tmp_path):
    for job in start(witness=""):
        assert job.end() == 2
        assert "--survive: between hosts a folder decides who goes on: add --witness DIR" in job.err


def test_a_folder_is_of_one_job(start, tmp_path):
    (tmp_path / "shared" / "witness-overlap").mkdir()
    (tmp_path / "shared" / "witness-overlap" / "host-1").touch()
    hosts = start(witness="shared")
    assert hosts[1].end() == 2
    assert (
        "exists already: a job with this id still runs, or has lost this host; give all hosts another --job-id"
        in hosts[1].err
    )


# -- all hosts must read in the folder of the witness what the launcher of the first one has written there -------------

host = ContextVar[int]("host")


class Exchange:
    """The exchanges of two processes of one world."""

    def __init__(self):
        self.parts, self.complete = {}, {}

    def of(self, member):
        return Member(self, member)


class Member:
    def __init__(self, exchange, member):
        self.all, self.member = exchange, member

    async def exchange(self, name, part):
        parts = self.all.parts.setdefault(name, {})
        parts[self.member] = part
        complete = self.all.complete.setdefault(name, trio.Event())
        if len(parts) == 2:
            complete.set()
        await complete.wait()
        return [parts[0], parts[1]]


def check(monkeypatch, folder, timeout_s):
    """Return what the check of each of two hosts raises, if anything."""
    refusals = {}

    async def of_host(exchange, number):
        host.set(number)
        place = ProcessPlace(source="test", process=number, processes=2, ranks_per_process=1, node=number, nodes=2,
                      endpoint=("127.0.0.1", 1), job="test")  # fmt: skip
        try:
            await check_shared_folder(place, exchange.of(number), timeout_s)
        except UsageError as error:
            refusals[number] = str(error)

    async def main():
        exchange = Exchange()
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(of_host, exchange, number)

    for name, value in {"WITNESS": folder, "HOSTS": 2, "NNODES": 2}.items():
        monkeypatch.setenv(f"OVERLAP_{name}", str(value))
    monkeypatch.setattr(shared_folder, "_checked_folders", [])
    monkeypatch.setattr(shared_folder, "_PAUSE_S", 0.001)
    trio.run(main)
    return refusals


def test_a_number_that_is_seen_late_is_read_again(monkeypatch, tmp_path):
    host_file_path(tmp_path, 0).write_text("11 a")
    read, looks = shared_folder._read_first_hosts_file, []

    async def read_late(folder):
        looks.append(folder)
        return b"" if len(looks) in (3, 4) else await read(folder)

    monkeypatch.setattr(shared_folder, "_read_first_hosts_file", read_late)
    assert check(monkeypatch, tmp_path, 60.0) == {}
    assert len(looks) == 6  # each before the first one sends it, and then until it is there


def test_a_number_of_an_earlier_job_is_refused_on_all_hosts_by_name(monkeypatch, tmp_path):
    host_file_path(tmp_path, 0).write_text("11 a")
    read = shared_folder._read_first_hosts_file

    async def read_another(folder):  # in the folder of host 1
        return b"22 a" if host.get() else await read(folder)

    monkeypatch.setattr(shared_folder, "_read_first_hosts_file", read_another)
    refusals = check(monkeypatch, tmp_path, 0.02)
    name = socket.gethostname()
    refusal = (
        f"--witness: node 1 ({name}) does not read in {tmp_path} what node 0 has written there; name a folder on a"
    )
    assert refusals == dict.fromkeys(range(2), f"{refusal} file system that all hosts share")


def test_a_missing_file_is_not_equal_to_a_missing_file(monkeypatch, tmp_path):
    assert check(monkeypatch, tmp_path, 0.02).keys() == {0, 1}


# -- the trace of a run that survives has all of its epochs, with the ranks of the first world -------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed", [[0], *(pytest.param(killed, marks=pytest.mark.slow) for killed in ([1, 2], [2, 0]))], ids=str
)
def test_a_trace_has_all_epochs(tmp_path, killed):
    options = ["--survive", "--processes", "3", "--trace", "run.json"]
    with Job(tmp_path, *options, program=PROGRAM, arguments=[str(len(killed))]) as job:
        for epoch, member in enumerate(killed):
            job.until(f"goes on {epoch}")
            os.kill(int(re.search(rf"pid (\d+) of member {member} ", job.out)[1]), signal.SIGKILL)
        assert job.end() == 0, job.err
    timeline, alive = read_trace(tmp_path / "run.json"), sorted({0, 1, 2} - set(killed))
    assert (set(alive) <= {*timeline.ranks()}, timeline.world_size) == (True, 3)  # and spans of lost processes
    worlds = {span.info.ranks for span in timeline.spans if span.info is not None}
    members = [tuple(sorted({0, 1, 2} - set(killed[:losses]))) for losses in range(len(killed) + 1)]
    assert worlds == set(members)
    for rank in alive:
        ends = [
            [span.end_ns for span in timeline.for_rank(rank) if span.info and span.info.ranks == world]
            for world in members
        ]
        begins = [
            min(span.start_ns for span in timeline.for_rank(rank) if span.info and span.info.ranks == world)
            for world in members
        ]
        assert all(max(before) < after for before, after in zip(ends, begins[1:], strict=False))
    shown = [span.name for span in timeline.spans if span.name.startswith("epoch ")]
    assert sum("lost process" in name for name in shown) >= len(alive) * len(killed)
    assert not [*tmp_path.glob("run-process*")]
