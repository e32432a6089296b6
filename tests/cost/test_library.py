"""Prices of what the machine's own library carries out, and of what crosses the levels of a fabric."""

from math import sqrt

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import topology
from overlap.cost.forced import faster_collectives
from overlap.cost.select import plan
from overlap.errors import ScheduleError
from tests.properties import one_in

P5 = topology.cluster("p5.48xlarge x2")
SIZES = st.integers(min_value=3, max_value=34).map(lambda power: 1 << power)
MACHINES = st.sampled_from(["p4d.24xlarge", "p5.48xlarge", "p6-b200.48xlarge", "trn1.32xlarge", "dl1.24xlarge"])
COLLECTIVES = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"])


def placed(name, nodes):
    return topology.cluster(name, nodes=nodes, strict=False)


def test_a_ring_takes_its_launch_its_hops_and_its_bytes():
    """By hand: 15 hops, 2 of them between nodes; 8 rings, of which each leaves a node through adapters of its own."""
    found = next(a for a in (plan("all_gather", 1 << 30, P5),) if a.detail == "protocol Simple")
    hops_s = 13 * 6e-6 + 2 * (14e-6 + 2 * 20e-6)  # a hop inside waits for three posts of 2 us
    bytes_s = 15 / 16 * (1 << 30) / min(450e9 * 0.8, 32 * 12.5e9 * 0.85)
    assert found.predicted_s == pytest.approx(8e-6 + 8.4e-6 + hops_s + bytes_s, rel=1e-12)


@pytest.mark.parametrize(("nbytes", "chunk"), [(8 << 30, 128), (512 << 20, 64), (32 << 20, 32), (4 << 20, 16)])
def test_a_sum_in_the_switch_is_a_pipeline_of_pieces_into_it_through_it_and_out_of_it(nbytes, chunk):
    """By hand: 16 channels and 8 ranks have a piece each on its way; two stages more than the one that is busy."""
    ways = [each for each in all_ways("p5.48xlarge", nbytes) if each.algorithm == "NCCL nvls"]
    s_per_byte = 9 / 8 / (450e9 * 0.8 * 0.85)
    piece = min(16 * 8 * chunk << 10, nbytes)
    assert ways[0].predicted_s == pytest.approx(8e-6 + 25e-6 + s_per_byte * (nbytes + 2 * piece), rel=1e-12)


def all_ways(name, nbytes):
    found = plan("all_reduce", nbytes, topology.cluster(name))
    return [found, *(each for each in found.alternatives if each.predicted_s is not None)]


def test_what_a_library_carries_out_has_no_table():
    found = plan("all_reduce", 8 << 30, topology.cluster("p5.48xlarge"))
    assert (found.algorithm, found.library) == ("NCCL nvls", "NCCL 2.28")
    with pytest.raises(ScheduleError, match=r"NCCL nvls: only the machine.s library can run it; choose"):
        found.schedule()


def test_fewer_than_three_ranks_do_not_sum_in_the_switch():
    assert plan("all_reduce", 8 << 30, topology.cluster("p5.48xlarge"), (0, 1)).algorithm == "NCCL ring"


def test_the_first_piece_passes_all_stages_of_a_tree_and_the_others_follow_it(tmp_path):
    """By hand: 7 hops to a node's first rank, one to the other node, and back; 16 channels have 512 KiB each."""
    path = tmp_path / "trees.toml"
    settings = 'without = ["nvls", "nvls_tree", "ring"]\nprotocols_between = ["Simple"]\n'
    path.write_text(f'extends = "p5.48xlarge"\nname = "trees"\n[collectives.library]\n{settings}')
    for nbytes in (1 << 20, 8 << 20, 1 << 30):
        found = plan("all_reduce", nbytes, topology.cluster(f"{path} x2"))
        latency_s = 8e-6 + 8.4e-6 + 2 * (7 * 4e-6 + 14e-6 + 2 * 20e-6)
        near, far = 450e9 * 0.8, 32 * 12.5e9 * 0.85
        first_s = min(nbytes, 8 << 20) * (14 / near + 1 / far)  # half of the trees cross in each direction
        others_s = max(nbytes - (8 << 20), 0) * 2 / near
        assert (found.algorithm, found.detail) == ("NCCL tree", "protocol Simple")
        assert found.predicted_s == pytest.approx(latency_s + first_s + others_s, rel=1e-12)


def test_older_trees_had_pieces_that_suit_the_vector(tmp_path):
    path = tmp_path / "old.toml"
    settings = 'version = "2.8"\nwithout = ["ring"]\nprotocols_between = ["Simple"]\n'
    path.write_text(f'extends = "p5.48xlarge"\nname = "old"\n[collectives.library]\n{settings}')
    found = plan("all_reduce", 1 << 30, topology.cluster(f"{path} x2"))
    latency_s, bytes_s = 8.4e-6 + 2 * (7 * 4e-6 + 14e-6 + 2 * 20e-6), 2 * (1 << 30) / (450e9 * 0.8)
    assert found.algorithm == "NCCL tree"
    assert found.predicted_s == pytest.approx(8e-6 + (sqrt(bytes_s) + sqrt(latency_s)) ** 2, rel=1e-12)


def test_an_all_reduce_waits_longer_at_each_hop_of_a_ring_between_nodes(tmp_path):
    """NCCL's own model has that factor of 1.4 for whole chunks, and calls it a plateau."""
    path = tmp_path / "rings.toml"
    settings = 'without = ["nvls", "nvls_tree", "tree"]\nprotocols_between = ["Simple"]\n'
    path.write_text(f'extends = "p5.48xlarge"\nname = "rings"\n[collectives.library]\n{settings}')
    found = plan("all_reduce", 1 << 20, topology.cluster(f"{path} x2"))
    latency_s = 8.4e-6 + 26 * 6e-6 + 4 * (14e-6 + 2 * 20e-6)
    bytes_s = 2 * 15 / 16 * (1 << 20) / (32 * 12.5e9 * 0.85)
    assert found.predicted_s == pytest.approx(8e-6 + 1.4 * latency_s + bytes_s, rel=1e-12)
    reasons = {each.algorithm: each.why_not for each in found.alternatives if each.why_not}
    assert reasons["NCCL tree"] == reasons["NCCL nvls_tree"] == "the machine's settings switch it off"


def test_no_schedule_that_the_library_lacks_is_promised():
    """What we could run in less time is a proposal, and can be asked for by name."""
    found = plan("all_reduce", 1 << 20, P5)
    assert found.algorithm.startswith("NCCL ")
    assert found.proposals
    assert all(each.predicted_s < found.predicted_s for each in found.proposals)
    assert not any(each.algorithm.startswith("NCCL ") for each in found.proposals)
    ours = plan("all_reduce", 1 << 20, P5, algorithm="hierarchical")
    assert (ours.algorithm, ours.library) == ("hierarchical", "")
    table = plan("all_reduce", 1 << 20, P5, programs_only=True)
    assert len(table.schedule()) > 0


def test_one_rank_of_each_node_has_pat():
    found = plan("all_gather", 1 << 10, placed("p5.48xlarge", 64), tuple(range(0, 512, 8)))
    assert "NCCL pat" in {found.algorithm, *(each.algorithm for each in found.alternatives)}
    whole = plan("all_gather", 1 << 10, placed("p5.48xlarge", 4))
    assert {each.algorithm: each.why_not for each in whole.alternatives}["NCCL pat"] == "it is for nodes of one rank"


def test_a_network_whose_switches_add_sends_each_byte_once(tmp_path):
    path = tmp_path / "sharp.toml"
    path.write_text('extends = "p5.48xlarge"\nname = "sharp"\n[fabric]\nsums = true\n')
    plain, sums = placed("p5.48xlarge", 8), topology.cluster(f"{path} x8")
    slow, fast = (plan("all_reduce", 8 << 30, each) for each in (plain, sums))
    assert (slow.algorithm == "NCCL nvls_sharp", fast.algorithm) == (False, "NCCL nvls_sharp")
    assert fast.predicted_s < slow.predicted_s


@one_in(4)
@given(MACHINES, COLLECTIVES, SIZES, st.sampled_from([1, 2, 4]))
def test_more_bytes_never_take_less(name, op, nbytes, nodes):
    machine = placed(name, nodes)
    assert plan(op, nbytes, machine).predicted_s <= plan(op, 2 * nbytes, machine).predicted_s * (1 + 1e-9)


KINDS = {name: topology.cluster(name, strict=False) for name in topology.names()}
# Machines of more ranks have no other kinds of wires, and plans of theirs take seconds.
EVERY = st.sampled_from([name for name, of in KINDS.items() if of.machine.network and of.world_size <= 32])
INSTEAD = {
    "reduce": ("all_reduce",),
    "gather": ("all_gather",),
    "broadcast": ("all_reduce",),
    "all_reduce": ("reduce_scatter", "all_gather"),
}


@one_in(6)
@given(EVERY, st.sampled_from(list(INSTEAD)), st.integers(min_value=64, max_value=1 << 26), st.sampled_from([1, 2]))
@example("p4d.24xlarge", "reduce", 3342080 // 64, 8)
@example("inf2.48xlarge", "gather", 1 << 14, 1)
@example("trn1.32xlarge", "all_reduce", 1 << 16, 2)
def test_what_gives_less_takes_no_longer_unless_the_library_says_so(name, op, blocks, nodes):
    machine = placed(name, nodes)
    nbytes = blocks * machine.world_size
    narrow, *wide = (plan(each, nbytes, machine, dtype="uint8") for each in (op, *INSTEAD[op]))
    wide_s = sum(each.predicted_s for each in wide)
    if narrow.predicted_s > wide_s * (1 + 1e-9):
        assume(op != "broadcast" or narrow.library)  # ours is no part of an all-reduce
        instead = faster_collectives(narrow, machine)
        assert instead is not None
        assert (instead.predicted_s, instead.collectives) == (wide_s, INSTEAD[op])


@one_in(4)
@given(EVERY, st.sampled_from([*INSTEAD, "all_gather", "reduce_scatter", "all_to_all", "scatter"]), SIZES)
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
    path.write_text(f'extends = "p5.48xlarge"\nname = "leaves"\n{LEVELS}')
    return topology.cluster(f"{path} x4")


def test_a_ring_leaves_each_block_once(leaves):
    found = plan("all_gather", 1 << 30, leaves)
    (crossed,) = found.levels
    assert (crossed.level, found.algorithm) == ("leaf", "NCCL ring")
    assert crossed.busiest == pytest.approx(31 / 32)
    assert crossed.share == pytest.approx(2 * 31 / 32)
    out_bytes_per_s = 2 * 32 * 12.5e9 / 4
    assert crossed.s_per_byte == pytest.approx(31 / 32 / out_bytes_per_s)


def test_an_oversubscribed_level_bounds_what_crosses_it(leaves):
    free = topology.cluster("p5.48xlarge x4")
    slow, fast = (plan("all_gather", 8 << 30, each) for each in (leaves, free))
    assert slow.predicted_s >= slow.levels[0].s_per_byte * (8 << 30)
    assert slow.predicted_s > 1.5 * fast.predicted_s
    told_s = sum(getattr(slow.breakdown, name) for name in slow.breakdown.__slots__)
    assert told_s == pytest.approx(slow.predicted_s, rel=1e-9)
    inside = tuple(range(16))  # of one block
    assert plan("all_gather", 8 << 30, leaves, inside).predicted_s == pytest.approx(
        plan("all_gather", 8 << 30, free, inside).predicted_s
    )
