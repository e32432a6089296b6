"""A collective alone in virtual time takes what `plan` says, to the nanosecond that virtual time counts."""

from hypothesis import given
from hypothesis import strategies as st

import overlap
import topology
from overlap.cost.select import plan

from .worlds import now_ns, simulate

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
