"""What processes of one computer take of the processors that they share."""

import pytest

import topology
from overlap.collectives.generators import generate
from overlap.collectives.placement import place
from overlap.cost import on, parameters, rounds
from overlap.cost.select import plan

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
    placed = on(
        place(machine),
        rounds(generate(collective, algorithm, machine.world_size, **options)),
        parameters=parameters(machine, processes=machine.nodes, networked=True),
    )
    return placed.processors_s(nbytes)


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
