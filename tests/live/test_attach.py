"""Looking on at a world from elsewhere: what is seen, who may, what it costs, and that hostile bytes do nothing."""

import re
import threading
from contextlib import suppress
from functools import partial

import msgpack
import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair

import overlap
from overlap.cli import main as command
from overlap.errors import UsageError
from overlap.flight.folder import open_records
from overlap.live import snapshot
from overlap.live.snapshot import Memory, SnapshotWriter, read_snapshot
from overlap.processes import lookout
from overlap.processes.coordinator import Coordinator
from overlap.processes.identity import WATCHER
from overlap.processes.lookout import Lookout
from overlap.processes.messages import (
    FrameReader,
    Give,
    Glance,
    Glimpse,
    Join,
    Look,
    Looked,
    Message,
    Ping,
    Ready,
    Refused,
    Seen,
    encode,
    framed,
)
from overlap.processes.watching import WatchedWorld, WorldOverError
from tests.launch.company import SECRET, Puppet, wait_and_leave, with_company
from transports.handshake import greet
from transports.identity import Hello

IN_THREAD = trio.to_thread.run_sync
ROOM = 48 * 1024


@pytest.fixture(scope="module")
def blob():
    """What a process of two ranks says that have done a step of two operations."""
    return said_by(1)[-1]


def said_by(steps, *rooms):
    found = []

    async def program(rank):
        for step in range(steps):
            with rank.step(step):
                await rank.all_reduce(rank.compute(np.ones, 1024, np.float32, name="make"))
        await rank.barrier()
        if rank.rank == 0:
            say = SnapshotWriter(open_records()[-1], lambda: 0)
            found.extend(say(room) for room in (*rooms, ROOM))
            say.close()
            assert say(ROOM) == b""
        await rank.barrier()

    overlap.run(program, ranks=2)
    return found


def test_what_a_process_says_is_what_its_record_says(blob):
    told = read_snapshot(blob, Memory())
    assert (told.world_size, told.processes) == (2, 1)
    calls = {words.kind: (words.name, words.nbytes, words.members) for words in told.calls.values()}
    assert calls["all_reduce"] == ("all_reduce", 4096, (0, 1))
    assert calls["compute"] == ("make", 0, ())
    for glance in told.ranks:
        issued, _, call, step, ended, started = glance.operations
        kinds = [told.calls[each].kind for each in call.tolist()]
        assert kinds == ["compute", "all_reduce", *["barrier"] * (len(kinds) - 2)]
        assert (glance.step, step.tolist()[:2], glance.left, glance.cut) == (0, [0, 0], False, False)
        assert np.all(ended[:2] >= issued[:2])
        assert issued[0] <= started[0] <= ended[0]


def test_what_does_not_fit_is_cut_from_the_oldest():
    *cut, whole = said_by(40, 0, 700, 2500)
    assert [len(each) <= room for each, room in zip(cut, (0, 700, 2500), strict=True)] == [True] * 3
    assert cut[0] == b""
    some, all_ = (read_snapshot(each, Memory()).ranks[0] for each in (cut[2], whole))
    assert (some.cut, all_.cut) == (True, False)
    last = all_.operations[:, -len(some.operations[0]) :]
    assert 0 < len(some.operations[0]) < len(all_.operations[0])
    assert np.array_equal(some.operations[1:4], last[1:4])


# -- on a world -------------------------------------------------------------------------------------------------------


def watching(members, look, blob, *, silent=0):
    """Let `look(world)` happen in a thread while a world of so many processes is there; return what it gives."""
    found = []

    async def main(company):
        async with trio.open_nursery() as nursery:
            here, done = trio.Event(), trio.Event()

            async def attend(membership):
                membership.glimpse = lambda room_bytes: blob
                await membership.barrier("here")
                here.set()
                await done.wait()
                await membership.leave()

            for member in range(members - silent):
                nursery.start_soon(company.attend, member, attend)
            puppets = [await Puppet.enter(company, members - 1 - at) for at in range(silent)]
            for each in puppets:
                await each.hear(Ready)
                await each.say(encode(Give(name="barrier here", turn=0, blob=b"")))
            await here.wait()
            found.append(await look(company))
            done.set()
            for each in puppets:
                await each.stream.aclose()

    with_company(members, main)
    return found[0]


async def knock(company, secret=SECRET):
    return await IN_THREAD(partial(WatchedWorld, company.endpoint, secret=secret, tls=None))


def test_one_sees_all_processes_and_what_they_said(blob):
    async def look(company):
        world = await knock(company)
        seen = await IN_THREAD(world.snapshot)
        await IN_THREAD(world.close)
        return world.size, world.where, [place[1] for place, _, _ in seen.processes], world.lives

    assert watching(3, look, blob) == (2, "3 processes on 1 host", [0, 1, 2], False)


def test_a_process_that_does_not_answer_is_named(blob, monkeypatch):
    monkeypatch.setattr(lookout, "ANSWER_S", 0.05)

    expected = "3 processes on 1 host (process 2 did not answer)"

    async def look(company):
        for _ in range(20):  # the others answer, but on a busy machine not always in time
            world = await knock(company)
            await IN_THREAD(world.close)
            if world.where == expected:
                break
        return world.where

    assert watching(3, look, blob, silent=1) == expected


def test_the_command_draws_it_and_lists_it(blob, monkeypatch, capsys):
    monkeypatch.setenv("OVERLAP_SECRET", SECRET.decode())
    monkeypatch.setenv("COLUMNS", "80")

    async def look(company):
        where = f"127.0.0.1:{company.endpoint[1]}"
        return [await IN_THREAD(command, [*words, where]) for words in (["top", "--once"], ["top", "--list"])]

    assert watching(2, look, blob) == [0, 0]
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert re.search(r": 2 ranks in 2 processes on 1 host, .* s; job ", lines[0])
    assert all(len(line) <= 80 for line in lines)
    assert lines[-2].split()[:2] == ["job", "program"]


def test_who_looks_before_all_have_joined_is_told_who_has():
    refusals = []

    async def main(company):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(company.attend, 0, wait_and_leave))
            refusals.append(await refused(company))
            nursery.start_soon(company.attend, 1, wait_and_leave)

    with_company(2, main)
    assert refusals == ["the world has not come together yet: 1 of 2 processes have joined"]


async def refused(company, secret=SECRET):
    with pytest.raises(UsageError) as caught:
        await knock(company, secret)
    return str(caught.value).partition(": ")[2]


def test_a_world_that_ends_while_one_looks_says_so(blob):
    worlds = []

    async def look(company):
        worlds.append(await knock(company))

    watching(2, look, blob)
    with pytest.raises(WorldOverError, match=r"^the world at 127.0.0.1:\d+ is over: its process 0 has hung up$"):
        worlds[0].snapshot()
    assert not worlds[0].lives
    worlds[0].close()


def test_a_world_that_ends_between_question_and_answer_says_so(blob, monkeypatch):
    worlds, told, asked = [], [], threading.Event()

    async def unanswered(self):
        asked.set()
        await trio.sleep_forever()

    def ask():
        try:
            worlds[0].snapshot()
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=ask)

    async def look(company):
        worlds.append(await knock(company))
        monkeypatch.setattr(WatchedWorld, "_ask", unanswered)
        thread.start()
        await IN_THREAD(asked.wait)

    watching(2, look, blob)
    thread.join()
    assert type(told[0]) is WorldOverError
    assert str(told[0]).endswith(" is over: its process 0 has hung up")
    worlds[0].close()


def test_who_may_not_look_is_told_why(blob):
    async def look(company):
        worlds = [await knock(company) for _ in range(lookout.WATCHERS_AT_MOST)]
        refusals = [await refused(company, secret) for secret in (SECRET, b"another secret")]
        for world in worlds:
            await IN_THREAD(world.close)
        return refusals

    assert watching(2, look, blob) == [
        "8 watch this world already, which are as many as may",
        "the secrets differ: the listener does not accept this side's proof; "
        "start every process of a job with the same OVERLAP_SECRET",
    ]


def test_where_nobody_listens_there_is_no_job():
    with pytest.raises(UsageError) as caught:
        WatchedWorld(("127.0.0.1", 1), secret=SECRET, tls=None)
    assert str(caught.value) == "no job is to be found at 127.0.0.1:1: Connection refused"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode(Ping(sent_ns=0)), "it sent a Ping, which is not its turn"),
        (encode(Join(detail="overlap 0.1.0, local", process="")), "it sent a Join, which is not its turn"),
        (encode(Glance(turn=1, room_bytes=1)), "it sent a Glance, which is not its turn"),
        (encode(Look()) + encode(Look()), "it sent a Look, which is not its turn"),
        (framed(bytes(1 << 17))[:12], "it sent a frame claims 131072 bytes, the limit is 65536"),
    ],
)
def test_a_watcher_that_does_what_none_does_is_shown_out(blob, data, reason):
    async def look(company):
        stream = await trio.open_tcp_stream(*company.endpoint)
        await greet(stream, Hello(role=WATCHER, job="", epoch=0, member=0, members=1), SECRET)
        await stream.send_all(data)
        reader, heard = FrameReader(), list[Message]()
        while more := await stream.receive_some():
            heard += reader.feed(more)
        await stream.aclose()
        return [each for each in heard if isinstance(each, Refused)]

    assert watching(2, look, blob) == [Refused(reason=reason)]


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_a_look_costs_a_member_a_hundredth_of_the_time_to_the_next():
    async def main():
        coordinator = Coordinator(members=1, detail="", report=print)
        asked_s = []

        def member(message):
            if isinstance(message, Glance):
                asked_s.append(trio.current_time())
                coordinator.handle(0, Glimpse(turn=message.turn, took_ns=50_000_000, blob=b"x"))

        coordinator.attach(0, member)
        coordinator.handle(0, Join(detail="", process=""))
        keeper = Lookout(coordinator)
        async with trio.open_nursery() as nursery:
            for _ in range(2):  # however many watch
                theirs, ours = memory_stream_pair()
                nursery.start_soon(keeper.serve, ours)
                nursery.start_soon(ask, theirs, 3)
            await trio.sleep(100)
            nursery.cancel_scope.cancel()
        assert np.allclose(np.diff(asked_s), 5.0)
        assert len(asked_s) == 6

    async def ask(stream, times):
        reader = FrameReader()
        for _ in range(times):
            await stream.send_all(encode(Look()))
            kinds = list[type]()
            while Looked not in kinds:
                kinds += [type(each) for each in reader.feed(await stream.receive_some())]
            assert kinds == [Seen, Looked]

    trio.run(main, clock=MockClock(autojump_threshold=0))


# -- hostile bytes ----------------------------------------------------------------------------------------------------


@given(at=st.integers(0, 10_000), to=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read(blob, at, to):
    data = bytearray(blob)
    data[at % len(data)] = to
    with suppress(UsageError):
        told = read_snapshot(bytes(data), Memory())
        assert told is not None
        assert all(len(glance.operations) == 6 for glance in told.ranks)


def test_groups_of_a_million_ranks_are_not_kept(blob, monkeypatch):
    monkeypatch.setattr(snapshot, "_MOST_MEMBERS", 1000)
    start, now_ns, ranks, _ = msgpack.unpackb(blob)
    start[4] = 1 << 40
    members = [f"0-{100 + at}" for at in range(30)]
    data = msgpack.packb([start, now_ns, ranks, [[at, "a", "b", "c", text, "d", 1] for at, text in enumerate(members)]])
    with pytest.raises(UsageError, match=r"ValueError$"):  # the tenth
        read_snapshot(data, Memory())
    data = msgpack.packb([start, now_ns, ranks, [[1, "a", "b", "c", "0-999999999", "d", 1]]])
    with pytest.raises(UsageError, match=r"ValueError$"):
        read_snapshot(data, Memory())
