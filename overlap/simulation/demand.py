"""Demand of one operation on the machine, alone: the end on each rank, and the busy time of each resource.

It has the times of the cost model to the nanosecond; the fabric only stretches them. Pure; no Trio.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..collectives.placement import Floats, Ints
from ..cost import cost, on
from ..cost.option import AlgorithmOption
from ..cost.phase import PricedPhase
from .conditions import SlowWires
from .flow import FlowSection, quantise
from .loads import Loads, Resources

# Demands to keep of an operation: without jitter it comes again and again with the same size and arrivals.
_MOST_DEMANDS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """Demand of one operation alone, from the arrival of its last rank."""

    ranks: Ints  # (size,) world ranks in group order
    marks_ns: tuple[int, ...]  # times at which some ranks are done, ascending
    positions: tuple[Ints, ...]  # for each mark, the ranks that are done then, as positions in `ranks`, ascending
    resources: Ints  # (needs,) the resources that the operation uses, each once
    ends_ns: tuple[int, ...]  # end of each section, ascending
    shares: Floats  # (sections, needs) share of a section in which each resource is busy
    messages: Floats  # (sections, needs) number of its messages that share a resource at a time
    sections: tuple[FlowSection, ...] = field(init=False, repr=False)  # these three columns as records, for flows

    def __post_init__(self) -> None:
        rows = zip(self.ends_ns, self.shares, self.messages, strict=True)
        sections = tuple(FlowSection.of(end_ns, self.resources, shares, messages) for end_ns, shares, messages in rows)
        object.__setattr__(self, "sections", sections)

    @property
    def alone_ns(self) -> int:
        """Time that the operation takes alone."""
        return self.marks_ns[-1]

    @property
    def busy_ns(self) -> Floats:
        """(sections, needs) Time in each section in which each resource is busy."""
        return self.shares * np.diff(self.ends_ns, prepend=0)[:, None]

    @classmethod
    def of(
        cls,
        ranks: Ints,
        left_ns: Ints,
        resources: Ints,
        busy_ns: Floats,
        took: Floats | None = None,
        messages: Floats | None = None,
    ) -> Demand:
        """Return the demand of an operation that ends on each rank at a given time.

        Args:
            ranks: (size,) World ranks.
            left_ns: (size,) Time to the end on each rank, from the arrival of the last.
            resources: (needs,) The resources that are used.
            busy_ns: (sections, needs) Busy time in each section; or (needs,) in all.
            took: (sections,) Times of the sections, relative to each other.
            messages: (sections, needs) Number of messages that share it at a time; one if None.
        """
        marks: tuple[int, ...] = (int(left_ns[0]),)
        positions: tuple[Ints, ...] = (np.arange(len(ranks)),)
        if (left_ns != left_ns[0]).any():  # seldom
            # Sort the ranks by their end, stably, and cut the order where the end changes.
            distinct, mark = np.unique(left_ns, return_inverse=True)
            order = np.argsort(mark, kind="stable")
            marks = tuple(distinct.tolist())
            positions = tuple(np.split(order, np.searchsorted(mark[order], np.arange(1, len(marks)))))
        busy_ns = np.atleast_2d(busy_ns)
        counts = np.ones(busy_ns.shape) if messages is None else messages
        ends, shares, counts = _split_sections(marks[-1], np.ones(1) if took is None else took, busy_ns, counts)
        needs = shares.any(axis=0)
        return cls(
            ranks=ranks,
            marks_ns=marks,
            positions=positions,
            resources=resources[needs],
            ends_ns=tuple(ends.tolist()),
            shares=shares[:, needs],
            messages=counts[:, needs],
        )


def _split_sections(total_ns: int, took: Floats, busy_ns: Floats, messages: Floats) -> tuple[Ints, Floats, Floats]:
    """Return the ends of sections that fill `total_ns`, and their (sections, needs) shares and numbers of messages."""
    if not total_ns:  # no other operation competes with it
        return np.zeros(1, np.int64), np.zeros((1, busy_ns.shape[1])), messages[:1]
    ends_ns = np.rint(np.cumsum(took) * (total_ns / took.sum())).astype(np.int64)
    lengths_ns = np.diff(ends_ns, prepend=0)
    lasting = np.flatnonzero(lengths_ns)  # sections that are not rounded to nothing
    return ends_ns[lasting], quantise(busy_ns[lasting] / lengths_ns[lasting, None]), messages[lasting]


class Pricing:
    """Demands of an operation of one group with an algorithm, for any number of bytes and any arrivals.

    Args:
        option: The algorithm.
        resources: Resources of the cluster.
        slow: Wires that are slower than the machine's.

    Attributes:
        ranks: World ranks in group order.
    """

    ranks: Ints

    def __init__(self, option: AlgorithmOption, ranks: Ints, resources: Resources, slow: SlowWires) -> None:
        self.ranks, self._option, self._resources, self._slow = ranks, option, resources, slow
        self._phases: dict[int, tuple[PricedPhase, ...]] = {}  # by slices
        self._demands: dict[tuple[float, bytes], Demand] = {}
        self._loads: Loads | None = None

    def demand(self, nbytes: float, late_ns: Ints) -> Demand:
        """Return the demand for a size and arrivals, computed once for equal ones.

        No rank is done before the last one has arrived: an operation begins with a handshake of all ranks, and
        completes when the slowest one has come (aws-neuron/aws-neuron-sdk:src/libnrt/include/nrt/nec.h).

        Args:
            nbytes: Bytes of the whole vector.
            late_ns: (size,) Time from the first rank's arrival to that of each rank.
        """
        key = nbytes, late_ns.tobytes()
        demand = self._demands.get(key)
        if demand is None:
            if len(self._demands) >= _MOST_DEMANDS:
                del self._demands[next(iter(self._demands))]
            demand = self._demands[key] = self._compute_demand(nbytes, late_ns)
        return demand

    def _compute_demand(self, nbytes: float, late_ns: Ints) -> Demand:
        """Return the demand: when ranks finish, and the load on wires, memories and collective processors.

        Args:
            nbytes: Bytes of the whole vector.
            late_ns: Time of each rank after the first that arrived.
        """
        left_ns = np.maximum(self._finish_ns(nbytes, late_ns) - late_ns.max(), 0)
        if self._loads is None:
            self._loads = Loads(self._slow_phases(1), self.ranks, self._resources)
        took_s, busy_s, messages = self._loads.sections(nbytes, evenly=self._option.price(nbytes).slices > 1)
        resources, cores = self._loads.resources, self._resources.cluster.cc_cores_per_rank
        # An operation in flight occupies one collective processor of each rank for all of its time.
        if cores:
            resources = np.concatenate([resources, self._resources.cc_cores(self.ranks)])
            core_s = took_s / took_s.sum() * int(left_ns.max()) / 1e9 / cores
            busy_s = np.hstack([busy_s, np.repeat(core_s[:, None], len(self.ranks), axis=1)])
            messages = np.hstack([messages, np.ones((len(messages), len(self.ranks)))])
        return Demand.of(self.ranks, left_ns, resources, busy_s * 1e9, took_s, messages)

    def _finish_ns(self, nbytes: float, late_ns: Ints) -> Ints:
        """Return when each rank is done, in nanoseconds after the first arrival.

        The price is the time of all phases, in slices, between ranks that arrive together. Ranks that arrive late delay
        the first phase, and with it all others; how the ends of ranks differ is decided by the last phase.

        Args:
            nbytes: Bytes of the whole vector.
            late_ns: (size,) Time from the first rank's arrival to that of each rank.
        """
        price = self._option.price(nbytes)
        phases = self._slow_phases(price.slices)
        if not phases:  # no messages: the work begins when all ranks have met, and takes equally long on each
            return np.full(len(late_ns), int(late_ns.max()) + round(price.total_s * 1e9), np.int64)
        slice_bytes = nbytes / price.slices if len(phases) > 1 else nbytes
        total_s = price.total_s + self._slow_wire_s(slice_bytes, price.slices)
        finish_s = _phase_finish_s(phases[-1], slice_bytes)
        if late_ns.any():
            late_first_s = _phase_finish_s(phases[0], slice_bytes, late_ns / 1e9)
            total_s += late_first_s.max() - _phase_finish_s(phases[0], slice_bytes).max()
            finish_s = late_first_s if len(phases) == 1 else finish_s
        ahead_s = finish_s.max() - finish_s  # of the last rank
        return _round_ns(np.array(total_s)) - _round_ns(ahead_s)

    def _slow_phases(self, slices: int) -> tuple[PricedPhase, ...]:
        if slices not in self._phases:
            healthy = self._option.phases(slices)
            self._phases[slices] = tuple(_slow_phase(self._slow, part) for part in healthy)
        return self._phases[slices]

    def _slow_wire_s(self, piece: float, slices: int) -> float:
        """Return the time that slow wires add to the price of a piece; 0 if no wire is slow."""
        slow, healthy = self._slow_phases(slices), self._option.phases(slices)
        if all(slow_part is part for slow_part, part in zip(slow, healthy, strict=True)):
            return 0.0
        slow_s, healthy_s = ([part.total_s(piece) for part in parts] for parts in (slow, healthy))
        return self._option.in_slices_s(slow_s, slices) - self._option.in_slices_s(healthy_s, slices)


def _phase_finish_s(part: PricedPhase, nbytes: float, arrivals_s: Floats | None = None) -> Floats:
    """Return the end of a phase on each rank, in seconds after the first arrival."""
    return cost(part.placed, part.share * nbytes, arrivals_s=arrivals_s).finish_s


def _round_ns(duration_s: Floats) -> Ints:
    return np.rint(duration_s * 1e9).astype(np.int64)


def _slow_phase(slow: SlowWires, part: PricedPhase) -> PricedPhase:
    """Return a phase with the bandwidth of slow wires; `part` itself if it uses none."""
    placed = part.placed
    placement = slow.slow_placement(placed.placement)
    if placement is placed.placement:
        return part
    return PricedPhase(on(placement, placed.rounds, parameters=placed.parameters), part.share)
