"""How fast virtual time is: messages, whole worlds of many ranks, costing a ring, and the same ring on SimPy.

As a program it is a world to be measured, in a process of its own:
`overlap run -m tests.benchmarks.simulation RANKS ALIKE`.
"""

import json
import resource
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter_ns
from typing import Any

import numpy as np
import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

import topology
from overlap import Rank, Virtual, run
from overlap.cli.bench.sampling import Sampling, Times
from overlap.simulation.fabric import ReachedRanks, SimulatedFabric
from overlap.simulation.kernel import Kernel
from overlap.simulation.traffic import FabricDriver
from overlap.units import format_bytes
from tests.benchmarks.children import read_json_lines, start
from tests.benchmarks.figures import few

from .figures import Figure, as_fast_as, time_of
from .schedules import ring_costing_s

PROGRAM = "tests.benchmarks.simulation"
TASKS, ROUNDS = 1000, 100
HOP_NS = 1000
COLLECTIVES = 100
_CLUSTER, NODE_RANKS = "trn2.48xlarge x{}", 64
WORLDS = {1024: 10e9, 4096: 60e9}  # ranks: at most that many nanoseconds of real time
SENDERS, SENT, MESSAGE_BYTES = 1024, 20, 1024

MESSAGE_AIM_NS = 1e9 / 200_000
MEMORY_AIM_BYTES = 1 << 30  # of the smaller world
COSTING_AIM_NS = 20e6


def figures(sampling: Sampling) -> Iterator[Figure | str]:
    """Measure one after the other; text is a remark."""
    yield f"ring: {TASKS} tasks, each sends {ROUNDS} messages to the next and waits for those of the one before"
    ours = Times.of_samples([_timed(ring) / (TASKS * ROUNDS) for _ in range(few(sampling))])
    yield _ns("message", "a message, on the virtual clock alone", ours, MESSAGE_AIM_NS)
    if find_spec("simpy") is None:
        yield "simpy is not installed: pip install simpy"
    else:
        theirs = Times.of_samples([_timed(simpy_ring) / (TASKS * ROUNDS) for _ in range(few(sampling))])
        yield as_fast_as("simulate/message/simpy", "  the same ring: as fast as SimPy", theirs, ours)
    shared = Times.of_samples([_timed(traffic) / (SENDERS * ROUNDS) for _ in range(few(sampling))])
    yield _ns("message/traffic", f"a message among {SENDERS} ranks, links shared", shared, MESSAGE_AIM_NS)
    sent = Times.of_samples([_timed(_send_round) / (SENDERS * SENT) for _ in range(few(sampling))])
    yield _ns("message/program", "  the same in a program: rank.send, rank.recv", sent, None)
    for ranks, aim_ns in WORLDS.items():
        yield from _world(ranks, aim_ns)
    alike = Times.of_samples([_simulated(max(WORLDS), alike=1)["wall_ns"]])
    yield _ns(f"world/{max(WORLDS)}/alike", "  of which two run for all, because they are alike", alike, None)
    costing = Times.of_samples([ring_costing_s()[0] * 1e9 for _ in range(few(sampling))])
    yield _ns("cost", "cost a ring, 1024 ranks", costing, COSTING_AIM_NS)


def _ns(name: str, text: str, times: Times, aim_ns: float | None) -> Figure:
    return time_of(f"simulate/{name}", text, times, aim_ns)


def _timed(work: Callable[[], object]) -> int:
    begun_ns = perf_counter_ns()
    work()
    return perf_counter_ns() - begun_ns


# -- the ring ----------------------------------------------------------------------------------------------------


def ring(tasks: int = TASKS, rounds: int = ROUNDS) -> int:
    """Send messages around a ring of Trio tasks; return the virtual time that it took."""
    kernel = Kernel()
    waiting: list[Task | None] = [None] * tasks
    arrived = [0] * tasks

    def deliver(dst: int) -> None:
        task = waiting[dst]
        if task is None:
            arrived[dst] += 1
        else:
            waiting[dst] = None
            reschedule(task)

    async def member(index: int) -> None:
        dst = (index + 1) % tasks
        send = partial(deliver, dst)
        for _ in range(rounds):
            kernel.call_at(kernel.now_ns + HOP_NS, dst, send)
            if arrived[index]:
                arrived[index] -= 1
            else:
                waiting[index] = current_task()
                await wait_task_rescheduled(lambda _: Abort.SUCCEEDED)

    async def all_members() -> None:
        async with trio.open_nursery() as nursery:
            for index in range(tasks):
                nursery.start_soon(member, index)

    kernel.run(all_members)
    return kernel.now_ns


def simpy_ring(tasks: int = TASKS, rounds: int = ROUNDS) -> int:
    """Do the same on SimPy."""
    simpy: Any = import_module("simpy")
    env = simpy.Environment()
    boxes = [simpy.Store(env) for _ in range(tasks)]

    def member(index: int) -> Iterator[Any]:
        box, after = boxes[index], boxes[(index + 1) % tasks]
        for _ in range(rounds):
            env.timeout(HOP_NS).callbacks.append(lambda _: after.put(None))
            yield box.get()

    for index in range(tasks):
        env.process(member(index))
    env.run()
    return int(env.now)


# -- the modelled cluster -----------------------------------------------------------------------------------------


def traffic() -> int:
    """Let every rank of a cluster send to the next, one message after the other; return the virtual time it took."""
    kernel, fabric = Kernel(), SimulatedFabric(topology.cluster(_CLUSTER.format(SENDERS // NODE_RANKS)))
    carrier, left, busy, over = FabricDriver(kernel, fabric), [ROUNDS] * SENDERS, {*range(SENDERS)}, trio.Event()

    def send(src: int) -> None:
        dst = (src + 1) % SENDERS
        message = fabric.message_transfer((src, left[src]), src, dst, MESSAGE_BYTES, lane=(src, dst))
        left[src] -= 1
        carrier.begin_transfer(message, partial(told, src))

    def told(src: int, reached: ReachedRanks) -> None:
        if not reached.last:
            return
        if left[src]:
            send(src)
            return
        busy.remove(src)
        if not busy:
            over.set()

    async def all_ranks() -> None:
        for src in range(SENDERS):
            send(src)
        await over.wait()

    kernel.run(all_ranks)
    return kernel.now_ns


# -- whole programs ----------------------------------------------------------------------------------------------


def _send_round() -> None:
    clock = Virtual(shapes_only=True)
    run(_neighbours, cluster=_CLUSTER.format(SENDERS // NODE_RANKS), clock=clock)


async def _neighbours(rank: Rank) -> None:
    x = rank.empty(MESSAGE_BYTES, np.uint8)
    for _ in range(SENT):
        sent = rank.send(x, (rank.rank + 1) % rank.world_size)
        await rank.recv(x, (rank.rank - 1) % rank.world_size)
        await sent


def _world(ranks: int, aim_ns: float) -> Iterator[Figure | str]:
    told = _simulated(ranks)
    text = f"{ranks} ranks x {COLLECTIVES} collectives with computes"
    yield _ns(f"world/{ranks}", text, Times.of_samples([told["wall_ns"]]), aim_ns)
    peak = f"  at most {format_bytes(told['peak_bytes'])} of memory"
    if ranks == min(WORLDS):
        met = "met" if told["peak_bytes"] <= MEMORY_AIM_BYTES else "missed"
        peak += f", aim {format_bytes(MEMORY_AIM_BYTES)}: {met}"
    yield peak


def _simulated(ranks: int, *, alike: int = 0) -> dict[str, Any]:
    """Measure a world in a process of its own, for the sake of its memory."""
    [told] = read_json_lines([start([], [PROGRAM, str(ranks), str(alike)])])
    return told


async def _train(rank: Rank) -> None:
    pending = []
    with rank.step(0):
        for _ in range(COLLECTIVES):
            gradient = rank.compute(rank.empty, 1 << 20, name="backward", flops=1e12)
            pending.append(rank.all_reduce(gradient))
        for reduced in pending:
            await reduced


def main(ranks: str, alike: str) -> None:
    """Simulate a world of so many ranks, in so many blocks that are alike; print what it took as a line of JSON."""
    cluster, clock = _CLUSTER.format(int(ranks) // NODE_RANKS), Virtual(shapes_only=True, alike=int(alike))
    wall_ns = _timed(partial(run, _train, cluster=cluster, clock=clock))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"wall_ns": wall_ns, "peak_bytes": peak * (1 if sys.platform == "darwin" else 1024)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
