"""Efa beyond the contract: where bytes wait, who goes first, how it ends."""

import random
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.matching.test_pair import held_bytes
from tests.transports.promises import assert_kept, leaves_at_once
from tests.waiting import TIMEOUT_S, run
from transports import ArgumentError, Efa, LinkLostError, Request, TransportClosedError, TransportError
from transports.address import PeerAddress
from transports.efa.rail import Rail
from transports.frame import CHUNK_BYTES, EAGER_BYTES, KEPT_BYTES, LIMITS, LOCAL_CHUNK_BYTES, PUSH_BYTES, pack
from transports.matching import MessageKind
from transports.matching.ends import Progress
from transports.testing import CHECKS
from transports.tls import Tls

from .impostor import confronted
from .processes import SECRET, Table, World, open_world, opened, pairs, quietly


@pytest.mark.slow
async def test_late_receivers_take_a_bounded_amount_of_memory_and_block_no_other_tag() -> None:
    """Beyond the budget even small messages wait at their senders; all arrive."""
    nbytes = EAGER_BYTES - 1000
    count = 2 * LIMITS.budget_bytes // nbytes
    async with open_world() as world:
        a, b = world.ends()
        inbound = world.efas[1].links[0].engine
        async with trio.open_nursery() as nursery:
            for tag in range(count):
                nursery.start_soon(a.send, 1, tag, tag.to_bytes(nbytes, "little"))
            await wait_all_tasks_blocked()
            assert LIMITS.budget_bytes * 3 // 4 < held_bytes(inbound) <= LIMITS.budget_bytes
            nursery.start_soon(a.send, 1, count, b"urgent")
            await b.recv_into(0, count, bytearray(6))
            for tag in reversed(range(count)):
                with await b.recv(0, tag, nbytes) as delivery:
                    assert delivery.view == tag.to_bytes(nbytes, "little")
        assert leaves_at_once(a, 1, 0, bytes(nbytes)), "the budget has not come back"


@pytest.mark.parametrize(("hosts", "spanned"), [(("a", "a"), False), (("a", "b"), True), (("", ""), True)])
async def test_whether_ranks_are_on_different_hosts_is_known_to_all(monkeypatch, hosts, spanned) -> None:
    world = World()
    for efa, host in zip(world.efas, hosts, strict=True):
        monkeypatch.setattr(efa._joining, "identity", host)
    async with opened(world.efas):
        assert [efa.spans_hosts([0, 1]) for efa in world.efas] == [spanned] * 2
        assert [efa.spans_hosts([0]) for efa in world.efas] == [False] * 2


async def test_a_flood_of_small_messages_lets_others_run() -> None:
    seen = [0]
    async with confronted() as (impostor, victim):
        inbound = victim.efa.links[0].engine.incoming

        async def watch() -> None:
            while seen[-1] < 4000:
                await trio.lowlevel.checkpoint()
                seen.append(sum(map(len, inbound.arrived.values())))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            flood = [pack(MessageKind.EAGER, number, 0, 1, number, 0) for number in range(4000)]
            await impostor.stream.send_all(b"".join(flood))
        await impostor.say(MessageKind.BYE)
    # Each of two rounds runs every task once, in any order: two turns of the reader may lie between two looks. In each
    # it may come to the end of what it had read, and read on.
    assert max(after - before for before, after in pairwise(seen)) <= 4 * 256


async def test_no_message_leaves_at_once_when_the_budget_is_used_up() -> None:
    async with open_world() as world:
        a, _ = world.ends()
        (rail,) = world.efas[0].links[1].rails
        sent = 0
        while leaves_at_once(a, 1, 7, bytes(EAGER_BYTES)):
            sent += 1
            while not rail.idle:
                await trio.lowlevel.checkpoint()
        assert sent == LIMITS.budget_bytes // (EAGER_BYTES + LIMITS.overhead_bytes)
        assert not leaves_at_once(a, 1, 7, bytes(EAGER_BYTES + 1))
    assert world.reports == [[], []]


async def test_urgent_messages_pass_at_chunk_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves, in which order, when everything waits for one rail; priorities are any integers."""
    chunks: list[int] = []
    async with confronted() as (impostor, victim):
        end = victim.efa.wire(1)
        (rail,) = victim.efa.links[0].rails
        await wait_all_tasks_blocked()
        rail.idle = False  # as if it were writing
        async with trio.open_nursery() as nursery:
            for tag, priority in ((1, 2**100), (2, 0), (3, -(2**100)), (4, 0)):
                nursery.start_soon(partial(end.send, 0, tag, bytes(2 * CHUNK_BYTES), priority=priority))
                await wait_all_tasks_blocked()
            rail.idle = True
            victim.efa.links[0].flush()
            numbers = {fields[0]: fields[3] for _, fields, _ in [await impostor.hear() for _ in range(4)]}
            for _ in range(8):
                kind, fields, _ = await impostor.hear()
                assert kind == MessageKind.PUSHED_CHUNK
                chunks.append(numbers[fields[0]])
        await impostor.say(MessageKind.BYE)
    assert chunks == [3, 3, 2, 2, 4, 4, 1, 1]


async def test_small_messages_pass_long_ones_at_the_next_chunk() -> None:
    heard: list[int] = []
    async with confronted() as (impostor, victim):
        end = victim.efa.wire(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.send, 0, 1, bytes(64 * CHUNK_BYTES))
            await impostor.hear()
            await impostor.say(MessageKind.ACCEPT, 0)
            await wait_all_tasks_blocked()  # the connection is full of chunks
            nursery.start_soon(partial(end.send, 0, 2, b"small", priority=9))
            await wait_all_tasks_blocked()
            for _ in range(65):
                heard.append((await impostor.hear())[0])
        await impostor.say(MessageKind.BYE)
    assert heard.count(MessageKind.EAGER) == 1
    assert heard[-1] == MessageKind.CHUNK
    assert heard.index(MessageKind.EAGER) < 60


@pytest.mark.parametrize(
    ("hosts", "rails", "longest_bytes"),
    [(("a", "a"), 1, LOCAL_CHUNK_BYTES), (("a", "b"), 1, CHUNK_BYTES), (("a", "a"), 2, CHUNK_BYTES)],
)
@pytest.mark.parametrize("unix", [True, False])
async def test_chunks_are_long_over_one_connection_inside_a_host(
    monkeypatch, hosts, unix, rails, longest_bytes
) -> None:
    """Both ways, whoever has dialled; and what they bring is exact."""
    written: list[int] = []
    take_due_frames = Rail.take_due_frames

    def noting_pull(rail: Rail) -> list[bytes | memoryview]:
        parts = take_due_frames(rail)
        written.extend(map(len, parts))
        return parts

    monkeypatch.setattr(Rail, "take_due_frames", noting_pull)
    world = World(unix=unix, rails=rails)
    for efa, host in zip(world.efas, hosts, strict=True):
        monkeypatch.setattr(efa._joining, "identity", host)
    async with opened(world.efas):
        for end, other in (world.ends(), world.ends()[::-1]):
            data, out = random.Random(0).randbytes(PUSH_BYTES + 5), bytearray(PUSH_BYTES + 5)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end.send, other.rank, 5, data)
                nursery.start_soon(other.recv_into, end.rank, 5, out)
            assert out == data
            assert max(written) == longest_bytes
            written.clear()


async def test_an_urgent_message_stays_behind_its_elders_of_the_same_lane() -> None:
    async with open_world() as world:
        a, b = world.ends()
        link = world.efas[0].links[1]
        (rail,) = link.rails
        await wait_all_tasks_blocked()
        rail.idle = False  # as if it were writing
        async with trio.open_nursery() as nursery:
            for tag, priority, text in ((1, 5, b"elder"), (2, 0, b"other"), (1, -9, b"young")):
                nursery.start_soon(partial(a.send, 1, tag, text, priority=priority))
                await wait_all_tasks_blocked()
            rail.idle = True
            link.flush()
        arrived = world.efas[1].links[0].engine.incoming.arrived
        await wait_all_tasks_blocked()
        assert [(lane[2], a.number) for lane, queue in arrived.items() for a in queue] == [(2, 0), (1, 1), (1, 2)]
        for text in (b"elder", b"young"):
            with await b.recv(0, 1, 5) as delivery:
                assert delivery.view == text


def test_long_messages_leave_from_and_arrive_in_the_arrays_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Peer Direct the system reads and writes the callers' memory; without, only the rails' own buffers."""
    data, out = np.random.default_rng(0).bytes(4 * CHUNK_BYTES), np.zeros(4 * CHUNK_BYTES, np.uint8)
    data = np.frombuffer(data, np.uint8)

    def touched(array: np.ndarray, parts: list[memoryview]) -> int:
        views = [np.frombuffer(part, np.uint8) for part in parts if len(part)]
        return sum(view.nbytes for view in views if np.shares_memory(view, array))

    async def main(peer_direct: bool) -> tuple[int, int]:
        written: list[memoryview] = []
        read: list[memoryview] = []
        write = Rail._write_parts

        def noting_receive(rail: Rail) -> None:
            receive = rail.receive

            def note(into: memoryview) -> int:
                count = receive(into)
                read.append(into[:count])
                return count

            rail.receive = note

        def noting_write(rail: Rail, parts: Sequence[bytes | memoryview]) -> None:
            written.extend(map(memoryview, parts[1:]))  # behind the header
            write(rail, parts)

        with monkeypatch.context() as patch:
            patch.setattr(Rail, "_write_parts", noting_write)
            async with open_world(peer_direct=peer_direct) as world:
                a, b = world.ends()
                for rail in world.efas[1].links[0].rails:
                    noting_receive(rail)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(a.send, 1, 5, data)
                    nursery.start_soon(b.recv_into, 0, 5, out)
        assert (out == data).all()
        out[:] = 0
        return touched(data, written), touched(out, read)

    left, landed = run(main, True)
    assert left == data.nbytes
    assert landed > data.nbytes - 150_000  # a few bytes come with each header, more with the first
    assert run(main, False) == (0, 0)


@pytest.mark.parametrize("unix", [True, False])
async def test_who_is_about_to_sleep_takes_in_what_has_come(unix: bool) -> None:
    """Also chunks of a long message, and what follows from them; without a turn of the event loop."""
    ended: list[Request] = []
    async with open_world(unix=unix) as world:
        a, b = world.ends()
        await a.send(1, 4, b"first")
        await b.recv_into(0, 4, bytearray(5))
        short, long = bytearray(4), bytearray(EAGER_BYTES + 100)
        starts = b.route(0)
        starts.begin_recv(0, 5, short, 4, done=ended.append)
        starts.begin_recv(0, 6, long, len(long), done=ended.append)
        starts.catch_up(0)
        assert ended == []
        assert leaves_at_once(a, 1, 5, b"here")
        starts.catch_up(0)
        assert (len(ended), short) == (1, b"here")
        gives = a.route(1)
        gives.begin_send(1, 6, b"x" * len(long), done=lambda _: None)
        starts.catch_up(0)
        gives.catch_up(1)  # where there are several rails, the receiver says first where it belongs
        starts.catch_up(0)
        assert (len(ended), bytes(long)) == (2, b"x" * len(long))


async def test_a_starter_starts_no_messages_that_cannot_be_and_none_after_the_end() -> None:
    world = World()
    a, _ = world.ends()
    with pytest.raises(TransportClosedError, match="is not open yet"):
        a.route(1)
    async with opened(world.efas):
        with pytest.raises(ArgumentError, match="no connection to rank 7"):
            a.route(7)
        starts = a.route(1)
        calls: dict[str, Callable[[int, int], object]] = {
            "send": lambda peer, tag: starts.begin_send(peer, tag, b"x", done=lambda _: None),
            "receive": lambda peer, tag: starts.begin_recv(peer, tag, bytearray(1), 1, done=lambda _: None),
        }
        for call in calls.values():
            with pytest.raises(ArgumentError, match="no connection to rank 0"):
                call(0, 5)
            with pytest.raises(ArgumentError, match="tag"):
                call(1, 2**64)
    for call in (*calls.values(), lambda peer, _: starts.catch_up(peer)):
        with pytest.raises(TransportClosedError, match="closed"):
            call(1, 5)


async def test_a_small_message_is_sent_as_it_was_though_there_was_no_room_for_all_of_it() -> None:
    """Its bytes may change as soon as it has been taken; nothing else has a copy where nothing is ever repeated."""
    nbytes = EAGER_BYTES - 100
    async with open_world() as world:
        a, b = world.ends()
        (rail,) = world.efas[0].links[1].rails
        data, count = bytearray(nbytes), 0
        while rail.idle:
            data[:] = bytes([count]) * nbytes
            assert leaves_at_once(a, 1, count, data)
            count += 1
        data[:] = b"?" * nbytes
        for tag in range(count):
            with await b.recv(0, tag, nbytes) as delivery:
                assert delivery.view == bytes([tag]) * nbytes


async def test_a_burst_is_acted_upon_to_its_end_though_nothing_follows_it() -> None:
    """The reading task sleeps until more comes, and what another task has read is no longer in the socket."""
    count = 300  # more than are acted upon at once
    ended: list[Request] = []
    async with open_world() as world:
        a, b = world.ends()
        starts = b.route(0)
        for _ in range(count):
            starts.begin_recv(0, 5, bytearray(1), 1, done=ended.append)
        for _ in range(count):
            assert leaves_at_once(a, 1, 5, b"x")
        while len(ended) < count and starts.catch_up(0):
            pass
        await wait_all_tasks_blocked()
        assert len(ended) == count


@pytest.mark.parametrize("unix", [True, False])
async def test_who_is_about_to_sleep_writes_what_waits_for_room(unix: bool) -> None:
    """Both ends of a message that no socket holds at once; without a turn of the event loop."""
    message, out, ended = random.Random(2).randbytes(PUSH_BYTES), bytearray(PUSH_BYTES), list[Request]()
    async with open_world(unix=unix) as world:
        gives, takes = (end.route(other) for end, other in zip(world.ends(), (1, 0), strict=True))
        takes.begin_recv(0, 6, out, len(out), done=ended.append)
        gives.begin_send(1, 6, message, done=lambda _: None)
        until_s = perf_counter() + TIMEOUT_S
        while not ended and perf_counter() < until_s:
            gives.catch_up(1)
            takes.catch_up(0)
        assert out == message


async def test_who_is_about_to_sleep_hears_that_its_message_has_arrived() -> None:
    """Though nobody here waits for a message; without a turn of the event loop."""
    sent: list[Request] = []
    world = World(unix=False, watched=True, lasting=True)  # messages are confirmed
    async with opened(world.efas):
        gives, takes = (end.route(other) for end, other in zip(world.ends(), (1, 0), strict=True))
        length = KEPT_BYTES + 1
        gives.begin_send(1, 6, bytes(length), done=sent.append)
        assert not sent
        takes.begin_recv(0, 6, bytearray(length), length, done=lambda _: None)
        until_s = perf_counter() + TIMEOUT_S
        while not sent and perf_counter() < until_s:
            takes.catch_up(0)
            gives.catch_up(1)
        assert len(sent) == 1


@pytest.mark.parametrize("unix", [True, False])
async def test_the_rest_of_a_chunk_wakes_its_reader_though_another_task_has_read_some_of_it(unix: bool) -> None:
    """The reader sleeps until much has come, which never does once others have taken most of it."""
    nbytes = EAGER_BYTES + 100
    message = random.Random(1).randbytes(nbytes)
    async with open_world(unix=unix) as world:
        out, ended = bytearray(nbytes), trio.Event()
        starts = world.ends()[1].route(0)
        starts.begin_recv(0, 6, out, nbytes, done=lambda _: ended.set())
        theirs, ours = world.efas[0].links[1].rails[0], world.efas[1].links[0].rails[0]
        announced = pack(MessageKind.PUSH, 0, 0, 1, 6, nbytes, 0) + pack(MessageKind.CHUNK, 0, 0, payload_bytes=nbytes)
        theirs.socket.send(announced + message[:1000])
        while not ours.reading.within_chunk:
            await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()
        theirs.socket.send(message[1000:-10])
        starts.catch_up(0)
        theirs.socket.send(message[-10:])
        await ended.wait()
        assert bytes(out) == message


async def test_what_was_sent_is_there_after_the_sender_has_left() -> None:
    async with open_world(rails=2) as world:
        a, b = world.ends()
        for i in range(100):
            await a.send(1, i, i.to_bytes(EAGER_BYTES, "little"))
        await world.efas[0].aclose()
        for i in range(100):
            with await b.recv(0, i, EAGER_BYTES) as delivery:
                assert delivery.view == i.to_bytes(EAGER_BYTES, "little")
        for call in (partial(b.recv, 0, 5, 1), partial(b.send, 0, 5, b"x"), partial(b.send, 0, 5, bytes(10**6))):
            with pytest.raises(LinkLostError, match=r"process 0 \(rank 0\) has left"):
                await call()
    assert world.reports == [[], []]


async def test_whoever_is_cancelled_finishes_what_has_met_and_says_goodbye() -> None:
    nbytes = 40 * CHUNK_BYTES
    message, out = random.Random(2).randbytes(nbytes), bytearray(nbytes)
    world = World(rails=2)
    here, there = world.efas
    async with trio.open_nursery() as nursery:
        ready = trio.Event()

        async def stay() -> None:
            async with there.open():
                ready.set()
                await there.wire(1).recv_into(0, 5, out)
                with pytest.raises(LinkLostError, match=r"process 0 \(rank 0\) has left"):
                    await there.wire(1).recv_into(0, 5, bytearray(8))

        nursery.start_soon(stay)
        with trio.CancelScope() as scope:
            async with here.open(), trio.open_nursery() as inside:
                await ready.wait()
                inside.start_soon(here.wire(0).send, 1, 5, message)
                sends = here.links[1].engine.outgoing.sends
                while all(send.progress is not Progress.FLOWING for send in sends.values()):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
    assert world.reports == [[], []]
    assert hash(bytes(out)) == hash(message)


async def test_closing_finishes_what_has_met_and_fails_what_has_not() -> None:
    nbytes = 40 * CHUNK_BYTES
    message, out = random.Random(1).randbytes(nbytes), bytearray(nbytes)
    errors: dict[str, list[BaseException]] = {name: [] for name in ("met", "taken", "sending", "receiving", "there")}
    async with open_world() as world:
        a, b = world.ends()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(quietly, partial(b.recv_into, 0, 1, out), errors["taken"])
            nursery.start_soon(quietly, partial(a.send, 1, 2, bytes(nbytes)), errors["sending"])
            nursery.start_soon(quietly, partial(a.recv_into, 1, 3, bytearray(8)), errors["receiving"])
            nursery.start_soon(quietly, partial(b.recv_into, 0, 4, bytearray(8)), errors["there"])
            await wait_all_tasks_blocked()
            nursery.start_soon(quietly, partial(a.send, 1, 1, message), errors["met"])
            sends = world.efas[0].links[1].engine.outgoing.sends
            while all(send.progress is not Progress.FLOWING for send in sends.values()):
                await trio.lowlevel.checkpoint()
            await world.efas[0].aclose()
    assert hash(bytes(out)) == hash(message)  # comparing them would print them
    assert errors["met"] == errors["taken"] == []
    assert [type(error) for name in ("sending", "receiving") for error in errors[name]] == [TransportClosedError] * 2
    assert str(errors["there"][0]) == "message from rank 0 to rank 1, tag 4: process 0 (rank 0) has left"


async def test_a_cancelled_offer_is_withdrawn_although_its_rail_is_late() -> None:
    """The cancellation may overtake the offer: the receiver remembers it."""
    async with confronted() as (impostor, victim):
        await impostor.say(MessageKind.WITHDRAW, 1)
        await impostor.say(MessageKind.OFFER, 1, 0, 1, 5, 10**6, 0)
        await impostor.say(MessageKind.EAGER, 0, 0, 1, 5, 0, payload=b"first")
        await impostor.say(MessageKind.EAGER, 2, 0, 1, 5, 0, payload=b"third")
        assert await impostor.hear() == (MessageKind.WITHDRAWN, [1], b"")
        for text in (b"first", b"third"):
            with await victim.efa.wire(1).recv(0, 5, 5) as delivery:
                assert delivery.view == text
        await impostor.say(MessageKind.BYE)


async def test_a_cancellation_that_comes_too_late_is_not_told() -> None:
    """The receiver has accepted: the message is finished, and its sender is not told otherwise."""
    chunks = PUSH_BYTES // CHUNK_BYTES + 1
    async with confronted() as (impostor, victim):
        scope = trio.CancelScope()
        ended: list[str] = []

        async def send() -> None:
            with scope:
                await victim.efa.wire(1).send(0, 5, bytes(chunks * CHUNK_BYTES))
                ended.append("sent")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert (await impostor.hear())[0] == MessageKind.OFFER
            scope.cancel()
            assert await impostor.hear() == (MessageKind.WITHDRAW, [0], b"")
            assert ended == []
            await impostor.say(MessageKind.ACCEPT, 0)
            assert [(await impostor.hear())[0] for _ in range(chunks)] == [MessageKind.CHUNK] * chunks
        assert ended == ["sent"]
        assert not scope.cancelled_caught
        await impostor.say(MessageKind.BYE)


async def test_three_processes_reach_each_other() -> None:
    placement = ((0, 1), (2,), (5, 4))
    async with open_world(placement, rails=2) as world:
        ranks = [(efa, rank) for efa in world.efas for rank in efa.ranks]
        async with trio.open_nursery() as nursery:
            for efa, rank in ranks:
                for peer in efa.peers:
                    nursery.start_soon(efa.wire(rank).send, peer, 7, bytes([rank, peer]) * 100_000)
            for efa, rank in ranks:
                for peer in efa.peers:
                    with await efa.wire(rank).recv(peer, 7, 200_000) as delivery:
                        assert delivery.view == bytes([peer, rank]) * 100_000
    assert world.reports == [[], [], []]


async def test_interfaces_and_addresses_are_rails() -> None:
    async with open_world(rails=["lo", "127.0.0.2"], unix=False) as world:
        rails = world.efas[0].links[1].rails
        assert [rail.socket.getsockname()[0] for rail in rails] == ["127.0.0.1", "127.0.0.2"]  # type: ignore[attr-defined]
        a, b = world.ends()
        await a.send(1, 0, b"hello")
        await b.recv_into(0, 0, bytearray(5))


async def test_a_process_alone_has_nobody_to_talk_to() -> None:
    async with open_world(((0, 1),)) as world:
        with pytest.raises(ArgumentError, match="process 0 has no connection to rank 1"):
            await world.efas[0].wire(0).send(1, 0, b"")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"member": 2}, "member: expected 0 to 1, with ranks in placement, got 2"),
        ({"placement": [[0], [0]]}, "rank 0 is named twice or more; name each rank once"),
        ({"placement": [[0], [-1]]}, "expected ranks from 0 to 4294967295, got -1"),
        ({"rails": 0}, "rails: expected 1 to 64, or as many local addresses, got 0"),
        ({"silence_s": 0}, "silence_s is 0; it must be above 0, and finite"),
        ({"secret": b""}, "secret: is empty"),
    ],
)
def test_settings_that_cannot_work_are_rejected(settings: dict[str, object], reason: str) -> None:
    usual: dict[str, object] = {"member": 0, "placement": [[0], [1]], "secret": SECRET, "exchange": Table(1).of(0)}
    with pytest.raises(ArgumentError, match=reason):
        Efa(**{**usual, **settings})  # type: ignore[arg-type]


class Resolver(trio.abc.HostnameResolver):
    """Knows one name, and waits to be asked for it twice before it answers."""

    def __init__(self) -> None:
        self.asked = 0
        self.both = trio.Event()

    async def getaddrinfo(  # type: ignore[override]
        self, host: bytes, port: object, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if host != b"here.test":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        self.asked += 1
        if self.asked == 2:
            self.both.set()
        await self.both.wait()
        return [(socket.AF_INET, type, proto, "", ("127.0.0.1", 0))]

    async def getnameinfo(self, sockaddr: object, flags: int) -> tuple[str, str]:
        raise AssertionError("nobody asks for the name of an address")


async def test_a_slow_resolver_holds_nobody_up() -> None:
    resolver = Resolver()
    trio.socket.set_custom_hostname_resolver(resolver)
    async with open_world(rails=["here.test", "127.0.0.1"], unix=False):
        assert resolver.asked == 2


async def test_a_rail_without_an_address_is_named() -> None:
    trio.socket.set_custom_hostname_resolver(Resolver())
    with pytest.raises(ArgumentError, match=r"rails: 'nowhere0' has no address \(Name or service not known\)"):
        async with World(rails=["nowhere0"]).efas[0].open():
            raise AssertionError("it has been opened")


async def test_it_works_only_while_it_is_open_and_opens_once() -> None:
    world = World()
    (a, _) = world.ends()
    with pytest.raises(TransportClosedError, match="the transport is not open yet"):
        await a.send(1, 0, b"")
    async with opened(world.efas):
        pass
    with pytest.raises(TransportClosedError, match="the transport has been closed"):
        await a.send(1, 0, b"")
    with pytest.raises(TransportClosedError, match="a transport is opened once; make another Efa"):
        async with world.efas[0].open():
            raise AssertionError("it has been opened twice")


async def test_a_process_that_does_not_come_is_named() -> None:
    world = World(join_s=0.05)
    card = PeerAddress(host="", unix="", tcp=(("127.0.0.1", 1),)).pack()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.tables.of(0), "rail", card)
        with pytest.raises(TransportError, match=r"process 1 has no connection with process 0 after 0\.05 s"):
            async with world.efas[1].open():
                raise AssertionError("nobody has come")


async def test_a_process_that_is_lost_is_not_waited_for_any_longer() -> None:

    async def lose_soon(efa: Efa) -> None:
        await trio.testing.wait_all_tasks_blocked()
        efa.lose([0], "its connection ended")

    world = World(join_s=60)
    card = PeerAddress(host="", unix="", tcp=(("127.0.0.1", 1),)).pack()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.tables.of(0), "rail", card)
        nursery.start_soon(lose_soon, world.efas[1])
        with pytest.raises(LinkLostError, match=r"^process 0 is lost: its connection ended$"):
            async with world.efas[1].open():
                raise AssertionError("nobody has come")


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


HUGE_BYTES = (1 << 30) + 5


@pytest.mark.slow
@pytest.mark.skipif(
    _available_bytes() < 4 * HUGE_BYTES, reason="needs memory for a GiB at both ends, and some to spare"
)
async def test_more_than_a_gibibyte() -> None:
    data, out = np.zeros(HUGE_BYTES, np.uint8), np.empty(HUGE_BYTES, np.uint8)
    marks = np.random.default_rng(0).integers(0, HUGE_BYTES, 1000)
    data[marks] = 1 + marks % 251
    async with open_world(rails=2) as world:
        a, b = world.ends()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.send, 1, 5, data)
            nursery.start_soon(b.recv_into, 0, 5, out)
    assert all(np.array_equal(data[at : at + 2**24], out[at : at + 2**24]) for at in range(0, HUGE_BYTES, 2**24))


async def test_offsets_beyond_four_gibibytes() -> None:
    """Nothing of this memory is touched but the ends, so it costs none."""
    nbytes = 2**32 + CHUNK_BYTES + 3
    out = np.zeros(nbytes, np.uint8)
    async with confronted() as (impostor, victim):
        errors: list[BaseException] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(quietly, partial(victim.efa.wire(1).recv_into, 0, 5, out), errors)
            await impostor.say(MessageKind.OFFER, 0, 0, 1, 5, nbytes, 0)
            assert await impostor.hear() == (MessageKind.ACCEPT, [0], b"")
            await impostor.say(MessageKind.CHUNK, 0, 2**32, payload=b"m" * CHUNK_BYTES)
            await impostor.say(MessageKind.CHUNK, 0, 2**32 + CHUNK_BYTES, payload=b"end")
            await impostor.say(MessageKind.BYE)
    assert (out[2**32 - 1], bytes(out[2**32 + CHUNK_BYTES - 2 :])) == (0, b"mmend")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    """Two worlds of encryption: a certificate in each, which is its own authority."""
    folder = tmp_path_factory.mktemp("tls")
    how = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=member"]
    worlds = {}
    for name in ("ours", "theirs"):
        key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
        command = ["openssl", *how, "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        worlds[name] = Tls(certificate=certificate, key=key, authority=certificate)
    return worlds


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes certificates")


@pytest.mark.slow
@pytest.mark.everyday(4)
@needs_openssl
@pytest.mark.parametrize("check", CHECKS)
def test_the_contract_holds_over_tls(check: str, tls: dict[str, Tls]) -> None:
    assert_kept(check, pairs(tls=tls["ours"], unix=False, rails=2))


@needs_openssl
async def test_whoever_has_no_certificate_does_not_get_in(tls: dict[str, Tls]) -> None:
    world, other = World(tls=tls["ours"], join_s=0.5), World(tls=tls["theirs"], join_s=0.5)
    stranger = other.efas[0]
    stranger.exchange = world.tables.of(0)
    errors: list[BaseException] = []
    async with trio.open_nursery() as nursery:
        for efa in (stranger, world.efas[1]):
            nursery.start_soon(quietly, efa.open().__aenter__, errors)
    assert len(errors) == 2
    assert all(isinstance(error, TransportError) for error in errors)


def told_inside_a_host(*option: int) -> list[Any]:
    """Return an option of all connections between two processes of a host that are joined by two rails."""

    async def main() -> list[Any]:
        async with open_world(unix=False, rails=2) as world:
            rails = [rail for efa in world.efas for link in efa.links.values() for rail in link.rails]
            return [rail.socket.getsockopt(socket.IPPROTO_TCP, *option) for rail in rails]

    return run(main)


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system does not let programs choose")
def test_connections_inside_one_host_are_not_paced() -> None:
    assert [name.rstrip(b"\0") for name in told_inside_a_host(socket.TCP_CONGESTION, 16)] == [b"reno"] * 4


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="this system does not let programs choose")
def test_connections_inside_one_host_take_whole_messages() -> None:
    """Not as little as a stream of Trio, over which they have shaken hands."""

    assert told_inside_a_host(socket.TCP_NOTSENT_LOWAT) == [512 << 10] * 4
