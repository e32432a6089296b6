"""Collectives at once, message by message: the slow and obvious way that the fabric's shares are compared with.

Every rank goes through its table: it copies, starts the messages of a step, and is at the next step when all of them
have left and all that it was to get is there. Messages on their way share wires max-min fair, each of them alike.
"""

from collections import deque
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
    """A collective whose phases follow one another as a whole."""

    def __init__(self, messages, option, nbytes, start_s):
        self.messages, self.nbytes, self.done_s = messages, nbytes, None
        self.phases = deque(option.parts)
        messages.after(start_s, self.phase)

    def phase(self):
        if not self.phases:
            self.done_s = self.messages.now_s
            return
        part = self.phases.popleft()
        placed = part.placed
        self.slot, self.left = part.share * self.nbytes / placed.rounds.slots, placed.placement.size
        self.steps = [(one, self._ways(placed, one)) for one in placed.each for _ in range(one.round.repeat)]
        ends = (np.concatenate([one.round.src, one.round.dst]) for one, _ in self.steps)
        self.missing = [np.bincount(each, minlength=self.left) for each in ends]
        self.begun = np.full(self.left, -1)
        for rank in range(self.left):
            self.messages.after(placed.parameters.launch_s, self.step, rank, 0)

    @staticmethod
    def _ways(placed, one):
        way = placed.placement.routes(one.round.src, one.round.dst)
        return [way.wire[start:stop].tolist() for start, stop in zip(way.first, way.first[1:], strict=False)]

    def step(self, rank, number):
        if number < len(self.steps):
            self.messages.after(self.steps[number][0].local_s_per_byte[rank] * self.slot, self.begin, rank, number)
            return
        self.left -= 1
        if not self.left:
            self.phase()

    def begin(self, rank, number):
        one, ways = self.steps[number]
        self.begun[rank] = number
        for message in np.flatnonzero(one.round.src == rank).tolist():
            sent, latency_s = one.round.sent[message] * self.slot, one.latency_s[message]
            ends = rank, int(one.round.dst[message])

            def leaves(sent=sent, way=ways[message], ends=ends, latency_s=latency_s):
                self.messages.send(sent, way, lambda: self.left_for(ends, number, latency_s))

            self.messages.after(one.start_s[message], leaves)
        self.look(rank, number)

    def left_for(self, ends, number, latency_s):
        self.one_less(ends[0], number)
        self.messages.after(latency_s, self.one_less, ends[1], number)

    def one_less(self, rank, number):
        self.missing[number][rank] -= 1
        self.look(rank, number)

    def look(self, rank, number):
        if self.begun[rank] == number and not self.missing[number][rank]:
            self.begun[rank] = len(self.steps)
            self.messages.after(0.0, self.step, rank, number + 1)


def finished_s(starts):
    """Return when collectives are done that are given as (start_s, option, bytes)."""
    placed = starts[0][1].parts[0].placed
    wires = placed.placement.wires()
    rate = wires.bytes_per_s * placed.parameters.efficiencies(wires.kind)
    messages = Messages(dict(enumerate(rate.tolist())))
    running = [Running(messages, option, nbytes, start_s) for start_s, option, nbytes in starts]
    messages.run()
    return [each.done_s for each in running]
