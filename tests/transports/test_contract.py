"""Every transport of ours, and every wrapper around one, keeps the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from transports import Faulty, LinkSpeed, NeuronLink, Paced, Recording, Router, Transport, Wire
from transports.testing import CHECKS, MakePair

from .promises import assert_all_kept, assert_kept


def slow(src: int, dst: int) -> LinkSpeed:
    return LinkSpeed(latency_s=2.0**-12, bandwidth_bytes_per_s=2.0**31)


def delayed(inner: Transport) -> Transport:
    return Faulty(inner, seed=3, delay=0.5, delay_s=2.0**-10)


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
    async def make_pair() -> AsyncIterator[tuple[Wire, Wire]]:
        async with make().open() as transport:
            a, b = transport.ranks
            yield transport.wire(a), transport.wire(b)

    return make_pair


IMPLIED = ("recording", "paced", "faulty")  # by all of them at once


@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow) if k in IMPLIED else k for k in REAL])
@pytest.mark.parametrize("check", CHECKS)
def test_real_clock(check: str, name: str) -> None:
    assert_kept(check, pairs_of(REAL[name]))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow) if k in IMPLIED else k for k in VIRTUAL])
def test_virtual_clock(name: str) -> None:
    assert_all_kept(pairs_of(VIRTUAL[name]))
