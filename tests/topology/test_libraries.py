"""Libraries and fabrics as data: what a machine file may say of them, and what it is told if it is wrong."""

import pytest

import topology
from topology import Cluster, TopologyError
from topology.picture import draw

NEURON = tuple(name for name in topology.names() if name.startswith(("trn", "inf")))


@pytest.fixture
def load(tmp_path):
    def load(text, base="trn1.32xlarge"):
        path = tmp_path / "ours.toml"
        path.write_text(f'extends = "{base}"\nname = "ours"\n{text}')
        return Cluster.load(path, nodes=2)

    return load


@pytest.mark.parametrize("name", NEURON)
def test_every_machine_of_neuron_says_what_its_library_has(name):
    library = topology.cluster(name).machine.collectives.library
    assert library.name == "NeuronX"
    assert library.runs("all_reduce", ("hierarchical", "rdh", "mesh"))
    assert not library.runs("all_reduce", ("hierarchical", "rdh", "double_binary_tree"))
    assert not library.covers("broadcast")


@pytest.mark.parametrize(
    ("base", "text", "told"),
    [
        ("trn1.32xlarge", 'use = "neuronxx"',
         "ours.toml: collectives.library.use: expected neuronx, found 'neuronxx'"),
        ("dl1.24xlarge", 'use = "neuronx"',
         "ours.toml: collectives.library: NeuronX runs over neuronlink inside a node, and wires.link is 'roce'; "
         "change one of them"),
        ("trn1.32xlarge", 'algorithms = []',
         "ours.toml: collectives.library.algorithms: expected names such as 'ring', found none"),
        ("trn1.32xlarge", 'version = "2.8"',
         "ours.toml: collectives.library.version: unknown key; read by the planner, which is gone: delete it"),
    ],
)  # fmt: skip
def test_a_library_that_a_machine_cannot_run(load, base, text, told):
    with pytest.raises(TopologyError) as caught:
        load(f"[collectives.library]\n{text}\n", base)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("chip.sustained = 0.69", "chip.sustained"),
        ("chip.products.bf16 = { flops_per_s = 1e14, start_s = 7e-6 }", "chip.products"),
        ("chip.memory_efficiency = 0.85", "chip.memory_efficiency"),
        ("fabric.sums = true", "fabric.sums"),
        ("collectives.piece_s = 1e-6", "collectives.piece_s"),
        ("collectives.between_nodes.shared_memory = true", "collectives.between_nodes.shared_memory"),
    ],
)
def test_a_key_that_only_the_planner_read(load, text, key):
    with pytest.raises(TopologyError) as caught:
        load(text)
    assert str(caught.value) == (f"ours.toml: {key}: unknown key; read by the planner, which is gone: delete it")


LEVELS = """
[[fabric.levels]]
name = "leaf"
nodes = 4
rails = 8
oversubscription = 2
[[fabric.levels]]
name = "pod"
nodes = 64
bandwidth_bytes_per_s = 3.2e12
"""


def test_the_levels_of_a_fabric_are_drawn(load):
    page = draw(load(LEVELS))
    assert (
        """\
fabric between nodes:
   pod of 64 nodes: 3200 GB/s out, 2.0 : 1
  └─ leaf of 4 nodes on 8 rails: 200 GB/s out, 2.0 : 1
    └─ node: 8 x 12.5 GB/s
"""
        in page
    )
    assert "fabric" not in draw(topology.cluster("trn1.32xlarge x2")).replace("-> fabric", "")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("oversubscription = 2\n", ""),
         "ours.toml: fabric.levels[0].bandwidth_bytes_per_s: expected the bandwidth out of a block of 'leaf', or its "
         "oversubscription, one of the two, found neither"),
        (("3.2e12", "0"), "ours.toml: fabric.levels[1].bandwidth_bytes_per_s: expected a positive number, or "
         "{ value, source, confidence }, found 0"),
        (("oversubscription = 2", "oversubscription = 0.5"), "ours.toml: fabric.levels[0].oversubscription: expected a "
         "number, 1 or more, or { value, source, confidence }, found 0.5"),
        (("nodes = 64", "nodes = 6"),
         "ours.toml: fabric.levels: expected blocks of ascending nodes, each a multiple of the one below, found "
         "[4, 6]"),
    ],
)  # fmt: skip
def test_a_level_without_a_bandwidth(load, change, told):
    with pytest.raises(TopologyError) as caught:
        load(LEVELS.replace(*change))
    assert str(caught.value) == told


def test_a_fabric_needs_a_network(load):
    with pytest.raises(TopologyError) as caught:
        load(LEVELS, "trn1.2xlarge")
    assert str(caught.value) == "ours.toml: fabric: expected a [network], whose nodes its switches join, found none"
