"""Plans: the cheapest of what applies, with figures that follow from the machine."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topology
from overlap.collectives.call import Call, call
from overlap.collectives.generators import GENERATORS, generate
from overlap.collectives.generators.rank_order import ONLY_FOR_ORDER
from overlap.collectives.kinds import Collective
from overlap.collectives.proof import verify
from overlap.collectives.schedule import EXACT, IN_RANK_ORDER
from overlap.cost.choice import Choices
from overlap.cost.parameters import cost_parameters
from overlap.cost.select import DIRECT, algorithms, check_algorithm, plan, size_class
from overlap.errors import ScheduleError, UsageError
from topology import TopologyError

# -- plans: the cheapest of what applies, with figures that follow from the machine ------------------------------------

TRN2 = topology.cluster("trn2.48xlarge")
TRN1 = topology.cluster("trn1.32xlarge")


@pytest.mark.parametrize("op", GENERATORS)
def test_every_collective_has_a_plan_whose_table_is_proved(op):
    found = plan(op, 1 << 20, TRN1, tuple(range(8)))
    table = found.schedule()
    verify(table)
    assert (table.collective, table.algorithm, table.size) == (op, found.algorithm, 8)
    assert found.predicted_s > 0
    assert found.schedule() is table


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("nbytes", [64, 1 << 16, 1 << 22, 1 << 28])
@pytest.mark.parametrize("name", ["trn2.48xlarge", "trn1.32xlarge x2", "dl1.24xlarge x2", "inf2.48xlarge"])
def test_what_is_chosen_is_proved(op, nbytes, name):
    found = plan(op, nbytes, topology.cluster(name))
    table = found.schedule()
    verify(table)
    assert (table.collective, table.algorithm, table.size) == (op, found.algorithm, len(found.ranks))


def test_the_winner_is_the_cheapest():
    for nbytes in (1 << 10, 1 << 20, 1 << 30):
        found = plan("all_reduce", nbytes, TRN2)
        times = [each.predicted_s for each in found.alternatives if each.predicted_s is not None]
        assert found.predicted_s <= times[0]
        assert times == sorted(times)
        assert all((each.predicted_s is None) == (each.why_not is not None) for each in found.alternatives)


def test_every_algorithm_is_chosen_or_told_about():
    for op, known in GENERATORS.items():
        found = plan(op, 1 << 20, TRN2)
        told = {found.algorithm, *(each.algorithm for each in found.alternatives)}
        assert told == {DIRECT, *known}.difference(ONLY_FOR_ORDER)


@pytest.mark.parametrize("op", EXACT)
@pytest.mark.parametrize("name", ["trn2.48xlarge x2", "trn1.32xlarge", "local x4"])
def test_an_exact_plan_keeps_the_order_of_ranks(op, name):
    found = plan(op, 1 << 20, topology.cluster(name), tuple(range(4)), exact=True, programs_only=True)
    assert {found.algorithm, *(each.algorithm for each in found.alternatives)} <= set(IN_RANK_ORDER)
    assert found.schedule().algorithm == found.algorithm


def test_nodes_of_many_ranks_are_joined_by_a_chain_where_bytes_count():
    """Each byte crosses from node to node once each way; all ranks sending to all would cross eight times as often."""
    machine = topology.cluster("trn1.32xlarge x2")
    assert plan("all_reduce", 64, machine, exact=True).algorithm == "one_shot"
    assert plan("all_reduce", 1 << 30, machine, exact=True).algorithm == "rank_chain"


def test_what_does_not_reduce_has_no_exact_plan():
    with pytest.raises(UsageError) as caught:
        plan("broadcast", 8, TRN2, exact=True)
    told = (
        "exact: all_reduce and reduce_scatter reduce in the order of ranks if asked to, broadcast does not; "
        "leave out exact"
    )
    assert str(caught.value) == told


def test_the_figures_of_a_ring():
    """A ring of 12 devices, 24 ranks: 2 * 23 steps, and 46/24 of the bytes."""
    found = plan("all_reduce", 24_000_000, topology.cluster("inf2.48xlarge"))
    assert found.algorithm == "kangaring"
    assert found.steps == 24
    assert found.bytes_per_rank == 46_000_000
    assert dict(found.hops) == {"neuronlink": 22, "chip": 2}
    assert found.busiest is not None
    assert found.busiest.kind == "neuronlink"
    # Each of two directions of a wire carries one chunk of every pair's two, of half the bytes, in 11 of 12 steps.
    efficiency = dict(cost_parameters(topology.cluster("inf2.48xlarge")).efficiency)["neuronlink"]
    assert found.busiest.busy_s == pytest.approx(2 * 11 / 12 * 24e6 / 2 / 51_539_607_552 / efficiency)


def test_the_documented_example():
    """256 ranks on four nodes: reduce inside each 64-rank node, exchange between nodes, spread inside again."""
    found = plan("all_reduce", 32 << 20, topology.cluster("trn2.48xlarge x4"))
    assert found.algorithm == "hierarchical"
    assert found.detail.endswith("between")
    assert set(dict(found.hops)) == {"chip", "neuronlink", "efa"}
    table = found.schedule()
    crosses = table.src // 64 != table.dst // 64
    assert (table.src % 64 == table.dst % 64)[crosses].all(), "only ranks of the same place talk between nodes"
    flat = [each for each in found.alternatives if each.algorithm == "ring"]
    assert flat[0].predicted_s > 5 * found.predicted_s


def test_a_plan_does_not_depend_on_what_was_asked_before():
    """Editions of the rules that say the same are machines whose wires are numbered apart."""
    asked = [("broadcast", (6, 7, 4, 5)), ("all_reduce", tuple(range(64))), ("permute", tuple(range(8, 24)))]
    first, second = (topology.cluster("trn2.48xlarge", edition=year, strict=False) for year in (8001, 8002))
    forth = {op: plan(op, 1 << 20, first, ranks) for op, ranks in asked}
    back = {op: plan(op, 1 << 20, second, ranks) for op, ranks in reversed(asked)}
    assert forth == back


def test_reasons():
    small = plan("all_gather", 1 << 20, TRN2)
    assert small.reason == (
        "6% faster than rdh (over 16 devices as a cube): 7.84 us less for starting steps, "
        "but 13.4 us more for bytes on wires"
    )
    assert plan("permute", 1 << 20, TRN2).reason == "nothing else applies"


def test_kangaring_is_for_whole_chips():
    cluster = topology.cluster("trn2.48xlarge")
    part = plan("all_reduce", 1 << 30, cluster, (0, 4, 8, 12))
    why = {each.algorithm: each.why_not for each in part.alternatives}
    assert why["kangaring"] == "it needs all ranks of every device in the group"
    assert plan("all_reduce", 1 << 30, cluster, tuple(range(16))).algorithm == "kangaring"


def test_tori_for_one_rank_on_each_device():
    cluster = topology.cluster("trn2.48xlarge", strict=False)
    found = plan("all_reduce", 1 << 22, cluster, tuple(range(0, 64, 4)))
    names = {each.algorithm for each in found.alternatives if each.why_not is None} | {found.algorithm}
    assert {"swing", "bucket"} <= names
    verify(found.schedule())


def test_groups_in_another_order():
    cluster = topology.cluster("trn1.32xlarge", strict=False)
    ranks = (7, 0, 3, 1, 6, 5, 2, 4)
    for nbytes in (1 << 10, 1 << 30):
        found, ordered = (plan("all_reduce", nbytes, cluster, group) for group in (ranks, tuple(range(8))))
        assert (found.algorithm, found.predicted_s) == (ordered.algorithm, ordered.predicted_s)
        verify(found.schedule())


def test_one_rank_costs_nothing():
    found = plan("all_reduce", 1 << 20, TRN1, (3,))
    assert (found.predicted_s, found.steps, found.bytes_per_rank, found.hops, found.busiest) == (0.0, 0, 0, (), None)


def test_no_bytes_cost_latency():
    assert plan("all_reduce", 0, TRN2).predicted_s > 0


def test_plans_are_cached():
    first = plan("all_gather", 12345, TRN2, range(64))
    assert plan("all_gather", 12345, TRN2, tuple(range(64))) is first
    assert plan("all_gather", 12345, topology.cluster("trn2.48xlarge"), list(range(64))) is first
    assert plan("all_gather", 12346, TRN2, range(64)) is not first


def test_size_classes():
    assert [size_class(n) for n in (0, 1, 4, 5, 8, 9, 10, 11, 15, 16, 17, 1000, 1 << 20)] == [
        0, 1, 4, 5, 8, 10, 10, 12, 16, 16, 20, 1024, 1 << 20,
    ]  # fmt: skip
    for nbytes in range(1, 5000):
        assert nbytes <= size_class(nbytes) <= nbytes * 1.25
        assert size_class(size_class(nbytes)) == size_class(nbytes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "all_recude"}, "op: 'all_recude' is no collective; known are all_reduce, "),
        ({"nbytes": -1}, "nbytes: expected 0 to 17592186044416, got -1"),
        ({"nbytes": 10**22}, "nbytes: expected 0 to 17592186044416, got 10000000000000000000000"),
        ({"dtype": "float99"}, "dtype: 'float99' is unknown"),
        ({"op": "broadcast", "root": 8}, "root: expected a rank of the group, 0 to 7, got 8"),
    ],
)
def test_what_cannot_be_meant(arguments, message):
    asked = {"op": "all_reduce", "nbytes": 8, "cluster": TRN1, "ranks": tuple(range(8)), **arguments}
    with pytest.raises(UsageError, match=message):
        plan(**asked)


def test_illegal_groups():
    with pytest.raises(TopologyError, match="groups have 1, 2, 4, 8, 16"):
        plan("all_reduce", 8, TRN1, (0, 1, 2))
    with pytest.raises(TopologyError, match="rank 99 is not in the world"):
        plan("all_reduce", 8, TRN1, (0, 99))


def test_permutes_take_pairs():
    near = plan("permute", 1 << 20, TRN1, pairs=((0, 1),))
    far = plan("permute", 1 << 20, TRN1, pairs=((0, 2),))
    assert dict(near.hops) == {"chip": 1}
    assert dict(far.hops) == {"neuronlink": 1}


def test_a_table_that_fails_its_proof_is_no_schedule():
    found = plan("all_gather", 999, TRN1, tuple(range(8)))
    table = generate("all_gather", "mesh", 8)
    wrong = replace(table, dst=np.where(np.arange(len(table)) == len(table) - 1, table.src, table.dst))

    class Broken:
        def schedule(self, slices):
            return wrong

    with pytest.raises(ScheduleError):
        replace(found, option=Broken()).schedule()


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    assert algorithms()[0] == DIRECT
    for name in algorithms():
        check_algorithm(name)
    with pytest.raises(UsageError, match=r"algorithm: 'rong' is unknown; known are direct, .*ring"):
        check_algorithm("rong")


@pytest.mark.parametrize("op", GENERATORS)
@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 8, 33))])
def test_ranks_of_one_process_take_the_short_cut_because_it_is_cheapest(op, ranks):
    cluster = topology.cluster("local", ranks=ranks)
    for nbytes in (0, 8, 1 << 16, 1 << 22, 1 << 30):
        found = plan(op, nbytes, cluster)
        assert found.algorithm == DIRECT, nbytes
        second = plan(op, nbytes, cluster, programs_only=True)
        assert found.predicted_s < second.predicted_s
        verify(second.schedule())


def test_the_price_of_the_short_cut():
    """Meet once, then read 8 inputs and write 8 outputs."""
    machine = topology.cluster("local", ranks=8)
    told = machine.machine.collectives.usual
    found = plan("all_reduce", 1 << 20, machine)
    meeting_s, memory_bytes_per_s = told.meeting_s.value, told.memory_bytes_per_s.value
    assert found.predicted_s == pytest.approx(8 * meeting_s + 16 * (1 << 20) / memory_bytes_per_s)
    assert (found.steps, found.bytes_per_rank, found.hops, found.busiest) == (0, 0, (), None)
    gathered = plan("gather", 1 << 20, machine)
    assert gathered.breakdown.memory_s == pytest.approx(2 * (1 << 20) / memory_bytes_per_s)
    with pytest.raises(ScheduleError, match="no table of transfers"):
        found.schedule()


def test_a_dear_meeting_loses_to_a_program(tmp_path):
    dear = tmp_path / "dear.toml"
    dear.write_text('extends = "local"\nname = "dear"\n[collectives]\nmeeting_s = 1e-3\n')
    found = plan("all_reduce", 8, topology.cluster(str(dear), ranks=4))
    assert found.algorithm != DIRECT
    assert DIRECT in {each.algorithm for each in found.alternatives if each.predicted_s is not None}


@pytest.mark.parametrize(
    ("name", "ranks", "why"),
    [
        ("trn2.48xlarge", None, "it is for ranks of one process, which share all memory"),
        ("local x2", (0, 1), "its nodes share no memory"),
        ("local", (0,), "a single rank meets no other"),
    ],
)
def test_where_the_short_cut_does_not_apply(name, ranks, why):
    found = plan("all_reduce", 1 << 20, topology.cluster(name), ranks)
    assert {each.algorithm: each.why_not for each in found.alternatives}[DIRECT] == why


def test_one_algorithm_may_be_asked_for():
    found = plan("all_reduce", 1 << 10, TRN2, algorithm="kangaring")
    assert (found.algorithm, found.detail, found.alternatives) == ("kangaring", "4 rings", ())
    levels = plan("broadcast", 1 << 20, topology.cluster("trn1.32xlarge x2"), algorithm="hierarchical")
    assert {each.algorithm for each in levels.alternatives} == {"hierarchical"}
    with pytest.raises(ScheduleError, match="all_reduce: hierarchical does not apply: all ranks are on one node"):
        plan("all_reduce", 1 << 10, TRN2, algorithm="hierarchical")


def test_an_unknown_algorithm_is_named_with_those_that_a_collective_has() -> None:
    with pytest.raises(ScheduleError, match=r"all_reduce: algorithm 'nosuch' does not apply; .*, of ring"):
        plan("all_reduce", 4096, topology.cluster("trn1.32xlarge"), algorithm="nosuch")


def test_slices_follow_the_bytes():
    few, many = (plan("broadcast", nbytes, TRN1, algorithm="chain").slices for nbytes in (1 << 10, 1 << 28))
    assert (few, many) == (1, 64)
    assert plan("broadcast", 1 << 28, TRN1, algorithm="chain").schedule().slots_per_block == 64


@pytest.mark.parametrize(
    "op",
    ["all_to_all", "gather", "scatter", *(pytest.param(op, marks=pytest.mark.slow) for op in ("broadcast", "reduce"))],
)
def test_large_vectors_cross_nodes_by_place(op):
    found = plan(op, 32 << 20, topology.cluster("trn2.48xlarge x4"), root=70 if op != "all_to_all" else 0)
    assert found.algorithm == "hierarchical"
    table = found.schedule()
    crosses = table.src // 64 != table.dst // 64
    assert (table.src % 64 == table.dst % 64)[crosses].all()


# -- A choice depends on the group and the call, and not on the groups that were asked for before ----------------------

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
