"""The handshake: who gets in, who does not, and what each side is told."""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgpack
import numpy as np
import pytest
import trio
from trio.testing import MemoryReceiveStream, MemorySendStream, MockClock

from transports import ArgumentError, delays, handshake
from transports.handshake import HELLO_LIMIT_BYTES, VERSION, HandshakeError, greet, welcome
from transports.identity import Hello

SECRET = b"a secret of this test"
DIALLER = Hello(role="rail", job="digits", epoch=3, member=1, members=2, detail="rail 0")
LISTENER = Hello(role="rail", job="digits", epoch=3, member=0, members=2)

T = TypeVar("T")
Outcome = Hello | HandshakeError


class Dribble(trio.abc.ReceiveStream):
    """One byte at a time: nothing may depend on how a wire cuts what it carries."""

    def __init__(self) -> None:
        self.memory = MemoryReceiveStream()
        self.given_bytes, self.asked_to_bytes = 0, 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        assert max_bytes is not None, "a handshake must not ask for all there is"
        self.asked_to_bytes = max(self.asked_to_bytes, self.given_bytes + max_bytes)
        data = await self.memory.receive_some(1)
        self.given_bytes += len(data)
        return data

    async def aclose(self) -> None:
        await self.memory.aclose()


@dataclass
class Wire:
    """Two ends in memory; what travels is written down, and may be changed on the way."""

    dialler: trio.StapledStream[MemorySendStream, Dribble]
    listener: trio.StapledStream[MemorySendStream, Dribble]
    said: tuple[bytearray, bytearray]

    @classmethod
    def make(cls, *, flip: tuple[int, int, int] | None = None) -> Wire:
        """Make one; `flip` names the direction (0: the dialler's words), a byte, and which of its bits turn over."""
        ends = [trio.StapledStream(MemorySendStream(), Dribble()) for _ in range(2)]
        said = (bytearray(), bytearray())
        for direction, end in enumerate(ends):
            end.send_stream.send_all_hook = partial(
                cls._carry, end.send_stream, ends[1 - direction].receive_stream.memory, said[direction],
                flip[1:] if flip is not None and flip[0] == direction else None,
            )  # fmt: skip
            end.send_stream.close_hook = ends[1 - direction].receive_stream.memory.put_eof
        return cls(ends[0], ends[1], said)

    @staticmethod
    async def _carry(
        out: MemorySendStream, into: MemoryReceiveStream, said: bytearray, flip: tuple[int, int] | None
    ) -> None:
        data = out.get_data_nowait()
        begin = len(said)
        said += data
        if flip is not None and begin <= flip[0] < len(said):
            data[flip[0] - begin] ^= flip[1]
        try:
            into.put_data(data)
        except trio.ClosedResourceError:
            raise trio.BrokenResourceError("the other end is closed") from None


async def _outcome(call: Callable[[], Awaitable[Hello]], end: trio.abc.Stream) -> Outcome:
    try:
        return await call()
    except HandshakeError as error:
        await end.aclose()
        return error


def meet(
    wire: Wire,
    *,
    secrets: tuple[bytes, bytes] = (SECRET, SECRET),
    judge: Callable[[Hello], Hello | str] = lambda _: LISTENER,
    mine: Hello = DIALLER,
) -> tuple[Outcome, Outcome]:
    """Let two sides shake hands; what came of it at the dialler and at the listener."""
    found: dict[str, Outcome] = {}

    async def side(name: str, call: Callable[[], Awaitable[Hello]], end: trio.abc.Stream) -> None:
        found[name] = await _outcome(call, end)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(side, "dialler", partial(greet, wire.dialler, mine, secrets[0]), wire.dialler)
            nursery.start_soon(side, "listener", partial(welcome, wire.listener, secrets[1], judge), wire.listener)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return found["dialler"], found["listener"]


def receive(data: bytes, *, then_eof: bool) -> HandshakeError:
    """Let a listener hear `data` and return its error; nobody may get in that way."""

    async def main() -> Outcome:
        wire = Wire.make()
        wire.listener.receive_stream.memory.put_data(data)
        if then_eof:
            wire.listener.receive_stream.memory.put_eof()
        return await _outcome(partial(welcome, wire.listener, SECRET, lambda _: LISTENER), wire.listener)

    error = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert isinstance(error, HandshakeError)
    return error


def test_both_sides_learn_who_the_other_is() -> None:
    judged: list[Hello] = []

    def judge(hello: Hello) -> Hello:
        judged.append(hello)
        return LISTENER

    assert meet(Wire.make(), judge=judge) == (LISTENER, DIALLER)
    assert judged == [DIALLER]


def test_nothing_is_asked_for_but_the_handshake() -> None:
    """What follows may be there already, and belongs to somebody else."""
    wire = Wire.make()
    meet(wire)
    assert wire.listener.receive_stream.asked_to_bytes == len(wire.said[0])
    assert wire.dialler.receive_stream.asked_to_bytes == len(wire.said[1])


def test_different_secrets_are_named_on_both_sides_and_nobody_is_judged() -> None:
    def judge(hello: Hello) -> Hello:
        raise AssertionError(f"judged {hello} before it proved anything")

    wire = Wire.make()
    dialler, listener = meet(wire, secrets=(SECRET, b"another"), judge=judge)
    same = "; start every process of a job with the same OVERLAP_SECRET"
    assert str(dialler) == f"the secrets differ: the listener does not accept this side's proof{same}"
    assert str(listener) == f"the secrets differ: the dialler cannot prove that it knows it{same}"
    assert isinstance(dialler, HandshakeError)
    assert isinstance(listener, HandshakeError)
    assert dialler.why == listener.why == "secret"
    # the opening and one letter: no hello, no reason, no proof to try secrets on
    assert len(wire.said[1]) == 38 + 1


def test_secrets_never_travel() -> None:
    wire = Wire.make()
    meet(wire)
    for said in wire.said:
        assert len(said) > 38 + 32
        assert SECRET not in said


def test_a_refusal_reaches_the_dialler_in_the_words_of_the_listener() -> None:
    dialler, listener = meet(Wire.make(), judge=lambda hello: f"member {hello.member} has already joined")
    for error in (dialler, listener):
        assert isinstance(error, HandshakeError)
        assert (str(error), error.why) == ("member 1 has already joined", "refused")


def test_a_refusal_is_one_line_of_bounded_length() -> None:
    dialler, _ = meet(Wire.make(), judge=lambda _: "two\nlines\x1b[2J " + "é" * 400)
    assert str(dialler).startswith("two?lines?[2J éé")
    assert len(str(dialler).encode()) <= HELLO_LIMIT_BYTES + 3


@pytest.mark.everyday(1)
@pytest.mark.parametrize("direction", [0, 1], ids=["dialler", "listener"])
def test_no_bit_may_change_on_the_way(direction: int) -> None:
    """One bit of every byte that travels, turned over: the side that hears it refuses."""
    wire = Wire.make()
    meet(wire)
    for at in range(len(wire.said[direction])):
        heard = meet(Wire.make(flip=(direction, at, 1 << at % 8)))[1 - direction]
        assert isinstance(heard, HandshakeError), f"byte {at} of what side {direction} says"


@pytest.mark.parametrize("judge", [lambda _: LISTENER, lambda _: "no"], ids=["welcome", "refusal"])
def test_a_welcome_cannot_be_made_a_refusal_nor_the_reverse(judge: Callable[[Hello], Hello | str]) -> None:
    dialler, _ = meet(Wire.make(flip=(1, 38, ord("W") ^ ord("R"))), judge=judge)
    assert isinstance(dialler, HandshakeError)
    assert dialler.why == "secret"


@pytest.mark.parametrize(
    ("data", "why", "message"),
    [
        (
            b"GET / HTTP/1.1\r\nHost: node-0.example\r\n\r\n",
            "protocol",
            "begins with b'GET ', not with b'ovlp'; the peer is another program; choose another port$",
        ),
        (b"\x16\x03\x01" + bytes(600), "protocol", "the peer is another program; choose another port$"),
        (b"", "protocol", "hung up during the handshake; see what it has printed$"),
        (b"ovlp\x00", "protocol", "hung up during the handshake; see what it has printed$"),
        (
            b"ovlp" + struct.pack("!H", VERSION + 1) + bytes(32),
            "version",
            f"version {VERSION + 1}, this side version {VERSION}; install the same",
        ),
        (
            b"ovlp" + struct.pack("!H", VERSION) + bytes(32),
            "left",
            "hung up during the handshake; see what it has printed$",
        ),
        (b"ovlp" + struct.pack("!H", VERSION) + bytes(32) + b"\xff\xff", "protocol", "claims 65535 bytes, the limit"),
        (b"ovlp" + struct.pack("!H", VERSION) + bytes(32) + b"\x00\x01x" + bytes(32), "secret", "cannot prove"),
    ],
)
def test_strangers_are_told_apart(data: bytes, why: str, message: str) -> None:
    error = receive(data, then_eof=True)
    assert error.why == why
    with pytest.raises(HandshakeError, match=message):
        raise error


@pytest.mark.parametrize("nbytes", [0, 3, 38, 39, 41])
def test_silence_ends_at_the_deadline(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "read_delays", dict)
    data = b"ovlp" + struct.pack("!H", VERSION) + bytes(32) + struct.pack("!H", 100) + bytes(99)

    async def main() -> float:
        wire = Wire.make()
        wire.listener.receive_stream.memory.put_data(data[:nbytes])
        began_s = trio.current_time()
        with pytest.raises(
            HandshakeError,
            match=r"^the other side did not finish the handshake within 2 s; check the network between them$",
        ) as caught:
            await welcome(wire.listener, SECRET, lambda _: LISTENER)
        assert caught.value.why == "silent"
        return trio.current_time() - began_s

    assert trio.run(main, clock=MockClock(autojump_threshold=0)) == 2


def test_a_listener_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "read_delays", dict)

    async def main() -> None:
        with pytest.raises(HandshakeError, match=r"within 0\.5 s; check the network between them$"):
            await greet(Wire.make().dialler, DIALLER, SECRET, deadline_s=0.5)
        assert trio.current_time() == 0.5

    trio.run(main, clock=MockClock(autojump_threshold=0, rate=0))


def test_a_process_that_waits_for_a_processor_has_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dialler answers after 4 s; this process could not run for 3 of them."""
    monkeypatch.setattr(delays, "read_delays", lambda: {"1": round(min(trio.current_time() - began_s, 3.0) * 1e9)})

    async def dial(wire: Wire) -> None:
        await trio.sleep(4.0)
        await greet(wire.dialler, DIALLER, SECRET)

    async def main() -> Hello:
        nonlocal began_s
        began_s, wire = trio.current_time(), Wire.make()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial, wire)
            return await welcome(wire.listener, SECRET, lambda _: LISTENER)

    began_s = 0.0
    assert trio.run(main, clock=MockClock(autojump_threshold=0)) == DIALLER


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
async def test_within_a_host_nobody_is_sent_to_the_network(family: int, tmp_path: Path) -> None:
    with socket.socket(family) as listener, socket.socket(family) as dialler:
        listener.bind(str(tmp_path / "s") if family == socket.AF_UNIX else ("localhost", 0))
        listener.listen()
        dialler.connect(listener.getsockname())
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(dialler))
        with pytest.raises(HandshakeError, match=r"within 0\.01 s; see whether it still starts, or was stopped$"):
            await greet(stream, DIALLER, SECRET, deadline_s=0.01)


async def test_cancellation_from_outside_is_no_handshake_error(autojump_clock) -> None:
    with trio.move_on_after(1) as scope:
        await welcome(Wire.make().listener, SECRET, lambda _: LISTENER)
    assert scope.cancelled_caught


async def test_a_dialler_names_the_version_of_the_listener() -> None:
    wire = Wire.make()
    wire.dialler.receive_stream.memory.put_data(b"ovlp" + struct.pack("!H", VERSION + 1) + bytes(32))
    with pytest.raises(
        HandshakeError, match=f"version {VERSION + 1}, this side version {VERSION}; install the same overlap on every"
    ):
        await greet(wire.dialler, DIALLER, SECRET)


async def test_a_listener_of_another_version_still_says_its_own() -> None:
    wire = Wire.make()
    wire.listener.receive_stream.memory.put_data(b"ovlp" + struct.pack("!H", VERSION + 1) + bytes(32))
    with pytest.raises(HandshakeError, match=f"version {VERSION + 1}, this side version {VERSION}"):
        await welcome(wire.listener, SECRET, lambda _: LISTENER)
    assert wire.said[1][:6] == b"ovlp" + struct.pack("!H", VERSION)


def test_a_recorded_dialler_does_not_get_in_again() -> None:
    wire = Wire.make()
    assert meet(wire)[1] == DIALLER
    error = receive(bytes(wire.said[0]), then_eof=True)
    assert error.why == "secret"


def test_a_recorded_listener_is_not_believed() -> None:
    recorded = Wire.make()
    meet(recorded)

    async def main() -> None:
        wire = Wire.make()
        wire.dialler.receive_stream.memory.put_data(bytes(recorded.said[1]))
        with pytest.raises(HandshakeError, match="the listener cannot prove that it knows it"):
            await greet(wire.dialler, DIALLER, SECRET)

    trio.run(main)


async def test_an_echo_is_no_listener() -> None:
    """Whoever sends a dialler's own words back has proved nothing, not even with the right letter before them."""
    wire = Wire.make()
    wire.dialler.send_stream.send_all_hook = None
    found: list[Outcome] = []

    async def dial() -> None:
        found.append(await _outcome(partial(greet, wire.dialler, DIALLER, SECRET), wire.dialler))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        wire.dialler.receive_stream.memory.put_data(bytes(await wire.dialler.send_stream.get_data()))
        wire.dialler.receive_stream.memory.put_data(b"W" + bytes(await wire.dialler.send_stream.get_data()))
    assert isinstance(found[0], HandshakeError)
    assert found[0].why == "secret"


@pytest.mark.parametrize(
    "fields",
    [
        b"\xc1",
        b"",
        msgpack.packb(None),
        msgpack.packb({"role": "rail"}),
        msgpack.packb(astuple(DIALLER)) + b"\x00",
        msgpack.packb(astuple(DIALLER)[:5]),
        msgpack.packb([*astuple(DIALLER), 1]),
        msgpack.packb([*astuple(DIALLER)[:2], True, *astuple(DIALLER)[3:]]),
        msgpack.packb(astuple(replace(DIALLER, member=2))),
        msgpack.packb(astuple(replace(DIALLER, member=-1))),
        msgpack.packb(astuple(replace(DIALLER, epoch=-1))),
        b"\x91" * 200,
        b"\xdd\xff\xff\xff\xff",
        b"\xcf" + b"\xff" * 8,
        b"\xc7\x0c\xff" + b"\xff" * 12,
    ],
)
def test_a_member_that_says_nonsense_is_refused(fields: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_pack_hello", lambda _: fields)
    _, listener = meet(Wire.make())
    assert isinstance(listener, HandshakeError)
    assert listener.why == "protocol"


@pytest.mark.slow
def test_random_bytes_change_nothing() -> None:
    """Random hellos behind an opening that is right, and random bytes from the first on."""
    random = np.random.default_rng(20240607)
    for turn in range(600):
        noise = random.bytes(int(random.integers(0, 400)))
        opening = b"ovlp" + struct.pack("!H", VERSION) if turn % 2 else b""
        error = receive(opening + noise, then_eof=True)
        assert error.why in ("protocol", "left", "secret")
        assert str(error).isprintable()


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    compare = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    meet(Wire.make())
    assert compared == [32, 32]


async def test_callers_mistakes_are_told_at_once() -> None:
    wire = Wire.make()
    with pytest.raises(ArgumentError, match=r"^a hello of 3\d\d bytes, the limit is 256; shorten job or detail$"):
        await greet(wire.dialler, replace(DIALLER, detail="x" * 310), SECRET)
    with pytest.raises(ArgumentError, match=r"^secret: is empty"):
        await greet(wire.dialler, DIALLER, b"")
    with pytest.raises(ArgumentError, match=r"^secret: is empty"):
        await welcome(wire.listener, b"", lambda _: LISTENER)
    assert [len(said) for said in wire.said] == [0, 0]
