"""Times of every rank: when each finishes, against plain Python, and bounds that no price lies below."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import topology
from overlap.collectives import generate
from overlap.collectives.generators.composed import PHASES
from overlap.collectives.placement import place_group
from overlap.cost.candidates import list_options
from overlap.cost.clocks import cost
from overlap.cost.parameters import CostParameters, cost_parameters
from overlap.cost.pipeline import pipelined_time_s
from overlap.cost.placed import place_rounds
from overlap.cost.rounds import read_rounds
from overlap.cost.select import plan
from tests.properties import one_in

from .closed_forms import apart
from .reference import slow_cost
from .star import Star

# -- finish times of every rank: against plain Python, and what the terms add up to ------------------------------------

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
    placement, random = place_group(machine, group), np.random.default_rng(7)
    placement.memory_bytes_per_s = None
    table = generate(collective, algorithm, len(group))
    for arrivals in (np.zeros(len(group), np.int64), random.integers(0, 10**9, len(group))):
        found = cost(
            place_rounds(placement, read_rounds(table), contention=contention), 1e6, arrivals_s=arrivals / 1e12
        )
        slow = slow_cost(table, placement, 1e6, arrivals=arrivals.tolist(), contention=contention)
        # One slot's bytes are no whole number, so the order of multiplications may show in the last picosecond.
        assert np.abs(found.finish_s * 1e12 - np.array(slow)).max() <= table.steps


@given(st.integers(2, 9), st.lists(st.integers(0, 10**8), min_size=9, max_size=9), st.integers(1, 10**6))
def test_repeating_without_computing_is_exact(size, late, slot_bytes):
    """A ring whose repeated steps are written out is never in a steady state that could be jumped over."""
    table = read_rounds(generate("all_reduce", "ring", size))
    written_out = rounds_written_out(table)
    arrivals_s = np.array(late[:size]) / 1e12
    star = Star(size, latency_s=1e-6, bytes_per_s=1e9)
    short, long = (
        cost(place_rounds(star, each), size * slot_bytes, arrivals_s=arrivals_s) for each in (table, written_out)
    )
    assert short.finish_s.tolist() == long.finish_s.tolist()


def rounds_written_out(table):
    single = [replace(each, repeat=1) for each in table.rounds for _ in range(each.repeat)]
    return replace(table, rounds=tuple(single))


def test_a_late_rank_delays_only_who_waits_for_it():
    table = read_rounds(generate("broadcast", "binomial", 4))
    star = Star(4, latency_s=0.0, bytes_per_s=1e9)
    # 0 sends to 1, then 0 to 2 and 1 to 3.
    on_time = cost(place_rounds(star, table), 1e6).finish_s.tolist()
    late = cost(place_rounds(star, table), 1e6, arrivals_s=np.array([0, 5e-3, 0, 0])).finish_s.tolist()
    assert on_time == [2e-3, 2e-3, 2e-3, 2e-3]
    assert late == [2e-3, 6e-3, 2e-3, 6e-3]
    # The root is the first of those that are last: what it waits for is its own sending.
    assert cost(place_rounds(star, table), 1e6, explain=True).breakdown.wire_s == 2e-3


def test_everybody_later_is_everything_later():
    placed = place_rounds(
        place_group(topology.cluster("trn2.48xlarge")), read_rounds(generate("all_reduce", "rdh", 64))
    )
    early = cost(placed, 1e6).finish_s
    late = cost(placed, 1e6, arrivals_s=np.full(64, 1.0)).finish_s
    np.testing.assert_array_equal(np.rint((late - 1.0) * 1e12), np.rint(early * 1e12))


def test_messages_that_share_a_wire_share_its_bandwidth():
    machine = topology.cluster("trn2.48xlarge")
    # Ranks 0-3 sit on one device, 4-7 on the next.
    table = generate("permute", "mesh", 8, pairs=tuple((r, r + 4) for r in range(4)))
    placement = place_group(machine, range(8))
    alone, together = (
        cost(place_rounds(placement, read_rounds(table), contention=c), 128e6).total_s for c in (False, True)
    )
    assert alone == 1.5e-6 + 1e-3
    assert together == 1.5e-6 + 4e-3


def test_memory_is_a_limit_like_a_wire():
    machine = topology.cluster("trn2.3xlarge")
    table = read_rounds(generate("permute", "mesh", 4, pairs=((0, 1), (1, 2), (2, 3), (3, 0))))
    # 4 reads and 4 writes of 1 GB at 2.9 TB/s are slower than 1 GB at 736 GB/s on each of four ways between cores.
    assert cost(place_rounds(place_group(machine), table), 1e9).total_s == pytest.approx(1.3e-6 + 8 / 2900, abs=1e-12)


@pytest.mark.parametrize(("collective", "algorithm"), TABLES)
def test_terms_add_up_to_the_finish_of_the_last_rank(collective, algorithm):
    machine = topology.cluster("trn2.48xlarge x2")
    placed = place_rounds(
        place_group(machine), read_rounds(generate(collective, algorithm, 128)), parameters=cost_parameters(machine)
    )
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
    table = read_rounds(generate("all_gather", "mesh", 3))
    # Devices 0, 1 and 2 in a row: 0 reaches 2 through 1 in two hops, and each sends two messages.
    found = cost(
        place_rounds(place_group(machine, (0, 2, 4)), table, parameters=known), 3 * 51_539_607_552, explain=True
    )
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
    table = read_rounds(generate("permute", "mesh", 2, pairs=((0, 1),)))
    for share, expected_s in ((1.0, 3e-6), (0.5, 2.25e-6), (0.0, 1.5e-6)):
        placed = place_rounds(place_group(machine, (0, 4)), table, parameters=CostParameters(cut_through=share))
        assert cost(placed, 0).total_s == expected_s


def test_a_way_through_the_network_is_one_hop():
    machine = topology.cluster("trn1.32xlarge x2")
    table = read_rounds(generate("all_reduce", "ring", 2))
    assert place_rounds(place_group(machine, (0, 32)), table).hops() == {"efa": 2}
    assert place_rounds(place_group(machine, (0, 4)), table).hops() == {"neuronlink": 4}


def test_one_rank_alone():
    for collective in ("all_reduce", "all_gather", "broadcast", "all_to_all"):
        table = read_rounds(generate(collective, "mesh", 1))
        assert cost(place_rounds(Star(1, latency_s=1.0, bytes_per_s=1.0), table), 100, explain=True).total_s == 0


# -- no price lies below what wires, memories or a node more allow, and pieces cost what they share --------------------

SWITCHED = str(Path(__file__).parents[1] / "switched.toml")
MACHINES = ("trn1.32xlarge", "trn2.48xlarge", "dl1.24xlarge", SWITCHED, "local")
SIZES = st.integers(min_value=0, max_value=34).map(lambda power: 1 << power)
ALL_REDUCE = ((1.0, 0.0, 1.0), (0.0, 1.0, 0.0))  # the first and the last phase have their wires in common


def priced(op, machine, nbytes):
    found, _ = list_options(op, machine, tuple(range(machine.world_size)), 0, None, True, None, False)
    return [(option, option.price(nbytes)) for option in found]


def cluster(name, nodes):
    return topology.cluster(name, nodes=nodes, ranks=8 * nodes if name == "local" else None)


@one_in(5)
@given(st.sampled_from(MACHINES), st.sampled_from(list(PHASES)), st.sampled_from((2, 3)), SIZES)
def test_no_price_is_below_a_wires_or_a_memorys_bound(name, op, nodes, nbytes):
    """All that an option puts on a wire, or moves in a memory, takes its time there, however it is cut."""
    for option, price in priced(op, cluster(name, nodes), nbytes):
        phases = option.phases(price.slices)
        width = max((len(part.placed.busy_s_per_slot()) for part in phases), default=0)
        busy = [0.0] * width
        for part in phases:
            each = part.placed.busy_s_per_slot() * (part.share * nbytes / part.placed.rounds.slots)
            busy[: len(each)] = [a + b for a, b in zip(busy, each.tolist(), strict=False)]
        size = phases[0].placed.placement.size if phases else 0
        limits = busy[size:] if size else [0.0]  # reducers come first: a flat step may hide them
        assert price.total_s >= max(limits) * (1 - 1e-9), option.label


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("name", "op"),
    [
        (SWITCHED, "all_reduce"),
        (SWITCHED, "broadcast"),
        *(
            pytest.param(name, op, marks=pytest.mark.slow)
            for name in ("trn1.32xlarge", "trn2.48xlarge", "dl1.24xlarge")
            for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
        ),
    ],
)
def test_more_nodes_never_take_less(name, op):
    for nbytes in (1 << 10, 1 << 20, 1 << 26, 1 << 32):
        times = [plan(op, nbytes, topology.cluster(name, nodes=nodes)).predicted_s for nodes in (1, 2, 4)]
        ticks = [round(each * 1e12) for each in times]  # of clocks: adding slices up loses less
        assert ticks == sorted(ticks), nbytes


@pytest.mark.parametrize("nbytes", [1 << 8, 1 << 20, 1 << 23])
def test_what_comes_to_one_adapter_at_different_steps_comes_one_after_the_other(nbytes):
    """A root that two leaves reach in different steps of a tree took as long as for one of them."""
    times = [
        plan("gather", nbytes, topology.cluster(SWITCHED, nodes=nodes), tuple(range(0, 8 * nodes, 8)))
        for nodes in (2, 3, 4)
    ]
    assert [each.predicted_s for each in times] == sorted(each.predicted_s for each in times)
    for each in times:
        assert each.busiest.kind == "efa"
        assert each.predicted_s >= each.breakdown.launch_s + 20e-6 + each.busiest.busy_s - 1e-12
        told_s = sum(getattr(each.breakdown, name) for name in each.breakdown.__slots__)
        assert told_s == pytest.approx(each.predicted_s, abs=1e-10)


def test_what_clocks_lose_by_rounding_is_no_reason():
    """A mesh of two ranks and a tree of two send the same; ticks of clocks tell them apart."""
    found = plan("broadcast", 8 << 30, topology.cluster(SWITCHED), (0, 1), programs_only=True)
    assert re.fullmatch(r"as fast as \w+", found.reason)


def test_no_price_is_below_what_the_dma_engines_of_a_rank_move():
    machine = topology.cluster("trn2.3xlarge")
    chip = machine.machine.chip
    slow = replace(chip, dma_bytes_per_s=replace(chip.dma_bytes_per_s, value=1e9))
    found = plan("all_gather", 1 << 30, replace(machine, machine=replace(machine.machine, chip=slow)))
    assert found.predicted_s >= found.bytes_per_rank / 2e9  # a rank has the engines of two cores
    assert found.bytes_per_rank >= 3 << 28
    assert plan("all_gather", 1 << 30, machine).predicted_s < 0.01


@pytest.mark.slow
def test_a_reduce_goes_in_pieces_on_one_node_too():
    """In one piece it took longer on one node than in three on two."""
    one, two = (plan("reduce", 1 << 32, topology.cluster("trn2.48xlarge", nodes=n)) for n in (1, 2))
    assert one.slices > 1
    assert one.predicted_s < two.predicted_s


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("op", "wider"), [("gather", "all_gather"), ("broadcast", "all_reduce"), ("reduce", "all_reduce")]
)
def test_what_goes_to_one_rank_takes_no_longer_than_what_goes_to_all(op, wider, nodes):
    """The shortest ways from all devices of a torus to one have most bytes on one of its wires; rings have not."""
    machine = topology.cluster("trn2.48xlarge", nodes=nodes)
    for nbytes in (1 << 28, 1 << 32):
        assert plan(op, nbytes, machine).predicted_s <= plan(wider, nbytes, machine).predicted_s


def test_all_wires_at_a_root_carry_as_much():
    machine = topology.cluster("trn2.48xlarge")
    table = plan("gather", 1 << 30, machine, root=5).schedule()
    into = table.dst == 5
    devices = [int(table.count[into & (table.src // 4 == device)].sum()) for device in range(16)]
    assert sorted(devices)[-5:] == [4, 14, 14, 16, 16]  # its own device, and the four around it


def test_the_first_and_the_last_phase_share_their_wires():
    """4 GiB on two nodes take longer than on one: what is inside is not overlapped with itself."""
    one, two = (plan("all_reduce", 1 << 32, topology.cluster("trn2.48xlarge", nodes=n)).predicted_s for n in (1, 2))
    assert 27.7e-3 < one < two  # what its memories need
    assert two > 28.1e-3


def test_phases_that_share_nothing_follow_each_other_like_a_pipeline():
    for slices in (1, 2, 3, 10):
        assert pipelined_time_s((4.0, 6.0, 2.0), slices, apart(3)) == pytest.approx(12 + (slices - 1) * 6)


@pytest.mark.parametrize(
    ("phases_s", "expected_s"),
    [
        ((1.0, 0.0, 1.0), 6.0),  # only the shared wires: six phases, one after the other
        ((1.0, 1.0, 1.0), 6.0),  # they are never idle: what is between is hidden
        ((1.0, 2.0, 1.0), 8.0),  # nor is the one between: one phase before, three of 2 s, one behind
        ((1.0, 4.0, 1.0), 14.0),
    ],
)
def test_three_slices_of_an_all_reduce(phases_s, expected_s):
    assert pipelined_time_s(phases_s, 3, ALL_REDUCE) == pytest.approx(expected_s)


class Wires:
    """Everything by hand, in small steps of time: who works takes an equal part of what several need."""

    def __init__(self, phases_s, slices, shared):
        self.left = {(piece, phase): phases_s[phase] for piece in range(slices) for phase in range(len(phases_s))}
        self.shared = shared

    def at_work(self):
        first = [min(piece for piece, phase in self.left if phase == p) for p in {phase for _, phase in self.left}]
        heads = zip(first, sorted({phase for _, phase in self.left}), strict=True)
        return [(piece, phase) for piece, phase in heads if (piece, phase - 1) not in self.left]

    def run(self, step_s):
        now_s = 0.0
        while self.left:
            work = self.at_work()
            for piece, phase in work:
                users = [q for _, q in work if any(row[phase] and row[q] for row in self.shared)]
                self.left[piece, phase] -= step_s / len(users)
            now_s += step_s
            self.left = {job: left for job, left in self.left.items() if left > step_s / 100}
        return now_s


@given(st.lists(st.integers(1, 6), min_size=2, max_size=3), st.integers(1, 4), st.booleans())
def test_pieces_take_what_their_execution_takes(phases, slices, common):
    """Of a phase every wire is busy while it works, or none that another needs; steps are small against phases."""
    shared = apart(len(phases))
    if common:
        shared = tuple(tuple(float(p in (0, len(phases) - 1)) for p in range(len(phases))) for _ in (0,)) + shared
    executed_s = Wires([float(each) for each in phases], slices, shared).run(1 / 64)
    assert pipelined_time_s([float(each) for each in phases], slices, shared) == pytest.approx(executed_s, abs=1 / 8)


def test_short_vectors_are_not_cut_where_a_machine_says_so():
    machine = topology.cluster("dl1.24xlarge x4")
    assert plan("all_reduce", 32_000_000, machine).slices == 1
    assert plan("all_gather", 1_024_000_000, machine).slices > 1
