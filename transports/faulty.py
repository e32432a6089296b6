"""Faulty: drops, delays, corrupts and cuts messages, alike in every run with one seed."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import trio

from transports.base import Endpoint, Envelope, Transport, check_choices
from transports.buffers import Buffer, Delivery
from transports.failures import ArgumentError, LinkLostError
from transports.wrappers import OrderedGate, Wrapper, WrapperEndpoint

FaultKind: TypeAlias = Literal["cut", "drop", "corrupt", "delay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault that was injected into one message."""

    kind: FaultKind
    envelope: Envelope


class Faulty(Wrapper):
    """Damages messages as bad fabrics do.

    The fate of a message follows from the seed, its src, dst and tag, and how many its sender sent there before; it
    does not depend on timing. Raising one probability does not change which messages another one hits.

    Args:
        inner: The transport to damage.
        seed: Chooses the messages.
        drop: Probability that a message vanishes; its send returns as if all were well.
        corrupt: Probability that one bit of a message arrives flipped. Empty messages have none.
        delay: Probability that a message is held up.
        delay_s: How long at most; uniform from 0.
        cut: Probability that the link breaks at a message, for good, in both directions. Pending and later operations
            on it raise `LinkLostError`, as far as their ends are endpoints of this object.

    Attributes:
        faults: The faults so far, in order.

    Raises:
        ArgumentError: A probability outside 0 ... 1, or a delay below 0.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        seed: int,
        drop: float = 0.0,
        corrupt: float = 0.0,
        delay: float = 0.0,
        delay_s: float = 0.0,
        cut: float = 0.0,
    ) -> None:
        super().__init__(inner)
        self._probabilities: dict[FaultKind, float] = {"cut": cut, "drop": drop, "corrupt": corrupt, "delay": delay}
        for kind, probability in self._probabilities.items():
            if not 0 <= probability <= 1:
                raise ArgumentError(f"{kind} is {probability}; a probability is between 0 and 1")
        if not delay_s >= 0:
            raise ArgumentError(f"delay_s is {delay_s}; it must be 0 or more")
        self.faults: list[InjectedFault] = []
        self._seed = seed
        self._delay_s = delay_s
        self._counts: Counter[tuple[int, int, int]] = Counter()
        self.gate: OrderedGate = OrderedGate()
        self._cut_links: set[frozenset[int]] = set()
        self._operations: defaultdict[frozenset[int], set[trio.CancelScope]] = defaultdict(set)

    def wrap(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint that injects faults into its sends."""
        return _FaultyEndpoint(endpoint, self)

    def cut(self, a: int, b: int) -> None:
        """Break the link between two ranks now, for good, in both directions."""
        link = frozenset((a, b))
        self._cut_links.add(link)
        for operation in self._operations[link]:
            operation.cancel()

    @contextmanager
    def _operation_on_link(self, src: int, dst: int, tag: int) -> Iterator[None]:
        """Run an operation of a link; a cut cancels it, and `LinkLostError` is raised unless it had finished."""
        link = frozenset((src, dst))
        with trio.CancelScope() as operation:
            self._operations[link].add(operation)
            try:
                if link not in self._cut_links:
                    yield
                    return
            finally:
                self._operations[link].discard(operation)
        raise LinkLostError("the link was cut", src=src, dst=dst, tag=tag)

    def _draw_faults(self, envelope: Envelope) -> tuple[set[FaultKind], random.Random]:
        """Return the faults of the next message of a lane, and the random generator for their details."""
        lane = (envelope.src, envelope.dst, envelope.tag)
        chance = random.Random(f"{self._seed}/{lane}/{self._counts[lane]}")
        self._counts[lane] += 1
        kinds = {kind for kind, probability in self._probabilities.items() if chance.random() < probability}
        exclusive: tuple[FaultKind, ...] = ("cut", "drop")  # nothing more can happen to a message that one of them hits
        kinds = next(({kind} for kind in exclusive if kind in kinds), kinds)
        if not envelope.nbytes:
            kinds.discard("corrupt")
        self.faults += (InjectedFault(kind=kind, envelope=envelope) for kind in self._probabilities if kind in kinds)
        return kinds, chance


class _FaultyEndpoint(WrapperEndpoint):
    def __init__(self, inner: Endpoint, faulty: Faulty) -> None:
        super().__init__(inner, faulty.peers)
        self._faulty = faulty

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        """Send a message with the faults that the seed gives it."""
        view = self.check_send(dst, tag, data)
        kinds, chance = self._faulty._draw_faults(Envelope(src=self.rank, dst=dst, tag=tag, nbytes=view.nbytes))
        if "cut" in kinds:
            self._faulty.cut(self.rank, dst)
        with self._faulty._operation_on_link(self.rank, dst, tag):
            with self._faulty.gate.ticket((self.rank, dst, tag)) as ticket:
                if "delay" in kinds:
                    await trio.sleep(chance.uniform(0, self._faulty._delay_s))
                await ticket.turn()
            if "drop" in kinds:
                await trio.lowlevel.checkpoint()
            else:
                payload = _flip_one_bit(view, chance) if "corrupt" in kinds else view
                await self.inner.send(dst, tag, payload, priority=priority)

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        with self._faulty._operation_on_link(src, self.rank, tag):
            await self.inner.recv_into(src, tag, out)

    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        with self._faulty._operation_on_link(src, self.rank, tag):
            return await self.inner.recv(src, tag, nbytes)
        raise AssertionError("unreachable: leaving the block above without a result raises")

    async def wait_any(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope:
        """Wait for a message of the choices, until one of their links is cut."""
        check_choices(choices)
        with ExitStack() as links:
            for src, tag in choices:
                links.enter_context(self._faulty._operation_on_link(src, self.rank, tag))
            return await self.inner.wait_any(choices, free_bits=free_bits)
        raise AssertionError("unreachable: leaving the block above without a result raises")


def _flip_one_bit(view: memoryview, chance: random.Random) -> bytearray:
    """Return a copy of a message with one bit flipped."""
    damaged = bytearray(view)
    damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return damaged
