"""Worlds on a Ray cluster of two node processes: results, failures, losses, restarts, ends."""

import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from .rays import RayCluster, driving, example_on, ran, top_of, until

pytest.importorskip("ray", reason="not installed: ray")
pytestmark = [pytest.mark.engines, pytest.mark.xdist_group("ray")]

BEGIN = """
import json, os, signal, sys, time
import numpy as np
import trio
import overlap
import overlap.ray

def tell(value):
    print("TOLD", json.dumps(value), flush=True)
"""


NOTHING: dict[str, list[str]] = {"groups": [], "actors": []}


def members() -> list[int]:
    """Return the processes of actors of gangs."""
    told = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in told.splitlines() if "ray::MemberActor" in line]


def test_results_come_in_the_order_of_ranks_and_one_trace_of_all(ray_cluster: RayCluster, tmp_path: Path) -> None:
    driver = ran(ray_cluster.address, tmp_path, BEGIN + """
async def main(rank, x):
    got = await rank.all_reduce(np.full(4, rank.rank + x))
    return rank.rank, float(got[0]), os.getpid(), np.arange(rank.rank)

told = overlap.ray.run(main, 1.0, ranks=4, ranks_per_actor=2, strategy="SPREAD", trace="run.json")
import ray
job = ray.get_runtime_context().get_job_id()
actors = [each["ActorClassName"] for each in ray._private.state.actors().values() if each["JobID"] == job]
tell([[[rank, total, pid, len(array)] for rank, total, pid, array in told], actors])
""")  # fmt: skip
    told, actors = driver.told
    assert actors == ["MemberActor"] * 2  # another process, to meet in, would take a second to start
    assert [(rank, total, length) for rank, total, _, length in told] == [(r, 10.0, r) for r in range(4)]
    pids = [pid for _, _, pid, _ in told]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    from overlap.timeline import read_trace

    timeline = read_trace(tmp_path / "run.json")
    assert timeline.ranks() == [0, 1, 2, 3]
    assert sum(span.name == "all_reduce" for span in timeline.spans) == 4
    assert until(lambda: ray_cluster.left() == NOTHING)


FAILS = (
    BEGIN
    + """
async def main(rank):
    await rank.barrier()
    if rank.rank == 2:
        {fault}
    await rank.all_reduce(np.ones(3))

try:
    overlap.ray.run(main, ranks=4, ranks_per_actor={each}, flight_dir="flight")
except overlap.RankFailedError as error:
    tell([str(error), error.rank, repr(error.__cause__), error.__notes__])
"""
)


def test_an_error_of_a_rank_is_raised_on_the_driver(ray_cluster: RayCluster, tmp_path: Path) -> None:
    text = FAILS.format(fault="raise ValueError('on purpose')", each=2)
    driver = ran(ray_cluster.address, tmp_path, text)
    message, rank, cause, notes = driver.told
    assert message.startswith("rank 2 failed at driver.py:14: ValueError: on purpose")
    assert (rank, cause) == (2, "ValueError('on purpose')")
    assert "where rank 2 ran:" in notes[0]
    assert 'driver.py", line 14, in main' in notes[0]
    assert len(list((tmp_path / "flight").glob("*.flight"))) == 2
    assert until(lambda: ray_cluster.left() == NOTHING)


@pytest.mark.parametrize("each", [1, 4])
def test_a_killed_actor_is_named_with_operation_and_line(ray_cluster: RayCluster, tmp_path: Path, each: int) -> None:
    text = FAILS.format(fault="os.kill(os.getpid(), signal.SIGKILL)", each=each)
    driver = ran(ray_cluster.address, tmp_path, text)
    message, rank, cause, _ = driver.told
    if each == 1:
        assert message.startswith("rank 2 failed: PeerLostError: process 2 (rank 2) is lost")
        assert "in all_reduce #1 on group 'world' (driver.py:15)" in message
        assert (rank, cause.partition("(")[0]) == (2, "PeerLostError")
    else:  # nobody is left to tell
        assert message.startswith("rank 0 failed: PeerLostError: its process on Ray has died")
    assert len(list((tmp_path / "flight").glob("*.flight"))) == 4 // each  # also the record of the killed process
    assert until(lambda: ray_cluster.left() == NOTHING)


@pytest.mark.parametrize("member", [0, 1])
def test_an_actor_that_dies_before_all_have_met_is_named(ray_cluster: RayCluster, tmp_path: Path, member: int) -> None:
    driver = ran(ray_cluster.address, tmp_path, BEGIN + """
from overlap.engines.member import GangMember

class Deadly:
    def __reduce__(self):
        return die_in, (int(sys.argv[1]),)

def die_in(victim):
    frame = sys._getframe()
    while not isinstance(member := frame.f_locals.get("self"), GangMember):
        frame = frame.f_back
    if member._member == victim:
        os.kill(os.getpid(), signal.SIGKILL)

async def main(rank, deadly):
    await rank.barrier()

try:
    overlap.ray.run(main, Deadly(), ranks=2)
except overlap.RankFailedError as error:
    tell([str(error), error.rank])
""", str(member))  # fmt: skip
    message, rank = driver.told
    assert message.startswith(f"rank {member} failed: PeerLostError: its process on Ray has died"), message
    assert rank == member
    assert until(lambda: ray_cluster.left() == NOTHING)


TRAINS = (
    BEGIN
    + """
async def train(rank, steps, pause_s):
    found = await rank.state.latest()
    first = 0 if found is None else found.step + 1
    for step in range(first, steps):
        if step == 8 and rank.restart == 0:
            await trio.sleep_forever()  # until a node is lost
        with rank.step(step):
            total = await rank.all_reduce(np.ones(3))
            await trio.sleep(pause_s)
        await rank.state.save(step, {"total": total})
        if rank.rank == 0:
            print("kept step", step, flush=True)
    return first, rank.restart, os.environ["RAY_NODE_ID"] if "RAY_NODE_ID" in os.environ else ""

told = overlap.ray.run(
    train, 12, 0.1, ranks=4, strategy="SPREAD", max_restarts=3, state_dir="state", trace="run.json", wait_s=60
)
tell(told)
"""
)


def test_a_lost_node_is_replaced_and_training_goes_on(ray_cluster: RayCluster, tmp_path: Path) -> None:
    with driving(ray_cluster.address, tmp_path, TRAINS) as driver:
        driver.said("kept step 3")
        ray_cluster.lose(ray_cluster.nodes.pop())
        ray_cluster.nodes.append(ray_cluster.add())
        assert driver.wait() == 0, driver.err
    told = driver.told
    assert {restart for _, restart, _ in told} == {1}
    assert all(first >= 4 for first, _, _ in told)
    assert re.search(r"overlap: restart 1 of 3( in 1 s)?, from step \d", driver.err), driver.err
    assert until(lambda: ray_cluster.left() == NOTHING)
    assert members() == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_goes_away_takes_the_gang_along(ray_cluster: RayCluster, tmp_path: Path, how: int) -> None:
    with driving(ray_cluster.address, tmp_path, TRAINS.replace("0.1,", "30,")) as driver:
        until(lambda: len(members()) == 4 and list((tmp_path).glob("state/*")) == [], driver)
        driver.process.send_signal(how)
        driver.wait()
        until(lambda: not members(), driver)
    assert until(lambda: ray_cluster.left() == NOTHING)


@pytest.mark.slow
def test_a_running_job_is_shown_by_top_and_a_second_one_of_its_name_is_refused(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    text = (
        BEGIN
        + """
async def main(rank, pause_s):
    with rank.step(7):
        await rank.barrier()
        print("here", flush=True)
        await trio.sleep(pause_s)

overlap.ray.run(main, float(sys.argv[1]), ranks=2, name="train")
"""
    )
    with driving(ray_cluster.address, tmp_path / "first", text, "1000") as first:
        first.said("here")
        entry, shown = top_of("train")
        assert (entry["ranks"], entry["processes"], entry["step"]) == (2, 2, 7)
        assert sorted(entry["pids"]) == sorted(members())
        assert "2 ranks in 2 processes" in shown
        second = ran(ray_cluster.address, tmp_path / "second", text, "0")
        assert "UsageError: name: a job named 'train' runs on this cluster already" in second.err
    until(lambda: not members())
    third = ran(ray_cluster.address, tmp_path / "third", text, "0")
    assert third.process.returncode == 0, third.err


def test_too_few_resources_are_told_and_waited_for_up_to_a_limit(ray_cluster: RayCluster, tmp_path: Path) -> None:
    driver = ran(ray_cluster.address, tmp_path, BEGIN + """
async def main(rank):
    pass

overlap.ray.run(main, ranks=4, resources={"CPU": 2}, wait_s=2, name="big")
""")  # fmt: skip
    assert (
        "overlap: job 'big', 4 x {CPU: 2}, PACK: waiting for resources, up to 2 s: 2 places with CPU: 2" in driver.err
    )
    assert "ResourcesError: job 'big', 4 x {CPU: 2}, PACK: not there within 2 s: 2 places with CPU: 2" in driver.err
    assert until(lambda: ray_cluster.left() == NOTHING)


BAD = (
    BEGIN
    + """
import threading

class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(a)

async def main(rank, *args):
    await rank.barrier()
    if {raises} and rank.rank == 1:
        raise Odd("a", "b")
    return {result}

overlap.ray.run(main, {args} ranks=2, runtime_env={env})
"""
)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ({"args": "threading.Lock(),"}, "UsageError: argument 1 of main: cannot be sent to other processes"),
        (
            {"result": "threading.Lock()"},
            r"UsageError: rank [01] returned <unlocked _thread.lock .*>, which cannot be sent",
        ),
        ({"raises": "True"}, r"rank 1 failed at driver.py:20: Odd: a"),
        ({"env": "{'env_vars': {'PYTHONPATH': 'lacking'}}"}, "has no module 'numpy'"),
        (
            {"env": "{'env_vars': {'PYTHONPATH': 'other'}}"},
            r"has overlap 9\.9 on .*, and the driver has overlap 0\.1\.0 on .*: install one",
        ),
    ],
    ids=["argument", "result", "error", "no numpy", "another version"],
)
def test_bad_input_is_told_in_a_sentence(
    ray_cluster: RayCluster, tmp_path: Path, case: dict[str, str], sentence: str
) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "lacking" / "numpy").mkdir(parents=True)
    (tmp_path / "lacking" / "numpy" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'numpy'\")"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nv = m.version\nm.version = lambda n: '9.9' if n == 'overlap' else v(n)\n"
    )
    fields = {"raises": "False", "result": "None", "args": "", "env": "None"} | case
    for name in ("lacking", "other"):
        fields["env"] = fields["env"].replace(f"'{name}'", repr(f"{tmp_path / name}:{root}"))
    driver = ran(ray_cluster.address, tmp_path, BAD.format(**fields))
    assert driver.process.returncode == 1
    assert re.search(sentence, driver.err), driver.err
    assert until(lambda: ray_cluster.left() == NOTHING)


def test_no_log_has_the_secret(ray_cluster: RayCluster, tmp_path: Path) -> None:
    driver = ran(ray_cluster.address, tmp_path, BEGIN + """
async def main(rank):
    await rank.barrier()
    import gc
    from overlap.processes.identity import RendezvousConfig
    return [each.secret.hex() for each in gc.get_objects() if isinstance(each, RendezvousConfig)]

tell(overlap.ray.run(main, ranks=2, trace="run.json"))
""")  # fmt: skip
    secrets = {secret for of_rank in driver.told for secret in of_rank}
    assert len(secrets) == 1
    secret = secrets.pop()
    assert len(secret) >= 32
    told = driver.err + (tmp_path / "run.json").read_text()
    logs = [path for path in (ray_cluster.session / "logs").rglob("*") if path.is_file()]
    assert len(logs) > 10
    for text in (told, *(path.read_text(errors="replace") for path in logs)):
        assert secret not in text
        assert repr(bytes.fromhex(secret)) not in text


def test_actors_of_others_meet_in_a_store(ray_cluster: RayCluster, tmp_path: Path) -> None:
    driver = ran(ray_cluster.address, tmp_path, BEGIN + """
import asyncio, ray

@ray.remote
class Worker:
    def work(self, rank, size):
        with overlap.connect(rank, size, store=overlap.ray.store("mine")) as world:
            return float(world.rank.all_reduce(np.ones(3)).result(60)[0])

@ray.remote
class AsyncWorker:
    async def in_the_loop(self):
        overlap.connect(0, 2, store=overlap.ray.store("other"))

    async def work(self, rank, size):
        return await asyncio.to_thread(self._work, rank, size)

    def _work(self, rank, size):
        with overlap.connect(rank, size, store=overlap.ray.store("mine")) as world:
            return float(world.rank.all_reduce(np.ones(3)).result(60)[0])

@ray.remote(max_concurrency=2)
class Threaded(object):
    def work(self, rank, size):
        with overlap.connect(rank, size, store=overlap.ray.store("threads")) as world:
            return float(world.rank.all_reduce(np.ones(3)).result(60)[0])

ray.init()
workers = [Worker.remote(), AsyncWorker.remote(), AsyncWorker.remote()]
print(ray.get([worker.work.remote(rank, 3) for rank, worker in enumerate(workers)]))
threads = Threaded.remote()
print(ray.get([threads.work.remote(rank, 2) for rank in range(2)]))
try:
    ray.get(workers[1].in_the_loop.remote())
except overlap.UsageError as error:
    print(error)
""")  # fmt: skip
    lines = driver.out.splitlines()
    assert lines[:2] == ["[3.0, 3.0, 3.0]", "[2.0, 2.0]"], driver.err
    assert "connect in a thread: await asyncio.to_thread(overlap.connect, ...)" in driver.out


@pytest.mark.soak
@pytest.mark.parametrize("cycles", [99])
def test_gangs_leave_nothing(ray_cluster: RayCluster, tmp_path: Path, cycles: int) -> None:
    before = set(Path("/tmp").glob("overlap-gang-*"))  # of drivers that were killed
    driver = ran(ray_cluster.address, tmp_path, BEGIN + """
async def main(rank, cycle):
    await rank.barrier()
    if rank.rank == 1 and cycle % 3 == 1:
        raise ValueError("on purpose")
    if rank.rank == 1 and cycle % 3 == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    await rank.barrier()

failed = 0
for cycle in range(int(sys.argv[1])):
    try:
        overlap.ray.run(main, cycle, ranks=2, flight_dir="flight")
    except overlap.RankFailedError as error:
        assert error.rank == 1, error
        failed += 1
tell(failed)
""", str(cycles))  # fmt: skip
    assert driver.told == 2 * cycles // 3
    assert until(lambda: ray_cluster.left() == NOTHING)
    assert members() == []
    assert set(Path("/tmp").glob("overlap-gang-*")) <= before


def test_an_example_runs_unchanged(ray_cluster: RayCluster, tmp_path: Path) -> None:
    told = example_on("ray", tmp_path, RAY_ADDRESS=ray_cluster.address)
    assert re.search(r"step 10: loss \d", told)
    assert re.search(r"^overlap: \d+% of \d+ ms of communication was hidden", told, re.M)
    assert until(lambda: ray_cluster.left() == NOTHING)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "ImportError: No module named 'numpy'",
            "has no module 'numpy': its Python environment differs from the driver's",
        ),
        ("The actor died because its node has died.", "is gone, and its node with it"),
        (
            "The actor 1a is unavailable: The actor is temporarily unavailable: RpcError: Socket closed",
            "does not answer any more: it is gone, or its node is",
        ),
        ("the node running low on memory", "was killed by Ray, because its node ran low on memory"),
        ("The actor is dead: its worker process has died.", "has died: it was killed, or has crashed"),
        ("\n\tat line 3\nsomething else\nand more", "has ended: something else and more"),
    ],
)
def test_what_ray_says_of_a_process_becomes_a_sentence(text: str, sentence: str) -> None:
    import ray

    from overlap.ray.gang import loss_reason

    assert loss_reason(ray.exceptions.RayError(text)).startswith(sentence)


def test_members_of_a_lost_node_are_waited_for_no_longer_once_one_of_them_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from overlap.engines.gang import MemberEnd
    from overlap.ray import gang

    from .test_gangs import lost, spec

    whole = replace(spec(), members=4, ranks_each=1)
    told = {member: MemberEnd(member=member, error=lost(2), begun_s=1.0) for member in (0, 1)}
    waiting = iter([["run 0"], ["run 1"], []])

    def wait(answers: object, **_: object) -> tuple[list[str], list[str]]:
        return next(waiting), []

    monkeypatch.setattr("overlap.ray.gang.ray.wait", wait)
    monkeypatch.setattr("overlap.ray.gang.ray.get", lambda answer: told[int(answer[-1])])
    monkeypatch.setattr("overlap.ray.gang.gone", lambda nodes: sorted({"b"} & set(nodes)))
    running = [f"run {member}" for member in range(4)]
    outcome = gang._Watch(whole, [None] * 4, ["a", "a", "b", "b"], running).outcome()
    assert outcome.ends == told
    assert outcome.lost == dict.fromkeys((2, 3), "is gone, and its node with it")
