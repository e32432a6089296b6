"""The demand of an operation: when each rank is done, and how long each resource is busy, if it runs alone.

Times are those of the cost model, to the nanosecond. While other operations run, `fabric` stretches them. Pure; no
Trio.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..collectives.placement import Floats, Ints
from ..cost.clocks import cost
from ..cost.option import AlgorithmOption
from ..cost.phase import PricedPhase
from ..cost.placed import place_rounds
from ..cost.remembered import LimitedCache
from .conditions import SlowWires
from .flow import FlowSection, quantise_shares
from .loads import Loads, Resources

# Demands to remember for each algorithm and group: without jitter the same size and arrivals come again and again.
_MOST_DEMANDS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """Demand of one operation that runs alone.

    Times count from the arrival of the last rank. The operation is divided into sections, consecutive stretches of time
    in which the load of every resource is constant.
    """

    ranks: Ints  # (size,) world ranks in group order
    marks_ns: tuple[int, ...]  # times at which some ranks are done, ascending
    positions: tuple[Ints, ...]  # for each mark, the ranks that are done then, as positions in `ranks`, ascending
    resources: Ints  # (needs,) numbers of the resources that the operation uses
    ends_ns: tuple[int, ...]  # end of each section, ascending
    shares: Floats  # (sections, needs) share of the section's time in which each resource is busy
    messages: Floats  # (sections, needs) number of the operation's messages that use a resource at the same time
    sections: tuple[FlowSection, ...] = field(init=False, repr=False)  # `ends_ns`, `shares` and `messages` by section

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
        """(sections, needs) Nanoseconds that each resource in use is busy in each section."""
        return self.shares * np.diff(self.ends_ns, prepend=0)[:, None]

    @classmethod
    def of(
        cls,
        ranks: Ints,
        left_ns: Ints,
        resources: Ints,
        busy_ns: Floats,
        section_lengths: Floats | None = None,
        messages: Floats | None = None,
    ) -> Demand:
        """Return the demand of an operation, given when each rank is done and how long resources are busy.

        Args:
            ranks: (size,) World ranks.
            left_ns: (size,) Time from the arrival of the last rank until each rank is done.
            resources: (needs,) Numbers of the resources that are used.
            busy_ns: (sections, needs) Time in each section in which a resource is busy; (needs,) for one section.
            section_lengths: (sections,) Lengths of the sections, in any unit; None: one section. They are scaled to
                fill the time of the whole operation.
            messages: (sections, needs) Number of messages that use a resource at the same time; None: one.
        """
        marks, positions = _group_ranks_by_end(left_ns)
        busy_ns = np.atleast_2d(busy_ns)
        counts = np.ones(busy_ns.shape) if messages is None else messages
        lengths = np.ones(1) if section_lengths is None else section_lengths
        ends, shares, counts = _split_sections(marks[-1], lengths, busy_ns, counts)
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


def _group_ranks_by_end(left_ns: Ints) -> tuple[tuple[int, ...], tuple[Ints, ...]]:
    """Return the distinct times, ascending, and for each of them the indices of the ranks that are done then.

    [7, 5, 7] gives (5, 7) and ([1], [0, 2]).
    """
    if (left_ns == left_ns[0]).all():  # almost always
        return (int(left_ns[0]),), (np.arange(len(left_ns)),)
    # Sort the ranks by their time, stably, and cut the order where the time changes.
    distinct, mark = np.unique(left_ns, return_inverse=True)
    order = np.argsort(mark, kind="stable")
    cuts = np.searchsorted(mark[order], np.arange(1, len(distinct)))
    return tuple(distinct.tolist()), tuple(np.split(order, cuts))


def _split_sections(total_ns: int, lengths: Floats, busy_ns: Floats, messages: Floats) -> tuple[Ints, Floats, Floats]:
    """Return the ends of sections that fill `total_ns`, their shares (sections, needs), and their messages likewise.

    Sections that are rounded to no time are left out. `lengths` may have any unit.
    """
    if not total_ns:  # an operation without a duration uses no resource
        return np.zeros(1, np.int64), np.zeros((1, busy_ns.shape[1])), messages[:1]
    ends_ns = np.rint(np.cumsum(lengths) * (total_ns / lengths.sum())).astype(np.int64)
    lengths_ns = np.diff(ends_ns, prepend=0)
    lasting = np.flatnonzero(lengths_ns)
    return ends_ns[lasting], quantise_shares(busy_ns[lasting] / lengths_ns[lasting, None]), messages[lasting]


class Pricing:
    """Computes the `Demand` of operations of one group and algorithm, for any number of bytes and any arrivals.

    Args:
        option: The algorithm.
        ranks: (size,) World ranks in group order.
        resources: Resources of the cluster.
        slow: The slow wires of the cluster.

    Attributes:
        ranks: (size,) World ranks in group order.
    """

    ranks: Ints

    def __init__(self, option: AlgorithmOption, ranks: Ints, resources: Resources, slow: SlowWires) -> None:
        self.ranks, self._option, self._resources, self._slow = ranks, option, resources, slow
        self._phases: dict[int, tuple[PricedPhase, ...]] = {}  # by number of slices
        self._demands = LimitedCache[tuple[float, bytes], Demand](_MOST_DEMANDS)  # by bytes, and arrivals of all ranks
        self._loads: Loads | None = None

    def demand(self, nbytes: float, late_ns: Ints) -> Demand:
        """Return the `Demand` of an operation; the newest ones are remembered.

        No rank is done before the last one has arrived: an operation begins with a handshake of all ranks, and
        completes when the slowest one has come (aws-neuron/aws-neuron-sdk:src/libnrt/include/nrt/nec.h).

        Args:
            nbytes: Bytes of the whole vector.
            late_ns: (size,) Time from the first rank's arrival to the arrival of each rank.
        """
        key = nbytes, late_ns.tobytes()
        return self._demands.find_or_compute(key, lambda: self._compute_demand(nbytes, late_ns))

    def _compute_demand(self, nbytes: float, late_ns: Ints) -> Demand:
        """Return the demand of an operation. Arguments: see `demand`."""
        # Time after the arrival of the last rank, before which no rank is done.
        left_ns = np.maximum(self._finish_times_ns(nbytes, late_ns) - late_ns.max(), 0)
        if self._loads is None:
            self._loads = Loads(self._phases_with_slow_wires(1), self.ranks, self._resources)
        took_s, busy_s, messages = self._loads.sections(nbytes, evenly=self._option.price(nbytes).slices > 1)
        resources, cores = self._loads.resources, self._resources.cluster.cc_cores_per_rank
        # An operation in flight occupies one collective processor (CC-core) of each rank for all of its time.
        if cores:
            resources = np.concatenate([resources, self._resources.cc_core_numbers(self.ranks)])
            core_s = took_s / took_s.sum() * int(left_ns.max()) / 1e9 / cores
            busy_s = np.hstack([busy_s, np.repeat(core_s[:, None], len(self.ranks), axis=1)])
            messages = np.hstack([messages, np.ones((len(messages), len(self.ranks)))])
        return Demand.of(self.ranks, left_ns, resources, busy_s * 1e9, took_s, messages)

    def _finish_times_ns(self, nbytes: float, late_ns: Ints) -> Ints:
        """Return when each rank is done, in nanoseconds after the first arrival. Arguments: see `demand`.

        The cost model's price is for ranks that arrive together. Late ranks delay the first phase, and so all phases.
        The last phase decides by how much some ranks are done before others.
        """
        price = self._option.price(nbytes)
        phases = self._phases_with_slow_wires(price.slices)
        if not phases:  # no messages: the work begins when all ranks have met, and takes equally long on each rank
            return np.full(len(late_ns), int(late_ns.max()) + round(price.total_s * 1e9), np.int64)
        slice_bytes = nbytes / price.slices if len(phases) > 1 else nbytes
        total_s = price.total_s + self._slow_wire_delay_s(slice_bytes, price.slices)
        finish_s = _phase_finish_times_s(phases[-1], slice_bytes)
        if late_ns.any():
            late_first_s = _phase_finish_times_s(phases[0], slice_bytes, late_ns / 1e9)
            total_s += late_first_s.max() - _phase_finish_times_s(phases[0], slice_bytes).max()
            finish_s = late_first_s if len(phases) == 1 else finish_s
        ahead_s = finish_s.max() - finish_s  # by how much each rank is done before the last one
        return _round_ns(np.array(total_s)) - _round_ns(ahead_s)

    def _phases_with_slow_wires(self, slices: int) -> tuple[PricedPhase, ...]:
        """Return the phases for a number of slices, with the bandwidth of slow wires; made once for each number."""
        if slices not in self._phases:
            healthy = self._option.phases(slices)
            self._phases[slices] = tuple(_price_with_slow_wires(self._slow, part) for part in healthy)
        return self._phases[slices]

    def _slow_wire_delay_s(self, piece: float, slices: int) -> float:
        """Return the seconds that slow wires add to the price of slices of `piece` bytes; 0 if no wire is slow."""
        slow, healthy = self._phases_with_slow_wires(slices), self._option.phases(slices)
        if all(slow_part is part for slow_part, part in zip(slow, healthy, strict=True)):
            return 0.0
        slow_s, healthy_s = ([part.total_s(piece) for part in parts] for parts in (slow, healthy))
        return self._option.sliced_time_s(slow_s, slices) - self._option.sliced_time_s(healthy_s, slices)


def _phase_finish_times_s(part: PricedPhase, nbytes: float, arrivals_s: Floats | None = None) -> Floats:
    """Return the end of a phase on each rank, in seconds after the first arrival; None: all arrive together."""
    return cost(part.placed, part.share * nbytes, arrivals_s=arrivals_s).finish_s


def _round_ns(duration_s: Floats) -> Ints:
    return np.rint(duration_s * 1e9).astype(np.int64)


def _price_with_slow_wires(slow: SlowWires, part: PricedPhase) -> PricedPhase:
    """Return a phase with the bandwidth of slow wires; `part` itself if no wires are slow."""
    placed = part.placed
    placement = slow.placement_with_slow_wires(placed.placement)
    if placement is placed.placement:
        return part
    return PricedPhase(place_rounds(placement, placed.rounds, parameters=placed.parameters), part.share)
