"""A choice depends on the group and the call, and not on the groups that were asked for before."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topology
from overlap.collectives.call import Call, call
from overlap.collectives.kinds import Collective
from overlap.cost.choice import Choices

MACHINES = ("trn1.32xlarge", "trn2.48xlarge", "trn2u.48xlarge", "inf2.24xlarge")
KINDS = [each for each in Collective if each not in (Collective.P2P, Collective.PERMUTE)]


@cache
def machine(name: str, nodes: int) -> topology.Cluster:
    return topology.cluster(name, nodes=nodes)


def asked(kind: Collective, count: int, size: int) -> Call:
    return call(kind.value, "sum", np.dtype(np.float32), (count * size,), size)


def chosen(choices: Choices, kind: Collective, count: int, members: tuple[int, ...]) -> str:
    try:
        return choices.plan(asked(kind, count, len(members)), members).algorithm
    except topology.TopologyError:  # the machine has no such group
        return ""


@st.composite
def groups(draw: st.DrawFn, name: str, nodes: int) -> list[tuple[int, ...]]:
    cluster = machine(name, nodes)
    here = cluster.ranks_per_node
    first = draw(st.sampled_from([(0, 1), (0, 1, 2, 3), tuple(range(8)), (2, 3)]))
    base = tuple(node * here + rank for node in range(draw(st.integers(1, nodes))) for rank in first)
    swapped = tuple(rank ^ 1 for rank in base)
    orders = draw(st.lists(st.permutations(base), max_size=3))
    return draw(st.permutations([base, swapped, base[::-1], *map(tuple, orders)]))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", MACHINES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_choice_does_not_depend_on_the_groups_before(name: str, data: st.DataObject) -> None:
    nodes = 1 if name == "inf2.24xlarge" else 2
    assert chosen(Choices(machine(name, nodes), None), KINDS[0], 1000, (0, 1))
    kind, count = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from([1, 1000, 100_000]))
    cluster, before = machine(name, nodes), data.draw(groups(name, nodes))
    choices = Choices(cluster, None)
    for members in before:
        expected = chosen(Choices(cluster, None), kind, count, members)
        assert chosen(choices, kind, count, members) == expected
