"""SharedMemory keeps the contract of transports: where memory may be read, where it may not, and inside wrappers."""

import pytest

from transports import Faulty, LinkSpeed, Paced, Recording, Transport
from transports.testing import CHECKS, MakePair

from ..promises import assert_kept
from .processes import pairs


def wrapped(inner: Transport) -> Transport:
    slow = LinkSpeed(latency_s=2.0**-12, bandwidth_bytes_per_s=2.0**31)
    return Recording(Paced(Faulty(inner, seed=3, delay=0.5, delay_s=2.0**-10), links=lambda src, dst: slow))


KINDS: dict[str, MakePair] = {"reading": pairs(), "slots": pairs(reads=False), "all wrappers": pairs(wrapped)}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("check", CHECKS)
def test_between_processes(check: str, name: str) -> None:
    assert_kept(check, KINDS[name])
