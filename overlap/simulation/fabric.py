"""Collectives, messages and computes in flight on one cluster, in virtual time. Pure; no Trio.

Each instant has three calls: `advance` returns the ranks that are done, `start` takes the transfers that all ranks have
begun, and `update_rates` returns the next instant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from .messages import SimulatedMessages

# Options with a pricing that is kept: groups and size classes have few, but blocks that differ make one for each call.
_MOST_PRICINGS = 1 << 14

_NO_RESOURCES = np.zeros(0, np.int64), np.zeros(0)


class FabricTransfer(Flow):
    """A collective, a message or a compute in flight, as a flow on resources.

    Args:
        key: Order among the events of an instant.
        priority: Lower numbers go first.
        lane: Transfers of one lane follow each other; None: it has none.

    Attributes:
        kind: Name of the collective, "send", or the class of a compute.
        demand: Its demand alone.
        computes: Whether it is a compute.
    """

    __slots__ = ("computes", "demand", "kind")
    computes: bool
    demand: Demand
    kind: str

    def __init__(
        self,
        key: tuple[object, ...],
        kind: str,
        demand: Demand,
        *,
        priority: int = 0,
        lane: object = None,
        computes: bool = False,
    ) -> None:
        super().__init__(key, demand.marks_ns, demand.sections, priority=priority, lane=lane)
        self.kind, self.demand, self.computes = kind, demand, computes

    @property
    def ranks(self) -> Ints:
        """World ranks that take part, in group order."""
        return self.demand.ranks

    @property
    def alone_ns(self) -> int:
        """Time that the transfer takes alone."""
        return self.demand.alone_ns


class ReachedRanks(NamedTuple):
    """Ranks that are done with a transfer; a tuple, as there is one for each message."""

    transfer: FabricTransfer  # the transfer
    positions: Ints  # the ranks that are done, as positions in the ranks of the transfer
    last: bool  # whether the operation has ended


class SimulatedFabric:
    """All transfers in flight on a cluster.

    Keys order the events of one instant. They must be unique, compare with each other, and follow from the transfer,
    such as (ranks, stream, sequence number), never from the order of calls.

    Args:
        cluster: The machine.
        peer_direct: Whether adapters read device memory themselves, for messages; collectives have their own
            figures.
        conditions: Imperfections of the cluster.
        interference: Interference between computes and communication.

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
        self.cluster, self.interference = cluster, interference
        self.resources, self._slow = Resources(cluster), SlowWires(conditions)
        figures = parameters(cluster, peer_direct=peer_direct)
        self._collectives: dict[AlgorithmOption, Pricing] = {}
        self._messages = SimulatedMessages(figures, self.resources, self._slow)
        self._fluid, self._interfering = Fluid(), not interference.off
        self._communicating = np.zeros(cluster.world_size, np.int64)
        self._computing = np.zeros(cluster.world_size, np.int64)

    def __repr__(self) -> str:
        return f"<SimulatedFabric of {self.cluster.name}: {len(self._fluid.flows)} in flight>"

    # -- transfers -----------------------------------------------------------------------------------------------

    def collective_transfer(
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
    ) -> FabricTransfer:
        """Return the transfer of a collective, which has to be started when its last rank arrives.

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
            if len(self._collectives) >= _MOST_PRICINGS:
                self._collectives.clear()
            pricing = Pricing(option, np.asarray(ranks, np.int64), self.resources, self._slow)
            self._collectives[option] = pricing
        late_ns = arrivals_ns - arrivals_ns.min()
        return FabricTransfer(key, kind, pricing.demand(nbytes, late_ns), priority=priority, lane=lane)

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
    ) -> FabricTransfer:
        """Return the transfer of a message, which has to be started when the later of both ranks arrives.

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
        return FabricTransfer(key, "send", demand, priority=priority, lane=lane)

    def compute_transfer(self, key: tuple[object, ...], kind: str, rank: int, duration_ns: int) -> FabricTransfer:
        """Return the transfer of a compute; only where computes and communication interfere does it need one."""
        demand = Demand.of(np.array([rank]), np.array([duration_ns]), *_NO_RESOURCES)
        return FabricTransfer(key, kind, demand, computes=True)

    # -- time ----------------------------------------------------------------------------------------------------

    def start(self, now_ns: int, transfers: Iterable[FabricTransfer]) -> None:
        """Start transfers at an instant."""
        transfers = list(transfers)
        self._fluid.start(now_ns, transfers)
        if self._interfering:
            for transfer in transfers:
                self._active_counts(transfer)[transfer.ranks] += 1

    def update_rates(self, now_ns: int) -> int | None:
        """Compute the rates from now on; return the next instant to `advance` to, None if nothing is in flight."""
        if self._interfering:
            self._cap_overlapped()
        return self._fluid.update_rates(now_ns)

    def advance(self, now_ns: int) -> list[ReachedRanks]:
        """End the transfers that are due at an instant, in the order of their keys.

        Returns:
            For each mark that is reached: the transfer, its ranks, and whether they are the last.
        """
        reached = []
        for flow, mark in self._fluid.advance(now_ns):
            assert isinstance(flow, FabricTransfer)
            last = mark + 1 == len(flow.marks_ns)
            reached.append(ReachedRanks(flow, flow.demand.positions[mark], last))
            if last and self._interfering:
                self._active_counts(flow)[flow.ranks] -= 1
        return reached

    def _active_counts(self, transfer: FabricTransfer) -> Ints:
        """Return the counts, by rank, of computes or of communication in flight: the kind of this transfer."""
        return self._computing if transfer.computes else self._communicating

    def _cap_overlapped(self) -> None:
        """Limit the rates of computes and communication that overlap on a rank."""
        for flow in self._fluid.flows:
            assert isinstance(flow, FabricTransfer)
            if flow.computes:
                overlapped, factor = self._communicating[flow.ranks], self.interference.of_compute(flow.kind)
            else:
                overlapped, factor = self._computing[flow.ranks], self.interference.of_communication(flow.kind)
            self._fluid.cap(flow, 1 / factor if overlapped.any() else 1.0)
