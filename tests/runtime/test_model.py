"""Streams, groups, tags and futures against a model of a page: what must be over is, and nothing else.

The ranks live in a thread of their own, and each rule issues what a thread may issue: one end of one operation at a
time, in any order that keeps that of each stream.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, precondition, rule

import overlap
from tests.properties import one_in
from transports import NeuronLink, Recording

from .worlds import TIMEOUT_S

RANKS = 3
GROUPS = ((0, 1, 2), (1, 0), (2, 1), (0, 2), (1,))
WINDOWS = {"comm": 8, "narrow": 1, "pair": 2}


@dataclass(eq=False)
class End:
    """One rank's end of an operation."""

    operation: Operation
    rank: int
    future: overlap.Future[Any]
    lane: list[End]
    window: int
    expected: Callable[[], object]
    called: list[object] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """Whether it is among the first unfinished ones of its lane."""
        unfinished = [end for end in self.lane if not end.operation.over]
        return self in unfinished[: self.window]


@dataclass(eq=False)
class Operation:
    """What some ranks do together, once all have come.

    Attributes:
        members: Who.
        ends: Those that have been issued, by place.
        over: It must have ended.
    """

    members: tuple[int, ...]
    ends: dict[int, End] = field(default_factory=dict)
    over: bool = False


class World:
    """Ranks that wait in a thread until they are let go."""

    def __init__(self, *, wire: bool) -> None:
        self.ranks: dict[int, overlap.Rank] = {}
        self._begun, self._error = Event(), list[BaseException]()
        self._thread = Thread(target=self._run, args=(wire,), name="world")
        self._thread.start()
        assert self._begun.wait(TIMEOUT_S)

    def _run(self, wire: bool) -> None:
        transport = Recording(NeuronLink(RANKS)) if wire else NeuronLink(RANKS)
        try:
            overlap.run(self._main, ranks=RANKS, transport=transport, timeout_s=TIMEOUT_S)
        except BaseException as error:
            self._error.append(error)

    async def _main(self, rank: overlap.Rank) -> None:
        self.ranks[rank.rank] = rank
        if len(self.ranks) == RANKS:
            self._over = trio.Event()
            self._token = trio.lowlevel.current_trio_token()
            self._begun.set()
        while not hasattr(self, "_over"):
            await trio.lowlevel.checkpoint()
        await self._over.wait()

    def end(self) -> None:
        self._token.run_sync_soon(self._over.set)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        assert self._error == []


class Machine(RuleBasedStateMachine):
    """Everything that can be issued, and what is known of it."""

    wire = False
    computes = Bundle("computes")

    def __init__(self) -> None:
        super().__init__()
        self.world = World(wire=self.wire)
        self.operations: dict[Any, list[Operation]] = {}
        self.counts: dict[object, int] = {}
        self.lanes: dict[object, list[End]] = {}
        self.plans: dict[str, list[tuple[int, ...]]] = {stream: [] for stream in WINDOWS}
        self.reached: dict[tuple[int, str], int] = {}
        self.groups = {(r, g): self.world.ranks[r].group(g) for g in GROUPS for r in g}
        for rank in self.world.ranks.values():
            for name, window in WINDOWS.items():
                rank.stream(name, window=window)

    # -- what is issued ----------------------------------------------------------------------------------------------

    def _issue(
        self, key: object, members: tuple[int, ...], place: int, lane: object, window: int,
        call: Callable[[int], overlap.Future[Any]], expected: Callable[[int], object],
    ) -> End:  # fmt: skip
        seq = self.counts.get((key, place), 0)
        self.counts[key, place] = seq + 1
        line = self.operations.setdefault(key, [])
        while len(line) <= seq:
            line.append(Operation(members))
        queue = self.lanes.setdefault(lane, [])
        end = End(line[seq], members[place], call(seq), queue, window, lambda: expected(seq))
        queue.append(end)
        line[seq].ends[place] = end
        end.future.add_done_callback(end.called.append)
        self._settle()
        return end

    @rule(rank=st.integers(0, 2), group=st.sampled_from(GROUPS), stream=st.sampled_from(sorted(WINDOWS)))
    def reduce(self, rank: int, group: tuple[int, ...], stream: str) -> None:
        """Let a rank come to its next all_reduce on a stream: one that others have begun, or one on another group.

        The order on a stream is the same for all ranks.
        """
        plan = self.plans[stream]
        while (at := self.reached.get((rank, stream), 0)) < len(plan):
            self.reached[rank, stream] = at + 1
            if rank in plan[at]:
                self._reduce(rank, plan[at], stream)
                return
        if rank in group:
            plan.append(group)
            self.reached[rank, stream] = len(plan)
            self._reduce(rank, group, stream)

    def _reduce(self, rank: int, group: tuple[int, ...], stream: str) -> None:
        def call(seq: int) -> overlap.Future[Any]:
            return self.groups[rank, group].all_reduce(np.array([seq, rank + 1.0]), stream=stream, priority=seq % 3)

        total = sum(member + 1.0 for member in group)
        key, lane = (group, stream), (rank, stream)
        expected = lambda seq: [float(seq * len(group)), total]  # noqa: E731
        self._issue(key, group, group.index(rank), lane, WINDOWS[stream], call, expected)

    @rule(src=st.integers(0, 2), way=st.integers(1, 2), tag=st.integers(0, 1), sends=st.booleans())
    def message(self, src: int, way: int, tag: int, sends: bool) -> None:
        """Send or receive the next message of a tag."""
        dst = (src + way) % RANKS
        key, place = (src, dst, tag), int(not sends)

        def call(seq: int) -> overlap.Future[Any]:
            if sends:
                return self.world.ranks[src].send(np.array([seq, tag]), dst, tag=tag)
            return self.world.ranks[dst].recv(((2,), int), src, tag=tag)

        self._issue(key, (src, dst), place, (key, place), 1, call, lambda seq: None if sends else [seq, tag])

    @rule(target=computes, rank=st.integers(0, 2), number=st.integers(0, 9))
    def compute(self, rank: int, number: int) -> tuple[int, int, overlap.Future[Any]]:
        """Compute a pair of numbers."""
        return rank, number, self.world.ranks[rank].compute(lambda: (number, number + 1))

    @rule(computed=computes, item=st.sampled_from((None, 0, 1)))
    def look(self, computed: tuple[int, int, overlap.Future[Any]], item: int | None) -> None:
        """Ask for the result of a compute, or for an item of it, as often as one likes."""
        _, number, future = computed
        expected = (number, number + 1)
        if item is None:
            assert future.result(TIMEOUT_S) == expected
        else:
            assert future[item].result(TIMEOUT_S) == expected[item]

    @rule(target=computes, computed=computes)
    def compute_on(self, computed: tuple[int, int, overlap.Future[Any]]) -> Any:
        """Compute from what is being computed."""
        rank, number, future = computed
        if number > 50:
            return multiple()
        return rank, 2 * number, self.world.ranks[rank].compute(lambda x: (2 * x, 2 * x + 1), future[0])

    def _unfinished(self) -> list[Any]:
        return [key for key, line in self.operations.items() if any(not each.over for each in line)]

    def _complete(self) -> None:
        """Let everybody come to everything that anybody has come to."""
        for stream, plan in self.plans.items():
            for rank in range(RANKS):
                while self.reached.get((rank, stream), 0) < len(plan):
                    self.reduce(rank, (), stream)
        for key, line in list(self.operations.items()):
            if not isinstance(key[1], str):
                src, dst, tag = key
                for place in range(2):
                    while self.counts.get((key, place), 0) < len(line):
                        self.message(src, (dst - src) % RANKS, tag, place == 0)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Find out which operations must be over now, and look whether they are."""
        moved = True
        while moved:
            moved = False
            for line in self.operations.values():
                for operation in line:
                    ends = operation.ends.values()
                    if not operation.over and len(ends) == len(operation.members) and all(end.active for end in ends):
                        operation.over = moved = True
                        for end in ends:
                            self._check(end)

    def _check(self, end: End) -> None:
        result = end.future.result(TIMEOUT_S)
        assert (None if result is None else result.tolist()) == end.expected()

    @invariant()
    def nothing_is_over_too_early(self) -> None:
        for line in self.operations.values():
            for operation in line:
                for end in operation.ends.values():
                    assert operation.over or not end.future.done

    @rule(data=st.data())
    @precondition(lambda self: self._unfinished())
    def asking_too_early(self, data: st.DataObject) -> None:
        """Ask for a result that cannot be there: the wait ends, the operation does not."""
        line = self.operations[data.draw(st.sampled_from(sorted(self._unfinished(), key=repr)))]
        for operation in line:
            for end in operation.ends.values():
                if not operation.over:
                    with pytest.raises(NotYet):
                        end.future.result(0.0)

    def teardown(self) -> None:
        """Complete everything; then all is over, has been told once, and the world ends in peace."""
        self._complete()
        self.world.end()
        for line in self.operations.values():
            for operation in line:
                assert operation.over
                assert all(end.called == [end.future] for end in operation.ends.values())


class WireMachine(Machine):
    """The same where bytes travel."""

    wire = True


FEW = settings(one_in(2), stateful_step_count=40)
TestInMemory = Machine.TestCase
TestInMemory.settings = FEW
TestOverAWire = WireMachine.TestCase
TestOverAWire.settings = FEW
