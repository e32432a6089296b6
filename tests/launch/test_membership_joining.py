"""How worlds come together, who is refused and in which words, and what strangers can do: nothing."""

import os
import re
import socket
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from overlap.errors import UsageError
from overlap.processes import host as acceptor
from overlap.processes import sockets
from overlap.processes.identity import JoinError, RendezvousConfig, format_processes
from overlap.processes.join import Membership, join_in_this_loop
from overlap.processes.sockets import (
    Endpoint,
    ListenError,
    dial,
    find_port_holder,
    format_endpoint,
    listen,
    parse_endpoint,
    set_socket_options,
)
from overlap.processes.wire import Join, Refused, Waiting, encode_frame
from tests.errors import error_from
from tests.interpreters import free_port
from tests.waiting import Lines

from .company import SECRET, UNSHAKEN, Company, MakeCompany, Puppet, wait_and_leave


async def refusal(company: Company, **changes: Any) -> str:
    """Try to join, and return why not."""
    with pytest.raises(JoinError) as caught:
        async with join_in_this_loop(company.config(**changes), report=company.lines.append):
            raise AssertionError("it was let in")
    return str(caught.value)


async def test_cancelled_before_it_begins(make_company: MakeCompany) -> None:
    company = make_company(2)
    with trio.CancelScope() as scope:
        scope.cancel()
        async with join_in_this_loop(company.config(0), report=company.lines.append):
            raise AssertionError("it was let in")
    assert scope.cancelled_caught


def where(company: Company) -> str:
    return f"process 0 at 127.0.0.1:{company.endpoint[1]}: "


SYSTEM_TELLS = Path("/proc/net/tcp").exists()
SECRETS_DIFFER = (
    "the secrets differ: the listener does not accept this side's proof; "
    "start every process of a job with the same OVERLAP_SECRET"
)
DETAILS_DIFFER = "process 2 has 'overlap 9', process 0 has 'overlap 0.1.0, local'; they must be the same"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"member": 1}, "process 1 has already joined; give each process a number of its own"),
        ({"members": 4}, "expected 3 processes, this one was started with 4"),
        ({"job": "letters"}, "job 'letters' refused, this is job 'digits'"),
        ({"epoch": 1}, "epoch 1 refused, current is 2"),
        ({"detail": "overlap 9"}, DETAILS_DIFFER),
        ({"secret": b"wrong"}, SECRETS_DIFFER),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_the_one_at_fault_is_told_and_the_world_is_intact(
    changes: dict[str, object], reason: str, make_company: MakeCompany
) -> None:
    told = []
    company = make_company(3)
    attend = partial(company.attend, main=wait_and_leave, epoch=2, progress_s=0.05)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attend, 0)
        nursery.start_soon(attend, 1)
        await company.lines.holding("2 of 3 joined; missing 2")
        told.append(await refusal(company, **{"member": 2, "epoch": 2, **changes}))
        nursery.start_soon(attend, 2)
    assert told == [where(company) + reason]
    refused = [line.partition(": ")[2] for line in company.lines if line.startswith("refused")]
    assert refused == ([] if reason == SECRETS_DIFFER else [reason])
    assert len([line for line in company.lines if line.startswith("turned away")]) == (reason == SECRETS_DIFFER)


async def test_members_come_in_any_order_and_early() -> None:
    joined = []
    port = free_port()
    endpoint = ("127.0.0.1", port)
    lines = Lines()

    async def attend(member: int) -> None:
        config = RendezvousConfig(
            job="x", member=member, members=3, endpoint=endpoint, secret=SECRET, progress_s=0.05, patience=UNSHAKEN
        )
        async with join_in_this_loop(config, report=lines.append) as membership:
            joined.append(member)
            await wait_and_leave(membership)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attend, 2)
        waits = f"process 2 waits for process 0 at 127.0.0.1:{port}: Connection refused"
        await lines.holding(waits)
        nursery.start_soon(attend, 0)
        await lines.holding("2 of 3 joined; missing 1")
        assert not joined
        nursery.start_soon(attend, 1)
    assert sorted(joined) == [0, 1, 2]


async def test_worlds_follow_each_other_at_one_endpoint_and_who_is_early_waits() -> None:
    order = []
    endpoint = ("127.0.0.1", free_port())
    lines = Lines()

    async def attend(member: int, epoch: int) -> None:
        config = RendezvousConfig(
            job="x", member=member, members=2, endpoint=endpoint, secret=SECRET, epoch=epoch, progress_s=0.05,
            patience=UNSHAKEN,
        )  # fmt: skip
        async with join_in_this_loop(config, report=lines.append) as membership:
            if epoch == 0 and member == 0:
                await lines.holding("epoch 0 has not ended there, this is epoch 1")
            await membership.barrier("all here")
            order.append(epoch)
            await membership.leave()

    async def member_0() -> None:
        for epoch in range(3):
            await attend(0, epoch)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(member_0)
        for epoch in range(3):  # the second and third come while the first is under way
            nursery.start_soon(attend, 1, epoch)
    assert order == [0, 0, 1, 1, 2, 2]


async def test_whom_the_host_has_refused_it_says_again_when_somebody_is_missing(
    make_company: MakeCompany, clock: MockClock
) -> None:
    """Few of them: strangers may come in any number, and each may have a reason of its own."""

    async def refused(company: Company, job: str) -> None:
        with pytest.raises(JoinError, match=f"job '{job}' refused"):
            await company.attend(1, wait_and_leave, job=job)

    async def host(company: Company) -> None:
        error = await error_from(JoinError, company.attend(0, wait_and_leave))
        told = re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", str(error)).split("; ")
        assert told == [
            "process 1 did not join within 60 s",
            *(f"process 0 refused ADDRESS: job '{job}' refused, this is job 'digits'" for job in "cde"),
        ]

    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host, company)
        for job in "abcde":
            await refused(company, job)
            await company.lines.holding(f"job '{job}' refused")
        clock.jump(60)


async def test_whoever_does_not_come_is_named_to_all(make_company: MakeCompany, clock: MockClock) -> None:
    line = "processes 1, 3, 4 did not join within 60 s"

    async def host(company: Company) -> None:
        with pytest.raises(JoinError, match=rf"^{line}$") as caught:
            await company.attend(0, wait_and_leave)
        assert caught.value.missing == (1, 3, 4)

    company = make_company(5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host, company)
        puppet = await Puppet.enter(company, 2)
        assert await puppet.hear(Waiting) == Waiting(missing=[1, 3, 4])
        clock.jump(60)
        assert await puppet.hear(Refused) == Refused(reason=line)
        await puppet.stream.aclose()


async def test_whoever_came_and_gave_up_waiting_is_not_accused(make_company: MakeCompany, clock: MockClock) -> None:
    line = "process 3 did not join within 60 s; process 1 had joined, and went away before all were there"

    async def host(company: Company) -> None:
        error = await error_from(JoinError, company.attend(0, wait_and_leave))
        assert (str(error), error.missing) == (line, (1, 3))

    company = make_company(4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host, company)
        one, two = await Puppet.enter(company, 1), await Puppet.enter(company, 2)
        while await two.hear(Waiting) != Waiting(missing=[3]):
            pass
        await one.stream.aclose()
        while (heard := await two.hear(Waiting)) == Waiting(missing=[3]):
            pass
        assert heard == Waiting(missing=[1, 3], departed=[1])
        clock.jump(60)
        assert await two.hear(Refused) == Refused(reason=line)
        await two.stream.aclose()


async def test_members_learn_for_whom_they_wait(make_company: MakeCompany) -> None:
    company = make_company(4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(company.attend, 0, wait_and_leave, progress_s=0.05))
        first = await Puppet.enter(company, 1)
        assert await first.hear(Waiting) == Waiting(missing=[2, 3])
        second = await Puppet.enter(company, 2)
        heard = None
        while heard != Waiting(missing=[3]):
            heard = await first.hear(Waiting)
            assert heard in (Waiting(missing=[2, 3]), Waiting(missing=[3]))
        nursery.cancel_scope.cancel()
    for puppet in (first, second):
        await trio.aclose_forcefully(puppet.stream)


@pytest.mark.parametrize(
    ("told", "expected", "missing"),
    [
        (None, "WHEREdid not let this process in within 60 s; look at its output", (0,)),
        (Waiting(missing=[2, 3]), "processes 2, 3 did not join within 60 s", (2, 3)),
        (
            Waiting(missing=[2, 3], departed=[2]),
            "process 3 did not join within 60 s; process 2 had joined, and went away before all were there",
            (2, 3),
        ),
    ],
)
async def test_a_member_whose_own_time_is_over_says_for_whom_it_waited(
    told: Waiting | None, expected: str, missing: tuple[int, ...], make_company: MakeCompany, clock: MockClock
) -> None:
    async def join_as_client(company: Company) -> None:
        error = await error_from(JoinError, company.attend(1, wait_and_leave))
        assert str(error) == expected.replace("WHERE", where(company).replace(": ", " "))
        assert error.missing == missing

    company = make_company(4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(join_as_client, company)
        puppet = await Puppet.receive(company)
        if told is not None:
            await puppet.say(encode_frame(told))
        await puppet.answer()
        assert await puppet.hear(Join) is not None  # it has heard all that
        clock.jump(60)
        assert await puppet.hear(Join) is None
        await puppet.stream.aclose()


async def test_both_ends_of_a_connection_last_through_the_outage_that_is_given(
    monkeypatch: pytest.MonkeyPatch, make_company: MakeCompany
) -> None:
    made: list[trio.SocketStream] = []

    def noted(stream: trio.SocketStream, *given: float) -> None:
        set_socket_options(stream, *given)
        made.append(stream)

    monkeypatch.setattr(sockets, "set_socket_options", noted)
    monkeypatch.setattr(acceptor, "set_socket_options", noted)

    company = make_company(2)

    async def look(membership: Membership) -> None:
        await membership.barrier("all here")
        limits = [stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for stream in made]
        assert limits == [9000, 9000]
        await wait_and_leave(membership)

    attend = partial(company.attend, main=look, patience=replace(UNSHAKEN, outage_s=9))
    async with trio.open_nursery() as nursery:
        for member in range(2):
            nursery.start_soon(attend, member)
    assert len(made) == 2


async def test_a_host_that_is_not_there_is_named_with_the_last_trouble(
    monkeypatch: pytest.MonkeyPatch, clock: MockClock
) -> None:
    tried = trio.Event()

    async def noticed(endpoint: Endpoint, outage_s: float) -> trio.SocketStream:
        try:
            return await dial(endpoint, outage_s)
        finally:
            tried.set()

    monkeypatch.setattr(sockets, "dial", noticed)
    config = RendezvousConfig(job="x", member=1, members=2, endpoint=("127.0.0.1", free_port()), secret=SECRET)

    async def join_as_client() -> None:
        port = config.endpoint[1]
        line = (
            rf"^process 0 could not be reached at 127\.0\.0\.1:{port} within 60 s: Connection refused; "
            r"check that it runs, and that its port is open$"
        )
        with pytest.raises(JoinError, match=line):
            async with join_in_this_loop(config, report=print):
                raise AssertionError("somebody was there")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(join_as_client)
        await tried.wait()
        await wait_all_tasks_blocked()
        clock.jump(60)


async def test_a_connection_that_ends_too_soon_is_tried_again(make_company: MakeCompany) -> None:
    """The host of the last world may close its door while the next one's members are already knocking."""
    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(company.attend, 1, wait_and_leave)
        async with trio.SocketListener(trio.socket.from_stdlib_socket(company.listener.dup())) as closing:
            await trio.aclose_forcefully(await closing.accept())
        nursery.start_soon(company.attend, 0, wait_and_leave)
    assert company.lines == []


@pytest.mark.parametrize("resets", [False, True])  # as the kernel does for a process that has not read all bytes
async def test_a_member_may_go_and_another_come_before_the_world_is_complete(
    resets: bool, make_company: MakeCompany
) -> None:
    company = make_company(3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(company.attend, 0, wait_and_leave, progress_s=0.05))
        first = await Puppet.enter(company, 1)
        assert await first.hear(Waiting) == Waiting(missing=[2])
        if resets:
            first.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await first.stream.aclose()
        gone = "process 1 went away before all had joined: its connection ended without a goodbye"
        await company.lines.holding(gone)
        nursery.start_soon(company.attend, 1, wait_and_leave)
        nursery.start_soon(company.attend, 2, wait_and_leave)


async def test_a_port_that_is_taken_is_named_with_its_holder(make_company: MakeCompany) -> None:
    company = make_company(2)
    port = company.endpoint[1]
    error = await error_from(ListenError, company.attend(0, wait_and_leave, listener=None))
    told = "something else in this process listens there, such as torch's store; choose another port"
    if not SYSTEM_TELLS:
        told = f"port {port} is taken; choose another one"
    assert str(error) == f"cannot listen at 127.0.0.1:{port}: {told}"
    if SYSTEM_TELLS:
        assert str(find_port_holder(port)).startswith(f"process {os.getpid()} (")
    with pytest.raises(ListenError, match=r"not an address of this machine; name one that the process of node 0 has$"):
        listen(("192.0.2.1", 0))
    assert find_port_holder(free_port()) is None


async def test_a_socket_connected_to_itself_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dialler that tries often enough gets the port that it dials as its own."""

    async def to_itself(host: str, port: int) -> trio.SocketStream:
        own = trio.socket.socket()
        await own.bind((host, port))
        await own.connect((host, port))
        return trio.SocketStream(own)

    monkeypatch.setattr(trio, "open_tcp_stream", to_itself)
    with pytest.raises(ConnectionRefusedError):
        await dial(("127.0.0.1", free_port()))


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("localhost:0", ("localhost", 0)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[fe80::1%eth0]:29400", ("fe80::1%eth0", 29400)),
        ("[::]:1", ("::", 1)),
    ],
)
def test_endpoints_are_read_and_written(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert format_endpoint(endpoint) == text


@pytest.mark.parametrize(
    "text", ["", "host", ":1", "host:", "host:x", "::1:5", "[::1]", "[host]:1", "a:65536", "a:-1", "a:²"]
)
def test_endpoints_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^(expected HOST:PORT|the port must be)"):
        parse_endpoint(text)


def test_the_secret_of_a_configuration_is_not_shown() -> None:
    arguments = {"job": "x", "member": 0, "members": 2, "endpoint": ("h", 1), "secret": SECRET}
    assert "secret of these tests" not in repr(RendezvousConfig(**arguments))  # type: ignore[arg-type]


def test_many_names_are_shortened() -> None:
    assert format_processes([3]) == "process 3"
    assert (
        format_processes(range(2, 30)) == "processes 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17 and 12 more"
    )


async def test_a_host_that_is_late_for_all_is_reported_once(make_company: MakeCompany, clock: MockClock) -> None:
    """Its port is open, and the process still starts: no network is between processes of one machine."""

    async def attend(company: Company, member: int) -> None:
        with pytest.raises(JoinError, match="could not be reached"):
            await company.attend(member, wait_and_leave, timeout_s=20.0)

    clock.autojump_threshold = 0.01  # sockets need a moment
    company = make_company(4)
    endpoint = format_endpoint(company.endpoint)
    async with trio.open_nursery() as nursery:
        for member in (1, 2, 3):
            nursery.start_soon(attend, company, member)
    assert company.lines == [
        f"process 1 waits for process 0 at {endpoint}: the other side did not finish the "
        "handshake within 2 s; see whether it still starts, or was stopped"
    ]
