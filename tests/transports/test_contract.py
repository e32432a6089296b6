"""Every transport of ours, and every wrapper around one, keeps the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import pytest
import trio

from transports import Endpoint, Envelope, Faulty, LinkSpeed, NeuronLink, Paced, Recording, Request, Router, Transport
from transports.blocking import StartingEndpoint, TaskStarter
from transports.testing import CHECKS, MakePair
from transports.wrappers import Wrapper

from .promises import assert_all_kept, assert_kept


def slow(src: int, dst: int) -> LinkSpeed:
    return LinkSpeed(latency_s=2.0**-12, bandwidth_bytes_per_s=2.0**31)


def delayed(inner: Transport) -> Transport:
    return Faulty(inner, seed=3, delay=0.5, delay_s=2.0**-10)


class InTasks(Wrapper):
    """Begins each message in a task, and awaits what it has begun: both conversions of `transports.blocking`."""

    nursery: trio.Nursery

    def wrap(self, endpoint: Endpoint) -> Endpoint:
        return _InTasksEndpoint(endpoint, self.nursery)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Self]:
        async with self.inner.open(), trio.open_nursery() as self.nursery:
            yield self


class _InTasksEndpoint(StartingEndpoint):
    def __init__(self, inner: Endpoint, nursery: trio.Nursery) -> None:
        self.rank, self.inner, self.tasks = inner.rank, inner, TaskStarter(inner, nursery.start_soon)

    def begin_send(self, *args: Any, **options: Any) -> Request | None:
        return self.tasks.begin_send(*args, **options)

    def begin_recv(self, *args: Any, **options: Any) -> Request:
        return self.tasks.begin_recv(*args, **options)

    async def wait_any(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope:
        return await self.inner.wait_any(choices, free_bits=free_bits)


REAL: dict[str, Callable[[], Transport]] = {
    "neuronlink": partial(NeuronLink, 2),
    "neuronlink, ranks 5 and 3": partial(NeuronLink, (5, 3)),
    "neuronlink, all in threads": partial(NeuronLink, 2, thread_copy_bytes=0),
    "recording": lambda: Recording(NeuronLink(2)),
    "paced": lambda: Paced(NeuronLink(2), links=slow),
    "faulty": lambda: delayed(NeuronLink(2)),
    "router": lambda: Router([NeuronLink(2)]),
    "all wrappers": lambda: Recording(Paced(delayed(NeuronLink(2)), links=slow)),
}
VIRTUAL: dict[str, Callable[[], Transport]] = {
    "neuronlink": lambda: NeuronLink(2, thread_copy_bytes=None),
    "paced": lambda: Paced(NeuronLink(2, thread_copy_bytes=None), links=slow),
    "all wrappers": lambda: Recording(delayed(Paced(NeuronLink(2, thread_copy_bytes=None), links=slow))),
}


def pairs_of(make: Callable[[], Transport]) -> MakePair:
    @asynccontextmanager
    async def make_pair() -> AsyncIterator[tuple[Endpoint, Endpoint]]:
        async with make().open() as transport:
            a, b = transport.ranks
            yield transport.endpoint(a), transport.endpoint(b)

    return make_pair


IMPLIED = ("recording", "paced", "faulty")  # by all of them at once


@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow) if k in IMPLIED else k for k in REAL])
@pytest.mark.parametrize("check", CHECKS)
def test_real_clock(check: str, name: str) -> None:
    assert_kept(check, pairs_of(REAL[name]))


# Tasks await calls, which carry no signatures.
AWAITED = [name for name, check in CHECKS.items() if not check.__module__.endswith("_check_signatures")]


@pytest.mark.parametrize("check", AWAITED)
def test_in_tasks(check: str) -> None:
    assert_kept(check, pairs_of(lambda: InTasks(Paced(NeuronLink(2), links=slow))))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow) if k in IMPLIED else k for k in VIRTUAL])
def test_virtual_clock(name: str) -> None:
    assert_all_kept(pairs_of(VIRTUAL[name]))
