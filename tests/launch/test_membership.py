"""What members can ask of each other, over restarts and encrypted connections, and what they hear when one goes."""

import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

from overlap.errors import UsageError
from overlap.processes import join as joining
from overlap.processes.identity import WORLDS, JoinError
from overlap.processes.join import Membership, join_in_this_loop
from overlap.processes.members import MemberLostError, News
from overlap.processes.wire import MemberLost, MemberNotice
from tests.errors import error_from
from transports import ArgumentError
from transports.tls import Tls

from .company import UNSHAKEN, Company, MakeCompany, listening, meet, wait_and_leave

# -- what members can ask of each other, and what they hear when one goes ----------------------------------------------


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
            too_long = "notice: has 61441 bytes, the limit is 61440; this is a bug in overlap, please report it"
            with pytest.raises(UsageError, match=f"^{too_long}$"):
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
        found[membership.member] = membership.clock_offset

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
        error = await error_from(MemberLostError, membership.exchange("results", b""))
        assert error.member == gone
        assert str(error) == f"exchange 'results': process {gone} is lost: {reason}"
        with pytest.raises(MemberLostError, match=rf"^barrier 'trace': process {gone} is lost"):
            await membership.barrier("trace")
        membership.send_notice(b"still here")
        seen[membership.member] = [await anext(membership) for _ in range(3)]
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
        seen[membership.member] = [await anext(membership), await anext(membership)]

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
        if teller == 0:
            heard.extend([news async for news in membership])
        else:
            heard.extend([await anext(membership) for _ in range(2001)])
        await membership.leave()

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
            async with join_in_this_loop(config, report=print):
                raise RuntimeError("mine")
        with trio.CancelScope() as scope:
            async with join_in_this_loop(config, report=print):
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


# -- attempts of one job: who comes new takes the one it finds, and who was in an earlier one is refused ---------------

SECOND = WORLDS  # the first world of the second attempt


@pytest.mark.parametrize(("host", "client"), [(0, SECOND), (SECOND, 0), (3 * WORLDS, SECOND), (SECOND, SECOND)])
async def test_processes_that_are_new_meet_whatever_attempt_they_come_from(host, client, make_company: MakeCompany):
    company = make_company(3)
    async with trio.open_nursery() as nursery:
        for member, epoch in enumerate((host, client, host)):
            nursery.start_soon(lambda m, e: company.attend(m, wait_and_leave, epoch=e, fresh=True), member, epoch)
    assert company.lines == []


async def test_who_was_in_an_earlier_attempt_is_refused(make_company: MakeCompany):
    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: company.attend(0, wait_and_leave, epoch=SECOND, fresh=True))
        error = await error_from(JoinError, company.attend(1, wait_and_leave, epoch=1))
        assert str(error).endswith(": epoch 1 refused, current is 0 of restart 1")
        await company.attend(1, wait_and_leave, epoch=SECOND, fresh=True)
    (line,) = company.lines
    assert line.endswith(": epoch 1 refused, current is 0 of restart 1")


async def test_who_comes_for_the_next_attempt_waits_until_the_world_has_ended(make_company: MakeCompany):
    order = []
    company = make_company(2)

    async def first(membership):
        await company.lines.holding("epoch 0 has not ended there, this is epoch 0 of restart 1")
        order.append("first")
        await wait_and_leave(membership)

    async def second(membership):
        order.append("second")
        await wait_and_leave(membership)

    async def first_beside_the_second(membership):
        nursery.start_soon(lambda: company.attend(1, second, epoch=SECOND, fresh=True, progress_s=0.05))
        await wait_and_leave(membership)

    async def host() -> None:
        await company.attend(0, first, fresh=True)
        await company.attend(0, second, epoch=SECOND, fresh=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(host)
        nursery.start_soon(lambda: company.attend(1, first_beside_the_second, fresh=True))
    assert order == ["first", "second", "second"]


# -- worlds whose connections are encrypted: who has no certificate of theirs does not get in --------------------------

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes certificates with the openssl command"
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    """Two authorities, each with a certificate that it has signed."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    usage = ["-addext", "keyUsage=critical,keyCertSign"]  # Python 3.13 and later take no others, RFC 5280, 4.2.1
    (folder / "signed").write_text("subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n")
    for name in ("ours", "theirs"):
        new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        itself = ["-x509", "-days", "30", "-subj", f"/CN={name}", *usage]
        openssl(*new, *itself, "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem")
        openssl(*new, "-subj", "/CN=member", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signing = ["-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key", "-CAcreateserial", "-extfile", "signed"]
        openssl("x509", "-req", "-days", "30", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    return {
        name: Tls(certificate=folder / f"{name}.pem", key=folder / f"{name}.key", authority=folder / f"{name}-ca.pem")
        for name in ("ours", "theirs")
    }


@needs_openssl
async def test_a_world_over_tls(certificates: dict[str, Tls], make_company: MakeCompany) -> None:
    tls = certificates["ours"]
    results: list[list[bytes]] = []

    async def talk(membership: Membership) -> None:
        results.append(await membership.exchange("x", bytes([membership.member])))
        await membership.leave()

    company = make_company(3)
    async with trio.open_nursery() as nursery:
        for member in range(3):
            nursery.start_soon(partial(company.attend, member, talk, tls=tls))
    assert company.lines == []
    assert results.count([b"\x00", b"\x01", b"\x02"]) == 3


PLAIN = (
    ": the other side hung up without a word; it has ended, is another program, or wants TLS, which this side "
    "does not speak; see whether a process of this job listens there, and whether it was started with TLS"
)
NOT_ACCEPTED = (
    ": the other side hung up without a word once TLS was set up; it probably does not accept this side's certificate: "
    "all processes need certificates of one authority"
)


@needs_openssl
async def test_whoever_has_no_certificate_of_ours_does_not_get_in(
    certificates: dict[str, Tls], make_company: MakeCompany
) -> None:
    ours = certificates["ours"]
    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(company.attend, 0, wait_and_leave, tls=ours))
        need = r"TLS failed \(.+\); all processes need certificates of one authority, or none has any$"
        with pytest.raises(JoinError, match=need):
            await company.attend(1, wait_and_leave, tls=certificates["theirs"])
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as trying:
                trying.start_soon(partial(company.attend, 1, wait_and_leave, progress_s=0.05))
                await company.lines.holding("waits for process 0")
                await company.lines.holding("TLS failed")
                await company.lines.holding(PLAIN)
                scope.cancel()
        mixed = replace(certificates["theirs"], authority=ours.authority)  # it trusts us, and we do not trust it
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as trying:
                trying.start_soon(partial(company.attend, 1, wait_and_leave, progress_s=0.05, tls=mixed))
                await company.lines.holding(NOT_ACCEPTED)
                scope.cancel()
        nursery.start_soon(partial(company.attend, 1, wait_and_leave, tls=ours))


@needs_openssl
async def test_wrong_tls_files_are_known_before_anybody_connects(
    certificates: dict[str, Tls], tmp_path: Path, make_company: MakeCompany
) -> None:
    ours, theirs = certificates["ours"], certificates["theirs"]
    missing = Tls(certificate=ours.certificate, key=tmp_path / "none.key", authority=ours.authority)
    mixed = Tls(certificate=ours.certificate, key=theirs.key, authority=ours.authority)
    garbage = Tls(certificate=__file__, key=ours.key, authority=ours.authority)
    encrypted = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", str(ours.key), "-aes256", "-passout", "pass:x", "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)  # noqa: ASYNC221 (nothing else runs)
    locked = Tls(certificate=ours.certificate, key=encrypted, authority=ours.authority)
    company = make_company(1)
    for tls, message in (
        (missing, r"key: there is no file .*none\.key; "),
        (mixed, "KEY_VALUES_MISMATCH"),
        (garbage, "PEM"),
        (locked, "encrypted"),
    ):
        with pytest.raises(ArgumentError, match=rf"^TLS: .*{message}"):
            async with join_in_this_loop(company.config(0, tls=tls, patience=UNSHAKEN), report=print):
                raise AssertionError("it began")
