"""Lists, tuples and dicts of arrays, and Python objects, in one call."""

import re
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import trio

import overlap
from tests.embedded.connecting import TIMEOUT_S, connected
from tests.errors import error_from, error_of

from .worlds import FEW_PATHS, run

# -- lists, tuples and dicts of arrays in one call ---------------------------------------------------------------------

R = overlap.Rank


class Pair(NamedTuple):
    weight: Any
    bias: Any


def tree(rank: int) -> Any:
    base = np.arange(12.0).reshape(4, 3)
    return {"layer": Pair(base + rank, np.full(4, 10.0 * rank)), "list": [np.full((4, 1), rank, np.int32), (base * 2,)]}


def leaves(found: Any) -> list[Any]:
    if isinstance(found, dict):
        return [leaf for item in found.values() for leaf in leaves(item)]
    return [leaf for item in found for leaf in leaves(item)] if isinstance(found, (list, tuple)) else [found]


def same(found: Any, expected: Any) -> bool:
    """The same forms, dtypes and values."""
    forms = type(found) is type(expected) and len(leaves(found)) == len(leaves(expected))
    return forms and all(
        a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
        for a, b in zip(leaves(found), leaves(expected), strict=True)
    )


def each(make: Any, *trees: Any) -> Any:
    """A tree of what `make` makes of the leaves of some trees."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: each(make, *(t[key] for t in trees)) for key in first}
    if isinstance(first, (list, tuple)):
        parts = [each(make, *items) for items in zip(*trees, strict=True)]
        return type(first)(*parts) if isinstance(first, Pair) else type(first)(parts)
    return make(*trees)


async def everything(rank: R) -> list[bool]:
    n, me = rank.world_size, rank.rank
    trees = [tree(r) for r in range(n)]
    mine = trees[me]
    total = each(lambda *xs: sum(xs[1:], xs[0]).astype(xs[0].dtype), *trees)
    joined = each(lambda *xs: np.concatenate(xs), *trees)

    def block(x: Any, r: int) -> Any:
        return np.split(x, n)[r]

    return [
        same(await rank.all_reduce(mine), total),
        same(await rank.all_gather(mine), joined),
        same(await rank.reduce_scatter(mine), each(lambda x: block(x, me), total)),
        same(await rank.all_to_all(mine), each(lambda *xs: np.concatenate([block(x, me) for x in xs]), *trees)),
        same(await rank.broadcast(mine, n - 1), trees[n - 1]),
        same(await rank.scatter(mine, n - 1), each(lambda x: block(x, me), trees[n - 1])),
        same(await rank.permute(mine, [(r, (r + 1) % n) for r in range(n)]), trees[(me - 1) % n]),
        me != 0 or same(await rank.reduce(mine), total) if me == 0 else await rank.reduce(mine) is None,
        same(await rank.gather(mine), joined) if me == 0 else await rank.gather(mine) is None,
    ]


@pytest.mark.parametrize("path", [*FEW_PATHS, "wire"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_collective_takes_a_tree(path: str, ranks: int) -> None:
    assert run(everything, ranks, path=path) == [[True] * 9] * ranks


def test_in_virtual_time() -> None:
    assert overlap.run(everything, ranks=2, clock="virtual") == [[True] * 9] * 2


def test_arrays_of_one_dtype_are_one_operation() -> None:
    async def main(rank: R) -> list[Any]:
        a, b, c = await rank.all_reduce([np.ones(3), np.ones((2, 2)), np.full((), 5.0)])
        spans = [span.info.nbytes for span in rank.recorder.spans() if span.info is not None]
        return [a.tolist(), b.tolist(), c.tolist(), spans]

    assert run(main, 2) == [[[2.0] * 3, [[2.0, 2.0]] * 2, 10.0, [8 * (3 + 4 + 1)]]] * 2


def test_what_is_moved_is_one_operation_whatever_its_dtypes() -> None:
    async def main(rank: R) -> list[int]:
        await rank.broadcast([np.ones(3), np.ones(2, np.int8)])
        return [span.info.nbytes for span in rank.recorder.spans() if span.info is not None]

    assert run(main, 2) == [[26]] * 2


def test_numbers_in_a_dict_are_reduced_and_in_a_list_are_one_array() -> None:
    async def main(rank: R) -> list[Any]:
        metrics = await rank.all_reduce({"loss": 0.5 + rank.rank, "seen": np.array([2])}, op="mean")
        return [float(metrics["loss"]), metrics["seen"].tolist(), (await rank.all_reduce([1.0, 2.0])).tolist()]

    assert run(main, 2) == [[1.0, [2], [2.0, 4.0]]] * 2


def test_the_arrays_are_the_callers_again_at_once() -> None:
    async def main(rank: R) -> list[float]:
        mine = np.ones(2)
        future = rank.all_reduce([mine])
        mine[:] = 7
        (found,) = await future
        return found.tolist()

    assert run(main, 2) == [[2.0, 2.0]] * 2


def test_from_threads_and_between_processes() -> None:
    def program(world: overlap.Connection) -> bool:
        found = world.rank.all_reduce(tree(world.rank.rank)).result(TIMEOUT_S)
        return same(found, each(lambda a, b: (a + b).astype(a.dtype), tree(0), tree(1)))

    assert connected(program, 2) == [True, True]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda r: r.all_reduce({}), "x: there is no array in it; expected an array, or lists and dicts of arrays"),
        (
            lambda r: r.all_reduce([np.ones(1)], out=np.ones(1)),
            "x: a list or dict of arrays takes neither out= nor counts=; leave them out",
        ),
        (
            lambda r: r.reduce_scatter([np.ones(2), np.ones(3)]),
            "x: reduce_scatter needs axis 0 divisible by the group's 2 ranks, got shape (3,); pad it",
        ),
        (
            lambda r: r.all_reduce({"a": "text"}),
            "x: expected an array of numbers, got str with dtype <U4; broadcast_object, gather_object and their like "
            "carry objects",
        ),
    ],
)
def test_trees_that_cannot_be_meant(wrong: Any, text: str) -> None:
    async def main(rank: R) -> str:
        return str(error_of(overlap.UsageError, wrong, rank))

    assert run(main, 2) == [text] * 2


def test_trees_that_differ_between_ranks_are_noticed() -> None:
    async def main(rank: R) -> str:
        error = await error_from(overlap.CollectiveMismatchError, rank.all_reduce([np.ones(2), np.ones(2 + rank.rank)]))
        return " ".join(sorted(error.calls))

    first, second = ("[float64 (2,), float64 (2,)]", "[float64 (2,), float64 (3,)]")
    assert run(main, 2) == [f"all_reduce({first}, op='sum') all_reduce({second}, op='sum')"] * 2


def test_the_same_arrays_under_other_names_are_noticed() -> None:
    async def main(rank: R) -> list[str]:
        w, b = np.ones(2), np.ones((2, 1))
        with pytest.raises(overlap.CollectiveMismatchError) as caught:
            await rank.all_reduce({"w": w, "b": b} if rank.rank else {"b": b, "w": w})
        return sorted(caught.value.calls)

    first, second = "{'b': float64 (2, 1), 'w': float64 (2,)}", "{'w': float64 (2,), 'b': float64 (2, 1)}"
    assert run(main, 2) == [[f"all_reduce({form}, op='sum')" for form in (first, second)]] * 2


def test_large_trees_that_differ_at_their_end_are_noticed() -> None:
    async def main(rank: R) -> list[str]:
        with pytest.raises(overlap.CollectiveMismatchError) as caught:
            await rank.all_gather({f"w{i}": np.ones(2 if i < 999 or rank.rank else (1, 2)) for i in range(1000)})
        return sorted(re.sub(r".*(\.\.\. 1000 arrays, crc) \w{8}", r"\1", call) for call in caught.value.calls)

    assert run(main, 2) == [["... 1000 arrays, crc)"] * 2] * 2


def test_one_error_of_a_tree_stands_for_all_of_its_parts() -> None:
    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 0:
            with pytest.raises(overlap.RankLeftError):
                await rank.all_reduce({"a": np.ones(2, np.float32), "b": np.ones(2, np.int64)})

    assert run(main, 2) == [None, None]  # the error of the other dtype's part fails no rank at the end


@pytest.mark.parametrize("path", [*FEW_PATHS, "wire"])
def test_ranks_that_pass_nothing_get_the_tree_of_the_root(path: str) -> None:
    async def main(rank: R) -> list[bool]:
        mine, wide = tree(0), {f"w{i}": np.full((2, 1), float(i)) for i in range(1000)}
        root = rank.rank == 0
        found = [await rank.broadcast(mine if root else None), await rank.broadcast(wide if root else None)]
        found.append(await rank.scatter(rank.compute(lambda: mine, name="tree") if root else None))
        plain = {"layer": tuple(mine["layer"]), "list": mine["list"]}  # classes do not travel
        part = each(lambda x: np.split(x, 2)[rank.rank], mine if root else plain)
        return [same(a, b) for a, b in zip(found, [mine if root else plain, wide, part], strict=True)]

    assert run(main, 2, path=path) == [[True] * 3] * 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "efa"])
def test_ranks_of_other_processes_that_pass_nothing_get_it_too(transport: str) -> None:
    def program(world: overlap.Connection) -> list[bool]:
        rank, mine = world.rank, {f"w{i}": [np.full(2, float(i)), np.full((2, 1), i)] for i in range(300)}
        whole = rank.broadcast(mine if rank.rank == 0 else None).result(TIMEOUT_S)
        part = rank.scatter(mine if rank.rank == 0 else None).result(TIMEOUT_S)
        return [same(whole, mine), same(part, each(lambda x: np.split(x, 2)[rank.rank], mine))]

    assert connected(program, 2, transport=transport) == [[True, True]] * 2


@pytest.mark.parametrize(("keys", "reason"), [
    ([range(1)], "has keys other than texts, integers and tuples of these: {<range>: 'float64 (2,)'} ..."),
    ([i * 7919**4 % 10**9 for i in range(10_000)], "has too many arrays for its keys and shapes to come in a message"),
], ids=["foreign", "large"])  # fmt: skip
def test_the_form_of_a_tree_may_be_unknown_to_ranks_that_pass_nothing(keys: list[object], reason: str) -> None:
    async def main(rank: R) -> str:
        try:
            await rank.broadcast(dict.fromkeys(keys, np.ones(2)) if rank.rank == 0 else None)
        except (overlap.UsageError, overlap.PeerFailedError) as error:
            return str(error)
        return "no error"

    of_root, own = run(main, 2)
    assert own.startswith(
        "x: the tree of rank 0, the root of broadcast #0 on group 'world' (tests/runtime/test_trees.py:"
    )
    assert f", {reason}" in own
    assert own.endswith("; pass a tree like the root's on all ranks")
    assert of_root.startswith("rank 1 failed before broadcast #0 ")
    assert of_root.endswith(own)


def test_an_end_whose_part_still_moves_starts_once() -> None:
    """The array of the first dtype has left rank 1, that of the second is being added up, and rank 2 arrives."""

    async def main(rank: R) -> list[Any] | None:
        for _ in range(20 if rank.rank == 2 else 0):
            await trio.lowlevel.checkpoint()
        return await rank.reduce([np.full(2, 1.0), np.full(1 << 24, 1, np.int32)])

    (few, many), *others = run(main, 3, path="mesh")
    assert (few.tolist(), many.min(), many.max(), others) == ([3.0, 3.0], 3, 3, [None, None])


# -- collectives of Python objects -------------------------------------------------------------------------------------


VALUES: list[Any] = [
    None,
    [1, -(2**40), True, 0.5, "text", b"bytes", (1, (2, [3]))],
    {"a": {3: [1 + 2j]}, "b": np.float32(2.5)},
    "long " * 1000,
]


async def everything_of_objects(rank: R) -> list[bool]:
    me, n = rank.rank, rank.world_size
    mine, all_ = VALUES[me], VALUES[:n]
    return [
        await rank.all_gather_object(mine) == all_,
        await rank.gather_object(mine, n - 1) == (all_ if me == n - 1 else None),
        await rank.broadcast_object(mine, n - 1) == VALUES[n - 1],
        await rank.scatter_object(all_[::-1] if me == 0 else None) == all_[::-1][me],
    ]


@pytest.mark.parametrize("path", [*FEW_PATHS, "wire"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_objects_reach_whom_they_shall(path: str, ranks: int) -> None:
    assert run(everything_of_objects, ranks, path=path) == [[True] * 4] * ranks


def test_objects_in_virtual_time() -> None:
    assert overlap.run(everything_of_objects, ranks=4, clock="virtual") == [[True] * 4] * 4


def test_objects_from_threads_and_between_processes() -> None:
    def program(world: overlap.Connection) -> list[Any]:
        rank, me = world.rank, world.rank.rank
        futures = [rank.all_gather_object(VALUES[me]), rank.broadcast_object({"from": me}, 1)]
        futures += [rank.scatter_object(["a", "b"] if me == 0 else None), rank.gather_object(me, 1)]
        return [future.result(TIMEOUT_S) for future in futures]

    assert connected(program, 2) == [[VALUES[:2], {"from": 1}, "a", None], [VALUES[:2], {"from": 1}, "b", [0, 1]]]


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64", "bfloat16"])
def test_arrays_keep_their_dtype_and_shape(dtype: str) -> None:
    async def main(rank: R) -> bool:
        mine = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, dtype, dtype))
        (found,) = (await rank.all_gather_object({"x": mine}))[:1]
        same = found["x"].dtype == mine.dtype and found["x"].shape == (2, 3) and bool((found["x"] == mine).all())
        return same and bool(found["x"].flags.writeable)

    assert run(main, 2) == [True, True]


def test_what_is_issued_around_them_keeps_its_place() -> None:
    async def main(rank: R) -> list[Any]:
        futures: list[Any] = []
        for turn in range(10):
            futures += [rank.all_gather_object([rank.rank] * turn), rank.all_reduce(np.full(1, turn))]
        found = [await future for future in reversed(futures)]
        return [found[1], int(found[0][0])]

    assert run(main, 2, path="wire") == [[[[0] * 9, [1] * 9], 18]] * 2


def test_only_who_asks_for_pickle_gets_it() -> None:
    async def main(rank: R) -> list[Any]:
        error = error_of(overlap.UsageError, rank.all_gather_object, {1, 2})
        return [str(error), await rank.all_gather_object({rank.rank}, pickle=True)]

    assert (
        run(main, 2)
        == [
            [
                "value: msgpack cannot pack set; pass numbers, texts, bytes, arrays and lists, tuples and dicts of "
                "them, or pickle=True if every rank trusts every other",
                [{0}, {1}],
            ]
        ]
        * 2
    )


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda r: r.scatter_object(["a"]), "values: expected a list of 2 objects, one a rank, got 1 of them"),
        (lambda r: r.scatter_object(3), "values: expected a list of 2 objects, one a rank, got int"),
        (lambda r: r.broadcast_object(1, 2), "root: expected 0 to 1, a rank of group 'world', got 2"),
        (lambda r: r.gather_object(1, 2), "root: expected 0 to 1, a rank of group 'world', got 2"),
    ],
)
def test_objects_that_cannot_be_meant(wrong: Any, text: str) -> None:
    async def main(rank: R) -> str:
        if rank.rank == 0:
            return str(error_of(overlap.UsageError, wrong, rank))
        return text

    assert run(main, 2) == [text] * 2
