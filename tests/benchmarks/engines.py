"""Worlds on a cluster of Ray: from its connection to the first collective, losses, and steps beside `overlap run`.

Two node processes of this machine; drivers are programs of their own.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time

from overlap.cli.bench.sampling import Sampling, Times
from tests.benchmarks.figures import few
from tests.engines.clusters import ROOT, driving, ran
from tests.engines.rays import RayCluster

from .figures import Figure, as_fast_as, time_of

RANKS = 8
_START_AIM_NS, _LOSS_AIM_NS, _REPLACED_AIM_NS, _STEP_AIM = 1e9, 0.5e9, 10e9, 0.95
_STEPS, _PROCESSES = 200, 2
_TURNS = 10  # of either side of steps: from one turn to the next they vary by a fifth
_SAMPLES = 3  # of starts and losses, each of which starts a driver: some minutes in all

_BEGIN = """
import json, os, signal, sys, time
import numpy as np
import trio
import overlap

def tell(value):
    print("TOLD", json.dumps(value), flush=True)
"""

_START = (
    _BEGIN
    + """
import ray
import overlap.ray

async def main(rank):
    await rank.all_reduce(np.ones(1))
    return time.time()

begun = time.time()
ray.init(logging_level="error")
tell(max(overlap.ray.run(main, ranks=8, ranks_per_actor=int(sys.argv[1]), strategy="SPREAD")) - begun)
"""
)

# The same with actors that are up and have imported all: what is ours of a start, without the processes of Ray.
_MEETING = (
    _BEGIN
    + """
import ray
import overlap.ray

@ray.remote(num_cpus=1)
class Worker:
    def ready(self):
        return os.getpid()

    def meet(self, rank, size):
        with overlap.connect(rank, size, store=overlap.ray.store("benchmark")) as world:
            world.rank.all_reduce(np.ones(1)).result()
            return time.time()

ray.init(logging_level="error")
workers = [Worker.options(scheduling_strategy="SPREAD").remote() for _ in range(8)]
ray.get([worker.ready.remote() for worker in workers])
begun = time.time()
tell(max(ray.get([worker.meet.remote(rank, 8) for rank, worker in enumerate(workers)])) - begun)
"""
)

_LOSS = (
    _BEGIN
    + """
import overlap.ray

async def main(rank, path):
    await rank.barrier()
    if rank.rank == 2:
        with open(path, "w") as file:
            file.write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    await rank.all_reduce(np.ones(1))

try:
    overlap.ray.run(main, os.path.abspath("killed"), ranks=4, flight_dir="flight")
except overlap.RankFailedError as error:
    assert error.rank == 2, error
    tell(time.time() - float(open("killed").read()))
"""
)

_REPLACED = (
    _BEGIN
    + """
import overlap.ray

async def main(rank):
    found = await rank.state.latest()
    for step in range(0 if found is None else found.step + 1, 30):
        with rank.step(step):
            await rank.all_reduce(np.ones(1))
            await trio.sleep(0.1)
        await rank.state.save(step, {})
        if rank.rank == 0:
            print("kept", rank.restart, step, time.time(), flush=True)

overlap.ray.run(main, ranks=4, strategy="SPREAD", max_restarts=3, state_dir="state")
"""
)

_STEP = f"""
async def main(rank):
    weights = np.ones((256, 256), np.float32)
    took = []
    for step in range({_STEPS}):
        begun = time.perf_counter_ns()
        with rank.step(step):
            grad = rank.compute(np.matmul, weights, weights)
            await rank.all_reduce(grad)
        took.append(time.perf_counter_ns() - begun)
    return {{"niceness": os.nice(0), "steps": took[10:]}}
"""


def figures(sampling: Sampling) -> Iterator[Figure | str]:
    """Measure how fast worlds start on Ray, how fast losses are named and replaced, and the steps between."""
    with TemporaryDirectory() as folder, _compiling_once(f"{folder}/bytecode"):
        cluster = RayCluster(head_cpus=RANKS, cpus=RANKS)
        try:
            ran(Path(folder), _START, "4", **cluster.variables)  # the first one compiles what it imports
            yield from _figures(cluster, Path(folder), sampling)
        finally:
            cluster.close()


@contextmanager
def _compiling_once(folder: str) -> Iterator[None]:
    """Let processes keep their bytecode where Python may not write it: each would compile for 0.6 s."""
    before = dict(os.environ)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", folder)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _figures(cluster: RayCluster, folder: Path, sampling: Sampling) -> Iterator[Figure | str]:
    times = range(min(few(sampling), _SAMPLES))
    for each in (1, 4):
        starts = [1e9 * ran(folder, _START, str(each), **cluster.variables).told for _ in times]
        text = f"ray.init to the first all_reduce, {RANKS} ranks, {RANKS // each} actors"
        yield time_of(f"engines/start{RANKS // each}", text, Times.of_samples(starts), _START_AIM_NS)
    meetings = [1e9 * ran(folder, _MEETING, **cluster.variables).told for _ in times]
    yield time_of(
        "engines/meeting", f"  {RANKS} actors that are up meet by overlap.connect", Times.of_samples(meetings)
    )
    losses = [1e9 * ran(folder, _LOSS, **cluster.variables).told for _ in times]
    yield time_of("engines/loss", "a killed actor named on the driver", Times.of_samples(losses), _LOSS_AIM_NS)
    yield time_of(
        "engines/replaced",
        "a lost node to the next step",
        Times.of_samples([_replaced(cluster, folder)]),
        _REPLACED_AIM_NS,
    )
    turns = [_steps(cluster, folder) for _ in range(_TURNS)]
    with_ray, alone = (Times.of_samples([*chain.from_iterable(side)]) for side in zip(*turns, strict=True))
    yield time_of("engines/step", f"step, {_PROCESSES} actors", with_ray)
    yield as_fast_as("engines/step_ratio", "  as fast as overlap run, as nice", alone, with_ray, _STEP_AIM)


def _replaced(cluster: RayCluster, folder: Path) -> float:
    """Return how long it takes from the loss of a node to the first step of the next attempt; another node is there."""
    cluster.nodes.insert(0, cluster.add())
    with driving(folder / "replaced", _REPLACED, **cluster.variables) as driver:
        driver.said(r"kept 0 3 ")
        lost_s = time()
        cluster.lose(cluster.nodes.pop())
        found = driver.said(r"kept 1 \d+ (\S+)")
    return 1e9 * (float(re.sub(r"[^0-9.]", "", found[1])) - lost_s)


def _steps(cluster: RayCluster, folder: Path) -> tuple[list[int], list[int]]:
    """Return the steps of one program on actors, and on the processes of `overlap run`."""
    on_ray = _BEGIN + _STEP + f"\nimport overlap.ray\ntell(overlap.ray.run(main, ranks={_PROCESSES})[0])\n"
    with_ray = ran(folder, on_ray, **cluster.variables).told
    script = folder / "alone.py"
    script.write_text(
        _BEGIN + _STEP + "\nfound = overlap.run(main)\nif os.environ['RANK'] == '0':\n    tell(found[0])\n"
    )
    options = ["--ranks", str(_PROCESSES), "--processes", str(_PROCESSES), "--no-prefix"]
    # Ray gives its workers a niceness of 15, and its own processes none: the other side of the comparison gets it, too
    command = ["nice", "-n", str(with_ray["niceness"]), sys.executable, "-m", "overlap", "run", *options, str(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    alone = json.loads(ended.stdout.partition("TOLD")[2])
    assert alone["niceness"] == with_ray["niceness"]
    return with_ray["steps"], alone["steps"]
