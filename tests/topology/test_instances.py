"""The named machines: how many ranks they have, what their wires carry, and how they are asked for."""

import pytest

import topology
from tests.errors import error_of
from topology import Place, TopologyError

GIB = 2**30

# name, ranks, devices, links per device, one-way bytes/s of a device link, adapters, bytes/s per adapter
FACTS = [
    ("trn1.2xlarge", 2, 1, 0, None, 0, None),
    ("trn1.32xlarge", 32, 16, 4, 48 * GIB, 8, 12.5e9),
    ("trn1n.32xlarge", 32, 16, 4, 96 * GIB, 16, 12.5e9),
    ("trn2.3xlarge", 4, 1, 0, None, 1, 25e9),
    ("trn2.48xlarge", 64, 16, 4, 128e9, 16, 25e9),
    ("trn2u.48xlarge x1", 64, 16, 4, 128e9, 16, 25e9),
    ("inf2.xlarge", 2, 1, 0, None, 0, None),
    ("inf2.8xlarge", 2, 1, 0, None, 0, None),
    ("inf2.24xlarge", 12, 6, 2, 48 * GIB, 0, None),
    ("inf2.48xlarge", 24, 12, 2, 48 * GIB, 0, None),
    ("dl1.24xlarge", 8, 8, 7, 12.5e9, 4, 12.5e9),
    ("trn3-gen1", 256, 64, 63, 704e9, 64, 25e9),
    ("trn3-gen2", 576, 144, 143, 704e9, 144, 25e9),
]


@pytest.mark.parametrize(("name", "ranks", "devices", "wires", "wire_rate", "nics", "nic_rate"), FACTS)
def test_figures(name, ranks, devices, wires, wire_rate, nics, nic_rate):
    cluster = topology.cluster(name)
    assert (cluster.world_size, cluster.ranks_per_node, cluster.devices_per_node) == (ranks, ranks, devices)
    assert max(len(cluster.wiring.adjacent_devices(device)) for device in range(devices)) == wires
    assert cluster.nics_per_node == nics
    if wire_rate is not None:
        assert cluster.bandwidth_bytes_per_s(cluster.machine.wires.link) == wire_rate
    if nic_rate is not None:
        assert cluster.bandwidth_bytes_per_s(cluster.machine.network.link) == nic_rate


def test_every_documented_machine_and_the_local_one_are_there():
    documented = {name.split()[0] for name, *_ in FACTS}
    assert set(topology.names()) == documented | {"local"}


def figures(value):
    """Find every figure in a record, however deep."""
    if isinstance(value, topology.Figure):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from figures(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from figures(getattr(value, name))


@pytest.mark.parametrize("name", topology.names())
def test_every_number_has_a_source(name):
    found = list(figures(topology.cluster(name).machine))
    assert found
    if name != "local":
        assert [figure for figure in found if figure.source.endswith(".toml")] == []
        assert [rule for rule in topology.cluster(name).rules if rule.source.endswith(".toml")] == []


def test_logical_cores():
    two, one = topology.cluster("trn2.48xlarge"), topology.cluster("trn2.48xlarge", lnc=1)
    assert (two.lnc, two.world_size, two.nic_share_bytes_per_s(), two.cc_cores_per_rank) == (2, 64, 6.25e9, 4)
    assert (one.lnc, one.world_size, one.nic_share_bytes_per_s(), one.cc_cores_per_rank) == (1, 128, 3.125e9, 2)
    assert two.flops_per_s("bf16") == 667e12 / 4
    assert one.flops_per_s("bf16") == 667e12 / 8
    assert two.bandwidth_bytes_per_s("chip") == 2 * one.bandwidth_bytes_per_s("chip") == 736e9
    assert two.memory_bytes_per_s() == 2.9e12 / 4


def test_shared_adapters():
    trn1, dl1 = topology.cluster("trn1.32xlarge"), topology.cluster("dl1.24xlarge")
    assert [trn1.nic_of(rank) for rank in range(0, 32, 2)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert trn1.nic_share_bytes_per_s() == 12.5e9 / 4
    assert trn1.nic_share_bytes_per_s([0, 4, 8]) == 12.5e9
    assert trn1.nic_share_bytes_per_s([0, 2, 4]) == 12.5e9 / 2
    assert dl1.nic_share_bytes_per_s() == 6.25e9
    assert topology.cluster("inf2.48xlarge").nic_share_bytes_per_s() == 0.0


@pytest.mark.parametrize("text", ["trn2.48xlarge x4 lnc=1", " trn2.48xlarge  lnc=1 X4 "])
def test_one_string_form(text):
    assert topology.cluster(text) == topology.cluster("trn2.48xlarge", nodes=4, lnc=1)
    assert topology.cluster(text).world_size == 512


def test_equal_clusters_hash_alike_and_read_well():
    a, b = topology.cluster("trn1.32xlarge x2"), topology.cluster("trn1.32xlarge", nodes=2)
    assert a == b
    assert hash(a) == hash(b)
    assert a != topology.cluster("trn1.32xlarge", nodes=2, ranks=32)
    assert repr(a) == "<Cluster trn1.32xlarge x2: 64 ranks>"
    assert repr(topology.cluster("trn2.48xlarge")) == "<Cluster trn2.48xlarge lnc=2: 64 ranks>"


def test_places_count_cores_then_devices_then_nodes():
    cluster = topology.cluster("trn1.32xlarge x2")
    assert cluster.place(35) == Place(1, 1, 1)
    assert [cluster.rank_at(cluster.place(rank)) for rank in range(64)] == list(range(64))


def test_a_smaller_world_spreads_over_the_nodes():
    cluster = topology.cluster("trn1.32xlarge x2", ranks=8)
    assert cluster.ranks_per_node == 4
    assert cluster.place(4) == Place(1, 0, 0)
    with pytest.raises(TopologyError, match="holds no rank"):
        cluster.rank_at(Place(0, 2, 0))


def test_local_takes_any_number_of_ranks_and_has_no_rules():
    assert topology.cluster("local").world_size == 1
    assert topology.cluster("local x2").world_size == 2
    cluster = topology.cluster("local", ranks=7)
    assert cluster.world_size == 7
    assert cluster.link_kind(0, 6) == "neuronlink"
    assert cluster.check_group([5, 0, 3]) == ()
    assert not cluster.restricted


def test_ultraserver_is_whole_by_default():
    cluster = topology.cluster("trn2u.48xlarge")
    assert (cluster.nodes, cluster.servers, cluster.world_size) == (4, 4, 256)
    assert topology.cluster("trn2u.48xlarge x8").servers == 4
    assert topology.cluster("trn2u.48xlarge x2").servers == 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("trn2.48xl", {}, "unknown cluster 'trn2.48xl'; did you mean 'trn2.48xlarge'? known: dl1.24xlarge, inf2"),
        ("trn1 x4", {}, "unknown cluster 'trn1'; did you mean 'trn1.2xlarge' or 'trn1.32xlarge' or 'trn1n.32xlarge'? "),
        (
            "trn2.48xlarge x-1",
            {},
            "cluster: expected nodes or cores after 'trn2.48xlarge', such as x4 or lnc=1, got 'x-1'",
        ),
        ("../machine", {}, "unknown cluster '../machine'"),
        (5, {}, "name: expected the name of a cluster, got 5"),
        ("trn1.32xlarge x2", {"nodes": 3}, "nodes: the cluster's name says 2, the argument 3; give it once"),
        ("trn1.32xlarge", {"nodes": 0}, "nodes: expected 1 or more, found 0"),
        ("trn1.32xlarge x0", {}, "nodes: expected 1 or more, found 0"),
        ("trn2.48xlarge", {"lnc": 3}, "trn2.48xlarge: lnc: expected 2 or 1, found 3"),
        ("trn1.32xlarge", {"lnc": 2}, "trn1.32xlarge: lnc: expected 1, found 2"),
        ("trn1.32xlarge", {"ranks": 33}, "33 ranks do not fit: trn1.32xlarge x1 holds 32; nodes=2 would hold them"),
        (
            "trn1.32xlarge x32769",
            {},
            "trn1.32xlarge x32769: 1048608 ranks are more than any cluster has; pass at most ranks=1048576",
        ),
        (
            "local",
            {"ranks": 1 << 40},
            "local x1: 1099511627776 ranks are more than any cluster has; pass at most ranks=1048576",
        ),
        ("trn1.32xlarge x2", {"ranks": 7}, "7 ranks do not spread evenly over 2 nodes of trn1.32xlarge"),
        ("local x2", {"ranks": 7}, "7 ranks do not spread evenly over 2 nodes of local"),
        ("local", {"ranks": 0}, "ranks: expected 1 or more, found 0"),
        ("trn2u.48xlarge", {"nodes": 3}, "trn2u.48xlarge: nodes: expected 1, 2, 4 or a multiple of 4, found 3"),
    ],
)
def test_impossible_clusters(name, options, message):
    error = error_of(TopologyError, topology.cluster, name, **options)
    assert str(error).startswith(message)
    assert "\n" not in str(error)


def test_unknown_name_carries_the_known_ones():
    assert error_of(TopologyError, topology.cluster, "nonsense").known == topology.names()


@pytest.mark.parametrize("rank", [-1, 32])
def test_ranks_outside_the_world(rank):
    with pytest.raises(TopologyError, match=f"rank {rank} is not in the world of <Cluster trn1.32xlarge: 32 ranks>"):
        topology.cluster("trn1.32xlarge").place(rank)


def test_unknown_figures_list_the_known_ones():
    cluster = topology.cluster("trn1.32xlarge")
    with pytest.raises(TopologyError, match="unknown dtype on Trainium1 'bf15'; did you mean 'bf16'"):
        cluster.flops_per_s("bf15")
    with pytest.raises(TopologyError, match="known: chip, neuronlink, efa"):
        cluster.latency_s("roce")


@pytest.mark.parametrize("ranks", [(3,), (0, 1, 2, 5), (7, 6), tuple(range(40))])
def test_ranks_as_text_round_trip(ranks):
    assert topology.parse_ranks(topology.format_ranks(ranks)) == ranks
    assert topology.format_ranks((0, 1, 2, 5)) == "0-2,5"


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "-1", "1,,2", "0-99999999999", "0-700000,0-700000"])
def test_bad_lists_of_ranks(text):
    with pytest.raises(TopologyError, match="is not a list of ranks"):
        topology.parse_ranks(text)
