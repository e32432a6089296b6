"""What a launcher gives its processes: which cores they keep to, and a folder in memory that ends with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from overlap.kernel_facts import process_identity
from overlap.launch import memory_folder as module
from overlap.launch.binding import bound_to_cores, share_cores, share_own_cores, sort_cores_by_package
from overlap.launch.memory_folder import memory_folder
from tests.faults.job import Job
from tests.interpreters import Python, environment
from transports.patience import usable_cores

# -- which cores the processes of a launch keep to ---------------------------------------------------------------------

ANY = frozenset[int]()


@pytest.mark.parametrize(
    ("cores", "processes", "expected"),
    [
        ([0, 1], 2, [{0}, {1}]),
        ([4, 0, 5, 1], 2, [{4, 0}, {5, 1}]),
        ([0, 1, 2, 3, 4], 2, [{0, 1, 4}, {2, 3, 4}]),  # what is left over belongs to all
        ([0, 1], 4, [{0}, {1}, {0}, {1}]),  # neighbours run at the same time
        ([3], 2, [{3}, {3}]),
        ([0, 1], 3, [ANY] * 3),  # two would have half a core each, and one a whole one
    ],
)
def test_shares_are_as_large_for_all(cores: list[int], processes: int, expected: list[set[int]]) -> None:
    assert share_cores(cores, processes) == expected


def test_threads_of_one_unit_stand_side_by_side(tmp_path: Path) -> None:
    for core, (package, unit) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0), (0, 1), (1, 1)]):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{unit}\n")  # and no die_id, as of older systems
    assert sort_cores_by_package(range(8), str(tmp_path)) == [0, 4, 2, 6, 1, 5, 3, 7]


def test_cores_of_which_nothing_is_said_keep_their_order(tmp_path: Path) -> None:
    assert sort_cores_by_package([2, 0, 1], str(tmp_path)) == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no process to cores")
def test_who_starts_them_keeps_its_own_cores() -> None:
    before = usable_cores()
    one = frozenset({min(before)})
    with bound_to_cores(one):
        assert usable_cores() == one
    assert usable_cores() == before
    with bound_to_cores(ANY):
        assert usable_cores() == before
    with bound_to_cores(frozenset({1 << 12})):  # there is no such
        assert usable_cores() == before
    assert usable_cores() == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no process to cores")
def test_shares_are_of_the_cores_that_this_thread_may_use() -> None:
    one = frozenset({min(usable_cores())})
    with bound_to_cores(one):
        assert share_own_cores(2) == [one, one]


_TELLS = """
import os, overlap
async def main(rank):
    told = await rank.all_gather_object(sorted(os.sched_getaffinity(0)))
    if rank.rank == 0: print(told)
overlap.run(main)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    len(usable_cores()) < 2 or sys.platform != "linux", reason="there are no two cores to be shared out"
)
@pytest.mark.parametrize(("options", "bound"), [([], True), (["--no-bind"], False)])
def test_each_process_of_a_launch_keeps_to_its_share(tmp_path: Path, options: list[str], bound: bool) -> None:
    (tmp_path / "tells.py").write_text(_TELLS)
    cores = sorted(usable_cores())
    command = ("-m", "overlap", "run", "--processes", "2", "--no-prefix", *options, "tells.py")
    job = Python(*command, cwd=tmp_path, env=environment())
    told, _ = job.communicate(timeout=60)
    expected = [sorted(share) for share in share_cores(sort_cores_by_package(cores), 2)] if bound else [cores, cores]
    assert told == f"{expected}\n"


# -- the folder of a launcher in memory ends with it, or with the start of the next one --------------------------------

PROGRAM = str(Path(__file__).parents[1] / "survival" / "looping.py")


@pytest.fixture
def memory(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_MEMORY", tmp_path)
    return tmp_path


def test_a_start_removes_the_folders_of_launchers_that_have_ended(memory):
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        identity = process_identity(ended.pid)
    owners = {"ended": identity, "elsewhere": identity.replace("/pid:", "/pid:9"), "unknown": "", "lives": None}
    for name, owner in owners.items():
        (memory / f"witness-{name}" / "state").mkdir(parents=True)
        (memory / f"witness-{name}" / "state" / "weights").write_text("many")
        (memory / f"witness-{name}" / "launcher").write_text(process_identity() if owner is None else owner)
    (memory / "witness-of-another-program").mkdir()
    others = {*memory.iterdir()} - {memory / "witness-ended"}
    with memory_folder() as first, memory_folder() as second:
        assert {*memory.iterdir()} == others | {first, second}
        assert first.stat().st_mode & 0o777 == 0o700
        (second / "file").touch()
    assert {*memory.iterdir()} == others


@pytest.mark.slow
def test_the_next_job_removes_the_folder_of_a_killed_launcher(tmp_path):
    jobs = [Job(tmp_path, "--survive", "--processes", "2", program=PROGRAM, arguments=["9"])]
    try:
        jobs[0].until("goes on 0")
        folder = folder_of(jobs[0])
        os.kill(jobs[0].process.pid, signal.SIGKILL)
        jobs[0].end()
        jobs.append(Job(tmp_path, "--survive", "--processes", "2", program=PROGRAM, arguments=["9"]))
        jobs[1].until("goes on 0")
        assert not folder.exists()
        own = folder_of(jobs[1])
        jobs.append(Job(tmp_path, "--processes", "2", program=PROGRAM, arguments=["0"]))
        assert jobs[2].end() == 0, jobs[2].err
        assert own.exists()
        jobs[1].process.send_signal(signal.SIGTERM)
        jobs[1].end()
        assert not own.exists()
    finally:
        for job in jobs:
            job.kill()


def folder_of(job):
    """Return the folder of a launcher that runs."""
    return next(Path("/dev/shm").glob(f"witness-{job.process.pid}-*"))
