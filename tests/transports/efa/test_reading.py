"""What is read from a rail means the same however it comes in pieces; what processes tell of where they are."""

import random
from dataclasses import replace

import msgpack
import pytest

from tests.errors import error_of
from transports.address import RAILS_LIMIT, PeerAddress
from transports.efa.joining import SocketJoining
from transports.efa.reading import ReadBuffer
from transports.failures import TransportError
from transports.frame import CHUNK_BYTES, EAGER_BYTES, FrameError, checksum, pack
from transports.identity import Identity
from transports.matching import MessageKind
from transports.patience import usable_cores

# -- what is read from a rail means the same however it comes in pieces, and whoever reads it --------------------------

LONG_BYTES = CHUNK_BYTES + 1000


class Destinations:
    """An engine with one long message, and what has happened."""

    gone = None

    def __init__(self, *, staged: bool = False) -> None:
        self.incoming, self.filling = self, dict[int, object]()
        self.memory = bytearray(LONG_BYTES)
        self.events: list[tuple[object, ...]] = []
        self.reading = ReadBuffer(self, self._take, staged=staged)  # type: ignore[arg-type]

    def _take(self, kind: int, fields: list[int]) -> None:
        self.events.append((MessageKind(kind), *fields, self.reading.arrived_frames))

    def handle_eager(self, fields: list[int], payload: memoryview) -> None:
        self.events.append((MessageKind.EAGER, *fields, bytes(payload), self.reading.arrived_frames))

    def chunk_memory(self, number: int, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.memory)[offset : offset + nbytes]

    def pushed_chunk_memory(self, nbytes: int, *fields: int) -> memoryview:
        self.events.append((MessageKind.PUSHED_CHUNK, *fields, self.reading.arrived_frames + 1))
        return self.chunk_memory(fields[0], fields[-1], nbytes)

    def count_chunk(self, number: int, offset: int, nbytes: int) -> None:
        piece = bytes(self.memory[offset : offset + nbytes])
        self.events.append(("filled", number, offset, piece, self.reading.arrived_frames))

    def feed(self, data: bytes, most_bytes: random.Random | None = None) -> None:
        """Give it all of something, in pieces of random lengths or as large as there is room."""
        at = 0
        while at < len(data):
            room = self.reading.read_target()
            assert room.nbytes
            count = min(room.nbytes, len(data) - at)
            if most_bytes is not None:
                count = min(count, most_bytes.choice((1, 7, 40, 300, 70_000)))
            room[:count] = data[at : at + count]
            del room
            at += count
            behind = self.reading.handle_received(count)
            while behind:
                behind = self.reading.handle_frames()


def eager(number: int, payload: bytes) -> bytes:
    return (
        pack(MessageKind.EAGER, number, 1, 0, 5, 0, payload_bytes=len(payload), payload_checksum=checksum(payload))
        + payload
    )


def chunk(offset: int, payload: bytes) -> bytes:
    return pack(MessageKind.CHUNK, 2, offset, payload_bytes=len(payload), payload_checksum=checksum(payload)) + payload


def pushed(payload: bytes) -> bytes:
    """Return a message that comes with its announcement."""
    nbytes, said = len(payload), checksum(payload)
    return (
        pack(MessageKind.PUSHED_CHUNK, 9, 1, 0, 6, nbytes, 0, 0, payload_bytes=nbytes, payload_checksum=said) + payload
    )


def conversation() -> tuple[bytes, bytes]:
    """Return frames of all lengths, and the long message among them, the beginning of which is sent once more."""
    source = random.Random(1)
    message = source.randbytes(LONG_BYTES)
    frames = [
        eager(0, b"small"),
        eager(1, source.randbytes(EAGER_BYTES)),
        pack(MessageKind.PUSH, 2, 1, 0, 6, LONG_BYTES, 0),
    ]
    frames += [chunk(0, message[:CHUNK_BYTES]), eager(3, b""), chunk(CHUNK_BYTES, message[CHUNK_BYTES:])]
    frames += [eager(4, source.randbytes(EAGER_BYTES)), *(eager(5 + i, b"x") for i in range(600))]
    frames += [pushed(message[:70_000]), pushed(message[:100])]
    return b"".join(frames), message


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_however_it_comes_in_pieces(seed: int, staged: bool) -> None:
    data, message = conversation()
    whole, pieces = Destinations(), Destinations(staged=staged)
    whole.feed(data)
    pieces.feed(data, random.Random(seed))
    assert whole.memory == pieces.memory == message
    assert whole.events == pieces.events
    kinds = [event[0] for event in whole.events]
    assert kinds[:7] == [
        *[MessageKind.EAGER] * 2,
        MessageKind.PUSH,
        "filled",
        MessageKind.EAGER,
        "filled",
        MessageKind.EAGER,
    ]
    assert kinds[-4:] == [MessageKind.PUSHED_CHUNK, "filled", MessageKind.PUSHED_CHUNK, "filled"]
    assert [event[-1] for event in whole.events] == [*range(1, 608), 608, 608, 609, 609]


def test_many_small_frames_are_not_acted_on_all_at_once() -> None:
    places = Destinations()
    data = b"".join(eager(number, b"") for number in range(600))
    places.reading.read_target()[: len(data)] = data
    assert places.reading.handle_received(len(data))
    assert places.reading.has_unhandled_frames
    acted = len(places.events)
    assert 0 < acted < 600
    assert places.reading.handle_frames()
    assert not places.reading.handle_frames()
    assert not places.reading.has_unhandled_frames
    assert len(places.events) == 600


def test_after_a_chunk_little_more_than_the_next_header_is_read_until_something_longer_comes_at_once() -> None:
    """What is read beside the header of a chunk is copied once more."""
    places = Destinations()
    everything = places.reading.read_target().nbytes
    places.feed(chunk(0, bytes(CHUNK_BYTES)))
    assert places.reading.read_target().nbytes < 1000
    places.feed(eager(3, b"small"))
    assert places.reading.read_target().nbytes < 1000
    places.feed(eager(4, bytes(EAGER_BYTES)))
    assert places.reading.read_target().nbytes == everything


@pytest.mark.parametrize(("frame", "number"), [(chunk(0, bytes(CHUNK_BYTES)), 2), (pushed(bytes(CHUNK_BYTES)), 9)])
def test_a_chunk_that_came_damaged_is_named(frame: bytes, number: int) -> None:
    places, damaged = Destinations(), bytearray(frame)
    damaged[-1] ^= 1
    assert str(error_of(FrameError, places.feed, bytes(damaged))) == (
        f"bytes 0 to 524288 of message {number} came damaged: the bytes do not match their checksum"
    )


# -- what processes tell each other of where they are ------------------------------------------------------------------

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
