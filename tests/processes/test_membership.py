"""Rendezvous and membership: whatever happens to processes, the others get on, or know whose loss it was."""

from random import Random

import pytest
import trio

from overlap.processes.identity import JoinError, RendezvousConfig
from overlap.processes.join import Membership, join_in_this_loop
from overlap.processes.members import MemberLostError
from overlap.processes.wire import MemberLost, MemberNotice

from .simulation import Simulation, seeds, simulate

ENDPOINT = "10.0.0.1", 29500
ROUNDS = 6


def config(found: Simulation, member: int, members: int) -> RendezvousConfig:
    return RendezvousConfig(
        job="digits",
        member=member,
        members=members,
        endpoint=ENDPOINT,
        secret=b"of this simulation",
        detail="the same",
        timeout_s=30.0,
    )


class Member:
    """One process: what it does, and what it saw."""

    def __init__(self, found: Simulation, member: int, members: int) -> None:
        self.found, self.member, self.members = found, member, members
        self.heard: dict[int, list[int]] = {}
        self.lost: list[MemberLost] = []
        self.plan = Random(f"{found.seed}, plan")  # the same on all

    async def run(self) -> str:
        found, member = self.found, self.member

        def report(line: str) -> None:
            found.note(member, line)

        async with join_in_this_loop(config(found, member, self.members), report=report) as membership:
            found.note(member, "joined")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.listen, membership)
                try:
                    for number in range(ROUNDS):
                        await self.round(membership, number)
                    await membership.barrier("end")
                    return "done"
                except MemberLostError as error:
                    found.note(member, str(error))
                    return f"lost {error.member}"
                finally:
                    with trio.move_on_after(10) as leaving:
                        await membership.leave()
                    if leaving.cancelled_caught:
                        nursery.cancel_scope.cancel()

    async def listen(self, membership: Membership) -> None:
        async for news in membership:
            if isinstance(news, MemberLost):
                self.lost.append(news)
            else:
                assert isinstance(news, MemberNotice)
                self.heard.setdefault(news.member, []).append(int(news.body.split(b" ")[0]))

    async def round(self, membership: Membership, number: int) -> None:
        await trio.sleep(self.plan.uniform(0, 1))
        kind = self.plan.choice(("exchange", "barrier", "tell"))
        nbytes = self.plan.choice((0, 5, 5, 3000, 30_000))
        if kind == "exchange":
            got = await membership.exchange("x", bytes([self.member]) * nbytes)
            assert got == [bytes([member]) * nbytes for member in range(self.members)]
        elif kind == "barrier":
            await membership.barrier("b")
        else:
            membership.send_notice(b"%d " % number + bytes(nbytes))


def live(seed: int, members: int = 3) -> tuple[Simulation, list[Member]]:
    everybody: dict[int, Member] = {}

    async def main(found: Simulation, member: int) -> str:
        everybody[member] = Member(found, member, members)
        return await everybody[member].run()

    found = simulate(seed, members, main)
    return found, [everybody[member] for member in sorted(everybody)]


def check(found: Simulation, everybody: list[Member]) -> None:
    for each in everybody:
        end = found.ends[each.member]
        context = f"seed {found.seed}: {found.blows}; process {each.member}: {end!r}"
        for numbers in each.heard.values():
            assert numbers == sorted(set(numbers)), context
        if each.member in found.hit:
            continue  # it may have ended in any way; that it ended was checked
        if isinstance(end, str) and end.startswith("lost"):
            assert int(end[5:]) in found.hit, context
        elif isinstance(end, JoinError):
            host_is_gone = str(end).startswith("process 0 ")  # who is missing else, this process has heard long ago
            assert 0 in found.hit if host_is_gone else set(end.missing) <= found.hit, context
        else:
            assert end == "done", context
        assert {lost.member for lost in each.lost} <= found.hit, context
    if not found.hit:
        told = {tuple(numbers) for each in everybody for numbers in each.heard.values()}
        assert len(told) <= 1
        assert not told or all(len(each.heard) == len(everybody) - 1 for each in everybody)


@pytest.mark.parametrize("some", seeds(20, 820, at_once=50), ids=str)
def test_whatever_happens_the_others_know_whose_loss_it_was(some: range) -> None:
    kinds = set()
    for seed in some:
        found, everybody = live(seed, 2 + seed % 4)
        check(found, everybody)
        kinds |= {type(end) if isinstance(end, Exception) else str(end)[:4] for end in found.ends.values()}
    assert {"done", "lost", "None", JoinError} <= kinds


@pytest.mark.slow
def test_a_seed_repeats_itself() -> None:
    for seed in range(6):
        assert live(seed)[0].log == live(seed)[0].log


@pytest.mark.parametrize("comes_s", [0.0, 12.0, 29.9])
def test_who_has_come_meanwhile_is_not_accused(comes_s: float) -> None:
    async def main(found: Simulation, member: int) -> None:
        if member == 2:
            await trio.sleep(comes_s)
        if member == 3:
            return
        async with join_in_this_loop(config(found, member, 4), report=lambda _: None):
            raise AssertionError("nobody waits for process 3")

    found = simulate(0, 4, main, most=0)
    ends = [found.ends[member] for member in (0, 1, 2)]
    told = {str(end).removeprefix("process 0 at 10.0.0.1:29500: ").partition(";")[0] for end in ends}
    assert told == {"process 3 did not join within 30 s"}
