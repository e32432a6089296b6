"""Random programs of ranks that disagree in one operation: every rank is notified, none hangs, no alarm is false.

Messages carry their calls, and ranks compare them in three places: where a message meets its operation; in `look`,
which compares messages without a receive with a bounded history of past calls; and in a question to the rank that is
waited for. `test_each_comparison_is_needed` shows that without one of them ranks hang or are not notified.

The tests drive `make_rank(me, size, send)`, here a model, by the interface that the product's class is to have:

* `send(dst, message)`, given by the test: carries data and notices, each kind in order for each pair of ranks;
* `issue(call)`: issue the next operation; `open`: the operations that have not ended, by number;
* `handle(src, message)`: a message arrives; `look()` and `ask()`: what an idle rank does from time to time;
* `errors`: pairs of different (rank, call), by the number of the operation that failed; `ending`: the pair that the end
  of the program raises, or None.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

KINDS = ("all_reduce", "broadcast", "reduce", "scatter", "barrier", "permute")


class Call(NamedTuple):
    kind: str
    root: int
    dtype: int


Error = frozenset[tuple[int, Call]]
Message = tuple[str, int, Any]  # "data", "failed" or "waits"; number of the operation; call or error
HISTORY = 64  # entries; programs here are shorter


def steps_of(call: Call, me: int, size: int) -> list[tuple[str, int]]:
    """Return what a rank does in an operation: ("send", dst) or ("recv", src)."""
    after, before, root = (me + 1) % size, (me - 1) % size, call.root
    if call.kind in ("all_reduce", "barrier"):
        return [("send", after), ("recv", before)] * (size - 1)
    if call.kind == "broadcast":
        first, last = me == root, after == root
        return [*([] if first else [("recv", before)]), *([] if last else [("send", after)])]
    others = [rank for rank in range(size) if rank != root]
    if call.kind == "scatter":
        return [("send", dst) for dst in others] if me == root else [("recv", root)]
    if call.kind == "reduce":
        return [("recv", src) for src in others] if me == root else [("send", root)]
    # A permute of one pair; a rank without a part sends an empty message, which is compared only.
    return [("recv", root)] if me == (root + 1) % size else [("send", after)]


class History:
    """The last calls by number; equal neighbours are one entry."""

    def __init__(self, limit: int) -> None:
        self._entries: deque[tuple[int, int, Call]] = deque(maxlen=limit)  # first and last number

    def add(self, seq: int, call: Call) -> None:
        if self._entries and self._entries[-1][1:] == (seq - 1, call):
            self._entries[-1] = self._entries[-1][0], seq, call
        else:
            self._entries.append((seq, seq, call))

    def find(self, seq: int) -> Call | None:
        return next((call for first, last, call in self._entries if first <= seq <= last), None)


@dataclass
class Open:
    call: Call
    steps: deque[tuple[str, int]]


class ModelRank:
    """A rank that sends eagerly, and receives in the order of its steps."""

    looks = asks = True

    def __init__(self, me: int, size: int, send: Callable[[int, Message], None]) -> None:
        self._me, self._size, self._send = me, size, send
        self._history = History(HISTORY)
        self._data: defaultdict[tuple[int, int], deque[Call]] = defaultdict(deque)  # by source and number
        self._questions: defaultdict[int, list[tuple[int, Call]]] = defaultdict(list)
        self._broken: Error | None = None
        self.issued = 0
        self.open: dict[int, Open] = {}
        self.errors: dict[int, Error] = {}  # of operations that are not issued, too
        self.ending: Error | None = None

    def issue(self, call: Call) -> None:
        seq, self.issued = self.issued, self.issued + 1
        self._history.add(seq, call)
        if seq in self.errors:
            return
        if self._broken is not None:
            self._fail(seq, self._broken)
            return
        self.open[seq] = Open(call, deque(steps_of(call, self._me, self._size)))
        for src, other in self._questions.pop(seq, []):
            self._compare(seq, src, other)
        self._advance(seq)

    def handle(self, src: int, message: Message) -> None:
        kind, seq, content = message
        if kind == "failed":
            self._fail_here(seq, content)
        elif kind == "data":
            self._data[src, seq].append(content)
            self._advance(seq)
        elif seq < self.issued:
            self._compare(seq, src, content)
        else:
            self._questions[seq].append((src, content))

    def look(self) -> None:
        for (src, seq), calls in list(self._data.items()):
            if self.looks and calls and seq < self.issued:
                self._compare(seq, src, calls[0])

    def ask(self) -> None:
        for seq, operation in list(self.open.items()):
            if self.asks:
                self._send(operation.steps[0][1], ("waits", seq, operation.call))

    def _advance(self, seq: int) -> None:
        while (operation := self.open.get(seq)) is not None:
            if not operation.steps:
                del self.open[seq]
                return
            what, peer = operation.steps[0]
            if what == "send":
                self._send(peer, ("data", seq, operation.call))
            elif not self._data[peer, seq]:
                return
            else:
                self._compare(seq, peer, self._data[peer, seq].popleft())
            operation.steps.popleft()

    def _compare(self, seq: int, src: int, other: Call) -> None:
        own = self._history.find(seq)
        if own is not None and own != other and seq not in self.errors:
            self._fail(seq, frozenset({(self._me, own), (src, other)}))

    def _fail(self, seq: int, error: Error) -> None:
        self._fail_here(seq, error)
        for rank in range(self._size):
            if rank != self._me:
                self._send(rank, ("failed", seq, error))

    def _fail_here(self, seq: int, error: Error) -> None:
        if seq in self.errors:
            return
        if seq in self.open or seq >= self.issued:
            self.open.pop(seq, None)
            self.errors[seq] = error
        elif self._broken is None:  # it is over here: all later ones fail, or the end of the program
            self._broken = self.ending = error
            for later in [number for number in self.open if number > seq]:
                self._fail(later, error)


make_rank = ModelRank


def outcome(seed: int) -> str:
    """Run random programs with random delivery; return "right", or what is wrong."""
    rng = random.Random(seed)
    size, length = rng.randint(2, 5), rng.randint(1, 8)

    def any_call() -> Call:
        return Call(rng.choice(KINDS), rng.randrange(size), rng.randrange(2))

    common = [any_call() for _ in range(length)]
    programs = [list(common) for _ in range(size)]
    at = rng.randrange(length)
    for odd in rng.sample(range(size), rng.randint(1, size - 1)) if rng.random() < 0.8 else []:
        programs[odd][at] = any_call()
    differ = len({program[at] for program in programs}) > 1

    lanes: defaultdict[tuple[int, int, bool], deque[Message]] = defaultdict(deque)
    ahead = [rng.choice((1, 2, 4, 99)) for _ in range(size)]

    def sender(src: int) -> Callable[[int, Message], None]:
        return lambda dst, message: lanes[src, dst, message[0] == "data"].append(message)

    ranks = [make_rank(me, size, sender(me)) for me in range(size)]
    for _ in range(3 * length * size):  # each time that all is quiet, idle ranks look and ask
        while True:
            full = [lane for lane in sorted(lanes) if lanes[lane]]
            ready = [me for me, rank in enumerate(ranks) if rank.issued < length and len(rank.open) < ahead[me]]
            if not full and not ready:
                break
            choice = rng.randrange(len(full) + len(ready))
            if choice < len(full):
                src, dst, _ = full[choice]
                ranks[dst].handle(src, lanes[full[choice]].popleft())
            else:
                me = ready[choice - len(full)]
                ranks[me].issue(programs[me][ranks[me].issued])
        for rank in ranks:
            rank.look()
            rank.ask()
    found = {error for rank in ranks for error in (*rank.errors.values(), rank.ending) if error is not None}
    if any(
        len({call for _, call in error}) != 2 or any(programs[r][at] != call for r, call in error) for error in found
    ):
        return "wrong pair"
    if found and not differ:
        return "false alarm"
    if any(rank.open or rank.issued < length for rank in ranks):
        return "hang"
    notified = [bool(rank.errors) or rank.ending is not None for rank in ranks]
    return "right" if all(notified) or not differ else "not notified"


def test_programs() -> None:
    assert Counter(map(outcome, range(250))) == {"right": 250}


@pytest.mark.slow
def test_many_programs() -> None:
    assert Counter(map(outcome, range(5000))) == {"right": 5000}


@pytest.mark.parametrize("without", ["looks", "asks"])
def test_each_comparison_is_needed(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRank, without, False)
    assert Counter(map(outcome, range(150)))["right"] < 150


def test_a_history_is_bounded_and_equal_neighbours_are_one_entry() -> None:
    history, calls = History(2), [Call("barrier", 0, dtype) for dtype in range(3)]
    for seq, call in enumerate([calls[0], *[calls[1]] * 1000, calls[2]]):
        history.add(seq, call)
    assert [history.find(seq) for seq in (0, 1, 1000, 1001, 1002)] == [None, calls[1], calls[1], calls[2], None]
