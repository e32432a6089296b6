"""Attempts of one job: who comes new takes the one it finds, and who was in an earlier one is refused."""

import pytest
import trio

from overlap.processes.identity import WORLDS, JoinError

from .company import MakeCompany, wait_and_leave

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
        with pytest.raises(JoinError) as caught:
            await company.attend(1, wait_and_leave, epoch=1)
        assert str(caught.value).endswith(": epoch 1 refused, current is 0 of restart 1")
        await company.attend(1, wait_and_leave, epoch=SECOND, fresh=True)
    (line,) = company.lines
    assert line.endswith(": epoch 1 refused, current is 0 of restart 1")


async def test_who_comes_for_the_next_attempt_waits_until_the_world_has_ended(make_company: MakeCompany):
    order = []
    company = make_company(2)

    async def first(membership):
        await company.lines.until("epoch 0 has not ended there, this is epoch 0 of restart 1")
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
