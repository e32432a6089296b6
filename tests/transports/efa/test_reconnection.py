"""Rails that come back: dialled again, let in by nobody else, and used, while messages stay exact."""

import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.errors import error_from
from tests.waiting import run
from transports import LinkLostError, Wire
from transports.address import RAILS_LIMIT, PeerAddress
from transports.efa import reconnection as returning
from transports.efa.efa_link import EfaLink
from transports.frame import CHUNK_BYTES, EAGER_BYTES
from transports.handshake import HandshakeError, greet

from .impostor import dial, hello
from .processes import SECRET, World, open_world, opened
from .proxy import ProxiedWorld, Way

LONG_BYTES = 6 * CHUNK_BYTES + 99


def links(world: World) -> list[EfaLink]:
    return [world.efas[0].links[1], world.efas[1].links[0]]


def numbers(world: World) -> list[list[int]]:
    """The numbers of the rails on both sides."""
    return [[rail.index for rail in link.rails] for link in links(world)]


async def both_back(world: World, *, count: int = 1) -> list[str]:
    return [line for lines in world.reports for line in await lines.holding(" is back after ", count=count)]


async def send_and_receive(ends: list[Wire], tag: int, nbytes: int) -> None:
    """Send both ways, and compare."""
    message = random.Random(tag).randbytes(nbytes)
    outs = bytearray(nbytes), bytearray(nbytes)
    async with trio.open_nursery() as nursery:
        for here, there in ((0, 1), (1, 0)):
            nursery.start_soon(ends[here].send, there, tag, message)
            nursery.start_soon(ends[there].recv_into, here, tag, outs[here])
    assert outs[0] == outs[1] == message


async def uses_all(world: World) -> None:
    """Send until every rail has carried something new, both ways."""
    before = {rail: rail.read_bytes for link in links(world) for rail in link.rails}
    tag = 1000
    while any(rail.read_bytes - before[rail] < 100_000 for rail in before):
        await send_and_receive(world.ends(), tag, LONG_BYTES)
        tag += 1


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_rail_whose_connection_broke_is_back_and_used(kind: str) -> None:
    async with open_world(rails=3, unix=kind == "unix") as world:
        rail = links(world)[0].rails[1]
        rail.die("pulled by the test")
        lines = await both_back(world)
        assert numbers(world) == [[0, RAILS_LIMIT + 1, 2]] * 2
        await uses_all(world)
    told = [re.sub(r"\d+\.\d s$", "N s", line) for line in lines]
    assert told == ["rail 1 to process 1 (rank 1) is back after N s", "rail 1 to process 0 (rank 0) is back after N s"]
    assert world.reports[0][0] == (
        "rail 1 to process 1 (rank 1) was lost: pulled by the test; 0 bytes are sent again over the other 2"
    )
    assert [len(lines) for lines in world.reports] == [2, 2]


@pytest.mark.slow
async def test_a_link_that_was_down_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dialled until it gets through; meanwhile the other rail carries everything."""
    monkeypatch.setattr(returning, "_LONGEST_PAUSE_S", 0.2)
    world = ProxiedWorld(rails=2)
    async with world.open():
        way = world.ways[1]
        await way.go_down(times=4)
        await send_and_receive(world.ends(), 5, LONG_BYTES)
        assert numbers(world) == [[0], [0]]
        way.down = False
        await both_back(world)
        assert numbers(world)[0] == numbers(world)[1]
        assert numbers(world)[0][1] >= 4 * RAILS_LIMIT + 1
        assert way.entered == 2
        await uses_all(world)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("seed", "rails"), [(0, 3), (1, 3), (2, 1), (3, 1), (4, 1), (5, 2)])
async def test_messages_are_exact_while_rails_come_and_go(
    seed: int, rails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(returning, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(returning, "_LONGEST_PAUSE_S", 0.01)
    chance = random.Random(seed)
    sizes = [chance.choice((0, 8, 1000, 40_000, 700_000, 3_000_000)) for _ in range(60)]
    world = ProxiedWorld(rails=rails, watched=True, lasting=True)
    async with world.open():

        async def come_and_go() -> None:
            while True:
                for _ in range(chance.randrange(40 if rails > 1 else 1000)):  # enough for a chunk to get through
                    await trio.lowlevel.checkpoint()
                chance.choice(world.ways).cut()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(come_and_go)
            for tag, nbytes in enumerate(sizes):
                await send_and_receive(world.ends(), tag, nbytes)
            while min(way.entered for way in world.ways) < 5:
                await send_and_receive(world.ends(), tag, 8)
            nursery.cancel_scope.cancel()
        await send_and_receive(world.ends(), 7777, LONG_BYTES)
    assert all(" is lost" not in line for lines in world.reports for line in lines)


def test_the_last_rail_is_not_waited_for_where_nobody_else_watches_the_process() -> None:
    """A process whose connections have all ended may be gone."""

    async def main(rails: int) -> None:
        world = ProxiedWorld(rails=rails)
        async with world.open():
            for way in world.ways:
                way.cut()
            with pytest.raises(LinkLostError, match=r"process 0 .* is lost: the last connection to it, .*, was lost: "):
                await world.efas[1].wire(1).recv_into(0, 5, bytearray(8))
        assert [way.entered for way in world.ways] == [1] * rails

    run(main, 1)
    run(main, 2)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_process_at_the_other_end_of_a_single_connection_inside_a_host_ends_with_it(kind: str) -> None:
    """Nothing is kept to be repeated, and nobody waits to hear that it has arrived; what is lost is named."""
    async with open_world(rails=1, unix=kind == "unix", watched=True) as world:
        (rail,) = links(world)[0].rails
        starts, sent = world.ends()[0].route(1), []
        starts.begin_send(1, 5, bytes(EAGER_BYTES + 1), done=sent.append)
        assert len(sent) == 1  # before anybody there has seen any of it
        rail.die("pulled by the test")
        which = "" if kind == "unix" else r", 127\.0\.0\.1:\d+ to 127\.0\.0\.1:\d+,"
        with pytest.raises(
            LinkLostError, match=rf"process 1 .* is lost: the last connection to it{which} was lost: pulled"
        ):
            await world.ends()[0].recv_into(1, 5, bytearray(8))


@pytest.mark.parametrize("lasting", [(True, False), (False, True)])
async def test_a_single_connection_inside_a_host_comes_back_if_either_process_wants_that(
    lasting: tuple[bool, bool],
) -> None:
    world = World(rails=1, unix=False, watched=True)
    for efa, wants in zip(world.efas, lasting, strict=True):
        efa._joining.lasting = wants
    async with opened(world.efas):
        for turn, link in enumerate(links(world), start=1):
            pulled = link.rails[0]
            pulled.die("pulled by the test")
            await send_and_receive(world.ends(), turn, LONG_BYTES)
            assert link.rails
            assert pulled not in link.rails


def test_a_single_connection_may_end_before_its_processes_unless_it_never_leaves_their_host() -> None:
    one = PeerAddress(host="a", unix="", tcp=(("127.0.0.1", 1),))
    moves = {
        "inside": replace(one, tcp=(("127.0.0.1", 2),)),
        "another host, or network namespace": replace(one, host="b"),
        "another address": replace(one, tcp=(("10.0.0.1", 1),)),
        "it is to last": replace(one, lasting=True),
    }
    assert [why for why, other in moves.items() if one.may_disconnect(other)] == list(moves)[1:]
    assert [why for why, other in moves.items() if other.may_disconnect(one)] == list(moves)[1:]
    assert replace(one, host="").may_disconnect(replace(one, host=""))  # nobody knows where they are
    unix = replace(one, unix="name", lasting=True)
    assert [why for why, other in moves.items() if unix.may_disconnect(replace(other, unix="name"))] == list(moves)[1:2]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rails"), [("tcp", 1), ("tcp", 4), ("unix", 4)])
async def test_the_last_rail_comes_back_where_somebody_else_watches_the_process(kind: str, rails: int) -> None:
    """All connections end in the middle of long and short messages both ways, again and again."""
    message = random.Random(7).randbytes(3 * LONG_BYTES)

    def numbers_seen(world: World) -> list[int]:
        return [index for link in links(world) for index in link._tried_numbers.values()]

    noted: list[str] = []
    async with open_world(rails=rails, unix=kind == "unix", watched=True, lasting=True, note=noted.append) as world:
        for turn in range(1, 4):
            out, short = bytearray(len(message)), bytearray(8)
            ends, cut_by = world.ends(), links(world)[turn % 2]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ends[0].send, 1, turn, message)
                nursery.start_soon(ends[1].recv_into, 0, turn, out)
                nursery.start_soon(ends[1].send, 0, turn, message[:8])
                rails_there = tuple(links(world)[1].rails)
                before = sum(rail.read_bytes for rail in rails_there)
                while sum(rail.read_bytes for rail in rails_there) < before + turn * CHUNK_BYTES + 100:
                    await trio.lowlevel.checkpoint()
                for rail in tuple(cut_by.rails):
                    rail.die("pulled by the test")
                await ends[0].recv_into(1, turn, short)
            assert out == message
            assert short == message[:8]
            await both_back(world, count=turn * rails)
    assert [index // RAILS_LIMIT > 0 for index in numbers_seen(world)] == [True] * 2 * rails
    assert len([line for line in noted if "was lost" in line]) == len([line for line in noted if "is back" in line])
    assert not [line for lines in world.reports for line in lines if "is lost" in line]


@pytest.mark.parametrize("rails", [1, 2])
async def test_who_cannot_be_reached_for_long_is_lost(rails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections have ended; nothing that could answer is there any more."""
    world = ProxiedWorld(rails=rails, watched=True, lasting=True, silence_s=15.0)

    async def in_vain(*args: object, **settings: object) -> object:
        raise LinkLostError("process 1 cannot be reached: No route to host") from OSError("No route to host")

    monkeypatch.setattr(returning, "_LOOK_S", 0.05)
    monkeypatch.setattr(returning, "_REPORT_S", 0.1)
    async with world.open():
        monkeypatch.setattr(world.efas[0]._joining, "dial", in_vain)
        world.efas[0]._reconnection._unreachable_s = 0.2
        for way in world.ways:
            way.cut()
        error = await error_from(LinkLostError, world.ends()[0].recv_into(1, 5, bytearray(8)))
    assert error.reason == (
        "process 1 (rank 1) is lost: the connection ended, and since then it could not be reached for 0.2 s"
    )
    assert world.reports[0][0] == (
        "no connection to process 1 (rank 1) is left (the connection ended); it is dialled again"
    )


@pytest.mark.slow
async def test_who_answers_but_lets_nobody_in_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may keep the loop of its process from opening the door; not for ever."""
    world = ProxiedWorld(rails=1, watched=True, lasting=True)
    monkeypatch.setattr(returning, "_LOOK_S", 0.05)
    monkeypatch.setattr(returning, "_ANSWERING_S", 1.0)
    monkeypatch.setattr(returning, "_LONGEST_WAITED_S", 0.01)
    async with world.open():
        world.efas[0]._reconnection._unreachable_s = 0.5
        await world.ways[0].go_down(times=0)
        with pytest.raises(LinkLostError) as lost:
            await world.ends()[0].recv_into(1, 5, bytearray(8))
    assert lost.value.reason == (
        "process 1 (rank 1) is lost: the connection ended, and no connection came about in 1 s, though its host answers"
    )


@pytest.mark.parametrize(("waited_s", "lost"), [(299.0, False), (300.0, True)])
async def test_who_answers_is_waited_for_as_long_as_a_deadlock_may_last(waited_s: float, lost: bool) -> None:
    world = ProxiedWorld(rails=1, watched=True, lasting=True)
    async with world.open():
        link = world.efas[0].links[1]
        reconnection = world.efas[0]._reconnection
        reconnection._unanswered_s[1] = 0.0
        reconnection._give_up_if_absent(link, waited_s)
        assert (link.engine.gone is not None) is lost


@asynccontextmanager
async def listening_again(**settings: object) -> AsyncIterator[tuple[ProxiedWorld, PeerAddress]]:
    """Open a world whose last way is down; yield it, and the address at which its second process listens again."""
    world = ProxiedWorld(**settings)
    card: list[PeerAddress] = []
    spy(world, card)
    async with world.open():
        await world.ways[-1].go_down()
        await listening(card[0])
        yield world, card[0]


async def test_a_count_that_cannot_be_ends_the_process_that_claims_it() -> None:
    async with listening_again(rails=1, watched=True, lasting=True) as (world, address):
        stream = await dial(address)
        with pytest.raises(HandshakeError, match="peer acknowledges 99 frames, and "):
            await greet(stream, hello(detail=f"{RAILS_LIMIT} 0 99"), SECRET)
        await stream.aclose()
        with pytest.raises(LinkLostError, match="peer acknowledges 99 frames, and "):
            await world.ends()[1].recv_into(0, 5, bytearray(8))


async def test_nobody_is_dialled_and_nobody_let_in_once_all_are_back_or_have_left() -> None:
    world = World(rails=2, unix=False)
    card: list[PeerAddress] = []
    spy(world, card)
    async with opened(world.efas):
        await assert_nobody_listens(card[0])
        links(world)[0].rails[1].die("pulled by the test")
        await both_back(world)
        await assert_nobody_listens(card[0])
    await assert_nobody_listens(card[0])


def spy(world: World, card: list[PeerAddress]) -> None:
    """Keep the address of the second process."""
    real = world.efas[1].exchange

    async def exchange(name: str, mine: bytes) -> object:
        card.append(PeerAddress.unpack(mine, 1))
        return await real(name, mine)

    world.efas[1].exchange = exchange  # type: ignore[assignment]


async def assert_nobody_listens(card: PeerAddress) -> None:
    """Wait for the door to close, which may take a turn of the loop."""
    await wait_all_tasks_blocked()
    with pytest.raises(OSError, match="all attempts to connect"):
        await dial(card)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"detail": f"{RAILS_LIMIT} 0 0"}, "rail 0 to process 0 (rank 0) is not lost; dial again later"),
        ({"detail": "1 1 0"}, "rail 1 to process 0 (rank 0) is not lost; dial again later"),
        ({"detail": "2 2 0"}, "rail 2 to process 0 (rank 0) is not lost; dial again later"),
        ({"detail": f"{2**32} 1 0"}, "process 0, rail '4294967296 1 0' is not expected to call process 1"),
        ({"detail": "9" * 200}, f"process 0, rail '{'9' * 200}' is not expected to call process 1"),
        ({"detail": f"65 1 {'9' * 100}"}, f"process 0, rail '65 1 {'9' * 100}' is not expected to call process 1"),
        ({"detail": "65"}, "process 0, rail '65' is not expected to call process 1"),
        ({"detail": "-1 1 0"}, "process 0, rail '-1 1 0' is not expected to call process 1"),
        ({"detail": "² 1 0"}, "process 0, rail '² 1 0' is not expected to call process 1"),
        ({"member": 1, "detail": "65 1 0"}, "process 1, rail '65 1 0' is not expected to call process 1"),
        ({"epoch": 1, "detail": "65 1 0"}, "epoch 1 refused; here it is 0"),
        ({"job": "other", "detail": "65 1 0"}, "job 'other' refused; here it is ''"),
        ({"role": "member", "detail": "65 1 0"}, "role 'member' refused; here it is 'rail'"),
    ],
)
async def test_who_is_not_the_one_expected_is_refused(said: dict[str, object], reason: str) -> None:
    """While a rail is away its process listens again; the same proof is asked for as at first."""
    async with listening_again(rails=2) as (world, address):
        stream = await dial(address)
        assert str(await error_from(HandshakeError, greet(stream, hello(**said), SECRET))) == reason
        await stream.aclose()
        stream = await dial(address)
        with pytest.raises(HandshakeError, match="the secrets differ"):
            await greet(stream, hello(detail="65 1 0"), b"of another world")
        await stream.aclose()
        world.ways[-1].down = False
        await both_back(world)
    refused = [line for line in world.reports[1] if line.startswith("refused ")]
    assert len(refused) == 1
    assert "the secrets differ" in refused[0]


async def listening(card: PeerAddress) -> None:
    """Wait until a process listens again."""
    while True:
        try:
            await (await dial(card)).aclose()
        except OSError:
            await trio.lowlevel.checkpoint()
        else:
            return


async def test_an_attempt_that_its_dialler_gave_up_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener has let it in, and has even sent something; the dialler has never had that rail."""
    given_up = 0
    async with open_world(rails=2, unix=False) as world:
        joining = world.efas[0]._joining
        real: Callable[..., Awaitable[object]] = joining.dial

        async def dial_in_vain(*args: object, **settings: object) -> object:
            nonlocal given_up
            connection = await real(*args, **settings)
            if given_up < 2:
                await world.reports[1].holding(" is back after ", count=given_up + 1)
                given_up += 1
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send_and_receive, world.ends(), given_up, LONG_BYTES)
                    await wait_all_tasks_blocked()
                    connection.socket.close()  # type: ignore[attr-defined]
                raise LinkLostError("given up by the test")
            return connection

        monkeypatch.setattr(joining, "dial", dial_in_vain)
        links(world)[0].rails[1].die("pulled by the test")
        await world.reports[0].holding(" is back after ")
        await uses_all(world)
        assert numbers(world) == [[0, 3 * RAILS_LIMIT + 1]] * 2
    assert given_up == 2


@pytest.mark.parametrize("leaver", [0, 1])
def test_leaving_while_a_rail_is_away_or_has_just_come_back(leaver: int) -> None:
    async def main(*, away: bool) -> None:
        world = ProxiedWorld(rails=2)
        async with world.open():
            way: Way = world.ways[1]
            way.down = away
            way.cut()
            await (way.turning_away(1) if away else world.reports[1 - leaver].holding(" is back after "))
            await world.efas[leaver].aclose()
            with pytest.raises(LinkLostError, match=r"process \d \(rank \d\) has left"):
                await world.ends()[1 - leaver].recv_into(leaver, 5, bytearray(8))
        assert not [line for lines in world.reports for line in lines if "is lost" in line]

    run(partial(main, away=True))
    run(partial(main, away=False))


async def test_pauses_grow_and_a_rail_that_keeps_dying_does_not_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    real = trio.sleep

    async def sleep(pause_s: float) -> None:
        if pause_s != returning._LOOK_S:
            pauses.append(pause_s)
        await real(pause_s if pause_s == returning._LOOK_S else 0)

    world = ProxiedWorld(rails=2)
    async with world.open():
        monkeypatch.setattr(returning.trio, "sleep", sleep)
        way = world.ways[1]
        for count in (1, 2, 3):
            way.cut()
            await both_back(world, count=count)
    monkeypatch.undo()
    distinct = sorted(set(pauses))
    assert distinct[:3] == [0.1, 0.2, 0.4]
    assert pauses == sorted(pauses)


async def test_the_timeline_is_told_of_both_at_once() -> None:
    noted: list[str] = []
    async with open_world(rails=2, note=noted.append) as world:
        links(world)[0].rails[1].die("pulled by the test")
        assert noted == ["rail 1 to process 1 (rank 1) was lost: pulled by the test"]
        await both_back(world)
    back = [re.sub(r"\d+\.\d s$", "N s", line) for line in noted if "back" in line]
    assert sorted(back) == [f"rail 1 to process {i} (rank {i}) is back after N s" for i in (0, 1)]
