"""Every rule both ways: what it allows and what it refuses, and what is suggested instead."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

import topology
from tests.errors import error_of
from topology import TopologyError, TopologyWarning


def group(text):
    return topology.parse_ranks(text)


def refused(name, text, **options):
    """Give the error that a group meets."""
    return error_of(TopologyError, topology.cluster(name, **options).check_group, group(text))


LEGAL = [
    ("trn1.2xlarge", "0-1", {}),
    ("trn1.2xlarge", "0", {}),
    ("trn1.32xlarge", "0-1", {}),
    ("trn1.32xlarge", "30-31", {}),
    ("trn1.32xlarge", "4-7", {}),
    ("trn1.32xlarge", "8-15", {}),
    ("trn1.32xlarge", "0-15", {}),
    ("trn1.32xlarge", "16-31", {}),
    ("trn1.32xlarge", "0-31", {}),
    ("trn1.32xlarge", "24-31", {"edition": 2022}),
    ("trn1.32xlarge", "0-15", {"edition": 2023}),
    ("trn1.32xlarge", "0,8,16,24", {}),
    ("trn1.32xlarge x2", "0-63", {}),
    ("trn1.32xlarge x2", "0-7,32-39", {}),
    ("trn1.32xlarge x2", "5,37", {}),
    ("trn1n.32xlarge", "8-15", {}),
    ("trn2.3xlarge", "0-3", {}),
    ("trn2.3xlarge", "2-3", {}),
    ("trn2.3xlarge", "1,3", {}),
    ("trn2.48xlarge", "0-1", {}),
    ("trn2.3xlarge", "0-7", {"lnc": 1}),
    ("trn2.48xlarge", "4-7", {}),
    ("trn2.48xlarge", "8-15", {}),
    ("trn2.48xlarge", "48-63", {}),
    ("trn2.48xlarge", "0-15,48-63", {}),
    ("trn2.48xlarge", "16-47", {}),
    ("trn2.48xlarge", "0-63", {}),
    ("trn2.48xlarge", "3,19,35,51", {}),
    ("trn2.48xlarge", "0,16", {}),
    ("trn2.48xlarge", "0,4,8,12,16,20,24,28,32,36,40,44,48,52,56,60", {}),
    ("trn2.48xlarge", "4-7", {"lnc": 1}),
    ("trn2.48xlarge", "8-15", {"lnc": 1}),
    ("trn2.48xlarge", "96-127", {"lnc": 1}),
    ("trn2.48xlarge", "0-31,96-127", {"lnc": 1}),
    ("trn2.48xlarge", "32-95", {"lnc": 1}),
    ("trn2.48xlarge", "0-127", {"lnc": 1}),
    ("trn2.48xlarge x4", "0-255", {}),
    ("trn2.48xlarge x4", "7,71,135,199", {}),
    ("trn2u.48xlarge", "0-255", {}),
    ("trn2u.48xlarge", "64-191", {}),
    ("trn2u.48xlarge", "0-63,192-255", {}),
    ("trn2u.48xlarge x8", "0-511", {}),
    ("inf2.xlarge", "0-1", {}),
    ("inf2.8xlarge", "0-1", {}),
    ("inf2.24xlarge", "2-7", {}),
    ("inf2.24xlarge", "0-11", {}),
    ("inf2.48xlarge", "0-23", {}),
    ("dl1.24xlarge", "0,3,5", {}),
    ("dl1.24xlarge x2", "0-15", {}),
    ("local x2", "0,3", {"ranks": 4}),
]


@pytest.mark.parametrize(("name", "text", "options"), LEGAL)
def test_legal_groups_pass_without_a_word(name, text, options):
    assert topology.cluster(name, **options).check_group(group(text)) == ()


ILLEGAL = [
    ("trn1.2xlarge x2", "0-3", {}, "no-efa"),
    ("trn1.32xlarge", "0-2", {}, "trn1-sizes-2024"),
    ("trn1.32xlarge", "0-23", {}, "trn1-sizes-2024"),
    ("trn1.32xlarge", "0-3", {"edition": 2022}, "trn1-sizes-2022"),
    ("trn1.32xlarge", "0-15", {"edition": 2022}, "trn1-sizes-2022"),
    ("trn1.32xlarge", "0-3", {"edition": 2023}, "trn1-sizes-2023"),
    ("trn1.32xlarge", "0-1,4-5", {}, "trn1-four-adjacent"),
    ("trn1.32xlarge", "2-5", {}, "trn1-four-adjacent"),
    ("trn1.32xlarge", "8-23", {}, "trn1-sixteen-halves"),
    ("trn1.32xlarge", "4-11", {}, "trn1-aligned"),
    ("trn1.32xlarge", "1-2", {}, "trn1-aligned"),
    ("trn1.32xlarge", "0,8", {}, "trn1-aligned"),
    ("trn1.32xlarge x2", "0-7,40-47", {}, "symmetric-nodes"),
    ("trn1.32xlarge x2", "0-7,32-33", {}, "symmetric-nodes"),
    ("trn2.3xlarge", "0-2", {}, "trn2-sizes-lnc2"),
    ("trn2.3xlarge", "1-4", {"lnc": 1}, "trn2-contiguous-lnc1"),
    ("trn2.48xlarge", "1-2", {}, "trn2-contiguous-lnc2"),
    ("trn2.48xlarge", "0-11", {}, "trn2-sizes-lnc2"),
    ("trn2.48xlarge", "0-7", {"edition": 2024}, "trn2-sizes-lnc2-2024"),
    ("trn2.48xlarge", "0-31", {}, "trn2-outer-inner-lnc2"),
    ("trn2.48xlarge", "8-23", {}, "trn2-contiguous-lnc2"),
    ("trn2.48xlarge", "0-15", {"lnc": 1}, "trn2-sizes-lnc1"),
    ("trn2.48xlarge", "0-63", {"lnc": 1}, "trn2-outer-inner-lnc1"),
    ("trn2.48xlarge", "16-47", {"lnc": 1}, "trn2-contiguous-lnc1"),
    ("trn2.48xlarge x2", "0-3,68-71", {}, "symmetric-nodes"),
    ("trn2u.48xlarge", "0-63,128-191", {}, "ultraserver-modes"),
    ("trn2u.48xlarge", "0-191", {}, "ultraserver-modes"),
    ("inf2.xlarge x2", "0-3", {}, "inf2-one-node"),
    ("inf2.48xlarge x2", "0-47", {}, "inf2-one-node"),
    ("inf2.24xlarge", "0-2", {}, "inf2-even"),
    ("inf2.24xlarge", "1-2", {}, "inf2-consecutive"),
    ("inf2.24xlarge", "0-1,4-5", {}, "inf2-consecutive"),
    ("dl1.24xlarge x2", "0-8", {}, "symmetric-nodes"),
]


@pytest.mark.parametrize(("name", "text", "options", "rule"), ILLEGAL)
def test_illegal_groups_are_refused_by_name_with_legal_ones_beside(name, text, options, rule):
    cluster, error = topology.cluster(name, **options), refused(name, text, **options)
    broken = next(one for one in cluster.rules if one.id == rule)
    assert (error.rule, error.rule_text, error.source) == (rule, broken.text, broken.source)
    assert f"rule {rule}: {broken.text} [{broken.source}]" in str(error)
    assert error.nearest
    assert all(item.severity == "warning" for near in error.nearest for item in cluster.judge(near))


@pytest.mark.parametrize(("name", "text", "options", "rule"), ILLEGAL)
def test_without_strictness_the_same_groups_only_warn(name, text, options, rule):
    cluster = topology.cluster(name, strict=False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        findings = cluster.check_group(group(text))
    assert findings[0].rule.id == rule
    told = f"group {text} of {len(group(text))} ranks: "
    assert [str(warning.message) for warning in caught] == [f"{told}{finding}" for finding in findings]
    assert {warning.category for warning in caught} == {TopologyWarning}


def test_every_rule_is_shown_both_ways():
    """A rule that no case above refuses would go untested."""
    refusing = {(name.split()[0], rule) for name, _, _, rule in ILLEGAL}
    rules = {
        rule.id
        for name in topology.names()
        for rule in topology.cluster(name).machine.rules
        if rule.severity == "error"
    }
    # An instance of two cores and no network has no group that breaks only this one.
    assert rules - {rule for _, rule in refusing} == {"trn1.2xl-two"}


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("inf2.48xlarge", "0-11", "inf2-ring-unused"),
        ("inf2.48xlarge", "22-23", "inf2-ring-unused"),
        ("trn2.48xlarge", "0,8,16,24,32,40,48,56", "trn2-peers-lnc2"),
        ("trn2.48xlarge", "0,32", "trn2-peers-lnc2"),
        ("trn1.32xlarge", "0,16", "trn1-peers"),
    ],
)
def test_doubtful_groups_warn_even_on_a_strict_cluster(name, text, rule):
    with pytest.warns(TopologyWarning, match=rf"group {text} of \d+ ranks: warning: rule {rule}: "):
        findings = topology.cluster(name).check_group(group(text))
    assert [finding.rule.id for finding in findings] == [rule]


def test_a_group_of_many_ranks_is_not_written_out():
    with pytest.warns(TopologyWarning, match=r"group 0,8,16,24,32,40,48,56,\.\.\. of 32 ranks: warning: "):
        topology.cluster("trn2.48xlarge x4").check_group(range(0, 256, 8))
    assert "group 1,4,7,10,13,16,19,22,... of 21 ranks is not" in str(
        refused("trn2.48xlarge", ",".join(map(str, range(1, 64, 3))))
    )


@pytest.mark.parametrize(
    ("name", "text", "nearest"),
    [
        ("trn1.32xlarge", "0-6", ["0-7", "8-15", "16-23"]),
        ("trn1.32xlarge", "8-23", ["0-15", "16-31", "8-15"]),
        ("trn2.48xlarge", "0-31", ["0-15,48-63", "16-47", "0-15"]),
        ("trn2.48xlarge x2", "0-3,68-71", ["0-3,64-67", "4-7,68-71", "0-7"]),
        ("trn2u.48xlarge", "0-63,128-191", ["0-127", "0-63", "0-15,48-79,112-127"]),
        ("inf2.24xlarge", "3-4", ["2-3", "4-5", "0-1"]),
        ("inf2.48xlarge x2", "22-25", ["20-23", "0-3", "2-5"]),
    ],
)
def test_nearest_legal_groups(name, text, nearest):
    found = [topology.format_ranks(near) for near in refused(name, text).nearest]
    assert sorted(found) == sorted(nearest)


def test_message_in_full():
    assert str(refused("trn1.2xlarge x2", "0,2")) == (
        "group 0,2 of 2 ranks is not legal on trn1.2xlarge x2; "
        "rule no-efa: groups stay on one node: this instance has no EFA "
        "[aws-neuron/aws-neuron-sdk:about-neuron/arch/neuron-hardware]; nearest legal groups: 0-1"
    )


def test_strictness_can_be_said_for_one_check():
    cluster = topology.cluster("trn1.32xlarge")
    with pytest.warns(TopologyWarning, match="trn1-sizes-2024"):
        cluster.check_group(range(3), strict=False)
    with pytest.raises(TopologyError):
        topology.cluster("trn1.32xlarge", strict=False).check_group(range(3), strict=True)


def test_judging_neither_raises_nor_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        findings = topology.cluster("trn1.32xlarge").judge(range(1, 4))
    assert [(finding.rule.id, finding.severity) for finding in findings] == [
        ("trn1-sizes-2024", "error"),
        ("trn1-aligned", "error"),
    ]


@pytest.mark.parametrize("ranks", [range(3), range(1, 4)])
def test_half_a_device_at_either_end_is_found(ranks):
    findings = topology.cluster("inf2.24xlarge").judge(ranks)
    assert [finding.rule.id for finding in findings] == ["inf2-even", "inf2-consecutive"]


@pytest.mark.parametrize("name", ["local", "trn1.32xlarge"])
@pytest.mark.parametrize(
    ("ranks", "message"),
    [((), "at least one rank"), ((0, 0), "rank 0 is in the group twice"), ((0, 99), "rank 99 is not in the world")],
)
def test_what_is_not_a_group_is_an_error_everywhere(name, ranks, message):
    with pytest.raises(TopologyError, match=message):
        topology.cluster(name, ranks=2, strict=False).check_group(ranks)


def test_order_of_a_group_does_not_matter():
    assert topology.cluster("trn1.32xlarge").check_group([3, 1, 0, 2]) == ()


def test_partitions():
    cluster = topology.cluster("trn2.48xlarge")
    assert cluster.check_groups([range(4), range(4, 8)]) == ()
    with pytest.raises(TopologyError, match="rank 3 is in groups 0 and 1"):
        cluster.check_groups([range(4), range(3, 7)])
    with pytest.raises(TopologyError, match="groups 0 and 1 differ in length: 4 and 8 ranks"):
        cluster.check_groups([range(4), range(8, 16)])
    with pytest.raises(TopologyError, match="trn2-sizes-lnc2"):
        cluster.check_groups([range(3), range(3, 6)])


def test_legal_groups_of_a_size():
    cluster = topology.cluster("trn1.32xlarge")
    assert cluster.legal_groups(16) == (tuple(range(16)), tuple(range(16, 32)))
    assert cluster.legal_groups(8) == tuple(tuple(range(first, first + 8)) for first in range(0, 32, 8))
    assert cluster.legal_groups(3) == ()
    assert len(topology.cluster("inf2.24xlarge").legal_groups(4)) == 5


clusters = st.sampled_from([name for name in topology.names() if name != "local"]).map(topology.cluster)


@given(clusters, st.data())
def test_suggestions_are_always_legal(cluster, data):
    ranks = data.draw(st.sets(st.integers(0, cluster.world_size - 1), min_size=2, max_size=12))
    if all(finding.severity == "warning" for finding in cluster.judge(sorted(ranks))):
        return
    error = error_of(TopologyError, cluster.check_group, sorted(ranks))
    assert 1 <= len(error.nearest) <= 3
    assert all(item.severity == "warning" for near in error.nearest for item in cluster.judge(near))
