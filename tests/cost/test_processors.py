"""What processes of one computer take of the processors that they share."""

import pytest

import topology
from overlap.collectives.cost import on, parameters, rounds
from overlap.collectives.generators import generate
from overlap.collectives.placement import place
from overlap.collectives.select import plan

MACHINE = """\
extends = "local"
name = "four at a desk"
[collectives.between_nodes]
cores = {cores}
launch_s = 0
wake_s = 1e-3
memory_bytes_per_s = 1e9
[collectives.between_nodes.wires.efa]
busy_s = 1e-4
busy_bytes_per_s = 1e12
"""


@pytest.fixture
def desk(tmp_path):
    def make(*, cores):
        file = tmp_path / f"{cores}.toml"
        file.write_text(MACHINE.format(cores=cores))
        return topology.cluster(f"{file} x4", ranks=4)

    return make


def work_s(machine, collective, algorithm):
    placed = on(
        place(machine),
        rounds(generate(collective, algorithm, 4)),
        parameters=parameters(machine, processes=4, networked=True),
    )
    return placed.shared_work_s()


def test_who_waits_is_woken_in_each_step_where_processes_are_more_than_cores(desk):
    crowded = desk(cores=2)
    # 12 messages each; all four ranks wait in one step, and in three.
    assert work_s(crowded, "all_gather", "mesh")[0] == pytest.approx((12 * 1e-4 + 4 * 1e-3) / 2)
    assert work_s(crowded, "all_gather", "ring")[0] == pytest.approx((12 * 1e-4 + 12 * 1e-3) / 2)
    assert work_s(desk(cores=4), "all_gather", "ring")[0] == pytest.approx(12 * 1e-4 / 4)


@pytest.mark.parametrize(
    ("collective", "algorithm", "copied"),
    [
        ("all_to_all", "mesh", 1),  # of each vector its own block
        ("all_to_all", "bruck", 8),
        ("reduce_scatter", "mesh", 2),
        ("reduce_scatter", "rdh", 3),
        ("reduce_scatter", "ring", 4),
    ],
)
def test_copies_keep_a_processor_busy_where_processes_are_more_than_cores(desk, collective, algorithm, copied):
    crowded_s, apart_s = (work_s(desk(cores=cores), collective, algorithm)[1] * cores for cores in (2, 4))
    usual = topology.cluster("local").machine.collectives.usual.memory_bytes_per_s.value
    before = 0 if collective == "reduce_scatter" else 1 / usual  # reductions take copies along
    assert crowded_s - apart_s == pytest.approx(2 * copied * (1e-9 - before))


def test_the_plan_of_small_exchanges_among_four_has_one_step():
    four = topology.cluster("local", nodes=4, ranks=4)
    assert plan("all_to_all", 64 << 10, four).steps == 1
    assert plan("gather", 64 << 10, four).steps == 1
