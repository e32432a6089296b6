"""Worlds in which a few ranks stand for all: the same times as if all had run, and an error if they are not alike."""

import re

import numpy as np
import pytest

import topology
from overlap import CollectiveMismatchError, Conditions, RankLeftError, StallError, UsageError
from overlap.cost.select import plan
from overlap.simulation import symmetric_world
from overlap.simulation.demand import Demand
from overlap.simulation.fabric import SimulatedFabric
from overlap.simulation.symmetry import AlikeGroups, RankClasses, group_rows_by_unit, join_demands
from tests.errors import error_of

from .worlds import KB, MS, assert_fails, now_ns, simulate, spans

# Some of these groups are legal but not advised.
pytestmark = pytest.mark.filterwarnings("ignore::topology.TopologyWarning")

PARAMETERS = 1 << 18


async def train(rank, tp):
    """Tensor parallel forward, then a backward pass whose gradients are summed behind it."""
    grid, x = rank.mesh(dp=rank.world_size // tp, tp=tp), rank.empty(PARAMETERS)
    for _ in range(3):
        await rank.compute(list, name="forward", seconds=2e-4)
        await grid["tp"].all_reduce(x)
    pending = []
    for _ in range(3):
        await rank.compute(list, name="backward", seconds=4e-4)
        pending += [grid["dp"].all_reduce(x), grid["tp"].all_gather(x)]
    for each in pending:
        await each
    await rank.all_reduce(x)
    return now_ns(rank)


async def pipeline(rank, stages):
    """Micro-batches through stages, then the gradients of each stage."""
    grid, x = rank.mesh(pp=stages, dp=rank.world_size // stages), rank.empty(PARAMETERS)
    pp, stage = grid["pp"], grid.coordinates["pp"]
    for _ in range(4):
        if stage:
            await pp.recv(x, stage - 1)
        await rank.compute(list, name="forward", seconds=3e-4 * (stage + 1))
        if stage < stages - 1:
            pp.send(x, stage + 1)
    await grid["dp"].all_reduce(x)
    return now_ns(rank)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("cluster", "ranks", "main", "argument", "alike"),
    [
        pytest.param("trn1.32xlarge x2", 64, train, 8, 1, marks=pytest.mark.slow),
        pytest.param("trn1.32xlarge x2", 64, train, 2, 1, marks=pytest.mark.slow),
        pytest.param("trn2u.48xlarge x4", 256, train, 4, 1, marks=pytest.mark.slow),
        ("dl1.24xlarge x2", 16, train, 8, 1),
        ("trn1.32xlarge x2", 64, pipeline, 4, 4),
        ("dl1.24xlarge x2", 16, pipeline, 2, 2),
        ("dl1.24xlarge x2", 16, pipeline, 2, lambda rank: "ab"[rank // 8]),
    ],
)
def test_few_ranks_take_the_time_of_all(cluster, ranks, main, argument, alike):
    everybody, whole = simulate(main, ranks, argument, cluster=cluster, shapes_only=True)
    few, part = simulate(main, ranks, argument, cluster=cluster, shapes_only=True, alike=alike)
    assert len(part.ranks()) < len(whole.ranks()) == ranks
    # Groups that share wires get out of step a little; those that stand for them do not.
    assert few == [pytest.approx(end_ns, rel=1e-3) for end_ns in everybody]
    if main is pipeline or cluster.startswith("dl1"):
        for rank in part.ranks():
            assert spans(part, rank) == spans(whole, rank)


def test_everybody_gets_the_result_of_those_who_stand_for_them():
    async def main(rank):
        await rank.barrier()
        return rank.rank

    results, timeline = simulate(main, 8, shapes_only=True, alike=2)
    assert results == [0] * 4 + [4] * 4
    assert timeline.ranks() == [0, 3, 4, 7]
    assert timeline.world_size == 8


def test_what_comes_again_later_is_not_reckoned_again(monkeypatch):
    reckoned = []
    monkeypatch.setattr(
        SimulatedFabric,
        "collective_transfer",
        lambda *args, whole=SimulatedFabric.collective_transfer: reckoned.append(args[2]) or whole(*args),
    )

    async def main(rank):
        for _ in range(3):
            await rank.compute(list, seconds=1e-3)
            await rank.all_reduce(rank.empty(PARAMETERS))

    simulate(main, 8, shapes_only=True, alike=1)
    assert reckoned == ["all_reduce"]


def test_of_what_is_reckoned_the_oldest_is_forgotten(monkeypatch):
    engines = []
    monkeypatch.setattr(symmetric_world, "_MOST_DEMANDS", 3)
    monkeypatch.setattr(
        symmetric_world.SymmetricEngine,
        "_joint_demand",
        lambda engine, *args, whole=symmetric_world.SymmetricEngine._joint_demand: (
            engines.append(engine) or whole(engine, *args)
        ),
    )

    async def main(rank):
        for size in range(1, 10):
            await rank.all_reduce(rank.empty(size * PARAMETERS))

    simulate(main, 8, shapes_only=True, alike=1)
    assert [call.nbytes for _, call, _ in engines[-1]._demands] == [4 * size * PARAMETERS for size in (7, 8, 9)]


def test_groups_that_are_alike_share_the_wires():
    """Pairs of ranks across two nodes: four of them have one adapter."""

    async def main(rank, pairs):
        grid = rank.mesh(dp=2, tp=32)
        if grid.coordinates["tp"] < pairs:
            await grid["dp"].all_reduce(rank.empty(100 * PARAMETERS), algorithm="ring")  # no plans of trees
        return now_ns(rank)

    where = {"cluster": "trn1.32xlarge x2", "shapes_only": True}
    alone_ns = simulate(main, 64, 1, **where)[0][0]
    together_ns = simulate(main, 64, 32, **where)[0][0]
    few_ns = simulate(main, 64, 32, **where, alike=1)[0][0]
    assert alone_ns < few_ns == together_ns


async def hop(rank):
    """Send around the ring of all ranks, four times."""
    x = rank.empty(KB, np.uint8)
    for _ in range(4):
        sent = rank.send(x, (rank.rank + 1) % rank.world_size)
        await rank.recv(x, (rank.rank - 1) % rank.world_size)
        await sent
    return now_ns(rank)


def test_messages_to_as_many_places_on():
    assert simulate(hop, 4, shapes_only=True, alike=1)[0] == [4 * MS] * 4


def test_ranks_of_a_class_are_done_when_the_last_of_them_is():
    """One message in 32 leaves the node; who stands for all waits for the longest each time."""

    async def across(rank):
        x = rank.empty(KB, np.uint8)
        if rank.rank == 31:
            await rank.send(x, 32)
        if rank.rank == 32:
            await rank.recv(x, 31)
        return now_ns(rank)

    where = {"cluster": "trn1.32xlarge x2", "shapes_only": True}
    longest_ns = max(simulate(across, 64, **where)[0])
    assert simulate(hop, 64, **where, alike=1)[0] == [4 * longest_ns] * 64
    assert max(simulate(hop, 64, **where)[0]) < 4 * longest_ns


@pytest.mark.parametrize(
    ("op", "settings"),
    [
        ("all_reduce", {}),
        ("reduce_scatter", {}),
        ("all_gather", {}),
        ("all_to_all", {}),
        ("broadcast", {"root": 1}),
        ("reduce", {"root": 1}),
        ("gather", {"root": 1}),
        ("permute", {"pairs": [(0, 1), (1, 2), (2, 0)]}),
    ],
)
def test_every_collective_ends_with_its_last_rank(op, settings):
    async def main(rank):
        x = rank.empty((rank.world_size * 100, 3))
        result = await getattr(rank, op)(x, **settings)
        return now_ns(rank), None if result is None else result.shape

    everybody, _ = simulate(main, 4, shapes_only=True)
    few, _ = simulate(main, 4, shapes_only=True, alike=lambda rank: rank)
    assert few == everybody
    first, _ = simulate(main, 4, shapes_only=True, alike=1)
    assert first == [(max(end_ns for end_ns, _ in everybody), everybody[0][1])] * 4


# -- ranks that are not alike --------------------------------------------------------------------------------------


def test_the_witness_comes_late():
    async def main(rank):
        await rank.compute(list, seconds=1e-3 * (1 + (rank.rank == 7)))
        await rank.all_reduce(rank.empty(10))

    match = r"ranks 0 and 7 were said to behave alike, but came to all_reduce #0 on group 'world' \(.*\) 1 ms apart"
    with assert_fails(UsageError, match):
        simulate(main, 8, shapes_only=True, alike=1)
    simulate(main, 8, shapes_only=True, alike=lambda rank: rank == 7)


def test_the_witness_means_another_operation():
    async def main(rank):
        await rank.all_reduce(rank.empty(10 + rank.rank // 7))

    with assert_fails(CollectiveMismatchError, r"rank 7"):
        simulate(main, 8, shapes_only=True, alike=1)


def test_the_witness_leaves_early():
    async def main(rank):
        if rank.rank == 0:
            await rank.all_reduce(rank.empty(10))

    with assert_fails(RankLeftError, r"rank 7 finished its program while rank 0 needs it"):
        simulate(main, 8, shapes_only=True, alike=1)


@pytest.mark.parametrize(
    ("assumed", "match"),
    [
        ({"alike": 1}, r"^alike: needs shapes_only=True; without all ranks' data there are no results$"),
        ({"alike": 3, "shapes_only": True}, r"^alike: 8 ranks do not fall into 3 equal blocks; choose a divisor$"),
        ({"alike": -1, "shapes_only": True}, r"^alike: 8 ranks do not fall into -1 equal blocks; choose a divisor$"),
        ({"alike": 1, "shapes_only": True, "conditions": Conditions(jitter=0.1)}, r"^alike: ranks are not alike where"),
    ],
)
def test_what_cannot_be_meant(assumed, match):
    with pytest.raises(UsageError, match=match):
        simulate(hop, 8, **assumed)


@pytest.mark.parametrize(
    ("ranks", "alike", "match"),
    [
        ([0, 1, 3], 1, r"alike: ranks 0, 1, 3 are no row of a grid over all ranks"),
        ([1, 0], 1, r"alike: ranks 1, 0 are no row of a grid"),
        (
            [0, 1],
            lambda rank: rank == 2,
            r"alike: ranks 0, 1 are a group, but no group alike holds ranks 3 of the same classes",
        ),
    ],
)
def test_groups_that_stand_for_no_others(ranks, alike, match):
    async def main(rank):
        if rank.rank in ranks:
            rank.group(ranks)

    with assert_fails(UsageError, match):
        simulate(main, 8, shapes_only=True, alike=alike)


def test_messages_that_not_all_of_a_class_receive():
    async def main(rank):
        await rank.send(rank.empty(10), (rank.rank + 1) % 8)

    first, *_, last = error_of(StallError, simulate, main, 8, shapes_only=True, alike=2).report
    assert re.fullmatch(r"rank 0: send #0 to rank 1 \(.*\); waits for rank 3", first)
    assert last == "only ranks 0, 3, 4, 7 run, for all: they may not behave as alike as was said"


def test_choices_of_those_who_do_not_run_are_not_known():
    async def main(rank):
        await rank.split(0)

    with assert_fails(UsageError, r"split: with alike=, the choices of other ranks are unknown"):
        simulate(main, 8, shapes_only=True, alike=1)


# -- who stands for whom, and where --------------------------------------------------------------------------------


def test_the_first_and_the_last_of_each_class_run():
    assert RankClasses.of(1, 1).simulated == (0,)
    assert RankClasses.of(4, 8).simulated == tuple(range(8))
    assert RankClasses.of(lambda rank: rank % 3, 9).simulated == (0, 1, 2, 6, 7, 8)
    assert RankClasses.of(2, 8).alike_groups([4, 6]).tolist() == [[4, 6], [5, 7]]
    assert RankClasses.of(2, 8).alike_groups([0, 4]).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("name", "op"),
    [
        pytest.param(name, op, marks=[pytest.mark.slow] if (op == "all_reduce") == name.startswith("trn2") else [])
        for name in ("trn1.32xlarge x3", "trn2.48xlarge x2", "trn2u.48xlarge x8", "dl1.24xlarge x2", "inf2.48xlarge x2")
        for op in ("all_reduce", "all_to_all")
    ],
)
def test_groups_in_other_units_need_the_same_there(name, op):
    cluster = topology.cluster(name)
    fabric, per_unit = SimulatedFabric(cluster), cluster.servers * cluster.ranks_per_node
    size = 8
    rows = np.arange(cluster.world_size).reshape(-1, size)
    none_late = np.zeros(size, np.int64)

    def demand(row):
        option = plan(op, 1 << 20, cluster, tuple(row), dtype="float32").option
        return fabric.collective_transfer((), op, option, 1 << 20, row, none_late).demand

    def needs(resources, demand):
        return {number: shares.tolist() for number, shares in zip(resources.tolist(), demand.shares.T, strict=True)}

    for members, units in group_rows_by_unit(rows, per_unit):
        assert len(members) == cluster.world_size // per_unit
        first = demand(rows[members[0]].tolist())
        for row, resources in zip(
            rows[members].tolist(), fabric.resources.shift_resources_to_units(first.resources, units), strict=True
        ):
            there = demand(row)
            assert (there.marks_ns, there.ends_ns) == (first.marks_ns, first.ends_ns)
            assert needs(resources, first) == needs(there.resources, there)


def test_messages_between_other_units_need_the_same_there():
    fabric = SimulatedFabric(topology.cluster("trn1.32xlarge x4"))
    pairs = np.array([(31, 32), (63, 64), (95, 96), (127, 0)])
    (onward, units), (back, _) = group_rows_by_unit(pairs, 32)
    assert (onward.tolist(), units.tolist(), back.tolist()) == ([0, 1, 2], [0, 1, 2], [3])
    first, *others = (fabric.message_transfer((), *pair, KB).demand for pair in pairs[onward].tolist())
    shifted = fabric.resources.shift_resources_to_units(first.resources, units)[1:]
    assert [set(each) for each in shifted.tolist()] == [set(each.resources.tolist()) for each in others]


def test_what_groups_need_of_one_wire_adds_up():
    """Two groups of two ranks, of which the first of each stands for both; the second group is done before."""

    def same(left_ns, wire):
        demand = Demand.of(np.array([0, 1]), np.array(left_ns), np.array([wire]), np.array([60.0]))
        return AlikeGroups(demand=demand, resources=np.array([[wire]]), representatives=np.array([[0, 1]]))

    apart = join_demands([same([80, 100], 5), same([50, 70], 6)], [0, 1], np.array([0, 1]))
    assert (apart.marks_ns, apart.resources.tolist(), apart.ends_ns) == ((80, 100), [5, 6], (100,))
    assert apart.shares[0].tolist() == pytest.approx([0.6, 0.6])
    shared = join_demands([same([80, 100], 5), same([50, 70], 5)], [0, 1], np.array([0, 1]))
    assert (shared.marks_ns, shared.resources.tolist(), shared.shares[0].tolist()) == (
        (96, 120),
        [5],
        pytest.approx([1.0]),
    )


def test_groups_with_the_same_stages_add_up_stage_by_stage():
    """For 40 ns each of two groups is on its own wire for 30, for 60 ns on one that they share for 45."""
    busy_ns, took = np.array([[30.0, 0.0], [0.0, 45.0]]), np.array([2.0, 3.0])
    demand = Demand.of(np.array([0, 1]), np.array([20, 100]), np.array([5, 7]), busy_ns, took)
    one = AlikeGroups(demand=demand, resources=np.array([[5, 7], [6, 7]]), representatives=np.array([[0, 1], [0, 1]]))
    both = join_demands([one], [0, 1], np.array([0, 1]))
    assert (both.ends_ns, both.resources.tolist(), both.marks_ns) == ((40, 130), [5, 6, 7], (20, 130))
    assert both.shares.tolist() == [pytest.approx([0.75, 0.75, 0.0]), pytest.approx([0.0, 0.0, 1.0])]
