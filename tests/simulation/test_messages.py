"""Messages, lone collectives and blocks of different sizes: what each costs in virtual time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlap
import topology
from overlap import UsageError
from overlap.collectives.placement import place_group
from overlap.cost.parameters import cost_parameters
from overlap.cost.select import plan
from overlap.simulation import demand
from overlap.simulation.conditions import Conditions, SlowWires
from overlap.simulation.loads import Resources
from overlap.simulation.messages import SimulatedMessages

from .worlds import KB, MS, assert_fails, mesh, now_ns, simulate

# -- messages between pairs that are joined alike are costed once, and use wires of their own --------------------------

SLOW = Conditions(seed=3, slow_wire_share=0.3, slow_wire_factor=0.5)


def messages(cluster, conditions=SLOW):
    return SimulatedMessages(cost_parameters(cluster), Resources(cluster), SlowWires(conditions))


def told(found):
    """Return all that a demand says."""
    needs = [(section.end_ns, section.needs) for section in found.sections]
    return found.ranks.tolist(), found.marks_ns, [each.tolist() for each in found.positions], needs


@pytest.mark.parametrize("name", ["trn1.32xlarge x2", "trn2.48xlarge", "dl1.24xlarge x2", "local"])
@pytest.mark.parametrize("conditions", [Conditions(), SLOW], ids=["calm", "slow wires"])
def test_it_is_what_the_pair_alone_would_be_told(name, conditions):
    cluster = topology.cluster(name, ranks=4, nodes=2) if name == "local" else topology.cluster(name)
    shared = messages(cluster, conditions)
    for src in range(0, cluster.world_size, 5):
        for dst in range(0, cluster.world_size, 7):
            alone = messages(cluster, conditions)
            assert told(shared.demand(src, dst, 1 << 20, 70)) == told(alone.demand(src, dst, 1 << 20, 70))


def test_a_kind_of_way_is_costed_once(monkeypatch):
    costed = []

    def cost(placed, nbytes, **settings):
        costed.append(nbytes)
        return original(placed, nbytes, **settings)

    original = demand.cost
    monkeypatch.setattr(demand, "cost", cost)
    shared = messages(topology.cluster("trn2.48xlarge x2"), Conditions())
    found = shared.demand(0, 64, 4096, 0)
    assert costed
    costed.clear()
    others = [shared.demand(rank, 64 + rank, 4096, 0) for rank in range(1, 64)]
    assert shared.demand(0, 64, 4096, 0) is found
    assert not costed
    assert {each.marks_ns for each in others} == {found.marks_ns}
    assert len({frozenset(each.sections[0].needs) for each in (found, *others)}) == 64


def test_a_message_is_on_its_wires_first_and_then_on_the_way():
    found = messages(topology.cluster("trn1.32xlarge"), Conditions()).demand(3, 17, 1 << 16, 0)
    busy, underway = found.sections
    assert busy.end_ns < underway.end_ns == found.alone_ns
    assert len(busy.needs) > len(underway.needs) > 0  # of the collective processors
    assert max(busy.needs.values()) == pytest.approx(1, abs=1e-3)
    for section in found.sections:
        assert section.needs == dict(zip(section.resources.tolist(), section.shares.tolist(), strict=True))
        assert np.all(section.shares > 0)


@pytest.mark.parametrize("name", ["trn1.32xlarge x2", "trn2.48xlarge", "dl1.24xlarge x2"])
def test_it_takes_the_wires_from_the_sender_to_the_receiver(name):
    cluster = topology.cluster(name)
    resources, shared = Resources(cluster), messages(cluster, Conditions())
    for src, dst in [(0, cluster.world_size - 1), (cluster.world_size - 1, 0), (3, 5), (5, 3)]:
        found = shared.demand(src, dst, 1 << 20, 0)
        way = place_group(cluster, [src, dst]).routes(np.array([0]), np.array([1])).wire
        taken = {each for each in found.resources.tolist() if each >= resources.wire_numbers(np.array([0]))[0]}
        assert taken == set(resources.wire_numbers(way).tolist())
        assert found.ranks.tolist() == [src, dst]


# ----------------------------------------------------------------------------------------------------------------------
# What blocks of different sizes cost in virtual time: by the bytes that travel, not by those of the largest block

RANKS = 4
UNEVEN_KINDS = ("all_gather", "reduce_scatter", "all_to_all")
COUNTS = {
    "primes": [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53],
    "one larger": [8] * 14 + [9, 8],
    "some empty": [0, 9, 0, 4] * 4,
}


def took_ns(kind, counts, *, row_bytes=KB, cluster=None, algorithm=None, plain=False):
    """Return how long a collective takes with these counts; `plain`: as if nobody had said them."""
    counts = np.array(counts)

    async def main(rank):
        rows = int(counts.sum() if kind == "reduce_scatter" else counts[rank.rank].sum())
        x = overlap.shape_only((rows, row_bytes), np.uint8)
        await getattr(rank, kind)(x, **({} if plain else {"counts": counts}))
        return rank.now_ns()

    results, _ = simulate(main, len(counts), cluster=cluster, algorithm=algorithm, shapes_only=True)
    return max(results)


def shaped(kind, numbers):
    table = np.array(numbers).reshape(RANKS, RANKS)
    return table if kind == "all_to_all" else table[1]


def test_on_wires_of_their_own_the_largest_block_decides():
    table = [[9, 1, 2, 3], [7, 9, 0, 1], [0, 2, 9, 4], [1, 5, 1, 9]]
    assert took_ns("all_to_all", table, algorithm="mesh") == 7 * MS  # a row takes a millisecond; own rows stay


def test_in_a_ring_every_step_waits_for_the_largest_block_in_it():
    assert took_ns("all_gather", [1, 6, 2, 3], algorithm="ring") == 18 * MS  # three hops of 6 rows


def test_nothing_is_free():
    assert took_ns("all_gather", [0, 0, 0, 5], algorithm="mesh") == 5 * MS


@pytest.mark.parametrize("algorithm", ["mesh", "ring", None])
@pytest.mark.parametrize("numbers", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kind", UNEVEN_KINDS)
def test_between_equal_blocks_of_the_average_and_of_the_largest_size(kind, numbers, algorithm):
    counts = shaped(kind, numbers)
    row_bytes, n = 1600 * KB, len(counts)
    average = np.full_like(counts, int(counts.sum()))  # of rows that are as much smaller
    took = took_ns(kind, counts, row_bytes=row_bytes, algorithm=algorithm)
    least = took_ns(kind, average, row_bytes=row_bytes // counts.size, algorithm=algorithm, plain=True)
    most = took_ns(kind, np.full_like(counts, counts.max()), row_bytes=row_bytes, algorithm=algorithm, plain=True)
    assert least <= took <= most
    sent = [counts.sum() - counts[r] for r in range(n)] if kind != "all_to_all" else counts.sum(1) - counts.diagonal()
    busiest_ns = int(max(sent)) * row_bytes // (n - 1) * 1000  # of so many wires, a byte in a microsecond
    assert took >= busiest_ns


@pytest.mark.parametrize("kind", UNEVEN_KINDS)
@pytest.mark.parametrize(("machine", "ranks"), [("trn1.32xlarge", 8), ("trn1.32xlarge x2", 64), ("dl1.24xlarge", 8)])
def test_blocks_that_hardly_differ_cost_hardly_more_than_equal_ones(machine, ranks, kind):
    numbers = np.full((ranks, ranks) if kind == "all_to_all" else ranks, 1000)
    equal = took_ns(kind, numbers, cluster=machine, plain=True)
    numbers.flat[3] += 1
    took = took_ns(kind, numbers, cluster=machine)
    assert equal <= took <= equal * 1.001  # the largest block has a thousandth more


def test_ranks_that_stand_for_others_have_blocks_of_one_size():
    async def main(rank):
        await rank.all_gather(np.ones(rank.rank + 1), counts=range(1, 9))

    with assert_fails(
        UsageError, r"counts: ranks that behave alike have blocks of one size, got all_gather\(float64 \(36,\)"
    ):
        simulate(main, 8, cluster=mesh(8), alike=lambda rank: rank % 2, shapes_only=True)


# -- A collective alone in virtual time takes what `plan` says, to the nanosecond that virtual time counts -------------

KINDS = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter", "permute",
)  # fmt: skip
MACHINES = {name: topology.cluster(name, strict=False).world_size for name in topology.names()}
MOST_RANKS = 64  # a world of more takes seconds, and has no other kinds of wires
PLACES = ("all", "a node", "one of each node")


@st.composite
def clusters(draw):
    name = draw(st.sampled_from([name for name, ranks in MACHINES.items() if ranks <= MOST_RANKS]))
    networked = topology.cluster(name, strict=False).machine.network is not None
    counts = [nodes for nodes in (1, 2, 4) if nodes == 1 or (networked and nodes * MACHINES[name] <= MOST_RANKS)]
    nodes = draw(st.sampled_from(counts))
    ranks = nodes * draw(st.integers(2, 4)) if name == "local" else None
    return topology.cluster(name, nodes=nodes, ranks=ranks, strict=False)


def lone_ns(kind, nbytes, cluster, ranks):
    """Return the time from the call to the last result of a collective in a world that does nothing else."""
    rows = nbytes // len(ranks) if kind in ("all_gather", "gather") else nbytes

    async def main(rank):
        if rank.rank not in ranks:
            return 0
        group, x = rank.group(ranks), overlap.shape_only((rows,), "uint8")
        options = {"pairs": [(n, (n + 1) % len(ranks)) for n in range(len(ranks))]} if kind == "permute" else {}
        await getattr(group, kind)(x if kind != "scatter" or rank.rank == ranks[0] else None, **options)
        return now_ns(rank)

    return max(simulate(main, cluster.world_size, cluster=cluster, shapes_only=True)[0])


@given(
    kind=st.sampled_from(KINDS),
    cluster=clusters(),
    place=st.sampled_from(PLACES),
    blocks=st.one_of(st.integers(1, 1 << 10), st.integers(1, 1 << 26)),
)
def test_a_lone_collective_takes_what_plan_says(kind, cluster, place, blocks):
    step = cluster.ranks_per_node if place == "one of each node" and cluster.nodes > 1 else 1
    ranks = tuple(range(0, cluster.ranks_per_node if place == "a node" else cluster.world_size, step))
    nbytes = blocks * len(ranks)
    planned = plan(kind, nbytes, cluster, ranks, dtype="uint8")
    assert lone_ns(kind, nbytes, cluster, ranks) == round(planned.predicted_s * 1e9)
