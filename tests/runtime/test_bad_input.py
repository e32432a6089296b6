"""Arguments that cannot be meant: a UsageError at the call, with the argument's name and both values."""

import re
from collections.abc import Callable

import numpy as np
import pytest

import overlap
import topology
from overlap import UsageError
from transports import NeuronLink, Recording, Transport

from .worlds import PATHS, TIMEOUT_S, Turns, run

R = overlap.Rank
X = np.ones(4)


def frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


OBJECTS = "; broadcast_object, gather_object and their like carry objects"

# Calls by rank 1 of 2.
REFUSED: list[tuple[str, Callable[[R], object], str]] = [
    # x
    ("no array", lambda r: r.all_reduce(None), "^x: all_reduce needs an array, got None$"),
    ("no array to gather", lambda r: r.gather(None), "^x: gather needs an array on rank 1, got None$"),
    ("no array to reduce", lambda r: r.reduce(None), "^x: reduce needs an array on rank 1, got None$"),
    ("no array at the root", lambda r: r.broadcast(None, 1), "^x: broadcast needs an array on rank 1, got None$"),
    ("nothing to scatter", lambda r: r.scatter(None, 1), "^x: scatter needs an array on rank 1, got None$"),
    ("no array to send", lambda r: r.send(None, 0), "^x: send needs an array or a tree of arrays, got None$"),
    ("no array to permute", lambda r: r.permute(None, []), "^x: permute needs an array, got None$"),
    ("text", lambda r: r.all_reduce("abc"), f"^x: expected an array of numbers, got str with dtype <U3{OBJECTS}$"),
    ("text to send", lambda r: r.send("abc", 0), f"^x: expected an array of numbers, got str with dtype <U3{OBJECTS}$"),
    ("objects", lambda r: r.all_reduce([object()]), f"^x: expected .*, got list with dtype object{OBJECTS}$"),
    ("array of objects", lambda r: r.all_reduce(np.array([None])), "^x: dtype object cannot be communicated"),
    ("dates", lambda r: r.all_gather(np.zeros(2, "M8[s]")), r"^x: dtype datetime64\[s\] cannot be communicated"),
    ("records", lambda r: r.all_gather(np.zeros(2, "i4,f4")), r"^x: dtype \[\('f0', '<i4'\), .* cannot be communic"),
    ("byte order", lambda r: r.all_reduce(np.ones(2, ">f4")), "^x: dtype >f4 cannot be .*; convert it to native byte"),
    ("ragged", lambda r: r.all_reduce([[1], [1, 2]]), "^x: cannot make an array of list: "),
    # shapes
    ("scalar to gather", lambda r: r.all_gather(np.float64(1)), "^x: all_gather works along axis 0, got a 0-dim"),
    ("scalar to scatter", lambda r: r.scatter(1.0, 1), "^x: scatter works along axis 0, got a 0-dimensional"),
    ("odd blocks", lambda r: r.reduce_scatter(np.ones(3)),
     r"^x: reduce_scatter needs axis 0 divisible by the group's 2 ranks, got shape \(3,\); pad it$"),
    ("odd rows", lambda r: r.all_to_all(np.ones((5, 2))),
     r"^x: all_to_all needs axis 0 divisible by the group's 2 ranks, got shape \(5, 2\); pad it$"),
    # op
    ("unknown op", lambda r: r.all_reduce(X, "median"), "^op: 'median' is .*; known are sum, mean, .*"),
    ("no op", lambda r: r.all_reduce(X, None), "^op: None is unknown; known are sum"),
    ("list of ops", lambda r: r.reduce(X, 0, ["sum"]), r"^op: \['sum'\] is unknown; known are sum"),
    ("ufunc", lambda r: r.reduce_scatter(X, np.add), "^op: <ufunc 'add'> is unknown; known are sum"),
    ("sum of bools", lambda r: r.all_reduce(X > 0), "^op: 'sum' is not defined for bool; use 'max'"),
    ("mean of bools", lambda r: r.reduce(X > 0, 0, "mean"), "^op: 'mean' is not defined for bool; use 'max'"),
    # root and ranks
    ("root beyond", lambda r: r.broadcast(X, 2), "^root: expected 0 to 1, a rank of group 'world', got 2$"),
    ("root below", lambda r: r.reduce(X, -1), "^root: expected 0 to 1, a rank of group 'world', got -1$"),
    ("root of a group", lambda r: r.group([1]).gather(X, 1), "^root: expected 0 to 0, a rank of group '1', got 1$"),
    ("root not whole", lambda r: r.scatter(X, 0.0), "^root: expected 0 to 1, a rank of group 'world', got 0.0$"),
    ("no root", lambda r: r.scatter(X, None), "^root: expected 0 to 1, a rank of group 'world', got None$"),
    ("dst", lambda r: r.send(X, 2), "^dst: expected 0 to 1, a rank of group 'world', got 2$"),
    ("src", lambda r: r.recv(X, -1), "^src: expected 0 to 1, a rank of group 'world', got -1$"),
    # pairs
    ("pairs beyond", lambda r: r.permute(X, [(0, 2)]), "^pairs: expected 0 to 1, a rank of group 'world', got 2$"),
    ("a source twice", lambda r: r.permute(X, [(0, 0), (0, 1)]),
     r"^pairs: rank 0 is a source twice in \[\(0, 0\), \(0, 1\)\]; each may be one once$"),
    ("a destination twice", lambda r: r.permute(X, [(0, 1), (1, 1)]), "^pairs: rank 1 is a destination twice in"),
    ("pairs of one", lambda r: r.permute(X, [(0,)]), "^pairs: "),
    ("pairs of three", lambda r: r.permute(X, [(0, 1, 1)]), "^pairs: "),
    ("a flat list", lambda r: r.permute(X, [0, 1]), "^pairs: "),
    ("no pairs", lambda r: r.permute(X, None), "^pairs: "),
    ("pairs of text", lambda r: r.permute(X, [("a", 1)]), "^pairs: "),
    ("pairs of halves", lambda r: r.permute(X, [(0.5, 1)]), "^pairs: .*0.5"),
    # tag, like
    ("tag below", lambda r: r.send(X, 0, -1), "^tag: .*, got -1$"),
    ("tag beyond", lambda r: r.recv(X, 0, 2**24), "^tag: .*, got 16777216$"),
    ("tag not whole", lambda r: r.send(X, 0, 1.5), "^tag: .*, got 1.5$"),
    ("tag of text", lambda r: r.send(X, 0, "a"), "^tag: .*, got 'a'$"),
    ("a list to fill", lambda r: r.recv([0.0], 0), "^like: expected an array, got float; a result needs"),
    ("no such dtype", lambda r: r.recv(((2,), "flot"), 0), r"^like: expected .*, got \(\(2,\), 'flot'\): "),
    ("no such shape", lambda r: r.recv(((-2,), float), 0), r"^like: expected .*, got \(\(-2,\), "),
    ("read-only like", lambda r: r.recv(frozen(np.ones(2)), 0), "^like: .*read-only"),
    ("scattered like", lambda r: r.recv(np.ones((4, 4))[:, 0], 0), r"^like: must be C-contiguous, got strides \(32,\)"),
    ("objects in like", lambda r: r.recv(((2,), object), 0), "^like: .*object"),
    # out
    ("a list for out", lambda r: r.all_reduce(X, out=[0.0]), "^out: expected an array, got list; a result needs"),
    ("shape of out", lambda r: r.all_reduce(X, out=np.ones(5)), r"^out: expected float64 \(4,\), got float64 \(5,\)$"),
    ("dtype of out", lambda r: r.all_reduce(X, out=np.ones(4, "f4")),
     r"^out: expected float64 \(4,\), got float32 \(4,\)$"),
    ("out of a gather", lambda r: r.all_gather(X, out=np.ones(4)),
     r"^out: expected float64 \(8,\), got float64 \(4,\)$"),
    ("out of a scatter", lambda r: r.reduce_scatter(X, out=np.ones(4)), r"^out: expected float64 \(2,\), got float64 "),
    ("scattered out", lambda r: r.all_reduce(X, out=np.ones(8)[::2]),
     r"^out: must be C-contiguous, got strides \(16,\)"),
    ("read-only out", lambda r: r.all_reduce(X, out=frozen(np.ones(4))), "^out: is read-only"),
    ("read-only out for nothing yet", lambda r: r.broadcast(None, 0, frozen(np.ones(4))), "^out: is read-only"),
    ("a list for nothing yet", lambda r: r.scatter(None, 0, [0.0]), "^out: expected an array, got list; "),
    ("out of a future", lambda r: r.all_reduce(r.compute(np.ones, 2), out=[0.0]),
     "^out: expected an array, got list; a result needs"),
    ("out away from the root", lambda r: r.reduce(X, 0, out=np.ones(4)),
     "^out: only the root 0 of reduce gets a result, this is rank 1; pass out=None here$"),
    ("gather away from the root", lambda r: r.gather(X, 0, out=np.ones(8)),
     "^out: only the root 0 of gather gets a result, this is rank 1; pass out=None here$"),
    # memory
    ("x in out of a scatter", lambda r: r.reduce_scatter(X, out=X[:2]), "^out: overlaps x, which reduce_scatter still"),
    ("x is out of all_to_all", lambda r: r.all_to_all(X, out=X), "^out: overlaps x, which all_to_all still reads"),
    ("x is out of permute", lambda r: r.permute(X, [], out=X), "^out: overlaps x, which permute still reads"),
    ("out ahead of x", lambda r: shifted(r), "^out: overlaps x, which all_reduce still reads"),
    ("not one's own block", lambda r: wrong_block(r), "^out: overlaps x, which all_gather still reads"),
    # how
    ("priority", lambda r: r.all_reduce(X, priority="high"), "^priority: .*'high'"),
    ("half a priority", lambda r: r.send(X, 0, priority=0.5), "^priority: .*0.5"),
    ("no priority", lambda r: r.barrier(priority=None), "^priority: .*None"),
    ("stream", lambda r: r.barrier(stream="tp"), "^stream: 'tp' is unknown; known are comm; "),
    ("stream number", lambda r: r.barrier(stream=1), "^stream: 1 is unknown; known are comm; "),
    ("list of streams", lambda r: r.barrier(stream=["comm"]), r"^stream: \['comm'\] is unknown; known are comm; "),
    ("array for a stream", lambda r: r.all_reduce(X, stream=X), r"^stream: ndarray of float64 \(4,\) is unknown; kn"),
    ("array for an op", lambda r: r.all_reduce(X, X), r"^op: ndarray of float64 \(4,\) is unknown; known are sum"),
    ("array for an algorithm", lambda r: r.all_reduce(X, algorithm=X), r"^algorithm: .* has no ndarray of float64 "),
    ("array for a root", lambda r: r.broadcast(X, X), r"^root: expected 0 to 1, .*, got ndarray of float64 \(4,\)$"),
    ("text without end", lambda r: r.all_reduce(X, "x" * 999), "^op: '" + "x" * 76 + r"\.\.\. is unknown; known are s"),
    ("number for a name", lambda r: r.all_reduce(X, name=5), "^name: expected a text, got 5$"),
    ("array for a name", lambda r: r.barrier(name=X), r"^name: expected a text, got ndarray of float64 \(4,\)$"),
    ("no name of objects", lambda r: r.all_gather_object(1, name=0), "^name: expected a text, got 0$"),
    ("no name of a compute", lambda r: r.compute(int, name=5), "^name: expected a text, got 5$"),
    ("no name of a task", lambda r: r.spawn(int, name=5), "^name: expected a text, got 5$"),
    ("array for a place", lambda r: r.barrier(call_site=X), '^call_site: expected a frame or "file:line", got ndarra'),
    ("empty place", lambda r: r.compute(int, call_site=""), "^call_site: expected a frame or \"file:line\", got ''$"),
    # streams and groups
    ("no stream", lambda r: r.stream(None), "^name: expected a non-empty string, such as 'gradients', got None$"),
    ("nameless stream", lambda r: r.stream(""), "^name: expected a non-empty string, such as 'gradients', got ''$"),
    ("list for a stream", lambda r: r.stream(["a"]), r"^name: expected a non-empty string, .*, got \['a'\]$"),
    ("urgency of a stream", lambda r: r.stream("a", priority="high"), "^priority: expected an int.*, got 'high'$"),
    ("no window", lambda r: r.stream("a", window=None), "^window: expected an integer, 1 or more, got None$"),
    ("half a window", lambda r: r.stream("a", window=1.5), "^window: expected an integer, 1 or more, got 1.5$"),
    ("no group", lambda r: r.group(None), "^ranks: expected ranks of group 'world', got None$"),
    ("a rank for a group", lambda r: r.group(1), "^ranks: expected ranks of group 'world', got 1$"),
    ("no name of a group", lambda r: r.group([1], name=5), "^name: expected a text, got 5$"),
]  # fmt: skip


def shifted(rank: R) -> object:
    base = np.ones(8)
    return rank.all_reduce(base[1:5], out=base[:4])


def wrong_block(rank: R) -> object:
    out = np.ones(8)
    return rank.all_gather(out[:4], out=out)


@pytest.mark.parametrize(
    ("call", "message"), [row[1:] for row in REFUSED], ids=[row[0].replace(" ", "-") for row in REFUSED]
)
def test_refused_at_the_call_and_nothing_has_happened(call: Callable[[R], object], message: str) -> None:
    """The other rank notices nothing: numbers match, and no array is left read-only."""

    async def main(rank: R) -> float:
        await rank.barrier()
        if rank.rank == 1:
            with pytest.raises(UsageError, match=message):
                call(rank)
            assert X.flags.writeable
            rank.recv(X, 0, tag=1)
        else:
            rank.send(X.copy(), 1, tag=1)
        return float((await rank.all_reduce(np.ones(1)))[0])

    assert run(main, 2) == [2.0, 2.0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["broadcast", "scatter"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize(
    ("out", "got"),
    [
        (np.zeros(3), r"float64 \(3,\)"),
        (np.zeros((3, 4)), r"float64 \(3, 4\)"),
        (np.zeros(4, np.int8), r"int8 \(4,\)"),
    ],
)
def test_an_out_that_cannot_hold_what_the_root_sends(
    out: np.ndarray, got: str, order: tuple[int, ...], kind: str, path: str
) -> None:
    """It is found when the root has said what it sends, whoever comes first, and it is this rank's mistake."""
    turns = Turns(order)
    x = np.ones(4 if kind == "broadcast" else 12)

    async def main(rank: R) -> None:
        mine = out.copy() if rank.rank == 1 else None
        async with turns.of(rank.rank):
            future = getattr(rank, kind)(x if rank.rank == 0 else None, 0, mine)
        with pytest.raises((UsageError, overlap.PeerFailedError)) as info:
            await future
        if rank.rank == 1:
            assert re.match(rf"out: expected float64 \(4,\), got {got}$", str(info.value))
            assert mine is not None
            assert mine.flags.writeable
            assert not mine.any()
        else:
            assert isinstance(info.value, overlap.PeerFailedError)
            assert info.value.culprit == 1
            assert re.match("rank 1 failed before .*: UsageError: out: expected", str(info.value))
        assert (await rank.all_reduce(np.ones(1))).tolist() == [3.0]

    assert run(main, 3, path=path) == [None] * 3
    assert x.flags.writeable


def test_futures_are_checked_when_they_are_there() -> None:
    async def main(rank: R) -> None:
        for x, message in (
            ("abc", "^x: expected an array of numbers, got str"),
            (None, "^x: all_reduce needs an array, got None"),
            (np.ones(3), r"^out: expected float64 \(3,\), got float64 \(2,\)"),
        ):
            future = rank.all_reduce(rank.compute(lambda value=x: value), out=np.ones(2))
            with pytest.raises(UsageError, match=message):
                await future

    assert run(main, 2) == [None, None]


def test_a_future_whose_array_overlaps_out() -> None:
    async def main(rank: R) -> None:
        base = np.ones(6)
        with pytest.raises(UsageError, match=r"^out: overlaps x"):
            await rank.all_reduce(rank.compute(lambda: base[2:5]), out=base[:3])
        assert base.flags.writeable

    assert run(main, 2) == [None, None]


async def nothing(rank: R) -> None:
    """A program that does nothing."""


BAD_RUNS: list[tuple[dict[str, object], str]] = [
    ({"ranks": 0}, "^ranks: expected a positive integer, got 0$"),
    ({"ranks": -1}, "^ranks: expected a positive integer, got -1$"),
    ({"ranks": 1.5}, "^ranks: expected a positive integer, got 1.5$"),
    ({"ranks": "2"}, "^ranks: expected a positive integer, got '2'$"),
    ({"clock": "sundial"}, "^clock: 'sundial' is unknown; known are 'real', 'virtual' and overlap"),
    ({"algorithm": "rign"}, "^algorithm: 'rign' is unknown; known are direct, "),
    ({"timeout_s": 0}, "^timeout_s: expected a positive number of seconds, got 0$"),
    ({"timeout_s": "a"}, "^timeout_s: expected a positive number of seconds, got 'a'$"),
    ({"timeout_s": True}, "^timeout_s: expected a positive number of seconds, got True$"),
    ({"trace": 5}, "^trace: expected the name of a file, got 5$"),
    ({"trace": ""}, "^trace: expected the name of a file, got ''$"),
    ({"cluster": "trn9"}, r"^cluster: unknown cluster 'trn9'; known: .*trn1\.32xlarge"),
    ({"cluster": 5}, "^cluster: expected a cluster or its name, got 5$"),
    ({"transport": 5}, "^transport: expected a transport, or a function that makes one, got 5$"),
    ({"algorithm": 5}, "^algorithm: 5 is unknown; known are "),
    ({"timeout_s": -3.0}, "^timeout_s: expected a positive number of seconds, got -3.0$"),
    ({"cluster": "trn1.2xlarge", "ranks": 33}, "^ranks: 33 do not fit on trn1.2xlarge"),
    ({"transport": NeuronLink(3), "ranks": 2}, "^transport: "),
]


@pytest.mark.parametrize(("kwargs", "message"), BAD_RUNS)
def test_worlds_that_cannot_be(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        overlap.run(nothing, **{"timeout_s": TIMEOUT_S} | kwargs)  # type: ignore[arg-type]


def test_a_program_that_is_no_function() -> None:
    with pytest.raises(UsageError, match=r"^main: expected an async function, got int$"):
        overlap.run(3, ranks=1)  # type: ignore[arg-type]


def test_a_program_that_cannot_take_its_arguments_is_refused_before_anything_starts() -> None:
    async def alone() -> None: ...
    async def two(rank: R, x: int) -> None: ...

    with pytest.raises(UsageError) as told:
        overlap.run(alone, ranks=1)
    advice = "correct its parameters, or the arguments after main"
    called = "main: alone() -> None is called with the rank: too many positional arguments"
    assert str(told.value) == f"{called}; {advice}"
    with pytest.raises(UsageError, match=r"is called with the rank and 2 further arguments: too many positional"):
        overlap.run(two, 1, 2, ranks=1)


def test_illegal_groups_of_a_cluster_are_refused() -> None:
    async def main(rank: R) -> None:
        if rank.rank in (0, 1, 2):
            with pytest.raises(topology.TopologyError):
                rank.group([0, 1, 2])

    overlap.run(main, cluster="trn1.32xlarge", timeout_s=TIMEOUT_S)


def test_a_transport_may_be_put_around_the_usual_one() -> None:
    made: list[Recording] = []

    def recording(wires: Transport) -> Transport:
        made.append(Recording(wires))
        return made[0]

    async def main(rank: overlap.Rank) -> float:
        return float((await rank.all_reduce(np.ones(1)))[0])

    assert overlap.run(main, ranks=3, transport=recording) == [3.0] * 3
    assert made[0].sent
    with pytest.raises(overlap.UsageError, match=r"^transport: expected a transport of ranks \[0, 1\], or a function"):
        overlap.run(main, ranks=2, transport=lambda wires: 7)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("served", "advice"), [([0, 1], "pass one for 3 ranks, or ranks=2"), ([1, 2], "pass one for 3 ranks")]
)
def test_a_transport_of_other_ranks(served: list[int], advice: str) -> None:
    """No number of ranks fits one whose ranks do not begin at 0."""

    async def main(rank: R) -> None: ...

    with pytest.raises(overlap.UsageError, match=rf"^transport: it serves ranks .* has ranks 0 to 2; {advice}$"):
        overlap.run(main, ranks=3, transport=NeuronLink(served))


def test_a_program_that_is_no_async_function() -> None:
    def program(rank: R) -> int:
        return rank.rank

    with pytest.raises(
        overlap.RankFailedError,
        match=r"main: expected an async function, but program\(rank\) returned int \(test_bad_input\.py:\d+\)",
    ):
        overlap.run(program, ranks=1)  # type: ignore[arg-type]


def test_a_world_within_a_world() -> None:
    async def inner(rank: R) -> None: ...

    async def outer(rank: R) -> None:
        with pytest.raises(UsageError, match=r"^run: a Trio program runs already; use `await overlap.run_async"):
            overlap.run(inner, ranks=1)

    overlap.run(outer, ranks=1)


@pytest.mark.parametrize("index", ["x", 1.5, None])
def test_a_step_without_a_number(index: object) -> None:
    async def main(rank: R) -> None:
        with pytest.raises(UsageError, match=r"^index: expected an integer, got "), rank.step(index):  # type: ignore[arg-type]
            raise AssertionError("the step began")

    overlap.run(main, ranks=1)
