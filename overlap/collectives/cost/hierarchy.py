"""Two levels: inside nodes, and between them, with every pair of algorithms, pipelined in slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from ..generators import generate
from ..layouts import READINGS, two_levels
from ..placement import Placement
from ..schedule import Schedule
from .flat import Request, expanded, pattern_of
from .geometry import Geometry
from .maxplus import Breakdown
from .option import Option, Part, Price, Rejected
from .parameters import Parameters
from .placed import on

__all__ = ["TwoLevel", "pipeline_s", "two_level_options"]

_INSIDE = ("mesh", "rdh", "kangaring", "multi_ring", "ring")
_BETWEEN: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("mesh", "rdh", "ring", "one_shot", "recursive_doubling"),
    "reduce_scatter": ("mesh", "rdh", "ring"),
    "all_gather": ("mesh", "rdh", "ring"),
}


def pipeline_s(phases_s: Sequence[float], slices: int) -> float:
    """Return the time of `slices` pieces through phases that take `phases_s` for each piece.

    With T for the phases' times on all data, and no latencies, this is max(T) (slices - 1) / slices + sum(T) / slices.
    """
    return sum(phases_s) + (slices - 1) * max(phases_s)


class TwoLevel(Option):
    """Phases one after the other, each in all nodes, or between all sets of ranks with the same place, at once."""

    algorithm = "hierarchical"

    def __init__(
        self, detail: str, parts: tuple[Part, ...], parameters: Parameters, make: Callable[[int], Schedule]
    ) -> None:
        self.detail, self.parts, self._parameters, self._make = detail, parts, parameters, make

    def price(self, nbytes: float) -> Price:
        """Return the cost with the best number of slices."""
        choices = (self._price(nbytes, slices) for slices in range(1, self._parameters.most_slices + 1))
        return min(choices, key=lambda price: price.total_s)

    def _price(self, nbytes: float, slices: int) -> Price:
        phases_s = [part.total_s(nbytes / slices) for part in self.parts]
        return Price(total_s=self._parameters.launch_s + pipeline_s(phases_s, slices), slices=slices)

    def breakdown(self, nbytes: float, slices: int) -> Breakdown:
        """Return where the time goes: the slowest phase counts once for each slice, the others once."""
        slowest = max(self.parts, key=lambda part: part.total_s(nbytes / slices))
        total = dict.fromkeys((each.name for each in fields(Breakdown)), 0.0)
        for part in self.parts:
            for name, duration_s in asdict(part.breakdown(nbytes / slices)).items():
                total[name] += duration_s * (slices if part is slowest else 1)
        total["launch_s"] += self._parameters.launch_s
        return Breakdown(**total)

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table on data in so many slices, not yet proved."""
        return self._make(slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """A group of equal nodes on a machine."""

    request: Request
    placement: Placement
    parameters: Parameters

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        return self.request.geometry.nodes

    @property
    def inside(self) -> Geometry:
        """One node stands for all."""
        return self.request.geometry.part(self.nodes[0])

    @property
    def between(self) -> Geometry:
        """One rank of each node stands for all."""
        return self.request.geometry.part([node[0] for node in self.nodes])

    def inner(self, collective: str) -> dict[str, Part]:
        """Put the phase of a collective inside nodes on the machine, with each algorithm that applies."""
        return self._phases(collective, _INSIDE, self.inside, self.nodes, continues=collective == "all_gather")

    def outer(self, collective: str) -> dict[str, Part]:
        """Put the phase between nodes on the machine, with each algorithm that applies."""
        places = tuple(zip(*self.nodes, strict=True))
        return self._phases(collective, _BETWEEN[collective], self.between, places, share=1 / len(places))

    def _phases(
        self,
        collective: str,
        algorithms: Sequence[str],
        geometry: Geometry,
        groups: Sequence[Sequence[int]],
        *,
        share: float = 1.0,
        continues: bool = False,
    ) -> dict[str, Part]:
        phases = {}
        for algorithm in algorithms:
            found = expanded(Request(collective=collective, geometry=geometry), algorithm)
            if not isinstance(found, Rejected):
                asked = found.rounds.continued() if continues else found.rounds
                copied = asked.copied(groups, self.request.geometry.size)
                phases[algorithm] = Part(on(self.placement, copied, parameters=self.parameters), share)
        return phases

    def maker(self, intra: str, inter: str) -> Callable[[int], Schedule]:
        """Return what generates the table of two algorithms for a number of slices."""
        collective = self.request.collective

        def make(slices: int) -> Schedule:
            inside, across = pattern_of(intra, self.inside), pattern_of(inter, self.between)
            assert inside is not None
            # Only an all-reduce has algorithms that are no pattern.
            between = across[1]() if across else generate("all_reduce", inter, len(self.nodes))
            return two_levels(collective, between, inside[1](), slices)

        return make


def two_level_options(
    request: Request, placement: Placement, parameters: Parameters
) -> tuple[list[TwoLevel], list[Rejected]]:
    """Compose every algorithm inside nodes with every one between them.

    An all-reduce reduces and scatters inside nodes, exchanges the parts between them, and gathers inside. A
    reduce-scatter is its first half, an all-gather its second.

    Returns:
        All combinations, or why there are none.
    """
    collective = request.collective
    if collective not in READINGS:
        return [], []
    if (why := request.geometry.why_not_by_node()) is not None:
        return [], [Rejected(algorithm="hierarchical", why=why)]
    levels = _Levels(request=request, placement=placement, parameters=replace(parameters, launch_s=0.0))
    before = levels.inner("reduce_scatter") if collective != "all_gather" else {}
    after = levels.inner("all_gather") if collective != "reduce_scatter" else {}
    options = []
    for inter, middle in levels.outer(collective).items():
        for intra in before or after:
            parts = tuple(part for part in (before.get(intra), middle, after.get(intra)) if part is not None)
            detail = f"{intra} inside nodes, {inter} between"
            options.append(TwoLevel(detail, parts, parameters, levels.maker(intra, inter)))
    return options, []
