"""Disagreements of ranks: every kind, in every place, at the first, a middle or the last operation, whoever is late.

A disagreement ends the world of every process with one `CollectiveMismatchError`, and its sentence names two ranks that
disagree, both calls and both lines. Ranks of one process wait for a minority to show, so their sentence is always the
same: the odd rank, then the lowest of the others. Between processes the clock decides three things, and the table takes
each: which of the two ranks is named first; which of the ranks that agree is named; and, where operations change places
or one is left out, whether the first or the second of the two differing positions is found. Ranks may name different
pairs. What never varies: one rank is the odd one, and each has its own call and its own line.

A rank that only gives, such as the root of a broadcast, may have ended its operation before the difference is found.
Its own program then sees no error at that operation. Its process ends with the same sentence nevertheless, unless that
was its last operation, and it had finished before.

Messages have one order: the receiver is named first in one process, the sender between processes. A message of one
process counts from the last time that none was under way (here: 0) or from the start; other numbers are positions.
Two messages in the other order disagree in one process only: between processes each finds its own receive by its call.
"""

import math
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import trio

import overlap
from overlap import CollectiveMismatchError, RankFailedError
from overlap.runtime import communicator

from .companies import Wires, by_shared_memory, by_sockets, run_far
from .worlds import run

HERE = "tests/runtime/test_disagreements.py"
RANKS = 3
FAR_S = 0.1  # a rank that is late by this much finds that the others have waited and asked; others come at once


class Step(NamedTuple):
    """One operation of a program; each stands in a line of its own, which is the line that errors name."""

    issue: Callable[[overlap.Rank], Awaitable[object]]
    text: str  # Call as errors show it

    def call(self, rank: int) -> str:
        """Return the end of a sentence about this call of a rank."""
        place = f"{HERE}:{self.issue.__code__.co_firstlineno}"  # type: ignore[attr-defined]
        return f"rank {rank} called {self.text} at {place}"


X = np.ones(6, np.float32)
Y = np.ones(3)

#: Operations on which all ranks agree, no two alike.
PROGRAM = [
    Step(lambda r: r.all_reduce(Y), "all_reduce(float64 (3,), op='sum')"),
    Step(lambda r: r.all_gather(Y), "all_gather(float64 (3,))"),
    Step(lambda r: r.barrier(), "barrier()"),
    Step(lambda r: r.all_to_all(Y), "all_to_all(float64 (3,))"),
    Step(lambda r: r.all_reduce(Y, "max"), "all_reduce(float64 (3,), op='max')"),
]

#: Operation of the ranks that agree, and of the odd one in its place.
CALLS: dict[str, tuple[Step, Step]] = {
    "kind": (
        Step(lambda r: r.all_reduce(X), "all_reduce(float32 (6,), op='sum')"),
        Step(lambda r: r.all_gather(X), "all_gather(float32 (6,))"),
    ),
    "kind with a root": (
        Step(lambda r: r.broadcast(X), "broadcast(float32 (6,), root=0)"),
        Step(lambda r: r.reduce(X), "reduce(float32 (6,), op='sum', root=0)"),
    ),
    "barrier": (
        Step(lambda r: r.barrier(), "barrier()"),
        Step(lambda r: r.reduce_scatter(X), "reduce_scatter(float32 (6,), op='sum')"),
    ),
    "op": (
        Step(lambda r: r.all_reduce(X), "all_reduce(float32 (6,), op='sum')"),
        Step(lambda r: r.all_reduce(X, "prod"), "all_reduce(float32 (6,), op='prod')"),
    ),
    "op with a root": (
        Step(lambda r: r.reduce(X), "reduce(float32 (6,), op='sum', root=0)"),
        Step(lambda r: r.reduce(X, op="max"), "reduce(float32 (6,), op='max', root=0)"),
    ),
    "root that gives": (
        Step(lambda r: r.broadcast(X), "broadcast(float32 (6,), root=0)"),
        Step(lambda r: r.broadcast(X, 1), "broadcast(float32 (6,), root=1)"),
    ),
    "root that takes": (
        Step(lambda r: r.gather(X), "gather(float32 (6,), root=0)"),
        Step(lambda r: r.gather(X, 1), "gather(float32 (6,), root=1)"),
    ),
    "dtype": (
        Step(lambda r: r.all_gather(X), "all_gather(float32 (6,))"),
        Step(lambda r: r.all_gather(X.astype(np.int32)), "all_gather(int32 (6,))"),
    ),
    "shape": (
        Step(lambda r: r.all_reduce(X), "all_reduce(float32 (6,), op='sum')"),
        Step(lambda r: r.all_reduce(X[:5]), "all_reduce(float32 (5,), op='sum')"),
    ),
    "axes": (
        Step(lambda r: r.all_to_all(X), "all_to_all(float32 (6,))"),
        Step(lambda r: r.all_to_all(X.reshape(3, 2)), "all_to_all(float32 (3, 2))"),
    ),
    "counts": (
        Step(lambda r: r.all_gather(X[: r.rank + 1], counts=[1, 2, 3]), "all_gather(float32 (6,), counts=[1, 2, 3])"),
        Step(lambda r: r.all_gather(X[r.rank + 3 :], counts=[3, 2, 1]), "all_gather(float32 (6,), counts=[3, 2, 1])"),
    ),
    "pairs": (
        Step(lambda r: r.permute(X, [(0, 1), (1, 2), (2, 0)]), "permute(float32 (6,), pairs=[(0, 1), (1, 2), (2, 0)])"),
        Step(lambda r: r.permute(X, [(1, 0), (2, 1), (0, 2)]), "permute(float32 (6,), pairs=[(1, 0), (2, 1), (0, 2)])"),
    ),
}
GIVING = ("kind with a root", "op with a root", "root that gives", "root that takes")
KINDS = (*CALLS, "order", "missing")
POSITIONS = {"first": 0, "middle": 2, "last": 4}
LATE = {"rank 0 late": (0, 0.0), "rank 2 late": (2, 0.0), "rank 2 far late": (2, FAR_S)}


def programs(kind: str, position: int) -> tuple[list[Step], list[Step]]:
    """Return the program of the ranks that agree, and that of the odd one."""
    usual, odd = list(PROGRAM), list(PROGRAM)
    if kind == "order":
        odd[position : position + 2] = reversed(odd[position : position + 2])
    elif kind == "missing":
        del odd[position]
    else:
        usual[position], odd[position] = CALLS[kind]
    return usual, odd


def sentence(seq: int, first: str, second: str, *, messages: bool = False) -> str:
    """Return the one sentence about two calls."""
    advice = "every rank of a group must issue the same operations in the same order"
    if messages:
        advice = "a message is received with the shape and dtype with which it was sent"
    return f"operation #{seq} on group 'world' differs between ranks: {first}, {second}; {advice}"


def sentences(usual: list[Step], odd: list[Step], odd_rank: int) -> Iterator[str]:
    """Return the sentences that ranks of several processes may give, for each position at which the programs differ."""
    for seq, (theirs, mine) in enumerate(zip(usual, odd, strict=False)):
        if theirs.text != mine.text:
            for other in set(range(RANKS)) - {odd_rank}:
                calls = theirs.call(other), mine.call(odd_rank)
                yield sentence(seq, *calls)
                yield sentence(seq, *reversed(calls))


class Arrivals:
    """Holds one rank back at one position of its program until all others are there."""

    def __init__(self, late: int, delay_s: float, ranks: int) -> None:
        self._late, self._delay_s = late, delay_s
        self._others = set(range(ranks)) - {late}
        self._there = trio.Event()

    def note(self, rank: int) -> None:
        """Record that a rank has issued its operation, or ended."""
        self._others.discard(rank)
        if not self._others:
            self._there.set()

    async def wait(self, rank: int) -> None:
        """Wait until it is the turn of a rank."""
        if rank == self._late:
            await self._there.wait()
            await trio.sleep(self._delay_s)


class Outcome(NamedTuple):
    """How a world ended."""

    worlds: list[Any]  # Result or error of the world that each rank lives in
    errors: dict[int, CollectiveMismatchError]  # Errors that ranks have seen themselves


def run_programs(
    programs: list[list[Step]], position: int, late: tuple[int, float], wires: Wires | None, **how: Any
) -> Outcome:
    """Run a program for each rank: in one process without wires, else each in a process of its own."""
    arrivals = Arrivals(*late, len(programs))
    errors: dict[int, CollectiveMismatchError] = {}

    async def main(rank: overlap.Rank) -> None:
        me = rank.rank
        for number, step in enumerate(programs[me]):
            if number == position:
                await arrivals.wait(me)
            future = step.issue(rank)
            if number == position:
                arrivals.note(me)
            try:
                await future
            except CollectiveMismatchError as error:
                errors[me] = error
                raise
        arrivals.note(me)

    if wires is not None:
        return Outcome(run_far(main, len(programs), 1, wires=wires, **how), errors)
    try:
        return Outcome(run(main, len(programs)), errors)
    except RankFailedError as error:
        return Outcome([error] * len(programs), errors)


def check(outcome: Outcome, allowed: set[str], *, seen_by: set[int] | None = None, all_end: bool = True) -> None:
    """Check that all worlds, or some of them, end with an allowed sentence, and ranks that have seen an error, too."""
    assert seen_by is None or set(outcome.errors) == seen_by
    assert any(outcome.worlds)
    for error in outcome.errors.values():
        assert str(error) in allowed
    for rank, world in enumerate(outcome.worlds):
        if world is None and not all_end and rank not in outcome.errors:
            continue
        assert isinstance(world, RankFailedError), world
        assert any(text in str(world) for text in allowed), world
        assert str(world).count("CollectiveMismatchError") == 1


def rows(places: list[str]) -> pytest.MarkDecorator:
    """Return all kinds of disagreement in some places."""
    found = [
        pytest.param(kind, place, position, odd, late, id=f"{kind}-{place}-{position}-rank {odd} odd-{late}")
        for kind in KINDS
        for place in places
        for position in POSITIONS
        for odd in (0, RANKS - 1)
        for late in LATE
        if (kind, position) not in (("order", "last"), ("missing", "last"))  # there, ranks have none to compare
    ]
    return pytest.mark.parametrize(("kind", "place", "position", "odd", "late"), found)


PLACES: dict[str, Callable[..., Outcome]] = {
    "one process": partial(run_programs, wires=None),
    "board": partial(run_programs, wires=by_shared_memory),
    "ring": partial(run_programs, wires=by_shared_memory, algorithm="ring"),
    "sockets": partial(run_programs, wires=by_sockets),
}


@pytest.mark.everyday(40)
@rows(["one process"])
def test_ranks_of_one_process(
    kind: str, place: str, position: str, odd: int, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, (late_rank, delay_s), seen_by = POSITIONS[position], LATE[late], {0, 1, 2}
    usual, other = programs(kind, at)
    calls = other[at].call(odd), usual[at].call(1 if odd == 0 else 0)
    if late == "rank 2 far late" and odd == 0:  # it never comes: of two ranks, the second is the odd one
        delay_s, seen_by, calls = math.inf, {0, 1}, calls[::-1]
    else:  # it comes, however busy the loop is
        monkeypatch.setattr(communicator, "_DISPUTE_S", math.inf)
    programs_of_ranks = [other if rank == odd else usual for rank in range(RANKS)]
    outcome = PLACES[place](programs_of_ranks, at, (late_rank, delay_s))
    check(outcome, {sentence(at, *calls)}, seen_by=seen_by)


@pytest.mark.everyday(20)
@rows(["board", "ring", "sockets"])
def test_ranks_of_several_processes(kind: str, place: str, position: str, odd: int, late: str) -> None:
    at = POSITIONS[position]
    usual, other = programs(kind, at)
    outcome = PLACES[place]([other if rank == odd else usual for rank in range(RANKS)], at, LATE[late], timeout_s=5)
    over = position == "last" and kind in GIVING
    check(outcome, set(sentences(usual, other, odd)), all_end=not over)


# -- messages ------------------------------------------------------------------------------------------------------

LONG = np.ones(1 << 18)  # longer than what a sender sends before its receiver asks for it

#: Messages on which both ranks agree: what rank 0 does, and rank 1.
MESSAGES = [
    (Step(lambda r: r.send(Y, 1), "float64 (3,)"), Step(lambda r: r.recv(((3,), float), 0), "float64 (3,)")),
    (Step(lambda r: r.send(X, 1), "float32 (6,)"), Step(lambda r: r.recv(((6,), "f4"), 0), "float32 (6,)")),
    (Step(lambda r: r.send(Y[:2], 1), "float64 (2,)"), Step(lambda r: r.recv(((2,), float), 0), "float64 (2,)")),
    (Step(lambda r: r.send(X[:4], 1), "float32 (4,)"), Step(lambda r: r.recv(((4,), "f4"), 0), "float32 (4,)")),
    (Step(lambda r: r.send(Y[:1], 1), "float64 (1,)"), Step(lambda r: r.recv(((1,), float), 0), "float64 (1,)")),
]

PAIRS: dict[str, tuple[Step, Step]] = {
    "dtype": (
        Step(lambda r: r.send(Y, 1), "float64 (3,)"),
        Step(lambda r: r.recv(((3,), "f4"), 0), "float32 (3,)"),
    ),
    "shape": (
        Step(lambda r: r.send(Y, 1), "float64 (3,)"),
        Step(lambda r: r.recv(((4,), float), 0), "float64 (4,)"),
    ),
    "axes": (
        Step(lambda r: r.send(X, 1), "float32 (6,)"),
        Step(lambda r: r.recv(((2, 3), "f4"), 0), "float32 (2, 3)"),
    ),
    "array of the receiver": (
        Step(lambda r: r.send(Y, 1), "float64 (3,)"),
        Step(lambda r: r.recv(np.empty(5), 0), "float64 (5,)"),
    ),
    "any source": (
        Step(lambda r: r.send(Y, 1), "float64 (3,)"),
        Step(lambda r: r.recv(((4,), float)), "float64 (4,)"),
    ),
    "long, not short": (
        Step(lambda r: r.send(LONG, 1), "float64 (262144,)"),
        Step(lambda r: r.recv(((4,), float), 0), "float64 (4,)"),
    ),
    "short, not long": (
        Step(lambda r: r.send(Y, 1), "float64 (3,)"),
        Step(lambda r: r.recv(((262144,), float), 0), "float64 (262144,)"),
    ),
    "tree, not array": (
        Step(lambda r: r.send({"a": Y}, 1), "{'a': float64 (3,)}"),
        Step(lambda r: r.recv(((3,), float), 0), "float64 (3,)"),
    ),
    "array, not tree": (
        Step(lambda r: r.send(Y, 1), "float64 (3,)"),
        Step(lambda r: r.recv({"a": np.empty(3)}, 0), "{'a': float64 (3,)}"),
    ),
    "names of a tree": (
        Step(lambda r: r.send({"a": Y}, 1), "{'a': float64 (3,)}"),
        Step(lambda r: r.recv({"b": np.empty(3)}, 0), "{'b': float64 (3,)}"),
    ),
    "leaf of a tree": (
        Step(lambda r: r.send({"a": Y}, 1), "{'a': float64 (3,)}"),
        Step(lambda r: r.recv({"a": np.ones(4)}, 0), "{'a': float64 (4,)}"),
    ),
}
LATE_ENDS = {"sender late": (0, 0.0), "receiver late": (1, 0.0), "receiver far late": (1, FAR_S)}


def ends(kind: str, position: int) -> tuple[list[Step], list[Step]]:
    """Return the programs of the sender and the receiver."""
    senders, receivers = ([pair[rank] for pair in MESSAGES] for rank in (0, 1))
    if kind == "order":
        senders[position : position + 2] = reversed(senders[position : position + 2])
    elif kind == "missing":
        del senders[position]
    else:
        senders[position], receivers[position] = PAIRS[kind]
    return senders, receivers


@pytest.mark.everyday(16)
@pytest.mark.parametrize(
    ("kind", "place", "position", "late"),
    [
        pytest.param(kind, place, position, late, id=f"{kind}-{place}-{position}-{late}")
        for kind in (*PAIRS, "order", "missing")
        for place in ("one process", "ring", "sockets")
        for position in POSITIONS
        for late in LATE_ENDS
        if (kind, position) not in (("order", "last"), ("missing", "last"))
        if kind != "order" or place == "one process"
    ],
)
def test_messages(kind: str, place: str, position: str, late: str) -> None:
    at = POSITIONS[position]
    programs = ends(kind, at)
    outcome = PLACES[place](list(programs), at, LATE_ENDS[late])
    sender, receiver = (
        step._replace(text=f"send/recv({step.text})").call(rank)
        for rank, step in enumerate(program[at] for program in programs)
    )
    here = place == "one process"
    calls = (receiver, sender) if here else (sender, receiver)
    check(outcome, {sentence(number, *calls, messages=True) for number in ({0, at} if here else {at})})
    assert 1 in outcome.errors
    assert 0 in outcome.errors or not here
