"""Context of a rank: what its operations, streams and engines need to know of the rank and its world."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import get_ident
from typing import Any, Protocol

import numpy as np
import outcome
import trio
from trio.lowlevel import checkpoint

from ..collectives.kinds import Shape
from ..collectives.reduce import Array
from ..errors import PeerFailedError, one_line_text
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
"""Rank and step in which a task was spawned. The operations of the task belong to this step, even if the program is in
a later one by now.

The rank is there because another world that starts in the task's context, such as one within a compute, inherits the
value: it ignores the step of a rank that is not its own. Computes belong to the present step of the program instead.
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
    """Facts and objects of one rank that its operations, its streams and the engine share."""

    rank: int  # World rank
    now_ns: Callable[[], int]  # Returns the present instant of the world's clock
    # Calls a function at once, or, within another such call, after it: chains of operations must not recurse.
    call_in_turn: Callable[[Callable[[], None]], None]
    record: Callable[[RawSpan], None]  # Takes a span of this rank's timeline
    arrays: Arrays  # Factory of results
    locks: BufferLocks  # Locks of arrays in flight
    outstanding: Outstanding  # Unfinished operations
    ending: WorldEnding  # End of the world
    handover: Handover  # Way of other threads to the event loop
    thread: int  # Ident of the event loop's thread
    flight: RankFlight  # Writes the flight record, and with it the timeline of collectives
    nursery: trio.Nursery | None = None  # For tasks of this rank; open as long as it lives
    step: int | None = None  # Index of the program's present step; None: outside of a step
    open_steps: list[tuple[int, int]] = field(default_factory=list)  # Open steps, as (index, start in ns)
    saved_step: int | None = None  # Step of the newest saved state of all ranks on the disk; None: none is saved
    program: trio.CancelScope | None = None  # Cancel scope of the rank's program, while the program runs
    failure: Failure | None = None  # Error that ends the rank: of the program, or of its own code that nobody awaits
    closed: bool = False  # Whether the rank has ended: nothing may be issued any more
    deadlines: Deadlines = field(default_factory=Deadlines)  # Deadlines of its operations
    # Makes the checkpoint that a task passes when it awaits an operation that has ended.
    pause: Callable[[], Coroutine[object, object, None]] = checkpoint
    # Returns "file:line" of the program, if it runs in another thread than the event loop's; None: it is a task there.
    program_line: Callable[[], str] | None = None

    @property
    def fails_promptly(self) -> bool:
        """Whether an error of a task that this thread spawns ends the rank at once if nobody awaits it.

        True if the program runs on the event loop, in this thread. In other threads errors are raised where the future
        is used, as in `concurrent.futures`.
        """
        return self.program_line is None and get_ident() == self.thread

    def fail_for_unawaited_error(self, operation: IssuedFuture[Any], failure: Failure) -> None:
        """Cancel the rank's program because of an error of its own code that nobody awaits.

        If the program has returned, nothing happens: the rank raises the error at its end. Only the loop's thread may
        call this.

        Args:
            operation: The compute or task that has raised the error.
            failure: Failure of that operation, which is among the unseen ones of the rank.
        """
        if self.program is None:
            return  # the rank waits in `Outstanding.drain`, which raises unseen errors
        raised = f"raised by {operation.label} ({operation.call_site}) while nobody awaited it"
        if self.failure is None:
            failure.error.add_note(f'{raised}; with errors="await", it waits until the future is awaited')
        self.fail_rank(failure, raised)

    def fail_rank(self, failure: Failure, raised: str = "") -> None:
        """Cancel the rank's program, and let the rank fail with an error. Only the loop's thread may call this.

        If the rank has failed already, the error becomes a note of the first one.

        Args:
            failure: The error, which counts as seen from now on.
            raised: Where it was raised, such as "raised by compute 'f' (train.py:8)".
        """
        failure.mark_seen()
        if self.failure is not None:
            self.failure.error.add_note(f"then {one_line_text(failure.error)}, {raised}")
        elif self.program is not None:
            self.failure = failure
            self.program.cancel(reason=raised)
        else:  # its program has returned: the wait for its operations raises the error
            self.outstanding.record_failure(failure)

    def interrupt(self, error: BaseException) -> None:
        """End the rank because a callback, on the loop's thread, has raised KeyboardInterrupt or SystemExit."""
        self.fail_rank(Failure(error), "raised by a callback of a future")

    def closed_rank_error(self) -> PeerFailedError:
        """Return the error that calls and operations of this rank raise once it is closed.

        The cause is the rank's own failure; if the world has failed, it is that of the world.
        """
        if self.failure is None or self.ending.failure is not None:
            return self.ending.peer_error()
        error = self.failure.error
        return PeerFailedError.caused_by(error, f"rank {self.rank} failed: {one_line_text(error)}", culprit=self.rank)

    def report_bug(self, error: TransitionError) -> None:
        """Let the rank fail soon with an error in this library itself. Any thread may call this."""
        self.handover.post_if_open(partial(self.fail_rank, Failure(error)))

    def end_step(self, step: int, since_ns: int) -> None:
        """End an open step, and record its span in the timeline; nothing happens if the step has ended before.

        Args:
            step: Index of the step.
            since_ns: Instant at which the step began.
        """
        if (step, since_ns) in self.open_steps:
            self.open_steps.remove((step, since_ns))
            self.record(("step", "step", f"step {step}", since_ns, self.now_ns(), step))

    def end_open_steps(self) -> None:
        """End the steps that the program has left open: hooks can begin a step without a call at its end."""
        for step, since_ns in reversed(self.open_steps.copy()):
            self.end_step(step, since_ns)

    def record_saved_step(self, step: int) -> None:
        """Record that the state of all ranks after `step` is on the disk."""
        self.saved_step = step
        self.flight.record_saved_step(step)

    def post_to_loop(self, function: Callable[..., object], *args: object) -> None:
        """Let the event loop call a function soon. Calls of all threads are carried out in their order.

        Raises:
            PeerFailedError: If the loop has ended, or this process is a fork of the world's process.
        """
        if self.ending.forked:
            raise self.ending.peer_error()
        try:
            self.handover.post(function, *args)
        except trio.RunFinishedError:
            raise self.ending.peer_error() from None

    @interruptible
    def call_on_loop(self, function: Callable[[], bool]) -> bool:
        """Call a function on the event loop's thread, and return its result; another thread waits for it.

        Return False if the loop has ended, or in a fork.

        Raises:
            Exception: The error of the function, in the calling thread.
        """
        if get_ident() == self.thread:
            return function()
        answer: SimpleQueue[outcome.Outcome[bool]] = SimpleQueue()
        try:
            self.post_to_loop(lambda: answer.put(outcome.capture(function)))
        except PeerFailedError:
            return False
        return answer.get().unwrap()

    def spawn(self, function: Callable[..., object], *args: object) -> None:
        """Start `function(*args)` as a task of this rank. Any thread may call this.

        From another thread than the event loop's, the task starts a bit later.
        """
        if get_ident() != self.thread:
            self.post_to_loop(self.spawn, function, *args)
            return
        assert self.nursery is not None, "this is a bug in overlap: a task of a rank that has not started"
        self.nursery.start_soon(function, *args)  # type: ignore[arg-type]
