"""Worlds on a cluster of Ray: results, failures, losses, restarts, ends."""

import re
import signal
from pathlib import Path

import pytest

from .clusters import example_on_ray, top_of, until
from .rays import RayCluster

pytest.importorskip("ray", reason="not installed: ray")
pytestmark = [pytest.mark.engines, pytest.mark.xdist_group("ray")]


def test_results_come_in_the_order_of_ranks_and_one_trace_of_all(ray_cluster: RayCluster, tmp_path: Path) -> None:
    driver = ray_cluster.ran(tmp_path, """
async def main(rank, x):
    got = await rank.all_reduce(np.full(4, rank.rank + x))
    return rank.rank, float(got[0]), os.getpid(), np.arange(rank.rank)

results = run(main, 1.0, ranks=4, each=2, trace="run.json")
tell([[rank, total, pid, len(array)] for rank, total, pid, array in results])
""")  # fmt: skip
    results = driver.told
    assert [(rank, total, length) for rank, total, _, length in results] == [(r, 10.0, r) for r in range(4)]
    pids = [pid for _, _, pid, _ in results]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    from overlap.timeline import read_trace

    timeline = read_trace(tmp_path / "run.json")
    assert timeline.ranks() == [0, 1, 2, 3]
    assert sum(span.name == "all_reduce" for span in timeline.spans) == 4
    assert ray_cluster.is_clean()


FAILS = """
async def main(rank):
    await rank.barrier()
    if rank.rank == 2:
        {fault}
    await rank.all_reduce(np.ones(3))

try:
    run(main, ranks=4, each={each}, flight_dir="flight")
except overlap.RankFailedError as error:
    tell([str(error), error.rank, repr(error.__cause__), getattr(error, "__notes__", [])])
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def test_an_error_of_a_rank_is_raised_on_the_driver(ray_cluster: RayCluster, tmp_path: Path) -> None:
    driver = ray_cluster.ran(tmp_path, FAILS.format(fault="raise ValueError('on purpose')", each=2))
    message, rank, cause, notes = driver.told
    line = driver.line_of("raise ValueError")
    assert message.startswith(f"rank 2 failed at driver.py:{line}: ValueError: on purpose")
    assert (rank, cause) == (2, "ValueError('on purpose')")
    assert "where rank 2 ran:" in notes[0]
    assert f'driver.py", line {line}, in main' in notes[0]
    assert len(list((tmp_path / "flight").glob("*.flight"))) == 2
    assert ray_cluster.is_clean()


@pytest.mark.parametrize("each", [1, 4])
def test_a_killed_process_is_named_with_operation_and_line(ray_cluster: RayCluster, tmp_path: Path, each: int) -> None:
    driver = ray_cluster.ran(tmp_path, FAILS.format(fault=KILL, each=each))
    message, rank, cause, _ = driver.told
    if each == 1:
        assert message.startswith("rank 2 failed: PeerLostError: process 2 (rank 2)")
        assert f"in all_reduce #1 on group 'world' (driver.py:{driver.line_of('await rank.all_reduce')})" in message
        assert (rank, cause.partition("(")[0]) == (2, "PeerLostError")
    else:  # nobody is left to tell
        assert message.startswith("rank 0 failed: PeerLostError: its process on Ray has died"), message
    assert len(list((tmp_path / "flight").glob("*.flight"))) == 4 // each  # also the record of the killed process
    assert ray_cluster.is_clean()


def test_a_lost_process_is_replaced_and_training_goes_on(ray_cluster: RayCluster, tmp_path: Path) -> None:
    driver = ray_cluster.ran(tmp_path, """
async def train(rank, steps):
    found = await rank.state.latest()
    first = 0 if found is None else found.step + 1
    for step in range(first, steps):
        with rank.step(step):
            total = await rank.all_reduce(np.ones(3))
            await trio.sleep(0.05)
        await rank.state.save(step, {"total": total})
        if rank.rank == 0 and step == 3 and rank.restart == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return first, rank.restart

tell(run(train, 8, ranks=3, max_restarts=2, state_dir="state"))
""")  # fmt: skip
    assert driver.told == [[4, 1]] * 3
    assert "overlap: restart 1 of 2, from step 3" in driver.err
    assert ray_cluster.is_clean()


SLEEPS = """
async def main(rank, path, pause_s):
    with rank.step(7):
        await rank.barrier()
        open(f"{path}/{rank.rank}", "w").close()
        await trio.sleep(pause_s)

run(main, os.getcwd(), float(sys.argv[1]), ranks=2, name="train")
"""


def runs(folder: Path) -> bool:
    return all((folder / name).exists() for name in "01")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_goes_away_takes_the_gang_along(ray_cluster: RayCluster, tmp_path: Path, how: int) -> None:
    with ray_cluster.driving(tmp_path, SLEEPS, "1000") as driver:
        until(lambda: runs(tmp_path), driver)
        driver.process.send_signal(how)
        driver.wait()
    assert ray_cluster.is_clean()


@pytest.mark.slow
def test_a_running_job_is_shown_by_top_and_a_second_one_of_its_name_is_refused(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    with ray_cluster.driving(tmp_path / "first", SLEEPS, "1000") as first:
        until(lambda: runs(tmp_path / "first"), first)
        entry, shown = top_of("train")
        assert (entry["ranks"], entry["processes"], entry["step"]) == (2, 2, 7)
        assert "2 ranks in 2 processes" in shown
        second = ray_cluster.ran(tmp_path / "second", SLEEPS, "0")
        assert "UsageError: name: a job named 'train' runs on this cluster already" in second.err
    assert ray_cluster.is_clean()
    third = ray_cluster.ran(tmp_path / "third", SLEEPS, "0")
    assert third.process.returncode == 0, third.err


def test_too_few_resources_are_told_and_waited_for_up_to_a_limit(ray_cluster: RayCluster, tmp_path: Path) -> None:
    job, lacking = "4 x {CPU: 2}, PACK", "2 places with CPU: 2"
    text = "async def main(rank):\n    pass\n\nrun(main, ranks=4, resources={'CPU': 2}, wait_s=2, name='big')\n"
    err = ray_cluster.ran(tmp_path, text).err
    assert re.search(rf"overlap: job 'big', {job}: waiting .*: {lacking}", err)
    assert re.search(rf"ResourcesError: job 'big', {job}: not there within .*: {lacking}", err)
    assert ray_cluster.is_clean()


def test_bad_input_is_told_in_a_sentence(ray_cluster: RayCluster, tmp_path: Path) -> None:
    driver = ray_cluster.ran(tmp_path, """
class Held(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.lock = threading.Lock()

async def main(rank, *args):
    await rank.barrier()
    if args == (2,) and rank.rank == 1:
        raise Held("a", "b")
    return threading.Lock() if args else None

def refusal(*args, **named):
    try:
        run(main, *args, **named)
    except overlap.OverlapError as error:
        return f"{type(error).__name__}: {error}"

tell([
    refusal(threading.Lock(), ranks=2),
    refusal(1, ranks=2),
    refusal(2, ranks=2),
    refusal(ranks=3, each=2),
    refusal(ranks=2, wait_s=0),
    refusal(ranks=2, max_restarts=-1),
    refusal(ranks=2, name=""),
])
""")  # fmt: skip
    argument, result, error, *others = driver.told
    assert argument.startswith("UsageError: argument 1 of main: cannot be sent to other processes: TypeError: ")
    assert re.match(r"UsageError: rank [01] returned <unlocked _thread.lock .*>, which cannot be sent", result)
    assert error == f"RankFailedError: rank 1 failed at driver.py:{driver.line_of('raise Held')}: Held: a"
    assert others == [
        "UsageError: ranks: 3 cannot be divided into ranks_per_actor=2; choose a multiple",
        "UsageError: wait_s: expected a positive number of seconds, got 0",
        "UsageError: max_restarts: expected an integer of 0 or more, got -1",
        "UsageError: name: expected 1 to 27 printable characters, got ''",
    ]
    assert ray_cluster.is_clean()


def test_no_log_has_the_secret(ray_cluster: RayCluster, tmp_path: Path) -> None:
    driver = ray_cluster.ran(tmp_path, """
async def main(rank):
    await rank.barrier()
    import gc
    from overlap.processes.identity import RendezvousConfig
    gc.collect()  # workers have had other gangs
    return [each.secret.hex() for each in gc.get_objects() if isinstance(each, RendezvousConfig)]

tell(run(main, ranks=2, trace="run.json"))
""")  # fmt: skip
    secrets = {secret for of_rank in driver.told for secret in of_rank}
    assert len(secrets) == 1
    secret = secrets.pop()
    assert len(secret) >= 32
    logs = ray_cluster.logs()
    assert sum(map(len, logs)) > 100
    for text in (driver.err, (tmp_path / "run.json").read_text(), *logs):
        assert secret not in text
        assert repr(bytes.fromhex(secret)) not in text


@pytest.mark.soak
@pytest.mark.parametrize("cycles", [100])
def test_jobs_leave_nothing(ray_cluster: RayCluster, tmp_path: Path, cycles: int) -> None:
    period = 3
    before = set(Path("/tmp").glob("overlap-gang-*"))  # of drivers that were killed
    driver = ray_cluster.ran(tmp_path, """
async def main(rank, fault):
    await rank.barrier()
    if rank.rank == 1 and fault == 1:
        raise ValueError("on purpose")
    if rank.rank == 1 and fault == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    await rank.barrier()

cycles, period = map(int, sys.argv[1:])
failed = 0
for cycle in range(cycles):
    try:
        run(main, cycle % period, ranks=3, flight_dir="flight")
    except overlap.RankFailedError as error:
        assert error.rank == 1, error
        failed += 1
tell(failed)
""", str(cycles), str(period))  # fmt: skip
    assert driver.told == sum(cycle % period in (1, 2) for cycle in range(cycles))
    assert ray_cluster.is_clean()
    assert set(Path("/tmp").glob("overlap-gang-*")) <= before


def test_an_example_runs_unchanged(ray_cluster: RayCluster, tmp_path: Path) -> None:
    printed = example_on_ray(tmp_path, **ray_cluster.variables)
    assert re.search(r"step 10: loss \d", printed)
    assert re.search(r"^overlap: \d+% of \d+ ms of communication was hidden", printed, re.M)
    assert ray_cluster.is_clean()
