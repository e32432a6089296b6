"""A program that takes operations through their states, and a recorder of these.

A process of a job runs it: `overlap run --processes 2 conformance.py`. An operation passes the same states on both
clocks and over every wire, but for `RUNNING`: bytes may move at once, or before the other rank has come.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import trio

import overlap
from overlap.runtime.future import Future
from overlap.runtime.outstanding import IssuedFuture
from overlap.runtime.settling import Settling
from overlap.runtime.state import FOLLOWS, RUNNING, OperationState, TransitionError

TIMEOUT_S = 60.0  # far above what it takes
NUMBER = ((1,), "float64")
GO, LATE = 1, 2

# The states of the operations of each name, after ISSUED.
STATES = {
    "sum": "matching done",
    "first": "blocked matching done",
    "second": "queued admitted matching done",
    "make": "queued done",
    "made": "blocked matching done",
    "boom": "queued failed",
    "spoilt": "blocked failed",
    "left": "matching parked issued matching done",
    "withdrawn": "matching parked cancelled",
    "go": "matching done",
    "number": "matching done",
    "from any": "matching issued matching done",
    "late": "matching done",
    "never begun": "queued cancelled",
    "task": "done",
    "ended": "cancelled",
    "logger": "cancelled",
}


async def later(x: np.ndarray) -> np.ndarray:
    return x


def boom() -> None:
    raise ValueError("boom")


async def program(rank: overlap.Rank) -> None:
    x, other = np.ones(4), 1 - rank.rank
    await rank.all_reduce(x, name="sum")

    narrow = rank.stream("narrow", window=1)
    first = rank.all_reduce(rank.spawn(later, x, name="task"), stream=narrow, name="first")
    await rank.all_reduce(x, stream=narrow, name="second")
    await first

    await rank.all_reduce(rank.compute(np.ones, 4, seconds=0.1, name="make"), name="made")
    spoilt = rank.compute(boom, seconds=0.1, name="boom", errors="await")
    with suppress(ValueError):
        await rank.all_reduce(spoilt, stream=rank.stream("spoilt"), name="spoilt")

    left = rank.recv(NUMBER, src=other, tag=GO, name="left")
    with trio.CancelScope() as scope:
        scope.cancel()
        await left
    assert rank.recv(NUMBER, src=other, tag=LATE, name="withdrawn").cancel()
    await rank.barrier(name="go")
    rank.send(np.ones(1), dst=other, tag=GO, name="number")
    await left
    rank.send(np.ones(1), dst=other, name="number")
    await rank.recv(NUMBER, src=None, name="from any")

    # The compute that takes the message keeps the stream, so the one behind it cannot begin.
    used = rank.compute(float, rank.recv(NUMBER, src=other, tag=LATE, name="late")[0], seconds=0.1, name="keeps")
    assert rank.compute(float, seconds=0.1, name="never begun").cancel()
    await rank.barrier(name="go")
    rank.send(np.ones(1), dst=other, tag=LATE, name="number")
    assert await used == 1

    await rank.spawn(trio.sleep, 0.1, name="task")
    rank.spawn(trio.sleep_forever, name="ended").cancel()
    rank.spawn(trio.sleep_forever, name="logger", daemon=True)


class Recorded:
    """The states that the operations of this process have passed."""

    def __init__(self) -> None:
        self.passed: dict[IssuedFuture[object], list[OperationState]] = {}

    def check(self) -> None:
        """Compare them, but for RUNNING, with those that were recorded once."""
        found: dict[str, set[str]] = {}
        for operation, passed in self.passed.items():
            words = " ".join(state.word for state in passed if state is not RUNNING)
            found.setdefault(operation.name, set()).add(words)
        del found["keeps"]  # whose message may come before its turn
        recorded_once = {name: {words} for name, words in STATES.items()}
        differs = {name for name in {*found, *recorded_once} if found.get(name) != recorded_once.get(name)}
        assert not differs, {name: (found.get(name), recorded_once.get(name)) for name in differs}


def transition(state: OperationState, after: OperationState) -> OperationState:
    """Return the state that follows another one; raise an error if it may not follow."""
    if FOLLOWS[state][after]:
        return after
    raise TransitionError(state, after)


@contextmanager
def recorded() -> Iterator[Recorded]:
    """Record the states of all operations of this process, by whatever function they are set."""
    record, slot, begun = Recorded(), Settling.__dict__["state"], set[int]()

    def enter(future: Future[object], state: OperationState) -> None:
        if isinstance(future, IssuedFuture):
            before = slot.__get__(future) if id(future) in begun else None
            if before is None:
                begun.add(id(future))
                alive.append(future)
            else:
                transition(before, state)
                record.passed.setdefault(future, []).append(state)
        slot.__set__(future, state)

    alive: list[Future[object]] = []  # whose ids are theirs
    Settling.state = property(slot.__get__, enter)  # type: ignore[assignment, method-assign]
    try:
        yield record
    finally:
        Settling.state = slot


if __name__ == "__main__":
    with recorded() as states:
        overlap.run(program, timeout_s=TIMEOUT_S)
    states.check()
