"""Reports on the ranks of this process: views of them for the judge of waits, and the watches that make them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from threading import get_ident
from time import time_ns
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import trio

from ...diagnostics import defined_at, task_tree
from ...errors import UsageError
from ...notice import notify
from ...units import format_s
from ..backend import Backend
from ..compute import ComputeStreams
from ..context import RankContext
from ..rank import Rank
from .loop import BusyLoop, LoopWatch
from .stall import StallLimits, StallWatch

if TYPE_CHECKING:
    from ...processes.control import ControlPlane
    from ...waits.ends import RankView

T = TypeVar("T")

_SOON_S = 1.0  # people who have asked for an end wonder after a second


@dataclass(frozen=True, slots=True, eq=False)
class LocalRank:
    """A rank of this process, its context and its compute streams."""

    rank: Rank  # The rank for its program
    context: RankContext  # The rank for its operations
    compute: ComputeStreams  # Streams of its functions
    all: Sequence[LocalRank]  # The ranks of this process
    left: Container[int]  # World ranks that have finished their program

    @property
    def task(self) -> trio.lowlevel.Task | None:
        """Task that runs its program, once it runs."""
        return self.context.nursery.parent_task if self.context.nursery is not None else None

    def mark(self) -> tuple[object, int]:
        """Return an object that is replaced by any progress, and a number that changes with it."""
        return self.rank.recorder.last, len(self.context.outstanding.operations)

    def view(self, now_ns: int, place: str | None = None) -> RankView:
        """Return the view of the rank, for the judge of waits; `now_ns` is the present of its context.

        A program that is being unwound has no frame to look at any more; then `place` is its line.
        """
        from .views import view_of  # most programs need none

        return view_of(self.context, self.left, now_ns, place)

    @property
    def has_unseen_error(self) -> bool:
        """Whether a rank of this process has an error that no task or thread was given."""
        return any(member.context.outstanding.unseen is not None for member in self.all)

    async def computes_ended(self) -> None:
        """Wait until no function of the rank runs any more, with a notice if that takes long."""
        with trio.move_on_after(_SOON_S):
            await self.compute.ended()
            return
        running = self.compute.current
        if running is not None:
            function = f"{running.label} ({running.call_site}) of rank {self.context.rank}"
            notify(f"waiting for {function} to return: a function cannot be interrupted")
        await self.compute.ended()


def call_program(main: Callable[..., Awaitable[T]], rank: Rank, args: tuple[object, ...]) -> Awaitable[T]:
    """Call a rank's program; return its awaitable.

    Raises:
        UsageError: If it returns no awaitable.
    """
    program = main(rank, *args)
    if not isawaitable(program):
        called = getattr(main, "func", main)  # of a partial
        name, returned = getattr(called, "__name__", repr(called)), type(program).__name__
        raise UsageError(f"main: expected an async function, but {name}(rank) returned {returned}{defined_at(called)}")
    return program


_LISTED = 16  # lines on waiting ranks in an interrupt


class Reports:
    """Reports on the ranks of this process.

    Args:
        members: The ranks of this process.
        backend: Real or virtual time.
        others: The other processes; None if there are none.

    Attributes:
        stood: Views of the ranks when the first of them was stopped; of all processes once they are gathered.
        caveat: A line that ends each report.
    """

    def __init__(self, members: Sequence[LocalRank], backend: Backend, others: ControlPlane | None) -> None:
        self.stood: list[RankView] = []
        self.caveat: str = ""
        self._members, self._backend, self._others = members, backend, others

    # -- at the stop -------------------------------------------------------------------------------------------------

    def take_stock(self) -> None:
        """Note the views of the ranks, unless they were noted when the first of them was stopped."""
        self.stood = self.stood or self.views()

    async def gather(self) -> None:
        """Give the other processes a moment to report their ranks."""
        if self._others:
            self.stood = await self._others.views(self.stood)

    def lines(self) -> list[str]:
        """Return a line for each rank: the operation it waited in and the ranks it waited for."""
        return self._with_caveat(self.stood)

    def sentence(self, *, soon: bool = False) -> str:
        """Return a sentence on the waiting ranks and their culprit; "" if no rank waited.

        Args:
            soon: Whether to be silent on ranks that wait for each other: at one moment they may be about to go on.
        """
        from .views import sentence_on

        return sentence_on(self.stood, soon=soon)

    async def add_note_to(self, interrupt: BaseException) -> None:
        """Add a line for each waiting rank to an interrupt."""
        self.take_stock()
        await self.gather()
        lines, sentence = self.lines(), self.sentence(soon=True)
        more = [f"and {len(lines) - _LISTED} lines more"] if len(lines) > _LISTED else []
        for line in [*([sentence] if sentence else []), *lines[:_LISTED], *more]:
            interrupt.add_note(f"  {line}")

    # -- now -------------------------------------------------------------------------------------------------------

    def views(self, places: Mapping[int, str] = MappingProxyType({})) -> list[RankView]:
        """Return the view of each rank; `places` has the lines of programs that are being unwound, by rank."""
        now_ns = self._backend.now_ns()
        return [member.view(now_ns, places.get(member.context.rank)) for member in self._members]

    def lines_now(self) -> list[str]:
        """Return a line for each rank: the operation it waits in and the ranks it waits for."""
        return self._with_caveat(self.views())

    def _with_caveat(self, views: Sequence[RankView]) -> list[str]:
        from .views import report_lines

        return [*report_lines(views, time_ns()), *([self.caveat] if self.caveat else [])]

    def doing(self, rank: int) -> list[str]:
        """Return the operations that a rank had not finished when it was abandoned."""
        own = [member.context.outstanding for member in self._members if member.context.rank == rank]
        return [line for outstanding in own for line in outstanding.doing or outstanding.lines()]

    def waiting_for(self, ranks: Container[int]) -> str:
        """Name the operation in which ranks wait for lost ones; "" if none do."""
        for context in (member.context for member in self._members):
            if operation := context.outstanding.waiting_for(ranks):
                step = "" if context.step is None else f" in step {context.step}"
                return f"rank {context.rank} waited for it in {operation}{step}"
        return ""

    def steps(self) -> str:
        """Return the steps of the ranks as text, such as " in step 3"; "" without steps."""
        steps = sorted({member.context.step for member in self._members if member.context.step is not None})
        if not steps:
            return ""
        return f" in step {steps[0]}" if len(steps) == 1 else f" in steps {steps[0]}-{steps[-1]}"

    def kept(self) -> str:
        """Return the saved step of the ranks as text, such as "; step 40 is saved"; "" if none is."""
        steps = [member.context.kept_step for member in self._members if member.context.kept_step is not None]
        return f"; step {max(steps)} is saved" if steps else ""

    def tasks(self) -> list[str]:
        """Name the tasks of each rank, with the file and line of the program where they are."""
        lines: list[str] = []
        for context in (member.context for member in self._members):
            if context.nursery is not None:
                task, name = context.nursery.parent_task, f"rank {context.rank}"
                lines += task_tree(task, context.thread, name=name, indent="  ")
        return lines


def world_watch(
    members: Sequence[LocalRank],
    token: trio.lowlevel.TrioToken,
    limits: StallLimits,
    others: ControlPlane | None,
    give_up: Callable[[float], None],
) -> LoopWatch:
    """Return the watch for stalls and for a busy loop, for the length of a ``with`` in the loop's thread.

    Args:
        token: Token of their loop.
        limits: Limits of the time until a report, and until the end.
        give_up: Ends the world; takes the number of seconds without progress.
    """
    ranks = {member.context.rank: member for member in members}
    watch = StallWatch(ranks, limits, others, give_up, size=members[0].rank.world_size)
    return LoopWatch(
        token,
        get_ident(),
        look=watch.look,
        period_s=watch.period_s,
        tasks=lambda: {rank: member.task for rank, member in ranks.items() if member.task is not None},
        report=partial(_report_busy, others, alone=len(members) == 1),
        report_free=lambda busy: others.send_busy(busy.rank, "") if others else None,
        record=lambda busy, now_ns: _record_busy(ranks, busy, now_ns),
    )


def _report_busy(others: ControlPlane | None, busy: BusyLoop, seconds: float, *, alone: bool) -> None:
    """Notify the user and the other processes of the rank that blocks the event loop; in the thread of the watch."""
    waiting = "nothing else of it goes on" if alone else "the other ranks of this process wait"
    notify(
        f"rank {busy.rank} has kept the event loop busy for {format_s(seconds)} at {busy.place}; {waiting}; "
        "rank.compute or trio.to_thread would take that work off the loop; awaited at once, it still makes the others "
        "wait at their next operation: issue it early and await it late, or start it in a nursery"
    )
    if others:
        others.send_busy(busy.rank, busy.place)


def _record_busy(members: Mapping[int, LocalRank], busy: BusyLoop, now_ns: int) -> None:
    """Record that a rank has kept the loop: on its lane "program", on the lane "loop" of all others."""
    for rank, member in members.items():
        lane = "program" if rank == busy.rank else "loop"
        member.context.record(("program", lane, busy.place, busy.since_ns, now_ns, None))
