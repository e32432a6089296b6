"""Many messages and operations in flight at once: under way together, and ended by their priorities."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import overlap
import topology
from transports import NeuronLink, Request, Router, Transport, Wire
from transports.request import Done
from transports.wrappers import RelayedRequest, WrappedWire, Wrapper

from .companies import Company, by_sockets, in_memory, run_far

# -- messages of one operation that go to several ranks in other processes are under way at once -----------------------


class Noting(Wrapper):
    """Notes when sends begin and when they end."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.events: list[str] = []

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        return True

    def wrap(self, wire: Wire) -> Wire:
        return _NotingWire(wire, self.peers, self.events)


class _NotingWire(WrappedWire):
    def __init__(self, inner: Wire, peers: tuple[int, ...], events: list[str]) -> None:
        super().__init__(inner, peers)
        self._events = events

    def begin_send(self, *args: Any, done: Done, **options: Any) -> Request | None:
        """Send in the next turn of the event loop: a receive that waits would acknowledge it in the call."""
        self._events.append("begun")
        done = self._noting("acknowledged", done)
        request = RelayedRequest(done, 0, partial(self.inner.begin_send, *args, **options))
        trio.lowlevel.current_trio_token().run_sync_soon(request.begin)
        return request

    def begin_recv(self, *args: Any, done: Done, **options: Any) -> Request:
        if args[2] is not None:
            return self.inner.begin_recv(*args, done=done, **options)
        self._events.append("posted")
        return self.inner.begin_recv(*args, done=self._noting("came", done), **options)

    def _noting(self, event: str, done: Done) -> Done:
        def note(request: Request) -> None:
            self._events.append(event)
            done(request)

        return note


def noting(
    main: Callable[[overlap.Rank], Awaitable[list[int]]], nodes: int, algorithm: str | None = None
) -> tuple[list[list[int]], list[list[str]]]:
    """Run a program with a rank a node; return its results and what each node's messages did."""
    wires: list[Noting] = []

    @asynccontextmanager
    async def noted(companies: list[Company], placement: Sequence[range]) -> AsyncIterator[list[Transport]]:
        async with in_memory(companies, placement) as whole:
            wires.extend(map(Noting, whole))
            memory = [NeuronLink(list(ranks)) for ranks in placement]
            yield [Router(parts) for parts in zip(memory, wires, strict=True)]

    return run_far(main, nodes, 1, wires=noted, algorithm=algorithm), [wire.events for wire in wires]


def test_all_sends_of_an_exchange_begin_before_the_first_is_acknowledged() -> None:
    async def main(rank: overlap.Rank) -> list[int]:
        received = await rank.all_to_all(np.full((4, 1 << 12), rank.rank))
        return received[:, 0].tolist()

    results, events = noting(main, 4, "mesh")
    assert results == [[0, 1, 2, 3]] * 4
    assert events == [["begun"] * 3 + ["acknowledged"] * 3] * 4


def test_all_slices_of_a_step_are_wanted_before_the_first_has_come() -> None:
    """A wire between hosts carries the next slice while one is added, so nobody may wait with asking for it."""

    async def main(rank: overlap.Rank) -> list[int]:
        if rank.rank:
            await wait_all_tasks_blocked()
        reduced = await rank.all_reduce(np.arange(1 << 18, dtype=np.int64))
        return reduced[[0, -1]].tolist()

    results, [events, _] = noting(main, 2)
    assert results == [[0, (1 << 19) - 2]] * 2
    assert [event for event in events if event in ("posted", "came")][:5] == ["posted"] * 4 + ["came"]


# -- many long operations in flight end in the order of their priorities, on sockets and on the virtual clock ----------

COUNT, ELEMENTS = 64, 1 << 18  # of float32: 1 MiB each
PRIORITIES = [(7 * i) % 16 - 8 for i in range(COUNT)]
STRONGEST = min(PRIORITIES) - 1

MACHINE = """\
name = "two hosts"
devices = 2
[chip]
name = "host"
cores = 1
[wires]
shape = "full"
link = "neuronlink"
[links.neuronlink]
latency_s = 1e-4
bandwidth_bytes_per_s = 1.2e8
"""


async def mixed(rank: overlap.Rank) -> list[int]:
    """Issue all at once, and a more urgent one after the first has ended; return priorities in the order of ends."""
    ended: list[int] = []
    stream = rank.stream("many", window=COUNT + 1)

    async def wait(future: overlap.Future[Any], priority: int) -> None:
        got = await future
        assert (got == 1).all()
        ended.append(priority)
        if len(ended) == 1:
            nursery.start_soon(wait, issue(STRONGEST), STRONGEST)

    def issue(priority: int) -> overlap.Future[Any]:
        x = np.full(ELEMENTS, rank.rank, np.float32)
        return rank.all_reduce(x, "sum", priority=priority, stream=stream)

    async with trio.open_nursery() as nursery:
        for priority, future in [(priority, issue(priority)) for priority in PRIORITIES]:
            nursery.start_soon(wait, future, priority)
    return ended


@pytest.mark.slow
def test_on_the_virtual_clock_they_end_in_exactly_that_order(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text(MACHINE)
    ended = overlap.run(mixed, ranks=2, cluster=topology.Cluster.load(file), clock="virtual")
    first, late, *others = ended[0]
    assert late == STRONGEST
    assert [first, *others] == sorted(PRIORITIES)
    assert ended[1] == ended[0]


def test_on_sockets_none_ends_before_one_that_is_clearly_more_urgent() -> None:
    """Neighbours may change places: what the system has taken of one is not taken back for the other."""
    ended = run_far(mixed, 2, 1, wires=by_sockets)
    for one in ended:
        assert isinstance(one, list)
        assert sorted(one) == sorted([STRONGEST, *PRIORITIES])
        assert STRONGEST in one[:5]
        one.remove(STRONGEST)
        assert [(at, priority) for at, priority in enumerate(one) if min(one[at:]) < priority - 1] == []
