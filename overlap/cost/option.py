"""Options that a collective could become: the price for a number of bytes, and the schedule.

An option is one schedule over all ranks (`Flat`), phases one after the other (`Phased`), or has no schedule and is
priced by a formula (`Formula`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from ..collectives.schedule import Schedule
from ..errors import ScheduleError
from .clocks import CostBreakdown
from .parameters import CostParameters
from .phase import PricedPhase
from .pipeline import Uses, find_binding_uses, pipelined_time_s
from .placed import Placed

# Most slices of a flat schedule: twice as many would gain at most 1 / 64 of the time of the bytes.
_MOST_SLICES = 64
# A larger number of slices must save more than this share of the time: less may be rounding of sums.
_ROUNDING = 1e-12
# Up to this many slices of phases every number is tried, and beyond it powers of two.
_FEW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of an option for one number of bytes."""

    total_s: float  # time until the last rank finishes
    slices: int = 1  # number of slices of the data, which are pipelined through the phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """An algorithm that does not apply to a group, and the reason."""

    algorithm: str  # name of the algorithm
    why: str  # the reason


class BlockExits(NamedTuple):
    """Waits of an option for the bandwidth out of the blocks of a fabric (see `levels.FabricLevel`)."""

    s_per_byte: float  # time that all bytes take to leave the busiest block, for each byte of the vector
    held_up_s_per_byte: float  # delay of steps beyond the times of their wires, for each byte of the vector


class AlgorithmOption(ABC):
    """An algorithm fitted to a group's placement.

    Attributes:
        algorithm: Name of the algorithm.
        detail: Algorithms of its phases, or how it is fitted to the group, in words; may be empty.
        parts: Phases of the algorithm, one after the other, with the data in one piece.
        made_of: Names of the algorithms that make up the option: its own, and those of its phases.
        exits: Waits for the bandwidth out of blocks; None if the machine's file has no levels of a fabric.
        tabled: Whether the option has a table of transfers, so that it can run as a program.
        searches: Whether `price` searches for the best number of slices; a known lower price shortens the search.

    Args:
        algorithm: Name of the algorithm.
        detail: Algorithms of its phases, or how it is fitted to the group, in words; may be empty.
        parts: Phases of the algorithm, one after the other; () if a formula gives the price.
        made_of: Names of the algorithms of its phases.
    """

    tabled: bool = True
    searches: bool = False

    def __init__(
        self, algorithm: str, detail: str, parts: tuple[PricedPhase, ...], made_of: Sequence[str] = ()
    ) -> None:
        self.algorithm: str = algorithm
        self.detail: str = detail
        self.parts: tuple[PricedPhase, ...] = parts
        self.made_of: tuple[str, ...] = (algorithm, *made_of)
        self.exits: BlockExits | None = None

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the price for a vector of `nbytes`, including waits for the bandwidth out of blocks.

        Args:
            nbytes: Bytes of the whole vector.
            below_s: Price of another option. An option that cannot be cheaper returns a rough price, without a search
                for the best number of slices.
        """
        price = self._price_without_exits(nbytes, below_s)
        if self.exits is None:
            return price
        # With several slices, one slice leaves a block while others are inside, so that these waits are hidden.
        longer_s = self.exits.held_up_s_per_byte * nbytes if price.slices == 1 else 0.0
        least_s = self._price_without_exits(0, inf).total_s + self.exits.s_per_byte * nbytes
        return replace(price, total_s=max(price.total_s + longer_s, least_s))

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return the price split into its causes; waits at the switches between nodes are added to `wire_s`.

        Args:
            nbytes: Bytes of the whole vector.
            slices: Number of slices, from `Price.slices`.
        """
        breakdown = self._breakdown_without_exits(nbytes, slices)
        if self.exits is None:
            return breakdown
        beyond_s = self.price(nbytes).total_s - self._price_without_exits(nbytes, below_s=inf).total_s
        return replace(breakdown, wire_s=breakdown.wire_s + beyond_s)

    @abstractmethod
    def _price_without_exits(self, nbytes: float, below_s: float) -> Price:
        """Return the price without waits at the switches between nodes; arguments: see `price`."""

    @abstractmethod
    def _breakdown_without_exits(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return the terms of the time without waits at the switches between nodes; arguments: see `breakdown`."""

    @abstractmethod
    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table of transfers with the data in `slices`, not yet proved.

        Raises:
            ScheduleError: The option has no table.
        """

    def phases(self, slices: int) -> tuple[PricedPhase, ...]:
        """Return the phases when the data is cut in `slices`.

        Here they are the same for any number of slices; `Flat` has another phase for each number.
        """
        return self.parts

    def sliced_time_s(self, phases_s: Sequence[float], slices: int) -> float:
        """Return the time of all slices, without the launch. Here data is not cut, and phases do not overlap.

        Args:
            phases_s: Time of each phase for one slice.
            slices: Number of slices.
        """
        return sum(phases_s)

    @property
    def label(self) -> str:
        """Name and detail of the algorithm in words."""
        return f"{self.algorithm} ({self.detail})" if self.detail else self.algorithm

    @property
    def steps(self) -> int:
        """Number of steps with messages, with the data in one piece."""
        return sum(part.model.rounds.steps for part in self.parts)

    @property
    def sent_share(self) -> float:
        """Bytes that the busiest rank sends, divided by the bytes of the vector."""
        return sum(part.share * part.model.rounds.sent_share for part in self.parts)

    def hops(self) -> dict[str, int]:
        """Return the number of wires of each kind that the slowest messages of all steps cross, added up."""
        total: dict[str, int] = {}
        for part in self.parts:
            for kind, count in part.model.hops().items():
                total[kind] = total.get(kind, 0) + count
        return total

    def busiest_wire(self) -> tuple[Placed, int, float] | None:
        """Return the wire that is busy longest; None without messages.

        Returns:
            The rounds on the machine, the number of the wire there, and its busy time for each byte of the vector.
        """
        busy_s = {part: part.share * part.model.busiest_s_per_byte() for part in self.parts}
        part = max(busy_s, key=lambda phase: busy_s[phase], default=None)
        wire = part.model.busiest_wire() if part else None
        return None if part is None or wire is None else (part.model, wire, busy_s[part])


class Flat(AlgorithmOption):
    """One schedule over all ranks, with the data in one piece or in the best number of slices.

    Args:
        algorithm: Name of the algorithm.
        detail: How the algorithm is fitted to the group, in words; may be empty.
        placed: The schedule on the machine, with the data in one piece.
        make: Generates the table; takes `slices` if the algorithm sends slices.
        sliced: Function from a number of slices to the schedule on the machine; None: the algorithm sends no slices.
    """

    def __init__(
        self,
        algorithm: str,
        detail: str,
        placed: Placed,
        make: Callable[..., Schedule],
        *,
        sliced: Callable[[int], Placed] | None = None,
    ) -> None:
        super().__init__(algorithm, detail, (PricedPhase(placed),))
        self._make, self._place_sliced = make, sliced
        self.searches: bool = sliced is not None
        self._phases = {1: self.parts[0]}

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table of transfers, with the option's name as its `algorithm`."""
        table = self._make(slices=slices) if self._place_sliced is not None else self._make()
        return replace(table, algorithm=self.algorithm)

    def _price_without_exits(self, nbytes: float, below_s: float) -> Price:
        """Return the price with the best number of slices, a power of two; arguments: see `price`.

        With more slices the time first falls, then rises, as each slice has to be started: stop at the first rise. If a
        lower bound of the time is `below_s` or more, return the price for one piece without a search.
        """
        whole = self.parts[0]
        best, slices = Price(total_s=whole.total_s(nbytes)), 2
        if self._place_sliced is None:
            return best
        # Lower bounds for any number of slices: the time without bytes, and that of all bytes on the busiest wire.
        hopeless = max(whole.total_s(0), whole.model.busiest_s_per_byte() * nbytes) >= below_s
        while slices <= _MOST_SLICES and not hopeless:
            more = Price(total_s=self._sliced_phase(slices).total_s(nbytes), slices=slices)
            if more.total_s >= best.total_s:
                break
            best, slices = more, 2 * slices
        return best

    def _breakdown_without_exits(self, nbytes: float, slices: int) -> CostBreakdown:
        return self._sliced_phase(slices).breakdown(nbytes)

    def phases(self, slices: int) -> tuple[PricedPhase, ...]:
        """Return the only phase, with the data cut in `slices`."""
        return (self._sliced_phase(slices),)

    def _sliced_phase(self, slices: int) -> PricedPhase:
        """Return the phase with the data in `slices`, made at the first use of this number."""
        if slices not in self._phases:
            assert self._place_sliced is not None, f"{self.algorithm} sends no slices"
            self._phases[slices] = PricedPhase(self._place_sliced(slices))
        return self._phases[slices]


class Phased(AlgorithmOption):
    """Phases one after the other, with the data in the best number of slices, which are pipelined through the phases.

    Args:
        algorithm: Name of the algorithm.
        detail: Algorithms of the phases, in words.
        parts: The phases, with times that exclude the launch of the collective.
        parameters: Parameters of the cost model.
        make: Function from a number of slices to the table.
        made_of: Names of the algorithms of the phases.
    """

    def __init__(
        self,
        algorithm: str,
        detail: str,
        parts: tuple[PricedPhase, ...],
        parameters: CostParameters,
        make: Callable[[int], Schedule],
        made_of: Sequence[str] = (),
    ) -> None:
        super().__init__(algorithm, detail, parts, made_of)
        self._parameters, self._make = parameters, make

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table of transfers with the data in `slices`."""
        return self._make(slices)

    @cached_property
    def _resource_uses(self) -> Uses:
        """Use of shared wires, memories and reducers by the phases; see `pipeline.Uses`."""
        return find_binding_uses(self.parts)

    def _price_without_exits(self, nbytes: float, below_s: float) -> Price:
        """Return the price with the best number of slices; of equal prices, that with the fewest slices."""
        prices = (self._price_in_slices(slices, nbytes) for slices in self._candidate_slice_counts(nbytes))
        return min(prices, key=lambda price: price.total_s * (1 + _ROUNDING * price.slices))

    def _candidate_slice_counts(self, nbytes: float) -> Iterator[int]:
        """Yield the numbers of slices to price: 1, 2, 3, 4, 8, 16, ... up to the limits of the parameters."""
        yield 1
        least, slices = self._parameters.slice_bytes, 2
        while slices <= self._parameters.most_slices and nbytes >= slices * least:
            yield slices
            slices += 1 if slices < _FEW else slices

    def _price_in_slices(self, slices: int, nbytes: float) -> Price:
        phases_s = [part.total_s(nbytes / slices) for part in self.parts]
        return Price(total_s=self._parameters.launch_s + self.sliced_time_s(phases_s, slices), slices=slices)

    def sliced_time_s(self, phases_s: Sequence[float], slices: int) -> float:
        """Return the time of all slices in the pipeline, without the launch; arguments: see `AlgorithmOption`."""
        return sum(phases_s) if slices == 1 else pipelined_time_s(phases_s, slices, self._resource_uses)

    def _breakdown_without_exits(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return the terms of the time: of each phase for one slice, and of the slowest phase for further slices."""
        phases_s = [part.total_s(nbytes / slices) for part in self.parts]
        slowest = max(range(len(phases_s)), key=lambda phase: phases_s[phase])
        further_s = self.sliced_time_s(phases_s, slices) - sum(phases_s)
        total = asdict(CostBreakdown())
        for number, part in enumerate(self.parts):
            times = 1 + further_s / phases_s[slowest] if number == slowest and phases_s[slowest] else 1.0
            for name, duration_s in asdict(part.breakdown(nbytes / slices)).items():
                total[name] += duration_s * times
        total["launch_s"] += self._parameters.launch_s
        return CostBreakdown(**total)


class Formula(AlgorithmOption):
    """An option without a table, whose price a formula gives.

    Args:
        algorithm: Name of the algorithm.
        detail: How the algorithm is fitted to the group, in words; may be empty.
        terms: Function from a number of bytes to the terms of the time.
        refusal: Text of the error of `schedule`: why there is no table.
    """

    tabled = False

    def __init__(self, algorithm: str, detail: str, terms: Callable[[float], CostBreakdown], refusal: str) -> None:
        super().__init__(algorithm, detail, ())
        self._terms, self._refusal = terms, refusal

    def schedule(self, slices: int = 1) -> Schedule:
        """Raise `ScheduleError`: the option has no table."""
        raise ScheduleError(self._refusal)

    def _price_without_exits(self, nbytes: float, below_s: float) -> Price:
        return Price(total_s=self._terms(nbytes).total_s)

    def _breakdown_without_exits(self, nbytes: float, slices: int) -> CostBreakdown:
        return self._terms(nbytes)
