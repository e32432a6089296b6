"""Prices of what the machine's own library carries out, and of what crosses the levels of a fabric."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import topology
from overlap.collectives.generators import GENERATORS
from overlap.cost.select import plan
from tests.properties import one_in

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
