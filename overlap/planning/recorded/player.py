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
from .tape import ITSELF, Dependency, Move, Tape

_DEFAULT_LANE = "compute"
_COLLECTIVE_NAMES = dict.fromkeys(PAIRED, Collective.P2P.text)


def _ignore_move() -> None:
    """Do nothing, as the default of `moved`."""


async def play(
    rank: Rank, tape: Tape, growth: Growth, factor: float = 1.0, *, moved: Callable[[], None] = _ignore_move
) -> None:
    """Run the recorded program on this rank.

    Args:
        rank: This rank, of `growth.ranks`.
        tape: The recorded run.
        growth: The mapping of ranks to recorded ranks.
        factor: Factor of the recorded times of computes.
        moved: Called after each move of this rank.
    """
    await _Player(rank, tape.moves[growth.recorded_rank(rank.rank)], growth, factor).run(moved)


class _Player:
    """The program of one rank, while it runs."""

    def __init__(self, rank: Rank, moves: Sequence[Move], growth: Growth, factor: float) -> None:
        self._rank, self._moves, self._growth, self._factor = rank, moves, growth, factor
        self._issued: list[Future[Any] | None] = []
        self._steps: dict[int | None, AbstractContextManager[None]] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        group_keys = {(m.info.group, m.info.ranks) for m in moves if m.kind == "collective"}
        # Groups of the same ranks differ in the order in which they are made, which is the same on all ranks.
        for name, ranks in sorted(group_keys):
            members = growth.group(rank.rank, name, ranks)
            whole = name == WORLD and len(members) == rank.world_size
            self._groups[name, ranks] = rank.world if whole else rank.group(members, name=name)

    async def run(self, moved: Callable[[], None]) -> None:
        """Issue all moves in order, and call `moved` after each."""
        for move in self._moves:
            await self._wait_before(move)
            self._issued.append(self._issue_move(move))
            moved()

    async def _wait_before(self, move: Move) -> None:
        """Wait before a move as the recorded program did: for its futures, and for its pause."""
        at_ns = self._rank.now_ns() + move.pause_ns
        for dependency in move.awaits:
            future = self._issued[dependency.move]
            if future is not None and not future.done:
                await future
                at_ns = max(at_ns, self._rank.now_ns() + dependency.delay_ns)
        if at_ns > self._rank.now_ns():
            await trio.sleep((at_ns - self._rank.now_ns()) / 1e9)

    def _issue_move(self, move: Move) -> Future[Any] | None:
        """Begin or end a step, or issue the operation of a move and return its future."""
        if move.kind == "begin":
            assert move.span.step is not None
            self._steps[move.span.step] = self._rank.step(move.span.step)
            self._steps[move.span.step].__enter__()
            return None
        if move.kind == "end":
            self._steps.pop(move.span.step).__exit__(None, None, None)
            return None
        needs = [self._delay_after(after) for after in move.needs]
        if move.kind == "compute":
            return self._issue_compute(move, needs)
        if move.kind == "kept":
            return self._rank.spawn(_return_later, needs, move.span.duration_ns, None, name=move.span.name)
        return self._issue_communication(move, needs)

    def _delay_after(self, dependency: Dependency) -> object:
        """Return a future that is done a delay after another move; the move itself counts from its own issue."""
        future = None if dependency.move == ITSELF else self._issued[dependency.move]
        return self._rank.spawn(_return_later, [future], dependency.delay_ns, None) if dependency.delay_ns else future

    def _issue_compute(self, move: Move, needs: list[object]) -> Future[Any]:
        """Issue a compute that takes its recorded time, times the factor."""
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

    def _issue_communication(self, move: Move, needs: list[object]) -> Future[Any]:
        """Issue a collective of the recorded size, or one end of a message."""
        info, rank = move.info, self._rank
        options: dict[str, Any] = {
            "priority": info.priority, "stream": rank.stream(move.lane), "call_site": info.call_site or None,
            "name": RoleName(move.span.name, move.span.role),
        }  # fmt: skip
        if move.kind == "message":
            return self._issue_message(move, needs, options)
        group = self._groups[info.group, info.ranks]
        issue = getattr(group, info.op)
        if info.op == Collective.BARRIER.text:
            barrier: Future[Any] = issue(**options)
            return barrier
        if info.op == Collective.PERMUTE.text:
            options["pairs"] = [(member, (member + 1) % group.size) for member in range(group.size)]
        result: Future[Any] = issue(self._input_array(move, group.size, needs), **options)
        return result

    def _issue_message(self, move: Move, needs: list[object], options: dict[str, Any]) -> Future[Any]:
        """Issue the recorded end of a message: the send if the recorded rank was the first of the pair."""
        own, recorded = self._rank, move.info.ranks
        sends = recorded[0] == move.span.rank
        peer = self._growth.peer(own.rank, recorded[sends])
        if sends:
            return own.send(self._input_array(move, 1, needs), peer, move.tag, **options)
        return own.recv(((_element_count(move, 1),), numpy_dtype(move.dtype)), peer, move.tag, **options)

    def _input_array(self, move: Move, size: int, needs: list[object]) -> Any:
        """Return the array that this rank puts in; a future of it if the operation has to wait for other moves."""
        x = self._rank.empty(_element_count(move, size), numpy_dtype(move.dtype))
        return self._rank.spawn(_return_later, needs, 0, x) if needs else x


def _element_count(move: Move, size: int) -> int:
    """Return the elements that a rank puts in; the record has the bytes of the larger of input and result."""
    traits, nbytes = Collective(_COLLECTIVE_NAMES.get(move.info.op, move.info.op)).traits, move.info.nbytes
    block = -(-nbytes // (numpy_dtype(move.dtype).itemsize * size))
    if traits.gathers and not traits.scatters:
        return block
    return block * size if traits.scatters else -(-nbytes // numpy_dtype(move.dtype).itemsize)


async def _return_later(needs: Sequence[object], delay_ns: int, value: object) -> object:
    """Return a value `delay_ns` after all futures are done."""
    for each in needs:
        if isinstance(each, Future):
            await each
    await trio.sleep(delay_ns / 1e9)
    return value
