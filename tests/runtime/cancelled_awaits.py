"""A random program whose awaits are cancelled: deadlines, cancel scopes and `cancel()`, over messages and all else.

Every message is received exactly once, in the order of its (source, destination, tag), and none is left at the end. The
program is the same for each seed; what is cancelled in time depends on the world that it runs in.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import trio

import overlap

LARGE = 20_000  # elements: 160 kB, which no wire takes without a receiver

FORMS = ("small", "unknown", "tree", "into", "large", "item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """The messages of one source, destination and tag; of any source if `sources` are several.

    Attributes:
        sources: World ranks that send.
        dst: World rank that receives.
        tag: Of the messages.
        each: How many messages each source sends.
        form: Of the messages, and of the receives.
    """

    sources: tuple[int, ...]
    dst: int
    tag: int
    each: int
    form: str

    @property
    def src(self) -> int | None:
        return self.sources[0] if len(self.sources) == 1 else None

    @property
    def like(self) -> Any:
        if self.form == "unknown":
            return None
        if self.form == "tree":
            return {"a": ((3,), "float64"), "b": [((2, 2), "float64")]}
        if self.form == "into":
            return np.zeros(4)
        return (LARGE if self.form == "large" else 3,), "float64"

    def message(self, value: float) -> Any:
        if self.form == "tree":
            return {"a": np.full(3, float(value)), "b": [np.full((2, 2), float(value))]}
        return np.full({"large": LARGE, "into": 4}.get(self.form, 3), float(value))

    def value(self, got: Any) -> int:
        """Return the value of a message that has come, all of whose elements must be the same."""
        leaves = [got["a"], got["b"][0]] if self.form == "tree" else [got]
        values = {float(value) for leaf in leaves for value in np.unique(leaf)}
        assert len(values) == 1, f"{self} got a torn message: {values}"
        return int(values.pop())


def channels(seed: int, ranks: int) -> list[Channel]:
    chance = Random(f"{seed}, channels")
    made = []
    for tag in range(chance.randint(2, 5)):
        dst = chance.randrange(ranks)
        several = ranks > 2 and chance.random() < 0.3
        others = [rank for rank in range(ranks) if rank != dst or (chance.random() < 0.1 and not several)]
        sources = tuple(sorted(chance.sample(others, chance.randint(2, len(others))))) if several else ()
        forms = [form for form in FORMS if form != "unknown"] if several else FORMS
        made.append(
            Channel(
                sources=sources or (chance.choice(others),),
                dst=dst,
                tag=tag,
                each=chance.randint(1, 8),
                form=chance.choice(forms),
            )
        )
    return made


@dataclass(slots=True)
class Player:
    """One rank's part.

    Attributes:
        rank: It.
        tick_s: About how long a message takes.
        threads: Whether computes may run.
        log: What was received on each tag.
        seen: How often what was cancelled.
        unordered: Tags of which a message was given back after the next receive had met one.
    """

    rank: overlap.Rank
    tick_s: float
    threads: bool
    log: dict[int, list[int]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    unordered: set[int] = field(default_factory=set)

    @contextmanager
    def deadline(self, chance: Random) -> Iterator[trio.CancelScope]:
        with trio.move_on_after(self.pause_s(chance)) as scope:
            yield scope
        self.seen["await cancelled"] += scope.cancelled_caught

    def pause_s(self, chance: Random) -> float:
        return 0.0 if chance.random() < 0.2 else self.tick_s * 10 ** chance.uniform(-2, 1)

    async def insist(self, chance: Random, future: overlap.Future[Any]) -> Any:
        """Await a future with deadlines until it has ended."""
        for _ in range(8):
            with self.deadline(chance):
                return await future
            if chance.random() < 0.3:
                await trio.sleep(self.pause_s(chance))
        return await future

    # -- messages ------------------------------------------------------------------------------------------------------

    async def send(self, chance: Random, channel: Channel) -> None:
        pending = []
        for number in range(channel.each):
            value = number + 1000 * channel.sources.index(self.rank.rank)
            sent = self.rank.send(channel.message(value), channel.dst, tag=channel.tag)
            assert not sent.cancel()
            pending.append(sent)
            if chance.random() < 0.5:
                with self.deadline(chance):
                    await sent
            if chance.random() < 0.5:
                await trio.sleep(self.pause_s(chance))
        for sent in pending:
            await sent

    async def receive(self, chance: Random, channel: Channel) -> None:
        got = self.log.setdefault(channel.tag, [])
        total = channel.each * len(channel.sources)
        ways = [self.at_a_time, self.several, self.polled, self.shared, self.by_daemon, self.called_back, self.dropped]
        if self.threads:
            ways.append(self.computed)
        while len(got) < total:
            left = total - len(got)
            before = len(got)
            way = chance.choice(ways)
            got += await way(chance, channel, left)
            self.seen[way.__name__] += len(got) - before
            if chance.random() < 0.3:
                await trio.sleep(self.pause_s(chance))
        for number, source in enumerate(channel.sources):
            mine = [value - 1000 * number for value in got if value // 1000 == number]
            if channel.tag in self.unordered:
                mine.sort()
            assert mine == list(range(channel.each)), f"{channel} got {mine} from {source}: {got}"

    def recv(self, channel: Channel) -> overlap.Future[Any]:
        return self.rank.recv(channel.like, channel.src, tag=channel.tag)

    async def at_a_time(self, chance: Random, channel: Channel, left: int) -> list[int]:
        """Receive with a deadline; each attempt is a new receive."""
        for _ in range(5):
            with self.deadline(chance):
                if channel.form == "item":
                    return [int((await self.recv(channel)[slice(0, 1)])[0])]
                return [channel.value(await self.recv(channel))]
        return []

    async def several(self, chance: Random, channel: Channel, left: int) -> list[int]:
        """Issue several receives, cancel some of them, and await the rest in turn, with deadlines."""
        extra = chance.randint(0, 2)
        issued = [self.recv(channel) for _ in range(chance.randint(1, left) + extra)]
        taken = []
        for index in chance.sample(range(len(issued)), extra):
            if chance.random() < 0.5:
                await trio.sleep(self.pause_s(chance))
            if issued[index].cancel():
                self.seen["receive cancelled"] += 1
                assert issued[index].cancel()
                with pytest.raises(overlap.FutureCancelledError):
                    await issued[index]
                assert issued[index].cancelled()
        rest = [each for each in issued if not each.cancelled()]
        while len(rest) > left:  # those that could not be cancelled have got messages
            surplus = next((each for each in reversed(rest) if each.cancel()), None)
            assert surplus is not None, f"more messages than were sent: {channel}"
            self.seen["receive cancelled"] += 1
            rest.remove(surplus)
        for each in rest:
            taken.append(channel.value(await self.insist(chance, each)))
        return sorted(taken)  # a receive whose await was cancelled goes behind the others

    async def polled(self, chance: Random, channel: Channel, left: int) -> list[int]:
        """Issue a receive, begin to await it perhaps, ask whether it is done, and cancel it if that takes long."""
        receive = self.recv(channel)
        if chance.random() < 0.5:
            with self.deadline(chance):
                return [channel.value(await receive)]
        for _ in range(3):
            await trio.sleep(self.pause_s(chance))
            if receive.done:
                return [channel.value(receive.result())]
        if receive.cancel():
            self.seen["receive cancelled"] += 1
            return []
        return [channel.value(await receive)]

    async def shared(self, chance: Random, channel: Channel, left: int) -> list[int]:
        """Await one receive in several tasks, each of which may be cancelled."""
        receive, values = self.recv(channel), set[int]()

        async def wait() -> None:
            with self.deadline(chance):
                values.add(channel.value(await receive))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
        assert len(values) <= 1, f"{channel}: one receive, several values: {values}"
        return list(values) or [channel.value(await self.insist(chance, receive))]

    async def computed(self, chance: Random, channel: Channel, left: int) -> list[int]:
        """Pass a receive to a compute, and cancel that perhaps: the receive stays."""
        receive = self.recv(channel)
        computed = self.rank.compute(channel.value, receive, seconds=self.tick_s / 10)
        with self.deadline(chance):
            return [await computed]
        if chance.random() < 0.5 and computed.cancel():
            self.seen["compute cancelled"] += 1
            return [channel.value(await self.insist(chance, receive))]
        return [await self.insist(chance, computed)]

    async def by_daemon(self, chance: Random, channel: Channel, left: int) -> list[int]:
        """Let a daemon, or a task, receive until it is cancelled."""
        got: list[int] = []

        async def serve() -> None:
            while len(got) < left:
                got.append(channel.value(await self.recv(channel)))

        server = self.rank.spawn(serve, daemon=chance.random() < 0.5)
        with self.deadline(chance):
            await server
        server.cancel()
        try:
            await server
        except overlap.FutureCancelledError:
            self.seen["task cancelled"] += 1
        return got

    async def called_back(self, chance: Random, channel: Channel, left: int) -> list[int]:
        """Give the result of a receive to a callback."""
        got: list[int] = []
        receive = self.recv(channel)
        with self.deadline(chance):
            await receive
        receive.add_done_callback(lambda done: got.append(channel.value(done.result())))
        await self.insist(chance, receive)
        assert len(got) == 1
        return got

    async def dropped(self, chance: Random, channel: Channel, left: int) -> list[int]:
        """Issue two receives, and drop the first if its message does not come soon: the second gets it."""
        first, second = self.recv(channel), self.recv(channel)
        if chance.random() < 0.5:
            await trio.sleep(self.pause_s(chance))
        met, got = bool(first.done), []
        with self.deadline(chance):
            got.append(channel.value(await first))
        if got and left == 1:
            assert second.cancel()
            return got
        if not got and (met or second.done):  # a later message had met the second before
            self.unordered.add(channel.tag)
        del first
        return [*got, channel.value(await self.insist(chance, second))]

    # -- all else ------------------------------------------------------------------------------------------------------

    async def collectives(self, chance: Random, common: Random) -> None:
        """Collectives cannot be cancelled: whoever stops to wait for one finds its result later."""
        rank = self.rank
        n, me = rank.world_size, rank.rank
        pair = rank.group(range(me // 2 * 2, min(n, me // 2 * 2 + 2)))
        pending: list[tuple[overlap.Future[Any], float]] = []
        for _ in range(common.randint(0, 4)):
            if common.random() < 0.5:
                pending.append((rank.all_reduce(np.full(3, float(me))), n * (n - 1) / 2))
            else:
                pending.append((pair.all_reduce(np.ones(2)), float(pair.size)))
            assert not pending[-1][0].cancel()
            with self.deadline(chance):
                await pending[-1][0]
        for future, expected in pending:
            assert set((await self.insist(chance, future)).tolist()) == {expected}

    async def computes(self, chance: Random) -> None:
        """A compute that was cancelled has not run; any other has run once."""
        ran: Counter[int] = Counter()

        def run(number: int) -> int:
            ran[number] += 1
            return number

        computed = [self.rank.compute(run, number, seconds=self.tick_s) for number in range(chance.randint(0, 6))]
        cancelled = set()
        for number, each in enumerate(computed):
            with self.deadline(chance):
                assert await each == number
            if chance.random() < 0.5 and each.cancel():
                self.seen["compute cancelled"] += 1
                cancelled.add(number)
        for number, each in enumerate(computed):
            if number not in cancelled:
                assert await self.insist(chance, each) == number
            assert ran[number] == (number not in cancelled)


async def play(
    rank: overlap.Rank, seed: int, tick_s: float, *, threads: bool = True
) -> tuple[dict[int, list[int]], Counter[str]]:
    """Live one rank's part of the program of a seed; return what came on each tag, and what was cancelled how often."""
    me, player = rank.rank, Player(rank, tick_s, threads)
    plan, chance = channels(seed, rank.world_size), Random(f"{seed}, {rank.rank}")
    tasks: list[overlap.Future[Any]] = []
    async with trio.open_nursery() as nursery:

        def begin(work: Callable[..., Awaitable[None]], *args: object) -> None:
            if chance.random() < 0.5:
                nursery.start_soon(work, Random(f"{seed}, {me}, {len(tasks)}, {chance.random()}"), *args)
            else:
                tasks.append(rank.spawn(work, Random(f"{seed}, {me}, {len(tasks)}, {chance.random()}"), *args))

        for channel in plan:
            if me in channel.sources:
                begin(player.send, channel)
            if me == channel.dst:
                begin(player.receive, channel)
        begin(player.collectives, Random(f"{seed}, collectives"))
        if threads:
            begin(player.computes)
    for task in tasks:
        await task
    await rank.barrier()
    left = [player.recv(channel) for channel in plan if me == channel.dst]
    await trio.sleep(player.tick_s)
    for receive in left:
        assert not receive.done, f"a message was doubled: {receive}"
        assert receive.cancel()
    await rank.barrier()  # else the receives would fail because their senders have left
    return player.log, player.seen
