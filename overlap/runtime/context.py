"""Context of a rank: the view of operations, streams and engines on the rank and its world."""

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
from ..flight.recorder import RankFlight
from ..timeline.recording import RawSpan
from .ending import WorldEnding
from .failure import Failure
from .handover import Handover
from .interrupts import interruptible
from .memory.buffer_locks import BufferLocks
from .outstanding import Deadlines, IssuedFuture, Outstanding
from .state import TransitionError

STEP_OF_TASK: ContextVar[tuple[RankContext | None, int | None]] = ContextVar("STEP_OF_TASK", default=(None, None))
"""Rank and step in which a task was spawned, whatever step its program is in by now: the step of its operations.

With the rank, because a world within a compute, and the next one of a thread, inherit it too. Computes belong to the
step of their program: a step begins and ends with them.
"""


class Arrays(Protocol):
    """Factory of arrays."""

    shapes_only: bool  # Whether they have a shape and no data

    def empty(self, shape: Shape, dtype: np.dtype[np.generic]) -> Array:
        """Return a new array of undefined content."""

    def copy(self, array: Array) -> Array:
        """Return a C-contiguous copy."""


@dataclass(slots=True, kw_only=True, eq=False)
class RankContext:
    """View of operations, streams and the engine on one rank."""

    rank: int  # World rank
    now_ns: Callable[[], int]  # Returns the present time
    # Calls back at once, or after the callback that is running: chains of operations must not recurse.
    soon: Callable[[Callable[[], None]], None]
    record: Callable[[RawSpan], None]  # Takes a span of this rank's timeline
    arrays: Arrays  # Factory of results
    locks: BufferLocks  # Locks of arrays in flight
    outstanding: Outstanding  # Unfinished operations
    ending: WorldEnding  # End of the world
    handover: Handover  # Way of other threads to the event loop
    thread: int  # Ident of the event loop's thread
    flight: RankFlight  # Writes the flight record, and with it the timeline of collectives
    nursery: trio.Nursery | None = None  # For tasks of this rank; open as long as it lives
    step: int | None = None  # Index of its present step, if any
    open_steps: list[tuple[int, int]] = field(default_factory=list)  # Its open steps with their start times
    kept_step: int | None = None  # Step of the newest state or checkpoint of all ranks on the disk, if there is one
    program: trio.CancelScope | None = None  # Scope of its program, while it runs
    failure: Failure | None = None  # Error that ends it: of its program, or of its own code that nobody awaits
    closed: bool = False  # Whether it has ended: nothing may be issued any more
    deadlines: Deadlines = field(default_factory=Deadlines)  # Deadlines of its operations
    # Returns the checkpoint of a task that awaits an ended operation.
    pause: Callable[[], Coroutine[object, object, None]] = checkpoint
    # Returns "file:line" of its program, if it runs in another thread than the event loop.
    elsewhere: Callable[[], str] | None = None

    @property
    def prompt(self) -> bool:
        """Whether unawaited errors of code from this thread end the rank at once.

        Threads, and programs that own their main thread, get errors as from `concurrent.futures`.
        """
        return self.elsewhere is None and get_ident() == self.thread

    def end_program(self, operation: IssuedFuture[Any], failure: Failure) -> None:
        """Cancel the rank's program because of an unawaited error of its own code; the loop's thread only.

        A program that has returned gets the error at the end of the rank.
        """
        if self.program is None:
            return
        raised = f"raised by {operation.label} ({operation.call_site}) while nobody awaited it"
        if self.failure is None:
            failure.error.add_note(f'{raised}; with errors="await", it waits until the future is awaited')
        self.end_because(failure, raised)

    def end_because(self, failure: Failure, raised: str = "") -> None:
        """Cancel the rank's program, and let the rank fail with an error; the loop's thread only."""
        failure.mark_seen()
        if self.failure is not None:
            self.failure.error.add_note(f"then {in_one_line(failure.error)}, {raised}")
        elif self.program is not None:
            self.failure = failure
            self.program.cancel(reason=raised)
        else:  # its program has returned
            self.outstanding.fail(failure)

    def interrupt(self, error: BaseException) -> None:
        """End the rank because a callback has raised KeyboardInterrupt or SystemExit; the loop's thread only."""
        self.end_because(Failure(error), "raised by a callback of a future")

    def ended(self) -> PeerFailedError:
        """Return the error of calls and operations of this rank once it is closed: its own failure, or the world's."""
        if self.failure is None or self.ending.failure is not None:
            return self.ending.peer_failed()
        error = self.failure.error
        return PeerFailedError.caused_by(error, f"rank {self.rank} failed: {in_one_line(error)}", culprit=self.rank)

    def report_bug(self, error: TransitionError) -> None:
        """End the rank with an error of this library, soon; any thread."""
        self.handover.post_if_open(partial(self.end_because, Failure(error)))

    def end_step(self, step: int, since_ns: int) -> None:
        """Record a step in the timeline, unless it has ended before."""
        if (step, since_ns) in self.open_steps:
            self.open_steps.remove((step, since_ns))
            self.record(("step", "step", f"step {step}", since_ns, self.now_ns(), step))

    def end_steps(self) -> None:
        """End the steps that the program has left open: hooks can begin a step without a call at its end."""
        for step, since_ns in reversed(self.open_steps.copy()):
            self.end_step(step, since_ns)

    def keep_step(self, step: int) -> None:
        """Note that the state of all ranks after this step is on the disk."""
        self.kept_step = step
        self.flight.kept(step)

    def from_thread(self, function: Callable[..., object], *args: object) -> None:
        """Let the event loop call a function soon, in the order of the threads' calls.

        Raises:
            PeerFailedError: If the loop has ended, or in a fork.
        """
        if self.ending.forked:
            raise self.ending.peer_failed()
        try:
            self.handover.post(function, *args)
        except trio.RunFinishedError:
            raise self.ending.peer_failed() from None

    @interruptible
    def on_loop(self, function: Callable[[], bool]) -> bool:
        """Call a function on the event loop's thread and return its result; False without a loop, as in a fork.

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

    def spawn(self, function: Callable[..., object], *args: object) -> None:
        """Start a task of this rank; soon, if the caller is a thread in the event loop's place."""
        if get_ident() != self.thread:
            self.from_thread(self.spawn, function, *args)
            return
        assert self.nursery is not None, "this is a bug in overlap: a task of a rank that has not started"
        self.nursery.start_soon(function, *args)  # type: ignore[arg-type]
