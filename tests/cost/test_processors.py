"""Prices beyond wires: shared processors, and what the machine's own library carries out."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import topology
from overlap.collectives.generators import GENERATORS, generate
from overlap.collectives.placement import place_group
from overlap.cost.parameters import cost_parameters
from overlap.cost.placed import place_rounds
from overlap.cost.rounds import read_rounds
from overlap.cost.select import plan
from tests.properties import one_in

# -- what processes of one computer take of the processors that they share ---------------------------------------------

MACHINE = """\
extends = "local"
name = "{ranks} at a desk"
[collectives.between_nodes]
cores = {cores}
launch_s = 0
wake_s = {wake_s}
crowding = {crowding}
memory_bytes_per_s = 1e9
reducer_bytes_per_s = 1e12
[collectives.between_nodes.wires.efa]
busy_s = {busy_s}
busy_bytes_per_s = 2e6
"""


@pytest.fixture
def desk(tmp_path):
    def make(*, cores, ranks=4, wake_s=0, busy_s=0, crowding=1):
        file = tmp_path / f"{cores}.toml"
        file.write_text(MACHINE.format(cores=cores, ranks=ranks, wake_s=wake_s, busy_s=busy_s, crowding=crowding))
        return topology.cluster(f"{file} x{ranks}", ranks=ranks)

    return make


def work_s(machine, collective, algorithm, nbytes=0, **options):
    placed = place_rounds(
        place_group(machine),
        read_rounds(generate(collective, algorithm, machine.world_size, **options)),
        parameters=cost_parameters(machine, processes=machine.nodes, networked=True),
    )
    return placed.processor_time_s(nbytes)


def test_a_message_is_half_the_senders_work_and_half_the_receivers(desk):
    apart = desk(cores=4, busy_s=1e-4)
    assert work_s(apart, "broadcast", "mesh") == pytest.approx(3 * 1e-4 / 2)  # of the root: three messages leave
    assert work_s(apart, "gather", "mesh") == pytest.approx(3 * 1e-4 / 2)
    assert work_s(apart, "all_gather", "mesh") == pytest.approx(6 * 1e-4 / 2)
    assert work_s(apart, "broadcast", "mesh", 2_000_000) - 0.004 == pytest.approx(3 * 1e-4 / 2 + 3 * 0.5, rel=1e-3)


def test_who_waits_is_woken_in_each_step_where_processes_are_more_than_cores(desk):
    crowded = desk(cores=2, busy_s=1e-4, wake_s=1e-3)
    # 12 messages each; all four ranks wait in one step, and in three.
    assert work_s(crowded, "all_gather", "mesh") == pytest.approx((12 * 1e-4 + 4 * 1e-3) / 2)
    assert work_s(crowded, "all_gather", "ring") == pytest.approx((12 * 1e-4 + 12 * 1e-3) / 2)
    assert work_s(desk(cores=4, busy_s=1e-4, wake_s=1e-3), "all_gather", "ring") == pytest.approx(12 * 1e-4 / 4)


def test_neighbours_work_on_processors_of_their_own_and_the_next_but_one_on_the_same(desk):
    two = desk(cores=2)
    one_way_s = 1.0  # 2 MB by two processes at the same time
    copied_s = 4e-3  # by the root, for itself
    assert work_s(two, "broadcast", "chain", 2_000_000, slices=1) == pytest.approx(
        3 * one_way_s / 2 + copied_s, rel=1e-6
    )
    # From rank 0 to 1; then from 0 to 2 on one processor, and from 1 to 3 on the other.
    in_two_steps_s = one_way_s / 2 + one_way_s
    assert work_s(two, "broadcast", "binomial", 2_000_000) == pytest.approx(in_two_steps_s + copied_s, rel=1e-6)


def test_bytes_take_longer_where_several_processes_are_at_work_on_a_processor(desk):
    def more_s(algorithm, **options):
        crowded, calm = (
            work_s(desk(cores=2, crowding=times), "broadcast", algorithm, 2_000_000, **options) for times in (3, 1)
        )
        return crowded - calm

    assert more_s("chain", slices=1) == 0.0
    assert more_s("chain", slices=4) > 0.0  # while rank 1 passes on the first, rank 0 sends the second
    assert more_s("binomial") == pytest.approx(2 * 1.0)
    # One message to rank 2, beside one of the root's three, which has the processor to itself then.
    assert more_s("mesh") == pytest.approx(2 * 1.0)


def test_of_processes_that_do_not_come_out_even_none_has_a_processor_of_its_own(desk):
    assert work_s(desk(cores=2, ranks=3, busy_s=1e-4), "broadcast", "mesh") == pytest.approx(2 * 1e-4 / 2)
    assert work_s(desk(cores=3, ranks=3, busy_s=1e-4), "broadcast", "mesh") == pytest.approx(2 * 1e-4 / 2)
    assert work_s(desk(cores=2, ranks=5, busy_s=1e-4), "all_gather", "mesh") == pytest.approx(20 * 1e-4 / 2)


@pytest.mark.parametrize(("algorithm", "copied"), [("mesh", 1), ("bruck", 8)])
def test_copies_keep_a_processor_busy(desk, algorithm, copied):
    # Of each vector, mesh copies its own block, four of 16; two processes on each of two processors.
    sent_s = {"mesh": 12, "bruck": 16}[algorithm] * 1e6 / 4 / 2e6 / 2
    told_s = work_s(desk(cores=2), "all_to_all", algorithm, 1_000_000)
    assert told_s - sent_s == pytest.approx(2 * copied * 1e6 / 1e9 / 2, rel=1e-6)


def test_the_plan_of_small_exchanges_among_four_has_one_step():
    four = topology.cluster("local", nodes=4, ranks=4)
    assert plan("all_to_all", 64 << 10, four).steps == 1
    assert plan("gather", 64 << 10, four).steps == 1


# -- prices of what the machine's own library carries out, and of what crosses the levels of a fabric ------------------

SWITCHED = str(Path(__file__).parents[1] / "switched.toml")
SIZES = st.integers(min_value=3, max_value=34).map(lambda power: 1 << power)
MACHINES = st.sampled_from([SWITCHED, "trn1.32xlarge", "dl1.24xlarge"])
COLLECTIVES = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"])


def placed(name, nodes):
    return topology.cluster(name, nodes=nodes, strict=False)


def test_no_schedule_that_the_library_lacks_is_promised():
    """What we could run in less time is a proposal, and can be asked for by name."""
    machine, pair = topology.cluster("trn1.32xlarge x2"), (0, 32)
    found = plan("all_reduce", 1 << 27, machine, pair)
    assert found.library == "NeuronX"
    assert found.proposals
    assert all(each.predicted_s < found.predicted_s for each in found.proposals)
    assert "double_binary_tree" in {each.algorithm for each in found.proposals}
    ours = plan("all_reduce", 1 << 27, machine, pair, algorithm="double_binary_tree")
    assert (ours.algorithm, ours.library) == ("double_binary_tree", "")
    table = plan("all_reduce", 1 << 27, machine, pair, programs_only=True)
    assert len(table.schedule()) > 0


@one_in(4)
@given(MACHINES, COLLECTIVES, SIZES, st.sampled_from([1, 2, 4]))
def test_more_bytes_never_take_less(name, op, nbytes, nodes):
    machine = placed(name, nodes)
    assert plan(op, nbytes, machine).predicted_s <= plan(op, 2 * nbytes, machine).predicted_s * (1 + 1e-9)


KINDS = {name: topology.cluster(name, strict=False) for name in topology.names()}
# Machines of more ranks have no other kinds of wires, and plans of theirs take seconds.
EVERY = st.sampled_from([name for name, of in KINDS.items() if of.machine.network and of.world_size <= 32])


@one_in(4)
@given(EVERY, st.sampled_from(list(GENERATORS)), SIZES)
def test_a_group_of_one_node_is_the_node_alone(name, op, nbytes):
    alone, beside = placed(name, 1), placed(name, 2)
    ranks = tuple(range(alone.world_size))
    assert plan(op, nbytes, beside, ranks).predicted_s == plan(op, nbytes, alone).predicted_s


LEVELS = """
[[fabric.levels]]
name = "leaf"
nodes = 2
oversubscription = 4
"""


@pytest.fixture
def leaves(tmp_path):
    path = tmp_path / "leaves.toml"
    path.write_text(f"{Path(SWITCHED).read_text()}\n{LEVELS}")
    return topology.cluster(f"{path} x4")


def test_a_ring_leaves_each_block_once(leaves):
    found = plan("all_gather", 1 << 30, leaves, algorithm="ring")
    (crossed,) = found.levels
    assert (crossed.level, found.algorithm) == ("leaf", "ring")
    assert crossed.busiest == pytest.approx(31 / 32)
    assert crossed.share == pytest.approx(2 * 31 / 32)
    out_bytes_per_s = 2 * 32 * 12.5e9 / 4
    assert crossed.s_per_byte == pytest.approx(31 / 32 / out_bytes_per_s)


def test_an_oversubscribed_level_bounds_what_crosses_it(leaves):
    free = topology.cluster(f"{SWITCHED} x4")
    slow, fast = (plan("all_reduce", 8 << 30, each) for each in (leaves, free))
    assert slow.predicted_s >= slow.levels[0].s_per_byte * (8 << 30)
    assert slow.predicted_s > 1.5 * fast.predicted_s
    told_s = sum(getattr(slow.breakdown, name) for name in slow.breakdown.__slots__)
    assert told_s == pytest.approx(slow.predicted_s, rel=1e-9)
    inside = tuple(range(16))  # of one block
    assert plan("all_reduce", 8 << 30, leaves, inside).predicted_s == pytest.approx(
        plan("all_reduce", 8 << 30, free, inside).predicted_s
    )
