"""Random histories of one rank's inbox: no message is lost, none arrives twice, and each source keeps its order.

The tests drive `make_inbox()`, here a model, by the interface that the product's class is to have:

* `arrive(key, src, message)`: a message of a source arrives, for a (group, tag);
* `post(key, receive)`: a receive is issued. It has `src`, a rank or None for any, and `take(stamp, src, message)`,
  which the inbox calls with the message that it matches;
* `withdraw(key, receive)`: give up a receive; False if it is not posted;
* `give_back(key, stamp, src, message)`: return a message that a receive has taken and no program has got; it keeps its
  place;
* `posted(key)`, `arrived(key)`: receives without a message, and (stamp, src, message) without a receive;
* `queues`: the keys with something in them, and no others.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

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


def test_histories() -> None:
    assert sum(History(seed).run(60).given_back for seed in range(200)) > 100


@pytest.mark.slow
def test_many_histories() -> None:
    for seed in range(2000):
        History(seed).run(100)
