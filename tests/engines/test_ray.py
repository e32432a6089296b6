"""Worlds on Ray: actors, nodes that are lost, environments, stores."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from .rays import RayCluster

pytest.importorskip("ray", reason="not installed: ray")
pytestmark = [pytest.mark.engines, pytest.mark.xdist_group("ray")]


def test_a_world_has_no_actors_but_its_members(ray_cluster: RayCluster, tmp_path: Path) -> None:
    driver = ray_cluster.ran(tmp_path, """
async def main(rank):
    return os.getpid()

pids = run(main, ranks=4, each=2, strategy="SPREAD")
import ray
job = ray.get_runtime_context().get_job_id()
actors = [each["ActorClassName"] for each in ray._private.state.actors().values() if each["JobID"] == job]
tell([len(set(pids)), actors])
""")  # fmt: skip
    assert driver.told == [2, ["MemberActor"] * 2]  # another process, to meet in, would take a second to start
    assert ray_cluster.is_clean()


@pytest.mark.parametrize("member", [0, 1])
def test_an_actor_that_dies_before_all_have_met_is_named(ray_cluster: RayCluster, tmp_path: Path, member: int) -> None:
    driver = ray_cluster.ran(tmp_path, """
from overlap.ray.member import MemberActor

class Deadly:
    def __reduce__(self):
        return die_in, (int(sys.argv[1]),)

def die_in(victim):
    frame = sys._getframe()
    while not isinstance(member := frame.f_locals.get("self"), MemberActor):
        frame = frame.f_back
    if member._index == victim:
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
    assert ray_cluster.is_clean()


TRAINS = """
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


def test_a_lost_node_is_replaced_and_training_goes_on(ray_cluster: RayCluster, tmp_path: Path) -> None:
    with ray_cluster.driving(tmp_path, TRAINS) as driver:
        driver.said("kept step 3")
        ray_cluster.lose(ray_cluster.nodes.pop())
        ray_cluster.nodes.append(ray_cluster.add())
        assert driver.wait() == 0, driver.err
    told = driver.told
    assert {restart for _, restart, _ in told} == {1}
    assert all(first >= 4 for first, _, _ in told)
    assert re.search(r"overlap: restart 1 of 3( in 1 s)?, from step \d", driver.err), driver.err
    assert ray_cluster.is_clean()


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [
        ("lacking", "has no module 'numpy'"),
        ("other", r"has overlap 9\.9 on .*, and the driver has overlap 0\.1\.0 on .*: install one"),
    ],
    ids=["no numpy", "another version"],
)
def test_an_environment_that_differs_is_told_in_a_sentence(
    ray_cluster: RayCluster, tmp_path: Path, folder: str, sentence: str
) -> None:
    (tmp_path / "lacking" / "numpy").mkdir(parents=True)
    (tmp_path / "lacking" / "numpy" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'numpy'\")"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nv = m.version\nm.version = lambda n: '9.9' if n == 'overlap' else v(n)\n"
    )
    driver = ray_cluster.ran(tmp_path, """
async def main(rank):
    await rank.barrier()

run(main, ranks=2, runtime_env={"env_vars": {"PYTHONPATH": sys.argv[1]}})
""", f"{tmp_path / folder}:{Path(__file__).parents[2]}")  # fmt: skip
    assert driver.process.returncode == 1
    assert re.search(sentence, driver.err), driver.err
    assert ray_cluster.is_clean()


def test_actors_of_others_meet_in_a_store(ray_cluster: RayCluster, tmp_path: Path) -> None:
    driver = ray_cluster.ran(tmp_path, """
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

    from overlap.ray.running import loss_reason

    assert loss_reason(ray.exceptions.RayError(text)).startswith(sentence)


def test_members_of_a_lost_node_are_waited_for_no_longer_once_one_of_them_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from overlap.ray import running
    from overlap.ray.job import MemberEnd

    from .test_jobs import lost, spec

    whole = replace(spec(), members=4, ranks_each=1)
    told = {member: MemberEnd(error=lost(2)) for member in (0, 1)}
    waiting = iter([["run 0"], ["met"], ["run 1"]])

    def actor(member: int) -> SimpleNamespace:
        answers = {"run": f"run {member}", "get": "met", "stop": ""}
        return SimpleNamespace(
            **{
                name: SimpleNamespace(remote=partial(lambda answer, *_: answer, answer))
                for name, answer in answers.items()
            }
        )

    def wait(answers: object, **_: object) -> tuple[list[str], list[str]]:
        return next(waiting), []

    monkeypatch.setattr("overlap.ray.running.ray.wait", wait)
    monkeypatch.setattr("overlap.ray.running.ray.get", lambda answer: told[int(answer[-1])])
    monkeypatch.setattr("overlap.ray.running.lost_nodes", lambda nodes: {"b"} & set(nodes))
    outcome = running.run_all_members(whole, [actor(member) for member in range(4)], ["a", "a", "b", "b"])
    assert outcome.ends == told
    assert outcome.lost == dict.fromkeys((2, 3), "is gone, and its node with it")


@pytest.mark.parametrize("made", [0, 1])
def test_the_placement_group_is_removed_if_an_actor_cannot_be_made(monkeypatch: pytest.MonkeyPatch, made: int) -> None:
    from overlap.ray import running

    from .test_jobs import spec

    removed: list[object] = []
    killed: list[object] = []
    actors = iter([SimpleNamespace(stop=SimpleNamespace(remote=lambda: "stopped"))] * made)
    actor_class = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: next(actors)))
    group = SimpleNamespace(wait=lambda _: True)
    monkeypatch.setattr(running, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(running, "remove_placement_group", removed.append)
    monkeypatch.setattr(running, "actor_nodes_and_options", lambda *_: (["a", "b"], [{}, {}]))
    monkeypatch.setattr(running.ray, "remote", lambda **_: lambda _: actor_class)
    monkeypatch.setattr(running.ray, "kill", lambda actor, **_: killed.append(actor))
    monkeypatch.setattr(running.ray, "wait", lambda answers, **_: (answers, []))
    with pytest.raises(StopIteration):
        running.RayRun().run_attempt(replace(spec(), members=2))
    assert (removed, len(killed)) == ([group], made)
