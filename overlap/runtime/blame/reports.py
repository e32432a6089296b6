"""Reports on the ranks of this process: where they wait and which rank is to blame; and the watches that report."""

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

from ...diagnostics import definition_place, task_tree_lines
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
    """A rank of this process: all objects that belong to it."""

    rank: Rank  # Argument of the rank's program
    context: RankContext  # What the rank's operations know of it
    compute: ComputeStreams  # Compute streams of the rank
    ranks_here: Sequence[LocalRank]  # All ranks of this process
    finished_ranks: Container[int]  # World ranks that have finished their program

    @property
    def task(self) -> trio.lowlevel.Task | None:
        """Task that runs the program of the rank; None before it starts."""
        return self.context.nursery.parent_task if self.context.nursery is not None else None

    def progress_mark(self) -> tuple[object, int]:
        """Return the last recorded span and the number of unfinished operations: any progress changes one of them."""
        return self.rank.recorder.last, len(self.context.outstanding.operations)

    def view(self, now_ns: int, place: str | None = None) -> RankView:
        """Return the view of the rank: its unfinished operations, and where its program is.

        Args:
            now_ns: The present instant of the rank's clock.
            place: Line of the rank's program, if the program is ending, so that its frames are gone; see `view_of`.
        """
        from .views import view_of  # most programs need none

        return view_of(self.context, self.finished_ranks, now_ns, place)

    @property
    def has_unseen_error(self) -> bool:
        """Whether a rank of this process has an error that no task or thread was given."""
        return any(member.context.outstanding.unseen is not None for member in self.ranks_here)

    async def wait_for_computes(self) -> None:
        """Wait until no function of the rank runs any more; print a notice if that takes more than a second."""
        with trio.move_on_after(_SOON_S):
            await self.compute.wait_ended()
            return
        running = self.compute.current
        if running is not None:
            function = f"{running.label} ({running.call_site}) of rank {self.context.rank}"
            notify(f"waiting for {function} to return: a function cannot be interrupted")
        await self.compute.wait_ended()


def call_program(main: Callable[..., Awaitable[T]], rank: Rank, args: tuple[object, ...]) -> Awaitable[T]:
    """Call the program of a rank, and return the awaitable that it returns.

    Args:
        main: The program.
        rank: First argument of the program.
        args: Further arguments of the program.

    Raises:
        UsageError: If the program returns no awaitable.
    """
    program = main(rank, *args)
    if not isawaitable(program):
        called = getattr(main, "func", main)  # of a partial
        name, returned = getattr(called, "__name__", repr(called)), type(program).__name__
        raise UsageError(
            f"main: expected an async function, but {name}(rank) returned {returned}{definition_place(called)}"
        )
    return program


class Reports:
    """Makes reports on the ranks of this process.

    Args:
        members: The ranks of this process.
        backend: Real or virtual time.
        others: The other processes; None if there are none.

    Attributes:
        stopped_views: Views of the ranks at the moment when the first of them was stopped; after `gather_views` those
            of all processes.
        caveat: Last line of each report; "": none.
    """

    def __init__(self, members: Sequence[LocalRank], backend: Backend, others: ControlPlane | None) -> None:
        self.stopped_views: list[RankView] = []
        self.caveat: str = ""
        self._members, self._backend, self._others = members, backend, others

    # -- at the stop -------------------------------------------------------------------------------------------------

    def record_views(self) -> None:
        """Record the present views of the ranks in `stopped_views`, unless that was done before."""
        self.stopped_views = self.stopped_views or self.present_views()

    async def gather_views(self) -> None:
        """Wait a moment for the views of the other processes, and add them to `stopped_views`."""
        if self._others:
            self.stopped_views = await self._others.wait_for_views(self.stopped_views)

    def view_lines(self, views: Sequence[RankView]) -> list[str]:
        """Return a line for each view: the operation that the rank waits in, and the ranks that it waits for."""
        from .views import report_lines

        return [*report_lines(views, time_ns()), *([self.caveat] if self.caveat else [])]

    def culprit_sentence(self, *, ignores_cycles: bool = False) -> str:
        """Return a sentence on the ranks that waited at the stop, and the culprit, or "" if no rank waited.

        Args:
            ignores_cycles: Whether to return "", too, if ranks only wait for each other: they may have been about to go
                on.
        """
        from .views import sentence_on

        return sentence_on(self.stopped_views, ignores_cycles=ignores_cycles)

    async def add_note_to(self, interrupt: BaseException) -> None:
        """Add notes to an interrupt: the sentence on the culprit, and a line for each waiting rank."""
        from .views import first_lines

        self.record_views()
        await self.gather_views()
        sentence = self.culprit_sentence(ignores_cycles=True)
        for line in [*([sentence] if sentence else []), *first_lines(self.view_lines(self.stopped_views))]:
            interrupt.add_note(f"  {line}")

    # -- now -------------------------------------------------------------------------------------------------------

    def present_views(self, places: Mapping[int, str] = MappingProxyType({})) -> list[RankView]:
        """Return the present view of each rank.

        Args:
            places: Lines of programs that are ending, so that their frames are gone, by world rank.
        """
        now_ns = self._backend.now_ns()
        return [member.view(now_ns, places.get(member.context.rank)) for member in self._members]

    def unfinished_lines(self, rank: int) -> list[str]:
        """Return lines on the operations that a rank had not finished when it was abandoned; before, those of now."""
        own = [member.context.outstanding for member in self._members if member.context.rank == rank]
        return [line for outstanding in own for line in outstanding.doing or outstanding.operation_lines()]

    def waiting_operation(self, ranks: Container[int]) -> str:
        """Return a clause such as "rank 0 waited for it in barrier #3 ...", or "" if no rank waits for `ranks`.

        Args:
            ranks: World ranks that are lost.
        """
        for context in (member.context for member in self._members):
            if operation := context.outstanding.describe_waiting_operation(ranks):
                step = "" if context.step is None else f" in step {context.step}"
                return f"rank {context.rank} waited for it in {operation}{step}"
        return ""

    def steps_text(self) -> str:
        """Return the steps of the ranks as text, such as " in step 3", or "" without steps."""
        steps = sorted({member.context.step for member in self._members if member.context.step is not None})
        if not steps:
            return ""
        return f" in step {steps[0]}" if len(steps) == 1 else f" in steps {steps[0]}-{steps[-1]}"

    def saved_step_text(self) -> str:
        """Return the newest saved step as text, such as "; step 40 is saved", or "" if none is saved."""
        steps = [member.context.saved_step for member in self._members if member.context.saved_step is not None]
        return f"; step {max(steps)} is saved" if steps else ""

    def task_tree_lines(self) -> list[str]:
        """Return lines with the tree of each rank's tasks, and the line of the program at which each task is."""
        lines: list[str] = []
        for context in (member.context for member in self._members):
            if context.nursery is not None:
                task, name = context.nursery.parent_task, f"rank {context.rank}"
                lines += task_tree_lines(task, context.thread, name=name, indent="  ")
        return lines


def make_world_watch(
    members: Sequence[LocalRank],
    token: trio.lowlevel.TrioToken,
    limits: StallLimits,
    others: ControlPlane | None,
    give_up: Callable[[float], None],
) -> LoopWatch:
    """Return the watch for stalls and for a busy loop. It watches while a ``with`` block runs in the loop's thread.

    Args:
        members: The ranks of this process.
        token: Token of the event loop.
        limits: Time without progress until a report, and until the end of the world.
        others: The other processes; None if there are none.
        give_up: Ends the world; takes the number of seconds without progress.
    """
    ranks = {member.context.rank: member for member in members}
    watch = StallWatch(ranks, limits, others, give_up, size=members[0].rank.world_size)
    return LoopWatch(
        token,
        get_ident(),
        look=watch.look_for_stall,
        period_s=watch.period_s,
        runs_programs=any(member.context.program_line is None for member in members),
        tasks=lambda: {rank: member.task for rank, member in ranks.items() if member.task is not None},
        report=partial(_report_busy_rank, others, alone=len(members) == 1),
        report_free=lambda busy: others.send_busy(busy.rank, "") if others else None,
        record=lambda busy, now_ns: _record_busy_rank(ranks, busy, now_ns),
    )


def _report_busy_rank(others: ControlPlane | None, busy: BusyLoop, seconds: float, *, alone: bool) -> None:
    """Report the rank that keeps the event loop to the user and the other processes. The watch's thread calls this.

    If the rank is `alone` in this process, the notice names no other ranks that wait.
    """
    waiting = "nothing else of it goes on" if alone else "the other ranks of this process wait"
    notify(
        f"rank {busy.rank} has kept the event loop busy for {format_s(seconds)} at {busy.place}; {waiting}; "
        "rank.compute or trio.to_thread would take that work off the loop; awaited at once, it still makes the others "
        "wait at their next operation: issue it early and await it late, or start it in a nursery"
    )
    if others:
        others.send_busy(busy.rank, busy.place)


def _record_busy_rank(members: Mapping[int, LocalRank], busy: BusyLoop, now_ns: int) -> None:
    """Record a span, until `now_ns`, in the lane "program" of the rank, and in the lane "loop" of the others."""
    for rank, member in members.items():
        lane = "program" if rank == busy.rank else "loop"
        member.context.record(("program", lane, busy.place, busy.since_ns, now_ns, None))
