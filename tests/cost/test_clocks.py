"""Finish times of every rank: against plain Python, and what the terms add up to."""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import topology
from overlap.collectives import generate
from overlap.collectives.placement import place
from overlap.cost import CostParameters, cost, on, parameters, rounds

from .reference import slow_cost
from .star import Star

TABLES = [
    ("all_reduce", "ring"),
    ("all_reduce", "rdh"),
    ("all_reduce", "binary_tree"),
    ("all_reduce", "recursive_doubling"),
    ("reduce_scatter", "mesh"),
    ("all_gather", "bruck"),
    ("broadcast", "chain"),
    ("broadcast", "binomial"),
    ("all_to_all", "pairwise"),
    ("all_to_all", "bruck"),
    ("scatter", "binomial"),
]


@pytest.mark.parametrize("contention", [True, False])
@pytest.mark.parametrize(("collective", "algorithm"), TABLES)
def test_equal_to_plain_python(collective, algorithm, contention):
    machine = topology.cluster("trn1.32xlarge x2")
    group = (0, 1, 2, 5, 32, 33, 34, 37, 12, 44)
    placement, random = place(machine, group), np.random.default_rng(7)
    placement.memory_bytes_per_s = None
    table = generate(collective, algorithm, len(group))
    for arrivals in (np.zeros(len(group), np.int64), random.integers(0, 10**9, len(group))):
        found = cost(on(placement, rounds(table), contention=contention), 1e6, arrivals_s=arrivals / 1e12)
        slow = slow_cost(table, placement, 1e6, arrivals=arrivals.tolist(), contention=contention)
        # One slot's bytes are no whole number, so the order of multiplications may show in the last picosecond.
        assert np.abs(found.finish_s * 1e12 - np.array(slow)).max() <= table.steps


@given(st.integers(2, 9), st.lists(st.integers(0, 10**8), min_size=9, max_size=9), st.integers(1, 10**6))
def test_repeating_without_computing_is_exact(size, late, slot_bytes):
    """A ring whose repeated steps are written out is never in a steady state that could be jumped over."""
    table = rounds(generate("all_reduce", "ring", size))
    written_out = rounds_written_out(table)
    arrivals_s = np.array(late[:size]) / 1e12
    star = Star(size, latency_s=1e-6, bytes_per_s=1e9)
    short, long = (cost(on(star, each), size * slot_bytes, arrivals_s=arrivals_s) for each in (table, written_out))
    assert short.finish_s.tolist() == long.finish_s.tolist()


def rounds_written_out(table):
    from dataclasses import replace

    single = [replace(each, repeat=1) for each in table.rounds for _ in range(each.repeat)]
    return replace(table, rounds=tuple(single))


def test_a_late_rank_delays_only_who_waits_for_it():
    table = rounds(generate("broadcast", "binomial", 4))
    star = Star(4, latency_s=0.0, bytes_per_s=1e9)
    # 0 sends to 1, then 0 to 2 and 1 to 3.
    on_time = cost(on(star, table), 1e6).finish_s.tolist()
    late = cost(on(star, table), 1e6, arrivals_s=np.array([0, 5e-3, 0, 0])).finish_s.tolist()
    assert on_time == [2e-3, 2e-3, 2e-3, 2e-3]
    assert late == [2e-3, 6e-3, 2e-3, 6e-3]
    # The root is the first of those that are last: what it waits for is its own sending.
    assert cost(on(star, table), 1e6, explain=True).breakdown.wire_s == 2e-3


def test_everybody_later_is_everything_later():
    placed = on(place(topology.cluster("trn2.48xlarge")), rounds(generate("all_reduce", "rdh", 64)))
    early = cost(placed, 1e6).finish_s
    late = cost(placed, 1e6, arrivals_s=np.full(64, 1.0)).finish_s
    np.testing.assert_array_equal(np.rint((late - 1.0) * 1e12), np.rint(early * 1e12))


def test_messages_that_share_a_wire_share_its_bandwidth():
    machine = topology.cluster("trn2.48xlarge")
    # Ranks 0-3 sit on one device, 4-7 on the next.
    table = generate("permute", "mesh", 8, pairs=tuple((r, r + 4) for r in range(4)))
    placement = place(machine, range(8))
    alone, together = (cost(on(placement, rounds(table), contention=c), 128e6).total_s for c in (False, True))
    assert alone == 1.5e-6 + 1e-3
    assert together == 1.5e-6 + 4e-3


def test_memory_is_a_limit_like_a_wire():
    machine = topology.cluster("trn2.3xlarge")
    table = rounds(generate("permute", "mesh", 4, pairs=((0, 1), (1, 2), (2, 3), (3, 0))))
    # 4 reads and 4 writes of 1 GB at 2.9 TB/s are slower than 1 GB at 736 GB/s on each of four ways between cores.
    assert cost(on(place(machine), table), 1e9).total_s == pytest.approx(1.3e-6 + 8 / 2900, abs=1e-12)


@pytest.mark.parametrize(("collective", "algorithm"), TABLES)
def test_terms_add_up_to_the_finish_of_the_last_rank(collective, algorithm):
    machine = topology.cluster("trn2.48xlarge x2")
    placed = on(place(machine), rounds(generate(collective, algorithm, 128)), parameters=parameters(machine))
    arrivals_s = np.random.default_rng(3).integers(0, 10**8, 128) / 1e12
    for late_s in (None, arrivals_s):
        found = cost(placed, 3_000_000, arrivals_s=late_s, explain=True)
        terms = asdict(found.breakdown)
        assert round(sum(terms.values()) * 1e12) == round(found.total_s * 1e12)
        assert min(terms.values()) >= 0
        assert found.total_s == cost(placed, 3_000_000, arrivals_s=late_s).total_s


def test_what_each_term_is():
    known = CostParameters(
        launch_s=1e-6, start_s=(("neuronlink", 2e-6),), gap_s=(("neuronlink", 1e-7),), efficiency=(("neuronlink", 0.5),)
    )
    machine = topology.cluster("trn1.32xlarge")
    table = rounds(generate("all_gather", "mesh", 3))
    # Devices 0, 1 and 2 in a row: 0 reaches 2 through 1 in two hops, and each sends two messages.
    found = cost(on(place(machine, (0, 2, 4)), table, parameters=known), 3 * 51_539_607_552, explain=True)
    terms = asdict(found.breakdown)
    assert {name: value for name, value in terms.items() if value} == {
        "launch_s": 1e-6,
        "start_s": 2.1e-6,
        "latency_s": 3e-6,
        "wire_s": 4.0,
        "memory_s": pytest.approx(2 * 51_539_607_552 / 880_468_295_680),
    }


def test_bytes_that_pass_through_a_device_may_not_wait_there():
    machine = topology.cluster("trn1.32xlarge")
    table = rounds(generate("permute", "mesh", 2, pairs=((0, 1),)))
    for share, expected_s in ((1.0, 3e-6), (0.5, 2.25e-6), (0.0, 1.5e-6)):
        placed = on(place(machine, (0, 4)), table, parameters=CostParameters(cut_through=share))
        assert cost(placed, 0).total_s == expected_s


def test_a_way_through_the_network_is_one_hop():
    machine = topology.cluster("trn1.32xlarge x2")
    table = rounds(generate("all_reduce", "ring", 2))
    assert on(place(machine, (0, 32)), table).hops() == {"efa": 2}
    assert on(place(machine, (0, 4)), table).hops() == {"neuronlink": 4}


def test_one_rank_alone():
    for collective in ("all_reduce", "all_gather", "broadcast", "all_to_all"):
        table = rounds(generate(collective, "mesh", 1))
        assert cost(on(Star(1, latency_s=1.0, bytes_per_s=1.0), table), 100, explain=True).total_s == 0
