"""Real processes of several launchers, one for each host: the others go on when a whole host is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest

from tests.faults.job import Job, children
from tests.faults.test_proxy import free_port

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
    assert "is of a job that runs, or has lost this host; give all hosts another --job-id" in hosts[1].err
