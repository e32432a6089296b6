"""Random histories of an inbox and of ranks that leave: no message is lost, doubled or waited for in vain."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

# -- random histories of one rank's inbox: no message is lost, none arrives twice, and each source keeps its order -----

# The tests drive `make_inbox()`, here a model, by the interface that the product's class is to have:
#
# * `arrive(key, src, message)`: a message of a source arrives, for a (group, tag);
# * `post(key, receive)`: a receive is issued. It has `src`, a rank or None for any, and `take(stamp, src, message)`,
#   which the inbox calls with the message that it matches;
# * `withdraw(key, receive)`: give up a receive; False if it is not posted;
# * `give_back(key, stamp, src, message)`: return a message that a receive has taken and no program has got; it keeps
#   its place;
# * `posted(key)`, `arrived(key)`: receives without a message, and (stamp, src, message) without a receive;
# * `queues`: the keys with something in them, and no others.

Key = tuple[int, int]  # group and tag
Message = tuple[int, int]  # source, and number at that source
Entry = tuple[int, int, Message]

KEYS: list[Key] = [(1, 0), (1, 5), (2, 0)]
SOURCES = range(3)


@dataclass(eq=False)
class Receive:
    src: int | None
    key: Key
    got: Entry | None = None
    withdrawn: bool = False

    def take(self, stamp: int, src: int, message: Message) -> None:
        assert self.got is None, "a receive has got two messages"
        self.got = stamp, src, message

    def fits(self, src: int) -> bool:
        return self.src is None or self.src == src


@dataclass
class Queue:
    posted: deque[Receive] = field(default_factory=deque)
    arrived: deque[Entry] = field(default_factory=deque)


class ModelInbox:
    """The simplest inbox: a queue for each key, which is removed when it is empty."""

    def __init__(self) -> None:
        self.queues: dict[Key, Queue] = {}
        self._stamp = 0

    def arrive(self, key: Key, src: int, message: Message) -> None:
        self._stamp += 1
        self.give_back(key, self._stamp, src, message)

    def post(self, key: Key, receive: Receive) -> None:
        queue = self.queues.setdefault(key, Queue())
        entry = next((entry for entry in queue.arrived if receive.fits(entry[1])), None)
        if entry is None:
            queue.posted.append(receive)
        else:
            queue.arrived.remove(entry)
            self._drop_if_empty(key)
            receive.take(*entry)

    def withdraw(self, key: Key, receive: Receive) -> bool:
        if receive not in self.posted(key):
            return False
        self.queues[key].posted.remove(receive)
        self._drop_if_empty(key)
        return True

    def give_back(self, key: Key, stamp: int, src: int, message: Message) -> None:
        queue = self.queues.setdefault(key, Queue())
        receive = next((receive for receive in queue.posted if receive.fits(src)), None)
        if receive is not None:
            queue.posted.remove(receive)
            self._drop_if_empty(key)
            receive.take(stamp, src, message)
            return
        younger = sum(entry[0] > stamp for entry in queue.arrived)
        queue.arrived.insert(len(queue.arrived) - younger, (stamp, src, message))

    def posted(self, key: Key) -> list[Receive]:
        return list(self.queues[key].posted) if key in self.queues else []

    def arrived(self, key: Key) -> list[Entry]:
        return list(self.queues[key].arrived) if key in self.queues else []

    def _drop_if_empty(self, key: Key) -> None:
        if not self.queues[key].posted and not self.queues[key].arrived:
            del self.queues[key]


make_inbox = ModelInbox


class History:
    """Random calls of an inbox, and what must hold after each."""

    def __init__(self, seed: int) -> None:
        self._random, self._inbox = random.Random(seed), make_inbox()
        self._receives: list[Receive] = []
        self._sent = {(key, src): 0 for key in KEYS for src in SOURCES}
        self.given_back = 0

    def run(self, steps: int) -> History:
        for _ in range(steps):
            act = self._random.choices([self._send, self._receive, self._give_up], [9, 8, 3])[0]
            act()
            for key in KEYS:
                self._check(key)
        return self

    def _send(self) -> None:
        key, src = self._random.choice(KEYS), self._random.choice(SOURCES)
        self._inbox.arrive(key, src, (src, self._sent[key, src]))
        self._sent[key, src] += 1

    def _receive(self) -> None:
        receive = Receive(self._random.choice([None, *SOURCES]), self._random.choice(KEYS))
        self._receives.append(receive)
        self._inbox.post(receive.key, receive)

    def _give_up(self) -> None:
        waiting = [receive for receive in self._receives if receive.got is None and not receive.withdrawn]
        # Nobody has got a younger message of the queue: only then is a message given back.
        newest = {receive.key: receive for receive in self._receives}
        got = [receive for receive in newest.values() if receive.got is not None]
        if not waiting and not got:
            return
        receive = self._random.choice(waiting + got)
        receive.withdrawn = True
        if receive.got is None:
            assert self._inbox.withdraw(receive.key, receive)
        else:
            entry, receive.got = receive.got, None
            self.given_back += 1
            self._inbox.give_back(receive.key, *entry)
        assert not self._inbox.withdraw(receive.key, receive)

    def _check(self, key: Key) -> None:
        receives = [receive for receive in self._receives if receive.key == key]
        taken = [receive.got[2] for receive in receives if receive.got is not None]
        left = [message for _, _, message in self._inbox.arrived(key)]
        sent = [(src, number) for src in SOURCES for number in range(self._sent[key, src])]
        assert sorted(taken + left) == sent, "a message is lost, or there twice"
        posted = self._inbox.posted(key)
        assert posted == [receive for receive in receives if receive.got is None and not receive.withdrawn]
        assert not any(receive.fits(src) for receive in posted for src, _ in left), "a pair that fits waits"
        for src in SOURCES:
            own = [receive.got[2] for receive in receives if receive.got is not None and receive.src == src]
            assert own == sorted(own), "receives of a source have its messages in another order"
            rest = [message for message in left if message[0] == src]
            assert rest == sorted(rest), "a message that was given back lost its place"
        assert (key in self._inbox.queues) is bool(posted or left), "an empty queue is kept, or a full one is not"


def test_histories_of_an_inbox() -> None:
    assert sum(History(seed).run(60).given_back for seed in range(200)) > 100


@pytest.mark.slow
def test_many_histories_of_an_inbox() -> None:
    for seed in range(2000):
        History(seed).run(100)


# -- random histories of two ranks that leave: messages with two ends succeed, others fail, and none waits for ever ----

# A rank that ends its program sends the number of protocol messages that it has sent. Once that many have arrived, its
# peer's receives without a message fail, and so do sends that the rank has not accepted. The number counts all protocol
# messages: with announcements alone, long messages on their way would fail (`test_announcements_alone_are_too_few`).
#
# The tests drive `make_end(send)`, here a model, by the interface that the product's class is to have:
#
# * `send(message)`, given by the test: carries a protocol message to the peer, in order;
# * `begin_send(tag, long)` and `begin_recv(tag)` return an operation, whose `state` is "open", "done" or "left";
# * `handle(message)`: a protocol message of the peer arrives;
# * `peer_left(sent)`: the peer has ended, after so many protocol messages; it may overtake them;
# * `sent`: number of protocol messages from here.

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


def test_histories_of_ranks_that_leave() -> None:
    assert Counter(map(outcome, range(400))) == {"right": 400}


@pytest.mark.slow
def test_many_histories_of_ranks_that_leave() -> None:
    assert Counter(map(outcome, range(8000))) == {"right": 8000}


def test_announcements_alone_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelEnd, "counted", ANNOUNCEMENTS)
    assert Counter(map(outcome, range(400)))["send is left, not done"] > 0
