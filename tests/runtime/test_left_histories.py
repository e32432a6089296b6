"""Random histories of two ranks that leave: messages with two ends succeed, others fail, and none waits for ever.

A rank that ends its program sends the number of protocol messages that it has sent. Once that many have arrived, its
peer's receives without a message fail, and so do sends that the rank has not accepted. The number counts all protocol
messages: with announcements alone, long messages on their way would fail (`test_announcements_alone_are_too_few`).

The tests drive `make_end(send)`, here a model, by the interface that the product's class is to have:

* `send(message)`, given by the test: carries a protocol message to the peer, in order;
* `begin_send(tag, long)` and `begin_recv(tag)` return an operation, whose `state` is "open", "done" or "left";
* `handle(message)`: a protocol message of the peer arrives;
* `peer_left(sent)`: the peer has ended, after so many protocol messages; it may overtake them;
* `sent`: number of protocol messages from here.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

ANNOUNCEMENTS = ("eager", "offer")


@dataclass(eq=False)
class Operation:
    state: str = "open"


class ModelEnd:
    """One end of a link: short messages travel at once, long ones are offered, accepted, moved and confirmed."""

    counted: tuple[str, ...] = (*ANNOUNCEMENTS, "accept", "bytes", "taken")

    def __init__(self, send: Callable[[tuple[str, int, int]], None]) -> None:
        self.sent = self._arrived = 0
        self._send_message, self._left = send, -1
        self._posted: defaultdict[int, deque[Operation]] = defaultdict(deque)
        self._unexpected: defaultdict[int, deque[int]] = defaultdict(deque)  # numbers of offers, by tag; 0: eager
        self._offers: dict[int, Operation] = {}
        self._accepted: dict[int, Operation] = {}
        self._number = 0

    def begin_send(self, tag: int, *, long: bool) -> Operation:
        operation = Operation()
        if long:
            self._number += 1
            self._offers[self._number] = operation
            self._send("offer", tag, self._number)
        else:
            self._send("eager", tag, 0)
            operation.state = "done"
        self._fail_if_left()
        return operation

    def begin_recv(self, tag: int) -> Operation:
        operation = Operation()
        if self._unexpected[tag]:
            self._match(operation, self._unexpected[tag].popleft())
        else:
            self._posted[tag].append(operation)
        self._fail_if_left()
        return operation

    def handle(self, message: tuple[str, int, int]) -> None:
        kind, tag, number = message
        self._arrived += kind in self.counted
        if kind in ANNOUNCEMENTS:
            if self._posted[tag]:
                self._match(self._posted[tag].popleft(), number)
            else:
                self._unexpected[tag].append(number)
        elif kind == "accept":
            self._send("bytes", tag, number)
        elif kind == "bytes":
            self._accepted.pop(number).state = "done"
            self._send("taken", tag, number)
        elif number in self._offers:
            self._offers.pop(number).state = "done"
        self._fail_if_left()

    def peer_left(self, sent: int) -> None:
        self._left = sent
        self._fail_if_left()

    def _send(self, kind: str, tag: int, number: int) -> None:
        self.sent += kind in self.counted
        self._send_message((kind, tag, number))

    def _match(self, receive: Operation, number: int) -> None:
        if number:
            self._accepted[number] = receive
            self._send("accept", 0, number)
        else:
            receive.state = "done"

    def _fail_if_left(self) -> None:
        if 0 <= self._left <= self._arrived:
            for operation in [*self._offers.values(), *(one for posted in self._posted.values() for one in posted)]:
                operation.state = "left"
            self._offers.clear()
            self._posted.clear()


make_end = ModelEnd


def outcome(seed: int) -> str:
    """Run a random history; return "right", or what is wrong with it."""
    rng = random.Random(seed)
    programs: list[list[tuple[str, int, bool, str]]] = [[], []]  # send or recv, tag, long, expected state
    for _ in range(rng.randrange(8)):
        sender, tag, long = rng.randrange(2), rng.randrange(3), rng.random() < 0.5
        programs[sender].append(("send", tag, long, "done"))
        programs[1 - sender].append(("recv", tag, long, "done"))
    lonely = rng.randrange(2)
    for _ in range(rng.randrange(4)):
        what, tag, long = rng.choice(("send", "recv")), 10 + rng.randrange(2), rng.random() < 0.7
        programs[lonely].append((what, tag, long, "left" if what == "recv" or long else "done"))

    lanes: list[deque[tuple[str, int, int]]] = [deque(), deque()]  # by the sender
    ends = [make_end(lanes[me].append) for me in range(2)]
    begun: list[list[Operation]] = [[], []]
    notices: list[int | None] = [None, None]
    finished = [False, False]
    while True:
        for me in range(2):
            over = len(begun[me]) == len(programs[me]) and all(one.state != "open" for one in begun[me])
            if over and not finished[me]:
                finished[me], notices[me] = True, ends[me].sent
        acts: list[tuple[str, int]] = [("issue", me) for me in range(2) if len(begun[me]) < len(programs[me])]
        acts += [("carry", me) for me in range(2) if lanes[me]]
        acts += [("leave", me) for me in range(2) if notices[me] is not None]
        if not acts:
            break
        act, me = rng.choice(acts)
        if act == "issue":
            what, tag, long, _ = programs[me][len(begun[me])]
            end = ends[me]
            begun[me].append(end.begin_send(tag, long=long) if what == "send" else end.begin_recv(tag))
        elif act == "carry":
            ends[1 - me].handle(lanes[me].popleft())
        else:
            sent, notices[me] = notices[me], None
            assert sent is not None
            ends[1 - me].peer_left(sent)
    for me in range(2):
        for (what, _, _, expected), operation in zip(programs[me], begun[me], strict=True):
            if operation.state != expected:
                return f"{what} is {operation.state}, not {expected}"
    return "right"


def test_histories() -> None:
    assert Counter(map(outcome, range(400))) == {"right": 400}


@pytest.mark.slow
def test_many_histories() -> None:
    assert Counter(map(outcome, range(8000))) == {"right": 8000}


def test_announcements_alone_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelEnd, "counted", ANNOUNCEMENTS)
    assert Counter(map(outcome, range(400)))["send is left, not done"] > 0
