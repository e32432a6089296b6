"""What strangers, broken members and stopped ones can do to a world: nothing, but to be lost themselves."""

import errno
import re
import struct
from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

from overlap.processes import host as acceptor
from overlap.processes.identity import JoinError, RendezvousConfig, SilenceLimits
from overlap.processes.join import Membership
from overlap.processes.link import ControlLink
from overlap.processes.members import MemberLostError
from overlap.processes.wire import (
    CHECK_NETWORK,
    Bye,
    Contribution,
    Goodbye,
    Join,
    MemberLeft,
    MemberLost,
    MemberNotice,
    Message,
    Ping,
    Pong,
    Ready,
    Refused,
    add_frame_head,
    encode_frame,
)
from transports import delays
from transports.handshake import VERSION, welcome
from transports.matching.protocol import BROKEN_PROTOCOL

from .company import Company, MakeCompany, Puppet, wait_and_leave, watch

OPENING = b"ovlp" + struct.pack("!H", VERSION)


async def knock(company: Company, data: bytes) -> bytes:
    """Say something and no more to the host as a stranger, and return all that it answers until it hangs up."""
    answer = b""
    async with await trio.open_tcp_stream(*company.endpoint) as stream:
        try:
            await stream.send_all(data)
            await stream.send_eof()
            while more := await stream.receive_some():
                answer += more
        except trio.BrokenResourceError:
            pass
        return answer


async def test_strangers_hear_nothing_and_disturb_nobody(make_company: MakeCompany) -> None:
    random = np.random.default_rng(7)
    noises = [b"GET / HTTP/1.1\r\n\r\n", *(random.bytes(int(random.integers(1, 300))) for _ in range(60))]
    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(company.attend, 0, wait_and_leave))
        for noise in noises:
            assert await knock(company, noise) == b""
            # behind an opening that is right there is the host's own, and at most one letter
            assert len(await knock(company, OPENING + noise)) <= 38 + 1
        nursery.start_soon(company.attend, 1, wait_and_leave)
    lines = company.lines
    assert all(line.startswith("turned away 127.0.0.1:") for line in lines)
    assert all(line.endswith(" (others like it are only counted)") for line in lines)
    assert 1 <= len(lines) <= 2  # one for each kind: no member at all, and no proof of the secret


async def test_connections_that_say_nothing_are_capped_and_members_get_in_past_them(
    monkeypatch: pytest.MonkeyPatch, make_company: MakeCompany
) -> None:
    """The host keeps 2 x members + 8 handshakes waiting; the oldest goes when another one knocks."""
    closed = []
    most_are_gone = trio.Event()

    async def loiter(company: Company) -> None:
        async with await trio.open_tcp_stream(*company.endpoint) as stream:
            closed.append(await stream.receive_some())
        if len(closed) == 40 - 12:
            most_are_gone.set()

    # so long that only the cap can make them go before the end of the world
    monkeypatch.setattr(acceptor, "welcome", partial(welcome, deadline_s=60.0))

    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(company.attend, 0, wait_and_leave)
        for _ in range(40):
            nursery.start_soon(loiter, company)
        await most_are_gone.wait()
        nursery.start_soon(company.attend, 1, wait_and_leave)
    assert closed == [b""] * 40
    assert [re.sub(r"\d+\.\d+\.\d+\.\d+:\d+", "ADDRESS", line) for line in company.lines] == [
        "turned away ADDRESS: it sent nothing while too many others waited; a process tries again "
        "(others like it are only counted)"
    ]


@pytest.mark.parametrize("comes", [True, False])
async def test_a_handshake_that_is_late_matters_where_a_member_is_missing(
    monkeypatch: pytest.MonkeyPatch, make_company: MakeCompany, clock: MockClock, *, comes: bool
) -> None:
    """A member on a busy host is as late, and tries again: nobody is told, if it comes."""
    late = (
        "turned away ADDRESS: the other side did not finish the handshake within 2 s; "
        "see whether it still starts, or was stopped (others like it are only counted)"
    )
    monkeypatch.setattr(delays, "read_delays", dict)

    async def host(company: Company) -> None:
        try:
            await company.attend(0, wait_and_leave)
        except JoinError as error:
            told.append(re.sub(r"\d+\.\d+\.\d+\.\d+:\d+", "ADDRESS", str(error)))

    told = list[str]()

    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host, company)
        async with await trio.open_tcp_stream(*company.endpoint) as stream:
            await stream.send_all(OPENING + b"n" * 32)
            assert len(await stream.receive_some()) == 38
            clock.jump(2)
            while await stream.receive_some():
                pass
        if comes:
            nursery.start_soon(company.attend, 1, wait_and_leave)
        else:
            clock.jump(60)
    assert told == ([] if comes else [f"process 1 did not join within 60 s; process 0 {late}"])
    assert not [line for line in company.lines if "turned away" in line]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff" * 12, f"bytes that are no frame, or were damaged on the way; {CHECK_NETWORK}"),
        (add_frame_head(bytes(65537))[:12], "a frame claims 65537 bytes, the limit is 65536"),
        (add_frame_head(b"abc")[:-1] + b"?", f"a frame of 3 bytes that was damaged on the way; {CHECK_NETWORK}"),
        (
            add_frame_head(b"\xc1"),
            "1 bytes that are no message of the control plane: MessagePack data is "
            "malformed: invalid opcode '\\xc1' (byte 0)",
        ),
        (encode_frame(Ready(process="")), "a Ready, which is not its turn"),
        (encode_frame(Join(detail="overlap 0.1.0, local", process="")), "a Join, which is not its turn"),
        (encode_frame(Pong(sent_ns=0, server_ns=0)), "a Pong, which is not its turn"),
        (encode_frame(MemberLeft(member=1)), "a MemberLeft, which is not its turn"),
        (
            encode_frame(Contribution(name="x", turn=0, blob=b"")) * 2,
            "a part of exchange 'x' which is too long, or its second one",
        ),
    ],
)
async def test_a_member_that_breaks_the_protocol_is_lost_and_nobody_else(
    data: bytes, reason: str, make_company: MakeCompany
) -> None:
    seen = {}
    text = f"it sent {reason}" if reason.endswith(CHECK_NETWORK) else f"it sent {reason}; {BROKEN_PROTOCOL}"

    async def hear_of_the_loss(membership: Membership) -> None:
        seen[membership.member] = [await anext(membership)]
        membership.send_notice(b"I go on")
        seen[membership.member].append(await anext(membership))
        await membership.leave()

    company = make_company(3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(company.attend, 0, hear_of_the_loss)
        nursery.start_soon(company.attend, 1, hear_of_the_loss)
        puppet = await Puppet.enter(company, 2)
        assert await puppet.hear(Ready) == Ready(process="")
        await puppet.say(data)
        assert await puppet.hear(Refused) == Refused(reason=text)
        assert await puppet.hear(Ready) is None
        await puppet.stream.aclose()
    assert company.lines == []
    lost = MemberLost(member=2, reason=text)
    assert seen == {0: [lost, MemberNotice(1, b"I go on")], 1: [lost, MemberNotice(0, b"I go on")]}


async def test_a_part_that_is_too_long_loses_its_sender(make_company: MakeCompany) -> None:
    reason = "a part of exchange 'trace' which is too long, or its second one"

    async def exchange(membership: Membership) -> None:
        for name in ("trace", "later"):
            with pytest.raises(MemberLostError, match=rf"^exchange '{name}': process 1 is lost: it sent {reason}"):
                await membership.exchange(name, b"mine")
        await membership.leave()

    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(company.attend, 0, exchange)
        puppet = await Puppet.enter(company, 1)
        await puppet.hear(Ready)
        await puppet.say(encode_frame(Contribution(name="trace", turn=0, blob=bytes(48 * 1024 + 1))))
        assert await puppet.hear(Refused) == Refused(reason=f"it sent {reason}; {BROKEN_PROTOCOL}")
        await puppet.stream.aclose()


@pytest.mark.slow
async def test_frames_of_a_member_gone_mad_never_do_more_than_lose_it(make_company: MakeCompany) -> None:
    """Random and damaged frames from one that knows the secret; the world is asked for something after each."""
    random = np.random.default_rng(11)
    good = (
        encode_frame(Ping(sent_ns=5)) + encode_frame(Contribution(name="x", turn=0, blob=b"abc")) + encode_frame(Bye())
    )
    ends = []

    async def one(company: Company, data: bytes) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(company.attend, 0, go_on)
            nursery.start_soon(company.attend, 1, go_on)
            puppet = await Puppet.enter(company, 2)
            await puppet.hear(Ready)
            await puppet.say(data)
            await puppet.stream.send_eof()
            while (heard := await puppet.hear(Goodbye | Refused)) is not None:  # type: ignore[arg-type]
                ends.append(heard)
            await puppet.stream.aclose()

    async def go_on(membership: Membership) -> None:
        membership.send_notice(b"from %d" % membership.member)
        async for news in membership:
            if isinstance(news, MemberNotice) and news.member < 2:
                break
        await membership.leave()

    company = make_company(3)
    for turn in range(60):
        data = bytearray(good if turn % 2 else random.bytes(40))
        for at in random.integers(0, len(data), size=2):
            data[at] = int(random.integers(256))
        await one(company, bytes(data))
    assert len(ends) >= 10


async def test_silence_is_suspect_then_a_loss_and_the_silent_one_is_told(make_company: MakeCompany) -> None:
    patience = SilenceLimits(beat_s=0.05, suspect_s=0.2, silence_s=0.6)
    seen = {}
    reason = "no sign of life for 0.6 s"

    async def hear(membership: Membership) -> None:
        seen[membership.member] = await anext(membership)
        await membership.leave()

    company = make_company(3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(company.attend, 0, hear, patience=patience))
        # a real member, whose beats are frequent; its own patience is long
        quick = SilenceLimits(beat_s=0.01, suspect_s=60, silence_s=120)
        nursery.start_soon(partial(company.attend, 1, hear, patience=quick))
        puppet = await Puppet.enter(company, 2)
        await puppet.hear(Ready)
        assert await puppet.hear(Refused) == Refused(reason=reason)
        await puppet.stream.aclose()
    assert seen == {member: MemberLost(member=2, reason=reason) for member in (0, 1)}
    assert company.lines == [
        "process 2 has been silent for 0.2 s: it may be stopped, or in a call that keeps the GIL; "
        "it counts as lost after 0.6 s",
    ]


async def test_a_silent_host_is_lost_too(make_company: MakeCompany) -> None:
    seen = []

    async def hear(membership: Membership) -> None:
        seen.extend([news async for news in membership])

    company = make_company(2)
    async with trio.open_nursery() as nursery:
        patience = SilenceLimits(beat_s=0.05, suspect_s=0.2, silence_s=0.4)
        nursery.start_soon(partial(company.attend, 1, hear, patience=patience))
        puppet = await Puppet.receive(company)
        await puppet.answer()
        await puppet.say(encode_frame(Ready(process="")))
        while await puppet.hear(Ping) is not None:
            pass
        await puppet.stream.aclose()
    assert seen == [MemberLost(member=0, reason="no sign of life for 0.4 s")]


async def test_time_in_which_this_process_was_stopped_is_nobodys_silence(clock: MockClock) -> None:
    lost: list[int] = []
    lines: list[str] = []
    ours, theirs = memory_stream_pair()
    link = ControlLink(ours, limit_bytes=1000)
    async with trio.open_nursery() as nursery:
        config = RendezvousConfig(job="", member=0, members=4, endpoint=("", 0), secret=b"secret")
        nursery.start_soon(watch, 3, link, config, lines.append, lambda m, _: lost.append(m))
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(1000)  # nothing ran; what the other said meanwhile waits to be read
        await trio.testing.wait_all_tasks_blocked()
        assert not lost
        assert not lines
        for _ in range(8):
            clock.jump(0.5)
            await trio.testing.wait_all_tasks_blocked()
        assert not lines
        clock.jump(0.5)
        await trio.testing.wait_all_tasks_blocked()
        assert len(lines) == 1
        for _ in range(20):
            assert not lost
            clock.jump(0.5)
            await trio.testing.wait_all_tasks_blocked()
        assert lost
        assert len(lines) == 1
        nursery.cancel_scope.cancel()
    await theirs.aclose()


class Exhausted:
    """A listener of a system that has no descriptors left."""

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, 0

    async def __aenter__(self) -> None:
        await trio.lowlevel.checkpoint()

    async def __aexit__(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()

    async def accept(self) -> trio.SocketStream:
        self.asked += 1
        assert self.asked < 10, "it asks again and again without a pause"
        await trio.lowlevel.checkpoint()
        raise OSError(self.number, "no more")


async def accepting(listener: Exhausted) -> None:
    mine = RendezvousConfig(job="digits", member=0, members=2, endpoint=("", 0), secret=b"secret")
    await acceptor.Host(mine, print, print).accept_connections(listener)  # type: ignore[arg-type]


async def test_while_there_are_no_descriptors_left_it_asks_ten_times_a_second_and_no_more(clock: MockClock) -> None:
    listener = Exhausted(errno.EMFILE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accepting, listener)
        for asked in (1, 2, 3):
            await trio.testing.wait_all_tasks_blocked()
            assert listener.asked == asked
            clock.jump(0.1)
        nursery.cancel_scope.cancel()


def test_a_listener_that_is_broken_is_no_reason_to_wait() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        trio.run(accepting, Exhausted(errno.EBADF))
    assert [str(error) for error in caught.value.exceptions] == [f"[Errno {errno.EBADF}] no more"]


async def test_a_member_that_does_not_read_is_lost_rather_than_all_memory(
    monkeypatch: pytest.MonkeyPatch, make_company: MakeCompany
) -> None:
    monkeypatch.setattr(acceptor, "_OUTBOX_LIMIT_BYTES", 1_000_000)
    seen = []
    lost = trio.Event()

    async def flood(membership: Membership) -> None:
        for _ in range(40):
            membership.send_notice(bytes(48 * 1024))
        seen.append(await anext(membership))
        lost.set()
        await membership.leave()

    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(company.attend, 0, flood)
        puppet = await Puppet.enter(company, 1)
        await puppet.hear(Ready)
        await lost.wait()
        await puppet.stream.aclose()
    assert isinstance(seen[0], MemberLost)
    assert re.match(
        r"it does not read what it is sent: \d+ bytes wait to be sent, the limit is 1000000$", seen[0].reason
    )


async def test_a_link_reads_on_while_it_hangs_up(make_company: MakeCompany) -> None:
    heard: list[Message] = []
    company = make_company(2)
    dialled = await trio.open_tcp_stream(*company.endpoint)
    async with trio.SocketListener(trio.socket.from_stdlib_socket(company.listener.dup())) as listener:
        accepted = await listener.accept()
    link, other = ControlLink(accepted, limit_bytes=1000), Puppet(dialled)
    async with accepted, dialled, trio.open_nursery() as nursery:
        nursery.start_soon(link.write)
        nursery.start_soon(link.read, heard.append)
        link.send(Ready(process=""))
        async with trio.open_nursery() as hanging_up:
            hanging_up.start_soon(link.hang_up)
            assert await other.hear(Ready) == Ready(process="")
            assert await other.hear(Ready) is None  # this side has ended, and its own words still go through
            await other.say(encode_frame(Ping(sent_ns=1)))
            await dialled.send_eof()
        assert heard == [Ping(sent_ns=1)]
        nursery.cancel_scope.cancel()
