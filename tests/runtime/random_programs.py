"""Random programs that combine features, with the results that numpy expects and perhaps one planted fault.

A program combines collectives and messages on groups and streams, computes, operations on futures, tasks, threads,
cancelled awaits and `cancel`. All ranks issue its steps in one order, and wait only for steps that they have issued, so
that no program without a fault can hang. Every seed makes one program, the same one on each clock.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import trio

import overlap

from .cases import JOINING, KINDS, SCATTERING, variants, whole_numbers
from .reference import REFERENCES, Array
from .worlds import TIMEOUT_S

COMPUTES = ("compute", "pair")
RECEIVES = ("any", "cancel", "drop")  # each has a tag of its own
OPERATORS = ("sum", "prod", "min", "max")  # on integers: exact in any order
DTYPES = ("int64", "int32", "int8", "uint16")
SHAPES = ((), (1,), (7,), (3, 2), (0,), (64,), (5000,), (40_000,))
NEVER_S = 2 * TIMEOUT_S  # a time limit that no operation reaches
BRIEF_S = (0.0, 1e-4, 2e-3)
UNUSED_TAG = 99_999

# Each fault, and a pattern of the errors that explain all others; processes learn them as text.
FAULTS = {
    **dict.fromkeys(("raise", "compute", "awaited compute", "task", "nursery"), "Planted: of seed {seed}"),
    "leave": "RankLeftError: (rank {culprit} finished|all other ranks)",
    "abort": "GroupAbortedError: .* aborted by rank {culprit}: Planted: of seed {seed}",
    "deadline": "(DeadlineError: recv|RankLeftError: .* needs it in recv) .* with tag 99999",
    "cancel": "FutureCancelledError: compute .* was cancelled",
    "interrupt": "KeyboardInterrupt|rank {culprit} was interrupted",
    "stall": "StallError|the world has ended$",
}


class Planted(Exception):
    """The error that a fault raises."""


Source = tuple[int, int | None]  # number of a step, and the item of its result, or None for the whole


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a program.

    Attributes:
        number: Its place in the program.
        kind: Name of a collective, "compute", "pair" (a compute whose result has two items), "message", "any" (a
            message that is received from any source), or "cancel" and "drop": a message whose first receive is given
            up.
        members: World ranks, in the order of their group; of a message the source and the destination.
        group: World ranks of the group that it is called on.
        arrays: Input of each rank.
        source: Step whose future is the input; None: the arrays themselves.
        results: Expected result of each rank; None where an operation returns None.
        options: Keyword arguments of the call.
        into: Whether the result is received in an array of the caller.
        issuer: Part of the program that calls it; a "task" and a "thread" call it on a stream of its own.
    """

    number: int
    kind: str
    members: tuple[int, ...]
    group: tuple[int, ...]
    arrays: dict[int, Array] = field(repr=False)
    source: Source | None
    results: dict[int, Any] = field(repr=False)
    options: dict[str, Any]
    into: bool
    issuer: str


@dataclass(frozen=True, slots=True)
class Program:
    """What all ranks do.

    Attributes:
        seed: Of this program.
        groups: World ranks of each group; the first is the world.
        windows: Window of each stream.
        steps: By number, in the order of issue.
        fault: Name of the planted fault, or None.
        culprit: Rank that has the fault.
        at: Number of the step before which it has it.
    """

    seed: int
    groups: Sequence[tuple[int, ...]]
    windows: dict[str, int]
    steps: dict[int, Step]
    fault: str | None
    culprit: int
    at: int

    @property
    def size(self) -> int:
        return len(self.groups[0])

    def __str__(self) -> str:
        fault = f"{self.fault} on rank {self.culprit} before step {self.at}"
        return "\n  ".join([f"seed {self.seed}, {self.size} ranks, {fault}", *map(str, self.steps.values())])


# -- programs ----------------------------------------------------------------------------------------------------------


def program_of(seed: int) -> Program:
    """Make the program of a seed."""
    chance = Random(seed)
    size = chance.choice((1, 2, 2, 3, 3, 4, 5))
    groups = [tuple(range(size))]
    groups += [tuple(chance.sample(range(size), chance.randint(1, size))) for _ in range(chance.randrange(3))]
    windows = {f"stream {index}": chance.choice((1, 2, 8)) for index in range(chance.randrange(3))}
    writer = Writer(chance, [None, *windows])
    for _ in range(chance.randint(5, 40)):
        writer.write(chance.choice(groups))
    fault, culprit, at = chance.choice([None, *FAULTS]), chance.randrange(size), chance.randint(0, len(writer.steps))
    unsent = [step for step in writer.steps.values() if step.kind == "any" and step.number >= at]
    if fault == "leave" and size > 2 and culprit in {step.members[0] for step in unsent}:
        fault = "raise"  # else the receiver could wait for the other ranks for ever, and they for it
    return Program(seed, groups, windows, writer.steps, fault, culprit, at)


class Writer:
    """Adds steps to a program, and computes their results.

    Attributes:
        found: Arrays of each rank that later steps can use, with the step and the item of its result.
    """

    def __init__(self, chance: Random, streams: Sequence[str | None]) -> None:
        self.chance, self.streams = chance, streams
        self.steps: dict[int, Step] = {}
        self.found: list[tuple[dict[int, Array], Source]] = []

    def write(self, group: tuple[int, ...]) -> None:
        chance, number, issuer = self.chance, len(self.steps), "program"
        kind = chance.choice([*KINDS, *COMPUTES, *COMPUTES, *RECEIVES, "message", "message"])
        if len(group) < 2 and kind not in KINDS:
            kind = "compute"
        is_message = kind not in (*KINDS, *COMPUTES)
        members = tuple(chance.sample(group, 2)) if is_message else group
        arrays, source = self.inputs(kind, members[:1] if is_message else members)
        options: dict[str, Any] = {"stream": chance.choice(self.streams), "timeout_s": chance.choice((None, NEVER_S))}
        if is_message:
            results = {members[1]: arrays[members[0]]}
            options["tag"] = 2 + number if kind in RECEIVES else chance.choice((0, 1))
        elif kind in COMPUTES:
            results = {rank: np.add(array, array) for rank, array in arrays.items()}
            options = {"stream": chance.choice((None, "other")), "errors": chance.choice(("raise", "await"))}
        else:
            call = chance.choice([call for call in variants(kind, len(group)) if call.get("op", "sum") in OPERATORS])
            results = dict(zip(group, REFERENCES[kind]([*arrays.values()], **call), strict=True))
            issuer = chance.choice(("program", "program", "program", "task", "thread"))
            options |= {**call, "priority": chance.randint(-3, 3)}
            if issuer != "program":
                options["stream"] = f"step {number}"
            if kind in ("all_reduce", "all_gather", "broadcast"):
                options["shared"] = chance.random() < 0.2
        self.found.append((results, (number, 0 if kind == "pair" else None)))
        if kind == "pair":
            self.found.append((arrays, (number, 1)))
            results = {rank: np.stack([results[rank], arrays[rank]]) for rank in members}
        into = not options.get("shared") and chance.random() < 0.2
        self.steps[number] = Step(number, kind, members, group, arrays, source, results, options, into, issuer)

    def inputs(self, kind: str, ranks: Sequence[int]) -> tuple[dict[int, Array], Source | None]:
        """Return arrays that fit a kind of step: results of an earlier step, or new ones."""
        found = [
            ({rank: arrays[rank] for rank in ranks}, source)
            for arrays, source in self.found
            if fits(kind, [arrays.get(rank) for rank in ranks])
        ]
        if found and self.chance.random() < 0.6:
            return self.chance.choice(found)
        shape = self.chance.choice([shape for shape in SHAPES if shape or kind not in (*SCATTERING, *JOINING)])
        if kind in SCATTERING:
            shape = (shape[0] * len(ranks), *shape[1:])
        dtype, seed = np.dtype(self.chance.choice(DTYPES)), self.chance.randrange(1 << 30)
        return {rank: whole_numbers(shape, dtype, seed + rank) for rank in ranks}, None


def fits(kind: str, arrays: Sequence[Array | None]) -> bool:
    """Whether arrays of all ranks exist, and can be the input of a kind of step."""
    present = [array for array in arrays if array is not None]
    if len(present) < len(arrays) or (kind not in COMPUTES and len({(x.shape, x.dtype) for x in present}) > 1):
        return False
    if kind in SCATTERING:
        return present[0].ndim > 0 and len(present[0]) % len(arrays) == 0
    return present[0].ndim > 0 or kind not in JOINING


# -- ranks that run them -----------------------------------------------------------------------------------------------


def double(x: Array) -> Array:
    return np.add(x, x)  # which wraps without a warning, for scalars too


def pair(x: Array) -> Array:
    return np.stack([double(x), x])


class Player:
    """Runs a program on one rank of Trio.

    Args:
        rank: The rank.
        program: What it does.
        threads: Whether threads issue and wait, too; False: tasks in their place.

    Attributes:
        issued: All operations, each with its step.
        cancelled: Those that must end as cancelled.
        loaned: Inputs, each with a copy.
    """

    has_tasks = True
    sleep = staticmethod(trio.sleep)
    in_thread = staticmethod(trio.to_thread.run_sync)

    def __init__(self, rank: overlap.Rank, program: Program, *, threads: bool = True) -> None:
        self.rank, self.me, self.program, self.threads = rank, rank.rank, program, threads
        self.issued: list[tuple[Step, overlap.Future[Any]]] = []
        self.cancelled: list[overlap.Future[Any]] = []
        self.loaned: list[tuple[Array, Array]] = []
        self.groups = {group: rank.group(group) for group in program.groups if self.me in group}
        self.futures: dict[int, overlap.Future[Any]] = {}
        self.left: set[int] = set()  # steps of receives whose await was cancelled: they leave their messages
        for name, window in program.windows.items():
            rank.stream(name, window=window)

    async def run(self) -> None:
        fault = self.program.fault if self.program.culprit == self.me else None
        for step in self.program.steps.values():
            if fault and step.number >= self.program.at:
                if await self.fail(fault):
                    return
                fault = None
            await self.take(step)
        if not fault or not await self.fail(fault):
            await self.await_left()

    async def take(self, step: Step) -> None:
        """Issue a step, and perhaps wait for it or an earlier one."""
        chance = Random(f"{self.program.seed}, {self.me}, {step.number}")
        if chance.random() < 0.2:
            await self.sleep(chance.choice(BRIEF_S))
        if self.me in step.members:
            await self.issue(step, chance)
        if self.futures and chance.random() < 0.4:
            number = step.number if step.number in self.futures and chance.random() < 0.5 else None
            await self.wait(chance.choice([*self.futures]) if number is None else number, chance)

    async def wait(self, number: int, chance: Random) -> None:
        """Wait for a step: as long as it takes, or briefly, in a task or in a thread."""
        future, step = self.futures[number], self.program.steps[number]
        way = chance.choice(("await", "briefly", "thread"))
        if way == "briefly" and step.kind != "message":  # messages of one tag would arrive in another order
            if not await self.wait_briefly(future, chance.choice(BRIEF_S)) and step.kind in RECEIVES:
                self.left.add(number)
            return
        await self.await_left()
        await (self.in_thread(future.result, TIMEOUT_S) if way == "thread" and self.threads else future)

    async def await_left(self) -> None:
        """Await the receives whose await was cancelled, in order, for their senders may wait for that."""
        while self.left:
            await self.futures[number := min(self.left)]
            self.left.discard(number)

    async def wait_briefly(self, future: overlap.Future[Any], seconds: float) -> bool:
        """Wait for a future for a time; return whether it has ended."""
        with trio.move_on_after(seconds) as scope:
            await future
        return not scope.cancelled_caught

    # -- operations

    async def issue(self, step: Step, chance: Random) -> None:
        if step.kind in RECEIVES[1:] and self.me == step.members[1]:
            await self.receive_again(step, chance)
            return
        if step.issuer != "program":
            self.rank.stream(step.options["stream"])
        if step.issuer == "program" or not self.has_tasks:
            self.futures[step.number] = self.track(step, self.call(step))
        else:
            task = self.rank.spawn(self.call_in_task, step, errors="await")
            self.futures[step.number] = self.track(step, task)

    async def call_in_task(self, step: Step) -> Any:
        def call_and_wait() -> Any:
            return self.track(step, self.call(step)).result(TIMEOUT_S)

        def in_foreign_thread() -> Any:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(call_and_wait).result(TIMEOUT_S)

        if step.issuer == "thread" and self.threads:
            return await self.in_thread(in_foreign_thread if step.number % 2 else call_and_wait)
        return await self.track(step, self.call(step))

    def track(self, step: Step, future: overlap.Future[Any]) -> overlap.Future[Any]:
        self.issued.append((step, future))
        return future

    def call(self, step: Step) -> overlap.Future[Any]:
        kind, group = step.kind, self.groups[step.group]
        if kind in KINDS:
            more = {"out": np.empty_like(result)} if step.into and (result := step.results[self.me]) is not None else {}
            plain = not (step.into or step.options.get("shared"))
            rooted = kind == "scatter" or (kind == "broadcast" and plain)
            bare = rooted and step.members[step.options["root"]] != self.me
            return getattr(group, kind)(None if bare else self.input(step), **step.options, **more)
        if kind in COMPUTES:
            work = double if kind == "compute" else pair
            return self.rank.compute(work, self.input(step), seconds=1e-5, **step.options)
        src, dst = step.members
        if self.me == src:
            return group.send(self.input(step), step.group.index(dst), **step.options)
        like = np.empty_like(step.arrays[src]) if step.into else (step.arrays[src].shape, step.arrays[src].dtype)
        source = None if kind == "any" else step.group.index(src)
        return group.recv(None if step.number % 2 else like, source, **step.options)

    def input(self, step: Step) -> Any:
        if step.source is not None:
            number, item = step.source
            return self.futures[number] if item is None else self.futures[number][item]
        array = step.arrays[self.me].copy()
        self.loaned.append((array, step.arrays[self.me]))
        return array

    async def receive_again(self, step: Step, chance: Random) -> None:
        """Receive a message with the second of two receives, if the first can be given up in time."""
        first = self.call(step)
        if step.kind == "cancel" and first.cancel():
            self.cancelled.append(first)
            first = self.call(step)
        elif step.kind == "drop" and not await self.wait_briefly(first, chance.choice(BRIEF_S)):
            del first
            first = self.call(step)
        self.futures[step.number] = self.track(step, first)

    # -- faults

    async def fail(self, fault: str) -> bool:
        """Have a fault; return whether the program ends there."""

        def boom(*_: object) -> None:
            raise Planted(f"of seed {self.program.seed}")

        async def boom_in_task() -> None:
            await trio.lowlevel.checkpoint()
            boom()

        if fault == "raise":
            boom()
        elif fault in ("compute", "awaited compute"):
            future = self.rank.compute(boom, seconds=1e-5)
            if fault != "compute":
                await future
        elif fault == "task":
            self.rank.spawn(boom_in_task)
        elif fault == "nursery":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(boom_in_task)
                for future in [*self.futures.values()][-3:]:
                    nursery.start_soon(self.wait_briefly, future, math.inf)
        elif fault == "abort":
            [*self.groups.values()][-1].abort(Planted(f"of seed {self.program.seed}"))
        elif fault == "deadline":
            await self.rank.recv(None, (self.me + 1) % self.program.size, tag=UNUSED_TAG, timeout_s=1e-3)
        elif fault == "cancel":
            for number, future in self.futures.items():
                if self.program.steps[number].kind in COMPUTES:  # other ranks would wait for the end of all else
                    future.cancel()
        elif fault == "interrupt":
            signal.raise_signal(signal.SIGINT)
        elif fault == "stall":
            await trio.sleep_forever()
        elif fault == "leave":
            await self.await_left()
        return fault == "leave"
