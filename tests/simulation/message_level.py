"""Collectives at once, message by message: the slow and obvious way that the fabric's shares are compared with.

Every rank goes through its table: it begins a step when all that earlier steps bring is there and its earlier messages
have started; a message starts when those of earlier steps on its first wire have left. Messages on their way share
wires max-min fair, each of them alike.
"""

from collections import Counter, deque
from heapq import heappop, heappush
from itertools import count

import numpy as np


def fair(ways, capacity):
    """Return how fast messages get on that cross some wires: the fullest wire first, its messages all alike."""
    left, rate = dict(capacity), [None] * len(ways)
    while None in rate:
        crowd = {}
        for message, way in enumerate(ways):
            for wire in way if rate[message] is None else ():
                crowd.setdefault(wire, []).append(message)
        fullest = min(crowd, key=lambda wire: left[wire] / len(crowd[wire]))
        level = left[fullest] / len(crowd[fullest])
        for message in crowd[fullest]:
            rate[message] = level
            for wire in ways[message]:
                left[wire] -= level
    return rate


class Messages:
    """The time, what is due, and the messages on their way."""

    def __init__(self, capacity):
        self.now_s, self._capacity = 0.0, capacity
        self._due, self._order, self._flying = [], count(), {}

    def after(self, delay_s, what, *about):
        heappush(self._due, (self.now_s + delay_s, next(self._order), what, about))

    def send(self, nbytes, way, left):
        self._flying[next(self._order)] = [nbytes, way, left]

    def run(self):
        rate_of = {}
        while self._due or self._flying:
            if rate_of.keys() != self._flying.keys():
                rates = fair([way for _, way, _ in self._flying.values()], self._capacity)
                rate_of = dict(zip(self._flying, rates, strict=True))
            ends = {key: self.now_s + each[0] / rate_of[key] for key, each in self._flying.items()}
            next_s = min([*ends.values(), *(due[0] for due in self._due[:1])])
            for key, each in self._flying.items():
                each[0] -= (next_s - self.now_s) * rate_of[key]
            self.now_s = next_s
            for key in [key for key, end_s in ends.items() if end_s <= next_s * (1 + 1e-12)]:
                self._flying.pop(key)[2]()
            while self._due and self._due[0][0] <= self.now_s:
                _, _, what, about = heappop(self._due)
                what(*about)


class Running:
    """A collective of all ranks whose phases follow one another as a whole; `beyond` are wires that a message needs."""

    def __init__(self, messages, option, nbytes, start_s, beyond):
        self.messages, self.nbytes, self.done_s, self.beyond = messages, nbytes, None, beyond
        cut = option.searches
        self.phases = deque(option.phases(option.price(nbytes).slices) if cut else option.parts)
        messages.after(start_s, self.phase)

    def phase(self):
        if not self.phases:
            self.done_s = self.messages.now_s
            return
        part = self.phases.popleft()
        placed, size = part.placed, part.placed.placement.size
        self.slot = part.share * self.nbytes / placed.rounds.slots
        self.steps = [(one, self._ways(placed, one)) for one in placed.placed_rounds for _ in range(one.round.repeat)]
        self.missing = [np.bincount(one.round.dst, minlength=size) for one, _ in self.steps]
        self.unsent = [np.bincount(one.round.src, minlength=size) for one, _ in self.steps]
        self.beside = [one.unawaited_s_per_byte * self.slot for one, _ in self.steps]
        self.unsent = [sends + (each > 0) for sends, each in zip(self.unsent, self.beside, strict=True)]
        self.leaving = [Counter(way[0] for way in ways) for _, ways in self.steps]  # by first wire
        self.begun, self.starting, self.left = np.zeros(size, int), np.zeros(size, int), set(range(size))
        self.waiting = []
        for rank in range(size):
            self.messages.after(placed.parameters.launch_s, self.look, rank)

    def _ways(self, placed, one):
        way = placed.placement.routes(one.round.src, one.round.dst)
        ways = [way.wire[start:stop].tolist() for start, stop in zip(way.first, way.first[1:], strict=False)]
        ends = zip(one.round.src.tolist(), one.round.dst.tolist(), strict=True)
        return [[*wires, *self.beyond(*pair)] for wires, pair in zip(ways, ends, strict=True)]

    def look(self, rank):
        number = self.begun[rank]
        if self.starting[rank] or rank not in self.left or any(each[rank] for each in self.missing[:number]):
            return
        if number == len(self.steps):
            if not any(each[rank] for each in self.unsent):
                self.left.discard(rank)
                if not self.left:
                    self.phase()
            return
        local_s = self.steps[number][0].local_s_per_byte[rank] * self.slot
        if local_s and any(each[rank] for each in self.unsent[:number]):
            return
        self.begun[rank], self.starting[rank] = number + 1, 1
        self.messages.after(local_s, self.begin, rank, number)

    def begin(self, rank, number):
        self.starting[rank] = 0
        if self.beside[number][rank]:
            self.messages.after(self.beside[number][rank], self.copied, rank, number)
        for message in np.flatnonzero(self.steps[number][0].round.src == rank).tolist():
            self.starting[rank] += 1
            self.waiting.append((number, message))
        self.let_start()
        self.look(rank)

    def copied(self, rank, number):
        self.unsent[number][rank] -= 1
        self.look(rank)

    def let_start(self):
        ready = [
            (number, message)
            for number, message in self.waiting
            if not any(each[self.steps[number][1][message][0]] for each in self.leaving[:number])
        ]
        self.waiting = [each for each in self.waiting if each not in ready]
        for number, message in ready:
            self.messages.after(self.steps[number][0].start_s[message], self.leaves, number, message)

    def leaves(self, number, message):
        one, ways = self.steps[number]
        rank, nbytes = one.round.src[message], one.round.sent[message] * self.slot
        self.messages.send(nbytes, ways[message], lambda: self.has_left(number, message))
        self.starting[rank] -= 1
        self.look(rank)

    def has_left(self, number, message):
        one, ways = self.steps[number]
        rank, to = int(one.round.src[message]), int(one.round.dst[message])
        self.unsent[number][rank] -= 1
        self.leaving[number][ways[message][0]] -= 1
        self.messages.after(one.latency_s[message], self.arrives, to, number)
        self.let_start()
        self.look(rank)

    def arrives(self, rank, number):
        self.missing[number][rank] -= 1
        self.look(rank)


def finished_s(starts, beyond=lambda src, dst: (), more=()):
    """Return when collectives are done that are given as (start_s, option, bytes).

    `beyond` says which of `more` wires, a dict of bytes per second, a message takes besides those of its route.
    """
    placed = [part.placed for _, option, _ in starts for part in option.parts]
    wires = max((each.placement.wires() for each in placed), key=lambda each: len(each.kind))
    rate = wires.bytes_per_s * placed[0].parameters.efficiencies(wires.kind)
    messages = Messages(dict(enumerate(rate.tolist())) | dict(more))
    running = [Running(messages, option, nbytes, start_s, beyond) for start_s, option, nbytes in starts]
    messages.run()
    return [each.done_s for each in running]
