"""Patterns fitted to a machine compute what they should, over the wires they should."""

import numpy as np
import pytest

import topology
from overlap.collectives import generate
from overlap.collectives.generators.doubling import halving_doubling
from overlap.collectives.generators.families import READINGS
from overlap.collectives.generators.layouts import device_cube, kangarings, relabel, side_by_side
from overlap.collectives.generators.ring import kangaring, ring
from overlap.collectives.placement import place
from overlap.collectives.proof import verify
from overlap.cost import on, rounds
from overlap.cost.geometry import Geometry
from overlap.errors import ScheduleError


def tiles(devices, each):
    return [tuple(range(d * each, (d + 1) * each)) for d in range(devices)]


@pytest.mark.parametrize("collective", READINGS)
@pytest.mark.parametrize(("devices", "each"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 3), (8, 2), (16, 1)])
def test_cubes_are_proved(collective, devices, each):
    schedule = READINGS[collective]("rdh", device_cube(tiles(devices, each)))
    verify(schedule)
    steps = devices.bit_length() - 1 + (each > 1)
    assert rounds(schedule).steps == steps * (2 if collective == "all_reduce" else 1)
    shuffled = np.random.default_rng(devices).permutation(devices * each).reshape(devices, each).tolist()
    verify(READINGS[collective]("rdh", device_cube(shuffled)))


@pytest.mark.parametrize("collective", READINGS)
def test_kangarings_are_proved(collective):
    couples = [(0, 5), (3, 1), (2, 4), (7, 6)]
    orders = [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)]
    schedule = generate(collective, "kangaring", 8, couples=couples, orders=orders)
    verify(schedule)
    assert rounds(schedule).steps == 4 * (2 if collective == "all_reduce" else 1)
    assert rounds(schedule).sent_share == (7 / 8) * (2 if collective == "all_reduce" else 1)


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
    pattern = relabel(ring(4), [2, 0, 3, 1])
    other = ring(4, order=[2, 0, 3, 1])
    edges = [
        set(zip(p.step.tolist(), p.src.tolist(), p.dst.tolist(), p.chunk.tolist(), strict=True))
        for p in (pattern, other)
    ]
    assert edges[0] == edges[1]
    assert relabel(pattern, range(4)) is pattern


def test_what_is_contiguous_stays_so_under_other_names():
    cube = device_cube(tiles(4, 2))
    renamed = relabel(cube, [3, 1, 0, 2, 7, 6, 5, 4])
    assert len(READINGS["all_reduce"]("rdh", renamed)) == len(READINGS["all_reduce"]("rdh", cube))


def test_parts_share_no_reads():
    one, two = kangaring(8), kangaring(8, order=[2, 0, 1, 3])
    groups = set(side_by_side([one, two]).group.tolist())
    assert len(groups) == len(set(one.group.tolist())) + len(set(two.group.tolist()))


def test_side_by_side_needs_no_more_steps():
    pattern = side_by_side([ring(5), ring(5, order=[0, 2, 4, 1, 3])])
    assert (pattern.steps, pattern.parts) == (4, 2)
    assert set(pattern.channel.tolist()) == {0, 1}


@pytest.mark.parametrize(("ranks", "directions"), [((0, 1), 1), ((0, 2), 1), ((0, 1, 2), 2), ((0, 1, 2, 3), 2)])
def test_a_ring_of_two_ranks_is_the_same_both_ways(ranks, directions):
    rings = Geometry(cluster=topology.cluster("trn1.32xlarge"), ranks=ranks).rings
    assert len(rings) == directions


def test_all_wires_work_in_every_step_of_a_cube():
    machine = topology.cluster("trn2.48xlarge")
    placement, devices = place(machine), Geometry(cluster=machine, ranks=tuple(range(64))).devices
    across = on(placement, rounds(READINGS["all_gather"]("rdh", device_cube(devices)))).placed_rounds[:4]
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
        (lambda: relabel(halving_doubling(4), [0, 1, 2, 2]), "each of 0..3 once"),
        (lambda: kangarings(4, couples=[(0, 1), (1, 3)], orders=[(0, 1)]), "each of 0..3 once"),
        (lambda: generate("all_gather", "rdh", 8, devices=tiles(2, 2)), "expected all 8 ranks"),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()
