"""What members can ask of each other, and what they hear when one goes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import trio

from overlap.errors import UsageError
from overlap.processes import join as joining
from overlap.processes.join import Membership, join_here
from overlap.processes.members import MemberLostError, News
from overlap.processes.wire import MemberLost, MemberNotice

from .company import Company, MakeCompany, listening, meet


@pytest.mark.parametrize("members", [1, 2, 3, 5])
def test_an_exchange_gives_everybody_everything_in_member_order(members: int) -> None:
    results = {}

    async def main(membership: Membership) -> None:
        results[membership.member] = await membership.exchange("name", b"%d" % membership.member)

    assert meet(members, main) == []
    assert results == {member: [b"%d" % each for each in range(members)] for member in range(members)}


def test_what_is_told_comes_to_all_others_in_order() -> None:
    heard: dict[int, list[tuple[int, bytes]]] = {}

    async def main(membership: Membership) -> None:
        for number in range(50):
            membership.send_notice(b"%d of %d" % (number, membership.member))
        mine = heard[membership.member] = []
        async for news in membership:
            assert isinstance(news, MemberNotice)
            mine.append((news.member, news.body))
            if len(mine) == 2 * 50:
                break

    assert meet(3, main) == []
    for member, mine in heard.items():
        for other in {0, 1, 2} - {member}:
            assert [body for who, body in mine if who == other] == [
                b"%d of %d" % (number, other) for number in range(50)
            ]


@pytest.mark.parametrize("member", [0, 1])
def test_what_cannot_be_told_is_refused_at_the_call(member: int) -> None:
    async def main(membership: Membership) -> None:
        if membership.member == member:
            membership.send_notice(bytes(60 * 1024))
            with pytest.raises(
                UsageError,
                match=r"^notice: has 61441 bytes, the limit is 61440; this is a bug in overlap, please report it$",
            ):
                membership.send_notice(bytes(60 * 1024 + 1))
        await membership.barrier("intact")

    assert meet(2, main) == []


def test_a_host_that_takes_less_than_is_told_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_OUTBOX_LIMIT_BYTES", 4000)
    seen: list[News] = []

    async def main(membership: Membership) -> None:
        if membership.member == 1:
            for _ in range(100):
                membership.send_notice(bytes(100))
            seen.append(await anext(membership))
        else:
            await membership.leave()

    assert meet(2, main, leave=False) == []
    (lost,) = seen
    assert isinstance(lost, MemberLost)
    assert re.fullmatch(r"it does not read what it is sent: \d+ bytes wait to be sent, the limit is 4000", lost.reason)


def test_clocks_of_one_machine_are_one() -> None:
    found = {}

    async def main(membership: Membership) -> None:
        found[membership.member] = membership.clock

    meet(3, main)
    assert (found[0].offset_ns, found[0].error_ns) == (0, 0)
    for offset in found.values():  # the truth is 0
        assert abs(offset.offset_ns) <= offset.error_ns
    assert found[1].error_ns > 0


def _raise() -> None:
    raise RuntimeError("gone")


@pytest.mark.parametrize("gone", [1, 2])
@pytest.mark.parametrize("how", [lambda: None, _raise], ids=["returns", "raises"])
async def test_a_member_that_goes_without_a_goodbye_is_lost_once(
    gone: int, how: Callable[[], None], make_company: MakeCompany
) -> None:
    seen = {}
    reason = "its connection ended without a goodbye"

    async def main(membership: Membership) -> None:
        await membership.barrier("all here")
        if membership.member == gone:
            how()
            return
        with pytest.raises(MemberLostError) as caught:
            await membership.exchange("results", b"")
        assert caught.value.member == gone
        assert str(caught.value) == f"exchange 'results': process {gone} is lost: {reason}"
        with pytest.raises(MemberLostError, match=rf"^barrier 'trace': process {gone} is lost"):
            await membership.barrier("trace")
        membership.send_notice(b"still here")
        news = membership
        seen[membership.member] = [await anext(news) for _ in range(3)]
        await membership.leave()

    async def attend(company: Company, member: int) -> None:
        with pytest.raises(RuntimeError, match="gone") if (how, member) == (_raise, gone) else nullcontext():
            await company.attend(member, main)

    company = make_company(4)
    async with trio.open_nursery() as nursery:
        for member in range(4):
            nursery.start_soon(attend, company, member)
    assert set(seen) == {0, 1, 2, 3} - {gone}
    for member, news in seen.items():
        assert news.count(MemberLost(member=gone, reason=reason)) == 1
        told = [each for each in news if isinstance(each, MemberNotice)]
        assert sorted(each.member for each in told) == sorted({0, 1, 2, 3} - {gone, member})
        assert {each.body for each in told} == {b"still here"}


def test_losing_member_0_ends_all_news() -> None:
    seen = {}

    async def main(membership: Membership) -> None:
        await membership.barrier("all here")
        if membership.member == 0:
            return
        seen[membership.member] = [news async for news in membership]
        membership.send_notice(b"goes nowhere")
        with pytest.raises(MemberLostError, match=r"^barrier 'x': process 0 is lost: its connection "):
            await membership.barrier("x")
        await membership.leave()

    meet(3, main, leave=False)
    assert set(seen) == {1, 2}
    for (news,) in seen.values():
        assert isinstance(news, MemberLost)
        assert news.member == 0


def test_a_goodbye_is_no_loss() -> None:
    seen = {}

    async def main(membership: Membership) -> None:
        if membership.member == 2:
            membership.send_notice(b"last words")
            await membership.leave()
            await membership.leave()  # twice is harmless
            with pytest.raises(UsageError, match=r"^exchange 'x': this process has left the world; call it before$"):
                await membership.exchange("x", b"")
            return
        with pytest.raises(MemberLostError, match=r"^exchange 'results': process 2 has left$"):
            await membership.exchange("results", b"")
        membership.send_notice(b"from %d" % membership.member)
        news = membership
        seen[membership.member] = [await anext(news), await anext(news)]

    assert meet(3, main) == []
    assert seen == {
        0: [MemberNotice(2, b"last words"), MemberNotice(1, b"from 1")],
        1: [MemberNotice(2, b"last words"), MemberNotice(0, b"from 0")],
    }


def test_member_0_carries_messages_until_the_last_has_left() -> None:
    order: list[tuple[int, News | str]] = []

    async def main(membership: Membership) -> None:
        if membership.member:
            async for news in membership:
                order.append((membership.member, news))
                break
            membership.send_notice(b"from %d" % membership.member)
        else:
            membership.send_notice(b"I leave")
        await membership.leave()
        order.append((membership.member, "left"))

    assert meet(3, main, leave=False) == []
    assert order[-1] == (0, "left")
    assert len(order) == 5


@pytest.mark.parametrize("teller", [0, 1])
@pytest.mark.parametrize("end", ["raise", "cancel"])
async def test_what_was_told_before_the_end_arrives(teller: int, end: str, make_company: MakeCompany) -> None:
    """A member that fails says why, and ends; also when it is cancelled because something around it failed."""
    heard: list[News] = []

    async def main(membership: Membership) -> None:
        await membership.barrier("all here")
        if membership.member == teller:
            for number in range(2000):
                membership.send_notice(b"%d " % number + bytes(1000))
            if end == "raise":
                raise RuntimeError("because")
            scope.cancel()
            await trio.sleep_forever()
        heard.extend([news async for news in membership] if teller == 0 else await some(membership))
        await membership.leave()

    async def some(membership: Membership) -> list[News]:
        news = membership
        return [await anext(news) for _ in range(2001)]

    async def fail(company: Company) -> None:
        with scope, pytest.raises(RuntimeError, match=r"^because$") if end == "raise" else nullcontext():
            await company.attend(teller, main)

    scope = trio.CancelScope()

    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail, company)
        nursery.start_soon(company.attend, 1 - teller, main)
    assert len(heard) == 2001
    assert isinstance(heard[-1], MemberLost)
    numbers = [int(news.body.split(b" ")[0]) for news in heard[:-1] if isinstance(news, MemberNotice)]
    assert numbers == list(range(2000))


async def test_an_error_of_the_block_is_raised_as_it_is() -> None:
    with listening() as listener:
        config = Company(listener, 1).config(0)
        with pytest.raises(RuntimeError, match=r"^mine$"):
            async with join_here(config, report=print):
                raise RuntimeError("mine")
        with trio.CancelScope() as scope:
            async with join_here(config, report=print):
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught


async def test_the_listener_stays_the_callers() -> None:
    with listening() as listener:
        company = Company(listener, 2)
        for _ in range(3):
            await company.all_attend(partial(_pass, "again"))
        assert listener.fileno() >= 0


async def _pass(name: str, membership: Membership) -> None:
    await membership.barrier(name)
    await membership.leave()
