"""A rank as its world holds it: what works for it, whether it makes progress, and where it stands."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass
from inspect import isawaitable
from typing import TypeVar

import trio

from ..errors import UsageError
from ..notice import notify
from .compute import ComputeFuture
from .compute_streams import ComputeStreams
from .context import RankContext
from .program_places import program_places
from .rank import Rank
from .standing import Standing

T = TypeVar("T")

_SOON_S = 1.0  # people who have asked for an end wonder after a second


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A rank, and what works for it."""

    rank: Rank  # As its program sees it
    context: RankContext  # As its operations see it
    compute: ComputeStreams  # Runs its functions
    left: Container[int]  # World ranks that have finished their program

    @property
    def task(self) -> trio.lowlevel.Task | None:
        """The task in which its program runs, once it does."""
        return self.context.nursery.parent_task if self.context.nursery is not None else None

    def mark(self) -> tuple[object, int]:
        """Return an object that is another one after any progress, and a number that changes with it."""
        return self.rank.recorder.last, len(self.context.outstanding.operations)

    def standing(self, now_ns: int, place: str | None = None) -> Standing:
        """Say where the rank stands.

        Args:
            now_ns: The present instant.
            place: Where its program was, if it is being unwound and can no longer be asked.
        """
        outstanding, rank = self.context.outstanding, self.context.rank
        if not outstanding.operations and rank in self.left:
            return Standing(rank=rank, lines=("has finished",), busy="which has finished")
        places = self._places() if place is None else [place] if place else []
        elsewhere = f"its program is elsewhere{', at ' if places else ''}{' and '.join(places)}"
        lines = outstanding.lines(now_ns) or ["has nothing issued"]
        if places or not outstanding.operations:
            lines[-1] += f"; {elsewhere}"
        return Standing(
            rank=rank, lines=tuple(lines), awaits=tuple(outstanding.awaits()), busy=self._busy(now_ns, places)
        )

    def computing(self) -> ComputeFuture[object] | None:
        """Return the function that runs now, if one does."""
        operations = list(self.context.outstanding.operations)
        computes = [each for each in operations if isinstance(each, ComputeFuture)]
        return next((each for each in computes if each.started_ns is not None and not each.done), None)

    async def computes_ended(self) -> None:
        """Wait until no function of the rank runs any more, and say so if that takes long."""
        with trio.move_on_after(_SOON_S):
            await self.compute.ended()
            return
        running = self.compute.current
        if running is not None:
            what = f"{running.label} ({running.call_site}) of rank {self.context.rank}"
            notify(f"waiting for {what} to return: a function cannot be interrupted")
        await self.compute.ended()

    def _busy(self, now_ns: int, places: list[str]) -> str:
        running = self.computing()
        if running is not None:
            return f"whose {running.label} ({running.call_site}) {running.state(now_ns)}"
        if places:
            return f"whose program is at {' and '.join(places)}"
        return "" if self.context.outstanding.operations else "whose program is elsewhere"

    def _places(self) -> list[str]:
        if self.context.elsewhere is not None:
            return [self.context.elsewhere()]
        return program_places(self.task) if self.task is not None else []


def begun(main: Callable[..., Awaitable[T]], rank: Rank, args: tuple[object, ...]) -> Awaitable[T]:
    """Call a rank's program; return what is to be awaited.

    Raises:
        UsageError: If there is nothing to be awaited.
    """
    program = main(rank, *args)
    if not isawaitable(program):
        name, code = getattr(main, "__name__", repr(main)), getattr(main, "__code__", None)
        place = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
        returned = type(program).__name__
        raise UsageError(f"main: expected an async function, but {name}(rank) returned {returned}{place}")
    return program
