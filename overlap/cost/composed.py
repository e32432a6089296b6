"""Compositions on a machine: every pair of an algorithm inside nodes and one between them, priced phase by phase.

The phases of a collective are in `collectives.generators.composed.PHASES`; its tables are made from the same phases. On
one level there is no phase between nodes, and all ranks count as the root's node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product

from ..collectives.generators import generate
from ..collectives.generators.composed import PHASES, Phase, Scope, phase_starts
from ..collectives.generators.families import READINGS, SPREADING
from ..collectives.generators.scattered import SCATTERS, scatter_steps
from ..collectives.placement import Placement
from ..collectives.schedule import ROOTED, Schedule
from ..collectives.slicing import pipeline_phases
from .flat import WIDE, PlanRequest, fit_algorithm, fitting_options, is_too_wide, scatter_rings
from .geometry import Geometry
from .option import Phased, Rejected
from .parameters import CostParameters
from .phase import PricedPhase
from .placed import Placed, place_rounds
from .regular import regular_rounds
from .rounds import Rounds
from .symmetry import EqualNodes, Representatives

_GATHERS = ("mesh", "rdh", "kangaring", "multi_ring", "ring")
_GATHERS_ON_ONE_LEVEL = (*_GATHERS, "swing", "bucket")
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
_ON_ONE_LEVEL = {"broadcast": "scatter_all_gather", "reduce": "reduce_scatter_gather"}


def two_level_options(
    request: PlanRequest, placement: Placement, parameters: CostParameters
) -> tuple[list[Phased], list[Rejected]]:
    """Return the options of "hierarchical": every algorithm inside nodes with every algorithm between them.

    Args:
        request: The collective and its group.
        placement: Where the ranks of the group are.
        parameters: Overheads and efficiencies.

    Returns:
        All combinations, and the reason against the algorithm if it does not apply. Both lists are empty if the request
        or the collective excludes it.
    """
    if request.collective not in PHASES or not request.considers("hierarchical"):
        return [], []
    if (why := request.geometry.hierarchical_misfit_reason) is not None:
        return [], [Rejected(algorithm="hierarchical", why=why)]
    nodes = request.geometry.nodes
    return _Levels(request=request, placement=placement, parameters=parameters, nodes=nodes).options(), []


def rooted_options(
    request: PlanRequest, placement: Placement, parameters: CostParameters
) -> tuple[list[Phased], list[Rejected]]:
    """Return the options of a broadcast or reduce on one level: every scatter with every all-gather.

    The table is a little faster than the price: a rank that has passed a chunk on does not get it again.

    Args:
        request: The collective and its group.
        placement: Where the ranks of the group are.
        parameters: Overheads and efficiencies.

    Returns:
        All combinations, and the reason against the algorithm if it does not apply. Both lists are empty if the request
        or the collective excludes it.
    """
    algorithm = _ON_ONE_LEVEL.get(request.collective)
    if algorithm is None or not request.considers(algorithm):
        return [], []
    if is_too_wide(request):
        return [], [Rejected(algorithm=algorithm, why=WIDE)]
    if request.geometry.size < 2:
        return [], [Rejected(algorithm=algorithm, why="a single rank has no other rank to send to")]
    nodes = (tuple(range(request.geometry.size)),)
    return _Levels(request=request, placement=placement, parameters=parameters, nodes=nodes).options(), []


_Names = Mapping[Scope, str]  # by scope: name of the algorithm in a combination


@dataclass(frozen=True, kw_only=True)
class _Levels:
    """Prices the two levels of a group: inside its nodes, and between them. All nodes have equally many ranks.

    A group on one level counts as a single node.
    """

    request: PlanRequest  # the collective and the group
    placement: Placement  # where the ranks of the group are
    parameters: CostParameters
    nodes: tuple[tuple[int, ...], ...]  # group ranks of each node
    # Results of `_price_phase_inside`, by its arguments.
    _priced_inside: dict[tuple[Phase, bool], dict[str, PricedPhase]] = field(default_factory=dict)

    @property
    def has_one_level(self) -> bool:
        """Whether all ranks are in one node, so that no phase runs between nodes."""
        return len(self.nodes) == 1

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks by place in a node: `places[p][n]` is rank p of node n."""
        return tuple(zip(*self.nodes, strict=True))

    @property
    def root_node(self) -> int:
        """Number of the node of the root."""
        return self.request.root // len(self.nodes[0])

    @cached_property
    def inside_geometry(self) -> Geometry:
        """Geometry of the first node, which represents all nodes."""
        return self.request.geometry if self.has_one_level else self.request.geometry.geometry_of(self.nodes[0])

    @cached_property
    def between_geometry(self) -> Geometry:
        """Geometry of the first rank of each node; these ranks represent those of other places."""
        return self.request.geometry.geometry_of(self.places[0])

    @cached_property
    def equal_nodes(self) -> EqualNodes:
        """The nodes of the group; gives the sampled ranks that represent all ranks in a phase."""
        return EqualNodes.of(self.request.geometry, self.placement, self.root_node)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of the collective in the order of time; on one level, without phases between nodes."""
        return tuple(
            phase
            for phase in PHASES[self.request.collective]
            if not (self.has_one_level and phase.level is Scope.BETWEEN)
        )

    def options(self) -> list[Phased]:
        """Return an option for every combination of algorithms on the levels."""
        algorithm = _ON_ONE_LEVEL[self.request.collective] if self.has_one_level else "hierarchical"
        return [
            Phased(
                algorithm,
                self._detail_text(names),
                parts,
                self.parameters,
                partial(self._one_level_table if self.has_one_level else self._two_level_table, names),
                [name for name in names.values() if name],
            )
            for names, parts in self._algorithm_combinations()
        ]

    def _algorithm_combinations(self) -> Iterator[tuple[_Names, tuple[PricedPhase, ...]]]:
        """Yield every combination of algorithms: names by scope, and priced phases in the order of time."""
        # Entries: name, priced phase, and whether one unit represents all units. On one level there is no such phase.
        between = (("", None, False),) if self.has_one_level else self._price_between_phase()
        for between_name, between_phase, folded in between:
            near = {
                phase: self._price_phase_inside(phase, folded)
                for phase in self.phases
                if phase.level is not Scope.BETWEEN
            }
            by_level = {phase.level: tuple(parts) for phase, parts in near.items()}
            levels = [level for level in (Scope.INSIDE, Scope.HOME) if level in by_level]
            for chosen in product(*(by_level[level] for level in levels)):
                names: dict[Scope, str] = dict(zip(levels, chosen, strict=True))
                names[Scope.BETWEEN] = between_name
                parts = (near[phase][names[phase.level]] if phase in near else between_phase for phase in self.phases)
                yield names, tuple(part for part in parts if part is not None)

    def _detail_text(self, names: _Names) -> str:
        if self.has_one_level:
            return ", ".join(names[phase.level] for phase in self.phases)
        inside = " and ".join(name for level, name in names.items() if level is not Scope.BETWEEN)
        return f"{inside} inside nodes, {names[Scope.BETWEEN]} between"

    # -- phases on the machine -----------------------------------------------------------------------------------

    def _price_phase_inside(self, phase: Phase, folded: bool) -> dict[str, PricedPhase]:
        """Return a phase in scope INSIDE or HOME, priced with each algorithm that applies, by the algorithm's name.

        With `folded`, one unit (a node or UltraServer) is priced, which represents all units.
        """
        key = phase, folded
        if key in self._priced_inside:
            return self._priced_inside[key]
        if phase.level is Scope.HOME:
            names: tuple[str, ...] = SCATTERS
            groups, root = [self.nodes[self.root_node]], self.request.root % len(self.nodes[0])
            sample = None if self.has_one_level else self.equal_nodes.root_sample()
        else:
            gathers = _GATHERS_ON_ONE_LEVEL if self.has_one_level else _GATHERS
            names = _EXCHANGES if phase.collective == "all_to_all" else gathers
            groups, root = list(self.nodes), 0
            sample = None if self.has_one_level else self.equal_nodes.inside_sample(folded)
        self._priced_inside[key] = self._price_algorithms(phase, names, self.inside_geometry, groups, sample, root=root)
        return self._priced_inside[key]

    def _price_between_phase(self) -> Iterator[tuple[str, PricedPhase, bool]]:
        """Yield (algorithm, priced phase between nodes, whether one unit represents all units in it).

        The ranks of one place in all nodes are a group in this phase. A unit is a node or an UltraServer.
        """
        phase = next(phase for phase in self.phases if phase.level is Scope.BETWEEN)
        # In an all-to-all a group works on whole vectors; in other collectives on the share of one rank of a node.
        share = 1.0 if phase.collective == "all_to_all" else 1 / len(self.places)
        ring = self.equal_nodes.ring
        for name in _BETWEEN[phase.collective]:
            alike = regular_rounds(phase.collective, name, len(self.nodes), ring) if ring else None
            if alike is not None:
                yield name, self._price_one_unit(phase, name, alike, share), True
                continue
            sample = self.equal_nodes.between_sample()
            geometry, root = self.between_geometry, self.root_node
            parts = self._price_algorithms(phase, [name], geometry, self.places, sample, root=root, share=share)
            yield from ((name, part, False) for name, part in parts.items())

    def _price_one_unit(self, phase: Phase, algorithm: str, alike: Rounds, share: float) -> PricedPhase:
        """Price the phase between nodes by one unit, which represents all: a message to another unit returns to it.

        `alike` has the rounds of the algorithm for the nodes of one unit, one rank a node; for `share` see
        `_price_algorithms`.
        """
        unit = self.equal_nodes.unit_sample
        places = list(zip(*unit.groups, strict=True))
        model = self._place_rounds(unit.placement, alike.copy_to_groups(places, unit.placement.size))

        def place_all_ranks() -> Placed:
            fitted = fit_algorithm(PlanRequest(collective=phase.collective, geometry=self.between_geometry), algorithm)
            assert not isinstance(fitted, Rejected)
            rounds = fitted.rounds.copy_to_groups(self.places, self.request.geometry.size)
            return self._place_rounds(self.placement, rounds)

        return PricedPhase(place_all_ranks, share, model=model)

    def _price_algorithms(
        self,
        phase: Phase,
        algorithms: Sequence[str],
        geometry: Geometry,
        groups: Sequence[Sequence[int]],
        sample: Representatives | None,
        *,
        root: int,
        share: float = 1.0,
    ) -> dict[str, PricedPhase]:
        """Return a phase, priced with each algorithm that applies, by the algorithm's name.

        The `groups`, of group ranks of the collective, run the phase at the same time; `geometry` is that of one of
        them, `root` a position in it, and `share` the share of the vector that each works on. If there is a `sample` of
        ranks, only these are priced.
        """
        parts = {}
        root_of = root if phase.collective in ROOTED else 0
        request = PlanRequest(collective=phase.collective, geometry=geometry, root=root_of)
        for algorithm in algorithms:
            fitted = fit_algorithm(request, algorithm)
            if not isinstance(fitted, Rejected):
                rounds = fitted.rounds.without_local_work() if phase.continues else fitted.rounds
                rounds = rounds.with_copy_at(root) if phase.copies else rounds
                parts[algorithm] = self._price_rounds(rounds, groups, sample, share)
        return parts

    def _price_rounds(
        self, rounds: Rounds, groups: Sequence[Sequence[int]], sample: Representatives | None, share: float
    ) -> PricedPhase:
        """Return the priced phase of groups that all run the same rounds; arguments: see `_price_algorithms`."""

        def place_all_ranks() -> Placed:
            return self._place_rounds(self.placement, rounds.copy_to_groups(groups, self.request.geometry.size))

        if sample is None:
            return PricedPhase(place_all_ranks(), share)
        sample_rounds = rounds.copy_to_groups(sample.groups, sample.placement.size).with_amounts_like(*sample.alike)
        return PricedPhase(place_all_ranks, share, model=self._place_rounds(sample.placement, sample_rounds))

    def _place_rounds(self, placement: Placement, rounds: Rounds) -> Placed:
        return place_rounds(placement, rounds, parameters=self._phase_parameters)

    @cached_property
    def _phase_parameters(self) -> CostParameters:
        """Cost parameters of one phase: without the launch time, which is added once for the whole collective."""
        return replace(self.parameters, launch_s=0.0)

    # -- tables --------------------------------------------------------------------------------------------------

    def _one_level_table(self, names: _Names, slices: int) -> Schedule:
        """Return the table on one level, a scatter and an all-gather, with the data in `slices` that are pipelined."""
        collective, size, root = self.request.collective, self.inside_geometry.size, self.request.root
        gather, scatter = names[Scope.INSIDE], names[Scope.HOME]
        rings = scatter_rings(scatter, self.inside_geometry)
        make: Callable[..., Schedule] = partial(generate, collective, _ON_ONE_LEVEL[collective], size, root=root)
        _, gather_options = fitting_options(gather, self.inside_geometry)
        whole = make(gather=gather, scatter=scatter, gather_options=gather_options, rings=rings)
        scattering = scatter_steps(size, scatter, root, rings)
        steps = {Scope.HOME: (scattering,), Scope.INSIDE: (whole.steps - scattering,)}
        return pipeline_phases(whole, phase_starts(collective, steps), slices)

    def _two_level_table(self, names: _Names, slices: int) -> Schedule:
        """Return the table of "hierarchical" with the algorithms in `names`, in `slices`, fitted to the machine."""
        collective, inter = self.request.collective, names[Scope.BETWEEN]
        intra, scatter = names.get(Scope.INSIDE, names.get(Scope.HOME, "")), names.get(Scope.HOME)
        # Only patterns in which every rank owns a chunk have options that fit them to the machine (`fitting_options`).
        takes_options = Scope.INSIDE in names and collective != "all_to_all"
        near = fitting_options(intra, self.inside_geometry)[1] if takes_options else {}
        if Scope.INSIDE not in names and intra == "multi_ring":
            near = {"rings": self.inside_geometry.device_rings}
        far = fitting_options(inter, self.between_geometry)[1] if collective in READINGS and inter in SPREADING else {}
        make: Callable[..., Schedule] = partial(
            generate,
            collective,
            "hierarchical",
            self.request.geometry.size,
            root=self.request.root,
            nodes=len(self.nodes),
            intra=intra,
            inter=inter,
            intra_options=near,
            inter_options=far,
            slices=slices,
        )
        if scatter is None or Scope.INSIDE not in names:
            return make()
        return make(scatter=scatter, rings=scatter_rings(scatter, self.inside_geometry))
