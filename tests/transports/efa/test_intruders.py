"""Who knocks at the door and is no member, or one that breaks the rules: one line, and the world is intact."""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.waiting import run
from transports import LinkLostError
from transports.address import PeerAddress
from transports.failures import TransportError
from transports.frame import CHUNK_BYTES, EAGER_BYTES, HEADER_LIMIT_BYTES, LOCAL_CHUNK_BYTES, pack
from transports.handshake import HandshakeError, greet
from transports.matching import MessageKind

from .impostor import Impostor, Victim, confronted, dial, hello
from .processes import SECRET, World, opened, quietly


async def says_nothing(card: PeerAddress) -> None:
    await (await dial(card)).aclose()


async def says(card: PeerAddress, words: bytes) -> None:
    stream = await dial(card)
    await stream.send_all(words)
    assert await Impostor(stream).is_hung_up_on()
    await stream.aclose()


async def is_refused(card: PeerAddress, secret: bytes = SECRET, **other: object) -> str:
    stream = await dial(card)
    with pytest.raises(HandshakeError) as refusal:
        await greet(stream, hello(**other), secret)
    await stream.aclose()
    return str(refusal.value)


async def join(victim: Victim, before: Callable[[PeerAddress], Awaitable[None]]) -> None:
    """Let an intruder come, and then the member that is expected."""
    async with trio.open_nursery() as nursery:
        entered = trio.Event()

        async def stay() -> None:
            async with victim.efa.open():
                entered.set()
                await victim.efa.wire(1).recv_into(0, 7, bytearray(4))

        nursery.start_soon(stay)
        card = await victim.card()
        await before(card)
        stream = await dial(card)
        await greet(stream, hello(), SECRET)
        await entered.wait()
        await stream.send_all(pack(MessageKind.EAGER, 0, 0, 1, 7, 0, payload_bytes=4) + b"here")
        await Impostor(stream).is_hung_up_on()
        await stream.aclose()


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3, b"\xff" * 100, b"ovlp\xff\xff" + bytes(60), bytes(1000)],
    ids=["browser", "ones", "other version", "zeros"],
)
def test_a_stranger_is_refused_in_one_line_and_the_member_joins(words: bytes) -> None:
    victim = Victim()

    async def stranger(card: PeerAddress) -> None:
        await says_nothing(card)
        await says(card, words)

    run(join, victim, stranger)
    (line,) = [line for line in victim.reports if "refused" in line]
    assert line.startswith("refused 2 connections")


def test_a_wrong_secret_is_told_on_both_sides() -> None:
    victim = Victim()

    async def other(card: PeerAddress) -> None:
        assert "the secrets differ" in await is_refused(card, b"of another world")

    run(join, victim, other)
    assert "the secrets differ" in victim.reports[0]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"epoch": 3}, "epoch 3 refused; here it is 0"),
        ({"job": "other"}, "job 'other' refused; here it is ''"),
        ({"members": 3}, "members 3 refused; here it is 2"),
        ({"role": "member"}, "role 'member' refused; here it is 'rail'"),
        ({"member": 1}, "process 1, rail '0' is not expected to call process 1"),
        ({"detail": "1"}, "process 0, rail '1' is not expected to call process 1"),
        ({"detail": "x"}, "process 0, rail 'x' is not expected to call process 1"),
    ],
)
def test_a_member_of_another_world_is_told_why(said: dict[str, object], reason: str) -> None:
    victim = Victim()

    async def other(card: PeerAddress) -> None:
        assert await is_refused(card, **said) == reason

    run(join, victim, other)
    assert reason in victim.reports[0]


async def test_a_member_joins_once() -> None:
    """A second process with the same index is refused while another rail of the first is still expected."""
    victim = Victim(rails=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(victim.efa.open().__aenter__)
        card = await victim.card()
        first = await dial(card)
        await greet(first, hello(), SECRET)
        assert await is_refused(card) == "rail 0 of process 0 has already joined"
        await first.aclose()
        nursery.cancel_scope.cancel()
    assert victim.reports == ["refused 1 connections; the last: rail 0 of process 0 has already joined"]


async def test_different_rails_are_named() -> None:
    world = World()
    other = World(rails=2)
    world.efas[1] = other.efas[1]
    other.efas[1].exchange = world.tables.of(1)
    errors: list[BaseException] = []
    async with trio.open_nursery() as nursery:
        for efa in world.efas:
            nursery.start_soon(quietly, efa.open().__aenter__, errors)
    assert sorted(map(str, errors)) == [
        "process 0 has rails=1, process 1 has rails=2; start all processes with the same number of rails",
        "process 1 has rails=2, process 0 has rails=1; start all processes with the same number of rails",
    ]
    assert all(isinstance(error, TransportError) for error in errors)


BAD_FRAMES: dict[str, bytes] = {
    "nothing of sense": b"\xff" * HEADER_LIMIT_BYTES,
    "payload too long": pack(MessageKind.CHUNK, 0, 0, payload_bytes=LOCAL_CHUNK_BYTES + 1),
    "a header that came damaged": bytes([pack(MessageKind.BYE)[0] ^ 1]) + pack(MessageKind.BYE)[1:],
    "a checksum of nothing, by which nobody is named": pack(MessageKind.ACCEPT, 17, payload_checksum=b"12345678"),
    "an eager message that came damaged": pack(MessageKind.EAGER, 0, 0, 1, 5, 0, payload_checksum=b"12345678"),
    "unknown kind": bytes([*bytes(8), len(MessageKind)]),
    "no such offer": pack(MessageKind.ACCEPT, 17),
    "nothing was refused": pack(MessageKind.REFUSE, 17, 5, 0),
    "nothing was taken": pack(MessageKind.TAKEN, 17),
    "nothing was withdrawn": pack(MessageKind.WITHDRAWN, 17),
    "credit from nowhere": pack(MessageKind.CREDIT, 1),
    "no such rail": pack(MessageKind.LOST, 5, 0),
    "payload where none belongs": pack(MessageKind.ACCEPT, 1, payload_bytes=1) + b"x",
    "eager message too long": pack(MessageKind.EAGER, 0, 0, 1, 0, 0, payload_bytes=EAGER_BYTES + 1),
    "unknown source": pack(MessageKind.EAGER, 0, 9, 1, 0, 0),
    "unknown destination": pack(MessageKind.OFFER, 0, 0, 9, 0, 8, 0),
    "source is here": pack(MessageKind.EAGER, 0, 2, 1, 0, 0),
    "announced twice": pack(MessageKind.EAGER, 0, 0, 1, 0, 0) * 2,
    "unknown chunk": pack(MessageKind.CHUNK, 3, 0, payload_bytes=4) + b"abcd",
    "withdrawn in the far future": pack(MessageKind.WITHDRAW, 2**63),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_a_bad_frame_ends_the_connection_with_a_reason(name: str) -> None:
    async with confronted() as (impostor, victim):
        errors: list[BaseException] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(quietly, lambda: victim.efa.wire(1).recv_into(0, 5, bytearray(8)), errors)
            await wait_all_tasks_blocked()
            await impostor.stream.send_all(BAD_FRAMES[name])
            assert await impostor.is_hung_up_on()
        (error,) = errors
        assert isinstance(error, LinkLostError)
        assert "process 0 (rank 0) is lost: the last connection to it was lost: a bad frame: " in str(error)
        assert len(victim.reports) == 1


def test_chunks_must_fit_their_message() -> None:
    nbytes = CHUNK_BYTES + 5

    async def main(chunk: tuple[int, int]) -> None:
        async with confronted() as (impostor, victim):
            errors: list[BaseException] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(quietly, lambda: victim.efa.wire(1).recv_into(0, 5, bytearray(nbytes)), errors)
                await impostor.say(MessageKind.OFFER, 0, 0, 1, 5, nbytes, 0)
                assert await impostor.hear() == (MessageKind.ACCEPT, [0], b"")
                await impostor.say(MessageKind.CHUNK, 0, CHUNK_BYTES, payload=b"12345")
                offset, size = chunk
                await quietly(partial(impostor.say, MessageKind.CHUNK, 0, offset, payload=bytes(size)), [])
                assert await impostor.is_hung_up_on()
            assert "a bad frame: message 0 has no chunk" in str(errors[0])

    for chunk in ((CHUNK_BYTES, 5), (0, 5), (1, CHUNK_BYTES), (2 * CHUNK_BYTES, 5), (2**62, CHUNK_BYTES)):
        run(main, chunk)


async def test_eager_data_has_a_budget() -> None:

    async def pour(impostor: Impostor) -> None:
        for number in range(10_000):
            await impostor.say(MessageKind.EAGER, number, 0, 1, number, 0, payload=bytes(EAGER_BYTES))

    async with confronted() as (impostor, victim):
        errors: list[BaseException] = []
        await quietly(lambda: pour(impostor), errors)
        assert await impostor.is_hung_up_on()
        assert "peer sent more eager data than the agreed" in victim.reports[0]
        held = victim.efa.links[0].engine.incoming
        assert not held.arrived


async def test_a_frame_for_a_tag_that_nobody_knows_waits_and_harms_nobody() -> None:
    async with confronted() as (impostor, victim):
        await impostor.say(MessageKind.EAGER, 0, 0, 1, 2**64 - 1, 0, payload=b"nobody")
        await impostor.say(MessageKind.EAGER, 1, 0, 1, 5, 0, payload=b"somebody")
        out = bytearray(8)
        await victim.efa.wire(1).recv_into(0, 5, out)
        assert out == b"somebody"
        await impostor.say(MessageKind.BYE)


async def test_opened_worlds_have_no_door() -> None:
    """Once all have joined nobody listens any more."""
    world = World(unix=False)
    card = []
    real = world.efas[1].exchange

    async def spy(name: str, mine: bytes) -> list[bytes]:
        card.append(PeerAddress.unpack(mine, 1))
        return await real(name, mine)

    world.efas[1].exchange = spy
    async with opened(world.efas):
        with pytest.raises(OSError, match="all attempts to connect"):
            await dial(card[0])
