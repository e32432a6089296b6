"""Worlds on a Dask cluster of worker processes: results, data, failures, losses, restarts, ends."""

import re
import signal
from pathlib import Path

import pytest

from .dasks import WORKERS, DaskCluster
from .rays import Driver, driving, example_on, ran, top_of, until

pytest.importorskip("distributed", reason="not installed: dask")
pytestmark = [pytest.mark.engines, pytest.mark.xdist_group("dask")]

BEGIN = """
import json, os, signal, sys, threading, time
import distributed
import numpy as np
import trio
import overlap
import overlap.dask

def tell(value):
    print("TOLD", json.dumps(value), flush=True)

client = distributed.Client(os.environ["DASK_ADDRESS"])
client.wait_for_workers(4)
"""


def dask_ran(cluster: DaskCluster, folder: Path, text: str, *args: str) -> Driver:
    return ran("", folder, BEGIN + text, *args, DASK_ADDRESS=cluster.address)


NOTHING = [{"tasks": [], "unrunnable": [], "variables": [], "leases": []}, [[]] * WORKERS]


def test_results_come_in_the_order_of_ranks_and_one_trace_of_all(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    driver = dask_ran(dask_cluster, tmp_path, """
async def main(rank, x):
    got = await rank.all_reduce(np.full(4, rank.rank + x))
    return rank.rank, float(got[0]), os.getpid()

tell(overlap.dask.run(client, main, 1.0, ranks=4, ranks_per_worker=2, trace="run.json"))
""")  # fmt: skip
    told = driver.told
    assert [(rank, total) for rank, total, _ in told] == [(rank, 10.0) for rank in range(4)]
    pids = [pid for _, _, pid in told]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    from overlap.timeline import read_trace

    assert read_trace(tmp_path / "run.json").ranks() == [0, 1, 2, 3]
    assert until(lambda: dask_cluster.left() == NOTHING)


def test_partitions_go_to_ranks_where_they_lie(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    pytest.importorskip("dask.array", reason="not installed: dask")
    driver = dask_ran(dask_cluster, tmp_path, """
import dask.array

data = client.persist(dask.array.arange(48, chunks=4))
distributed.wait(data)
before = client.who_has(distributed.futures_of(data))

async def main(rank, partitions, more):
    own = sum(int(part.sum()) for part in partitions.values())
    total = await rank.all_reduce(np.array([own + more]))
    return sorted(partitions), int(total[0]), distributed.get_worker().address

told = overlap.dask.run(client, main, 1, ranks=8, ranks_per_worker=2, data=data)
after = client.who_has(distributed.futures_of(data))
keys = [future.key for future in distributed.futures_of(data)]
near = [address in before[keys[number]] for numbers, _, address in told for number in numbers]
tell([[numbers for numbers, _, _ in told], [total for _, total, _ in told], near, before == after])
""")  # fmt: skip
    numbers, totals, near, unmoved = driver.told
    assert sorted(number for each in numbers for number in each) == list(range(12))
    assert totals == [sum(range(48)) + 8] * 8
    assert near == [True] * 12
    assert unmoved
    assert until(lambda: dask_cluster.left() == NOTHING)


FAILS = """
async def main(rank):
    await rank.barrier()
    if rank.rank == 1:
        {fault}
    await rank.all_reduce(np.ones(3))

try:
    overlap.dask.run(client, main, ranks=3, flight_dir="flight")
except overlap.RankFailedError as error:
    tell([str(error), error.rank, repr(error.__cause__)])
"""


@pytest.mark.parametrize(
    ("fault", "begin", "cause"),
    [
        ("raise ValueError('on purpose')", "rank 1 failed at driver.py:18: ValueError: on purpose", "ValueError"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 failed: PeerLostError: process 1 (rank 1)", "PeerLostError"),
    ],
    ids=["raises", "killed"],
)  # fmt: skip
def test_the_first_failure_is_raised_on_the_driver(
    dask_cluster: DaskCluster, tmp_path: Path, fault: str, begin: str, cause: str
) -> None:
    driver = dask_ran(dask_cluster, tmp_path, FAILS.format(fault=fault))
    message, rank, error = driver.told
    assert message.startswith(begin)
    assert (rank, error.partition("(")[0]) == (1, cause)
    if cause == "PeerLostError":
        assert "in all_reduce #1 on group 'world' (driver.py:19)" in message
    assert len(list((tmp_path / "flight").glob("*.flight"))) == 3
    assert until(lambda: dask_cluster.left() == NOTHING)


TRAINS = """
async def train(rank, steps, pause_s):
    found = await rank.state.latest()
    first = 0 if found is None else found.step + 1
    for step in range(first, steps):
        with rank.step(step):
            total = await rank.all_reduce(np.ones(3))
            await trio.sleep(pause_s)
        await rank.state.save(step, {"total": total})
        if rank.rank == 0 and step == 3 and rank.restart == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return first, rank.restart

if sys.argv[2:]:
    threading.Timer(float(sys.argv[2]), lambda: os.kill(os.getpid(), int(sys.argv[3]))).start()
tell(overlap.dask.run(client, train, 8, float(sys.argv[1]), ranks=3, max_restarts=2, state_dir="state"))
"""


def test_a_lost_worker_is_replaced_and_training_goes_on(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    driver = dask_ran(dask_cluster, tmp_path, TRAINS, "0.05")
    assert driver.told == [[4, 1]] * 3
    assert "overlap: restart 1 of 2, from step 3" in driver.err
    assert until(lambda: dask_cluster.left() == NOTHING)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_client_that_goes_away_takes_the_gang_along(dask_cluster: DaskCluster, tmp_path: Path, how: int) -> None:
    dask_ran(dask_cluster, tmp_path, TRAINS, "1000", "4", str(int(how)))
    # the lease of its name and that of a gang that starts end some time after a driver that was killed
    assert until(lambda: dask_cluster.left() == NOTHING)


@pytest.mark.slow
def test_two_gangs_never_wait_for_each_other(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    """Each has a task on every thread but one, so that only one of them can run at once."""
    driver = dask_ran(dask_cluster, tmp_path, """
from concurrent.futures import ThreadPoolExecutor

async def main(rank, number):
    await rank.barrier()
    return number

def hold(path):
    while not os.path.exists(path):
        time.sleep(0.05)

# one thread of each worker is taken
path, workers = os.path.abspath("over"), client.scheduler_info(n_workers=-1)["workers"]
held = [client.submit(hold, path, workers=[each], pure=False) for each in workers]
with ThreadPoolExecutor(4) as pool:
    told = list(pool.map(lambda number: overlap.dask.run(client, main, number, ranks=4), range(4)))
open(path, "w").close()
distributed.wait(held)
tell(told)
""")  # fmt: skip
    assert driver.told == [[number] * 4 for number in range(4)]


def test_too_few_workers_are_told_and_waited_for_up_to_a_limit(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    driver = dask_ran(dask_cluster, tmp_path, """
async def main(rank):
    pass

overlap.dask.run(client, main, ranks=6, wait_s=5, name="big")
""")  # fmt: skip
    assert re.search(r"overlap: job 'big', 6 workers: waiting .*: 2 more workers; there are 4", driver.err)
    assert re.search(r"ResourcesError: job 'big', 6 workers: not there within .*: 2 more workers", driver.err)
    assert until(lambda: dask_cluster.left() == NOTHING)


@pytest.mark.slow
def test_a_running_job_is_shown_by_top_and_a_second_one_of_its_name_is_refused(
    dask_cluster: DaskCluster, tmp_path: Path
) -> None:
    text = (
        BEGIN
        + """
async def main(rank, path, pause_s):
    with rank.step(7):
        await rank.barrier()
        open(f"{path}/{rank.rank}", "w").close()
        await trio.sleep(pause_s)

overlap.dask.run(client, main, os.getcwd(), float(sys.argv[1]), ranks=2, name="train")
"""
    )
    with driving("", tmp_path / "first", text, "1000", DASK_ADDRESS=dask_cluster.address) as first:
        until(lambda: all((tmp_path / "first" / name).exists() for name in "01"), first)
        entry, shown = top_of("train")
        assert (entry["ranks"], entry["processes"], entry["step"]) == (2, 2, 7)
        assert "2 ranks in 2 processes" in shown
        second = dask_ran(dask_cluster, tmp_path / "second", text.removeprefix(BEGIN), "0")
        assert "UsageError: name: a job named 'train' runs on this cluster already" in second.err
    assert until(lambda: dask_cluster.left() == NOTHING)


@pytest.mark.slow
def test_two_gangs_run_at_once_where_there_is_room(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    driver = dask_ran(dask_cluster, tmp_path, """
from concurrent.futures import ThreadPoolExecutor

async def main(rank, path, number):
    await rank.barrier()
    open(f"{path}/{number}-{rank.rank}", "w").close()
    while not os.path.exists(f"{path}/{1 - number}-{rank.rank}"):  # the other gang is here too
        await trio.sleep(0.05)
    return float((await rank.all_reduce(np.full(1, number)))[0])

with ThreadPoolExecutor(2) as pool:
    told = list(pool.map(lambda number: overlap.dask.run(client, main, os.getcwd(), number, ranks=3), range(2)))
tell(told)
""")  # fmt: skip
    assert driver.told == [[0.0] * 3, [3.0] * 3]
    assert until(lambda: dask_cluster.left() == NOTHING)


def test_no_log_has_the_secret(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    driver = dask_ran(dask_cluster, tmp_path, """
async def main(rank):
    await rank.barrier()
    import gc
    from overlap.processes.identity import RendezvousConfig
    gc.collect()  # workers have had other gangs
    return [each.secret.hex() for each in gc.get_objects() if isinstance(each, RendezvousConfig)]

found = overlap.dask.run(client, main, ranks=2, trace="run.json")
events = client.get_events()
logs = [client.get_scheduler_logs(), client.get_worker_logs(), client.get_worker_logs(nanny=True), events]
tell([found, [str(each) for each in logs]])
""")  # fmt: skip
    found, logs = driver.told
    secrets = {secret for of_rank in found for secret in of_rank}
    assert len(secrets) == 1
    secret = secrets.pop()
    assert len(secret) >= 32
    assert sum(map(len, logs)) > 100
    for text in (driver.err, (tmp_path / "run.json").read_text(), *logs):
        assert secret not in text
        assert repr(bytes.fromhex(secret)) not in text


def test_bad_input_is_told_in_a_sentence(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    driver = dask_ran(dask_cluster, tmp_path, """
class Held(Exception):
    def __init__(self):
        super().__init__("held")
        self.lock = threading.Lock()

async def main(rank, *args):
    await rank.barrier()
    if args == (2,) and rank.rank == 1:
        raise Held()
    return threading.Lock() if args else None

def told(*args, **named):
    try:
        overlap.dask.run(*args, **named)
    except overlap.OverlapError as error:
        return f"{type(error).__name__}: {error}"

tell([
    told("client", main, ranks=2),
    told(client, main, threading.Lock(), ranks=2),
    told(client, main, 1, ranks=2),
    told(client, main, 2, ranks=2),
    told(client, main, ranks=3, ranks_per_worker=2),
    told(client, main, ranks=2, data=[1, 2]),
    told(client, main, ranks=2, wait_s=0),
    told(client, main, ranks=2, max_restarts=-1),
    told(client, main, ranks=2, name=""),
])
""")  # fmt: skip
    told = driver.told
    assert told[0] == "UsageError: client: expected a distributed.Client that is not asynchronous, got 'client'"
    assert told[1].startswith("UsageError: argument 1 of main: cannot be sent to other processes: TypeError: ")
    assert re.match(r"UsageError: rank [01] returned <unlocked _thread.lock .*>, which cannot be sent", told[2])
    assert told[3] == "RankFailedError: rank 1 failed at driver.py:23: Held: held"
    assert told[4:] == [
        "UsageError: ranks: 3 cannot be divided into ranks_per_worker=2",
        "UsageError: data: expected a Dask collection or a sequence of futures, got list",
        "UsageError: wait_s: expected a positive number of seconds, got 0",
        "UsageError: max_restarts: expected 0 or more, got -1",
        "UsageError: name: expected 1 to 27 printable characters, got ''",
    ]
    assert until(lambda: dask_cluster.left() == NOTHING)


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        (
            "import sys; sys.path.insert(0, 'lacking')",
            "worker tcp://.* cannot import overlap: ModuleNotFoundError: No module named 'numpy'; install it",
        ),
        (
            "import importlib.metadata as m; v = m.version; m.version = lambda n: '9.9' if n == 'overlap' else v(n)",
            r"process 0 has overlap 9\.9 on .*, and the driver has overlap 0\.1\.0 on .*: install one version",
        ),
    ],
    ids=["no numpy", "another version"],
)
def test_a_worker_that_differs_is_told_in_a_sentence(
    dask_cluster: DaskCluster, tmp_path: Path, before: str, sentence: str
) -> None:
    (tmp_path / "lacking" / "numpy").mkdir(parents=True)
    (tmp_path / "lacking" / "numpy" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'numpy'\")"
    )
    driver = dask_ran(dask_cluster, tmp_path, """
import subprocess

command = f"{sys.argv[1]}; from distributed.cli.dask_worker import main; main()"
options = [os.environ["DASK_ADDRESS"], "--name", "odd", "--no-nanny", "--nthreads", "1", "--no-dashboard"]
odd = subprocess.Popen([sys.executable, "-c", command, *options])

async def main(rank):
    pass

def address():
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return [each for each, told in workers.items() if told["name"] == "odd"]

try:
    while not address():
        time.sleep(0.1)
    overlap.dask.run(client, main, ranks=1, workers=address())
except overlap.OverlapError as error:
    tell(str(error))
finally:
    odd.terminate()
    odd.wait()
""", before)  # fmt: skip
    assert re.search(sentence, driver.told), driver.told
    assert until(lambda: dask_cluster.left() == NOTHING)


@pytest.mark.soak
@pytest.mark.parametrize("cycles", [100])
def test_gangs_leave_nothing(dask_cluster: DaskCluster, tmp_path: Path, cycles: int) -> None:
    before = set(Path("/tmp").glob("overlap-gang-*"))  # of drivers that were killed
    driver = dask_ran(dask_cluster, tmp_path, """
async def main(rank, cycle):
    await rank.barrier()
    if rank.rank == 1 and cycle % 10 == 1:
        raise ValueError("on purpose")
    if rank.rank == 1 and cycle % 10 == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    await rank.barrier()

failed = 0
for cycle in range(int(sys.argv[1])):
    try:
        overlap.dask.run(client, main, cycle, ranks=3, flight_dir="flight")
    except overlap.RankFailedError as error:
        assert error.rank == 1, error
        failed += 1
tell(failed)
""", str(cycles))  # fmt: skip
    assert driver.told == 2 * cycles // 10
    assert until(lambda: dask_cluster.left() == NOTHING)
    assert set(Path("/tmp").glob("overlap-gang-*")) <= before


def test_an_example_runs_unchanged(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    told = example_on("dask", tmp_path, DASK_SCHEDULER_ADDRESS=dask_cluster.address)
    assert re.search(r"^overlap: \d+% of \d+ ms of communication was hidden", told, re.M)
    assert until(lambda: dask_cluster.left() == NOTHING)


def test_what_dask_says_of_a_task_becomes_a_sentence() -> None:
    from overlap.dask.gang import loss_reason

    assert loss_reason(None) == "was cancelled"
    assert loss_reason(ModuleNotFoundError("No module named 'numpy'")) == (
        "has no module 'numpy', unlike the driver: install it on every worker"
    )
    assert loss_reason(OSError("disk")) == "has ended: OSError: disk"
