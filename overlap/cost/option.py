"""Options that a collective could become: the price for a number of bytes, and the schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import inf

from ..collectives.placement import Floats
from ..collectives.schedule import Schedule
from .maxplus import CostBreakdown, cost
from .placed import Placed

# Most slices of a schedule: twice as many would gain at most 1 / 64 of the time of the bytes.
_MOST_SLICES = 64

# Sizes with a remembered time in each phase: a plan asks for every number of slices.
_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of an option for one number of bytes."""

    total_s: float  # time until the last rank is done
    slices: int = 1  # pieces of the data, pipelined through the phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """An algorithm that does not apply."""

    algorithm: str  # name of the algorithm
    why: str  # the reason


class PricedPhase:
    """A phase on a machine. Options that have it in common share its times.

    Attributes:
        model: rounds that suffice to compute the time: if all nodes do the same, those of one node.
        share: share of the vector's bytes that the phase works on.
    """

    share: float

    def __init__(
        self, placed: Placed | Callable[[], Placed], share: float = 1.0, *, model: Placed | None = None
    ) -> None:
        """Make a phase.

        Args:
            placed: Rounds of all ranks, or a function that makes them; then there is a model.
            share: Share of the vector's bytes that the phase works on.
            model: Rounds that represent all; None if `placed` does.
        """
        self._placed, self.share = placed, share
        if model is None:
            assert isinstance(placed, Placed)
            model = placed
        self.model = model
        # Steps overlap if ranks are not in step with each other: shared resources bound the whole nevertheless.
        dma_s_per_byte = model.parameters.dma_s_per_byte * model.rounds.sent_share
        self._least_s_per_byte = max(model.memory_s_per_byte(), dma_s_per_byte)
        self._wire_s_per_byte, self._delay_s = model.busiest_s_per_byte(), model.least_delay_s()
        self._times_s: dict[float, float] = {}
        self._busy: Floats | None = None

    @property
    def busy_s_per_slot(self) -> Floats:
        """Busy time of each reducer, memory and wire, for each byte of a slot."""
        if self._busy is None:
            self._busy = self.model.busy_s_per_slot()
        return self._busy

    @property
    def placed(self) -> Placed:
        """Rounds of all ranks on the machine."""
        if not isinstance(self._placed, Placed):
            self._placed = self._placed()
        return self._placed

    def total_s(self, nbytes: float) -> float:
        """Return the time for a vector of `nbytes`."""
        if nbytes not in self._times_s:
            if len(self._times_s) >= _REMEMBERED:
                self._times_s.clear()
            least_s = max(self._least_s(nbytes), self._processors_s(nbytes))
            self._times_s[nbytes] = max(cost(self.model, self.share * nbytes).total_s, least_s)
        return self._times_s[nbytes]

    def _least_s(self, nbytes: float) -> float:
        memory_s = self.model.parameters.launch_s + self._least_s_per_byte * self.share * nbytes
        return max(memory_s, self._least_wire_s(nbytes))

    def _least_wire_s(self, nbytes: float) -> float:
        """Return the time at which the busiest wire has carried all bytes, including the delay of its first message."""
        return self.model.parameters.launch_s + self._delay_s + self._wire_s_per_byte * self.share * nbytes

    def _processors_s(self, nbytes: float) -> float:
        """Return the time at which shared processors have done all work."""
        parameters = self.model.parameters
        busy_s = 0.0 if parameters.cores is None else self.placed.processors_s(self.share * nbytes)
        return parameters.launch_s + busy_s

    def breakdown(self, nbytes: float) -> CostBreakdown:
        """Return the terms of the time."""
        breakdown = cost(self.model, self.share * nbytes, explain=True).breakdown
        assert breakdown is not None
        total_s = sum(getattr(breakdown, term.name) for term in fields(breakdown))
        wire_s = _beyond(self._least_wire_s(nbytes), total_s)
        memory_s = _beyond(self._least_s(nbytes), total_s + wire_s)
        # Excess time of shared processors: their time without bytes counts as starts of messages, the rest as memory.
        rest_s = _beyond(self._processors_s(nbytes), total_s + wire_s + memory_s)
        start_s = min(rest_s, self._processors_s(0.0) - self.model.parameters.launch_s)
        return replace(
            breakdown,
            wire_s=breakdown.wire_s + wire_s,
            memory_s=breakdown.memory_s + memory_s + rest_s - start_s,
            start_s=breakdown.start_s + start_s,
        )


def _beyond(bound_s: float, counted_s: float) -> float:
    """Return the part of a bound beyond the counted time; clocks have ticks of a picosecond."""
    return bound_s - counted_s if bound_s - counted_s > _TICK_S else 0.0


_TICK_S = 1e-11


class AlgorithmOption(ABC):
    """An algorithm fitted to a group's placement."""

    algorithm: str  # name of the algorithm
    detail: str  # its parts, or its place; may be empty
    parts: tuple[PricedPhase, ...]  # its phases, one after the other
    tabled = True  # whether it has a table, so that it can run here
    of_library = False  # whether the machine's own library prices it

    @property
    def made_of(self) -> tuple[str, ...]:
        """Names of the algorithms that make up the option."""
        return (self.algorithm,)

    @abstractmethod
    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost for a vector of `nbytes`.

        Args:
            nbytes: Bytes of the whole vector.
            below_s: Price of another option: an option that cannot be cheaper need not search its best form.
        """

    @abstractmethod
    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return the terms of the time."""

    @abstractmethod
    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table, not yet proved."""

    @property
    def searches(self) -> bool:
        """Whether a price is the best of several forms; a known upper bound shortens the search."""
        return False

    def phases(self, slices: int) -> tuple[PricedPhase, ...]:
        """Return its phases with the data cut in slices."""
        return self.parts

    def in_slices_s(self, phases_s: Sequence[float], slices: int) -> float:
        """Return the time of all slices, without the launch, if phases take `phases_s` for each slice."""
        return sum(phases_s)

    @property
    def label(self) -> str:
        """Name and detail as text."""
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
        """Count the wires on the longest way of every step, by kind."""
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


class Wrapped(AlgorithmOption):
    """An option that changes some properties of another one."""

    def __init__(self, option: AlgorithmOption) -> None:
        self.option = option
        self.algorithm: str = option.algorithm
        self.detail: str = option.detail
        self.parts: tuple[PricedPhase, ...] = option.parts
        self.tabled: bool = option.tabled
        self.of_library: bool = option.of_library

    @property
    def made_of(self) -> tuple[str, ...]:
        """Names of the algorithms that make up the option."""
        return self.option.made_of

    @property
    def searches(self) -> bool:
        """Whether a price is the best of several forms."""
        return self.option.searches

    @property
    def steps(self) -> int:
        """Number of steps with messages."""
        return self.option.steps

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost for a vector of `nbytes`."""
        return self.option.price(nbytes, below_s=below_s)

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return the terms of the time."""
        return self.option.breakdown(nbytes, slices)

    def phases(self, slices: int) -> tuple[PricedPhase, ...]:
        """Return its phases with the data cut in slices."""
        return self.option.phases(slices)

    def in_slices_s(self, phases_s: Sequence[float], slices: int) -> float:
        """Return the time of all slices, without the launch, if phases take `phases_s` for each slice."""
        return self.option.in_slices_s(phases_s, slices)

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table, not yet proved."""
        return self.option.schedule(slices)


class Flat(AlgorithmOption):
    """One schedule over all ranks, with the data in one piece or in the best number of slices."""

    algorithm: str
    detail: str
    parts: tuple[PricedPhase]

    def __init__(
        self,
        algorithm: str,
        detail: str,
        placed: Placed,
        make: Callable[..., Schedule],
        *,
        sliced: Callable[[int], Placed] | None = None,
    ) -> None:
        """Make an option.

        Args:
            algorithm: Name of the algorithm.
            detail: Difference from the same algorithm on other groups; may be empty.
            placed: The schedule on the machine, with the data in one piece.
            make: Generates the table; takes `slices` if the algorithm sends slices.
            sliced: Puts the schedule with some number of slices on the machine; None if the algorithm sends none.
        """
        self.algorithm, self.detail, self.parts = algorithm, detail, (PricedPhase(placed),)
        self._make, self._sliced = make, sliced
        self._phases = {1: self.parts[0]}

    @property
    def searches(self) -> bool:
        """Whether a price is the best of several numbers of slices."""
        return self._sliced is not None

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
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
            more = Price(total_s=self._part(slices).total_s(nbytes), slices=slices)
            if more.total_s >= best.total_s:
                break
            best, slices = more, 2 * slices
        return best

    def phases(self, slices: int) -> tuple[PricedPhase, ...]:
        """Return its only phase, with the data cut in slices."""
        return (self._part(slices),)

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return the terms of the time."""
        return self._part(slices).breakdown(nbytes)

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table under the option's name, not yet proved."""
        schedule = self._make() if self._sliced is None else self._make(slices=slices)
        return replace(schedule, algorithm=self.algorithm)

    def _part(self, slices: int) -> PricedPhase:
        if slices not in self._phases:
            assert self._sliced is not None, f"{self.algorithm} sends no slices"
            self._phases[slices] = PricedPhase(self._sliced(slices))
        return self._phases[slices]
