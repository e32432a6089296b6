"""Messages of trees, and receives that get what the sender sends."""

import random
from contextlib import suppress
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import trio

import overlap
from overlap.runtime.backend import RealBackend
from overlap.runtime.forms import pack_form, parse_form, sendable_form, unpack_form
from overlap.runtime.transfer import read_tree_message
from overlap.runtime.trees import make_tree_message
from tests.errors import error_from, error_of

from .companies import FAR, by_sockets, run_far, world
from .test_trees import same
from .worlds import failure_of, run

R = overlap.Rank

WAYS = ["direct", "mesh", "wire", "virtual", *FAR]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Pair(NamedTuple):
    weight: Any
    bias: Any


def tree() -> dict[str, Any]:
    return {
        "layer": (np.arange(6.0).reshape(2, 3), np.full(4, 7, np.int32)),
        "list": [np.zeros((0, 3)), {3: np.float32(2.5)}],
        "narrow": np.array([1.5, -2], ml_dtypes.bfloat16),
        "large": np.arange(70_000),
    }


def expected() -> dict[str, Any]:
    return {**tree(), "list": [np.zeros((0, 3)), {3: np.array(2.5, np.float32)}]}


SENT = {
    "array": lambda: np.arange(6, dtype=np.int16).reshape(3, 2),
    "number": lambda: np.array(3.5),
    "nothing in it": lambda: np.zeros((0, 4), np.float32),
    "large": lambda: np.arange(300_000, dtype=np.float32),
    "tree": tree,
    "one dtype": lambda: [np.ones(3), (np.zeros((2, 2)), np.full(1, 5.0))],
    "one array in a dict": lambda: {"w": np.arange(4)},
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("what", SENT)
def test_a_receive_without_like_gets_what_was_sent(what: str, first: int, way: str) -> None:
    async def main(rank: R) -> Any:
        if rank.rank != first:
            await trio.sleep(0.01)  # the other has mostly come first, and either order is right
        if rank.rank == 0:
            await rank.send(SENT[what](), 1)
            return None
        return await rank.recv(src=0)

    got = world(main, way)[1]
    wanted = expected() if what == "tree" else SENT[what]()
    assert same(got, wanted), got


def test_a_tree_fills_the_arrays_it_is_given(way: str) -> None:
    async def main(rank: R) -> Any:
        sent = {"layer": Pair(np.arange(6.0).reshape(2, 3), np.full(4, 7, np.int32)), "list": [np.ones(2, bool)]}
        if rank.rank == 0:
            await rank.send(sent, 1)
            return None
        room = {"layer": Pair(np.zeros((2, 3)), np.zeros(4, np.int32)), "list": [np.zeros(2, bool)]}
        received = rank.recv(room, 0)
        got = await received
        into = got["layer"].weight is room["layer"].weight and got["list"][0] is room["list"][0]
        return into, same(got, sent), room["layer"].bias.flags.writeable, received.src

    assert world(main, way)[1] == (True, True, True, 0)


def test_a_tree_of_shapes_and_dtypes_makes_new_arrays(way: str) -> None:
    room = np.zeros(4, np.int32)
    like = {
        "layer": (((2, 3), float), room),
        "list": [((0, 3), np.float64), {3: ((), "f4")}],
        "narrow": (2, ml_dtypes.bfloat16),
        "large": ([70_000], np.dtype(int)),
    }
    layers = (((2,), "f8"), ((), np.int16))  # of two, as a pair has

    async def main(rank: R) -> Any:
        if rank.rank == 0:
            await rank.send(tree(), 1)
            await rank.send((np.ones(2), np.int16(3)), 1)
            return None
        got = await rank.recv(like, 0)
        return (
            same(got, expected()),
            got["layer"][1] is room,
            same(await rank.recv(layers, 0), (np.ones(2), np.int16(3))),
        )

    assert world(main, way)[1] == (True, True, True)


@pytest.mark.parametrize("way", ["direct", "by_sockets"])
def test_the_arrays_of_a_tree_are_read_only_while_they_are_received(way: str) -> None:
    async def main(rank: R) -> bool:
        if rank.rank == 1:
            room = [np.zeros(2), np.zeros(3)]
            received = rank.recv(room, 0)
            locked = not any(each.flags.writeable for each in room)
            rank.send(np.ones(1), 0)
            await received
            return locked and all(each.flags.writeable for each in room)
        await rank.recv(src=1)
        await rank.send([np.ones(2), np.ones(3)], 1)
        return True

    assert world(main, way) == [True, True]


def test_messages_with_and_without_like_keep_their_order(way: str) -> None:
    count = 40

    async def main(rank: R) -> list[float]:
        if rank.rank == 0:
            for i in range(count):
                rank.send(np.full(1 + i % 3, float(i)) if i % 4 else {"x": np.full(2, float(i))}, 1, tag=5)
            return []
        found = []
        for i in range(count):
            like: Any = None if i % 2 else (np.zeros(1 + i % 3) if i % 4 else {"x": np.zeros(2)})
            got = await rank.recv(like, 0, tag=5)
            found.append(float(got["x"][0] if isinstance(got, dict) else got[-1]))
        return found

    assert world(main, way)[1] == [float(i) for i in range(count)]


def test_a_tag_for_each_message(way: str) -> None:
    async def main(rank: R) -> list[int]:
        if rank.rank == 0:
            for tag in range(30):
                rank.send([np.array([tag])], 1, tag)
                rank.send(np.array([100 + tag, 0]), 1, tag)
            await rank.recv(src=1)
            return []
        await rank.send(np.ones(1), 0)  # by now rank 0 has sent, and may have forgotten the tags
        got = [(await rank.recv(src=0, tag=tag), await rank.recv(src=0, tag=tag)) for tag in reversed(range(30))]
        return [int(one[0][0]) + int(other[0]) for one, other in got]

    assert world(main, way)[1] == [100 + 2 * tag for tag in reversed(range(30))]


def test_the_future_of_a_tree_is_sent(way: str) -> None:
    async def main(rank: R) -> Any:
        if rank.rank == 0:
            rank.send(rank.compute(lambda: (np.ones(2), {"b": np.arange(3)}), seconds=0.0), 1)
            return None
        return await rank.recv(src=0)

    assert same(world(main, way)[1], (np.ones(2), {"b": np.arange(3)}))


def test_what_arrives_belongs_to_the_receiver() -> None:
    async def main(rank: R) -> Any:
        if rank.rank == 0:
            mine = {"w": np.ones(2)}
            await rank.send(mine, 1)
            mine["w"][:] = 5
            return None
        got = await rank.recv(src=0)
        got["w"] += 1
        return got["w"].tolist()

    assert run(main, 2)[1] == [2.0, 2.0]


def test_any_source_without_like_in_one_process() -> None:
    async def main(rank: R) -> Any:
        if rank.rank:
            await rank.send({"from": np.array(rank.rank)}, 0)
            return None
        asked = [rank.recv() for _ in range(2)]
        return sorted([(int((await each)["from"]), each.src) for each in asked])

    assert run(main, 3)[0] == [(1, 1), (2, 2)]


@pytest.mark.parametrize("wires", FAR.values())
def test_any_source_without_like_in_several_processes(wires: Any) -> None:
    async def main(rank: R) -> Any:
        if rank.rank:
            await rank.send({"from": np.full(rank.rank, rank.rank)}, 0)
            await rank.send(np.full(2, 10 * rank.rank), 0)
            return None
        received = [rank.recv() for _ in range(2 * (rank.world_size - 1))]
        numbers = [(await one, one.src) for one in received]
        return sorted((int(x["from"].sum() if isinstance(x, dict) else x.sum()), src or 0) for x, src in numbers)

    assert run_far(main, 2, 2, wires=wires)[0] == [(1, 1), (4, 2), (9, 3), (20, 1), (40, 2), (60, 3)]


DIFFER: list[tuple[Any, Any, str, str]] = [
    ({"w": np.ones(2)}, {"w": np.ones(3)}, "{'w': float64 (2,)}", "{'w': float64 (3,)}"),
    ({"w": np.ones(2)}, {"v": np.ones(2)}, "{'w': float64 (2,)}", "{'v': float64 (2,)}"),
    ([np.ones(2)], (np.ones(2), np.ones(0)), "[float64 (2,)]", "(float64 (2,), float64 (0,))"),
    ({"w": np.ones(2)}, np.ones(2), "{'w': float64 (2,)}", "float64 (2,)"),
    (np.ones(2), [np.ones(2)], "float64 (2,)", "[float64 (2,)]"),
    ([np.ones(2, np.int64)], [np.ones(2)], "[int64 (2,)]", "[float64 (2,)]"),
]


@pytest.mark.parametrize("way", ["direct", "mesh", "virtual", "by_sockets"])
@pytest.mark.parametrize(("sent", "like", "said", "expects"), DIFFER)
def test_a_tree_that_differs_is_an_error_with_both_lines(
    sent: Any, like: Any, said: str, expects: str, way: str
) -> None:
    async def main(rank: R) -> Any:
        if rank.rank == 0:
            with suppress(overlap.CollectiveMismatchError):  # over a wire a small message may be gone already
                await rank.send(sent, 1)
            return None
        return await error_from(overlap.CollectiveMismatchError, rank.recv(like, 0))

    error = world(main, way)[1]
    calls = dict(zip(error.ranks, error.calls, strict=True))
    assert calls == {0: f"send/recv({said})", 1: f"send/recv({expects})"}
    assert all("test_received.py:" in site for site in error.call_sites)


def test_a_sender_that_fails_and_one_that_has_left() -> None:
    async def fails(rank: R) -> Any:
        if rank.rank == 0:
            raise ValueError("boom")
        await rank.recv(src=0)

    async def leaves(rank: R) -> Any:
        if rank.rank:
            await rank.recv(src=0)

    for main, told in ((fails, "boom"), (leaves, "rank 0 finished its program while rank 1 needs it")):
        assert told in str(failure_of(world, main, "direct"))
        assert told in str(world(main, "by_sockets")[1])


def test_messages_that_were_over_before_their_receiver_asked() -> None:
    """The wire has taken all of them at once, and their sender has put the tag aside."""

    async def main(rank: R) -> Any:
        if rank.rank == 0:
            pending = [rank.send(rank.compute(np.full, 2, number), 1) for number in range(4)]
            for future in pending:
                await future
            await rank.send(np.ones(1), 1, tag=1)
            return []
        await rank.recv(((1,), float), 0, tag=1)
        return [int((await future)[0]) for future in [rank.recv(src=0) for _ in range(4)]]

    assert run_far(main, 2, 1, wires=by_sockets) == [[], [0, 1, 2, 3]]


def test_a_sender_may_be_far_ahead_of_a_receiver_without_like() -> None:
    """The wire has taken 300 small messages, and 20 of other tags; each has its shape with it."""

    async def main(rank: R) -> Any:
        if rank.rank == 0:
            for number in range(300):
                await rank.send(np.full(1 + number % 3, number), 1)
            for tag in range(1, 21):
                await rank.send(np.full(1, tag), 1, tag)
            await rank.send(np.ones(1), 1, tag=99)
            await rank.recv(((1,), float), 1)
            return []
        await rank.recv(((1,), float), 0, tag=99)
        got = [(await rank.recv(src=0)).tolist() for _ in range(300)]
        got += [(await rank.recv(src=0, tag=tag)).tolist() for tag in range(20, 0, -1)]
        await rank.send(np.ones(1), 0)
        return got

    expected = [[number] * (1 + number % 3) for number in range(300)] + [[tag] for tag in range(20, 0, -1)]
    assert run_far(main, 2, 1, wires=by_sockets)[1] == expected


@pytest.mark.parametrize(
    ("like", "said"),
    [
        (0, "a source is src=0"),
        ("w", "like: expected an array"),
        ({}, "like: there is no array in it"),
        ({"w": 3}, "like: expected an array, got int"),
        ({"w": (3, 4)}, "like: expected an array, got int; a result needs memory that can be written"),
        ({"w": ((2,), "flot")}, "like: expected an array or (shape, dtype), got ((2,), 'flot')"),
        ([np.ones((2, 2)).T], "like: must be C-contiguous"),
    ],
)
def test_a_like_that_nothing_can_be_received_into(like: Any, said: str) -> None:
    async def main(rank: R) -> None:
        assert said in str(error_of(overlap.UsageError, rank.recv, like, 0))

    run(main, 1)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({}, "x: there is no array in it"),
        ({"w": None}, "x: expected an array of numbers"),
        ({Pair: np.ones(1)}, "x: keys of dicts in messages are texts, integers or tuples of these"),
        ({"w": np.ones(2, ">f4")}, "dtype >f4 cannot be communicated"),
        (None, "x: send needs an array or a tree of arrays"),
    ],
)
def test_a_tree_that_cannot_be_sent(sent: Any, said: str) -> None:
    async def main(rank: R) -> None:
        assert said in str(error_of(overlap.UsageError, rank.send, sent, 0))

    run(main, 1)


def test_a_named_tuple_in_every_collective_comes_back_as_one() -> None:
    async def main(rank: R) -> Any:
        return await rank.all_reduce(Pair(np.ones(2), np.full(1, 2.0)))

    assert same(run(main, 2)[0], Pair(np.full(2, 2.0), np.full(1, 4.0)))


def test_without_data_a_receive_has_the_shapes() -> None:
    async def main(rank: R) -> Any:
        if rank.rank == 0:
            rank.send({"w": rank.empty((4, 2), np.float32), "b": [rank.empty((3,), np.int8)]}, 1)
            rank.send(rank.empty((4, 2), np.float32), 1)
            return None
        return await rank.recv(src=0), await rank.recv(src=0)

    found, alone = overlap.run(main, ranks=2, clock=overlap.Virtual(shapes_only=True))[1]
    assert [(each.shape, each.dtype.name) for each in (found["w"], found["b"][0], alone)] == [
        ((4, 2), "float32"), ((3,), "int8"), ((4, 2), "float32"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "{", "[1]", "{'w': 'int2048 (2,)'}", "['float64 (a,)']", "[" * 5000])
def test_a_form_that_nobody_can_have_sent_is_refused(text: str) -> None:
    with pytest.raises(overlap.OverlapError, match=r"^a message has a tree of invalid structure: .*; use one version"):
        parse_form(text)


def test_a_tree_is_read_from_its_message_and_nonsense_is_refused() -> None:
    arrays = RealBackend()
    message, data, form = make_tree_message({"w": np.arange(3.0), "b": [np.ones(1, np.int8)]}, arrays)
    called, found = read_tree_message(message)
    assert (called.form, found.tobytes()) == (form, data.tobytes())
    assert make_tree_message(np.ones(2, np.complex128), arrays)[1].ctypes.data % 16 == 0
    for nonsense in (message[:-1], message[:5], message[8:], np.full(64, 255, np.uint8), message[:0]):
        with pytest.raises((overlap.OverlapError, ValueError)):
            read_tree_message(nonsense)


def test_a_form_that_unpacks_to_more_than_any_is_cut() -> None:
    assert len(unpack_form(pack_form("x" * (1 << 26)))) < 1 << 25


@pytest.mark.slow
def test_a_tree_too_large_for_one_message() -> None:
    rng = np.random.default_rng(0)
    tree = {str(key): np.zeros(1) for key in rng.integers(0, 1 << 60, 30_000)}

    async def main(rank: R) -> None:
        with pytest.raises(overlap.UsageError, match="a tree of 30000 arrays is too large for one message"):
            rank.send(tree, 0)

    run(main, 1)


@pytest.mark.parametrize(("nbytes", "travels"), [(27 << 10, True), (28 << 10, False)])
def test_a_form_travels_that_packs_into_half_a_control_message(nbytes: int, travels: bool) -> None:
    """Of random digits it takes 32,078 and 33,233 bytes."""
    key = random.Random(1).randbytes(nbytes).hex()
    tree, leaves = {key: np.zeros(1)}, [np.zeros(1)]
    if travels:
        assert unpack_form(pack_form(sendable_form(tree, leaves))) == repr({key: "float64 (1,)"})
    else:
        with pytest.raises(overlap.UsageError, match=r"^x: a tree of 1 arrays is too large for one message; send its"):
            sendable_form(tree, leaves)


@pytest.mark.parametrize("way", ["by_sockets", "by_shared_memory"])
def test_an_array_whose_shape_is_too_long_for_its_signature_needs_like(way: str) -> None:
    x = np.arange(2.0).reshape(*[1] * 63, 2)

    async def main(rank: R) -> bool:
        if rank.rank == 0:
            await rank.send(x, 1)
            await rank.send(x, 1)
            return True
        received = await rank.recv(x.copy(), 0)
        with pytest.raises(overlap.UsageError, match=r"test_received\.py:\d+ sends has too many dimensions .*like="):
            await rank.recv(src=0)
        return bool((received == x).all()) and received.shape == x.shape

    assert world(main, way) == [True, True]
