"""Routes in columns are the routes of the cluster."""

import numpy as np
import pytest

import topology
from overlap.collectives.placement import place
from topology import TopologyError

from .star import Star

MACHINES = {
    "trn2.48xlarge": None,
    "trn2.48xlarge lnc=1": (0, 1, 7, 8, 40, 127),
    "trn2.48xlarge x3": (0, 1, 5, 63, 64, 70, 128, 191),
    "trn1.32xlarge x2": (0, 1, 2, 3, 31, 32, 33, 63),
    "trn1n.32xlarge x2": (0, 3, 33, 63),
    "trn2u.48xlarge x8": (0, 5, 64, 130, 255, 256, 300, 511),
    "inf2.24xlarge": None,
    "dl1.24xlarge x2": None,
}


@pytest.mark.parametrize(("name", "ranks"), MACHINES.items())
def test_every_wire_of_every_way(name, ranks):
    cluster = topology.cluster(name)
    placement = place(cluster, ranks)
    world = ranks or tuple(range(cluster.world_size))
    pairs = [(a, b) for a in range(len(world)) for b in range(len(world)) if a != b]
    src, dst = np.array(pairs).T
    routes, numbers = placement.routes(src, dst), {}
    wires = placement.wires()
    for row, (a, b) in enumerate(pairs):
        found = routes.wire[routes.first[row] : routes.first[row + 1]].tolist()
        for wire, link in zip(found, cluster.route(world[a], world[b]), strict=True):
            assert numbers.setdefault(wire, link) == link
            assert (wires.kind[wire], wires.latency_s[wire], wires.bytes_per_s[wire]) == (
                link.kind,
                link.latency_s,
                link.bandwidth_bytes_per_s,
            )
            assert placement.describe(wire).startswith(f"{link.src.role} {link.src.node}.") or link.src.role == "fabric"
    assert len(set(numbers.values())) == len(numbers), "two numbers for one wire"


def test_ranks_of_a_device_share_its_memory():
    placement = place(topology.cluster("trn2.48xlarge"), (0, 1, 4, 63, 60))
    assert placement.device.tolist() == [0, 0, 1, 2, 2]
    assert placement.memory_bytes_per_s == 2.9e12


def test_no_wire_between_nodes():
    placement = place(topology.cluster("inf2.48xlarge", nodes=2, strict=False), (0, 24))
    with pytest.raises(TopologyError, match="no wire joins node 0 and node 1"):
        placement.routes(np.array([0]), np.array([1]))


def test_no_such_rank():
    with pytest.raises(TopologyError, match="rank 64 is not in the world"):
        place(topology.cluster("trn2.48xlarge"), (0, 64))


def test_a_star_has_one_way_up_and_one_down_for_each_rank():
    star = Star(3, latency_s=1e-6, bytes_per_s=5.0)
    routes = star.routes(np.array([0, 2]), np.array([1, 0]))
    assert [star.describe(wire) for wire in routes.wire.tolist()] == [
        "rank 0 -> switch",
        "switch -> rank 1",
        "rank 2 -> switch",
        "switch -> rank 0",
    ]
    assert star.wires().latency_s[routes.wire].tolist() == [1e-6, 0.0, 1e-6, 0.0]


def test_numbers_of_wires_last_as_long_as_what_was_placed():
    machine = "trn2.48xlarge"
    first = place(topology.cluster(machine), range(0, 16, 4))
    wires = first.routes(np.arange(3), np.arange(1, 4)).wire
    named = [first.describe(wire) for wire in wires.tolist()]
    for nodes in range(2, 50):
        place(topology.cluster(machine, nodes=nodes), (0, 4)).routes(np.array([0]), np.array([1]))
    backwards = place(topology.cluster(machine), range(63, -1, -1))
    backwards.routes(np.arange(63), np.arange(1, 64))  # other wires are used first
    assert [backwards.describe(wire) for wire in wires.tolist()] == named
