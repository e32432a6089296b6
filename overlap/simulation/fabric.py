"""Fabric: collectives, messages and computes in flight on one cluster, in virtual time. Pure; no Trio.

Used in three strokes per instant: `advance` tells who is done, `start` takes what all ranks together have begun, and
`settle` says when to come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from topology import Cluster

from ..collectives.placement import Ints
from ..cost import parameters
from ..cost.option import AlgorithmOption
from .conditions import CALM, NO_INTERFERENCE, Conditions, Interference, SlowWires
from .demand import Demand, Pricing
from .flow import Flow
from .fluid import Fluid
from .loads import Resources
from .messages import Messages
from .unfolded import Letter, Plan, Unfolded, alone

# Options that are remembered: of groups by size class there are few, but blocks that differ make one for each call.
_REMEMBERED = 1 << 14

_NOTHING = np.zeros(0, np.int64), np.zeros(0)

_key = attrgetter("key")

# Resources that hold up a collective alike: it gets on as a whole.
_ALIKE = 1.02


class Transfer(Flow):
    """A collective, a message or a compute in flight.

    Attributes:
        kind: name of the collective, "send", or the class of a compute.
        demand: what it takes alone.
        computes: whether it is a compute.
        plan: finds out what its messages do; None if it has to be taken as a whole.
    """

    __slots__ = ("computes", "demand", "kind", "plan")
    computes: bool
    demand: Demand
    kind: str
    plan: Callable[[], Plan | None] | None

    def __init__(
        self,
        key: tuple[object, ...],
        kind: str,
        demand: Demand,
        *,
        priority: int = 0,
        lane: object = None,
        computes: bool = False,
        plan: Callable[[], Plan | None] | None = None,
    ) -> None:
        super().__init__(key, demand.marks_ns, demand.sections, priority=priority, lane=lane)
        self.kind, self.demand, self.computes, self.plan = kind, demand, computes, plan

    @property
    def ranks(self) -> Ints:
        """World ranks that take part, in group order."""
        return self.demand.ranks

    @property
    def alone_ns(self) -> int:
        """Time that it takes alone."""
        return self.demand.alone_ns


class Reached(NamedTuple):
    """Some ranks are done with a transfer; a tuple, because there is one for each message."""

    transfer: Transfer  # the transfer
    positions: Ints  # the ranks that are done, as positions in the ranks of the transfer
    last: bool  # whether the operation has ended


class Fabric:
    """Everything in flight on a cluster.

    Keys order what happens in one instant. They must tell transfers apart, compare with each other, and follow from
    what is transferred, such as (ranks, stream, sequence number), never from the order of calls.

    Attributes:
        cluster: The machine.
        interference: Between computes and communication.
        resources: What can be shared.
    """

    cluster: Cluster
    interference: Interference
    resources: Resources

    def __init__(
        self,
        cluster: Cluster,
        *,
        peer_direct: bool = True,
        conditions: Conditions = CALM,
        interference: Interference = NO_INTERFERENCE,
    ) -> None:
        """Make an idle fabric.

        Args:
            cluster: The machine.
            peer_direct: Whether adapters read device memory themselves; for messages, collectives bring their own.
            conditions: What is not perfect.
            interference: Between computes and communication.
        """
        self.cluster, self.interference = cluster, interference
        self.resources, self._slow = Resources(cluster), SlowWires(conditions)
        figures = parameters(cluster, peer_direct=peer_direct)
        self._collectives: dict[AlgorithmOption, Pricing] = {}
        self._messages = Messages(figures, self.resources, self._slow)
        self._fluid, self._interfering = Fluid(), not interference.off
        self._wires: dict[Transfer, list[int]] = {}  # of the collectives in flight
        self._on_wire: dict[int, dict[Transfer, None]] = {}  # the same the other way round
        self._met: dict[Transfer, None] = {}  # those that have wires in common with others
        self._told: dict[Unfolded, set[int]] = {}  # positions of those who are done with what goes message by message
        self._communicating = np.zeros(cluster.world_size, np.int64)
        self._computing = np.zeros(cluster.world_size, np.int64)

    def __repr__(self) -> str:
        flying = {each.of.whole if isinstance(each, Letter) else each for each in self._fluid.flows}
        return f"<Fabric of {self.cluster.name}: {len(flying)} in flight>"

    # -- what may start ------------------------------------------------------------------------------------------

    def collective(
        self,
        key: tuple[object, ...],
        kind: str,
        option: AlgorithmOption,
        nbytes: float,
        ranks: Sequence[int],
        arrivals_ns: Ints,
        *,
        priority: int = 0,
        lane: object = None,
    ) -> Transfer:
        """Make a collective of which all ranks have arrived; it is to start at the last arrival.

        Args:
            key: Of the transfer.
            kind: Name of the collective.
            option: What it becomes; the same object for the same group again, for speed.
            nbytes: Of the whole vector: the larger one of a rank's input and output.
            ranks: World ranks in group order.
            arrivals_ns: (size,) when each of them was ready.
            priority: Lower is more urgent.
            lane: What it belongs to: of one lane, older ones come first; by default it is alone.
        """
        pricing = self._collectives.get(option)
        if pricing is None:
            if len(self._collectives) >= _REMEMBERED:
                self._collectives.clear()
            pricing = Pricing.of_option(option, ranks, self.resources, self._slow)
            self._collectives[option] = pricing
        late_ns = arrivals_ns - arrivals_ns.min()
        plan = None if late_ns.any() else partial(pricing.plan, nbytes)
        return Transfer(key, kind, pricing.demand(nbytes, late_ns), priority=priority, lane=lane, plan=plan)

    def message(
        self,
        key: tuple[object, ...],
        src: int,
        dst: int,
        nbytes: float,
        *,
        late_ns: int = 0,
        priority: int = 0,
        lane: object = None,
    ) -> Transfer:
        """Make a message of which sender and receiver are there.

        Args:
            key: Of the transfer.
            src: World rank.
            dst: World rank.
            nbytes: How many.
            late_ns: How long the receiver came after the sender, less than 0 if it came before.
            priority: Lower is more urgent.
            lane: As of a collective.

        Raises:
            TopologyError: If no wire joins them.
        """
        demand = self._messages.demand(src, dst, nbytes, late_ns)
        return Transfer(key, "send", demand, priority=priority, lane=lane)

    def compute(self, key: tuple[object, ...], kind: str, rank: int, duration_ns: int) -> Transfer:
        """Make a compute. Only where there is interference do computes belong here."""
        alone = Demand.of(np.array([rank]), np.array([duration_ns]), *_NOTHING)
        return Transfer(key, kind, alone, computes=True)

    # -- time ----------------------------------------------------------------------------------------------------

    def start(self, now_ns: int, transfers: Iterable[Transfer]) -> None:
        """Let transfers begin."""
        transfers = list(transfers)
        self._fluid.start(now_ns, transfers)
        if self._interfering:
            for transfer in transfers:
                self._of(transfer)[transfer.ranks] += 1
            return
        for transfer in transfers:
            if transfer.plan is not None:
                self._meet(transfer)

    def _meet(self, new: Transfer) -> None:
        """Find out which collectives have some wires in common with a new one, but not all."""
        wires = self._wires[new] = self.resources.wires_among(new.demand.resources).tolist()
        others = dict[Transfer, None]()
        for wire in wires:
            there = self._on_wire.setdefault(wire, {})
            others.update(there)
            there[new] = None
        if met := [each for each in others if not _alike(each, new)]:
            self._met.update(dict.fromkeys([new, *met]))

    def _leave(self, transfer: Transfer) -> None:
        self._met.pop(transfer, None)
        for wire in self._wires.pop(transfer, ()):
            del self._on_wire[wire][transfer]

    def settle(self, now_ns: int) -> int | None:
        """Fix how fast everything gets on from now on; return the next instant to `advance` to, None if all is idle."""
        if self._interfering:
            self._interfere()
        else:
            self._unfold(now_ns)
        return self._fluid.settle(now_ns)

    def _unfold(self, now_ns: int) -> None:
        """Take collectives message by message from where on some of their messages are held up more than others."""
        torn = [
            *self._met,
            *(each for each in self._fluid.crowded() if isinstance(each, Transfer) and self._torn(each)),
        ]
        self._met.clear()
        while torn:
            for transfer in sorted(torn, key=_key):
                asked, transfer.plan = transfer.plan, None
                plan = asked() if asked else None
                if plan is not None:
                    self._replace(now_ns, transfer, plan)
            torn = [each for each in self._fluid.crowded() if isinstance(each, Transfer) and self._torn(each)]

    def _torn(self, transfer: Transfer) -> bool:
        """Return whether some wires hold up a collective more than others, beside one that needs the same wires."""
        if transfer.plan is None:
            return False
        others = (each for each in self._fluid.others(transfer) if isinstance(each, Transfer))
        if not any(_on_same(transfer, each) and not _same(transfer, each) for each in others):
            return False
        slopes = self._fluid.slopes(transfer)
        on_wires = [slopes[wire] for wire in self._wires[transfer] if wire in slopes]
        return bool(on_wires) and max(on_wires) > min(on_wires) * _ALIKE

    def _replace(self, now_ns: int, transfer: Transfer, plan: Plan) -> None:
        """Let the messages of a collective go on from where it is."""
        told = {each for positions in transfer.demand.positions[: transfer.reached] for each in positions.tolist()}
        share = self._fluid.withdraw(now_ns, transfer) / transfer.alone_ns
        _, unfolded, flows = alone(transfer, plan, share * plan.taken_ns)
        self._fluid.adopt(now_ns, flows, share * plan.taken_ns)
        self._told[unfolded] = told
        if unfolded.finished - told:
            self._fluid.start(now_ns, [unfolded.nudge()], parts=True)

    def advance(self, now_ns: int) -> list[Reached]:
        """Return the ranks that are done at an instant, in the order of keys."""
        found, unfolded = [], dict[Unfolded, None]()
        for flow, mark in self._fluid.advance(now_ns):
            if isinstance(flow, Letter):
                unfolded[flow.of] = None
                flow.of.reached(flow, mark)
                self._fluid.start(now_ns, flow.of.begun(), parts=True)
                continue
            assert isinstance(flow, Transfer)
            last = mark + 1 == len(flow.marks_ns)
            found.append(Reached(flow, flow.demand.positions[mark], last))
            if last:
                self._ended(flow)
        found += [each for one in unfolded if (each := self._finished(one)) is not None]
        return sorted(found, key=lambda each: each.transfer.key) if unfolded else found

    def _finished(self, unfolded: Unfolded) -> Reached | None:
        """Return the ranks that are newly done with a collective that goes message by message."""
        told, transfer = self._told[unfolded], unfolded.whole
        new = unfolded.finished - told
        if not new:
            return None
        assert isinstance(transfer, Transfer)
        told |= new
        if unfolded.done:
            del self._told[unfolded]
            self._ended(transfer)
        return Reached(transfer, np.array(sorted(new)), unfolded.done)

    def _ended(self, transfer: Transfer) -> None:
        self._leave(transfer)
        if self._interfering:
            self._of(transfer)[transfer.ranks] -= 1

    def _of(self, transfer: Transfer) -> Ints:
        return self._computing if transfer.computes else self._communicating

    def _interfere(self) -> None:
        """Slow down what overlaps."""
        for flow in self._fluid.flows:
            assert isinstance(flow, Transfer)
            if flow.computes:
                overlapped, factor = self._communicating[flow.ranks], self.interference.of_compute(flow.kind)
            else:
                overlapped, factor = self._computing[flow.ranks], self.interference.of_communication(flow.kind)
            self._fluid.cap(flow, 1 / factor if overlapped.any() else 1.0)


def _alike(one: Transfer, other: Transfer) -> bool:
    return _on_same(one, other) or _same(one, other)


def _on_same(one: Transfer, other: Transfer) -> bool:
    return np.array_equal(one.demand.resources, other.demand.resources)


def _same(one: Transfer, other: Transfer) -> bool:
    """Return whether two collectives do the same, each in its own place."""
    return (one.kind, one.demand.marks_ns, one.demand.ends_ns) == (
        other.kind,
        other.demand.marks_ns,
        other.demand.ends_ns,
    )
