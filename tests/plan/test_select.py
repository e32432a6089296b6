"""Plans: the cheapest of what applies, with figures that follow from the machine."""

from dataclasses import replace

import numpy as np
import pytest

import topology
from overlap.collectives.generators import GENERATORS, generate
from overlap.collectives.proof import verify
from overlap.collectives.select import DIRECT, _proved, algorithms, check_algorithm, plan, size_class
from overlap.errors import ScheduleError, UsageError
from topology import TopologyError

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
        assert {found.algorithm, *(each.algorithm for each in found.alternatives)} == set(known)


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
    assert found.busiest.busy_s == pytest.approx(2 * 11 / 12 * 24e6 / 2 / 51_539_607_552 / 0.85)


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


def test_reasons():
    small = plan("all_gather", 1 << 20, TRN2)
    assert small.reason == (
        "3% faster than rdh (over 16 devices as a cube): 7.84 us less for starting steps, "
        "but 14.3 us more for bytes on wires"
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
    found = plan("all_reduce", 1 << 20, topology.cluster("local"))
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
        ({"nbytes": -1}, "nbytes: expected 0 or more, got -1"),
        ({"dtype": "float99"}, "dtype: 'float99' is unknown"),
        ({"op": "broadcast", "root": 8}, "root: 8 is not one of the group's ranks 0..7"),
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


def test_a_table_that_fails_its_proof_is_no_schedule(monkeypatch):
    found = plan("all_gather", 999, TRN1, tuple(range(8)))
    table = generate("all_gather", "mesh", 8)
    wrong = replace(table, dst=np.where(np.arange(len(table)) == len(table) - 1, table.src, table.dst))
    monkeypatch.setattr(type(found._option), "schedule", lambda self, slices: wrong)
    _proved.cache_clear()
    with pytest.raises(ScheduleError):
        found.schedule()


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    assert algorithms()[0] == DIRECT
    for name in algorithms():
        check_algorithm(name)
    with pytest.raises(UsageError, match=r"algorithm: 'rong' is unknown; known are direct, .*ring"):
        check_algorithm("rong")
