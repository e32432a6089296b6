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

# Of a schedule: twice as many would gain at most 1 / 64 of the time that bytes take.
_MOST_SLICES = 64

# Sizes of which a part remembers the time: a plan asks for every number of slices.
_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of an option for one number of bytes."""

    total_s: float  # time until the last rank is done
    slices: int = 1  # pieces that the data is cut in, to be pipelined through the phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """An algorithm that does not apply."""

    algorithm: str  # its name
    why: str  # the reason, in words


class Part:
    """A phase on a machine. Options that have it in common share its times.

    Attributes:
        model: what travels, as far as it has to be looked at to know the time: where all nodes do the same, one of
            them.
        share: of the vector's bytes that it works on.
    """

    share: float

    def __init__(
        self, placed: Placed | Callable[[], Placed], share: float = 1.0, *, model: Placed | None = None
    ) -> None:
        """Make a phase.

        Args:
            placed: What travels, or what finds it out; then there is a model.
            share: Of the vector's bytes that it works on.
            model: What stands for it; all of it if None.
        """
        self._placed, self.share = placed, share
        if model is None:
            assert isinstance(placed, Placed)
            model = placed
        self.model = model
        # Steps overlap where ranks are not in step with each other: what they share bounds the whole all the same.
        dma_s_per_byte = model.parameters.dma_s_per_byte * model.rounds.sent_share
        self._least_s_per_byte = max(model.memory_s_per_byte(), dma_s_per_byte)
        self._wire_s_per_byte, self._delay_s = model.busiest_s_per_byte(), model.least_delay_s()
        self._known: dict[float, float] = {}
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
        if nbytes not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            least_s = max(self._least_s(nbytes), self._processors_s(nbytes))
            self._known[nbytes] = max(cost(self.model, self.share * nbytes).total_s, least_s)
        return self._known[nbytes]

    def _least_s(self, nbytes: float) -> float:
        memory_s = self.model.parameters.launch_s + self._least_s_per_byte * self.share * nbytes
        return max(memory_s, self._least_wire_s(nbytes))

    def _least_wire_s(self, nbytes: float) -> float:
        """Return when the busiest wire has carried all, the first message of which has to come to it."""
        return self.model.parameters.launch_s + self._delay_s + self._wire_s_per_byte * self.share * nbytes

    def _processors_s(self, nbytes: float) -> float:
        """Return when processors that ranks share have done all."""
        parameters = self.model.parameters
        busy_s = 0.0 if parameters.cores is None else self.placed.processors_s(self.share * nbytes)
        return parameters.launch_s + busy_s

    def breakdown(self, nbytes: float) -> CostBreakdown:
        """Return where that time goes."""
        found = cost(self.model, self.share * nbytes, explain=True).breakdown
        assert found is not None
        total_s = sum(getattr(found, each.name) for each in fields(found))
        wire_s = _beyond(self._least_wire_s(nbytes), total_s)
        memory_s = _beyond(self._least_s(nbytes), total_s + wire_s)
        # What shared processors take beyond that is of messages as much as they themselves count, and else of bytes.
        rest_s = _beyond(self._processors_s(nbytes), total_s + wire_s + memory_s)
        start_s = min(rest_s, self._processors_s(0.0) - self.model.parameters.launch_s)
        return replace(
            found,
            wire_s=found.wire_s + wire_s,
            memory_s=found.memory_s + memory_s + rest_s - start_s,
            start_s=found.start_s + start_s,
        )


def _beyond(bound_s: float, told_s: float) -> float:
    """Return by how much a bound is above what is told already; clocks have ticks of a picosecond."""
    return bound_s - told_s if bound_s - told_s > _TICK_S else 0.0


_TICK_S = 1e-11


class Option(ABC):
    """An algorithm fitted to a group's placement."""

    algorithm: str  # its name
    detail: str  # what it is made of, or where it runs; may be empty
    parts: tuple[Part, ...]  # its phases, one after the other
    tabled = True  # whether it has a table, so that it can run here
    of_library = False  # whether the machine's own library prices it

    @property
    def made_of(self) -> tuple[str, ...]:
        """Names of the algorithms that it is made of."""
        return (self.algorithm,)

    @abstractmethod
    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost for a vector of `nbytes`.

        Args:
            nbytes: Of the whole vector.
            below_s: What another option costs: one that cannot be cheaper need not look for its best form.
        """

    @abstractmethod
    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return where the time goes."""

    @abstractmethod
    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table, not yet proved."""

    @property
    def searches(self) -> bool:
        """Whether a price is the best of several forms, and the search is shorter if it is known what to beat."""
        return False

    def phases(self, slices: int) -> tuple[Part, ...]:
        """Return its phases with the data cut in so many slices."""
        return self.parts

    def in_slices_s(self, phases_s: Sequence[float], slices: int) -> float:
        """Return the time of so many slices, without the launch, if phases take `phases_s` for each."""
        return sum(phases_s)

    @property
    def label(self) -> str:
        """Name and detail in one."""
        return f"{self.algorithm} ({self.detail})" if self.detail else self.algorithm

    @property
    def steps(self) -> int:
        """Steps in which anything travels, with the data in one piece."""
        return sum(part.model.rounds.steps for part in self.parts)

    @property
    def sent_share(self) -> float:
        """Bytes that the busiest rank sends, over the bytes of the vector."""
        return sum(part.share * part.model.rounds.sent_share for part in self.parts)

    def hops(self) -> dict[str, int]:
        """Count the wires that the longest way of every step crosses, by kind."""
        total: dict[str, int] = {}
        for part in self.parts:
            for kind, count in part.model.hops().items():
                total[kind] = total.get(kind, 0) + count
        return total

    def busiest_wire(self) -> tuple[Placed, int, float] | None:
        """Return the wire that is busy longest, and how long for each byte of the vector; None if nothing travels."""
        busy_s = {part: part.share * part.model.busiest_s_per_byte() for part in self.parts}
        part = max(busy_s, key=lambda each: busy_s[each], default=None)
        wire = part.model.busiest_wire() if part else None
        return None if part is None or wire is None else (part.model, wire, busy_s[part])


class Wrapped(Option):
    """An option that is another one, but for what a subclass changes."""

    def __init__(self, option: Option) -> None:
        self.option = option
        self.algorithm: str = option.algorithm
        self.detail: str = option.detail
        self.parts: tuple[Part, ...] = option.parts
        self.tabled: bool = option.tabled
        self.of_library: bool = option.of_library

    @property
    def made_of(self) -> tuple[str, ...]:
        """Names of the algorithms that it is made of."""
        return self.option.made_of

    @property
    def searches(self) -> bool:
        """Whether a price is the best of several forms."""
        return self.option.searches

    @property
    def steps(self) -> int:
        """Steps in which anything travels."""
        return self.option.steps

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost for a vector of `nbytes`."""
        return self.option.price(nbytes, below_s=below_s)

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return where the time goes."""
        return self.option.breakdown(nbytes, slices)

    def phases(self, slices: int) -> tuple[Part, ...]:
        """Return its phases with the data cut in so many slices."""
        return self.option.phases(slices)

    def in_slices_s(self, phases_s: Sequence[float], slices: int) -> float:
        """Return the time of so many slices, without the launch, if phases take `phases_s` for each."""
        return self.option.in_slices_s(phases_s, slices)

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table, not yet proved."""
        return self.option.schedule(slices)


class Flat(Option):
    """One schedule over all ranks, on data in one piece or in as many slices as is fastest."""

    algorithm: str
    detail: str
    parts: tuple[Part]

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
            algorithm: Its name.
            detail: What distinguishes it on this group; may be empty.
            placed: The schedule on the machine, with the data in one piece.
            make: Generates the table; takes `slices` where the algorithm sends slices.
            sliced: Puts the schedule with so many slices on the machine; None if the algorithm sends none.
        """
        self.algorithm, self.detail, self.parts = algorithm, detail, (Part(placed),)
        self._make, self._sliced = make, sliced
        self._known = {1: self.parts[0]}

    @property
    def searches(self) -> bool:
        """Whether a price is the best of several numbers of slices."""
        return self._sliced is not None

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost with the best number of slices, a power of two.

        The time falls with the number of slices as long as bytes count for more than starts, then it rises. However
        many there are, it is more than the time without any bytes, and than bytes are on the busiest wire: where that
        is too much, the price is for one piece.
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

    def phases(self, slices: int) -> tuple[Part, ...]:
        """Return its one phase, with the data cut in so many slices."""
        return (self._part(slices),)

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return where the time goes."""
        return self._part(slices).breakdown(nbytes)

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table under the option's name, not yet proved."""
        made = self._make() if self._sliced is None else self._make(slices=slices)
        return replace(made, algorithm=self.algorithm)

    def _part(self, slices: int) -> Part:
        if slices not in self._known:
            assert self._sliced is not None, f"{self.algorithm} sends no slices"
            self._known[slices] = Part(self._sliced(slices))
        return self._known[slices]
