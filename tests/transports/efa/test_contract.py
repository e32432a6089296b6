"""Efa keeps the contract of transports: over every kind of connection, and inside every wrapper."""

from functools import partial

import pytest

from tests.transports.promises import assert_kept
from transports import Faulty, LinkSpeed, Paced, Recording, Transport
from transports.testing import CHECKS, MakePair

from .processes import pairs


def slow(src: int, dst: int) -> LinkSpeed:
    return LinkSpeed(latency_s=2.0**-12, bandwidth_bytes_per_s=2.0**31)


def delayed(inner: Transport) -> Transport:
    return Faulty(inner, seed=3, delay=0.5, delay_s=2.0**-10)


KINDS: dict[str, MakePair] = {
    "unix": pairs(),
    "tcp": pairs(unix=False),
    "unix, four rails": pairs(rails=4),
    "tcp, four rails": pairs(unix=False, rails=4),
    "unix, staged": pairs(peer_direct=False),
    "tcp, four rails, staged": pairs(unix=False, rails=4, peer_direct=False),
    "recording": pairs(Recording),
    "paced": pairs(partial(Paced, links=slow)),
    "faulty": pairs(delayed),
    "all wrappers, four rails": pairs(lambda inner: Recording(Paced(delayed(inner), links=slow)), rails=4),
}


# By those with one thing more or less.
IMPLIED = ("tcp, four rails", "unix, staged", "unix, four rails", "recording", "paced", "faulty")


@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow) if k in IMPLIED else k for k in KINDS])
@pytest.mark.parametrize("check", CHECKS)
def test_between_processes(check: str, name: str) -> None:
    assert_kept(check, KINDS[name])
