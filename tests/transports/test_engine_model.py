"""A model of how two processes meet at the rows of a board, sleep and are woken: all interleavings of few operations.

The threads of `transports/shared_memory/native` (wait.c; `advance` in collectives.c) are generators: each `yield` comes
before one access of memory that threads share, so another thread may go first. Between two of them, a thread runs
alone. Memory is sequentially consistent, as the atomics of the engine are. Looks after `LOOK_AGAIN_NS` are left out:
they are for words that a peer has written over. An interleaving fails if a thread sleeps for ever, or if a payload is
read before it was written, or after it was written over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import pytest

# Phases of a rank's end, and how far its word says that it is.
ROW, MEETING, LEAVING, OVER = range(4)
ARRIVED, TAKEN, LAST = 1, 3, 255
ATTENDED, BY_SPARE, BY_LOOP = range(3)

Guard: TypeAlias = "Callable[[], bool] | None"
Steps: TypeAlias = "Generator[Guard, None, Any]"


@dataclass
class Process:
    """Memory of one process: what others see, then what only its threads do."""

    door: bool  # whether its event loop can be woken
    waits: bool  # whether a rank that gives waits until the other has taken, as inputs in private memory need
    rows: int
    wrong: str  # the line of the protocol that is exchanged
    word: list[int] = field(default_factory=list)
    payload: list[int] = field(default_factory=list)
    bell: int = 0
    spare_bell: int = 0
    sleepers: int = 0
    unattended: int = ATTENDED
    opened: bool = False
    # Under the lock:
    locked: bool = False
    runs: list[int] = field(default_factory=list)  # the phase of each operation
    own_unattended: int = ATTENDED
    waiting: int = 0
    awake: bool = False
    other: Process = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.word, self.payload = [0] * self.rows, [-1] * self.rows

    @property
    def pending(self) -> int:
        return sum(phase != OVER for phase in self.runs)

    def spare_bell_differs(self, value: int) -> bool:
        return self.spare_bell != value

    @property
    def rowless(self) -> bool:
        return ROW in self.runs

    @property
    def key(self) -> tuple[Any, ...]:
        return (
            tuple(self.word), tuple(self.payload), self.bell, self.spare_bell, self.sleepers, self.unattended,
            self.opened, self.locked, tuple(self.runs), self.own_unattended, self.waiting, self.awake,
        )  # fmt: skip


def word(number: int, phase: int) -> int:
    return (number + 1) << 8 | phase


def lock(p: Process) -> Steps:
    yield lambda: not p.locked
    p.locked = True


def ring(p: Process) -> Steps:
    """Wake a process for which there is something new. A wake-up that is late wakes no fewer, so it is one access."""
    yield None
    if p.sleepers:
        p.bell += 1
        return
    yield None
    p.opened |= p.unattended == BY_LOOP
    p.spare_bell += p.unattended == BY_SPARE


def reached(p: Process, number: int, phase: int) -> bool:
    return p.word[number % p.rows] >= word(number, phase)


def say(p: Process, number: int, phase: int) -> Steps:
    """Write how far an operation is, and ring the other if both are."""
    if p.wrong == "looks before it says":
        yield None
        late = reached(p.other, number, phase)
        yield None
        p.word[number % p.rows] = word(number, phase)
    else:
        yield None
        p.word[number % p.rows] = word(number, phase)
        yield None
        late = reached(p.other, number, phase)
    if phase != LAST and late:
        yield from ring(p.other)


def post(p: Process, number: int) -> Steps:
    if p.wrong == "says before it writes":
        yield from say(p, number, ARRIVED)
        yield None
        p.payload[number % p.rows] = number
        return
    p.payload[number % p.rows] = number
    yield from say(p, number, ARRIVED)


def leave(p: Process, number: int) -> Steps:
    if p.waits:
        yield from say(p, number, TAKEN)
        p.runs[number] = LEAVING
    else:
        yield from say(p, number, LAST)
        p.runs[number] = OVER


def advance(p: Process, number: int) -> Steps:
    """Go on with an operation as far as the other has come; return whether anything happened."""
    moved = False
    while p.runs[number] != OVER:
        if p.runs[number] != ROW or number >= p.rows:
            yield None
        if p.runs[number] == ROW:
            before = number - p.rows
            own = before < 0 or p.word[number % p.rows] >= word(before, LAST)
            free = own and (before < 0 or reached(p.other, before, LAST)) and ROW not in p.runs[:number]
            if not free and p.wrong != "takes a row that is in use":
                return moved
            p.runs[number] = MEETING
            yield from post(p, number)
        elif p.runs[number] == MEETING:
            if not reached(p.other, number, ARRIVED):
                return moved
            if p.wrong == "leaves before it reads":
                yield from leave(p, number)
            yield None
            assert p.other.payload[number % p.rows] == number, "it reads what is not there"
            if p.wrong != "leaves before it reads":
                yield from leave(p, number)
        else:
            if not reached(p.other, number, TAKEN):
                return moved
            p.runs[number] = OVER
            yield from say(p, number, LAST)
        moved = True
    return moved


def progress(p: Process, asleep: int = 0) -> Steps:
    pending, moved, number = p.pending, False, 0
    while number < len(p.runs):
        step = yield from advance(p, number)
        moved |= step
        number += 1
    if p.pending != pending and p.sleepers > asleep:
        p.bell += 1
    return moved


def attendant(p: Process) -> int:
    if p.waiting or p.awake or not p.pending:
        return ATTENDED
    return BY_LOOP if p.door and not p.rowless else BY_SPARE


def attend(p: Process) -> Steps:
    moved = yield from progress(p)
    by = attendant(p)
    while p.own_unattended != by:
        p.own_unattended = by
        if p.wrong == "notes who attends after its look":
            moved |= yield from progress(p)
        yield None
        p.unattended = by
        if p.wrong != "notes who attends after its look":
            moved |= yield from progress(p)
        by = attendant(p)
    return moved


def unlock(p: Process) -> Steps:
    yield from attend(p)
    if p.rowless:
        yield from ring(p)
    p.locked = False


def submit(p: Process) -> Steps:
    yield from lock(p)
    p.runs.append(ROW)
    yield from unlock(p)


def sleep_here(p: Process, number: int) -> Steps:
    """Sleep until this process is rung, unless something has come."""
    yield from lock(p)
    if p.wrong != "looks before it says that it sleeps":
        p.sleepers += 1
    bell = p.bell  # it matters only that both come before the look
    moved, rowless = (yield from progress(p, 1)), p.rowless
    p.locked = False
    if p.wrong == "looks before it says that it sleeps":
        yield None
        p.sleepers += 1
    if p.wrong == "reads its bell after its look":
        yield None
        bell = p.bell
    if not moved and p.runs[number] != OVER and not rowless:  # without a row it sleeps for a moment only
        yield lambda: p.bell != bell
    yield from lock(p)
    p.sleepers -= 1
    p.locked = False


def wait_for(p: Process, number: int) -> Steps:
    yield from lock(p)
    p.waiting += 1
    yield from attend(p)
    p.locked = False
    while p.runs[number] != OVER:
        yield from sleep_here(p, number)
    yield from lock(p)
    p.waiting -= 1
    yield from unlock(p)


def run_spare(p: Process) -> Steps:
    """The thread of the engine, which works while none waits; it has looked before there was anything."""
    yield lambda: p.spare_bell != 0
    while True:
        yield None
        bell = p.spare_bell
        yield from lock(p)
        moved, rowless = (yield from attend(p)), p.rowless
        p.locked = False
        if p.wrong == "the spare thread reads its bell after its look":
            yield None
            bell = p.spare_bell
        if not moved and not rowless:
            yield partial(p.spare_bell_differs, bell)


def run_loop(p: Process) -> Steps:
    """The event loop, which attends whenever it wakes, and before it sleeps."""
    while True:
        yield lambda: p.opened
        p.opened = False
        yield from lock(p)
        p.awake = True
        yield from unlock(p)
        yield from lock(p)
        p.awake = False
        yield from unlock(p)


# -- exploration -------------------------------------------------------------------------------------------------------


def waiting(p: Process, operations: int) -> Steps:
    """A thread that waits for each of its operations at once."""
    number = 0
    while number < operations:
        yield from submit(p)
        yield from wait_for(p, number)
        number += 1


def leaving(p: Process, operations: int) -> Steps:
    """A thread that begins its operations, and looks at none of them again."""
    number = 0
    while number < operations:
        yield from submit(p)
        number += 1


class Thread:
    """One thread, as far as it has come."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.over = steps, False
        self.guard: Guard = None
        self.step()

    def step(self) -> None:
        try:
            self.guard = self.steps.send(None)
        except StopIteration:
            self.over = True

    @property
    def ready(self) -> bool:
        return not self.over and (self.guard is None or self.guard())

    def key(self) -> Iterator[Any]:
        """Yield where it is, and its counts: all that its next steps depend on."""
        steps: Any = self.steps
        while steps is not None and not self.over:
            frame = steps.gi_frame
            yield frame.f_code.co_name, frame.f_lasti
            yield tuple(value for value in frame.f_locals.values() if isinstance(value, int))
            steps = steps.gi_yieldfrom


class World:
    """Two processes and their threads, from the beginning."""

    def __init__(self, programs: tuple[Callable[..., Steps], ...], operations: int, **settings: Any) -> None:
        self.processes = [Process(**settings) for _ in programs]
        self.threads = list[Thread]()
        for p, other, program in zip(self.processes, self.processes[::-1], programs, strict=True):
            p.other = other
            self.threads += [Thread(program(p, operations)), Thread(run_spare(p))]
            if p.door:
                self.threads.append(Thread(run_loop(p)))
        self.operations = operations

    def key(self) -> tuple[Any, ...]:
        return *(p.key for p in self.processes), *(tuple(thread.key()) for thread in self.threads)


def explore(*world: Any, **settings: Any) -> int:
    """Run all interleavings; return the number of states. A state that was seen is not gone on from twice."""
    seen, schedules = set[tuple[Any, ...]](), [list[int]()]
    while schedules:
        schedule = schedules.pop()
        found = World(*world, **settings)
        for index in schedule:
            found.threads[index].step()
        while (key := found.key()) not in seen:
            seen.add(key)
            ready = [index for index, thread in enumerate(found.threads) if thread.ready]
            if not ready:
                for p in found.processes:
                    assert p.runs == [OVER] * found.operations, f"all sleep: {found.processes} after {schedule}"
                break
            schedules += ([*schedule, index] for index in ready[1:])
            schedule = [*schedule, ready[0]]
            found.threads[ready[0]].step()
    return len(seen)


PROGRAMS = {
    "both wait": (waiting, waiting),
    "one waits": (waiting, leaving),
    "none waits": (leaving, leaving),
}
WRONG = {
    "looks before it says": ("none waits", 1, False),
    "says before it writes": ("none waits", 1, False),
    "leaves before it reads": ("both wait", 2, False),
    "takes a row that is in use": ("none waits", 2, False),
    "notes who attends after its look": ("none waits", 1, False),
    "looks before it says that it sleeps": ("one waits", 1, True),
    "reads its bell after its look": ("both wait", 1, False),
    "the spare thread reads its bell after its look": ("none waits", 1, True),
}


@pytest.mark.everyday(8)
@pytest.mark.parametrize("door", [False, True], ids=["thread", "loop"])
@pytest.mark.parametrize(
    ("programs", "operations", "waits"),
    [
        *((name, 1, False) for name in PROGRAMS),
        ("none waits", 1, True),
        *(pytest.param(name, 1, True, marks=pytest.mark.slow) for name in ("both wait", "one waits")),
        *(pytest.param(name, 2, False, marks=pytest.mark.slow) for name in ("one waits", "none waits")),
    ],
)
def test_nobody_sleeps_for_ever_and_nothing_is_read_before_it_was_written(
    programs: str, operations: int, waits: bool, door: bool
) -> None:
    """With one row: the second operation has to take that of the first."""
    assert explore(PROGRAMS[programs], operations, door=door, waits=waits, rows=1, wrong="") > 100


@pytest.mark.everyday(8)
@pytest.mark.parametrize("wrong", WRONG)
def test_one_line_that_is_exchanged_is_found(wrong: str) -> None:
    programs, operations, waits = WRONG[wrong]
    with pytest.raises(AssertionError, match=r"all sleep|reads what is not there"):
        explore(PROGRAMS[programs], operations, door=False, waits=waits, rows=1, wrong=wrong)
