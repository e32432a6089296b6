"""Blocks of different sizes, against a numpy reference: all paths, awkward counts, and what is refused."""

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from zlib import crc32

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlap
from overlap.collectives.call import Call, CallKey, call
from overlap.collectives.generators import GENERATORS
from overlap.processes.wire import unpack_call
from overlap.runtime import match, signature
from overlap.runtime.forms import pack_form
from tests.properties import one_in

from .cases import FLOAT64, OPS, operators, whole_numbers
from .companies import LAYOUTS, by_sockets, in_memory, run_far
from .reference import Array, Results, fold
from .test_collectives import check_world, issue_all
from .test_dtypes import DTYPES
from .worlds import run

KINDS = ("all_gather", "reduce_scatter", "all_to_all")
SIZES = (1, 2, 3, 4, 7)
ALGORITHMS = sorted({name for kind in KINDS for name in GENERATORS[kind]})
PATHS = ("direct", "wire", *ALGORITHMS)
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
WIRES = {"memory": in_memory, "sockets": by_sockets}


def cut(x: Array, counts: Array) -> list[Array]:
    return np.split(x, np.cumsum(counts)[:-1])


def all_gather(xs: list[Array], counts: Array) -> Results:
    return [np.concatenate(xs)] * len(xs)


def reduce_scatter(xs: list[Array], counts: Array, op: str = "sum") -> Results:
    return [*cut(fold(op, xs), counts)]


def all_to_all(xs: list[Array], counts: Array) -> Results:
    return [np.concatenate(column) for column in zip(*map(cut, xs, counts), strict=True)]


REFERENCES: dict[str, Callable[..., Results]] = {f.__name__: f for f in (all_gather, reduce_scatter, all_to_all)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Uneven:
    """One collective of blocks that differ, without its data, which follows from the rest."""

    kind: str
    counts: Array
    tail: tuple[int, ...] = ()
    dtype: np.dtype = FLOAT64
    kwargs: dict[str, object] = field(default_factory=dict)

    def input(self, rank: int) -> Array:
        rows = self.counts.sum() if self.kind == "reduce_scatter" else self.counts[rank].sum()
        return whole_numbers((int(rows), *self.tail), self.dtype, crc32(f"{self} {rank}".encode()))

    def expected(self, size: int) -> Results:
        return REFERENCES[self.kind]([self.input(rank) for rank in range(size)], self.counts, **self.kwargs)

    def issue(self, comm: overlap.Group, x: object, **more: object) -> overlap.CollectiveFuture:
        return getattr(comm, self.kind)(x, counts=self.counts.tolist(), **self.kwargs, **more)

    def __str__(self) -> str:
        return f"{self.kind}({self.dtype} {self.tail}, counts={self.counts.tolist()}, {self.kwargs})"


def awkward(kind: str, size: int) -> Iterator[Array]:
    """Primes, one that holds all, all but one, nothing at all, and all alike."""
    shape = (size, size) if kind == "all_to_all" else (size,)
    length = size ** len(shape)
    numbers = cycle(PRIMES)
    yield np.array([next(numbers) for _ in range(length)]).reshape(shape)
    for held in (5, 1):
        one = np.zeros(length, int)
        one[length // 2] = held
        yield one.reshape(shape)
    yield np.array([0, 4, *[1] * length][:length]).reshape(shape)
    yield np.zeros(shape, int)
    yield np.full(shape, 3)


TAILS = ((), (3,), (2, 1), (0,))


def cases(kind: str, size: int) -> list[Uneven]:
    """Each of the counts with half of the tails, in turn, and with other operators."""
    ops = cycle(OPS if kind == "reduce_scatter" else (None,))
    return [
        Uneven(kind=kind, counts=counts, tail=tail, kwargs={"op": op} if op else {})
        for index, counts in enumerate(awkward(kind, size))
        for tail, op in zip(TAILS[index % 2 :: 2], ops, strict=False)
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_awkward_counts(kind: str, size: int, path: str) -> None:
    todo = cases(kind, size)
    check_world(todo, run(issue_all, size, todo, path=path))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("wires", WIRES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_across_processes(kind: str, layout: tuple[int, int], wires: str) -> None:
    todo = cases(kind, layout[0] * layout[1])
    check_world(todo, run_far(issue_all, *layout, todo, wires=WIRES[wires]))


@pytest.mark.parametrize("cluster", ["local", "trn1.32xlarge", "dl1.24xlarge"])
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_in_virtual_time(kind: str, size: int, cluster: str) -> None:
    todo = cases(kind, size)
    check_world(todo, overlap.run(issue_all, todo, ranks=size, cluster=cluster, clock="virtual"))


@pytest.mark.slow
@pytest.mark.everyday(1)
@pytest.mark.parametrize("path", ["direct", "mesh", pytest.param("bruck", marks=pytest.mark.slow)])
def test_every_dtype(path: str) -> None:
    counts, todo = np.array([3, 0, 2]), []
    table = np.array([[1, 0, 2], [0, 0, 3], [4, 1, 0]])
    for dtype in DTYPES:
        todo += [
            Uneven(kind="reduce_scatter", counts=counts, dtype=dtype, kwargs={"op": op}) for op in operators(dtype)
        ]
        todo += [Uneven(kind="all_gather", counts=counts, dtype=dtype, tail=(3,))]
        todo += [Uneven(kind="all_to_all", counts=table, dtype=dtype)]
    check_world(todo, run(issue_all, 3, todo, path=path))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("path", ["direct", "wire", "multi_ring"])
def test_large_blocks_go_through_the_worker_threads(path: str) -> None:
    million = 1 << 20
    counts, table = np.array([million + 1, 7, million // 2]), np.array([[9, million, 0], [1, 2, 3], [million, 0, 5]])
    todo = [
        Uneven(kind=kind, counts=table if kind == "all_to_all" else counts, dtype=np.dtype(np.float32))
        for kind in KINDS
    ]
    check_world(todo, run(issue_all, 3, todo, path=path))


@st.composite
def random_cases(draw: st.DrawFn) -> tuple[int, str, list[Uneven]]:
    size, path = draw(st.sampled_from(SIZES)), draw(st.sampled_from(PATHS))
    rows = st.integers(0, 9)
    flat = draw(st.lists(rows, min_size=size, max_size=size))
    table = draw(st.lists(rows, min_size=size * size, max_size=size * size))
    tail = draw(st.sampled_from([(), (2,), (3, 5)]))
    return size, path, [
        Uneven(kind="all_gather", counts=np.array(flat), tail=tail),
        Uneven(kind="reduce_scatter", counts=np.array(flat), tail=tail, kwargs={"op": draw(st.sampled_from(OPS))}),
        Uneven(kind="all_to_all", counts=np.array(table).reshape(size, size), tail=tail),
    ]  # fmt: skip


@one_in(2)
@given(random_cases())
def test_random_counts(drawn: tuple[int, str, list[Uneven]]) -> None:
    size, path, todo = drawn
    check_world(todo, run(issue_all, size, todo, path=path))


# -- how they are said ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["direct", "ring"])
def test_out_is_filled_also_from_the_own_block_of_it(path: str) -> None:
    counts = [2, 0, 3]

    async def main(rank: overlap.Rank) -> list[list[float]]:
        me, whole = rank.rank, np.zeros(5)
        own = whole[sum(counts[:me]) : sum(counts[: me + 1])]
        own[:] = me + 1
        gathered = await rank.all_gather(own, whole, counts=counts)
        assert gathered is whole
        out = np.full(counts[me], 9.0)
        future = rank.compute(np.ones, 5)
        assert await rank.reduce_scatter(future, out=out, counts=np.array(counts, np.uint8)) is out
        return [gathered.tolist(), out.tolist()]

    for rank, got in enumerate(run(main, 3, path=path)):
        assert got == [[1.0, 1.0, 3.0, 3.0, 3.0], [3.0] * counts[rank]]


def test_counts_that_do_not_differ_are_no_counts() -> None:
    async def main(rank: overlap.Rank) -> list[float]:
        x = np.full(2, float(rank.rank))
        future = rank.all_gather(x, counts=[2, 2]) if rank.rank else rank.all_gather(x)
        return (await future).tolist()

    assert run(main, 2) == [[0.0, 0.0, 1.0, 1.0]] * 2


X = np.ones(4)
REFUSED: list[tuple[str, Callable[[overlap.Rank], object], str]] = [
    ("too few", lambda r: r.all_gather(X, counts=[4]),
     "counts: all_gather on 2 ranks needs 2 numbers of rows, got [4]"),
    ("a number", lambda r: r.all_gather(X, counts=4), "counts: all_gather on 2 ranks needs 2 numbers of rows, got 4"),
    ("a table", lambda r: r.reduce_scatter(X, counts=[[1, 3], [1, 3]]),
     "counts: reduce_scatter on 2 ranks needs 2 numbers of rows, got [[1, 3], [1, 3]]"),
    ("a list", lambda r: r.all_to_all(X, counts=[1, 3]),
     "counts: all_to_all on 2 ranks needs a table of 2 x 2 numbers of rows, got [1, 3]"),
    ("ragged", lambda r: r.all_to_all(X, counts=[[1, 3], [4]]),
     "counts: all_to_all on 2 ranks needs a table of 2 x 2 numbers of rows, got [[1, 3], [4]]"),
    ("halves", lambda r: r.all_gather(X, counts=[0.5, 4]),
     "counts: all_gather on 2 ranks needs 2 numbers of rows, got [0.5, 4]"),
    ("bools", lambda r: r.all_gather(X, counts=[True, False]),
     "counts: all_gather on 2 ranks needs 2 numbers of rows, got [True, False]"),
    ("beyond 64 bits", lambda r: r.all_gather(X, counts=[1 << 70, 4]),
     "counts: all_gather on 2 ranks needs 2 numbers of rows, got [1180591620717411303424, 4]"),
    ("negative", lambda r: r.all_gather(X, counts=[-1, 4]),
     "counts: expected numbers of rows from 0, got -1 in [-1, 4]"),
    ("rows to gather", lambda r: r.all_gather(X, counts=[4, 3]),
     "x: counts says 3 rows for rank 1, got shape (4,); pass that many rows"),
    ("rows to reduce", lambda r: r.reduce_scatter(X, counts=[4, 3]),
     "x: counts says 7 rows for rank 1, got shape (4,); pass that many rows"),
    ("rows to exchange", lambda r: r.all_to_all(X, counts=[[0, 4], [1, 2]]),
     "x: counts says 3 rows for rank 1, got shape (4,); pass that many rows"),
    ("rows though alike", lambda r: r.all_gather(X, counts=[3, 3]),
     "x: counts says 3 rows for rank 1, got shape (4,); pass that many rows"),
    ("no axis", lambda r: r.all_gather(np.float64(1), counts=[1, 2]),
     "x: all_gather works along axis 0, got a 0-dimensional array; pass x.reshape(1)"),
    ("out", lambda r: r.reduce_scatter(X, out=np.ones(2), counts=[3, 1]),
     "out: expected float64 (1,), got float64 (2,)"),
    ("out of rank 0", lambda r: r.all_to_all(X, out=np.ones(3), counts=[[1, 2], [2, 2]]),
     "out: expected float64 (4,), got float64 (3,)"),
    ("x elsewhere in out", lambda r: r.all_gather((whole := np.ones(5))[:3], whole, counts=[2, 3]),
     "out: overlaps x, which all_gather still reads; pass x itself or an array of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("issue", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_meant_is_refused_at_the_call(issue: Callable[[overlap.Rank], object], message: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 1:
            with pytest.raises(overlap.UsageError, match=f"^{re.escape(message)}$"):
                issue(rank)
        await rank.barrier()

    run(main, 2)


DIFFERENT = [
    (lambda r: r.all_gather(np.ones(3), counts=[3, 1]), "all_gather(float64 (4,), counts=[3, 1])",
     lambda r: r.all_gather(np.ones(2), counts=[3, 2]), "all_gather(float64 (5,), counts=[3, 2])"),
    (lambda r: r.all_gather(np.ones(3), counts=[3, 2]), "all_gather(float64 (5,), counts=[3, 2])",
     lambda r: r.all_gather(np.ones(3)), "all_gather(float64 (3,))"),
    (lambda r: r.reduce_scatter(np.ones(3), counts=[1, 2]), "reduce_scatter(float64 (3,), op='sum', counts=[1, 2])",
     lambda r: r.reduce_scatter(np.ones(3), counts=[2, 1]), "reduce_scatter(float64 (3,), op='sum', counts=[2, 1])"),
    (lambda r: r.all_to_all(np.ones((3, 2)), counts=[[1, 2], [0, 1]]),
     "all_to_all(float64 (4, 2), counts=[[1, 2], [0, 1]])",
     lambda r: r.all_to_all(np.ones((1, 2)), counts=[[2, 1], [0, 1]]),
     "all_to_all(float64 (4, 2), counts=[[2, 1], [0, 1]])"),
]  # fmt: skip


@pytest.mark.parametrize("where", ["direct", "ring", "far"])
@pytest.mark.parametrize(("one", "one_call", "other", "other_call"), DIFFERENT)
def test_ranks_that_disagree_hear_of_both_calls(
    one: Callable, one_call: str, other: Callable, other_call: str, where: str
) -> None:
    async def main(rank: overlap.Rank) -> dict[int, str]:
        with pytest.raises(overlap.CollectiveMismatchError) as caught:
            await (other if rank.rank else one)(rank)
        return dict(zip(caught.value.ranks, caught.value.calls, strict=True))

    told = run_far(main, 2, 1) if where == "far" else run(main, 2, path=where)
    assert told == [{0: one_call, 1: other_call}] * 2


def test_many_counts_are_told_apart_by_a_checksum() -> None:
    def said(last: int) -> str:
        counts = (*range(99), last)
        return str(call("all_gather", None, FLOAT64, (sum(counts),), 100, 0, (), counts))

    first = ", ".join(map(str, range(16)))
    assert said(1).startswith(f"all_gather(float64 (4852,), counts=[{first}, ... 100 in all, sum 4852, crc ")
    assert said(1) != said(2)


# -- what other processes say --------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [
    call("all_gather", None, FLOAT64, (5, 2), 2, 0, (), (2, 3)),
    call("all_to_all", None, FLOAT64, (6,), 2, 0, (), (2, 0, 3, 1)),
    call("reduce_scatter", "max", FLOAT64, (4,), 2),
    call("send/recv", None, FLOAT64, (4,), 2, 0, (), (), False, False, None, "{'w': 'float64 (2, 2)'}"),
])  # fmt: skip
def test_calls_survive_being_told(asked: overlap.collectives.call.Call) -> None:
    assert unpack_call(asked.key._replace(form=""), pack_form(asked.key.form)).key == asked.key


@pytest.mark.parametrize(("index", "told"), [
    (7, [2]), (7, [2, 3, 0]), (7, [-1, 6]), (7, [2, 2]), (7, "ab"), (7, 5), (7, None), (7, [[2, 3]]), (7, [1 << 80, 3]),
    (0, "all_reduce"), (0, "all_to_all"), (0, "barrier"), (3, []), (3, [4, 2]), (3, [-5]), (4, 3), (4, 0),
    (11, 5),
])  # fmt: skip
def test_calls_that_nobody_can_have_made_are_refused(index: int, told: object) -> None:
    plain = list(call("all_gather", None, FLOAT64, (5, 2), 2, 0, (), (2, 3)).key)
    plain[index] = told
    with pytest.raises((overlap.OverlapError, msgspec.ValidationError), match=r"^invalid call|^Expected `"):
        unpack_call(msgspec.convert(plain, CallKey), b"")


def test_a_form_that_is_none_is_refused() -> None:
    with pytest.raises(overlap.OverlapError, match=r"^invalid call"):
        unpack_call(call("send/recv", None, FLOAT64, (4,), 2).key, b"{}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "steps", "most"), [("here", 300, 200), pytest.param("far", 1200, 800, marks=pytest.mark.slow)]
)
def test_counts_that_never_come_again_are_not_kept(
    where: str, steps: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, limit in ((match, "REMEMBERED"), (signature, "_CACHED")):  # thousands, which would take a minute
        monkeypatch.setattr(module, limit, 256)

    def kept() -> int:
        gc.collect()
        # by type: `isinstance` would also ask each object for its class, of which some that torch keeps warn
        return sum(type(each) is Call and bool(each.counts) for each in gc.get_objects())

    async def main(rank: overlap.Rank) -> int:
        for step in range(steps):
            await rank.all_gather(np.ones(step if rank.rank else 2), counts=[2, step])
        return kept()

    before = kept()
    after = run_far(main, 2, 1) if where == "far" else run(main, 2, path="ring")
    assert max(after) - before < most  # the cache of calls and the flight recorder keep 64 each, far the history 256
