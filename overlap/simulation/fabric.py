"""Collectives, messages and computes in flight on one cluster, in virtual time. Pure; no Trio.

At each instant three functions are called: `advance_to` returns the ranks that are done with a transfer,
`start_transfers` starts new transfers, and `update_rates` returns the next instant at which a rank will be done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from topology import Cluster

from ..collectives.placement import Ints
from ..cost.option import AlgorithmOption
from ..cost.parameters import cost_parameters
from ..cost.remembered import LimitedCache
from .conditions import CALM, NO_INTERFERENCE, Conditions, Interference, SlowWires
from .demand import Demand, Pricing
from .flow import Flow
from .fluid import Fluid
from .loads import Resources
from .messages import SimulatedMessages

# Pricings to remember: groups and size classes need few, but each call with blocks of different sizes has a new one.
_MOST_PRICINGS = 1 << 14

_NO_RESOURCES = np.zeros(0, np.int64), np.zeros(0)


class FabricTransfer(Flow):
    """A collective, a message or a compute in flight, as a flow on resources.

    Args:
        key: Orders the events of an instant; unique.
        kind: Name of the collective, "send", or the class of a compute.
        demand: Times and use of resources if the transfer runs alone.
        priority: Priority; lower is more urgent.
        lane: Lane of the transfer, in which older transfers come first; None: no lane.
        computes: Whether it is a compute.

    Attributes:
        kind, demand, computes: See the arguments.
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
    """Ranks that are done with a transfer. A named tuple is quicker to make than a dataclass."""

    transfer: FabricTransfer  # the transfer
    positions: Ints  # the ranks that are done now, as positions in `transfer.ranks`
    last: bool  # whether all ranks are done, so that the transfer has ended


class SimulatedFabric:
    """All transfers in flight on a cluster.

    The keys of transfers order the events of one instant. They must be unique and comparable, and follow from the
    transfer, such as (ranks, stream, sequence number), never from the order of calls.

    Args:
        cluster: The machine.
        peer_direct: Whether network adapters read device memory themselves, for messages; the options of collectives
            include this already.
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
        figures = cost_parameters(cluster, peer_direct=peer_direct)
        self._collectives = LimitedCache[AlgorithmOption, Pricing](_MOST_PRICINGS)
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
        """Return the transfer of a collective; call `start_transfers` with it when the last rank arrives.

        Args:
            key: Key of the transfer.
            kind: Name of the collective.
            option: The algorithm. Pass the same object for the same group: prices are remembered by it.
            nbytes: Bytes of the whole vector: the larger one of a rank's input and output.
            ranks: World ranks in group order.
            arrivals_ns: (size,) Instant at which each rank was ready.
            priority: Priority; lower is more urgent.
            lane: Lane of the collective, in which older transfers come first; by default none.
        """
        pricing = self._collectives.find_or_compute(
            option, lambda: Pricing(option, np.asarray(ranks, np.int64), self.resources, self._slow)
        )
        late_ns = arrivals_ns - arrivals_ns.min()
        return FabricTransfer(key, kind, pricing.demand(nbytes, late_ns), priority=priority, lane=lane)

    def message_transfer(
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
        """Return the transfer of a message; call `start_transfers` with it when the later of the two ranks arrives.

        Args:
            key: Key of the transfer.
            src: World rank of the sender.
            dst: World rank of the receiver.
            nbytes: Bytes of the message.
            late_ns: Time between the arrivals of sender and receiver, less than 0 if the receiver was first.
            priority: Priority; lower is more urgent.
            lane: Lane of the message, in which older transfers come first; by default none.

        Raises:
            TopologyError: If no wire joins them.
        """
        demand = self._messages.demand(src, dst, nbytes, late_ns)
        return FabricTransfer(key, "send", demand, priority=priority, lane=lane)

    def compute_transfer(self, key: tuple[object, ...], kind: str, rank: int, duration_ns: int) -> FabricTransfer:
        """Return a compute as a transfer, which it needs only if computes and communication interfere.

        Args:
            key: Key of the transfer.
            kind: Class of the compute.
            rank: World rank.
            duration_ns: Time of the compute while its rank does not communicate.
        """
        demand = Demand.of(np.array([rank]), np.array([duration_ns]), *_NO_RESOURCES)
        return FabricTransfer(key, kind, demand, computes=True)

    # -- time ----------------------------------------------------------------------------------------------------

    def start_transfers(self, now_ns: int, transfers: Iterable[FabricTransfer]) -> None:
        """Start transfers at the present instant."""
        transfers = list(transfers)
        self._fluid.start_flows(now_ns, transfers)
        if self._interfering:
            for transfer in transfers:
                self._active_counts(transfer)[transfer.ranks] += 1

    def update_rates(self, now_ns: int) -> int | None:
        """Compute the rates from now on; return the next instant for `advance_to`, None if nothing is in flight."""
        if self._interfering:
            self._cap_overlapped_rates()
        return self._fluid.update_rates(now_ns)

    def advance_to(self, now_ns: int) -> list[ReachedRanks]:
        """Move all transfers to an instant; return the ranks that are done then, in the order of transfers' keys."""
        reached = []
        for flow, mark in self._fluid.advance_to(now_ns):
            assert isinstance(flow, FabricTransfer)
            last = mark + 1 == len(flow.marks_ns)
            reached.append(ReachedRanks(flow, flow.demand.positions[mark], last))
            if last and self._interfering:
                self._active_counts(flow)[flow.ranks] -= 1
        return reached

    def _active_counts(self, transfer: FabricTransfer) -> Ints:
        """Return the array, by rank, that counts transfers of this kind in flight: computes, or communication."""
        return self._computing if transfer.computes else self._communicating

    def _cap_overlapped_rates(self) -> None:
        """Limit the rates of computes and of communication that overlap on a rank, by the factors of `interference`."""
        for flow in self._fluid.flows:
            assert isinstance(flow, FabricTransfer)
            if flow.computes:
                overlapped, factor = self._communicating[flow.ranks], self.interference.of_compute(flow.kind)
            else:
                overlapped, factor = self._computing[flow.ranks], self.interference.of_communication(flow.kind)
            # A factor on the time is its inverse on the rate.
            self._fluid.cap_rate(flow, 1 / factor if overlapped.any() else 1.0)
