"""The plan of each call: what decides is where the ranks live, the call, and its size."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import overlap
from overlap.collectives.call import Call
from overlap.runtime.communicator import Communicator
from overlap.runtime.engine.real_engine import RealEngine
from overlap.runtime.match import Match
from overlap.runtime.operation import Operation
from overlap.runtime.plan import CallPlan
from overlap.simulation.simulated_engine import ModelledPlan
from transports.base import PAYLOAD_BYTES
from transports.shared_memory.engine import BUILT

from .companies import by_shared_memory, by_sockets, run_far
from .worlds import run

pytestmark = pytest.mark.skipif(not BUILT, reason="it was not compiled")

Issue = Callable[[overlap.Rank], Any]
Made = list[tuple[int, CallPlan]]

FITS = PAYLOAD_BYTES // 8


def message(rank: overlap.Rank) -> Any:
    return rank.send(np.ones(2), 1) if rank.rank == 0 else rank.recv(np.empty(2), 0) if rank.rank == 1 else None


CALLS: dict[str, Issue] = {
    "small": lambda rank: rank.all_reduce(np.ones(FITS)),
    "longer": lambda rank: rank.all_reduce(np.ones(FITS + 1)),
    "long": lambda rank: rank.all_gather(np.ones(1 << 18)),
    "barrier": lambda rank: rank.barrier(stream=rank.stream("another")),
    "root": lambda rank: rank.broadcast(np.ones(2) if rank.rank == 0 else None),
    "shared": lambda rank: rank.all_reduce(np.ones(2), shared=True),
    "uneven": lambda rank: rank.all_gather(np.ones(1 + rank.rank), counts=[*range(1, rank.world_size + 1)]),
    "ring": lambda rank: rank.all_reduce(np.ones(2), algorithm="ring"),
    "pair": lambda rank: rank.group([rank.rank // 2 * 2, rank.rank // 2 * 2 + 1]).all_reduce(np.ones(2)),
    "message": message,
}
HERE, HOST = "memory of this process", "memory of this host"
RING, MESH, DOUBLING = "program ring over wires", "program mesh over wires", "program recursive_doubling over wires"

# Processes, ranks of each, and the plans of all calls.
WORLDS: dict[str, tuple[int, int, dict[str, Any], dict[str, set[str]]]] = {
    "one process": (1, 2, {}, {**{name: {HERE} for name in CALLS}, "ring": {RING}, "message": set()}),
    "one process, wires": (
        1,
        2,
        {"path": "wire"},
        {**{name: {DOUBLING} for name in CALLS}, "long": {RING}, "root": {MESH}, "uneven": {RING}, "ring": {RING}}
        | {"message": set()},
    ),
    "one host": (
        2,
        1,
        {"wires": by_shared_memory},
        {
            "small": {HOST},
            "longer": {HOST},
            "long": {HOST},
            "barrier": {HOST},
            "root": {HOST},
            "shared": {HOST + ", one result"},
            "uneven": {"program ring over shared memory"},
            "ring": {"program ring over shared memory"},
            "pair": {HOST},
            "message": set(),
        },
    ),
    "one host, two ranks each": (
        2,
        2,
        {"wires": by_shared_memory},
        {
            "small": {HOST},
            "longer": {HOST},
            "long": {HOST},
            "barrier": {HOST},
            "root": {HOST},
            "shared": {HOST + ", one result"},
            "uneven": {"program rdh over wires"},
            "ring": {RING},
            "pair": {HERE},
            "message": set(),
        },
    ),
    "one host, mesh": (
        2,
        1,
        {"wires": by_shared_memory, "algorithm": "mesh"},
        {**{name: {"program mesh over shared memory"} for name in CALLS}, "ring": {"program ring over shared memory"}}
        | {"message": set()},
    ),
    "two hosts": (
        2,
        1,
        {"wires": by_sockets},
        {**{name: {DOUBLING} for name in CALLS}, "long": {RING}, "root": {MESH}, "uneven": {RING}, "ring": {RING}}
        | {"message": set()},
    ),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Plans that are made, and for which rank."""
    made: Made = []
    choose = RealEngine.make_plan

    def plan(self: RealEngine, communicator: Communicator, call: Call, operation: Operation) -> CallPlan:
        made.append((operation.context.rank, choose(self, communicator, call, operation)))
        return made[-1][1]

    monkeypatch.setattr(RealEngine, "make_plan", plan)
    return made


async def issue_all(rank: overlap.Rank, made: Made) -> dict[str, list[str]]:
    """Issue each call three times; return its plans as they were made."""
    for _ in range(2):
        await rank.barrier()  # a board is ready when the second one begins
    found = {}
    for name, issue in CALLS.items():
        before = len(made)
        for _ in range(3):
            future = issue(rank)
            if future is not None:
                await future
            await rank.barrier()
        found[name] = [str(plan) for each, plan in made[before:] if each == rank.rank]
    return found


@pytest.mark.parametrize("name", WORLDS)
def test_plans(name: str, made: Made) -> None:
    processes, each, options, expected = WORLDS[name]
    found: list[Any] = (
        run(issue_all, each, made, **options)
        if processes == 1
        else run_far(issue_all, processes, each, made, **options)
    )
    last = {name: {ranks[name][-1] for ranks in found if ranks[name]} for name in CALLS}
    assert last == expected


def test_a_plan_is_made_once_unless_it_may_change(made: Made) -> None:
    found: list[Any] = run_far(issue_all, 2, 1, made, wires=by_shared_memory)
    for ranks in found:
        assert [len(ranks[name]) for name in ("small", "longer", "long", "shared", "ring", "barrier")] == [1] * 6
        assert len(ranks["uneven"]) == 3


def test_the_model_carries_out_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = list[str]()
    start = ModelledPlan.start

    def started(self: ModelledPlan, match: Match, operation: Operation) -> None:
        plans.append(str(self))
        start(self, match, operation)

    monkeypatch.setattr(ModelledPlan, "start", started)

    async def main(rank: overlap.Rank) -> None:
        await rank.all_reduce(np.ones(2))
        await rank.all_reduce(np.ones(1 << 18), algorithm="ring")

    overlap.run(main, ranks=2, clock="virtual")
    assert plans == ["model"] * 2
