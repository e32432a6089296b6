"""Control messages on the wire: what is written can be read, nothing else can, and links that break meanwhile."""

from typing import Any, get_args, get_type_hints

import msgpack
import numpy as np
import pytest
import trio
import trio.testing
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from overlap.collectives.call import CallKey
from overlap.processes.host import Host
from overlap.processes.identity import RendezvousConfig
from overlap.processes.link import ControlLink
from overlap.processes.members import Action, SendControl
from overlap.processes.wire import (
    BLOB_LIMIT_BYTES,
    FRAME_LIMIT_BYTES,
    Contribution,
    Difference,
    FrameReader,
    Join,
    Message,
    MessageError,
    Notice,
    Ping,
    PlainError,
    RankCause,
    Ready,
    Refused,
    Waiting,
    add_frame_head,
    decode_message,
    encode_frame,
    encode_message,
)
from overlap.waits.ends import RankView

# -- control messages on the wire: what is written can be read, and nothing else can -----------------------------------

EXAMPLES: dict[Any, list[Any]] = {
    str: ["", "näme", "x" * 1000],
    bool: [False, True],
    int: [0, -1, 2**63 - 1],
    bytes: [b"", b"\x00\xff" * 500],
    list[int]: [[], [3, 7]],
    list[tuple[int, bytes]]: [[], [(0, b""), (1, b"xyz")]],
    list[str]: [[], ["all_reduce #3"]],
    list[tuple[int, int]]: [[], [(7, 1)]],
    list[RankView]: [[], [RankView(rank=3, error="no")]],
    PlainError: [("ValueError", "no", "Traceback", "a.py:1")],
    CallKey: [CallKey("all_reduce", "sum", "float32", (4,), 2, 0, ((0, 1),), (), False, True, None, "")],
    Difference | RankCause: [
        Difference(name="dp", seq=3, ranks=(0, 1), calls=("all_reduce", "barrier"), sites=("a.py:1", "a.py:2")),
        RankCause(rank=1, message="no", aborted=True, error=None),
    ],
}


def every_message() -> list[Message]:
    found: list[Message] = []
    for kind in get_args(Message):
        types = get_type_hints(kind)
        for pick in range(3):
            values = {name: EXAMPLES[types[name]][pick % len(EXAMPLES[types[name]])] for name in kind.__struct_fields__}
            found.append(kind(**values))
    return found


def read(data: bytes) -> list[Message]:
    return list(FrameReader().feed(data))


def claiming(length_bytes: int) -> bytes:
    """Return the head of a frame that is right in itself."""
    number = length_bytes.to_bytes(4, "big")
    return number + xxhash.xxh32_digest(number) + bytes(4)


@pytest.mark.parametrize("message", every_message(), ids=lambda message: type(message).__name__)
def test_what_is_written_is_read(message: Message) -> None:
    assert read(encode_frame(message)) == [message]


@given(st.lists(st.integers(1, 50), max_size=60))
def test_it_does_not_matter_how_the_wire_cuts(cuts: list[int]) -> None:
    sent = every_message()
    data = b"".join(map(encode_frame, sent))
    reader, at = FrameReader(), 0
    got: list[Message] = []
    for cut in [*cuts, len(data)]:
        got += reader.feed(data[at : at + cut])
        at += cut
    assert got == sent


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (["Nonsense"], "Invalid value 'Nonsense'"),
        ([], "Expected `array` of at least length 1, got 0"),
        (7, "Expected `array`, got `int`"),
        ({"Join": 1}, "Expected `array`, got `object`"),
        ([["Join"], ""], "Expected `str`, got `array`"),
        (["Join"], "Expected `array` of at least length 3, got 1"),
        (["Join", "", "", ""], "Expected `array` of at most length 2, got 3"),
        (["Join", b"", ""], r"Expected `str`, got `bytes` - at `\$\[1\]`"),
        (["Ping", True], r"Expected `int`, got `bool` - at `\$\[1\]`"),
        (["Contribution", "a", 0, "text"], r"Expected `bytes`, got `str` - at `\$\[3\]`"),
        (["Contributions", "a", 0, [[1]]], "Expected `array` of length 2, got 1"),
        (["Contributions", "a", 0, [[b"", 1]]], "Expected `int`, got `bytes`"),
        (["Waiting", [1, "2"], []], "Expected `int`, got `str`"),
        (["Notice", {}], "Expected `bytes`, got `object`"),
        (["Notice", msgpack.ExtType(5, b"")], "Expected `bytes`, got `ext`"),
        (["Notice", msgpack.Timestamp(1)], "Expected `bytes`, got `ext`"),
    ],
)
def test_nothing_else_is_read(said: object, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        read(add_frame_head(msgpack.packb(said)))


@pytest.mark.parametrize("length_bytes", [FRAME_LIMIT_BYTES + 1, 2**32 - 1])
def test_a_length_beyond_the_limit_is_refused_before_anything_of_it_is_there(length_bytes: int) -> None:
    with pytest.raises(MessageError, match=rf"^a frame claims {length_bytes} bytes, the limit is 65536$"):
        read(claiming(length_bytes))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        b"\x81\xa1x" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x92\xa4Join\xa1\xff",
        b"\x92\xa4Tell" + b"\x81\xa1x" * 900 + b"\x80",
        b"\x92\xa4Tell\x81\x80\x80",
    ],
)
def test_hostile_msgpack_is_a_message_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode_message(data)


@pytest.mark.slow
def test_random_and_damaged_frames_never_do_anything_else() -> None:
    random = np.random.default_rng(4)
    good = [encode_message(message) for message in every_message()]
    read_anyway = 0
    for turn in range(20_000):
        data = bytearray(random.bytes(int(random.integers(0, 40))) if turn % 2 else good[turn // 2 % len(good)])
        for at in random.integers(0, max(1, len(data)), size=2 if data else 0):
            data[at] = int(random.integers(256))
        try:
            message = decode_message(bytes(data))
        except MessageError:
            continue
        read_anyway += 1
        assert decode_message(encode_message(message)) == message or "nan" in repr(message)
    assert read_anyway > 100  # damage inside a text or a number makes another message, not none


def test_no_bit_may_flip_on_the_way() -> None:
    """Wherever in a frame: what comes before it is read, and nothing of it or after it is."""
    before, after = Ping(sent_ns=3), Ping(sent_ns=4)
    for message in every_message():
        frame = encode_frame(message)
        for at in range(len(frame) * 8) if len(frame) < 60 else range(0, len(frame) * 8, 37):
            damaged = bytearray(frame)
            damaged[at // 8] ^= 1 << at % 8
            got: list[Message] = []
            with pytest.raises(MessageError, match="damaged on the way"):
                got.extend(FrameReader().feed(encode_frame(before) + damaged + encode_frame(after)))
            assert got == [before]


def test_what_does_not_fit_is_not_sent() -> None:
    with pytest.raises(MessageError, match=r"^a Contribution of \d+ bytes, the limit is 65536; this is a bug"):
        encode_frame(Contribution(name="x", turn=0, blob=bytes(FRAME_LIMIT_BYTES)))
    with pytest.raises(MessageError, match=r"^a Ping cannot be sent: sent_ns: "):
        encode_frame(Ping(sent_ns=2**64))
    assert len(encode_frame(Contribution(name="x" * 100, turn=2**40, blob=bytes(BLOB_LIMIT_BYTES)))) < FRAME_LIMIT_BYTES


def test_messages_are_values() -> None:
    assert Join(detail="a", process="") == Join(detail="a", process="") != Join(detail="b", process="")
    assert [Ready(process=""), Waiting(missing=[1])] == [Ready(process=""), Waiting(missing=[1])]


def test_text_that_is_no_text_is_sent_readably() -> None:
    """Names of files may hold lone surrogates; what a failing member says must leave nevertheless."""
    assert read(encode_frame(Refused(reason="a\udcff"))) == [Refused(reason="a\\udcff")]


# -- A link whose connection breaks while bytes are on their way into the socket ---------------------------------------


class Stuck(trio.abc.Stream):
    """Takes bytes once it is let, and breaks when it is read."""

    def __init__(self) -> None:
        self.sending, self.go_on = trio.Event(), trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sending.set()
        await self.go_on.wait()

    async def wait_send_all_might_not_block(self) -> None:
        raise NotImplementedError

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await self.sending.wait()
        raise trio.BrokenResourceError

    async def aclose(self) -> None:
        raise NotImplementedError


async def test_a_connection_that_breaks_amid_a_send_has_nothing_left_to_flush() -> None:
    stream = Stuck()
    link = ControlLink(stream, limit_bytes=1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.write)
        link.send(Ping(sent_ns=1))
        await link.read(lambda message: None)
        assert link._unsent_bytes == 0
        stream.go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert link._unsent_bytes == 0
        await link.flush()
        nursery.cancel_scope.cancel()


class Silent(Stuck):
    """Takes no byte and sends none."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.sleep_forever()
        raise AssertionError


async def test_64_mib_may_wait_for_a_member_and_no_byte_more() -> None:
    """A member that is busy for long may have that many messages to read; one that reads nothing is lost."""
    notice = Notice(body=bytes(BLOB_LIMIT_BYTES))
    fit = (64 << 20) // len(encode_frame(notice))
    reasons = list[str]()

    def lose(member: int, reason: str) -> list[Action]:
        reasons.append(reason)
        return []

    async with trio.open_nursery() as nursery:
        config = RendezvousConfig(job="", member=0, members=2, endpoint=("", 0), secret=b"-", detail="")
        host = Host(config, lambda message: None, lambda line: None)
        host.members.end_link = lose  # type: ignore[method-assign]
        nursery.start_soon(host.serve_member, Silent(), "somewhere", 1)
        await trio.testing.wait_all_tasks_blocked()
        host.perform_actions([SendControl(1, notice)] * fit)
        await trio.testing.wait_all_tasks_blocked()
        assert reasons == []
        host.perform_actions([SendControl(1, notice)])
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    waiting = f"{fit * len(encode_frame(notice))} bytes wait to be sent, the limit is {64 << 20}"
    assert reasons == [f"it does not read what it is sent: {waiting}"]
