"""Messages at random: none is lost, doubled or out of order, whatever is withdrawn; a model says what may come."""

import random
from collections import defaultdict, deque

import pytest
import trio

from transports import Request, Wire

from ..efa.processes import opened
from .processes import Host

STEPS = 400
# Empty, short, most of a ring, and longer than one.
SIZES = (0, 8, 5_000, 700_000, 3_000_000)
TAGS = (0, 1, 2**64 - 1)


class Side:
    """The sends and receives of one rank towards another, by tag, and what has come of them."""

    def __init__(self, end: Wire, peer: int) -> None:
        self._end, self._peer = end, peer
        self.sends: defaultdict[int, deque[tuple[int, Request | None]]] = defaultdict(deque)
        self._slots: defaultdict[int, list[list[int]]] = defaultdict(list)  # of each receive, in their order
        self.receives: list[Request] = []

    def send(self, tag: int, number: int, nbytes: int, priority: int) -> None:
        data = number.to_bytes(4, "little") * (nbytes // 4)
        call = self._end.begin_send(self._peer, tag, data, priority=priority, done=lambda _: None)
        self.sends[tag].append((number, call))

    def receive(self, tag: int, nbytes: int) -> None:
        def done(call: Request) -> None:
            if not call.withdrawn:
                assert call.error is None
                assert out == out[:4] * (nbytes // 4)
                slot.append(int.from_bytes(out[:4], "little") if nbytes else -1)

        out, slot = bytearray(nbytes), list[int]()
        self._slots[tag].append(slot)
        call = self._end.begin_recv(self._peer, tag, out, nbytes, done=done)
        if not call.ended:
            self.receives.append(call)

    def came(self, tag: int) -> list[int]:
        """Messages that have come, in the order of their receives."""
        return [number for slot in self._slots[tag] for number in slot]

    @property
    def waiting(self) -> list[Request]:
        """Receives under way."""
        self.receives = [call for call in self.receives if not call.ended]
        return self.receives


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.everyday(4)
async def test_each_message_that_was_not_withdrawn_comes_once_and_in_order(seed: int) -> None:
    order, size_of = random.Random(seed), {}
    host = Host(((0,), (1,)))
    async with opened(host.transports):
        ends = [each.wire(rank) for rank, each in enumerate(host.transports)]
        sides = [Side(ends[0], 1), Side(ends[1], 0)]
        for number in range(1, STEPS):
            side, tag = order.choice(sides), order.choice(TAGS)
            nbytes = size_of.setdefault(tag, SIZES[(seed + TAGS.index(tag)) % len(SIZES)])
            what = order.random()
            if what < 0.45:
                side.send(tag, number, nbytes, order.randrange(-2, 3))
            elif what < 0.8:
                side.receive(tag, nbytes)
            elif what < 0.9 and side.waiting:
                order.choice(side.waiting).withdraw()
            elif side.sends[tag]:
                _, call = order.choice(side.sends[tag])
                if call is not None:
                    call.withdraw()
            if order.random() < 0.3:
                await trio.lowlevel.checkpoint()
        with trio.fail_after(60):
            await _drain(sides, size_of)
        for sender, receiver in (sides, sides[::-1]):
            for tag, sends in sender.sends.items():
                left = [number for number, call in sends if call is None or not call.withdrawn]
                assert receiver.came(tag) == (left if size_of[tag] else [-1] * len(left))


async def _drain(sides: list[Side], size_of: dict[int, int]) -> None:
    """Receive what is left, then let the receives that nothing has met be withdrawn."""
    for sender, receiver in (sides, sides[::-1]):
        for tag, sends in sender.sends.items():
            while any(call is not None and not call.ended for _, call in sends):
                receiver.receive(tag, size_of[tag])
                await trio.sleep(0.001)
            while len(receiver.came(tag)) < sum(call is None or not call.withdrawn for _, call in sends):
                receiver.receive(tag, size_of[tag])
                await trio.sleep(0.001)
    for side in sides:
        for call in side.waiting:
            call.withdraw()
        while side.waiting:  # noqa: ASYNC110 - calls have no events
            await trio.sleep(0.001)
