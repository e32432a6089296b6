"""A million small collectives, an hour of training in virtual time: nothing grows. `python -m pytest -m soak -s`."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pytest
import trio

import overlap
from tests.embedded.connecting import TIMEOUT_S, MemoryStore
from tests.threads import run_threads
from transports import NeuronLink, Wire
from transports.wrappers import Wrapper

pytestmark = pytest.mark.soak

COLLECTIVES = int(os.environ.get("SOAK", "1000000"))
LOOKS = 20
# What may come and go between two looks.
NOISE = 1.01
# By which the interpreter's memory for objects grows: one more of these is no growth of ours.
ARENA_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds."""

    memory_bytes: int
    descriptors: int
    tasks: int
    threads: int
    objects: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        descriptors, tasks = len(os.listdir("/proc/self/fd")), trio.lowlevel.current_statistics().tasks_living
        return cls(resident, descriptors, tasks, threading.active_count(), len(gc.get_objects()))


def check(looks: list[Held]) -> None:
    """The second half must not hold more than the first did at its most."""
    for each in looks[:: len(looks) // 4]:
        print(each)
    early, late = looks[2 : len(looks) // 2], looks[len(looks) // 2 :]
    assert max(each.memory_bytes for each in late) <= max(each.memory_bytes for each in early) * NOISE
    for early_most, late_most in list(zip(_most(early), _most(late), strict=True))[1:4]:
        assert late_most <= early_most
    assert late[-1].objects <= max(each.objects for each in early) + 1000


def _most_of(looks: list[tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(max(values) for values in zip(*looks, strict=True))


def _most(looks: list[Held]) -> Iterator[int]:
    return (max(values) for values in zip(*map(astuple, looks), strict=True))


class Travelling(Wrapper):
    """Shares no memory, so that bytes travel."""

    def wrap(self, wire: Wire) -> Wire:
        return wire


@pytest.mark.parametrize("wire", [False, True], ids=["memory", "wire"])
def test_a_million_small_collectives(wire: bool) -> None:
    rounds = COLLECTIVES // 4 // (10 if wire else 1)
    looks: list[Held] = []

    async def main(rank: overlap.Rank) -> None:
        pair = rank.group([0, 1])
        out, x = np.empty(8), np.ones(8)
        for number in range(rounds):
            first = rank.all_reduce(x)
            second = pair.all_gather(x[:2])
            third = rank.all_reduce(x, out=out, stream=None)
            if rank.rank:
                await rank.recv(((2,), float), 0, tag=number % 7)
            else:
                await rank.send(x[:2], 1, tag=number % 7)
            await first
            await second
            assert (await third)[0] == 2.0
            if rank.rank == 0 and number % (rounds // LOOKS) == 0:
                looks.append(Held.now())

    overlap.run(main, ranks=2, transport=Travelling(NeuronLink(2)) if wire else NeuronLink(2))
    check(looks)


@pytest.mark.parametrize("wire", ["shared_memory", "efa"])
def test_a_million_operations_between_processes(wire: str) -> None:
    """By memory that processes share, and by sockets; each rank is in a thread here, so that one look sees both."""
    rounds, looks = COLLECTIVES // 4, list[tuple[int, int, int]]()

    def program(world: overlap.Connection) -> None:
        rank, x, other = world.rank, np.ones(300), 1 - world.rank.rank
        for number in range(rounds):
            first = rank.all_reduce(x)
            second = rank.all_gather(x[:2])
            if rank.rank:
                rank.recv(np.empty(2), other, tag=number % 7).result(TIMEOUT_S)
            else:
                rank.send(x[:2], other, tag=number % 7).result(TIMEOUT_S)
            first.result(TIMEOUT_S)
            second.result(TIMEOUT_S)
            rank.barrier().result(TIMEOUT_S)
            if rank.rank == 0 and number % (rounds // LOOKS) == 0:
                gc.collect()
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                looks.append((resident, len(gc.get_objects()), sys.getallocatedblocks()))

    store = MemoryStore()

    def live(rank: int) -> None:
        with overlap.connect(rank, 2, store=store, transport=wire) as world:
            program(world)

    run_threads(threading.Thread(target=live, args=[rank]) for rank in range(2))
    print(*looks, sep="\n")
    assert len(looks) >= LOOKS
    early, late = looks[5 : LOOKS // 2], looks[LOOKS // 2 :]
    (resident, objects, blocks), (before, objects_before, blocks_before) = _most_of(late), _most_of(early)
    assert resident <= before * NOISE + ARENA_BYTES
    assert objects <= objects_before + 1000
    assert blocks <= blocks_before * NOISE


def test_an_hour_of_virtual_training() -> None:
    looks: list[Held] = []
    step_s = 0.05

    async def main(rank: overlap.Rank) -> int:
        weights = [np.zeros(16) for _ in range(3)]
        for step in range(round(3600 / step_s)):
            with rank.step(step):
                pending = []
                for layer in range(3):
                    grad = rank.compute(np.full, 16, 1e-3, seconds=step_s / 3, name=f"backward {layer}")
                    pending.append(rank.all_reduce(grad, op="mean"))
                for layer, reduced in enumerate(pending):
                    weights[layer] -= await reduced
            if rank.rank == 0 and step % round(3600 / step_s / LOOKS) == 0:
                looks.append(Held.now())
        return rank.now_ns()

    assert min(overlap.run(main, ranks=2, cluster="trn1.2xlarge", clock="virtual")) >= 3600 * 10**9
    check(looks)
