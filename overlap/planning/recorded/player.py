"""Player of a recorded run: issues its computes and operations in their order, each after its dependencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import trio

from ...collectives.kinds import Collective
from ...runtime.future import Future
from ...runtime.group import Group
from ...runtime.rank import Rank
from ...timeline.measure.meetings import PAIRED
from ...timeline.span import RoleName
from ..amounts import numpy_dtype
from .growth import WORLD, Growth
from .tape import ITSELF, After, Move, Tape

_DEFAULT_LANE = "compute"
_NAMES = dict.fromkeys(PAIRED, Collective.P2P.text)


def _untold() -> None:
    """Tell nobody."""


async def play(
    rank: Rank, tape: Tape, growth: Growth, factor: float = 1.0, *, moved: Callable[[], None] = _untold
) -> None:
    """Run on this rank the program of a recorded one.

    Args:
        rank: This rank, of `growth.ranks`.
        tape: The recorded run.
        growth: The mapping of ranks to recorded ranks.
        factor: Computes take so many times their recorded time.
        moved: Called after each move of this rank.
    """
    await _Player(rank, tape.moves[growth.like(rank.rank)], growth, factor).run(moved)


class _Player:
    """The program of one rank, while it runs."""

    def __init__(self, rank: Rank, moves: Sequence[Move], growth: Growth, factor: float) -> None:
        self._rank, self._moves, self._growth, self._factor = rank, moves, growth, factor
        self._issued: list[Future[Any] | None] = []
        self._steps: dict[int | None, AbstractContextManager[None]] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        wanted = {(m.info.group, m.info.ranks) for m in moves if m.kind == "collective"}
        # Groups of the same ranks differ in the order in which they are made, which is the same on all ranks.
        for name, ranks in sorted(wanted):
            members = growth.group(rank.rank, name, ranks)
            whole = name == WORLD and len(members) == rank.world_size
            self._groups[name, ranks] = rank.world if whole else rank.group(members, name=name)

    async def run(self, moved: Callable[[], None]) -> None:
        """Issue everything."""
        for move in self._moves:
            await self._wait(move)
            self._issued.append(self._issue(move))
            moved()

    async def _wait(self, move: Move) -> None:
        """Wait as the recorded program did: for the futures it awaited, and then for its pause."""
        at_ns = self._rank.now_ns() + move.pause_ns
        for after in move.awaits:
            future = self._issued[after.move]
            if future is not None and not future.done:
                await future
                at_ns = max(at_ns, self._rank.now_ns() + after.delay_ns)
        if at_ns > self._rank.now_ns():
            await trio.sleep((at_ns - self._rank.now_ns()) / 1e9)

    def _issue(self, move: Move) -> Future[Any] | None:
        if move.kind == "begin":
            assert move.span.step is not None
            self._steps[move.span.step] = self._rank.step(move.span.step)
            self._steps[move.span.step].__enter__()
            return None
        if move.kind == "end":
            self._steps.pop(move.span.step).__exit__(None, None, None)
            return None
        needs = [self._when(after) for after in move.needs]
        if move.kind == "compute":
            return self._compute(move, needs)
        if move.kind == "kept":
            return self._rank.spawn(_later, needs, move.span.duration_ns, None, name=move.span.name)
        return self._communicate(move, needs)

    def _when(self, after: After) -> object:
        """Return a future that is done a delay after a move is over."""
        future = None if after.move == ITSELF else self._issued[after.move]
        return self._rank.spawn(_later, [future], after.delay_ns, None) if after.delay_ns else future

    def _compute(self, move: Move, needs: list[object]) -> Future[Any]:
        span = move.span
        lane = None if span.lane == _DEFAULT_LANE else span.lane
        seconds = span.duration_ns * self._factor / 1e9
        return self._rank.compute(
            lambda *_: None,
            *needs,
            name=RoleName(span.name, span.role),
            seconds=seconds,
            stream=lane,
            call_site=span.call_site or None,
        )

    def _communicate(self, move: Move, needs: list[object]) -> Future[Any]:
        info, rank = move.info, self._rank
        options: dict[str, Any] = {
            "priority": info.priority, "stream": rank.stream(move.lane), "call_site": info.call_site or None,
            "name": RoleName(move.span.name, move.span.role),
        }  # fmt: skip
        if move.kind == "message":
            return self._message(move, needs, options)
        group = self._groups[info.group, info.ranks]
        issue = getattr(group, info.op)
        if info.op == Collective.BARRIER.text:
            barrier: Future[Any] = issue(**options)
            return barrier
        if info.op == Collective.PERMUTE.text:
            options["pairs"] = [(member, (member + 1) % group.size) for member in range(group.size)]
        summed: Future[Any] = issue(self._input(move, group.size, needs), **options)
        return summed

    def _message(self, move: Move, needs: list[object], options: dict[str, Any]) -> Future[Any]:
        own, recorded = self._rank, move.info.ranks
        sends = recorded[0] == move.span.rank
        peer = self._growth.peer(own.rank, recorded[sends])
        if sends:
            return own.send(self._input(move, 1, needs), peer, move.tag, **options)
        return own.recv(((_count(move, 1),), numpy_dtype(move.dtype)), peer, move.tag, **options)

    def _input(self, move: Move, size: int, needs: list[object]) -> Any:
        """Return an array of the size that this rank puts in; a future of it if the operation waits for something."""
        x = self._rank.empty(_count(move, size), numpy_dtype(move.dtype))
        return self._rank.spawn(_later, needs, 0, x) if needs else x


def _count(move: Move, size: int) -> int:
    """Return the elements that a rank puts in; recorded is the size of the larger of input and result."""
    traits, of = Collective(_NAMES.get(move.info.op, move.info.op)).traits, move.info.nbytes
    each = -(-of // (numpy_dtype(move.dtype).itemsize * size))
    if traits.gathers and not traits.scatters:
        return each
    return each * size if traits.scatters else -(-of // numpy_dtype(move.dtype).itemsize)


async def _later(needs: Sequence[object], delay_ns: int, value: object) -> object:
    """Return a value when all futures are done, and a delay later."""
    for each in needs:
        if isinstance(each, Future):
            await each
    await trio.sleep(delay_ns / 1e9)
    return value
