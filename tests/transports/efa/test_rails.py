"""Rails that die, peers that go: what was lost is sent again, or everybody is told why it cannot be."""

import errno
import math
import random
import re
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.promises import assert_kept, leaves_at_once
from tests.waiting import Lines, run
from transports import LinkLostError, Request
from transports.efa import rail
from transports.efa.rail import Rail, describe_error
from transports.frame import CHUNK_BYTES, PUSH_BYTES
from transports.matching import MessageKind
from transports.tcp import LOST_S, Health, TcpInfo, tcp_info

from .impostor import confronted
from .processes import World, open_world, opened, pairs, quietly

LONG_BYTES = 16 * CHUNK_BYTES + 12_345


def rails_of(world: World, member: int) -> list[Rail]:
    return world.efas[member].links[1 - member].rails


def cut_after(rail: Rail, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the connection of a rail when it has read so many bytes more."""
    receive, left_bytes = rail.receive, nbytes

    def receive_less(into: memoryview) -> int:
        nonlocal left_bytes
        if not left_bytes:
            rail.socket.shutdown(socket.SHUT_RDWR)
            left_bytes = -1
        count = receive(into if left_bytes < 0 else into[:left_bytes])
        left_bytes -= count if left_bytes > 0 else 0
        return count

    monkeypatch.setattr(rail, "receive", receive_less, raising=False)


async def test_each_chunk_goes_to_the_rail_on_which_least_waits() -> None:
    """Whatever room the first one has: what stood behind another chunk there would come later."""
    async with open_world(rails=3) as world:
        a, b = world.ends()
        ended: list[Request] = []
        a.route(1).begin_send(1, 5, bytes(3 * CHUNK_BYTES), done=ended.append)
        begun = [rail.written_bytes + rail.unwritten_bytes for rail in rails_of(world, 0)]
        assert min(begun) >= CHUNK_BYTES  # before anything has come there
        await b.recv_into(0, 5, bytearray(3 * CHUNK_BYTES))
        while not ended:
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("unix", [True, False])
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("nbytes", [1, 7, 40, CHUNK_BYTES // 2, CHUNK_BYTES + 100])
def test_a_long_message_survives_the_death_of_three_rails(
    nbytes: int, staged: bool, unix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, out = random.Random(nbytes).randbytes(LONG_BYTES), bytearray(LONG_BYTES)

    async def main() -> list[Lines]:
        async with open_world(rails=4, unix=unix, peer_direct=not staged) as world:
            a, b = world.ends()
            for i, rail in enumerate(rails_of(world, 1)[1:]):
                cut_after(rail, nbytes + i, monkeypatch)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a.send, 1, 5, message)
                nursery.start_soon(b.recv_into, 0, 5, out)
            await a.send(1, 6, b"and on")
            await b.recv_into(0, 6, bytearray(6))
        return world.reports

    reports = run(main)
    assert out == message
    (line,) = [line for line in reports[0] if "rail 1 to process 1 (rank 1) was lost: " in line]
    assert re.search(r"; \d+ bytes are sent again over the other [123]$", line)
    assert [len([line for line in lines if "was lost" in line]) for lines in reports] == [3, 3]


@pytest.mark.parametrize("seed", range(5))
async def test_small_messages_arrive_once_and_in_order_whatever_rails_die(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    messages = [chance.randbytes(chance.choice((0, 8, 1000, 40_000, 700_000))) for _ in range(150)]
    got: list[bytes] = []
    async with open_world(rails=4) as world:
        a, b = world.ends()
        for member in (0, 1):
            for rail in rails_of(world, member)[member : member + 2]:
                cut_after(rail, chance.randrange(2_000_000), monkeypatch)

        async def send() -> None:
            async with trio.open_nursery() as nursery:
                for message in messages:
                    nursery.start_soon(a.send, 1, 5, message)
                    await wait_all_tasks_blocked()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            for message in messages:
                with await b.recv(0, 5, len(message)) as delivery:
                    got.append(bytes(delivery.view))
    assert got == messages


def test_the_contract_holds_while_rails_die(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Rail.__init__

    def doomed(rail: Rail, *args: object, **settings: object) -> None:
        real(rail, *args, **settings)  # type: ignore[arg-type]
        if rail.index:
            cut_after(rail, 30_000 * rail.index, monkeypatch)

    monkeypatch.setattr(Rail, "__init__", doomed)
    for check in ("sizes", "order_of_sends", "both_directions", "many_tags"):
        assert_kept(check, pairs(rails=4))


async def test_the_death_of_the_last_rail_fails_everything_and_says_whom() -> None:
    world = World(((0,), (3, 4)))
    errors: list[BaseException] = []
    async with opened(world.efas):
        end = world.efas[0].wire(0)
        calls: list[Callable[[], object]] = [
            partial(end.recv_into, 3, 1, bytearray(8)),
            partial(end.recv, 4, 2, CHUNK_BYTES),
            partial(end.send, 4, 3, bytes(PUSH_BYTES + 1)),
        ]
        async with trio.open_nursery() as nursery:
            for call in calls:
                nursery.start_soon(quietly, call, errors)
            await wait_all_tasks_blocked()
            rails_of(world, 1)[0].socket.shutdown(socket.SHUT_RDWR)
        for call in (partial(end.send, 3, 9, b""), partial(end.recv, 4, 9, 0)):
            await quietly(call, errors)
        with pytest.raises(LinkLostError):
            leaves_at_once(end, 3, 9, b"")
    reason = "process 1 (ranks 3, 4) is lost: the last connection to it was lost: the connection ended"
    assert [str(error).partition(": ")[2] for error in errors] == [reason] * 5
    assert world.reports[0] == [reason]
    assert {(error.src, error.dst, error.tag) for error in errors} == {  # type: ignore[attr-defined]
        (3, 0, 1),
        (4, 0, 2),
        (0, 4, 3),
        (0, 3, 9),
        (4, 0, 9),
    }


async def test_a_silent_process_is_given_up() -> None:
    async with confronted(silence_s=0.2) as (impostor, victim):
        errors: list[BaseException] = []
        await quietly(partial(victim.efa.wire(1).recv_into, 0, 5, bytearray(8)), errors)
        assert "process 0 (rank 0) is lost: nothing was received from it for 0.2 s" in str(errors[0])
        assert await impostor.is_hung_up_on()


async def test_a_silent_process_is_not_given_up_where_somebody_else_watches_it() -> None:
    """It may be busy: however often it is looked at, only a connection that is not acknowledged is lost."""
    async with confronted(watched=True, silence_s=0.1) as (impostor, victim):
        (link,) = victim.efa.links.values()
        for _ in range(1000):
            link.close_silent_rails()
            link.check_liveness(math.inf, 0.1)
        await impostor.say(MessageKind.EAGER, 0, 0, 1, 5, 0, payload=b"12345678")
        received = bytearray(8)
        await victim.efa.wire(1).recv_into(0, 5, received)
        assert received == b"12345678"


async def test_a_connection_that_is_not_acknowledged_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with confronted(watched=True) as (impostor, victim):
        errors: list[BaseException] = []
        (link,) = victim.efa.links.values()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(quietly, partial(victim.efa.wire(1).recv_into, 0, 5, bytearray(8)), errors)
            await wait_all_tasks_blocked()
            monkeypatch.setattr(rail, "tcp_info", lambda _: TcpInfo(True, 7.0, 0.0, 0, 0))
            for now_s in (100.0, 103.9):
                monkeypatch.setattr(rail, "monotonic", lambda now_s=now_s: now_s)
                link.close_silent_rails()
            await wait_all_tasks_blocked()
            assert not errors
            monkeypatch.setattr(rail, "monotonic", lambda: 104.0)
            link.close_silent_rails()
            assert link.rails == []
            assert link.last_loss == "nothing sent over it was acknowledged for 4 s"
            assert await impostor.is_hung_up_on()
            await wait_all_tasks_blocked()
            assert not errors  # it is waited for, until somebody knows that it is gone
            victim.efa.lose([0], "its connection broke")
        assert str(errors[0]).endswith("process 0 (rank 0) is lost: its connection broke")


async def test_a_process_that_others_know_to_be_gone_is_given_up() -> None:
    """Its receiver never comes: nothing is under way, so the wire does not show whether it is down."""
    world = World()
    errors: list[BaseException] = []
    async with opened(world.efas):
        a, _ = world.ends()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(quietly, partial(a.send, 1, 5, bytes(PUSH_BYTES + 1)), errors)
            await wait_all_tasks_blocked()
            world.efas[0].lose([0], "it is this one")
            await wait_all_tasks_blocked()
            assert not errors
            world.efas[0].lose([1], "its connection broke")
    assert str(errors[0]).endswith("process 1 (rank 1) is lost: its connection broke")
    assert world.reports[0] == []


def test_a_receiver_that_reads_nothing_acknowledges_all_the_same() -> None:
    """Its window closes; a link on which nothing arrives looks different, which a test with two hosts shows."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        sender.setblocking(False)
        with receiver, suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 20))
        seen = tcp_info(sender)
        assert seen is not None
        assert not seen.under_way or seen.since_ack_s < LOST_S
    assert tcp_info(sender) is None  # closed
    with socket.socket(socket.AF_UNIX) as local:
        assert tcp_info(local) is None


@pytest.mark.parametrize(("probes", "unacknowledged", "under_way"), [(0, 0, False), (1, 0, True), (0, 1, True)])
def test_what_the_device_of_this_side_does_not_take_is_not_acknowledged_either(
    probes: int, unacknowledged: int, under_way: bool
) -> None:
    """Where it is down the system counts nothing as under way, and probes as if the other side took nothing."""

    class Told:
        family = socket.AF_INET

        def getsockopt(self, *_: int) -> bytes:
            return struct.pack("=3xB20xI28xI", probes, unacknowledged, 5000).ljust(104, b"\0")

    assert tcp_info(cast("socket.socket", Told())) == TcpInfo(under_way, 5.0, 0.0, 0, 0)


def test_what_has_just_left_after_a_pause_has_not_waited_since_before_it() -> None:
    health = Health()
    looks = [  # at, under way, seconds since an acknowledgement, and how long it has waited
        (10.0, True, 0.0, 0.0),
        (10.1, False, 0.05, 0.0),
        (30.0, True, 19.95, 0.0),  # it left a moment ago
        (33.0, True, 22.95, 3.0),
        (34.0, True, 0.5, 0.0),  # something was acknowledged
        (37.0, True, 3.5, 3.0),
        (50.0, True, 12.9, 0.0),  # nobody looked meanwhile: that was acknowledged, and this has just left
    ]
    assert [
        health.unacknowledged_s(TcpInfo(under_way, since, 0.0, 0, 0), now) for now, under_way, since, _ in looks
    ] == [waited for *_, waited in looks]


async def test_a_process_that_stops_reading_holds_nothing_up_and_is_given_up() -> None:
    async with confronted() as (impostor, victim):
        end = victim.efa.wire(1)
        ends = impostor.stream.socket.getpeername(), impostor.stream.socket.getsockname()
        errors: list[BaseException] = []

        async def pour() -> None:
            while not errors:
                await quietly(partial(end.send, 0, 1, bytes(30_000)), errors)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour)
            await wait_all_tasks_blocked()
            for number in range(100):
                await impostor.say(MessageKind.EAGER, number, 0, 1, 5, 0, payload=b"12345678")
                await end.recv_into(0, 5, bytearray(8))
            assert not errors
            (link,) = victim.efa.links.values()
            for _ in range(10):  # looks at it, between which it was heard but has read nothing
                link.silent_ticks = 0
                link.check_liveness(8, 8.0)
        assert isinstance(errors[0], LinkLostError)
        here, there = (":".join(map(str, end)) for end in ends)
        which = f"the last connection to it, {here} to {there}, was lost: it has taken nothing for 8 s"
        assert victim.reports == [f"process 0 (rank 0) is lost: {which}"]


async def test_an_event_loop_that_stood_still_proves_nothing() -> None:
    """Silence is counted in looks, of which there are none while this process itself does not listen."""
    async with open_world(silence_s=8.0) as world:
        (link,) = world.efas[0].links.values()
        for _ in range(8):
            link.check_liveness(8, 8.0)
        assert link.engine.gone is None
        link.silent_ticks = 0  # as any byte that comes does
        for _ in range(8):
            link.check_liveness(8, 8.0)
        assert link.engine.gone is None
        link.check_liveness(8, 8.0)
        assert link.engine.gone == "process 1 (rank 1) is lost: nothing was received from it for 8 s"


async def test_waiting_for_any_ends_when_a_process_is_lost_but_not_before_what_has_come() -> None:
    async with open_world(((0,), (1,), (2,))) as world:
        end, choices = world.efas[0].wire(0), [(1, 5), (2, 5)]
        await world.efas[2].wire(2).send(0, 5, b"in time")
        assert (await end.wait_any(choices)).src == 2
        errors: list[BaseException] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(quietly, partial(end.wait_any, [(1, 5), (1, 6)]), errors)
            await wait_all_tasks_blocked()
            await world.efas[1].aclose()
        assert [str(error) for error in errors] == ["message from rank 1 to rank 0, tag 5: process 1 (rank 1) has left"]
        assert (await end.wait_any(choices)).src == 2
        await end.recv_into(2, 5, bytearray(7))
        with pytest.raises(LinkLostError, match=r"process 1 \(rank 1\) has left"):
            await end.wait_any(choices)


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), ConnectionResetError()])
def test_who_writes_is_told_of_a_closed_connection_what_readers_are_told(error: OSError) -> None:
    """Both are woken, and which of them finds out first is chance."""
    assert describe_error(error) == "the connection ended"
    broken = trio.BrokenResourceError()
    broken.__cause__ = error
    assert describe_error(broken) == "the connection ended"
