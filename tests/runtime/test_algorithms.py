"""`algorithm=` of a call: it carries this call and no other, on every path, and ranks must agree on it."""

import numpy as np
import pytest

import overlap
from overlap.config import overriding_config
from tests.errors import error_of

from .companies import by_sockets, in_memory, run_far
from .worlds import run

ASKED = ("ring", None, "mesh", "direct", "recursive_doubling")


async def five(rank: overlap.Rank) -> list[float]:
    x = np.arange(6.0) + rank.rank
    return [float((await rank.all_reduce(x, algorithm=algorithm))[0]) for algorithm in ASKED]


async def every_kind(rank: overlap.Rank) -> list[list[float]]:
    x, size = np.arange(4.0) + 10 * rank.rank, rank.world_size
    results = [
        rank.all_reduce({"a": x, "b": [x]}, algorithm="one_shot"),
        rank.reduce_scatter(x, algorithm="rdh"),
        rank.all_gather(x, algorithm="bruck", shared=True),
        rank.all_gather(x[: rank.rank], counts=range(size), algorithm="ring"),
        rank.all_to_all(x, algorithm="pairwise"),
        rank.broadcast(x if rank.rank == 1 else None, 1, algorithm="chain"),
        rank.reduce(x, 1, algorithm="binomial"),
        rank.gather(x, 1, algorithm="mesh"),
        rank.scatter(x if rank.rank == 1 else None, 1, algorithm="binomial"),
    ]
    found = [await each for each in results]
    found[0] = found[0]["b"][0]
    return [[] if each is None else each.tolist() for each in found]


@pytest.mark.parametrize("wires", [None, in_memory, by_sockets])
def test_every_kind_is_right_by_its_algorithm(wires):
    found = run(every_kind, ranks=4) if wires is None else run_far(every_kind, 2, 2, wires=wires)
    xs = [np.arange(4.0) + 10 * rank for rank in range(4)]
    whole = np.concatenate(xs)
    for rank, results in enumerate(found):
        own = rank == 1
        assert results == [
            sum(xs).tolist(),
            [sum(xs)[rank]],
            whole.tolist(),
            np.concatenate([x[:n] for n, x in enumerate(xs)]).tolist(),
            [x[rank] for x in xs],
            xs[1].tolist(),
            sum(xs).tolist() if own else [],
            whole.tolist() if own else [],
            [xs[1][rank]],
        ]


def told(main, **how):
    """Return what the operations of rank 0 became, in their order."""
    timelines = []
    with overriding_config(watcher=timelines.append):
        results = overlap.run(main, **how)
    spans = [span for span in timelines[0].spans if span.rank == 0 and span.info is not None]
    return results, [span.info.algorithm for span in sorted(spans, key=lambda span: span.info.seq)]


def test_each_call_has_its_own():
    results, algorithms = told(five, ranks=4)
    assert results == [[6.0] * 5] * 4
    assert algorithms == ["ring", "direct", "mesh", "direct", "recursive_doubling"]


def test_a_call_says_more_than_the_run():
    assert told(five, ranks=4, algorithm="bruck")[1][:3] == ["ring", "bruck", "mesh"]


@pytest.mark.slow
def test_modelled_machines_do_the_same():
    async def priced(rank: overlap.Rank) -> None:
        x = rank.empty(1 << 22)
        for algorithm in ("ring", None, "mesh"):
            await rank.all_reduce(x, algorithm=algorithm)

    _, algorithms = told(priced, cluster="trn1.32xlarge", clock=overlap.Virtual())
    assert (algorithms[0], algorithms[2]) == ("ring", "mesh")
    assert algorithms[1] not in ("ring", "mesh")


@pytest.mark.parametrize("wires", [None, in_memory])
def test_ranks_that_differ_hear_of_it(wires):
    async def differing(rank: overlap.Rank) -> None:
        await rank.all_reduce(np.ones(4), algorithm="ring" if rank.rank else "mesh")

    message = r"all_reduce\(float64 \(4,\), op='sum', algorithm='(ring|mesh)'\)"
    if wires is None:
        with pytest.raises(overlap.RankFailedError, match=message):
            run(differing, ranks=3)
        return
    for outcome in run_far(differing, 3, 1, wires=wires):
        assert isinstance(outcome, overlap.RankFailedError)


ORDER = "expected one of direct, one_shot, rank_order, rank_chain"
EXCHANGES = "expected one of direct, mesh, pairwise, bruck, hierarchical"


@pytest.mark.parametrize(
    ("issue", "message"),
    [
        (lambda rank, x: rank.all_to_all(x, algorithm="ring"), f"algorithm: all_to_all has no 'ring'; {EXCHANGES}"),
        (lambda rank, x: rank.all_to_all(x, algorithm=7), f"algorithm: all_to_all has no 7; {EXCHANGES}"),
        (
            lambda rank, x: rank.all_reduce(x, exact=True, algorithm="ring"),
            f"algorithm: 'ring' does not reduce in the order of ranks, as exact=True asks; {ORDER}",
        ),
        (
            lambda rank, x: rank.all_gather(x, algorithm="swing"),
            "algorithm: 'swing' needs an even number of ranks, and the group has 3; expected one of direct, ring, "
            "multi_ring, mesh, rdh, bucket, bruck, recursive_doubling, hierarchical",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_call(issue, message):
    async def main(rank: overlap.Rank) -> str:
        return str(error_of(overlap.UsageError, issue, rank, np.ones(3)))

    assert run(main, ranks=3) == [message] * 3


def test_a_rank_alone_needs_none():
    async def main(rank: overlap.Rank) -> list[float]:
        return (await rank.all_reduce(np.ones(2), algorithm="ring")).tolist()

    assert run(main, ranks=1) == [[1.0, 1.0]]
