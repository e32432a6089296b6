"""The way of a thread that runs no event loop, through `overlap.connect`, beside that of the loop itself.

Two processes that this starts: the same wires, the same ranks, one measure after the other.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from time import perf_counter_ns

import numpy as np

import overlap
from overlap.cli.bench.sampling import Sampling, Times
from overlap.processes.secret import generate_secret
from overlap.processes.sockets import format_endpoint

from .figures import Figure, time_of

_PATIENCE_S = 60.0  # reached only if something is stuck
_BURST = 50  # issued before the first is awaited
_EACH = 20  # operations in a sample

# Two hops between threads, of which each wakes another one.
_RATIO_AIM, _ISSUE_AIM_NS = 1.5, 10_000


def figures(sampling: Sampling) -> Iterator[Figure]:
    """Measure 8 bytes between two processes, and issuing in bursts, on the loop and from a thread."""
    found = _measured(sampling)
    loop, thread = Times.of_samples(found["loop"]), Times.of_samples(found["thread"])
    yield time_of("connect/loop", "8 B, 2 processes, awaited on the loop", loop)
    yield time_of(
        "connect/thread", "8 B, 2 processes, result() in a thread", thread, _RATIO_AIM * loop.median_ns,
        wrong=found["wrong"][0],
    )  # fmt: skip
    issued = Times.of_samples(found["issue on the loop"])
    yield time_of("connect/issue_loop", f"issue, {_BURST} at once, on the loop", issued)
    yield time_of(
        "connect/issue_thread", f"issue, {_BURST} at once, in a thread", Times.of_samples(found["issue in a thread"]),
        issued.median_ns + _ISSUE_AIM_NS,
    )  # fmt: skip


def _measured(sampling: Sampling) -> dict[str, list[int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = format_endpoint(probe.getsockname())
    told = [endpoint, generate_secret().hex(), str(sampling.iters), str(sampling.warmup)]
    command = [sys.executable, "-m", __name__]
    ranks = [
        subprocess.Popen([*command, str(rank), *told], stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL)
        for rank in range(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=_PATIENCE_S)
        found: dict[str, list[int]] = json.loads(said)
        return found
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _member(rank: int, endpoint: str, secret: str, iters: int, warmup: int) -> dict[str, list[int]]:
    with overlap.connect(rank, 2, endpoint=endpoint, secret=secret) as world:
        measures: dict[str, Callable[[], list[int]]] = {
            "loop": lambda: world.run(_on_the_loop, world.rank),
            "thread": lambda: _in_a_thread(world.rank),
            "issue on the loop": lambda: world.run(_issue_on_the_loop, world.rank),
            "issue in a thread": lambda: _issue_in_a_thread(world.rank),
        }
        rounds = [{name: measure() for name, measure in measures.items()} for _ in range(warmup + iters)]
        found = {name: list(chain.from_iterable(one[name] for one in rounds[warmup:])) for name in measures}
        total = world.rank.all_reduce(np.ones(1)).result(_PATIENCE_S)
        return {**found, "wrong": [int(total[0] != 2)]}


async def _on_the_loop(rank: overlap.Rank) -> list[int]:
    x, samples = np.ones(1), []
    for _ in range(_EACH):
        begun_ns = perf_counter_ns()
        await rank.all_reduce(x)
        samples.append(perf_counter_ns() - begun_ns)
    return samples


def _in_a_thread(rank: overlap.Rank) -> list[int]:
    x, samples = np.ones(1), []
    for _ in range(_EACH):
        begun_ns = perf_counter_ns()
        rank.all_reduce(x).result(_PATIENCE_S)
        samples.append(perf_counter_ns() - begun_ns)
    return samples


async def _issue_on_the_loop(rank: overlap.Rank) -> list[int]:
    each_ns, futures = _burst(rank)
    for future in futures:
        await future
    return [each_ns]


def _issue_in_a_thread(rank: overlap.Rank) -> list[int]:
    each_ns, futures = _burst(rank)
    for future in futures:
        future.result(_PATIENCE_S)
    return [each_ns]


def _burst(rank: overlap.Rank) -> tuple[int, list[overlap.CollectiveFuture[np.ndarray]]]:
    x = np.ones(1)
    begun_ns = perf_counter_ns()
    futures = [rank.all_reduce(x) for _ in range(_BURST)]
    return (perf_counter_ns() - begun_ns) // _BURST, futures


if __name__ == "__main__":
    index, where, proof, *counts = sys.argv[1:]
    print(json.dumps(_member(int(index), where, proof, *map(int, counts))))
