"""Two levels: inside nodes, and between them, with every pair of algorithms, pipelined in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypedDict

from ..collectives.generators import generate
from ..collectives.generators.composed import KINDS
from ..collectives.generators.families import READINGS, SPREADING
from ..collectives.generators.scattered import SCATTERS
from ..collectives.placement import Placement
from ..collectives.schedule import ROOTED, Schedule
from .flat import PlanRequest, expanded, fitted, rings_of
from .geometry import Geometry
from .option import Part, Rejected
from .parameters import Parameters
from .phased import Phased
from .placed import Placed, on
from .regular import regular_rounds
from .rounds import Rounds
from .stage import Sample, Stage

_GATHERS = ("mesh", "rdh", "kangaring", "multi_ring", "ring")
_EXCHANGES = ("mesh", "pairwise", "bruck")
_BY_NODE = ("binomial", "mesh")
_BETWEEN: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("mesh", "rdh", "ring", "one_shot", "recursive_doubling"),
    "reduce_scatter": ("mesh", "rdh", "ring"),
    "all_gather": ("mesh", "rdh", "ring"),
    "broadcast": ("mesh", "binomial", "chain", "double_binary_tree"),
    "reduce": ("mesh", "binomial", "chain", "double_binary_tree"),
    "all_to_all": _EXCHANGES,
    "gather": _BY_NODE,
    "scatter": _BY_NODE,
}
_FITTED_INSIDE = (*READINGS, "broadcast", "reduce")


class _Figures(TypedDict):
    parameters: Parameters


@dataclass(frozen=True, kw_only=True)
class _Levels:
    """A group of equal nodes on a machine."""

    request: PlanRequest
    placement: Placement
    parameters: Parameters

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        return self.request.geometry.nodes

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the same place in every node."""
        return tuple(zip(*self.nodes, strict=True))

    @property
    def home(self) -> tuple[int, int]:
        """The root's node, and its place there."""
        return divmod(self.request.root, len(self.nodes[0]))

    @cached_property
    def inside(self) -> Geometry:
        """One node stands for all."""
        return self.request.geometry.part(self.nodes[0])

    @cached_property
    def between(self) -> Geometry:
        """One rank of each node stands for all."""
        return self.request.geometry.part(self.places[0])

    @cached_property
    def stage(self) -> Stage:
        """What has to be looked at to know what a phase takes."""
        return Stage.of(self.request.geometry, self.placement, self.home[0])

    def all_nodes(
        self, collective: str, algorithms: Sequence[str], *, folded: bool, continues: bool = False
    ) -> dict[str, Part]:
        """Put a phase inside all nodes on the machine, with each algorithm that applies."""
        of_one = self.stage.inside(folded)
        return self._phases(collective, algorithms, self.inside, self.nodes, of_one, continues=continues)

    def root_node(self, collective: str) -> dict[str, Part]:
        """Put a phase inside the root's node on the machine."""
        (home, place), last = self.home, self.request.collective == "reduce"
        copies = place if self.request.collective == "broadcast" else None
        of_one = self.stage.root_node()
        return self._phases(
            collective, SCATTERS, self.inside, [self.nodes[home]], of_one, root=place, continues=last, copies=copies
        )

    def across(self, collective: str, *, share: float) -> Iterator[tuple[str, Part, bool]]:
        """Put the phase between nodes on the machine: for all places at once, each with a share of the vector.

        Yields:
            An algorithm, the phase, and whether one unit stands for all in it.
        """
        ring = self.stage.ring
        for algorithm in _BETWEEN[collective]:
            alike = regular_rounds(collective, algorithm, len(self.nodes), ring) if ring else None
            if alike is None:
                of_some = self.stage.between()
                found = self._phases(
                    collective,
                    [algorithm],
                    self.between,
                    self.places,
                    of_some,
                    share=share,
                    root=self.home[0],
                    continues=collective == "broadcast",
                )
                yield from ((name, part, False) for name, part in found.items())
            else:
                yield algorithm, self._folded(collective, algorithm, alike, share), True

    def _folded(self, collective: str, algorithm: str, alike: Rounds, share: float) -> Part:
        """Put one unit's part of a phase between nodes on the machine."""
        unit = self.stage.unit
        places = list(zip(*unit.groups, strict=True))
        model = on(unit.placement, alike.copied(places, unit.placement.size), **self._figures)
        return Part(lambda: self._whole(collective, algorithm), share, model=model)

    def _whole(self, collective: str, algorithm: str) -> Placed:
        """Put all of a phase between nodes on the machine."""
        request = PlanRequest(collective=collective, geometry=self.between)
        found = expanded(request, algorithm)
        assert not isinstance(found, Rejected)
        return on(self.placement, found.rounds.copied(self.places, self.request.geometry.size), **self._figures)

    @property
    def _figures(self) -> _Figures:
        return {"parameters": self.parameters}

    def _phases(
        self,
        collective: str,
        algorithms: Sequence[str],
        geometry: Geometry,
        groups: Sequence[Sequence[int]],
        model: Sample | None,
        *,
        share: float = 1.0,
        root: int = 0,
        continues: bool = False,
        copies: int | None = None,
    ) -> dict[str, Part]:
        phases = {}
        request = PlanRequest(collective=collective, geometry=geometry, root=root if collective in ROOTED else 0)
        for algorithm in algorithms:
            found = expanded(request, algorithm)
            if not isinstance(found, Rejected):
                asked = found.rounds.continued() if continues else found.rounds
                asked = asked if copies is None else asked.while_copying(copies)
                phases[algorithm] = self._part(asked, groups, model, share)
        return phases

    def _part(self, asked: Rounds, groups: Sequence[Sequence[int]], model: Sample | None, share: float) -> Part:
        def whole() -> Placed:
            return on(self.placement, asked.copied(groups, self.request.geometry.size), **self._figures)

        if model is None:
            return Part(whole(), share)
        copied = asked.copied(model.groups, model.placement.size).likewise(*model.alike)
        return Part(whole, share, model=on(model.placement, copied, **self._figures))

    def maker(self, intra: str, inter: str, scatter: str | None) -> Callable[[int], Schedule]:
        """Return what generates the table of these algorithms for a number of slices."""

        def make(slices: int) -> Schedule:
            collective, g = self.request.collective, self.request.geometry
            # Only what was fitted to the machine takes options: patterns in which every rank owns a chunk.
            near = fitted(intra, self.inside)[1] if collective in _FITTED_INSIDE else {}
            if collective in ("gather", "scatter") and intra == "multi_ring":
                near = {"rings": self.inside.device_rings}
            far = fitted(inter, self.between)[1] if collective in READINGS and inter in SPREADING else {}
            levels = partial(
                generate, collective, "hierarchical", g.size, root=self.request.root, nodes=len(self.nodes)
            )
            fitting = partial(levels, intra=intra, inter=inter, intra_options=near, inter_options=far, slices=slices)
            if scatter is None:
                return fitting()
            return fitting(scatter=scatter, rings=rings_of(scatter, self.inside))

        return make


def two_level_options(
    request: PlanRequest, placement: Placement, parameters: Parameters
) -> tuple[list[Phased], list[Rejected]]:
    """Compose every algorithm inside nodes with every one between them.

    An all-reduce reduces and scatters inside nodes, exchanges the parts between them, and gathers inside. A
    reduce-scatter is its first half, an all-gather its second. A broadcast scatters inside the root's node, passes the
    parts on between nodes, and gathers inside; a reduce goes the other way. A gather goes between nodes first, a
    scatter and an all-to-all inside them first.

    Returns:
        All combinations, or why there are none.
    """
    if request.collective not in KINDS or not request.considers("hierarchical"):
        return [], []
    if (why := request.geometry.why_not_by_node()) is not None:
        return [], [Rejected(algorithm="hierarchical", why=why)]
    levels = _Levels(request=request, placement=placement, parameters=replace(parameters, launch_s=0.0))
    return [
        Phased("hierarchical", detail, parts, parameters, make, most_slices=parameters.most_slices)
        for detail, parts, make in _combined(levels)
    ], []


_Combination = tuple[str, tuple[Part, ...], Callable[[int], Schedule]]


def _combined(levels: _Levels) -> Iterator[_Combination]:
    collective = levels.request.collective
    if collective in READINGS:
        yield from _spread(levels, collective)
    elif collective in ("broadcast", "reduce"):
        yield from _from_root(levels, collective)
    else:
        yield from _blockwise(levels, collective)


def _spread(levels: _Levels, collective: str) -> Iterator[_Combination]:
    ends: dict[bool, tuple[dict[str, Part], dict[str, Part]]] = {}
    for inter, middle, folded in levels.across(collective, share=1 / len(levels.places)):
        if folded not in ends:
            ends[folded] = (
                levels.all_nodes("reduce_scatter", _GATHERS, folded=folded) if collective != "all_gather" else {},
                levels.all_nodes("all_gather", _GATHERS, folded=folded, continues=True)
                if collective != "reduce_scatter"
                else {},
            )
        before, after = ends[folded]
        for intra in before or after:
            parts = tuple(part for part in (before.get(intra), middle, after.get(intra)) if part is not None)
            yield f"{intra} inside nodes, {inter} between", parts, levels.maker(intra, inter, None)


def _from_root(levels: _Levels, collective: str) -> Iterator[_Combination]:
    backwards = collective == "reduce"
    spreading = "reduce_scatter" if backwards else "all_gather"
    wide = levels.all_nodes(spreading, _GATHERS, folded=False, continues=not backwards)
    ends = levels.root_node("gather" if backwards else "scatter")
    for inter, middle, _ in levels.across(collective, share=1 / len(levels.places)):
        for intra, spread in wide.items():
            for scatter, end in ends.items():
                parts = (spread, middle, end) if backwards else (end, middle, spread)
                detail = f"{intra} and {scatter} inside nodes, {inter} between"
                yield detail, parts, levels.maker(intra, inter, scatter)


def _blockwise(levels: _Levels, collective: str) -> Iterator[_Combination]:
    everywhere, near = collective == "all_to_all", dict[bool, dict[str, Part]]()
    for inter, middle, folded in levels.across(collective, share=1.0 if everywhere else 1 / len(levels.places)):
        if folded not in near:
            near[folded] = (
                levels.all_nodes(collective, _EXCHANGES, folded=folded) if everywhere else levels.root_node(collective)
            )
        for intra, part in near[folded].items():
            parts = (middle, part) if collective == "gather" else (part, middle)
            yield f"{intra} inside nodes, {inter} between", parts, levels.maker(intra, inter, None)
