"""What processes tell each other of where they are."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from transports.address import RAILS_LIMIT, PeerAddress
from transports.efa.joining import SocketJoining
from transports.failures import TransportError
from transports.identity import Identity
from transports.patience import usable_cores

ONE = PeerAddress(host="a", unix="name", tcp=(("127.0.0.1", 1),), cores=frozenset({0, 9, 64}))


@pytest.mark.parametrize("address", [ONE, replace(ONE, lasting=True), replace(ONE, cores=frozenset())])
def test_an_address_is_read_as_it_was_told(address: PeerAddress) -> None:
    assert PeerAddress.unpack(address.pack(), 1) == address


@pytest.mark.parametrize(
    ("name", "nonsense"),
    [
        ("host", 1),
        ("unix", None),
        ("tcp", 5),
        ("tcp", [["127.0.0.1", 1]] * (RAILS_LIMIT + 1)),
        ("tcp", [["localhost", 1]]),
        ("tcp", [["127.0.0.1", 2**16]]),
        ("lasting", "yes"),
        ("cores", ["1"]),
        ("cores", [-1]),
        ("cores", -1),
    ],
)
def test_nonsense_is_refused(name: str, nonsense: object) -> None:
    told = msgpack.unpackb(ONE.pack())
    assert name in told
    told[name] = nonsense
    with pytest.raises(TransportError, match="process 1 sent no valid address"):
        PeerAddress.unpack(msgpack.packb(told), 1)


def joined(mine: PeerAddress, *others: PeerAddress) -> SocketJoining:
    """Return the first process's way in, once it has met the others."""
    me = Identity(job="job", member=0, members=1 + len(others), secret=b"s")
    joining = SocketJoining(me, rails=1, host="", unix=True, silence_s=None, report=print)
    joining.identity, meeting = mine.host, joining.meeting
    meeting.address, meeting.peers = mine, dict(enumerate(others, start=1))
    return joining


def on(*cores: int, host: str = "a") -> PeerAddress:
    return replace(ONE, host=host, cores=frozenset(cores))


@pytest.mark.parametrize(
    ("processes", "spare"),
    [
        ([on(0, 1), on(0, 1)], True),
        ([on(0), on(1)], True),  # bound to one each
        ([on(0), on(0)], False),
        ([on(0, 1), on(0, 1), on(0, 1)], False),
        ([on(0), on(0), on(1), on(1)], False),
        ([on(0, 1), on(0, 1), on(2, 3, host="b")], True),
        ([on(0, 1), on(2, 3, host="b")], False),  # nobody else is here
        ([on(0, 1, host=""), on(0, 1, host="")], False),  # nobody knows
    ],
)
def test_there_are_cores_for_looking_if_each_process_of_the_host_can_have_one(
    processes: list[PeerAddress], spare: bool
) -> None:
    assert joined(*processes).has_cores_to_spare() == spare


def test_the_cores_of_this_process_are_known() -> None:
    assert len(usable_cores()) >= 1
