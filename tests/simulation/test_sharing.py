"""Collectives at once take what their messages take, each of which shares wires with all others."""

from random import Random

import numpy as np
import pytest

import topology
from overlap.cost.select import plan
from overlap.simulation.conditions import Conditions, SlowWires
from overlap.simulation.demand import Pricing
from overlap.simulation.fabric import SimulatedFabric
from overlap.simulation.loads import Resources

from .message_level import fair, finished_s

MIB = 1 << 20

# Machines of which nothing but wires takes time: of 1 GB/s inside a node, and half as much between two.
MACHINE = """
name = "{shape}"
devices = {devices}
[chip]
name = "abacus"
cores = 1
flops_per_s = {{ bf16 = 1e9, fp32 = 1e8 }}
memory_bytes_per_s = 1e30
[wires]
shape = "{shape}"
{dims}
link = "roce"
[links.roce]
latency_s = 1e-6
bandwidth_bytes_per_s = 1e9
[links.efa]
latency_s = 15e-6
bandwidth_bytes_per_s = 0.5e9
[network]
nics = 2
link = "efa"
[collectives]
slices = 1
"""
WIRES = {
    "switch": (8, "", 1),
    "full": (8, "", 1),
    "ring": (8, "", 1),
    "torus": (8, "dims = [2, 4]", 1),
    "two switches": (4, "", 2),
}


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    found = {}
    for name, (devices, dims, nodes) in WIRES.items():
        file = tmp_path_factory.mktemp("machine") / "machine.toml"
        shape = "switch" if nodes > 1 else name
        file.write_text(MACHINE.format(shape=shape, devices=devices, dims=dims))
        found[name] = topology.Cluster.load(file, nodes=nodes, ranks=devices * nodes)
    return found


@pytest.fixture(scope="module")
def switch(clusters):
    return clusters["switch"]


def shared_s(cluster, starts):
    """Return when the fabric says that collectives are done which start at the same instants."""
    fabric, now_ns, done = SimulatedFabric(cluster), 0, {}
    everybody, at_once = range(cluster.world_size), np.zeros(cluster.world_size, np.int64)
    todo = [
        (round(start_s * 1e9), fabric.collective_transfer((n,), "any", option, nbytes, everybody, at_once))
        for n, (start_s, option, nbytes) in enumerate(starts)
    ]
    while len(done) < len(todo):
        starting = [start_ns for start_ns, _ in todo if start_ns >= now_ns]
        fabric.start_transfers(now_ns, [each for start_ns, each in todo if start_ns == now_ns])
        later = [fabric.update_rates(now_ns), *(start_ns for start_ns in starting if start_ns > now_ns)]
        now_ns = min(each for each in later if each is not None)
        done.update({each.transfer.key[0]: now_ns / 1e9 for each in fabric.advance_to(now_ns) if each.last})
    return [done[n] for n in range(len(todo))]


RING, ALL_TO_ALL = ("all_reduce", 64, "ring"), ("all_to_all", 64, "mesh")
GATHER, SCATTER = ("all_gather", 64, "rdh"), ("reduce_scatter", 32, "mesh")
TREE, PAIRWISE, ROOTED = ("broadcast", 64, "binomial"), ("all_to_all", 16, "pairwise"), ("gather", 32, "mesh")
HALVING, ONE_SHOT = ("all_reduce", 16, "rdh"), ("all_reduce", 4, "one_shot")


@pytest.mark.parametrize(
    "mix",
    [
        (RING, ALL_TO_ALL),
        (RING, RING, RING, ALL_TO_ALL),
        (RING, GATHER),
        (RING, PAIRWISE),
        (RING, TREE),
        (TREE, ALL_TO_ALL),
        (ROOTED, ALL_TO_ALL, RING),
        (HALVING, SCATTER, RING),
        (ONE_SHOT, RING, PAIRWISE),
        (RING, ("all_reduce", 64, "mesh"), TREE),
        (GATHER, HALVING, SCATTER, ALL_TO_ALL),
        (("broadcast", 64, "scatter_all_gather"), ("reduce", 16, "reduce_scatter_gather"), RING, PAIRWISE),
    ],
    ids=lambda mix: "+".join(f"{op}:{algorithm}" for op, _, algorithm in mix),
)
@pytest.mark.parametrize("apart_s", [0.0, 0.0113])
def test_a_mix_takes_what_its_messages_take(switch, mix, apart_s):
    starts = [
        (n * apart_s, plan(op, mib * MIB, switch, algorithm=algorithm).option, mib * MIB)
        for n, (op, mib, algorithm) in enumerate(mix)
    ]
    found, expected = np.array(shared_s(switch, starts)), np.array(finished_s(starts))
    begun = np.array([start_s for start_s, *_ in starts])
    assert found - begun == pytest.approx(expected - begun, rel=0.05)


# Collectives of each kind, by several algorithms that exist on all of these wires.
KINDS = [
    *(("all_reduce", name) for name in ("ring", "mesh", "rdh", "one_shot", "recursive_doubling")),
    *(("all_gather", name) for name in ("ring", "mesh", "rdh", "bruck")),
    *(("reduce_scatter", name) for name in ("ring", "mesh", "rdh")),
    *(("all_to_all", name) for name in ("mesh", "pairwise", "bruck")),
    *((op, name) for op in ("broadcast", "reduce", "gather", "scatter") for name in ("mesh", "binomial")),
    ("permute", None),
]


def a_mix(seed, cluster):
    """Choose two to four collectives, their sizes, and when each starts."""
    chance = Random(seed)
    chosen = [(*chance.choice(KINDS), int(2 ** chance.uniform(21, 26))) for _ in range(chance.randint(2, 4))]
    options = [(plan(op, nbytes, cluster, algorithm=name).option, nbytes) for op, name, nbytes in chosen]
    longest_s = max(option.price(nbytes).total_s for option, nbytes in options)
    late_s = [0.0, *(chance.choice([0.0, chance.uniform(0, 0.7 * longest_s)]) for _ in options[1:])]
    return [(round(late, 9), option, nbytes) for late, (option, nbytes) in zip(late_s, options, strict=True)]


@pytest.mark.slow
def test_most_mixes_take_what_their_messages_take(clusters):
    """Each collective proceeds as a whole, at the rate of its busiest wire; most of its messages share that rate."""
    errors = []
    for cluster in clusters.values():
        for seed in range(24):
            starts = a_mix(seed, cluster)
            begun = np.array([start_s for start_s, *_ in starts])
            taken = np.array(shared_s(cluster, starts)) - begun
            errors += abs(taken / (np.array(finished_s(starts)) - begun) - 1).tolist()
    assert np.percentile(errors, 50) < 0.001
    assert np.percentile(errors, 75) < 0.05
    assert np.percentile(errors, 90) < 0.13


LEVEL = """
[[fabric.levels]]
name = "leaf"
nodes = 2
bandwidth_bytes_per_s = 1e9
"""


@pytest.fixture(scope="module")
def leaves(tmp_path_factory):
    """Four nodes of two devices, two behind each leaf, whose way out carries half of what their adapters send."""
    file = tmp_path_factory.mktemp("machine") / "machine.toml"
    file.write_text(MACHINE.format(shape="switch", devices=2, dims="") + LEVEL)
    return topology.Cluster.load(file, nodes=4, ranks=8)


@pytest.mark.parametrize(
    "mix",
    [
        (("all_to_all", 64, "mesh"), ("all_to_all", 32, "mesh")),
        (("all_to_all", 64, "pairwise"), ("all_gather", 16, "ring")),
        (("broadcast", 16, "binomial"), ("all_to_all", 64, "mesh"), ("all_reduce", 16, "rdh")),
    ],
    ids=lambda mix: "+".join(f"{op}:{algorithm}" for op, _, algorithm in mix),
)
def test_collectives_share_the_way_out_of_a_block(leaves, mix):
    def out(src, dst):
        return [] if src // 4 == dst // 4 else [("leaf", src // 4)]

    starts = [(0.0, plan(op, mib * MIB, leaves, algorithm=algorithm).option, mib * MIB) for op, mib, algorithm in mix]
    found = shared_s(leaves, starts)
    assert found == pytest.approx(finished_s(starts, out, {("leaf", 0): 1e9, ("leaf", 1): 1e9}), rel=0.05)
    assert max(found) > 1.1 * max(finished_s(starts))  # as if the way out were free


def test_the_slow_way_shares_wires_fairly():
    """Two on wire 0, one of them on wire 1 as well, where it leaves three quarters to the third."""
    assert fair([[0], [0, 1], [1]], {0: 0.5, 1: 1.0}) == [0.25, 0.25, 0.75]


def test_alone_the_slow_way_takes_what_was_planned(switch):
    for op, algorithm in (("all_reduce", "ring"), ("all_to_all", "mesh"), ("broadcast", "binomial")):
        found = plan(op, MIB, switch, algorithm=algorithm)
        assert finished_s([(0.0, found.option, MIB)]) == [pytest.approx(found.predicted_s, rel=1e-9)]


@pytest.mark.parametrize(("memory_bytes_per_s", "taken_ns"), [("8e9", 1000 + MIB), ("1e9", 3 * MIB)])
def test_a_root_copies_beside_its_messages(tmp_path, memory_bytes_per_s, taken_ns):
    """A broadcast ends with its messages, or when its root's memory has sent and copied all."""
    file = tmp_path / "machine.toml"
    machine = MACHINE.format(shape="full", devices=4, dims="")
    file.write_text(machine.replace("1e30", memory_bytes_per_s))
    cluster = topology.Cluster.load(file, ranks=4)
    found = plan("broadcast", MIB, cluster, algorithm="mesh")
    pricing = Pricing(found.option, np.arange(4), Resources(cluster), SlowWires(Conditions()))
    assert pricing.demand(MIB, np.zeros(4, np.int64)).alone_ns == round(found.predicted_s * 1e9) == taken_ns
