"""Worlds on Dask, beyond the contract: data of the cluster, gangs beside each other, workers that differ."""

import re
from pathlib import Path

import pytest

from .dasks import DaskCluster

pytest.importorskip("distributed", reason="not installed: dask")
pytestmark = [pytest.mark.engines, pytest.mark.xdist_group("dask")]


def test_partitions_go_to_ranks_where_they_lie(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    pytest.importorskip("dask.array", reason="not installed: dask")
    driver = dask_cluster.ran(tmp_path, """
import dask.array

data = client.persist(dask.array.arange(48, chunks=4))
distributed.wait(data)
before = client.who_has(distributed.futures_of(data))

async def main(rank, partitions, more):
    own = sum(int(part.sum()) for part in partitions.values())
    total = await rank.all_reduce(np.array([own + more]))
    return sorted(partitions), int(total[0]), distributed.get_worker().address

told = run(main, 1, ranks=8, each=2, data=data)
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
    assert dask_cluster.is_clean()


@pytest.mark.slow
def test_two_gangs_never_wait_for_each_other(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    """Each has a task on every thread but one, so that only one of them can run at once."""
    driver = dask_cluster.ran(tmp_path, """
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
    told = list(pool.map(lambda number: run(main, number, ranks=4), range(4)))
open(path, "w").close()
distributed.wait(held)
tell(told)
""")  # fmt: skip
    assert driver.told == [[number] * 4 for number in range(4)]


@pytest.mark.slow
def test_two_gangs_run_at_once_where_there_is_room(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    driver = dask_cluster.ran(tmp_path, """
from concurrent.futures import ThreadPoolExecutor

async def main(rank, path, number):
    await rank.barrier()
    open(f"{path}/{number}-{rank.rank}", "w").close()
    while not os.path.exists(f"{path}/{1 - number}-{rank.rank}"):  # the other gang is here too
        await trio.sleep(0.05)
    return float((await rank.all_reduce(np.full(1, number)))[0])

with ThreadPoolExecutor(2) as pool:
    told = list(pool.map(lambda number: run(main, os.getcwd(), number, ranks=3), range(2)))
tell(told)
""")  # fmt: skip
    assert driver.told == [[0.0] * 3, [3.0] * 3]
    assert dask_cluster.is_clean()


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
    driver = dask_cluster.ran(tmp_path, """
import subprocess

command = f"{sys.argv[1]}; from distributed.cli.dask_worker import main; main()"
options = [os.environ["DASK_SCHEDULER_ADDRESS"], "--name", "odd", "--no-nanny", "--nthreads", "1", "--no-dashboard"]
odd = subprocess.Popen([sys.executable, "-c", command, *options])

async def main(rank):
    pass

def address():
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return [each for each, told in workers.items() if told["name"] == "odd"]

try:
    while not address():
        time.sleep(0.1)
    run(main, ranks=1, workers=address())
except overlap.OverlapError as error:
    tell(str(error))
finally:
    odd.terminate()
    odd.wait()
""", before)  # fmt: skip
    assert re.search(sentence, driver.told), driver.told
    assert dask_cluster.is_clean()


def test_what_dask_says_of_a_task_becomes_a_sentence() -> None:
    from overlap.dask.gang import loss_reason

    assert loss_reason(None) == "was cancelled"
    assert loss_reason(ModuleNotFoundError("No module named 'numpy'")) == (
        "has no module 'numpy', unlike the driver: install it on every worker"
    )
    assert loss_reason(OSError("disk")) == "has ended: OSError: disk"


def test_only_a_client_and_data_of_dask_are_taken(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    driver = dask_cluster.ran(tmp_path, """
async def main(rank, *partitions):
    pass

def refusal(*args, **named):
    try:
        overlap.dask.run(*args, ranks=2, **named)
    except overlap.UsageError as error:
        return str(error)

tell([refusal("client", main), refusal(client, main, data=[1, 2])])
""")  # fmt: skip
    assert driver.told == [
        "client: expected a distributed.Client that is not asynchronous, got 'client'",
        "data: expected a Dask collection or a sequence of futures, got list",
    ]
