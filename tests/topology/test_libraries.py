"""Libraries and fabrics as data: what a machine file may say of them, and what it is told if it is wrong."""

import pytest

import topology
from topology import Cluster, TopologyError
from topology.picture import draw

GPUS = ("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "u-p6e-gb200x36",
        "u-p6e-gb200x72")  # fmt: skip
NEURON = tuple(name for name in topology.names() if name.startswith(("trn", "inf")))


@pytest.fixture
def load(tmp_path):
    def load(text, base="p5.48xlarge"):
        path = tmp_path / "ours.toml"
        path.write_text(f'extends = "{base}"\nname = "ours"\n{text}')
        return Cluster.load(path, nodes=2)

    return load


def names(library, operation):
    return {model.name for model in library.has(operation)}


@pytest.mark.parametrize("name", GPUS)
def test_every_machine_of_gpus_says_what_nccl_has(name):
    library = topology.cluster(name).machine.collectives.library
    assert (library.label, library.confidence) == ("NCCL 2.28", "A")
    assert names(library, "all_reduce") == {"ring", "tree", "nvls", "nvls_tree", "nvls_sharp"}
    assert names(library, "broadcast") == {"ring"}
    assert library.runs("all_to_all", ("mesh",))
    assert not library.runs("all_reduce", ("mesh",))


@pytest.mark.parametrize("name", NEURON)
def test_every_machine_of_neuron_says_what_its_library_has(name):
    library = topology.cluster(name).machine.collectives.library
    assert library.name == "NeuronX"
    assert library.runs("all_reduce", ("hierarchical", "rdh", "mesh"))
    assert not library.runs("all_reduce", ("hierarchical", "rdh", "double_binary_tree"))
    assert not library.covers("broadcast")


def test_mi300x_has_what_rccl_has():
    library = topology.cluster("mi300x").machine.collectives.library
    assert library.runs("all_reduce", ("hierarchical", "multi_ring", "ring"))
    assert not library.runs("all_reduce", ("mesh",))
    assert library.runs("all_to_all", ("mesh",))


def test_an_older_version_has_fewer_algorithms(load):
    library = load('[collectives.library]\nversion = "2.8"\n').machine.collectives.library
    assert names(library, "all_reduce") == {"ring", "tree"}
    assert names(library, "all_gather") == {"ring"}
    assert names(load('[collectives.library]\nversion = "2.17"\n').machine.collectives.library, "all_reduce") == {
        "ring",
        "tree",
        "nvls",
    }


@pytest.mark.parametrize(
    ("base", "text", "told"),
    [
        ("trn1.32xlarge", 'use = "nccl"\ngeneration = "hopper"\nprocessor = "amd"',
         "ours.toml: collectives.library: NCCL runs over nvlink inside a node, and wires.link is 'neuronlink'; "
         "change one of them"),
        ("p5.48xlarge", 'use = "nncl"',
         "ours.toml: collectives.library.use: expected one of nccl, neuronx, rccl, found 'nncl'"),
        ("p5.48xlarge", 'use = "oneccl"',
         "ours.toml: collectives.library.use: expected one of nccl, neuronx, rccl, found 'oneccl': for GPUs its "
         "documents name one algorithm, topo, and do not describe it"),
        ("dl1.24xlarge", 'use = "HCCL"',
         "ours.toml: collectives.library.use: expected one of nccl, neuronx, rccl, found 'HCCL': no list of its "
         "algorithms on Gaudi is published"),
        ("p5.48xlarge", 'use = "rccl"',
         "ours.toml: collectives.library: RCCL runs over xgmi inside a node, and wires.link is 'nvlink'; "
         "change one of them"),
        ("p5.48xlarge", 'use = "neuronx"',
         "ours.toml: collectives.library: NeuronX runs over neuronlink inside a node, and wires.link is 'nvlink'; "
         "change one of them"),
        ("p5.48xlarge", 'generation = "volta"',
         "ours.toml: collectives.library.generation: expected one of ampere, hopper, blackwell, found 'volta'"),
        ("p5.48xlarge", 'version = "new"',
         "ours.toml: collectives.library.version: expected a version such as '2.18', found 'new'"),
        ("p5.48xlarge", 'protocols_between = ["LL129"]',
         "ours.toml: collectives.library.protocols_between: expected names among LL, LL128, Simple, found 'LL129'"),
        ("p5.48xlarge", 'without = ["nvlz"]',
         "ours.toml: collectives.library.without: expected names among nvls, nvls_sharp, nvls_tree, pat, ring, "
         "send_recv, tree, found 'nvlz'"),
        ("p5.48xlarge", 'chunk_bytes = 0',
         "ours.toml: collectives.library.chunk_bytes: expected a whole number of bytes, 1 or more, found 0"),
    ],
)  # fmt: skip
def test_a_library_that_a_machine_cannot_run(load, base, text, told):
    with pytest.raises(TopologyError) as caught:
        load(f"[collectives.library]\n{text}\n", base)
    assert str(caught.value) == told


LEVELS = """
[fabric]
sums = true
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
fabric between nodes, whose switches add the vectors that pass:
   pod of 64 nodes: 3200 GB/s out, 8.0 : 1
  └─ leaf of 4 nodes on 8 rails: 800 GB/s out, 2.0 : 1
    └─ node: 32 x 12.5 GB/s
"""
        in page
    )
    assert "fabric" not in draw(topology.cluster("p5.48xlarge x2")).replace("-> fabric", "")


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
