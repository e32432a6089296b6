"""Lines of a node that joins the others: it waits, then it has joined; in one process of each node but the first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import pytest
import trio

from overlap.config import RunConfig
from overlap.processes import connect
from overlap.processes.identity import RendezvousConfig
from overlap.processes.place import Place


@pytest.mark.parametrize(
    ("hosts", "process", "node"), [(3, 2, 1), (3, 4, 2), (3, 3, 0), (3, 0, 0), (1, 2, 0), (12, 2, 2)]
)
@pytest.mark.everyday(6)
def test_the_first_process_of_a_node_names_it(
    monkeypatch: pytest.MonkeyPatch, hosts: int, process: int, node: int
) -> None:
    events: list[str] = []
    place = Place(
        source="overlap run", process=process, processes=6, ranks_per_process=1, node=0, nodes=1,
        endpoint=("10.0.0.1", 29500), job="job", secret=b"secret",
    )  # fmt: skip

    async def rendezvous(*_: object) -> RendezvousConfig:
        return RendezvousConfig(
            job="job", member=process, members=6, endpoint=("10.0.0.1", 29500), secret=b"secret", epoch=0
        )

    @asynccontextmanager
    async def join_at(*_: object, on_joined: Callable[[], None], **__: object) -> AsyncIterator[None]:
        events.append("joins")
        on_joined()
        yield

    async def worlds() -> None:
        for _ in range(2):
            async with connect.join_as_launched(place, "local", RunConfig()):
                events.append("runs")

    monkeypatch.setenv("OVERLAP_HOSTS", str(hosts))
    monkeypatch.setattr(connect, "_worlds", count())
    monkeypatch.setattr(connect, "rendezvous", rendezvous)
    monkeypatch.setattr(connect, "join_at", join_at)
    monkeypatch.setattr(connect, "notify", events.append)
    trio.run(worlds)
    waits = [f"node {node} waits for the other nodes, at 10.0.0.1:29500"] * bool(node)
    assert events == [*waits, "joins", *[f"node {node} has joined"] * bool(node), "runs", "joins", "runs"]
