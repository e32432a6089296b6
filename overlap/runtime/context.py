"""Context of a rank: all that operations, streams and engines know of the rank and its world."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import get_ident
from typing import Any, Protocol

import numpy as np
import trio
from trio.lowlevel import checkpoint

from ..collectives.kinds import Shape
from ..collectives.reduce import Array
from ..errors import PeerFailedError, in_one_line
from ..flight.recorder import NOT_RECORDED, RankFlight
from ..timeline.recording import RawSpan
from .ending import WorldEnding
from .failure import Failure
from .handover import Handover
from .memory.buffer_locks import BufferLocks
from .outstanding import Deadlines, IssuedFuture, Outstanding
from .state import TransitionError

STEP_OF_TASK: ContextVar[tuple[RankContext | None, int | None]] = ContextVar("STEP_OF_TASK", default=(None, None))
"""The rank and the step in which a task was spawned, whatever step its program is in by now: that of its operations.

With the rank, because a world within a compute, and the next one of a thread, inherit it too. Computes are of the step
in which their program is: a step begins and ends with them.
"""


class Arrays(Protocol):
    """Where arrays come from."""

    shapes_only: bool  # Whether they have a shape and no data

    def empty(self, shape: Shape, dtype: np.dtype[np.generic]) -> Array:
        """Return a new array of undefined content."""

    def copy(self, array: Array) -> Array:
        """Return a C-contiguous copy."""


@dataclass(slots=True, kw_only=True, eq=False)
class RankContext:
    """One rank, as its operations, streams and engine see it."""

    rank: int  # World rank
    now_ns: Callable[[], int]  # Returns the present instant
    # Calls back at once, or after the callback that is running: chains of operations must not recurse.
    soon: Callable[[Callable[[], None]], None]
    record: Callable[[RawSpan], None]  # Takes a span of this rank's timeline
    arrays: Arrays  # Where results come from
    locks: BufferLocks  # Which arrays are in flight
    outstanding: Outstanding  # What is unfinished
    ending: WorldEnding  # How the world ends, once it does
    handover: Handover  # To the event loop, for other threads
    thread: int  # Ident of the event loop's thread
    flight: RankFlight = NOT_RECORDED  # Writes the flight record
    nursery: trio.Nursery | None = None  # For tasks of this rank; open as long as it lives
    step: int | None = None  # Index of the step that it is in, if any
    open_steps: list[tuple[int, int]] = field(default_factory=list)  # The steps that it is in, and since when
    kept_step: int | None = None  # Of the newest state or checkpoint that all ranks have on the disk, if there is one
    program: trio.CancelScope | None = None  # Of its program, while that runs
    failure: Failure | None = None  # The error of its own code that nobody awaited, which ends it
    closed: bool = False  # Whether it has ended: nothing may be issued any more
    deadlines: Deadlines = field(default_factory=Deadlines)  # Of its operations
    # Returns the checkpoint of a task that awaits an ended operation.
    pause: Callable[[], Coroutine[object, object, None]] = checkpoint
    # Returns "file:line" of its program, where that runs in another thread than the event loop.
    elsewhere: Callable[[], str] | None = None

    @property
    def prompt(self) -> bool:
        """Whether errors of the code that this thread hands over end the rank at once if nobody awaits them.

        Threads, and programs that own their main thread, ask for errors as `concurrent.futures` does.
        """
        return self.elsewhere is None and get_ident() == self.thread

    def end_program(self, operation: IssuedFuture[Any], failure: Failure) -> None:
        """Cancel the rank's program because its own code has raised where nobody awaits it; the loop's thread only.

        A program that has returned hears of it at the end of the rank.
        """
        if self.program is None:
            return
        raised = f"raised by {operation.label} ({operation.call_site}) while nobody awaited it"
        if self.failure is None:
            failure.error.add_note(f'{raised}; with errors="await", it waits until the future is awaited')
        self.end_because(failure, raised)

    def end_because(self, failure: Failure, raised: str = "") -> None:
        """Cancel the rank's program, and let the rank fail with an error; the loop's thread only."""
        failure.note_seen()
        if self.failure is not None:
            self.failure.error.add_note(f"then {in_one_line(failure.error)}, {raised}")
        elif self.program is not None:
            self.failure = failure
            self.program.cancel(reason=raised)

    def report_bug(self, error: TransitionError) -> None:
        """End the rank with an error of this library, soon; any thread."""
        self.handover.post_if_open(partial(self.end_because, Failure(error)))

    def end_step(self, step: int, since_ns: int) -> None:
        """Show a step in the timeline, unless it has ended before."""
        if (step, since_ns) in self.open_steps:
            self.open_steps.remove((step, since_ns))
            self.record(("step", "step", f"step {step}", since_ns, self.now_ns(), step))

    def end_steps(self) -> None:
        """End the steps that the program has left open: hooks can begin a step, and do not hear of the end."""
        for step, since_ns in reversed(self.open_steps.copy()):
            self.end_step(step, since_ns)

    def keep_step(self, step: int) -> None:
        """Note that the state of all ranks after this step is on the disk."""
        self.kept_step = step
        self.flight.kept(step)

    def from_thread(self, function: Callable[..., object], *args: object) -> None:
        """Let the event loop call a function, soon: in the order in which threads have asked.

        Raises:
            PeerFailedError: If there is no loop any more, or in a fork.
        """
        if self.ending.forked:
            raise self.ending.peer_failed()
        try:
            self.handover.post(function, *args)
        except trio.RunFinishedError:
            raise self.ending.peer_failed() from None

    def on_loop(self, function: Callable[[], bool]) -> bool:
        """Call a function on the event loop's thread and return its result; False if there is no loop, as in a fork.

        Another thread waits until the loop has called it.
        """
        if get_ident() == self.thread:
            return function()
        answer: SimpleQueue[bool] = SimpleQueue()

        def call() -> None:
            result = False
            try:
                result = function()
            finally:
                answer.put(result)

        try:
            self.from_thread(call)
        except PeerFailedError:
            return False
        return answer.get()

    def expire(self, operation: IssuedFuture[object], timeout_s: float) -> None:
        """Let an operation of this rank expire when so much time has gone by."""
        self.deadlines.add(operation, timeout_s, self.spawn, self.now_ns)

    def spawn(self, function: Callable[..., object], *args: object) -> None:
        """Start a task of this rank; soon, if a thread asks that has the event loop's place."""
        if get_ident() != self.thread:
            self.from_thread(self.spawn, function, *args)
            return
        assert self.nursery is not None, "only a rank that lives starts programs"
        self.nursery.start_soon(function, *args)  # type: ignore[arg-type]
