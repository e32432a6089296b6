"""Streams: windows that bound what is in flight, priorities that order what leaves, and never a deadlock."""

import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import overlap
from overlap.runtime.stream import SPAN
from transports import LinkSpeed, NeuronLink, Paced, Recording

from .worlds import TIMEOUT_S, run

Main = Callable[[overlap.Rank], Awaitable[object]]

# -- adversarial timing --------------------------------------------------------------------------------------

RANKS = 4
GROUPS = ((0, 1, 2, 3), (2, 0), (3, 1, 2), (1, 0, 3), (3, 2))
STREAMS = ("a", "b", "c")
LARGE, SMALL = 70_000, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One operation of the common plan; the priority is each rank's own."""

    index: int
    stream: str
    members: tuple[int, ...]
    elements: int

    def value(self, rank: int) -> int:
        return self.index * 10 + rank


def make_plan(seed: int) -> list[Planned]:
    rng = random.Random(seed)
    return [
        Planned(
            index=index,
            stream=rng.choice(STREAMS),
            members=rng.choice(GROUPS),
            elements=rng.choice((SMALL, SMALL, LARGE)),
        )
        for index in range(40)
    ]


def interleaved(plan: list[Planned], rng: random.Random) -> list[Planned]:
    """Keep the order of each stream, and nothing else."""
    lanes = [[planned for planned in plan if planned.stream == stream] for stream in STREAMS]
    order = [lane for lane in lanes for _ in lane]
    rng.shuffle(order)
    return [lane.pop(0) for lane in order]


class Adversary:
    """One rank's way through the plan: dawdles, jumps between streams, gives its inputs late and out of order."""

    def __init__(self, rank: overlap.Rank, window: int, seed: int) -> None:
        self.rank, self.rng = rank, random.Random(seed * 100 + rank.rank)
        self.plan = [planned for planned in make_plan(seed) if rank.rank in planned.members]
        self.streams = {name: rank.stream(name, window=window) for name in STREAMS}
        self.groups = {members: rank.group(members) for members in GROUPS if rank.rank in members}
        self.late: list[Planned] = []

    async def dawdle(self) -> None:
        for _ in range(self.rng.choice((0, 0, 1, 3, 20))):
            await trio.lowlevel.checkpoint()

    def array(self, planned: Planned) -> np.ndarray:
        return np.full(planned.elements, planned.value(self.rank.rank))

    def input(self, planned: Planned) -> object:
        """Return the array, or a future that is resolved when everything has been issued."""
        if self.rng.random() < 0.5:
            return self.array(planned)
        self.late.append(planned)
        return self.rank.recv(((planned.elements,), np.int64), self.rank.rank, planned.index)

    async def resolve(self) -> None:
        self.rng.shuffle(self.late)
        for planned in self.late:
            await self.dawdle()
            self.rank.send(self.array(planned), self.rank.rank, planned.index)

    async def run(self) -> int:
        futures = []
        for planned in interleaved(self.plan, self.rng):
            await self.dawdle()
            future = self.groups[planned.members].all_reduce(
                self.input(planned), stream=planned.stream, priority=self.rng.randint(-3, 3)
            )
            futures.append((planned, future))
        await self.resolve()
        self.rng.shuffle(futures)
        for planned, future in futures:
            got = await future
            assert got.shape == (planned.elements,)
            assert (got == sum(planned.value(member) for member in planned.members)).all(), planned
        return len(futures)


@pytest.mark.parametrize("path", ["direct", "ring", "mesh"])
@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_no_timing_and_no_priorities_deadlock_or_mix_up(seed: int, window: int, path: str) -> None:
    async def main(rank: overlap.Rank) -> int:
        return await Adversary(rank, window, seed).run()

    expected = [sum(rank in planned.members for planned in make_plan(seed)) for rank in range(RANKS)]
    assert run(main, RANKS, path=path) == expected


def test_opposite_priorities_on_every_rank(path: str) -> None:
    """Rank 0 finds the last operation most urgent, rank 1 the first: the oldest of the window still gets through."""

    async def main(rank: overlap.Rank) -> list[int]:
        sign = 1 if rank.rank else -1
        futures = [rank.all_reduce(np.full(20_000, i), priority=sign * i) for i in range(40)]
        return [int((await future)[0]) for future in reversed(futures)]

    assert run(main, 2, path=path) == [[2 * i for i in reversed(range(40))]] * 2


def test_ranks_may_have_different_windows(path: str) -> None:
    async def main(rank: overlap.Rank) -> int:
        stream = rank.stream("s", window=1 + 3 * rank.rank)
        futures = [rank.all_reduce(np.array([i]), stream=stream) for i in range(20)]
        return sum([int((await future)[0]) for future in futures])

    assert run(main, 3, path=path) == [3 * 190] * 3


# -- windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 8])
def test_a_window_bounds_what_is_in_flight(window: int) -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        stream = rank.stream("s", window=window)
        late = rank.recv(((1,), float), 0)
        futures = [rank.all_reduce(late, stream=stream) for _ in range(10)]
        said = [repr(stream)]
        rank.send(np.ones(1), 0)
        await futures[-1]
        return [*said, repr(stream)]

    full = f"<Stream 's' of rank 0: {window} in flight, {10 - window} queued>"
    assert run(main, 1) == [[full, "<Stream 's' of rank 0: 0 in flight, 0 queued>"]]


def test_a_window_of_one_is_first_in_first_out(path: str) -> None:
    """The first input comes last, and yet nothing overtakes it; with room for two, everything does."""

    async def main(rank: overlap.Rank, window: int) -> list[bool]:
        stream = rank.stream("s", window=window)
        late = rank.recv(((1,), float), rank.rank)
        inputs = [late, np.ones(1), np.ones(1)]
        futures = [rank.all_reduce(x, stream=stream, priority=-i) for i, x in enumerate(inputs)]
        await wait_all_tasks_blocked()
        ended = [future.done for future in futures]
        await rank.barrier()
        rank.send(np.ones(1), rank.rank)
        return ended

    assert run(main, 2, 1, path=path) == [[False, False, False]] * 2
    assert run(main, 2, 2, path=path) == [[False, True, True]] * 2


def test_streams_do_not_wait_for_each_other(path: str) -> None:
    """Rank 1 comes to stream "a" only when stream "b" is through."""

    async def main(rank: overlap.Rank) -> list[int]:
        for name in ("a", "b"):
            rank.stream(name, window=1)
        if rank.rank == 0:
            first = rank.all_reduce(np.array([1]), stream="a")
            second = rank.all_reduce(np.array([10]), stream="b")
            await second
        else:
            second = rank.all_reduce(np.array([10]), stream="b")
            await second
            first = rank.all_reduce(np.array([1]), stream="a")
        return [int((await future)[0]) for future in (first, second)]

    assert run(main, 2, path=path) == [[2, 20]] * 2


def test_an_idle_stream_starts_at_the_call() -> None:
    """Short latencies need that no task switch lies between the last call and the result."""

    async def main(rank: overlap.Rank) -> bool:
        return rank.all_reduce(np.ones(2)).done

    assert run(main, 1) == [True]


# -- priorities ----------------------------------------------------------------------------------------------

SPEED = LinkSpeed(latency_s=0.5, bandwidth_bytes_per_s=1024)
QUANTUM_S = 0.125


def ends(main: Main) -> dict[str, float]:
    """Run on two ranks, paced wires and virtual time; return when each span on rank 1 ended, by name."""
    ended: dict[str, float] = {}

    async def noting(rank: overlap.Rank) -> None:
        async def note(future: overlap.CollectiveFuture[object]) -> None:
            await future
            ended[future.name] = trio.current_time()

        async with trio.open_nursery() as nursery:
            for future in await main(rank):  # type: ignore[attr-defined]
                if rank.rank == 1:
                    nursery.start_soon(note, future)

    async def world() -> None:
        inner = NeuronLink(2, thread_copy_bytes=None)
        transport = Paced(inner, links=lambda src, dst: SPEED, quantum_s=QUANTUM_S)
        await overlap.run_async(noting, ranks=2, transport=transport, timeout_s=TIMEOUT_S)

    trio.run(world, clock=MockClock(autojump_threshold=0))
    return ended


def half_second(rank: overlap.Rank, name: str, priority: int, stream: str | None = None) -> object:
    """A message from rank 0 to rank 1 that takes half a second to leave."""
    x = np.zeros(512, np.uint8) if rank.rank == 0 else None
    return rank.broadcast(x, name=name, priority=priority, stream=stream)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, {"urgent": 1.0, "normal": 1.5, "bulk": 2.0}),
        (1, {"bulk": 1.0, "urgent": 2.0, "normal": 3.0}),  # each leaves when the one before has arrived
        (2, {"urgent": 1.0, "bulk": 1.5, "normal": 2.0}),  # `normal` gets in then, and by then `bulk` has left
    ],
)
@pytest.mark.everyday(3)
def test_priorities_order_what_is_in_the_window(window: int | None, expected: dict[str, float]) -> None:
    async def main(rank: overlap.Rank) -> list[object]:
        stream = None if window is None else rank.stream("s", window=window).name
        return [half_second(rank, name, p, stream) for name, p in (("bulk", 2), ("urgent", -1), ("normal", 0))]

    assert ends(main) == expected


def test_equals_leave_in_the_order_of_issue() -> None:
    """Tried several times: Trio runs what is ready at one instant in random order."""

    async def main(rank: overlap.Rank) -> list[object]:
        return [half_second(rank, name, 4) for name in "abcde"]

    for _ in range(8):
        assert ends(main) == {"a": 1.0, "b": 1.5, "c": 2.0, "d": 2.5, "e": 3.0}


def test_an_urgent_operation_overtakes_a_large_one_that_is_leaving() -> None:
    async def main(rank: overlap.Rank) -> list[object]:
        large = rank.broadcast(np.zeros(1024, np.uint8) if rank.rank == 0 else None, name="large")
        await trio.sleep(0.3125)
        urgent = rank.broadcast(np.zeros(128, np.uint8) if rank.rank == 0 else None, name="urgent", priority=-1)
        return [large, urgent]

    assert ends(main) == {"urgent": 0.375 + 0.125 + 0.5, "large": 1.125 + 0.5}


def test_the_priority_of_a_stream_is_added_to_that_of_its_operations() -> None:
    transport = Recording(NeuronLink(2))

    async def main(rank: overlap.Rank) -> None:
        rank.stream("tp", priority=-10)
        for index, (stream, priority) in enumerate([("comm", 0), ("comm", 7), ("tp", 0), ("tp", 3)]):
            await rank.broadcast(np.zeros(index + 1, np.uint8), stream=stream, priority=priority)
        if rank.rank == 0:
            await rank.send(np.zeros(9, np.uint8), 1, stream="tp", priority=-2)
        else:
            await rank.recv(((9,), np.uint8), 0)

    overlap.run(main, ranks=2, transport=transport, algorithm="mesh", timeout_s=TIMEOUT_S)
    sent = sorted(transport.sent, key=lambda sent: sent.priority)
    assert [message.nbytes for message in sent] == [9, 3, 4, 1, 2]


def test_operations_have_tags_of_their_own() -> None:
    """Of different groups, streams, sequence numbers, tags: no two messages between two ranks share a lane."""
    transport = Recording(NeuronLink(2))

    async def main(rank: overlap.Rank) -> None:
        rank.stream("tp")
        x = np.zeros(4)
        comms = [rank.world, rank.group([0, 1]), rank.group([0, 1]), rank.group([1, 0])]
        futures = [comm.broadcast(x, comm.ranks.index(0), stream=s) for comm in comms for s in (None, "tp") * 2]
        futures += [rank.send(x, 1, t) if rank.rank == 0 else rank.recv(((4,), float), 0, t) for t in (0, 1, 2**24 - 1)]
        for future in futures:
            await future

    overlap.run(main, ranks=2, transport=transport, timeout_s=TIMEOUT_S)
    tags = [sent.tag for sent in transport.sent]
    assert len(tags) == 4 * 2 * 2 + 3
    assert len(set(tags)) == len(tags)


# -- their words ---------------------------------------------------------------------------------------------


def test_a_stream_is_made_once() -> None:
    async def main(rank: overlap.Rank) -> bool:
        made = rank.stream("tp", priority=2, window=3)
        return rank.stream("tp") is made and rank.stream("tp", priority=2, window=3) is made

    assert run(main, 1) == [True]


BAD_STREAMS: list[tuple[Callable[[overlap.Rank], object], str]] = [
    (lambda rank: rank.stream("tp", priority=1, window=4), "^stream 'tp' has priority=2, window=3; got priority=1"),
    (lambda rank: rank.stream("new", window=0), "^window: expected an integer, 1 or more, got 0$"),
    (lambda rank: rank.barrier(stream="dp"), "^stream: 'dp' is unknown; known are comm, tp; rank.stream"),
    (lambda rank: rank.send(np.ones(1), 0, stream="dp"), "^stream: 'dp' is unknown; known are comm, tp; rank.stream"),
]


@pytest.mark.parametrize(("call", "message"), BAD_STREAMS)
def test_streams_that_cannot_be(call: Callable[[overlap.Rank], object], message: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        rank.stream("tp", priority=2, window=3)
        with pytest.raises(overlap.UsageError, match=message):
            call(rank)

    assert run(main, 1) == [None]


def test_the_stream_of_another_rank_is_refused() -> None:
    streams: dict[int, overlap.Stream] = {}

    async def main(rank: overlap.Rank) -> None:
        streams[rank.rank] = rank.stream("tp")
        await rank.barrier()
        other = streams[1 - rank.rank]
        message = f"^stream: 'tp' is rank {1 - rank.rank}'s, this is rank {rank.rank}; use its own$"
        with pytest.raises(overlap.UsageError, match=message):
            rank.barrier(stream=other)

    assert run(main, 2) == [None, None]


# -- the span of a window -------------------------------------------------------------------------------------


def test_no_operation_starts_far_behind_the_oldest_unfinished_one() -> None:
    """Seven of eight places of the window stay in use while rank 0's first input takes a second."""

    async def main(rank: overlap.Rank) -> list[bool]:
        x = np.ones(4, np.float32)
        held = rank.all_reduce(rank.compute(lambda: x, seconds=1.0 if rank.rank == 0 else 0.0))
        later = [rank.all_reduce(x) for _ in range(100)]
        await trio.sleep(0.5)
        seen = [bool(future.done) for future in later]
        for future in (held, *later):
            await future
        return seen

    expected = [True] * (SPAN - 1) + [False] * (101 - SPAN)
    assert overlap.run(main, ranks=2, clock="virtual") == [expected] * 2


class NeverSearched(deque[object]):
    """A queue whose middle nobody asks for: that takes as long as it is."""

    def remove(self, value: object) -> None:
        raise AssertionError("the queue is searched")


def test_a_world_that_ends_with_much_queued_does_not_search_for_each_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand operations that waited for room took minutes to give up, in which no signal was heard."""

    async def main(rank: overlap.Rank) -> None:
        stream = rank.stream("full", window=2)
        for _ in range(50):
            rank.recv(np.empty(1), 1 - rank.rank, stream=stream)
        await rank.barrier()
        raise ValueError("on purpose")

    monkeypatch.setattr("overlap.runtime.stream.deque", NeverSearched)
    with pytest.raises(overlap.RankFailedError, match="on purpose"):
        run(main, 2)
