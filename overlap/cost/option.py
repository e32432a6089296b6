"""Options that a collective could become: the price for a number of bytes, and the schedule.

An option is one schedule over all ranks (`Flat`), phases one after the other (`Phased`), or has no schedule and is
priced by a formula (`Formula`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from math import inf
from typing import NamedTuple

from ..collectives.schedule import Schedule
from ..errors import ScheduleError
from .clocks import CostBreakdown
from .parameters import CostParameters
from .phase import PricedPhase
from .pipeline import Uses, find_binding_uses, in_slices_s
from .placed import Placed

# Most slices of a flat schedule: twice as many would gain at most 1 / 64 of the time of the bytes.
_MOST_SLICES = 64
# Further slices of phases must save more than another order of addition does.
_ROUNDING = 1e-12
# Up to this many slices of phases every number is tried, and beyond it powers of two.
_FEW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of an option for one number of bytes."""

    total_s: float  # time until the last rank is done
    slices: int = 1  # pieces of the data, pipelined through the phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """An algorithm that does not apply to a group, and the reason."""

    algorithm: str  # name of the algorithm
    why: str  # the reason


class BlockExits(NamedTuple):
    """Waits of an option's steps for the ways out of the blocks of a fabric."""

    s_per_byte: float  # time of all bytes on the busiest way out, for each byte of the vector
    held_up_s_per_byte: float  # delay of steps beyond their wires, for each byte of the vector


class AlgorithmOption(ABC):
    """An algorithm fitted to a group's placement.

    Attributes:
        algorithm: Name of the algorithm.
        detail: Its parts, or its place; may be empty.
        parts: Its phases, one after the other.
        make: Generates the table, not yet proved, with the data in a number of slices.
        made_of: Names of the algorithms that make up the option.
        exits: Waits for the ways out of blocks; None where the machine's file has no levels of a fabric.
    """

    tabled = True  # whether it has a table, so that it can run here

    def __init__(
        self,
        algorithm: str,
        detail: str,
        parts: tuple[PricedPhase, ...],
        make: Callable[[int], Schedule],
        made_of: Sequence[str] = (),
    ) -> None:
        self.algorithm: str = algorithm
        self.detail: str = detail
        self.parts: tuple[PricedPhase, ...] = parts
        self.make: Callable[[int], Schedule] = make
        self.made_of: tuple[str, ...] = (algorithm, *made_of)
        self.exits: BlockExits | None = None

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost for a vector of `nbytes`, with the waits for ways out of blocks.

        With several slices, one can leave a block while others are still inside.

        Args:
            nbytes: Bytes of the whole vector.
            below_s: Price of another option: an option that cannot be cheaper need not search its best form.
        """
        price = self._price(nbytes, below_s)
        if self.exits is None:
            return price
        longer_s = self.exits.held_up_s_per_byte * nbytes if price.slices == 1 else 0.0
        least_s = self._price(0, inf).total_s + self.exits.s_per_byte * nbytes
        return replace(price, total_s=max(price.total_s + longer_s, least_s))

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return the terms of the time; waits at the switches between nodes count as bytes on wires."""
        breakdown = self._breakdown(nbytes, slices)
        if self.exits is None:
            return breakdown
        beyond_s = self.price(nbytes).total_s - self._price(nbytes, inf).total_s
        return replace(breakdown, wire_s=breakdown.wire_s + beyond_s)

    @abstractmethod
    def _price(self, nbytes: float, below_s: float) -> Price:
        """Return the cost without a fabric."""

    @abstractmethod
    def _breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return the terms of the time without a fabric."""

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table of transfers for a number of slices, not yet proved.

        Raises:
            ScheduleError: If there is none.
        """
        return self.make(slices)

    @property
    def searches(self) -> bool:
        """Whether a price is the best of several forms; a known upper bound shortens the search."""
        return False

    def phases(self, slices: int) -> tuple[PricedPhase, ...]:
        """Return the phases of the option with the data cut in `slices`."""
        return self.parts

    def in_slices_s(self, phases_s: Sequence[float], slices: int) -> float:
        """Return the time of all slices, without the launch, if phases take `phases_s` for each slice."""
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
        """Bytes that the busiest rank sends, over the bytes of the vector."""
        return sum(part.share * part.model.rounds.sent_share for part in self.parts)

    def hops(self) -> dict[str, int]:
        """Count by kind the wires that the slowest message of every step crosses."""
        total: dict[str, int] = {}
        for part in self.parts:
            for kind, count in part.model.hops().items():
                total[kind] = total.get(kind, 0) + count
        return total

    def busiest_wire(self) -> tuple[Placed, int, float] | None:
        """Return the busiest wire, with its busy time for each byte of the vector; None without messages."""
        busy_s = {part: part.share * part.model.busiest_s_per_byte() for part in self.parts}
        part = max(busy_s, key=lambda phase: busy_s[phase], default=None)
        wire = part.model.busiest_wire() if part else None
        return None if part is None or wire is None else (part.model, wire, busy_s[part])


class Flat(AlgorithmOption):
    """One schedule over all ranks, with the data in one piece or in the best number of slices.

    Args:
        algorithm: Name of the algorithm.
        detail: Difference from the same algorithm on other groups; may be empty.
        placed: The schedule on the machine, with the data in one piece.
        make: Generates the table; takes `slices` if the algorithm sends slices.
        sliced: Puts the schedule with some number of slices on the machine; None if the algorithm sends none.
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
        self._make, self._sliced = make, sliced
        super().__init__(algorithm, detail, (PricedPhase(placed),), partial(_flat_table, algorithm, make, bool(sliced)))
        self._phases = {1: self.parts[0]}

    @property
    def searches(self) -> bool:
        """Whether a price is the best of several numbers of slices."""
        return self._sliced is not None

    def _price(self, nbytes: float, below_s: float) -> Price:
        """Return the cost with the best number of slices, a power of two.

        The time falls with the number of slices as long as bytes count for more than starts, then it rises. The time
        without bytes and the time of bytes on the busiest wire are lower bounds: if one is too much, the price is for
        one piece.
        """
        whole = self.parts[0]
        best, slices = Price(total_s=whole.total_s(nbytes)), 2
        if self._sliced is None:
            return best
        hopeless = max(whole.total_s(0), whole.model.busiest_s_per_byte() * nbytes) >= below_s
        while slices <= _MOST_SLICES and not hopeless:
            more = Price(total_s=self._sliced_phase(slices).total_s(nbytes), slices=slices)
            if more.total_s >= best.total_s:
                break
            best, slices = more, 2 * slices
        return best

    def _breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        return self._sliced_phase(slices).breakdown(nbytes)

    def phases(self, slices: int) -> tuple[PricedPhase, ...]:
        """Return the only phase, with the data cut in `slices`."""
        return (self._sliced_phase(slices),)

    def _sliced_phase(self, slices: int) -> PricedPhase:
        """Return the phase with the data in slices; its rounds are made once for each number of slices."""
        if slices not in self._phases:
            assert self._sliced is not None, f"{self.algorithm} sends no slices"
            self._phases[slices] = PricedPhase(self._sliced(slices))
        return self._phases[slices]


def _flat_table(algorithm: str, make: Callable[..., Schedule], sends_slices: bool, slices: int) -> Schedule:
    """Return a table under the name of its option."""
    return replace(make(slices=slices) if sends_slices else make(), algorithm=algorithm)


class Phased(AlgorithmOption):
    """Phases one after the other, with the data in the best number of slices, pipelined where their wires allow it.

    Args:
        algorithm: Name of the algorithm.
        detail: Names of its phases.
        parts: The phases, without the launch of the collective.
        parameters: Parameters of the cost model.
        make: Generates the table with the data in a number of slices.
        made_of: Names of the algorithms of its phases.
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
        super().__init__(algorithm, detail, parts, make, made_of)
        self._parameters = parameters
        self._uses: Uses | None = None

    def _price(self, nbytes: float, below_s: float) -> Price:
        """Return the cost with the best number of slices, of equal ones the smallest."""
        prices = (self._price_in_slices(slices, nbytes) for slices in self._slice_counts(nbytes))
        return min(prices, key=lambda price: price.total_s * (1 + _ROUNDING * price.slices))

    def _slice_counts(self, nbytes: float) -> Iterator[int]:
        """Yield the numbers of slices that are worth a look: all small ones, then powers of two."""
        yield 1
        least, slices = self._parameters.slice_bytes, 2
        while slices <= self._parameters.most_slices and nbytes >= slices * least:
            yield slices
            slices += 1 if slices < _FEW else slices

    def _price_in_slices(self, slices: int, nbytes: float) -> Price:
        phases_s = [part.total_s(nbytes / slices) for part in self.parts]
        return Price(total_s=self._parameters.launch_s + self.in_slices_s(phases_s, slices), slices=slices)

    def in_slices_s(self, phases_s: Sequence[float], slices: int) -> float:
        """Return the time of all slices, without the launch, if phases take `phases_s` for each slice."""
        if slices == 1:
            return sum(phases_s)
        if self._uses is None:
            self._uses = find_binding_uses(self.parts)
        return in_slices_s(phases_s, slices, self._uses)

    def _breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return the terms of the time: each phase counts once, and further slices count for the slowest phase."""
        phases_s = [part.total_s(nbytes / slices) for part in self.parts]
        slowest = max(range(len(phases_s)), key=lambda phase: phases_s[phase])
        further_s = self.in_slices_s(phases_s, slices) - sum(phases_s)
        total = dict.fromkeys((term.name for term in fields(CostBreakdown)), 0.0)
        for number, part in enumerate(self.parts):
            times = 1 + further_s / phases_s[slowest] if number == slowest and phases_s[slowest] else 1.0
            for name, duration_s in asdict(part.breakdown(nbytes / slices)).items():
                total[name] += duration_s * times
        total["launch_s"] += self._parameters.launch_s
        return CostBreakdown(**total)


class FormulaTerms(NamedTuple):
    """Terms of a time that a formula gives."""

    launch_s: float = 0.0  # to meet
    memory_s: float = 0.0  # reads and writes of memory


class Formula(AlgorithmOption):
    """An option without a table, with a price that a formula gives.

    Args:
        algorithm: Name of the algorithm.
        detail: Its place; may be empty.
        terms: Formula of the terms for a number of bytes.
        refusal: Reason why there is no table.
    """

    tabled = False

    def __init__(
        self,
        algorithm: str,
        detail: str,
        terms: Callable[[float], FormulaTerms],
        refusal: str,
    ) -> None:
        super().__init__(algorithm, detail, (), partial(_refused_table, refusal))
        self._terms = terms

    def _price(self, nbytes: float, below_s: float) -> Price:
        return Price(total_s=sum(self._terms(nbytes)))

    def _breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        terms = self._terms(nbytes)
        return CostBreakdown(
            waiting_s=0.0,
            launch_s=terms.launch_s,
            start_s=0.0,
            latency_s=0.0,
            wire_s=0.0,
            memory_s=terms.memory_s,
            reduction_s=0.0,
        )


def _refused_table(refusal: str, slices: int) -> Schedule:
    raise ScheduleError(refusal)
