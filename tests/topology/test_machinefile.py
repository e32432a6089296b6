"""Machine files: a stranger's machine, libraries and fabrics as data, and every mistake is one line."""

import re
import subprocess
import sys
import tomllib
from datetime import date
from typing import get_args

import pytest

import topology
import transports
from tests.errors import error_of
from topology import Cluster, LinkKind, TopologyError, TopologyWarning
from topology.machine import WIRED
from topology.machinefile import parse
from topology.picture import draw

# -- machine files: a stranger's machine works like ours, and every mistake is one line that names the key -------------

GOOD = """
name = "mine"
devices = 4

[chip]
name = "Thing"
cores = 2

[chip.flops_per_s]
bf16 = 1e12

[wires]
shape = "links"
pairs = [[0, 1], [1, 2], [2, 3], [1, 3]]
link = "nvlink"

[links.chip]
latency_s = 0
bandwidth_bytes_per_s = 1e11

[links.nvlink]
latency_s = 1e-6
bandwidth_bytes_per_s = { value = 2e10, source = "a leaflet", confidence = "C" }

[links.ethernet]
latency_s = 2e-5
bandwidth_bytes_per_s = 1e9

[network]
nics = 8
link = "ethernet"

[[rules]]
id = "pairs"
kind = "multiple"
sizes = [2]
text = "even groups"
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_users_machine(write):
    cluster = Cluster.load(write(GOOD), nodes=2)
    assert (cluster.name, cluster.world_size, cluster.ranks_per_node) == ("mine x2", 16, 8)
    assert [link.dst.index for link in cluster.route(0, 4)] == [1, 2]
    assert [link.dst.index for link in cluster.route(0, 6)] == [1, 3]
    assert cluster.link_kind(0, 8) == "ethernet"
    assert cluster.route(0, 8)[0].bandwidth_bytes_per_s == 2e9  # two of the eight adapters per device
    assert cluster.nic_share_bytes_per_s() == 1e9
    assert cluster.flops_per_s("bf16") == 5e11
    assert cluster.rings(range(2, 8)) == ((2, 3, 4, 5, 6, 7),)
    assert cluster.rings(range(8)) == ()
    assert cluster.ring_order(range(8)) == tuple(range(8))


def test_figures_keep_their_source_or_name_the_file(write):
    spec = Cluster.load(write(GOOD)).link("nvlink")
    assert (spec.bandwidth_bytes_per_s.source, spec.bandwidth_bytes_per_s.confidence) == ("a leaflet", "C")
    assert (spec.latency_s.source, spec.latency_s.confidence) == ("mine.toml", "E")


def test_users_machines_are_lenient_unless_told_otherwise(write):
    path = write(GOOD)
    with pytest.warns(TopologyWarning, match="rule pairs"):
        Cluster.load(path).check_group(range(3))
    with pytest.raises(TopologyError, match=r"rule pairs: even groups \[mine\.toml\]"):
        Cluster.load(write("strict = true\n" + GOOD)).check_group(range(3))


def test_by_name_of_the_file(write):
    assert topology.cluster(f"{write(GOOD)} x2", ranks=4).ranks_per_node == 2


def test_switch(write):
    text = GOOD.replace('shape = "links"\npairs = [[0, 1], [1, 2], [2, 3], [1, 3]]', 'shape = "switch"')
    cluster = Cluster.load(write(text))
    up, down = cluster.route(0, 6)
    assert (up.src.index, up.dst, down.src, down.dst.index) == (0, topology.WireEnd("switch", 0, 0), up.dst, 3)
    assert (up.latency_s, down.latency_s) == (1e-6, 0.0)
    assert cluster.bisection_bytes_per_s() == 2 * 2e10


@pytest.mark.parametrize(("shape", "rings"), [("switch", 1), ("full", 2)])
def test_a_switch_port_carries_one_ring(write, shape, rings):
    text = GOOD.replace('shape = "links"\npairs = [[0, 1], [1, 2], [2, 3], [1, 3]]', f'shape = "{shape}"')
    cluster = Cluster.load(write(text.replace("devices = 4", "devices = 6")))
    assert len(cluster.rings()) == rings


def test_extending_changes_only_what_is_said(write):
    cluster = Cluster.load(
        write(
            'extends = "trn2.48xlarge"\nname = "slow"\n[links.efa]\nbandwidth_bytes_per_s = { value = 1e9 }\n'
            '[[rules]]\nid = "trn2-sizes-lnc2"\nkind = "sizes"\nlnc = 2\nsizes = [2, 4]\ntext = "mine"\n'
        )
    )
    theirs = topology.cluster("trn2.48xlarge")
    assert cluster.bandwidth_bytes_per_s("efa") == 1e9
    assert cluster.latency_s("efa") == theirs.latency_s("efa")
    assert cluster.link("efa").bandwidth_bytes_per_s.source == "mine.toml"
    assert cluster.machine.wires == theirs.machine.wires
    assert [rule.id for rule in cluster.rules] == [rule.id for rule in theirs.rules]
    assert cluster.strict
    with pytest.raises(TopologyError, match="rule trn2-sizes-lnc2: mine"):
        cluster.check_group(range(16))


BAD = [
    ("devices = 4", "", "devices: missing, expected a whole number"),
    ("devices = 4", "devices = 0", 'devices: expected a whole number, 1 or more, or "any", found 0'),
    ("devices = 4", "devices = 4097", "devices: expected at most 4096, found 4097"),
    ("devices = 4", "devices = true", 'devices: expected a whole number, 1 or more, or "any", found True'),
    ("devices = 4", "devices = 5", "wires.pairs: expected a connected graph, found no way from device 0 to 4"),
    ("devices = 4", "devices = 3", "wires.pairs: expected pairs of different devices below 3, found [2, 3]"),
    ("[0, 1]", "[1, 1]", "wires.pairs: expected pairs of different devices below 4, found [1, 1]"),
    ("[0, 1]", "[0]", "wires.pairs[0]: expected a pair such as [0, 1], found [0]"),
    ("cores = 2", "cores = 2\nlnc = [3]", "chip.lnc: expected divisors of the 2 cores, found [3]"),
    ("cores = 2", "cores = 2\nlnc = []", "chip.lnc: expected divisors of the 2 cores, found []"),
    ("cores = 2", "core = 2", "chip.core: unknown key; did you mean 'cores'? known here: name, cores, lnc"),
    ("cores = 2", "", "chip.cores: missing, expected a whole number, 1 or more"),
    ("cores = 2", "cores = 2\ncorse = 2", "chip.corse: unknown key; did you mean 'cores'?"),
    (
        "bf16 = 1e12",
        'bf16 = "fast"',
        "chip.flops_per_s.bf16: expected a positive number, or { value, source, confidence }, found 'fast'",
    ),
    ('shape = "links"', 'shape = "star"', "wires.shape: expected one of none, ring, chain, torus, grid, full,"),
    ('shape = "links"', 'shape = "torus"', "wires.dims: missing, expected a list of whole numbers"),
    (
        'shape = "links"\npairs = [[0, 1], [1, 2], [2, 3], [1, 3]]',
        'shape = "torus"\ndims = [2, 3]',
        "wires.dims: expected sides whose product is devices = 4, found [2, 3]",
    ),
    ('link = "nvlink"', 'link = "roce"', "wires.link: expected a kind that has a [links.*] table: chip, nvlink, ether"),
    ('link = "ethernet"', 'link = "efa"', "network.link: expected a kind that has a [links.*] table: chip, nvlink,"),
    ("[links.nvlink]", "[links.nvlnk]", "links.nvlnk: unknown key; did you mean 'nvlink'? known here: chip, neuron"),
    (
        "latency_s = 1e-6",
        "latency_s = -1",
        "links.nvlink.latency_s: expected a number, 0 or more, or { value, source, confidence }, found -1",
    ),
    ("value = 2e10", "value = -2e10", "links.nvlink.bandwidth_bytes_per_s.value: expected a positive number, found -2"),
    ("value = 2e10", "value = nan", "links.nvlink.bandwidth_bytes_per_s.value: expected a positive number, found nan"),
    ("value = 2e10, ", "", "links.nvlink.bandwidth_bytes_per_s.value: missing, expected a positive number"),
    ('confidence = "C"', 'confidence = "Z"', "links.nvlink.bandwidth_bytes_per_s.confidence: expected one of A, B, C"),
    ("latency_s = 2e-5\n", "", "links.ethernet.latency_s: missing, expected a number, 0 or more, or { value, sour"),
    ("nics = 8", "nics = 1.5", "network.nics: expected a whole number, 1 or more, or { value, so"),
    ('kind = "multiple"', 'kind = "even"', "rules[0].kind: expected one of sizes, multiple, tiles, sets, devices"),
    ("sizes = [2]", "", "rules[0].sizes: expected numbers, because the kind is 'multiple', found none"),
    ('kind = "multiple"', 'kind = "sets"', "rules[0].sets: expected groups such as '0-15,48-63', because the kind"),
    ("sizes = [2]", "sizes = [2]\nsince = 2024\nuntil = 2023", "rules[0].until: expected a year not before since"),
    ('text = "even groups"', "", "rules[0].text: missing, expected a text"),
    ("[network]", "numa = [0]\n[network]", "links.ethernet.numa: unknown key"),
    ("devices = 4", "devices = 4\nnuma = [0, 1]", "numa: expected one number for each of 4 devices, found 2 numbers"),
    ("devices = 4", 'devices = 4\nextends = "mine"', "extends: expected one of dl1.24xlarge, "),
    ("devices = 4", 'devices = "any"', "wires.shape: expected full or switch, because devices is 'any', found 'links'"),
    ("cores = 2", 'cores = "2"', "chip.cores: expected a whole number, 1 or more, found '2'"),
    (
        '[chip]\nname = "Thing"\ncores = 2\n\n[chip.flops_per_s]\nbf16 = 1e12',
        "chip = 3",
        "chip: expected a table, found 3",
    ),
    ("[1, 3]]", "[1, 3]]\ndims = [4]", "wires.dims: expected nothing, because the shape is 'links', found [4]"),
    ('link = "nvlink"', "", "wires.link: missing, expected a kind that has a [links.*] table"),
    (
        "sizes = [2]",
        'sizes = [2]\nsets = ["7-3"]',
        "rules[0].sets[0]: '7-3' is not a list of ranks: the range 7-3 runs",
    ),
    ("sizes = [2]", 'sizes = [2]\nexempts = ["all"]', "rules[0].exempts[0]: expected one of sizes, multiple, tiles"),
    ('id = "pairs"', "id = {}", "rules[0].id: expected a text, found {}"),
    ("devices = 4", "devices = 4\nx = " + "[" * 20_000, "is not TOML: "),
    ("devices = 4", "devices = 4\nstrict = 1", "strict: expected true or false, found 1"),
    ("[chip]", "[chip", "is not TOML: "),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD)
def test_every_mistake_is_one_line_that_names_the_key(write, old, new, message):
    assert GOOD.count(old) >= 1
    error = error_of(TopologyError, Cluster.load, write(GOOD.replace(old, new, 1)))
    assert message in str(error)
    assert "mine.toml" in str(error)
    assert "\n" not in str(error)


def test_a_rule_without_a_proper_id_beside_those_of_a_machine(write):
    with pytest.raises(TopologyError, match=r"^mine\.toml: rules\[\d+\]\.id: expected a text, found \{\}$"):
        Cluster.load(write('extends = "trn2.48xlarge"\n[[rules]]\nid = {}\nkind = "node"\ntext = "mine"\n'))


ODD = [{}, [], [[]], [{}], "", "x", -1, 0, 1.5, float("nan"), True, 10**30, {"value": {}}, date(2026, 1, 1)]


def places(table, path=()):
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("path", list(places(tomllib.loads(GOOD))), ids=str)
def test_whatever_stands_in_a_place_is_taken_or_named(path):
    for odd in ODD:
        document = tomllib.loads(GOOD)
        table = document
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = odd
        told = complained(document)
        assert told is None or re.fullmatch(
            r"mine\.toml: \w[^ ]*: (expected|missing,|unknown key;|'.*' is not) .*", told
        )


def complained(document):
    try:
        parse(document, where="mine.toml")
    except TopologyError as error:
        return str(error)
    return None


def test_all_kinds_of_links_can_be_written():
    assert set(WIRED) == set(get_args(LinkKind)) - {"self", "none"}


def test_missing_file(tmp_path):
    with pytest.raises(TopologyError, match=r"mine\.toml: cannot be read: No such file or directory"):
        Cluster.load(tmp_path / "mine.toml")


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"name = \xff")
    with pytest.raises(TopologyError, match=r"mine\.toml: is not UTF-8 text"):
        Cluster.load(tmp_path / "mine.toml")


FIRST_READ_BY_MANY = """
import sys, threading
from topology.machinefile import load_builtin, builtin_names

sys.setswitchinterval(1e-6)
together = threading.Barrier(8)

def read(name):
    together.wait()
    load_builtin(name)

threads = [threading.Thread(target=read, args=[name]) for name in builtin_names()[:8]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("read")
"""


def test_threads_may_be_the_first_to_read_a_machine_together():
    ran = subprocess.run([sys.executable, "-c", FIRST_READ_BY_MANY], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "read\n"), ran.stderr


def test_former_names_warn() -> None:
    with pytest.warns(DeprecationWarning, match="is now InjectedFault"):
        assert transports.Fault is transports.InjectedFault
    with pytest.warns(DeprecationWarning, match="is now Request"):
        assert transports.Call is transports.Request


# -- libraries and fabrics as data: what a machine file may say of them, and what it is told if it is wrong ------------

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
    assert not library.lists_schedules_of("broadcast")


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
    assert str(error_of(TopologyError, load, f"[collectives.library]\n{text}\n", base)) == told


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
    error = error_of(TopologyError, load, text)
    assert str(error) == (f"ours.toml: {key}: unknown key; read by the planner, which is gone: delete it")


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
    assert str(error_of(TopologyError, load, LEVELS.replace(*change))) == told


def test_a_fabric_needs_a_network(load):
    error = error_of(TopologyError, load, LEVELS, "trn1.2xlarge")
    assert str(error) == (
        "ours.toml: fabric: its switches join the nodes of a [network], and there is none; add one, or "
        "leave [fabric] out"
    )
