"""What stands for all of a group of equal nodes takes exactly what all of them take."""

import pytest

import topology
from overlap.collectives.cost import cost
from overlap.collectives.cost.candidates import candidates
from overlap.collectives.generators.composed import KINDS
from overlap.collectives.select import plan


def whole_s(part, nbytes):
    """Return the time of a phase by all of its messages."""
    least_s_per_byte = max(part.placed.memory_s_per_byte(), part.placed.busiest_s_per_byte())
    return max(cost(part.placed, part.share * nbytes).total_s, least_s_per_byte * part.share * nbytes)


@pytest.mark.parametrize("op", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "p5.48xlarge x3",
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


@pytest.mark.parametrize("op", [op if op in EVERYDAY else pytest.param(op, marks=pytest.mark.slow) for op in KINDS])
def test_the_largest_machines_are_planned_from_a_few_ranks(op):
    """16,384 ranks: no phase that is looked at has as many as a tenth of them."""
    machine = topology.cluster("trn2.48xlarge x256")
    found = plan(op, 1 << 26, machine)
    assert found.algorithm == "hierarchical"
    assert max(part.model.placement.size for part in found.option.parts) < 1640
    narrow = [each for each in found.alternatives if each.why_not and "only what has two levels" in each.why_not]
    assert narrow
