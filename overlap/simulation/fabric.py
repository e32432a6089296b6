"""Collectives, messages and computes in flight on one cluster, in virtual time. Pure; no Trio.

Each instant has three calls: `advance` returns the ranks that are done, `start` takes the transfers that all ranks have
begun, and `settle` returns the next instant.
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
from .unfolded import MessageFlow, MessagePlan, Unfolded, alone

# Options with a pricing that is kept: groups and size classes have few, but blocks that differ make one for each call.
_REMEMBERED = 1 << 14

_NOTHING = np.zeros(0, np.int64), np.zeros(0)

_key = attrgetter("key")

# Ratio of the slopes of resources that hold up a collective alike, so that it proceeds as a whole.
_ALIKE = 1.02


class Transfer(Flow):
    """A collective, a message or a compute in flight.

    Attributes:
        kind: Name of the collective, "send", or the class of a compute.
        demand: Its demand alone.
        computes: Whether it is a compute.
        plan: Returns the plan of its messages; None if it has to be taken as a whole.
    """

    __slots__ = ("computes", "demand", "kind", "plan")
    computes: bool
    demand: Demand
    kind: str
    plan: Callable[[], MessagePlan | None] | None

    def __init__(
        self,
        key: tuple[object, ...],
        kind: str,
        demand: Demand,
        *,
        priority: int = 0,
        lane: object = None,
        computes: bool = False,
        plan: Callable[[], MessagePlan | None] | None = None,
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


class SimulatedFabric:
    """All transfers in flight on a cluster.

    Keys order the events of one instant. They must be unique, compare with each other, and follow from the transfer,
    such as (ranks, stream, sequence number), never from the order of calls.

    Attributes:
        cluster: The machine.
        interference: Interference between computes and communication.
        resources: The resources of the cluster.
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
            peer_direct: Whether adapters read device memory themselves, for messages; collectives have their own
                figures.
            conditions: Imperfections of the cluster.
            interference: Interference between computes and communication.
        """
        self.cluster, self.interference = cluster, interference
        self.resources, self._slow = Resources(cluster), SlowWires(conditions)
        figures = parameters(cluster, peer_direct=peer_direct)
        self._collectives: dict[AlgorithmOption, Pricing] = {}
        self._messages = Messages(figures, self.resources, self._slow)
        self._fluid, self._interfering = Fluid(), not interference.off
        self._wires: dict[Transfer, list[int]] = {}  # of the collectives in flight
        self._on_wire: dict[int, dict[Transfer, None]] = {}  # the collectives in flight, by wire
        self._met: dict[Transfer, None] = {}  # new collectives that share wires with others
        self._reported: dict[Unfolded, set[int]] = {}  # positions of ranks that `advance` has returned
        self._communicating = np.zeros(cluster.world_size, np.int64)
        self._computing = np.zeros(cluster.world_size, np.int64)

    def __repr__(self) -> str:
        flying = {flow.of.whole if isinstance(flow, MessageFlow) else flow for flow in self._fluid.flows}
        return f"<SimulatedFabric of {self.cluster.name}: {len(flying)} in flight>"

    # -- transfers -----------------------------------------------------------------------------------------------

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
        """Return a collective with the arrivals of all ranks, to be started at the last one.

        Args:
            key: Key of the transfer.
            kind: Name of the collective.
            option: Its algorithm; the same object for the same group again, for speed.
            nbytes: Bytes of the whole vector: the larger one of a rank's input and output.
            ranks: World ranks in group order.
            arrivals_ns: (size,) Instant at which each rank was ready.
            priority: Priority; lower is more urgent.
            lane: Its lane, in which older transfers come first; by default none.
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
        """Return a message with the arrivals of both ranks.

        Args:
            key: Key of the transfer.
            src: World rank of the sender.
            dst: World rank of the receiver.
            nbytes: Bytes of the message.
            late_ns: Time between the arrivals of sender and receiver, less than 0 if the receiver was first.
            priority: Priority; lower is more urgent.
            lane: As for a collective.

        Raises:
            TopologyError: If no wire joins them.
        """
        demand = self._messages.demand(src, dst, nbytes, late_ns)
        return Transfer(key, "send", demand, priority=priority, lane=lane)

    def compute(self, key: tuple[object, ...], kind: str, rank: int, duration_ns: int) -> Transfer:
        """Return a compute, which belongs here only where there is interference."""
        alone = Demand.of(np.array([rank]), np.array([duration_ns]), *_NOTHING)
        return Transfer(key, kind, alone, computes=True)

    # -- time ----------------------------------------------------------------------------------------------------

    def start(self, now_ns: int, transfers: Iterable[Transfer]) -> None:
        """Start transfers."""
        transfers = list(transfers)
        self._fluid.start(now_ns, transfers)
        if self._interfering:
            for transfer in transfers:
                self._active(transfer)[transfer.ranks] += 1
            return
        for transfer in transfers:
            if transfer.plan is not None:
                self._meet(transfer)

    def _meet(self, new: Transfer) -> None:
        """Note the collectives that share some wires, but not all, with a new one."""
        wires = self._wires[new] = self.resources.wires_among(new.demand.resources).tolist()
        others = dict[Transfer, None]()
        for wire in wires:
            on_wire = self._on_wire.setdefault(wire, {})
            others.update(on_wire)
            on_wire[new] = None
        if met := [other for other in others if not _alike(other, new)]:
            self._met.update(dict.fromkeys([new, *met]))

    def _leave(self, transfer: Transfer) -> None:
        self._met.pop(transfer, None)
        for wire in self._wires.pop(transfer, ()):
            del self._on_wire[wire][transfer]

    def settle(self, now_ns: int) -> int | None:
        """Compute the rates from now on; return the next instant to `advance` to, None if nothing is in flight."""
        if self._interfering:
            self._interfere()
        else:
            self._unfold(now_ns)
        return self._fluid.settle(now_ns)

    def _unfold(self, now_ns: int) -> None:
        """Replace collectives by their messages once some of these are held up more than others."""
        torn = [
            *self._met,
            *(flow for flow in self._fluid.crowded() if isinstance(flow, Transfer) and self._torn(flow)),
        ]
        self._met.clear()
        while torn:
            for transfer in sorted(torn, key=_key):
                make_plan, transfer.plan = transfer.plan, None
                plan = make_plan() if make_plan else None
                if plan is not None:
                    self._replace(now_ns, transfer, plan)
            torn = [flow for flow in self._fluid.crowded() if isinstance(flow, Transfer) and self._torn(flow)]

    def _torn(self, transfer: Transfer) -> bool:
        """Return whether some wires hold up a collective more than others, beside another on the same wires."""
        if transfer.plan is None:
            return False
        others = (flow for flow in self._fluid.others(transfer) if isinstance(flow, Transfer))
        if not any(_on_same(transfer, other) and not _same(transfer, other) for other in others):
            return False
        slopes = self._fluid.slopes(transfer)
        on_wires = [slopes[wire] for wire in self._wires[transfer] if wire in slopes]
        return bool(on_wires) and max(on_wires) > min(on_wires) * _ALIKE

    def _replace(self, now_ns: int, transfer: Transfer, plan: MessagePlan) -> None:
        """Replace a collective by its messages, from its present point on."""
        reported = {rank for positions in transfer.demand.positions[: transfer.reached] for rank in positions.tolist()}
        share = self._fluid.withdraw(now_ns, transfer) / transfer.alone_ns
        _, unfolded, flows = alone(transfer, plan, share * plan.taken_ns)
        self._fluid.adopt(now_ns, flows, share * plan.taken_ns)
        self._reported[unfolded] = reported
        if unfolded.finished - reported:
            self._fluid.start(now_ns, [unfolded.nudge()], parts=True)

    def advance(self, now_ns: int) -> list[Reached]:
        """Return the ranks that are done at an instant, in the order of keys."""
        reached, unfolded = [], dict[Unfolded, None]()
        for flow, mark in self._fluid.advance(now_ns):
            if isinstance(flow, MessageFlow):
                unfolded[flow.of] = None
                flow.of.reached(flow, mark)
                self._fluid.start(now_ns, flow.of.begun(), parts=True)
                continue
            assert isinstance(flow, Transfer)
            last = mark + 1 == len(flow.marks_ns)
            reached.append(Reached(flow, flow.demand.positions[mark], last))
            if last:
                self._ended(flow)
        reached += [part for collective in unfolded if (part := self._finished(collective)) is not None]
        return sorted(reached, key=lambda part: part.transfer.key) if unfolded else reached

    def _finished(self, unfolded: Unfolded) -> Reached | None:
        """Return the ranks that are newly done with a collective that is simulated message by message."""
        reported, transfer = self._reported[unfolded], unfolded.whole
        new = unfolded.finished - reported
        if not new:
            return None
        assert isinstance(transfer, Transfer)
        reported |= new
        if unfolded.done:
            del self._reported[unfolded]
            self._ended(transfer)
        return Reached(transfer, np.array(sorted(new)), unfolded.done)

    def _ended(self, transfer: Transfer) -> None:
        self._leave(transfer)
        if self._interfering:
            self._active(transfer)[transfer.ranks] -= 1

    def _active(self, transfer: Transfer) -> Ints:
        return self._computing if transfer.computes else self._communicating

    def _interfere(self) -> None:
        """Limit the rates of transfers and computes that overlap."""
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
    """Return whether two collectives have the same demand, each on its own ranks."""
    return (one.kind, one.demand.marks_ns, one.demand.ends_ns) == (
        other.kind,
        other.demand.marks_ns,
        other.demand.ends_ns,
    )
