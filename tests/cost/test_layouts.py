"""Patterns fitted to a machine: what they compute, over which wires, and that alike nodes cost alike."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import topology
from overlap.collectives import generate
from overlap.collectives.generators.composed import PHASES
from overlap.collectives.generators.doubling import halving_doubling
from overlap.collectives.generators.families import READINGS
from overlap.collectives.generators.layouts import combine_side_by_side, device_cube, kangarings, relabel_ranks
from overlap.collectives.generators.ring import kangaring, ring
from overlap.collectives.placement import place_group
from overlap.collectives.proof import verify
from overlap.cost.candidates import list_options
from overlap.cost.clocks import cost
from overlap.cost.geometry import Geometry
from overlap.cost.placed import place_rounds
from overlap.cost.rounds import read_rounds
from overlap.cost.select import plan
from overlap.cost.symmetry import EqualNodes
from overlap.errors import ScheduleError
from topology import TopologyError

from .star import Star

# -- patterns fitted to a machine compute what they should, over the wires they should ---------------------------------


def tiles(devices, each):
    return [tuple(range(d * each, (d + 1) * each)) for d in range(devices)]


@pytest.mark.parametrize("collective", READINGS)
@pytest.mark.parametrize(("devices", "each"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 3), (8, 2), (16, 1)])
def test_cubes_are_proved(collective, devices, each):
    schedule = READINGS[collective]("rdh", device_cube(tiles(devices, each)))
    verify(schedule)
    steps = devices.bit_length() - 1 + (each > 1)
    assert read_rounds(schedule).steps == steps * (2 if collective == "all_reduce" else 1)
    shuffled = np.random.default_rng(devices).permutation(devices * each).reshape(devices, each).tolist()
    verify(READINGS[collective]("rdh", device_cube(shuffled)))


@pytest.mark.parametrize("collective", READINGS)
def test_kangarings_are_proved(collective):
    couples = [(0, 5), (3, 1), (2, 4), (7, 6)]
    orders = [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)]
    schedule = generate(collective, "kangaring", 8, couples=couples, orders=orders)
    verify(schedule)
    assert read_rounds(schedule).steps == 4 * (2 if collective == "all_reduce" else 1)
    assert read_rounds(schedule).sent_share == (7 / 8) * (2 if collective == "all_reduce" else 1)


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("collective", READINGS)
def test_levels_take_fitted_algorithms(collective, slices):
    fitted = {"nodes": 3, "intra": "rdh", "intra_options": {"devices": tiles(2, 2)}, "slices": slices}
    for inter in ("ring", "one_shot") if collective == "all_reduce" else ("ring",):
        table = generate(collective, "hierarchical", 12, inter=inter, **fitted)
        verify(table)
        assert (table.collective, table.size) == (collective, 12)


def edges(pattern):
    columns = (pattern.step, pattern.src, pattern.dst, pattern.chunk)
    return set(zip(*(column.tolist() for column in columns), strict=True))


def test_relabelling_is_another_name_for_each_rank():
    pattern = relabel_ranks(ring(4), [2, 0, 3, 1])
    other = ring(4, order=[2, 0, 3, 1])
    edges = [
        set(zip(p.step.tolist(), p.src.tolist(), p.dst.tolist(), p.chunk.tolist(), strict=True))
        for p in (pattern, other)
    ]
    assert edges[0] == edges[1]
    assert relabel_ranks(pattern, range(4)) is pattern


def test_what_is_contiguous_stays_so_under_other_names():
    cube = device_cube(tiles(4, 2))
    renamed = relabel_ranks(cube, [3, 1, 0, 2, 7, 6, 5, 4])
    assert len(READINGS["all_reduce"]("rdh", renamed)) == len(READINGS["all_reduce"]("rdh", cube))


def test_parts_share_no_reads():
    one, two = kangaring(8), kangaring(8, order=[2, 0, 1, 3])
    groups = set(combine_side_by_side([one, two]).group.tolist())
    assert len(groups) == len(set(one.group.tolist())) + len(set(two.group.tolist()))


def test_side_by_side_needs_no_more_steps():
    pattern = combine_side_by_side([ring(5), ring(5, order=[0, 2, 4, 1, 3])])
    assert (pattern.steps, pattern.parts) == (4, 2)
    assert set(pattern.channel.tolist()) == {0, 1}


@pytest.mark.parametrize(("ranks", "directions"), [((0, 1), 1), ((0, 2), 1), ((0, 1, 2), 2), ((0, 1, 2, 3), 2)])
def test_a_ring_of_two_ranks_is_the_same_both_ways(ranks, directions):
    rings = Geometry(cluster=topology.cluster("trn1.32xlarge"), ranks=ranks).rings
    assert len(rings) == directions


def test_all_wires_work_in_every_step_of_a_cube():
    machine = topology.cluster("trn2.48xlarge")
    placement, devices = place_group(machine), Geometry(cluster=machine, ranks=tuple(range(64))).devices
    across = place_rounds(placement, read_rounds(READINGS["all_gather"]("rdh", device_cube(devices)))).placed_rounds[:4]
    for one in across:
        wires = placement.wires()
        loads = one.load_s_per_byte[wires.kind[: len(one.load_s_per_byte)] == "neuronlink"]
        assert len(loads) == 64
        assert loads.min() > 0
        assert loads.max() == pytest.approx(
            2 * loads.min()
        )  # distance 2 goes through every wire, distance 1 through half


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: device_cube(tiles(3, 2)), "power of two devices"),
        (lambda: device_cube([(0, 1), (2,)]), "equally many ranks"),
        (lambda: relabel_ranks(halving_doubling(4), [0, 1, 2, 2]), "each of 0..3 once"),
        (lambda: kangarings(4, couples=[(0, 1), (1, 3)], orders=[(0, 1)]), "each of 0..3 once"),
        (lambda: generate("all_gather", "rdh", 8, devices=tiles(2, 2)), "expected all 8 ranks"),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


# -- routes in columns are the routes of the cluster -------------------------------------------------------------------

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
    placement = place_group(cluster, ranks)
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
    placement = place_group(topology.cluster("trn2.48xlarge"), (0, 1, 4, 63, 60))
    assert placement.device.tolist() == [0, 0, 1, 2, 2]
    assert placement.memory_bytes_per_s == 2.9e12


def test_no_wire_between_nodes():
    placement = place_group(topology.cluster("inf2.48xlarge", nodes=2, strict=False), (0, 24))
    with pytest.raises(TopologyError, match="no wire joins node 0 and node 1"):
        placement.routes(np.array([0]), np.array([1]))


def test_no_such_rank():
    with pytest.raises(TopologyError, match="rank 64 is not in the world"):
        place_group(topology.cluster("trn2.48xlarge"), (0, 64))


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
    first = place_group(topology.cluster(machine), range(0, 16, 4))
    wires = first.routes(np.arange(3), np.arange(1, 4)).wire
    named = [first.describe(wire) for wire in wires.tolist()]
    for nodes in range(2, 50):
        place_group(topology.cluster(machine, nodes=nodes), (0, 4)).routes(np.array([0]), np.array([1]))
    backwards = place_group(topology.cluster(machine), range(63, -1, -1))
    backwards.routes(np.arange(63), np.arange(1, 64))  # other wires are used first
    assert [backwards.describe(wire) for wire in wires.tolist()] == named


# -- what stands for all of a group of equal nodes takes exactly what all of them take ---------------------------------


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
    options, _ = list_options(op, machine, ranks, root, None, True, "hierarchical", False)
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
        for option in list_options(op, machine, ranks, 0, None, True, "hierarchical", False)[0]:
            for part in option.parts:
                assert part.total_s(1e6) == pytest.approx(whole_s(part, 1e6), rel=1e-9)


EVERYDAY = ("all_reduce", "broadcast", "all_to_all")  # one of each family
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def prices(machine, op, ranks):
    """Return what every option of two levels takes, of three sizes, in one, two and three pieces."""
    list_options.cache_clear()
    root = len(ranks) * 5 // 8 + 1 if op in ROOTED else 0
    options, _ = list_options(op, machine, ranks, root, None, True, "hierarchical", False)
    return [
        (
            option.detail,
            nbytes,
            slices,
            option.sliced_time_s([part.total_s(nbytes / slices) for part in option.parts], slices),
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
        return replace(looked_at(geometry, placement, home), one_node_represents_all=False)

    monkeypatch.setattr(EqualNodes, "of", of_all)
    assert few == prices(machine, op, ranks)
    list_options.cache_clear()


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
