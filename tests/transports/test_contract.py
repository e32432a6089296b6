"""Every transport of ours, and every wrapper around one, keeps the contract; wires of others that break it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import numpy as np
import pytest
import trio

import overlap
from transports import Faulty, LinkSpeed, NeuronLink, Paced, Recording, Request, Router, Transport, Wire
from transports.request import Done
from transports.testing import CHECKS, ContractViolation, MakePair, Scale, run_check
from transports.wrappers import RelayedRequest, WrappedWire, Wrapper

from .promises import assert_all_kept, assert_kept

# -- every transport of ours, and every wrapper around one, keeps the contract -----------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------
# Wires of other packages that break the contract: the suite names the rule, and a run ends with an error that
# does


class Stranger(Wrapper):
    """A transport of another package, whose requests end in a way of their own."""

    nursery: trio.Nursery

    def __init__(self, inner: Transport, ends: type[Ends]) -> None:
        super().__init__(inner)
        self.ends = ends

    def wrap(self, wire: Wire) -> Wire:
        return StrangeWire(wire, self)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        async with self.inner.open(), trio.open_nursery() as self.nursery:
            yield self
            self.nursery.cancel_scope.cancel()


class StrangeWire(WrappedWire):
    def __init__(self, inner: Wire, stranger: Stranger) -> None:
        super().__init__(inner, stranger.peers)
        self.stranger = stranger

    def begin_send(self, *args: Any, done: Done, **options: Any) -> Request | None:
        return self.ends(done, partial(self.inner.begin_send, *args, **options))

    def begin_recv(self, *args: Any, done: Done, **options: Any) -> Request:
        return self.ends(done, partial(self.inner.begin_recv, *args, **options))

    def ends(self, done: Done, begin: Any) -> Request:
        request = self.stranger.ends(done, 0, begin)
        request.stranger = self.stranger
        request.begin()
        return request


class Ends(RelayedRequest):
    """As they should."""

    stranger: Stranger


class Never(Ends):
    def end(self, error: Exception | None = None, *, withdrawn: bool = False) -> None:
        self.ended, self.error, self.withdrawn = True, error, withdrawn


class Twice(Ends):
    def end(self, error: Exception | None = None, *, withdrawn: bool = False) -> None:
        done = self.done
        super().end(error, withdrawn=withdrawn)
        if done is not None:
            done(self)


class Elsewhere(Ends):
    def end(self, error: Exception | None = None, *, withdrawn: bool = False) -> None:
        end = partial(super().end, error, withdrawn=withdrawn)
        self.stranger.nursery.start_soon(trio.to_thread.run_sync, end)


class Undelivered(Ends):
    def delivery(self) -> Any:
        return None  # as where the word return is forgotten


RULES = {
    Never: "done was not called for a request that has ended",
    Twice: "done was called twice for one request",
    Elsewhere: "done was called in another thread than the event loop's",
    Undelivered: r"delivery\(\) must return the Delivery, not None",
}


async def program(rank: overlap.Rank) -> float:
    return float((await rank.all_reduce(np.ones(1000)))[0])


@pytest.mark.parametrize("ends", RULES, ids=lambda ends: ends.__name__)
def test_a_run_over_a_wire_that_breaks_a_rule_ends_with_its_name(ends: type[Ends]) -> None:
    with pytest.raises(Exception, match=RULES[ends]) as caught:
        overlap.run(program, ranks=2, transport=Stranger(NeuronLink(2), ends))
    assert "StrangeWire broke the contract of transports" in str(caught.value)


def test_a_run_over_a_wire_that_keeps_the_rules_ends_well() -> None:
    assert overlap.run(program, ranks=2, transport=Stranger(NeuronLink(2), Ends)) == [2.0, 2.0]


@asynccontextmanager
async def pair(ends: type[Ends]) -> AsyncIterator[tuple[Wire, Wire]]:
    async with Stranger(NeuronLink(2), ends).open() as transport:
        yield transport.wire(0), transport.wire(1)


@pytest.mark.parametrize("ends", [Never, Twice, Elsewhere], ids=lambda ends: ends.__name__)
def test_the_contract_suite_names_the_rule(ends: type[Ends]) -> None:
    with pytest.raises(
        ContractViolation, match=f"^ends: .*{RULES[ends].removesuffix(' for a request that has ended')}"
    ):
        trio.run(partial(run_check, "ends", partial(pair, ends), scale=Scale(patience_s=0.5, timeout_s=9)))


def test_the_contract_suite_takes_wires_that_keep_the_rules() -> None:
    for check in CHECKS:
        trio.run(partial(run_check, check, partial(pair, Ends), scale=Scale()))
