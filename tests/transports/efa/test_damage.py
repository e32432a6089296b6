"""Bits that flip on the way: an error that names whose bytes they were, or the right bytes by another rail."""

import random
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import pytest
import trio

from transports import LinkLostError, Wire
from transports.frame import CHUNK_BYTES, checksum, pack
from transports.matching import MessageKind

from .impostor import confronted
from .processes import World, opened, quietly
from .proxy import Flip, ProxiedWorld

# What is sent each way: small messages, one just short enough to leave at once, and one of three chunks.
SIZES_BYTES = (0, 8, 100, 60_000, 2 * CHUNK_BYTES + 777)
MESSAGES = [random.Random(nbytes).randbytes(nbytes) for nbytes in SIZES_BYTES]
TOTAL_BYTES = sum(SIZES_BYTES)
EAGER_HEADER_BYTES = len(pack(MessageKind.EAGER, 0, 0, 0, 0, 0))
FIRST_FRAMES_BYTES = 4 * EAGER_HEADER_BYTES + 108

#: Every byte of the first frames, and anywhere in what follows.
PLACES = [*range(0, FIRST_FRAMES_BYTES, 3), *random.Random(1).sample(range(TOTAL_BYTES), 60)]
BATCHES = 12


async def exchange_all(ends: list[Wire], errors: list[BaseException]) -> list[tuple[int, bytes, bytearray]]:
    """Send all messages both ways; return what arrived without an error: tag, as sent, as received."""
    arrived: list[tuple[int, bytes, bytearray]] = []

    async def receive(call: Callable[[], Awaitable[None]], tag: int, message: bytes, out: bytearray) -> None:
        await call()
        arrived.append((tag, message, out))

    async with trio.open_nursery() as nursery:
        for tag, message in enumerate(MESSAGES):
            for here, there in ((0, 1), (1, 0)):
                out = bytearray(len(message))
                take = partial(receive, partial(ends[there].recv_into, here, tag, out), tag, message, out)
                nursery.start_soon(quietly, take, errors)
                nursery.start_soon(quietly, partial(ends[here].send, there, tag, message), errors)
    return arrived


async def with_a_flip(place: int, bit: int, direction: int, **settings: object) -> tuple[list[BaseException], bool]:
    """Exchange all while one bit flips; nothing that arrives may be wrong. Return the errors, and if it flipped."""
    world = ProxiedWorld(silence_s=2.0, checksums=True, **settings)
    errors: list[BaseException] = []
    async with world.open():
        flip = world.ways[0].flips[direction] = Flip(place, bit)
        arrived = await exchange_all(world.ends(), errors)
    assert all(sent == received for _, sent, received in arrived), f"bit {bit} of byte {place} made a wrong result"
    assert len(arrived) == 2 * len(MESSAGES) or errors
    return errors, flip.done


def batches() -> list[list[tuple[int, int]]]:
    """Each has some of everywhere."""
    flips = [(place, random.Random(place).randrange(8)) for place in PLACES]
    return [flips[first::BATCHES] for first in range(BATCHES)]


def every_third() -> list[object]:
    return [pytest.param(each, marks=[pytest.mark.slow] if at % 3 else []) for at, each in enumerate(batches())]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("direction", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", every_third(), ids=lambda batch: f"byte {batch[0][0]} and more")
async def test_a_flipped_bit_never_makes_a_wrong_result(batch: list[tuple[int, int]], direction: int) -> None:
    """With one connection the other process is lost, and named."""
    for place, bit in batch:
        errors, flipped = await with_a_flip(place, bit, direction)
        assert flipped
        assert errors, f"bit {bit} of byte {place} has not been noticed"
        assert all(isinstance(error, LinkLostError) for error in errors)
        assert all(re.search(r": process [01] \(rank [01]\) is lost: the last conn", str(e)) for e in errors)


@pytest.mark.slow
@pytest.mark.parametrize("direction", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", batches()[::3], ids=lambda batch: f"byte {batch[0][0]} and more")
async def test_another_rail_brings_what_came_damaged(batch: list[tuple[int, int]], direction: int) -> None:
    flips = 0
    for place, bit in batch:
        errors, flipped = await with_a_flip(place // 2, bit, direction, rails=2)
        assert not errors
        flips += flipped
    assert flips, "everything took the other rail"


async def test_what_came_damaged_is_named() -> None:
    """An eager message and a chunk: whose, where in it, over what, and that it was damaged."""
    async with confronted() as (impostor, victim):
        await impostor.stream.send_all(
            pack(MessageKind.EAGER, 0, 0, 1, 5, 0, payload_bytes=4, payload_checksum=checksum(b"good")) + b"goof"
        )
        assert await impostor.is_hung_up_on()
    assert victim.reports == [
        "process 0 (rank 0) is lost: the last connection to it was lost: a bad frame: the message from rank 0 to "
        "rank 1, tag 5, came damaged: the bytes do not match their checksum; check the memory of this host"
    ]
    async with confronted() as (impostor, victim):
        errors: list[BaseException] = []
        async with trio.open_nursery() as nursery:
            out = bytearray(CHUNK_BYTES + 4)
            nursery.start_soon(quietly, partial(victim.efa.wire(1).recv_into, 0, 5, out), errors)
            await impostor.say(MessageKind.OFFER, 0, 0, 1, 5, CHUNK_BYTES + 4, 0)
            await impostor.hear()
            head = pack(MessageKind.CHUNK, 0, CHUNK_BYTES, payload_bytes=4, payload_checksum=checksum(b"good"))
            await impostor.stream.send_all(head + b"goof")
            assert await impostor.is_hung_up_on()
    assert [str(error) for error in errors] == [
        "message from rank 0 to rank 1, tag 5: process 0 (rank 0) is lost: the last connection to it was lost: a "
        "bad frame: bytes 524288 to 524292 of the message from rank 0 to rank 1, tag 5, came damaged: the "
        "bytes do not match their checksum; check the memory of this host"
    ]


@pytest.mark.parametrize(
    ("hosts", "settings", "checked"),
    [
        ("ab", {"unix": False}, True),
        (("", ""), {"unix": False}, True),
        ("aa", {"unix": False}, False),
        ("aa", {"unix": True}, False),
        ("aa", {"unix": True, "checksums": True}, True),
        ("aa", {"unix": False, "checksums": True}, True),
        ("ab", {"unix": False, "checksums": False}, False),
    ],
    ids=str,
)
async def test_payloads_are_checked_between_hosts_and_wherever_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, hosts: Sequence[str], settings: dict[str, bool], checked: bool
) -> None:
    world = World(**settings)
    for efa, host in zip(world.efas, hosts, strict=True):
        monkeypatch.setattr(efa._joining, "identity", host)
    async with opened(world.efas):
        assert [efa.links[1 - efa.member].departures.checksums for efa in world.efas] == [checked] * 2


async def test_without_checksums_of_payloads_headers_still_have_theirs() -> None:
    """That is what the option gives up: a flipped bit of a payload arrives."""
    world = ProxiedWorld(silence_s=2.0, checksums=False)
    async with world.open():
        a, b = world.ends()
        got = bytearray(1000)
        flip = world.ways[0].flips[0] = Flip(500, 3)
        await a.send(1, 5, bytes(1000))
        await b.recv_into(0, 5, got)
        assert flip.done
        assert sum(got) == 1 << 3
        world.ways[0].flips[0] = Flip(EAGER_HEADER_BYTES - 1, 3)
        await a.send(1, 6, bytes(1000))
        with pytest.raises(LinkLostError, match="a bad frame: frame header damaged: it does not match its check"):
            await b.recv_into(0, 6, got)
