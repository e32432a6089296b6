"""Groups that sit alike: the same choice for all of them, and what is not alike is told apart."""

from pathlib import Path

import numpy as np
import pytest

import topology
from overlap.cost.select import plan
from overlap.cost.symmetry import congruence_key

from .worlds import now_ns, simulate

SWITCHED = """
name = "switched"
devices = 2
chip = { name = "abacus", cores = 1 }
wires = { shape = "switch", link = "roce" }
links.roce = { latency_s = 0.0, bandwidth_bytes_per_s = 1e6 }
network = { nics = 2, link = "roce" }
"""

TRN2 = topology.cluster("trn2.48xlarge", nodes=4)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "groups",
    [
        [tuple(range(first, first + 8)) for first in range(0, 256, 8)],
        [tuple(range(local, 256, 64)) for local in range(64)],
        [tuple(range(64)), tuple(range(128, 192))],
    ],
    ids=["blocks of a node", "one of every node", "nodes"],
)
def test_groups_alike_cost_the_same(groups):
    assert len({congruence_key(TRN2, group) for group in groups}) == 1
    plans = [plan("all_reduce", 1 << 20, TRN2, group) for group in (groups[0], groups[-1])]
    assert len({(each.algorithm, each.predicted_s) for each in plans}) == 1


@pytest.mark.parametrize(
    "other",
    [
        (0, 1, 2, 3, 8, 9, 10, 11),  # the same node, devices further apart
        (0, 1, 2, 3, 64, 65, 66, 67),  # another node
        (1, 0, 2, 3, 4, 5, 7, 6, 8),  # of another size
        (0, 4, 1, 5, 2, 6, 3, 7),  # of another order
    ],
)
def test_what_is_not_alike_is_told_apart(other):
    assert congruence_key(TRN2, tuple(range(8))) != congruence_key(TRN2, other)


def test_wires_that_are_shared_are_told_apart():
    """Both go from the first device over the third to the second in as many hops; one passes it on the way."""
    assert congruence_key(TRN2, (0, 8, 4)) != congruence_key(TRN2, (0, 8, 12))


def test_nodes_are_told_apart_where_wires_do_not_tell(tmp_path):
    file = tmp_path / "switched.toml"
    file.write_text(SWITCHED)
    cluster = topology.Cluster.load(file, nodes=2)
    assert congruence_key(cluster, (0, 1)) == congruence_key(cluster, (2, 3)) != congruence_key(cluster, (0, 2))


def test_large_groups_that_are_moved_cost_the_same():
    """Of nodes behind a switch, one device of each; then two, of other numbers."""
    cluster = topology.cluster(str(Path(__file__).parents[1] / "switched.toml"), nodes=80)
    groups = [tuple(range(device, cluster.world_size, 8)) for device in (0, 5)]
    pairs = [tuple(r for r in range(320) if r % 8 in devices) for devices in ((0, 1), (2, 6))]
    for one, other in (groups, pairs):
        assert congruence_key(cluster, one) == congruence_key(cluster, other)
        prices = [
            [(each.algorithm, each.predicted_s) for each in plan("all_gather", 1 << 20, cluster, group).alternatives]
            for group in (one, other)
        ]
        assert prices[0] == prices[1]
    assert congruence_key(cluster, groups[0]) != congruence_key(cluster, pairs[0])
    assert congruence_key(cluster, groups[0]) != congruence_key(cluster, (*groups[0][1:], groups[0][0]))


def test_large_groups_on_other_devices_are_told_apart_where_devices_differ():
    """Neighbours on a torus, and devices that are not; the same devices of other nodes are alike."""
    cluster = topology.cluster("trn2.48xlarge x80")
    near, far = (tuple(r for r in range(2560) if r % 64 in cores) for cores in ((0, 4), (0, 8)))
    assert congruence_key(cluster, near) != congruence_key(cluster, far)
    assert congruence_key(cluster, near) == congruence_key(cluster, tuple(rank + 2560 for rank in near))


def test_a_world_of_many_groups_takes_one_choice():
    async def main(rank):
        grid = rank.mesh(dp=2, tp=8)
        await grid["tp"].all_reduce(np.ones(1000))
        await grid["dp"].all_gather(np.ones(1000))
        return now_ns(rank)

    results, timeline = simulate(main, 16, cluster="dl1.24xlarge x2")
    assert len(set(results)) == 1
    by_group = {(span.info.group, span.info.ranks): span.info.algorithm for span in timeline.spans if span.info}
    assert len(by_group) == 10
    assert len({(name, algorithm) for (name, _), algorithm in by_group.items()}) == 2
