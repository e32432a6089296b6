"""Worlds of several processes under faults and cancellations: exact results, or a blame of one that was hit."""

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from itertools import count
from unittest.mock import Mock

import numpy as np
import pytest
import trio

import overlap
import topology
from overlap.processes.control import ControlPlane
from overlap.processes.identity import JoinError
from overlap.processes.join import join_in_this_loop
from overlap.processes.wire import MemberLost
from overlap.runtime.backend import RealBackend
from overlap.runtime.world import World
from tests.runtime.cancelled_awaits import play
from tests.runtime.companies import Part
from transports import NeuronLink, Router, Transport
from transports.efa import Efa
from transports.handshake import HandshakeError

from .simulation import HANG_S, Simulation, seeds, simulate
from .test_membership import config

# -- worlds of several processes: ranks that nothing has hit have exact results, or blame one that was hit -------------

EACH = 2  # ranks of a process
LARGE = 40_000  # elements: 320 kB, which travel in chunks over all rails


class VirtualBackend(RealBackend):
    """Bytes move at once, in virtual time."""

    @staticmethod
    def now_ns() -> int:  # type: ignore[override]
        return round(trio.current_time() * 1e9)


Program = Callable[[overlap.Rank], Awaitable[object]]


async def train(rank: overlap.Rank) -> list[float]:
    """Reduce, gather, pass on, in groups too, with pauses in which anything may happen."""
    n, me = rank.world_size, rank.rank
    pairs = rank.group([me // 2 * 2, me // 2 * 2 + 1])
    told = []
    for step in range(4):
        await trio.sleep(0.5 + 0.1 * me)
        pending = [rank.all_reduce(np.full(3 + step, float(me))), rank.all_gather(np.full(2, float(me)))]
        rank.send(np.full(5, float(me)), (me + 1) % n, tag=step)
        got = await rank.recv(((5,), float), (me - 1) % n, tag=step)
        near = await pairs.all_reduce(np.ones(2))
        big = await rank.all_reduce(np.full(LARGE, float(me)), priority=1) if step % 2 else np.full(1, n * (n - 1) / 2)
        assert set(big.tolist()) == {n * (n - 1) / 2}
        told += [float(got[0]), float(near[0]), *[float((await each).sum()) for each in pending]]
    await rank.barrier()
    return told


async def raising(rank: overlap.Rank) -> None:
    """One rank raises; the others wait for it."""
    await trio.sleep(2)
    if rank.rank == 1:
        raise ValueError("mine")
    await rank.barrier()


def live(seed: int, processes: int, program: Program, *, rails: int = 0, **blows: object) -> Simulation:
    """Run a program, joined by memory that all share, or by so many rails between each two processes."""
    size = processes * EACH
    placement = [range(start, start + EACH) for start in range(0, size, EACH)]
    cluster = topology.cluster("local", nodes=processes, ranks=size)
    whole = NeuronLink(size)

    async def main(found: Simulation, member: int) -> object:
        failure: Exception | None = None
        where = config(found, member, processes)
        async with join_in_this_loop(where, report=lambda line: found.note(member, line)) as membership:
            lose: list[Callable[[MemberLost], object]] = []
            plane = ControlPlane(membership, placement, on_loss=lambda lost: [each(lost) for each in lose])
            if rails:
                efa = Efa(
                    member=member, placement=placement, secret=b"of this simulation", exchange=membership.exchange,
                    rails=rails, host=f"10.0.1.{member}", unix=False, report=lambda line: found.note(member, line),
                    watched=True,
                )  # fmt: skip
                lose.append(lambda lost: efa.lose(placement[lost.member], lost.reason))
                transport: Transport = Router([NeuronLink(list(placement[member])), efa])
            else:
                transport = Part(whole, placement[member])
            async with transport.open() if rails else nullcontext():
                found.note(member, "opened")
                if sum(what == "opened" for _, _, what in found.log) == processes:
                    found.opened.set()
                world = World(size, cluster, transport, algorithm=None, others=plane, backend=VirtualBackend())
                try:
                    results = await world.run_to_end(program, (), None)
                except overlap.OverlapError as error:
                    failure = error
                else:
                    with trio.move_on_after(10):
                        await membership.leave()
        if failure is not None:
            raise failure
        return results

    return simulate(seed, processes, main, around=whole.open, **blows)  # type: ignore[arg-type]


def expected(processes: int) -> list[list[float]]:
    n = processes * EACH
    total = float(sum(range(n)))
    return [
        [told for step in range(4) for told in (float((me - 1) % n), 2.0, (3 + step) * total, 2 * total)]
        for me in range(n)
    ]


def check(found: Simulation, processes: int) -> str:
    exact = expected(processes)
    kinds = set()
    for member, end in found.ends.items():
        context = f"seed {found.seed}: {found.blows}; process {member}: {end!r}"
        kinds.add(type(end).__name__)
        if member in found.hit:
            continue
        if isinstance(end, overlap.RankFailedError):
            assert end.rank // EACH in found.hit, context
            assert {rank // EACH for rank in end.others} <= found.hit, context
        elif isinstance(end, (JoinError, HandshakeError)):  # for a greeting there is one connection
            assert found.hit, context
        else:
            assert end == exact[member * EACH : (member + 1) * EACH], context
    return "/".join(sorted(kinds))


@pytest.mark.parametrize("some", seeds(10, 310, at_once=50), ids=str)
def test_whatever_happens_results_are_exact_or_the_culprit_was_hit(some: range) -> None:
    kinds = {check(live(seed, 2 + seed % 3, train), 2 + seed % 3) for seed in some}
    assert any("RankFailedError" in each for each in kinds)
    assert "list" in kinds


@pytest.mark.slow
@pytest.mark.parametrize("some", seeds(15, 165, at_once=50), ids=str)
def test_the_same_over_sockets(some: range) -> None:
    kinds = {check(live(seed, 2 + seed % 2, train, rails=1 + seed % 3), 2 + seed % 2) for seed in some}
    assert any("RankFailedError" in each for each in kinds)
    assert "list" in kinds


async def test_operations_that_wait_are_looked_for_more_rarely_while_there_are_none(autojump_clock: object) -> None:
    """The last looks are those after an operation that needs one soon, which begins at 0.7 s."""
    plane, looked_at_s = ControlPlane(Mock(member=0), [[0], [1]]), list[float]()
    found = iter([False, False, False, False, True, True])

    def look(before_ns: int) -> bool:
        looked_at_s.append(trio.current_time() - begun_s)
        return next(found, False)

    plane._communicators, begun_s = Mock(ask_others=look), trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(plane._report_periodically)
        await trio.sleep(0.7)
        plane.look_soon()
        await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert looked_at_s == pytest.approx([0.025, 0.075, 0.175, 0.375, 0.575, 0.6, 0.625, 0.675, 0.725, 0.775])


def test_what_waits_for_rails_ends_with_those_who_bring_them_back() -> None:
    """A process that can open no socket any more, in the middle of a message that cannot be withdrawn."""
    check(live(34, 2, train, rails=2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("some", seeds(6, 156, at_once=50), ids=str)
def test_rails_may_die_one_by_one_or_all_at_once(some: range) -> None:
    lost = 0
    for seed in some:
        found = live(seed, 2, train, rails=1 + seed % 4, kinds=("rails",), most=1)
        results = [result for member in (0, 1) for result in found.ends[member]]  # type: ignore[attr-defined]
        assert results == expected(2), f"seed {seed}: {found.blows}, {found.ends}"
        lost += sum("was lost" in what for _, _, what in found.log)
    assert lost


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_raises_is_blamed_everywhere_at_once(seed: int) -> None:
    found = live(seed, 3, raising, most=0)
    assert {end.rank for end in found.ends.values() if isinstance(end, overlap.RankFailedError)} == {1}
    assert len(found.ends) == 3
    assert max(at_s for at_s, _, what in found.log if what.startswith("ended")) < 5 < HANG_S


@pytest.mark.slow
def test_a_seed_repeats_itself() -> None:
    for seed in range(3):
        assert live(seed, 3, train).log == live(seed, 3, train).log


# -- processes and awaits that are cancelled at any step, by seed: all end, and no message is lost or doubled ----------

# -- A process is cancelled at any step of its life, from joining to leaving: it ends, and the others know of whom -----

LIMIT_S = 90.0  # of virtual time: 60 s to notice that somebody does not come, and what else may be waited for


async def short(rank: overlap.Rank) -> float:
    """Meet twice, in different ways."""
    await rank.barrier()
    rank.send(np.ones(2), (rank.rank + 1) % rank.world_size)
    got = await rank.recv(((2,), float), (rank.rank - 1) % rank.world_size)
    return float((await rank.all_reduce(got))[0])


def cancelled(member: int, step: int, rails: int) -> Simulation | None:
    """Return a run of two processes of which one is cancelled before a step; None if it has fewer."""
    found = live(step, 2, short, rails=rails, most=0, cancel=(member, step))
    return found if any(what == "cancelled" for _, _, what in found.log) else None


def check_cancelled(found: Simulation, member: int) -> None:
    context = f"{found.seed}: {found.ends}"
    assert max(at_s for at_s, _, _ in found.log) < LIMIT_S, context
    other = found.ends[1 - member]
    if isinstance(other, overlap.RankFailedError):
        assert other.rank // EACH == member, context
    elif isinstance(other, HandshakeError):  # it went in the middle of one, for which there is one connection
        assert str(other).startswith("the other side hung up "), context
    elif isinstance(other, Exception):
        assert f"process {member} " in str(other) or f"process {member}:" in str(other), context
    else:
        assert other == [2.0 * EACH] * EACH, context


@pytest.mark.everyday(1)
@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rails", [0, 2])
@pytest.mark.parametrize("member", [0, 1])
def test_a_process_is_cancelled_at_any_step(member: int, rails: int, every: int) -> None:
    for step in count(1, every):
        found = cancelled(member, step, rails)
        if found is None:
            break
        check_cancelled(found, member)
    assert step > 80  # of which there are fewer the fewer tasks a message takes, and round trips a member that joins


# -- awaits that are cancelled at random, by seed: no message is lost, doubled or reordered, and every run ends --------

WAYS = {
    "await cancelled", "receive cancelled", "compute cancelled", "task cancelled", "several", "called_back", "dropped",
    "by_daemon", "at_a_time", "computed", "shared", "polled",
}  # fmt: skip


def simulated(seed: int) -> list[tuple[dict[int, list[int]], Counter[str]]]:
    """Run the program of a seed on the virtual clock, slower or faster than its messages."""
    tick_s = 10.0 ** -(3 + seed % 3)
    return overlap.run(play, seed, tick_s, ranks=(2, 4)[seed % 2], clock="virtual", cluster="trn1.32xlarge")


@pytest.mark.parametrize("some", seeds(40, 640, at_once=100), ids=str)
def test_no_message_is_lost_doubled_or_reordered_by_awaits_that_are_cancelled(some: range) -> None:
    seen: Counter[str] = Counter()
    for seed in some:
        for _, counted in simulated(seed):
            seen += counted
    assert set(seen) == WAYS


def test_equal_seeds_give_equal_results() -> None:
    for seed in range(5):
        assert simulated(seed) == simulated(seed)


@pytest.mark.parametrize("rails", [0, 2])
@pytest.mark.parametrize("some", seeds(6, 206, at_once=50), ids=str)
def test_the_same_between_processes(some: range, rails: int) -> None:
    seen: Counter[str] = Counter()
    for seed in some:

        async def main(rank: overlap.Rank, seed: int = seed) -> Counter[str]:
            return (await play(rank, seed, 10.0 ** -(2 + seed % 3), threads=False))[1]

        found = live(seed, 2, main, rails=rails, most=0)
        for end in found.ends.values():
            assert isinstance(end, list), f"seed {seed}: {end!r}"
            assert len(end) == EACH
            for counted in end:
                seen += counted
    assert seen["await cancelled"]
    assert seen["receive cancelled"]
