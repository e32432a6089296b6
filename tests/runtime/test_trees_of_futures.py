"""Trees whose leaves are futures, and futures of trees, in one call."""

import re
from typing import Any

import numpy as np
import pytest
import trio

import overlap
from overlap.collectives.reduce import Array
from tests.embedded.connecting import TIMEOUT_S, connected
from tests.errors import error_from, error_of

from .companies import world
from .test_trees import each, leaves, same, tree
from .worlds import FEW_PATHS, run

R = overlap.Rank


@pytest.fixture(params=[*FEW_PATHS, "wire"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def compute(rank: R, value: Any) -> overlap.Future[Any]:
    """The future of a value, on both clocks."""
    return rank.compute(lambda: value, name="value", seconds=1e-6)


def futures(rank: R, mine: Any) -> dict[str, Any]:
    """A tree in the ways in which it may be given: the future of it, futures as all leaves, or as some."""
    some = iter(range(len(leaves(mine))))
    return {
        "whole": compute(rank, mine),
        "leaves": each(lambda x: compute(rank, x), mine),
        "mix": each(lambda x: compute(rank, x) if next(some) % 2 else x, mine),
        "arrays": mine,
    }


def calls(rank: R | overlap.Group, x: Any) -> list[overlap.Future[Any]]:
    n = rank.size if isinstance(rank, overlap.Group) else rank.world_size
    return [
        rank.all_reduce(x),
        rank.all_reduce(x, "max", priority=1, timeout_s=60.0, exact=True),
        rank.all_gather(x),
        rank.reduce_scatter(x),
        rank.all_to_all(x),
        rank.broadcast(x, n - 1),
        rank.scatter(x, n - 1),
        rank.permute(x, [(r, (r + 1) % n) for r in range(n)]),
        rank.reduce(x),
        rank.gather(x),
    ]


async def everything(rank: R) -> list[str]:
    """Every collective of a tree in every way, against the answer for arrays: the calls that differ."""
    mine, wrong = tree(rank.rank), []
    rank.stream("other", window=1)
    for way, x in futures(rank, mine).items():
        expected = [await future for future in calls(rank, mine)]
        # ranks may differ in what they pass
        given = x if rank.rank % 2 == 0 else futures(rank, mine)["leaves" if way == "whole" else "whole"]
        for on in (rank, rank.world.on(rank.stream("other"))):
            issued = calls(on, given)
            for at, (future, answer) in enumerate(zip(issued, expected, strict=True)):
                found = await future
                if not (found is answer is None or same(found, answer)):
                    wrong.append(f"{way} {at} {found} {answer}")
    return wrong


@pytest.mark.everyday(3)
@pytest.mark.parametrize(
    ("way", "ranks"), [*((way, ranks) for way in (*FEW_PATHS, "wire") for ranks in (1, 2, 4)), ("virtual", 2)]
)
def test_every_collective_takes_futures_of_trees_and_trees_of_futures(way: str, ranks: int) -> None:
    assert world(everything, way, ranks) == [[]] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "efa"])
def test_between_processes(transport: str) -> None:
    def program(world: overlap.Connection) -> list[str]:
        rank = world.rank
        mine, wrong = tree(rank.rank), []
        for way, x in futures(rank, mine).items():
            expected = [future.result(TIMEOUT_S) for future in calls(rank, mine)]
            for future, answer in zip(calls(rank, x), expected, strict=True):
                found = future.result(TIMEOUT_S)
                if not (found is answer is None or same(found, answer)):
                    wrong.append(way)
        return wrong

    assert connected(program, 2, transport=transport) == [[], []]


def test_a_tree_is_one_operation_whatever_its_dtypes() -> None:
    async def main(rank: R) -> list[Any]:
        first = await rank.all_reduce(compute(rank, {"w": np.ones(3, np.float32), "n": np.ones(2, np.int64)}))
        spans = [span.info for span in rank.recorder.spans() if span.info is not None]
        second = rank.all_reduce({"n": np.ones(2, np.int64), "w": compute(rank, np.ones(3, np.float32))})
        third = rank.all_reduce(np.ones(1))
        found = {key: (x.dtype.name, x.tolist()) for key, x in first.items()}
        return [found, [(info.seq, info.nbytes) for info in spans], (await second)["n"].tolist(), third.seq]

    reduced = {"w": ("float32", [2.0] * 3), "n": ("int64", [2] * 2)}
    assert run(main, 2) == [[reduced, [(0, 28)], [2, 2], 2]] * 2


async def crossed(rank: R) -> list[Any]:
    """Trees of several dtypes whose futures come in another order on every rank, more than a stream has room for."""
    rounds, n, me = 70, rank.world_size, rank.rank
    total, given = n * (n + 1) / 2, []
    for k in range(rounds):
        value = {"w": np.full(2, me + k, np.float32), "n": np.full(1, me * k), "b": [np.full((), me + 1.0)]}
        tag = f"lane {(k * (me + 1)) % 3}"
        given.append(rank.compute(lambda value=value: value, name="value", stream=tag, seconds=1e-6 * (me + 1)))
    issued = [rank.all_reduce(x if k % 3 else {"w": x["w"], "n": x["n"], "b": x["b"]}) for k, x in enumerate(given)]
    wrong = []
    for k, future in enumerate(issued):
        found, ranks = await future, range(n)
        answer = {
            "w": np.full(2, sum(r + k for r in ranks), np.float32),
            "n": np.full(1, sum(r * k for r in ranks)),
            "b": [np.full((), total)],
        }
        if not same(found, answer):
            wrong.append((k, found))
    return wrong


@pytest.mark.everyday(3)
@pytest.mark.parametrize("way", [*FEW_PATHS, "wire", "virtual"])
def test_trees_meet_by_their_numbers_whatever_comes_first(way: str) -> None:
    assert world(crossed, way, 3) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "efa"])
def test_trees_meet_by_their_numbers_between_processes(transport: str) -> None:
    def program(world: overlap.Connection) -> list[Any]:
        return world.run(crossed, world.rank)

    assert connected(program, 2, transport=transport) == [[], []]


def test_shapes_only() -> None:
    async def main(rank: R) -> list[Any]:
        x, n = overlap.shape_only((4, 2), np.float32), overlap.shape_only((4,), np.int64)
        future = rank.compute(lambda: {"x": x, "n": n}, name="grads", seconds=1e-3)
        found = await rank.all_reduce(future)
        part = await rank.reduce_scatter([future["x"], n])
        return [(key, leaf.dtype.name, leaf.shape) for key, leaf in found.items()] + [leaf.shape for leaf in part]

    answer = [("x", "float32", (4, 2)), ("n", "int64", (4,)), (2, 2), (2,)]
    for clock in (overlap.Virtual(shapes_only=True), overlap.Virtual(shapes_only=True, alike=1)):
        assert overlap.run(main, ranks=2, clock=clock) == [answer] * 2


def test_messages(path: str) -> None:
    async def main(rank: R) -> list[Any]:
        x, n = np.arange(3.0) + rank.rank, np.full((2, 1), rank.rank, np.int8)
        peer, mine = 1 - rank.rank, {"x": x, "n": [n]}
        given: list[Any] = [{"x": compute(rank, x), "n": [n]}, compute(rank, mine), {"x": x, "n": compute(rank, [n])}]
        sent = [rank.send(tree, peer) for tree in given]
        like = each(np.empty_like, mine)
        received = [await rank.recv(src=peer), await rank.recv(like=like, src=peer), await rank.recv(src=peer)]
        for future in sent:
            assert await future is None
        return [[found["x"].tolist(), found["n"][0].tolist()] for found in received]

    first, second = ([[base, base + 1.0, base + 2.0], [[base]] * 2] for base in (0, 1))
    assert run(main, 2, path=path) == [[second] * 3, [first] * 3]


def test_futures_of_numbers_in_a_list_are_one_array_as_numbers_are() -> None:
    async def main(rank: R) -> list[Any]:
        loss, count = compute(rank, 0.5 + rank.rank), compute(rank, 3.0)
        total = await rank.all_reduce([loss, count] if rank.rank else [0.5, 3.0])
        named = await rank.all_reduce({"loss": loss, "count": 1.0}, "mean")
        return [total.tolist(), float(named["loss"]), float(named["count"])]

    assert run(main, 2) == [[[2.0, 6.0], 1.0, 1.0]] * 2


def test_a_future_that_becomes_a_tuple_of_arrays_is_a_tuple() -> None:
    async def main(rank: R) -> bool:
        total = await rank.all_reduce(compute(rank, (np.ones(2), np.full(2, 3.0))))
        return same(total, (np.full(2, 2.0), np.full(2, 6.0)))

    assert run(main, 2) == [True, True]


def test_arrays_beside_futures_are_the_callers_again_at_once() -> None:
    async def main(rank: R) -> list[float]:
        mine = np.ones(2)
        future = rank.all_reduce([mine, compute(rank, np.ones(1))])
        mine[:] = 7
        return (await future)[0].tolist()

    assert run(main, 2) == [[2.0, 2.0]] * 2


# -- errors ----------------------------------------------------------------------------------------------------------


def failing() -> Array:
    raise ZeroDivisionError("no gradients today")


def test_the_error_of_a_leaf_is_that_of_the_operation(path: str) -> None:
    async def main(rank: R) -> list[Any]:
        w, n = compute(rank, np.ones(2, np.float32)), compute(rank, np.ones(2, np.int64))
        lost = rank.compute(failing) if rank.rank else n
        seen = []
        for x in ({"w": w, "n": lost}, [[lost], np.ones(1)], {"w": w, "n": n}):
            try:
                found = await rank.all_reduce(x)
                seen.append(found["n"].tolist())
            except (ZeroDivisionError, overlap.PeerFailedError) as error:
                seen.append((type(error).__name__, str(error).split(": ")[-1]))
        return seen

    message = "no gradients today"
    first, second = (("PeerFailedError", message),) * 2, (("ZeroDivisionError", message),) * 2
    assert run(main, 2, path=path) == [[*first, [2, 2]], [*second, [2, 2]]]


def test_an_operation_fails_with_the_first_leaf_that_fails() -> None:
    async def main(rank: R) -> bool:
        go = trio.Event()
        never = rank.spawn(go.wait)
        with pytest.raises((ZeroDivisionError, overlap.PeerFailedError)):
            await rank.all_reduce([rank.compute(failing), never])
        done = never.done()
        go.set()
        await never
        return done

    assert run(main, 2) == [False, False]


FORMS = [
    (lambda a, b: {"a": a, "b": b}, lambda a, b: {"b": b, "a": a}),
    (lambda a, b: {"a": a, "b": b}, lambda a, b: [a, b]),
    (lambda a, b: {"a": a, "b": b}, lambda a, b: {"a": a}),
    (lambda a, b: {"a": a, "b": b}, lambda a, b: a),
    (lambda a, b: {"a": a}, lambda a, b: {"a": b}),
]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("forms", FORMS)
def test_forms_that_differ_are_a_mismatch_that_names_both(forms: Any, whole: bool, path: str) -> None:
    async def main(rank: R) -> list[str]:
        a, b, form = np.ones(2, np.float32), np.ones((2, 1), np.int64), forms[rank.rank]
        x = compute(rank, form(a, b)) if whole else form(compute(rank, a), compute(rank, b))
        return sorted((await error_from(overlap.CollectiveMismatchError, rank.all_reduce(x))).calls)

    shown = [str(form("float32 (2,)", "int64 (2, 1)")) for form in forms]
    told = [re.sub(r"'(\w+ \(.*?\))'", r"\1", form) for form in shown]
    assert run(main, 2, path=path) == [sorted(f"all_reduce({form}, op='sum')" for form in told)] * 2


TEXT = (
    "expected an array of numbers, got str with dtype <U4; broadcast_object, gather_object and their like carry objects"
)
NO_OUT = "a list or dict of arrays takes neither out= nor counts=; leave them out"
NOT_SHARED = "a list or dict of arrays cannot be shared; issue a call with shared=True for each"


def late(rank: R, x: Any, **options: Any) -> list[overlap.Future[Any]]:
    return [rank.all_reduce(x, **options)]


@pytest.mark.parametrize(
    ("value", "options", "what", "text"),
    [
        ("text", {}, "an object of type str", f"x: {TEXT}"),
        (None, {}, "None", "x: all_reduce needs an array, got None"),
        ({}, {}, "a dict of 0", "x: there is no array in it; expected an array, or lists and dicts of arrays"),
        ({"w": np.ones(2)}, {"out": None}, "a dict of 1", f"x: {NO_OUT}"),
        ([np.ones(2)], {"shared": True}, "a list of 1", f"x: {NOT_SHARED}"),
    ],
)
def test_a_future_that_becomes_no_tree_of_arrays_is_told_with_the_line(
    value: Any, options: Any, what: str, text: str
) -> None:
    async def main(rank: R) -> str:
        given = {key: np.ones(2) if key == "out" else option for key, option in options.items()}
        (future,) = late(rank, compute(rank, value), **given)
        error = await error_from(overlap.UsageError, future)
        return str(error).replace("tests/runtime/", "")  # where the tests run in that folder, it is not there

    line = f"test_trees_of_futures.py:{late.__code__.co_firstlineno + 1}"
    assert run(main, 2) == [f"{text} (the future that all_reduce at {line} was given has become {what})"] * 2


def test_a_sender_or_root_whose_future_becomes_none_is_told() -> None:
    async def main(rank: R) -> list[str]:
        told = []
        nothing = compute(rank, None)
        for future in (rank.send(nothing, 1 - rank.rank), rank.reduce(nothing), rank.broadcast(nothing, rank.rank)):
            told.append(str(await error_from(overlap.UsageError, future)).split(" (")[0])
        return told

    told = ["x: send needs an array or a tree of arrays, got None", "x: reduce needs an array on rank {0}, got None"]
    told.append("x: broadcast needs an array on rank {0}, got None")
    assert run(main, 2) == [[text.format(rank) for text in told] for rank in range(2)]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda r, f: r.all_reduce([f], out=np.ones(1)), f"x: {NO_OUT}"),
        (lambda r, f: r.all_reduce([f], shared=True), f"x: {NOT_SHARED}"),
        (lambda r, f: r.send([f, "text"], 0), f"x: {TEXT}"),
    ],
)
def test_what_is_wrong_already_is_told_at_the_call(wrong: Any, text: str) -> None:
    async def main(rank: R) -> str:
        return str(error_of(overlap.UsageError, wrong, rank, compute(rank, np.ones(1))))

    assert run(main, 2) == [text] * 2


def test_a_deadline_ends_all_dtypes_of_a_tree(path: str) -> None:
    async def main(rank: R) -> list[str]:
        x = {"w": compute(rank, np.ones(2, np.float32)), "n": np.ones(1, np.int64)}
        if rank.rank == 1:
            await given_up.wait()
        seen = []
        for _ in range(2):
            try:
                await rank.all_reduce(x, timeout_s=0.01 if rank.rank == 0 else None)
            except (overlap.DeadlineError, overlap.PeerFailedError) as error:
                seen.append(type(error).__name__)
            given_up.set()
        return seen

    given_up = trio.Event()
    assert run(main, 2, path=path) == [["DeadlineError", "PeerFailedError"], ["PeerFailedError"] * 2]


def test_an_aborted_group_ends_all_dtypes_of_a_tree() -> None:
    async def main(rank: R) -> list[Any]:
        pair = rank.group([0, 1])
        x = {"w": compute(rank, np.ones(2, np.float32)), "n": np.ones(1, np.int64)}
        if rank.rank == 1:
            await aborted.wait()
        future = pair.all_reduce(x)
        if rank.rank == 0:
            await x["w"]
            pair.abort("enough")
            aborted.set()
        with pytest.raises(overlap.GroupAbortedError):
            await future
        return (await rank.all_reduce(x))["n"].tolist()

    aborted = trio.Event()
    assert run(main, 2) == [[2], [2]]


@pytest.mark.parametrize("key", ["w", "v"])
def test_a_nan_in_any_dtype_is_noticed(key: str, clock: Any) -> None:
    async def main(rank: R) -> None:
        x = {"w": np.ones(2, np.float32), "v": np.ones(2, np.float64)}
        if rank.rank == 1:
            x[key][1] = np.nan
        await rank.all_reduce({name: compute(rank, value) for name, value in x.items()})

    error = error_of(overlap.RankFailedError, overlap.run, main, ranks=3, clock=clock, timeout_s=TIMEOUT_S, check="nan")
    assert isinstance(error.__cause__, overlap.NonFiniteError)
    assert (error.__cause__.rank, error.__cause__.index) == (1, (1,))


def test_a_rank_that_leaves_ends_all_dtypes_of_a_tree() -> None:
    async def main(rank: R) -> None:
        if rank.rank == 0:
            with pytest.raises(overlap.RankLeftError):
                await rank.all_reduce({"w": compute(rank, np.ones(2)), "n": np.ones(2, np.int64)})

    assert run(main, 2) == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "efa"])
def test_errors_between_processes(transport: str) -> None:
    """Each case is a group of its own: what failed there leaves the others alone."""

    async def main(rank: R) -> list[str]:
        x = {"w": compute(rank, np.ones(2, np.float32)), "n": np.ones(1, np.int64)}
        lost = {"w": rank.compute(failing), "n": x["n"]} if rank.rank else x
        other = {"n": x["n"], "w": x["w"]} if rank.rank else x
        seen: list[str] = []
        for name, given in (("good", x), ("lost", lost), ("other", other), ("late", x)):
            late_s = 0.05 if name == "late" and rank.rank == 0 else None
            group = rank.group([0, 1], name=name)
            if name == "late" and rank.rank:
                await rank.group([0, 1], name="after").recv(src=0)
                await trio.sleep(0.5)  # the report that rank 0 gave up travels apart from messages
            try:
                found = await group.all_reduce(given, timeout_s=late_s)
                seen.append(f"{found['w'].tolist()} {found['n'].tolist()}")
            except Exception as error:
                seen.append(type(error).__name__)
            if name == "late" and not rank.rank:
                await rank.group([0, 1], name="after").send(np.ones(1), 1)
        seen.append(str((await rank.all_reduce(x))["n"].tolist()))
        return seen

    def program(world: overlap.Connection) -> list[str]:
        return world.run(main, world.rank)

    good, mismatch = "[2.0, 2.0] [2]", "CollectiveMismatchError"
    assert connected(program, 2, transport=transport) == [
        [good, "PeerFailedError", mismatch, "DeadlineError", "[2]"],
        [good, "ZeroDivisionError", mismatch, "PeerFailedError", "[2]"],
    ]
