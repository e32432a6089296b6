"""What stands for all of a group of equal nodes takes exactly what all of them take."""

from dataclasses import replace
from pathlib import Path

import pytest

import topology
from overlap.collectives.generators.composed import PHASES
from overlap.cost import cost
from overlap.cost.candidates import candidates
from overlap.cost.select import plan
from overlap.cost.symmetry import EqualNodes


def whole_s(part, nbytes):
    """Return the time of a phase by all of its messages."""
    share = part.share * nbytes
    wire_s = part.placed.least_delay_s() + part.placed.busiest_s_per_byte() * share  # the first message has to come
    return max(cost(part.placed, share).total_s, part.placed.memory_s_per_byte() * share, wire_s)


@pytest.mark.parametrize("op", PHASES)
@pytest.mark.parametrize(
    "name",
    [
        f"{Path(__file__).parents[1] / 'switched.toml'} x3",
        "dl1.24xlarge x4",
        *(pytest.param(f"trn1.32xlarge x{n}", marks=pytest.mark.slow) for n in (2, 3)),
    ],
)
def test_a_few_ranks_take_what_all_take(name, op):
    machine = topology.cluster(name)
    ranks, root = tuple(range(machine.world_size)), 5 if op in ("broadcast", "reduce", "gather", "scatter") else 0
    options, _ = candidates(op, machine, ranks, root, None, True, "hierarchical", False)
    parts = {part for option in options for part in option.parts}
    assert any(part.model.placement.size < machine.world_size for part in parts)
    for part in parts:
        for nbytes in (1e3, 1e8):
            assert part.total_s(nbytes) == pytest.approx(whole_s(part, nbytes), rel=1e-9)


def test_the_same_places_of_all_nodes():
    """Half of each node's ranks, some of which share adapters with others of the group."""
    machine = topology.cluster("trn1.32xlarge x2")
    ranks = tuple(range(8)) + tuple(range(32, 40))
    for op in ("all_reduce", "broadcast"):
        for option in candidates(op, machine, ranks, 0, None, True, "hierarchical", False)[0]:
            for part in option.parts:
                assert part.total_s(1e6) == pytest.approx(whole_s(part, 1e6), rel=1e-9)


EVERYDAY = ("all_reduce", "broadcast", "all_to_all")  # one of each family
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def prices(machine, op, ranks):
    """Return what every option of two levels takes, of three sizes, in one, two and three pieces."""
    candidates.cache_clear()
    root = len(ranks) * 5 // 8 + 1 if op in ROOTED else 0
    options, _ = candidates(op, machine, ranks, root, None, True, "hierarchical", False)
    return [
        (
            option.detail,
            nbytes,
            slices,
            option.in_slices_s([part.total_s(nbytes / slices) for part in option.parts], slices),
        )
        for option in options
        for nbytes in (1e3, 1e6, 1e8)
        for slices in (1, 2, 3)
    ]


def check_one_stands_for_all(monkeypatch, name, op, servers, per_node):
    """Price a group that has the first ranks of some servers of every UltraServer, by a few of them and by all."""
    machine = topology.cluster(name)
    place = [divmod(rank, machine.ranks_per_node) for rank in range(machine.world_size)]
    ranks = tuple(
        rank for rank, (node, local) in enumerate(place) if node % machine.servers in servers and local < per_node
    )
    few = prices(machine, op, ranks)
    looked_at = EqualNodes.of

    def of_all(geometry, placement, home):
        return replace(looked_at(geometry, placement, home), folds=False)

    monkeypatch.setattr(EqualNodes, "of", of_all)
    assert few == prices(machine, op, ranks)
    candidates.cache_clear()


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("name", "op"),
    [
        *(("trn2u.48xlarge x12", op) for op in ("all_reduce", "all_to_all", "reduce")),
        ("trn2u.48xlarge x16", "all_gather"),  # a power of two
    ],
)
def test_one_ultraserver_takes_what_all_take(name, op, monkeypatch):
    check_one_stands_for_all(monkeypatch, name, op, servers=(0, 1, 2, 3), per_node=4)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [(0, 1, 2, 3), (1, 2), (2,)])
@pytest.mark.parametrize("op", PHASES)
@pytest.mark.parametrize("name", [f"trn2u.48xlarge x{4 * units}" for units in (2, 3, 4, 7, 8)])
def test_some_servers_of_one_ultraserver_take_what_those_of_all_take(name, op, servers, monkeypatch):
    check_one_stands_for_all(monkeypatch, name, op, servers, per_node=8)


@pytest.mark.slow
@pytest.mark.parametrize("op", PHASES)
@pytest.mark.parametrize("name", ["trn2u.48xlarge x8", "trn2u.48xlarge x16", "trn2.48xlarge x3"])
def test_whole_servers_are_priced_exactly_by_a_few_ranks(name, op, monkeypatch):
    check_one_stands_for_all(monkeypatch, name, op, servers=(0, 1, 2, 3), per_node=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "op"),
    [
        *(("trn2.48xlarge x256", op) for op in EVERYDAY),
        ("trn2u.48xlarge x256", "all_to_all"),
        *(
            pytest.param(name, op, marks=pytest.mark.slow)
            for name in ("trn2.48xlarge x256", "trn2u.48xlarge x256")
            for op in PHASES
            if op not in EVERYDAY or (name == "trn2u.48xlarge x256" and op != "all_to_all")
        ),
    ],
)
def test_the_largest_machines_are_planned_from_a_few_ranks(name, op):
    """16,384 ranks: no phase has a tenth of them looked at, nor more than one unit where all ranks do the same."""
    machine = topology.cluster(name)
    found = plan(op, 1 << 26, machine)
    assert found.algorithm == "hierarchical"
    most = 1639 if op in ROOTED else machine.ranks_per_unit
    assert max(part.model.placement.size for part in found.option.parts) <= most
    narrow = [each for each in found.alternatives if each.why_not and "only two-level algorithms" in each.why_not]
    assert narrow
