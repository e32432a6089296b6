"""`[collectives]` of a machine file: figures become the model's, and every mistake is one line that names the key."""

from dataclasses import asdict

import pytest

from overlap.collectives.generators import generate
from overlap.collectives.placement import place_group
from overlap.cost.clocks import cost
from overlap.cost.parameters import IDEAL, cost_parameters
from overlap.cost.placed import place_rounds
from overlap.cost.rounds import read_rounds
from overlap.cost.select import plan
from tests.errors import error_of
from topology import Cluster, Curve, TopologyError, cluster, names

BARE = """
name = "mine"
devices = 4
[chip]
name = "Thing"
cores = 2
[wires]
shape = "full"
link = "nvlink"
[links.nvlink]
latency_s = 1e-6
bandwidth_bytes_per_s = 1e11
[links.ethernet]
latency_s = 2e-5
bandwidth_bytes_per_s = 1e9
[network]
nics = 4
link = "ethernet"
"""

GOOD = (
    BARE
    + """
[collectives]
launch_s = { value = 1e-4, source = "a leaflet", confidence = "C" }
cut_through = 0
memory_efficiency = 0.5
reducer_bytes_per_s = 1e10
slices = 2
chunk_pieces = 4
[collectives.wires.nvlink]
step_s = 2e-6
gap_s = 1e-6
incast_s = 3e-6
reduce_s = 4e-6
efficiency = 0.75
[collectives.wires.ethernet]
efficiency = { points = [[1000, 0.25], [1e6, 0.75]], source = "a log", confidence = "B" }
[collectives.host_copies]
launch_s = 1e-3
[collectives.host_copies.wires.ethernet]
efficiency = 0.5
[collectives.between_nodes]
serial_reduction = true
[collectives.library]
algorithms = ["ring", "mesh"]
source = "a leaflet"
confidence = "A"
"""
)


@pytest.fixture
def load(tmp_path):
    def load(text, **options):
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return Cluster.load(path, **options)

    return load


def test_a_file_that_says_nothing_describes_a_perfect_machine(load):
    assert cost_parameters(load(BARE)) == IDEAL


def test_figures_reach_the_model(load):
    found = cost_parameters(load(GOOD))
    assert (found.launch_s, found.cut_through, found.memory_efficiency, found.most_slices) == (1e-4, 0, 0.5, 2)
    assert (found.start_s, found.gap_s, found.incast_s) == (
        (("nvlink", 2e-6),),
        (("nvlink", 1e-6),),
        (("nvlink", 3e-6),),
    )
    assert (found.reduce_s, found.chunk_pieces) == ((("nvlink", 4e-6),), 4)
    assert found.efficiency == (("nvlink", 0.75), ("ethernet", 0.75))
    assert found.curves == (("ethernet", ((1000, 0.25), (1e6, 0.75))),)
    assert (found.reduction_s_per_byte, found.reduction_overlaps) == (1e-10, True)


SHARED = (
    BARE.replace("devices = 4", "devices = 1").replace("cores = 2", "cores = 1")
    + """
[collectives.between_nodes]
cores = 2
launch_s = 0.25
[collectives.between_nodes.wires.ethernet]
busy_s = 0.5
busy_bytes_per_s = 1024
"""
)


def test_processes_of_one_computer_take_at_least_what_its_processors_do(load):
    cluster = load(SHARED, nodes=4)
    found = plan("broadcast", 4096, cluster, algorithm="mesh")  # three messages
    work_s = 4 * 0.5 / 2 + 4 * 4096 / 1024 / 2  # of ranks 0 and 2: three messages leave, one comes
    assert found.predicted_s == 4 / 2 * 0.25 + work_s
    assert sum(asdict(found.breakdown).values()) == pytest.approx(found.predicted_s, rel=1e-12)
    assert found.breakdown.start_s == 4 * 0.5 / 2
    two = plan("broadcast", 4096, load(SHARED, nodes=2), algorithm="mesh")  # who each have one of their own
    assert two.predicted_s == 0.25 + (0.5 + 4096 / 1024) / 2


def test_what_is_not_said_of_host_copies_or_of_nodes_is_as_usual(load):
    copies = cost_parameters(load(GOOD), peer_direct=False)
    assert (copies.launch_s, copies.most_slices) == (1e-3, 2)
    assert (copies.efficiency, copies.curves) == ((("nvlink", 0.75), ("ethernet", 0.5)), ())
    apart = cost_parameters(load(GOOD, nodes=2))
    assert (apart.launch_s, apart.reduction_overlaps) == (1e-4, False)


def test_ranks_of_a_shared_loop_take_turns(load):
    shared = load(GOOD.replace("slices = 2", "slices = 2\nshared_loop = true"))
    three = cost_parameters(shared, ranks_per_process=3)
    assert (three.launch_s, three.start_s) == (3 * 1e-4, (("nvlink", 3 * 2e-6),))
    assert cost_parameters(load(GOOD), ranks_per_process=3).launch_s == 1e-4


def test_figures_keep_their_source(load):
    told = load(GOOD).machine.collectives
    assert (told.usual.launch_s.source, told.usual.launch_s.confidence) == ("a leaflet", "C")
    curve = told.usual.wires[1].efficiency
    assert isinstance(curve, Curve)
    assert (curve.source, curve.confidence) == ("a log", "B")


def test_a_file_that_extends_another_changes_only_what_it_says(load):
    found = load(
        'extends = "trn2.48xlarge"\nname = "mine"\n[collectives]\nslices = 1\n[collectives.wires.efa]\ngap_s = 1e-6\n'
    )
    theirs = cost_parameters(cluster("trn2.48xlarge"))
    mine = cost_parameters(found)
    assert (mine.most_slices, mine.start_s, mine.efficiency) == (1, theirs.start_s, theirs.efficiency)
    assert dict(mine.gap_s) == dict(theirs.gap_s) | {"efa": 1e-6}


def two_nodes_s(machine, nbytes):
    """Return the time of one message between two nodes."""
    ranks = (0, machine.ranks_per_node)
    table = read_rounds(generate("permute", "mesh", 2, pairs=((0, 1),)))
    return cost(place_rounds(place_group(machine, ranks), table, parameters=cost_parameters(machine)), nbytes).total_s


@pytest.mark.parametrize(("nbytes", "share"), [(10, 0.25), (1000, 0.25), (31_622.7766, 0.5), (1e6, 0.75), (1e9, 0.75)])
def test_small_messages_get_less_of_a_wire(load, nbytes, share):
    """Between two points the share is linear in the logarithm of the size: half way at the geometric mean."""
    machine = load(GOOD.replace("launch_s = {", "meeting_s = {"), nodes=2)
    assert two_nodes_s(machine, nbytes) == pytest.approx(2e-5 + nbytes / (1e9 * share), rel=1e-9)


def test_many_senders_to_one_receiver_wait_for_each_other(load):
    machine = load(BARE + "[collectives.wires.nvlink]\nincast_s = 3e-6\n")
    table = read_rounds(generate("gather", "mesh", 4))
    placed = place_rounds(place_group(machine, (0, 2, 4, 6)), table, parameters=cost_parameters(machine))
    assert cost(placed, 0).total_s == pytest.approx(1e-6 + 2 * 3e-6)


def test_a_file_says_what_the_machines_own_library_has(load):
    library = load(GOOD).machine.collectives.library
    assert library is not None
    assert (library.algorithms, library.source, library.confidence) == (("ring", "mesh"), "a leaflet", "A")
    assert load(BARE).machine.collectives.library is None


WHOLE = "a whole number, 1 or more, or { value, source, confidence }"
BAD = [
    ('["ring", "mesh"]', "[]", "collectives.library.algorithms: expected names such as 'ring', found none"),
    ('["ring", "mesh"]', '"ring"', "collectives.library.algorithms: expected a list of texts, found 'ring'"),
    ("slices = 2", "cores = 1.5", f"collectives.cores: expected {WHOLE}, found 1.5"),
    (
        "slices = 2",
        "crowding = 0.5",
        "collectives.crowding: expected a number, 1 or more, or { value, source, confidence }, found 0.5",
    ),
    ("slices = 2", "slices = 1.5", f"collectives.slices: expected {WHOLE}, found 1.5"),
    ("chunk_pieces = 4", "chunk_pieces = 1.5", f"collectives.chunk_pieces: expected {WHOLE}, found 1.5"),
    (
        "cut_through = 0",
        "cut_through = 2",
        "collectives.cut_through: expected a share from 0 to 1, or { value, source, confidence }, found 2",
    ),
    (
        "launch_s = 1e-3\n[collectives.host",
        "launch_s = -1\n[collectives.host",
        "collectives.host_copies.launch_s: expected a number, 0 or more, or { value, source, confidence }, found -1",
    ),
    (
        "efficiency = 0.75",
        "efficiency = 1.5",
        "collectives.wires.nvlink.efficiency: expected a share, more than 0 and at most 1, or "
        "{ value, source, confidence }, found 1.5",
    ),
    (
        "efficiency = 0.75",
        "efficiency = 0",
        "collectives.wires.nvlink.efficiency: expected a share, more than 0 and at most 1, or "
        "{ value, source, confidence }, found 0",
    ),
    (
        "reducer_bytes_per_s = 1e10",
        "reducer_bytes_per_s = inf",
        "collectives.reducer_bytes_per_s: expected a positive number, or { value, source, confidence }, found inf",
    ),
    (
        "[[1000, 0.25], [1e6, 0.75]]",
        "[[1000, 0.25], [10, 0.75]]",
        "collectives.wires.ethernet.efficiency.points: expected ascending numbers of bytes, found [1000.0, 10.0]",
    ),
    (
        "points = [[1000, 0.25], [1e6, 0.75]]",
        "value = 0.5, points = [[1000, 0.25]]",
        "collectives.wires.ethernet.efficiency.value: expected a share, or points = [[bytes, share], ...], one of the "
        "two",
    ),
    (
        "points = [[1000, 0.25], [1e6, 0.75]], ",
        "",
        "collectives.wires.ethernet.efficiency.value: expected a share, or points = [[bytes, share], ...], one of the "
        "two",
    ),
    (
        "[[1000, 0.25], [1e6, 0.75]]",
        "[[1000, 25]]",
        "collectives.wires.ethernet.efficiency.points[0][1]: expected a share, more than 0 and at most 1, found 25",
    ),
    (
        "[collectives.wires.nvlink]",
        "[collectives.wires.efa]",
        "collectives.wires.efa: expected a kind that has a [links.*] table: nvlink, ethernet",
    ),
    (
        "[collectives.host_copies.wires.ethernet]",
        "[collectives.host_copies.wires.roce]",
        "collectives.host_copies.wires.roce: expected a kind that has a [links.*] table: nvlink, ethernet",
    ),
    ("memory_efficiency = 0.5", "memory_efficiency = { points = [[1, 0.5]] }", "collectives.memory_efficiency.points: "
     "unknown key; known here: value, source, confidence"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), BAD)
def test_every_mistake_is_one_line_that_names_the_key(load, old, new, message):
    assert GOOD.count(old) == 1
    assert str(error_of(TopologyError, load, GOOD.replace(old, new))) == f"mine.toml: {message}"


@pytest.mark.parametrize("name", names())
def test_every_figure_of_our_machines_has_a_source(name):
    told = cluster(name).machine.collectives
    for each in (told.usual, told.host_copies, told.between_nodes, *told.usual.wires):
        for field in each.__slots__ if each else ():
            value = getattr(each, field)
            assert getattr(value, "source", "fine") != f"{name}.toml", field
