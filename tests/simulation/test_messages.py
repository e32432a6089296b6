"""Messages between pairs that are joined alike are costed once, and use wires of their own."""

import numpy as np
import pytest

import topology
from overlap.collectives.placement import place
from overlap.cost import parameters
from overlap.simulation import Conditions, demand
from overlap.simulation.conditions import SlowWires
from overlap.simulation.loads import Resources
from overlap.simulation.messages import SimulatedMessages

SLOW = Conditions(seed=3, slow_wire_share=0.3, slow_wire_factor=0.5)


def messages(cluster, conditions=SLOW):
    return SimulatedMessages(parameters(cluster), Resources(cluster), SlowWires(conditions))


def told(found):
    """Return all that a demand says."""
    needs = [(section.end_ns, section.needs) for section in found.sections]
    return found.ranks.tolist(), found.marks_ns, [each.tolist() for each in found.positions], needs


@pytest.mark.parametrize("name", ["trn1.32xlarge x2", "trn2.48xlarge", "dl1.24xlarge x2", "local"])
@pytest.mark.parametrize("conditions", [Conditions(), SLOW], ids=["calm", "slow wires"])
def test_it_is_what_the_pair_alone_would_be_told(name, conditions):
    cluster = topology.cluster(name, ranks=4, nodes=2) if name == "local" else topology.cluster(name)
    shared = messages(cluster, conditions)
    for src in range(0, cluster.world_size, 5):
        for dst in range(0, cluster.world_size, 7):
            alone = messages(cluster, conditions)
            assert told(shared.demand(src, dst, 1 << 20, 70)) == told(alone.demand(src, dst, 1 << 20, 70))


def test_a_kind_of_way_is_costed_once(monkeypatch):
    costed = []

    def cost(placed, nbytes, **settings):
        costed.append(nbytes)
        return original(placed, nbytes, **settings)

    original = demand.cost
    monkeypatch.setattr(demand, "cost", cost)
    shared = messages(topology.cluster("trn2.48xlarge x2"), Conditions())
    found = shared.demand(0, 64, 4096, 0)
    assert costed
    costed.clear()
    others = [shared.demand(rank, 64 + rank, 4096, 0) for rank in range(1, 64)]
    assert shared.demand(0, 64, 4096, 0) is found
    assert not costed
    assert {each.marks_ns for each in others} == {found.marks_ns}
    assert len({frozenset(each.sections[0].needs) for each in (found, *others)}) == 64


def test_a_message_is_on_its_wires_first_and_then_on_the_way():
    found = messages(topology.cluster("trn1.32xlarge"), Conditions()).demand(3, 17, 1 << 16, 0)
    busy, underway = found.sections
    assert busy.end_ns < underway.end_ns == found.alone_ns
    assert len(busy.needs) > len(underway.needs) > 0  # of the collective processors
    assert max(busy.needs.values()) == pytest.approx(1, abs=1e-3)
    for section in found.sections:
        assert section.needs == dict(zip(section.resources.tolist(), section.shares.tolist(), strict=True))
        assert np.all(section.shares > 0)


@pytest.mark.parametrize("name", ["trn1.32xlarge x2", "trn2.48xlarge", "dl1.24xlarge x2"])
def test_it_takes_the_wires_from_the_sender_to_the_receiver(name):
    cluster = topology.cluster(name)
    resources, shared = Resources(cluster), messages(cluster, Conditions())
    for src, dst in [(0, cluster.world_size - 1), (cluster.world_size - 1, 0), (3, 5), (5, 3)]:
        found = shared.demand(src, dst, 1 << 20, 0)
        way = place(cluster, [src, dst]).routes(np.array([0]), np.array([1])).wire
        taken = {each for each in found.resources.tolist() if each >= resources.wires(np.array([0]))[0]}
        assert taken == set(resources.wires(way).tolist())
        assert found.ranks.tolist() == [src, dst]
