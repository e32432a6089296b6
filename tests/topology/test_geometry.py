"""Neighbours, routes, rings, grids, hypercubes and cuts."""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import topology
from topology import Grid, TopologyError, WireEnd
from topology.cycles import disjoint_cycles
from topology.wiring import Wiring

WIRED = [
    "trn1.32xlarge",
    "trn2.48xlarge",
    "inf2.48xlarge",
    "inf2.24xlarge",
    "dl1.24xlarge",
    "trn2u.48xlarge",
    "trn2u.48xlarge x2",
]


def hops_from(start, neighbours):
    """Count hops by breadth-first search, the reference for every route."""
    hops, queue = {start: 0}, deque([start])
    while queue:
        here = queue.popleft()
        for other in neighbours(here):
            if other not in hops:
                hops[other] = hops[here] + 1
                queue.append(other)
    return hops


def wires_of(cluster):
    """Give the neighbours of (node, device) from the published wiring, not from routes."""

    def neighbours(place):
        node, device = place
        beside = {(node - 1) % cluster.servers, (node + 1) % cluster.servers} - {node}
        return [(node, other) for other in cluster.wiring.adjacent_devices(device)] + [
            (other, device) for other in beside
        ]

    return neighbours


@pytest.mark.parametrize("name", ["trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge", "trn2u.48xlarge"])
def test_torus_neighbours_are_those_of_the_driver(name):
    wiring = topology.cluster(name).wiring
    assert wiring.adjacent_devices(0) == (1, 3, 4, 12)
    assert wiring.adjacent_devices(5) == (1, 4, 6, 9)
    assert wiring.adjacent_devices(15) == (3, 11, 12, 14)


def test_chain_and_ring_neighbours():
    chain, ring = topology.cluster("inf2.24xlarge").wiring, topology.cluster("inf2.48xlarge").wiring
    assert [chain.adjacent_devices(device) for device in range(6)] == [(1,), (0, 2), (1, 3), (2, 4), (3, 5), (4,)]
    assert [set(ring.adjacent_devices(device)) for device in range(12)] == [
        {(d - 1) % 12, (d + 1) % 12} for d in range(12)
    ]


@pytest.mark.parametrize("name", WIRED)
def test_routes_are_shortest_connected_and_on_real_wires(name):
    cluster = topology.cluster(name)
    neighbours, step = wires_of(cluster), cluster.ranks_per_device
    for a in range(0, cluster.world_size, step * 7):
        here = cluster.place(a)
        hops = hops_from((here.node, here.device), neighbours)
        for b in range(0, cluster.world_size, step):
            there, route = cluster.place(b), cluster.route(a, b)
            assert len(route) == hops[there.node, there.device]
            ports = [link.src for link in route] + [link.dst for link in route[-1:]]
            assert all(near.dst == far.src for near, far in pairwise(route))
            assert all((q.node, q.index) in neighbours((p.node, p.index)) for p, q in pairwise(ports))
            if a != b:
                assert (ports[0], ports[-1]) == (
                    WireEnd("device", here.node, here.device),
                    WireEnd("device", there.node, there.device),
                )


def test_link_kinds():
    cluster = topology.cluster("trn2u.48xlarge x8")
    assert [cluster.link_kind(0, rank) for rank in (0, 1, 4, 40, 64, 192, 256)] == [
        "self",
        "chip",
        "neuronlink",
        "neuronlink",
        "ultraserver",
        "ultraserver",
        "efa",
    ]
    assert topology.cluster("dl1.24xlarge x2").link_kind(0, 7) == "roce"
    assert topology.cluster("inf2.48xlarge x2").link_kind(0, 24) == "none"


def test_routes_on_a_chip_and_over_the_network():
    cluster = topology.cluster("trn1.32xlarge x2")
    (inside,) = cluster.route(2, 3)
    assert (inside.kind, inside.src, inside.dst) == ("chip", WireEnd("core", 0, 2), WireEnd("core", 0, 3))
    out, back = cluster.route(6, 36)
    assert (out.src, out.dst) == (WireEnd("nic", 0, 1), WireEnd("fabric", 0, 0))
    assert (back.src, back.dst) == (WireEnd("fabric", 0, 0), WireEnd("nic", 1, 1))
    assert (out.latency_s + back.latency_s, out.bandwidth_bytes_per_s) == (15e-6, 12.5e9)
    assert cluster.route(5, 5) == ()


def test_ultraserver_routes_end_over_the_server_ring():
    route = topology.cluster("trn2u.48xlarge").route(0, 3 * 64 + 5 * 4)
    assert [link.kind for link in route] == ["neuronlink", "neuronlink", "ultraserver"]
    assert [link.bandwidth_bytes_per_s for link in route] == [128e9, 128e9, 64e9]


def test_no_route_without_a_network():
    with pytest.raises(TopologyError, match=r"no wire joins node 0 and node 1: inf2\.48xlarge has no network"):
        topology.cluster("inf2.48xlarge x2").route(0, 24)


def check_rings(cluster, ranks, rings):
    """Every ring visits all ranks, steps only within a device or along a wire, and shares no wire with another."""
    neighbours, used = wires_of(cluster), set()
    for ring in rings:
        assert sorted(ring) == sorted(ranks)
        places = [cluster.place(rank) for rank in ring]
        stops = [(place.node, place.device) for place in places]
        stops = [stop for stop, before in zip(stops, stops[-1:] + stops[:-1], strict=True) if stop != before]
        assert len(stops) == len(set(stops))
        for here, there in zip(stops, stops[1:] + stops[:1], strict=True):
            assert there in neighbours(here)
            assert len(stops) == 2 or frozenset((here, there)) not in used
            used.add(frozenset((here, there)))


@pytest.mark.parametrize(
    ("name", "ranks", "count"),
    [
        ("trn1.32xlarge", range(32), 2),
        ("trn2.48xlarge", range(64), 2),
        ("trn2.48xlarge lnc=1", range(128), 2),
        ("trn2.48xlarge", range(16), 1),
        ("trn2.48xlarge", [*range(16), *range(48, 64)], 1),
        ("trn2.48xlarge", range(16, 48), 1),
        ("trn2.48xlarge", range(8), 1),
        ("trn2.48xlarge", range(48), 1),
        ("trn2.48xlarge", [0, 16, 32, 48], 1),
        ("inf2.48xlarge", range(24), 1),
        ("inf2.48xlarge", range(12), 0),
        ("inf2.24xlarge", range(12), 0),
        ("dl1.24xlarge", range(8), 3),
        ("dl1.24xlarge", range(5), 2),
        ("dl1.24xlarge", range(2), 1),
        ("trn2u.48xlarge", range(256), 3),
        ("trn2u.48xlarge x2", range(128), 2),
        ("trn2u.48xlarge", [0, 64, 128, 192], 1),
        ("trn1.2xlarge", range(2), 1),
    ],
)
def test_rings(name, ranks, count):
    cluster = topology.cluster(name)
    rings = cluster.rings(ranks)
    assert len(rings) == count
    if len({(cluster.place(r).node, cluster.place(r).device) for r in ranks}) > 1:
        check_rings(cluster, ranks, rings)


def test_two_rings_of_the_torus_use_all_wires():
    rings = topology.cluster("trn1.32xlarge").rings()
    devices = [[rank // 2 for rank in ring[::2]] for ring in rings]
    wires = {frozenset(pair) for ring in devices for pair in zip(ring, ring[1:] + ring[:1], strict=True)}
    assert len(wires) == 32


def test_rings_across_nodes_join_the_rings_of_the_nodes():
    cluster, one = topology.cluster("trn1.32xlarge x2"), topology.cluster("trn1.32xlarge")
    assert cluster.rings() == tuple(ring + tuple(rank + 32 for rank in ring) for ring in one.rings())


@pytest.mark.parametrize("n", range(3, 40))
def test_complete_graphs_hold_half_as_many_rings_as_neighbours(n):
    rings = topology.cluster("local", ranks=n).rings()
    assert len(rings) == min((n - 1) // 2, 16)
    check_rings(topology.cluster("local", ranks=n), range(n), rings)


def test_ring_order_where_no_ring_exists_loads_each_direction_once():
    cluster = topology.cluster("inf2.24xlarge")
    order = cluster.ring_order()
    assert order == tuple(range(12))
    used = [
        link
        for a, b in zip(order, order[1:] + order[:1], strict=True)
        for link in cluster.route(a, b)
        if link.kind != "chip"
    ]
    assert len(used) == len(set(used)) == 10


def test_ring_order_is_the_first_ring_where_there_is_one():
    cluster = topology.cluster("trn2.48xlarge")
    assert cluster.ring_order() == cluster.rings()[0]


@pytest.mark.parametrize(("dims", "count"), [((5, 5), 2), ((3, 6), 2), ((6, 8), 2), ((3, 3, 3), 3), ((17,), 1)])
def test_larger_tori_are_merged_from_their_axes(dims, count):
    grid = Grid(dims=dims, wraps=(True,) * len(dims))
    graph = {place: grid.neighbours(place) for place in range(grid.size)}
    axes = [
        [
            tuple(grid.moved(start, axis, step) for step in range(side))
            for start in range(grid.size)
            if grid.coordinates(start)[axis] == 0
        ]
        for axis, side in enumerate(dims)
    ]
    cycles = disjoint_cycles(graph, axes)
    wires = [frozenset(pair) for cycle in cycles for pair in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    assert len(cycles) == count
    assert all(sorted(cycle) == list(range(grid.size)) for cycle in cycles)
    assert all(b in graph[a] for a, b in map(tuple, wires))
    assert len(wires) == len(set(wires))


grids = st.lists(st.integers(1, 5), min_size=1, max_size=3).flatmap(
    lambda dims: st.builds(Grid, dims=st.just(tuple(dims)), wraps=st.tuples(*[st.booleans()] * len(dims)))
)


@given(grids, st.data())
def test_paths_on_any_grid_are_shortest(grid, data):
    places = st.integers(0, grid.size - 1)
    a, b = data.draw(places), data.draw(places)
    path = grid.path(a, b)
    assert (path[0], path[-1]) == (a, b)
    assert all(q in grid.neighbours(p) for p, q in pairwise(path))
    assert len(path) - 1 == grid.distance(a, b) == hops_from(a, grid.neighbours)[b]
    assert grid.index(grid.coordinates(a)) == a


def test_half_way_round_a_ring_both_directions_are_used():
    ring = Grid(dims=(4,), wraps=(True,))
    assert [ring.path(place, (place + 2) % 4)[1] for place in range(4)] == [1, 0, 3, 2]


@given(st.integers(2, 9), st.data())
def test_paths_on_any_connected_graph_are_shortest(n, data):
    tree = [(data.draw(st.integers(0, d - 1)), d) for d in range(1, n)]
    more = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] != p[1])))
    wires = topology.machine.WiringSpec(shape="links", pairs=tuple(tree + more), link="neuronlink")
    wiring = Wiring.from_spec(wires, n)
    a, b = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    path = wiring.path(a, b)
    assert (path[0], path[-1]) == (a, b)
    assert all(wiring.are_adjacent(p, q) for p, q in pairwise(path))
    assert len(path) - 1 == wiring.distance(a, b) == hops_from(a, wiring.adjacent_devices)[b]


@pytest.mark.parametrize(
    ("name", "ranks", "dims", "wraps"),
    [
        ("trn2.48xlarge", range(64), (4, 4), (True, True)),
        ("trn2.48xlarge", range(16), (4,), (True,)),
        ("trn2.48xlarge", [0, 16, 32, 48], (4,), (True,)),
        ("trn2.48xlarge", range(32), (2, 4), (False, True)),
        ("trn2.48xlarge", [*range(16), *range(48, 64)], (2, 4), (False, True)),
        ("trn2.48xlarge", [0, 4, 16, 20], (2, 2), (False, False)),
        ("trn2.48xlarge", range(4), (), ()),
        ("trn2u.48xlarge", range(256), (4, 4, 4), (True, True, True)),
        ("trn2u.48xlarge", range(128), (2, 4, 4), (False, True, True)),
        ("inf2.48xlarge", range(24), (12,), (True,)),
        ("inf2.24xlarge", range(12), (6,), (False,)),
    ],
)
def test_grids(name, ranks, dims, wraps):
    assert topology.cluster(name).grid(ranks) == Grid(dims=dims, wraps=wraps)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("trn2.48xlarge", [0, 8]),  # two columns apart
        ("trn2.48xlarge", [0, 20]),  # a diagonal fills no box
        ("trn2.48xlarge", [0, 1, 4]),  # uneven
        ("trn2.48xlarge x2", range(128)),  # no device wires between the nodes
        ("inf2.24xlarge", [0, 1, 10, 11]),  # the ends of a chain do not meet
        ("dl1.24xlarge", range(8)),
    ],
)
def test_no_grid(name, ranks):
    assert topology.cluster(name).grid(ranks) is None


def test_hypercube_axes_are_the_bits_of_the_device_then_of_the_core():
    cluster = topology.cluster("trn2.48xlarge")
    axes = cluster.hypercube_axes()
    assert [(axis.bit, axis.level, axis.hops) for axis in axes] == [
        (5, "neuronlink", 2),
        (4, "neuronlink", 1),
        (3, "neuronlink", 2),
        (2, "neuronlink", 1),
        (1, "chip", 1),
        (0, "chip", 1),
    ]
    assert all(axis.partners == tuple(rank ^ (1 << axis.bit) for rank in range(64)) for axis in axes)


def test_hypercube_axes_of_a_part_pair_its_own_ranks():
    axes = topology.cluster("trn2.48xlarge x2").hypercube_axes([0, 16, 64, 80])
    assert [(axis.level, axis.partners) for axis in axes] == [("efa", (64, 80, 0, 16)), ("neuronlink", (16, 0, 80, 64))]


@pytest.mark.parametrize("ranks", [range(12), [0, 1, 2, 4], [0, 4, 8, 64]])
def test_no_hypercube(ranks):
    with pytest.raises(TopologyError, match="needs a power of two ranks, evenly"):
        topology.cluster("trn2.48xlarge x2").hypercube_axes(ranks)


@pytest.mark.parametrize(
    ("name", "wires", "kind"),
    [
        ("trn1.32xlarge", 8, "neuronlink"),
        ("inf2.24xlarge", 1, "neuronlink"),
        ("inf2.48xlarge", 2, "neuronlink"),
        ("dl1.24xlarge", 16, "roce"),
        ("trn2u.48xlarge", 32, "ultraserver"),
        ("trn2u.48xlarge x2", 16, "ultraserver"),
        ("trn2.48xlarge x4", 32, "efa"),
        ("trn2.48xlarge x5", 32, "efa"),
        ("trn2.3xlarge", 2, "chip"),
    ],
)
def test_bisection(name, wires, kind):
    cluster = topology.cluster(name)
    assert cluster.bisection_bytes_per_s() == wires * cluster.bandwidth_bytes_per_s(kind)


def test_bisection_agrees_with_exhaustive_search():
    for dims in [(4, 4), (2, 6), (2, 2, 4), (12,)]:
        grid = Grid(dims=dims, wraps=(True,) * len(dims))
        joined = tuple(grid.neighbours(place) for place in range(grid.size))
        assert Wiring(devices=grid.size, neighbours=joined).count_bisection_wires() == grid.cut_wires()


def test_whole_devices():
    cluster = topology.cluster("trn2.48xlarge")
    assert cluster.whole_devices(range(8))
    assert not cluster.whole_devices(range(6))
