"""Every collective against its numpy reference: operators, roots, shapes, sizes, paths, clocks, ways to pass arrays."""

import numpy as np
import pytest

import overlap
from overlap.runtime.engine import in_process
from overlap.runtime.engine.workers import PIECE_BYTES, Workers
from transports.shared_memory import engine

from .cases import KINDS, SCATTERING, Case, cases, differs
from .reference import Array, Results
from .worlds import FEW_PATHS, PATHS, SIZES, run

# ----------------------------------------------------------------------------------------------------------------------
# Every collective against its numpy reference: operators, roots, shapes, world sizes, paths, ways to pass arrays


def check_world(todo: list[Case], got: list[Results]) -> None:
    """Compare the results of all ranks with the reference."""
    size = len(got)
    for index, case in enumerate(todo):
        for rank, want in enumerate(case.expected(size)):
            problem = differs(got[rank][index], want)
            assert problem is None, f"{case} on rank {rank} of {size}: {problem}"


async def issue_all(rank: overlap.Rank, todo: list[Case]) -> Results:
    """Issue all before the first is awaited, and see that they leave their inputs as they were."""
    inputs = [case.input(rank.rank) for case in todo]
    issued = [case.issue(rank.world, x) for case, x in zip(todo, inputs, strict=True)]
    results = [await future for future in issued]
    for case, x in zip(todo, inputs, strict=True):
        assert x.flags.writeable
        assert np.array_equal(x, case.input(rank.rank)), f"{case} changed its input"
    return results


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_variants_and_shapes(kind: str, size: int, path: str) -> None:
    todo = list(cases(kind, size))
    check_world(todo, run(issue_all, size, todo, path=path))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_all_variants_with_all_shapes(kind: str, size: int, path: str) -> None:
    todo = list(cases(kind, size, every=1))
    check_world(todo, run(issue_all, size, todo, path=path))


LARGE_BYTES = 3 << 20
LARGE = [
    *((3, path) for path in ("direct", "wire")),
    *(
        pytest.param(size, path, marks=pytest.mark.slow)
        for size, path in (
            (3, "ring"),
            (4, "recursive_doubling"),
            (3, "mesh"),
            (3, "recursive_doubling"),
            (2, "direct"),
            (4, "direct"),
        )
    ),
]


def large_cases(size: int) -> list[Case]:
    """Several MiB in every message, cut unevenly by everything that cuts."""
    odd = LARGE_BYTES // 4 + 1
    todo = []
    for kind in KINDS:
        shape = (odd * size,) if kind in SCATTERING else (odd,)
        kwargs = {"pairs": [(0, size - 1), (size - 1, 0)]} if kind == "permute" else {}
        if kind in ("broadcast", "reduce", "gather", "scatter"):
            kwargs = {"root": size - 1}
        todo.append(Case(kind=kind, shape=shape, dtype=np.dtype(np.float32), kwargs=kwargs))
    return todo


@pytest.mark.slow
@pytest.mark.parametrize(("size", "path"), LARGE)
def test_large_arrays_go_through_the_worker_threads(size: int, path: str) -> None:
    todo = large_cases(size)
    check_world(todo, run(issue_all, size, todo, path=path))


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("op", "path"),
    [
        ("mean", "direct"),
        ("max", "mesh"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("mean", "mesh"), ("max", "direct"))),
    ],
)
def test_large_narrow_floats_are_widened_piece_by_piece(op: str, path: str) -> None:
    todo = [Case(kind=kind, shape=(300_001 * 3,), dtype=np.dtype(np.float16), kwargs={"op": op}) for kind in
            ("all_reduce", "reduce_scatter", "reduce")]  # fmt: skip
    check_world(todo, run(issue_all, 3, todo, path=path))


@pytest.mark.parametrize("elements", [3, 1 << 20], ids=["small", "large"])
def test_permute_of_nobody_gives_zeros(elements: int, path: str) -> None:
    async def main(rank: overlap.Rank) -> Array:
        return await rank.permute(np.ones(elements), [])

    for got in run(main, 2, path=path):
        assert np.array_equal(got, np.zeros(elements))


def receives(case: Case, rank: int) -> bool:
    """Whether a rank may pass `out`."""
    return case.kind not in ("reduce", "gather") or case.kwargs["root"] == rank


def out_cases(size: int) -> list[Case]:
    """One operator is enough: all shapes and all roots."""
    return [case for kind in KINDS for case in cases(kind, size) if case.kwargs.get("op", "sum") in ("sum", "mean")]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 7))])
def test_out_is_filled_and_returned(size: int, path: str) -> None:
    todo = out_cases(size)

    async def main(rank: overlap.Rank) -> Results:
        issued, outs = [], []
        for case in todo:
            want = case.expected(size)[rank.rank]
            outs.append(np.full_like(want, 99) if receives(case, rank.rank) else None)
            issued.append(case.issue(rank.world, case.input(rank.rank), out=outs[-1]))
        results = [await future for future in issued]
        for case, result, out in zip(todo, results, outs, strict=True):
            assert result is out, case
        return results

    check_world(todo, run(main, size, path=path))


def in_place(case: Case, rank: int, size: int) -> tuple[Array, Array | None]:
    """Return `x` and an `out` that has `x` where the operation may find it."""
    mine = case.input(rank)
    if not receives(case, rank):
        return mine, None
    if case.kind not in ("all_gather", "gather"):
        return mine, mine
    out = np.full_like(case.expected(size)[rank], 99)
    x = out[rank * mine.shape[0] : (rank + 1) * mine.shape[0]]
    x[...] = mine
    return x, out


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 7))])
def test_in_place(size: int, path: str) -> None:
    kinds = ("all_reduce", "reduce", "broadcast", "all_gather", "gather")
    todo = [case for kind in kinds for case in cases(kind, size)]
    todo += [case for case in large_cases(size) if case.kind in kinds] if size == 3 and path in FEW_PATHS else []

    async def main(rank: overlap.Rank) -> Results:
        pairs = [in_place(case, rank.rank, size) for case in todo]
        issued = [case.issue(rank.world, x, out=out) for case, (x, out) in zip(todo, pairs, strict=True)]
        results = [await future for future in issued]
        for case, (x, out), result in zip(todo, pairs, results, strict=True):
            assert result is out, case
            assert x.flags.writeable, case
        return results

    check_world(todo, run(main, size, path=path))


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of what is written past the caches, in bytes; results of every size are, as are those that fill them."""
    written: list[int] = []
    copied = engine.copy_uncached

    def copy(target: Array, source: Array) -> None:
        copied(target, source)
        written.append(target.nbytes)

    monkeypatch.setattr(in_process, "_UNCACHED_BYTES", 0)
    monkeypatch.setattr(engine, "copy_uncached", copy)
    return written


@pytest.mark.skipif(not engine.BUILT, reason="it was not compiled")
@pytest.mark.parametrize("kind", KINDS)
def test_results_that_fill_the_caches_are_written_past_them(kind: str, uncached: list[int]) -> None:
    todo = [*cases(kind, 3), *(case for case in large_cases(3) if case.kind == kind)]
    check_world(todo, run(issue_all, 3, todo))
    assert max(uncached) == PIECE_BYTES


@pytest.mark.skipif(not engine.BUILT, reason="it was not compiled")
def test_what_was_read_is_in_the_caches_when_it_is_overwritten(uncached: list[int]) -> None:
    todo = [case for case in large_cases(3) if case.kind in ("all_reduce", "all_gather")]

    async def main(rank: overlap.Rank) -> Results:
        return [await case.issue(rank.world, x, out=out) for case in todo for x, out in [in_place(case, rank.rank, 3)]]

    check_world(todo, run(main, 3))
    assert not uncached


@pytest.mark.parametrize("size", [1, 3])
def test_inputs_may_be_futures(size: int, path: str) -> None:
    todo = out_cases(size)

    async def main(rank: overlap.Rank) -> Results:
        issued = [case.issue(rank.world, rank.compute(case.input, rank.rank)) for case in todo]
        return [await future for future in issued]

    check_world(todo, run(main, size, path=path))


@pytest.mark.parametrize("path", PATHS)
def test_inputs_may_be_scattered_in_memory(path: str) -> None:
    todo = [Case(kind=kind, shape=(6, 10), kwargs={"pairs": [(0, 1)]} if kind == "permute" else {}) for kind in KINDS]

    async def main(rank: overlap.Rank) -> Results:
        issued = []
        for case in todo:
            spread = np.zeros((10, 12)).T[::2]
            spread[...] = case.input(rank.rank)
            assert not spread.flags.c_contiguous
            issued.append(case.issue(rank.world, spread))
        return [await future for future in issued]

    check_world(todo, run(main, 3, path=path))


def test_inputs_may_be_what_numpy_understands(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[object]:
        values = (2, 2.5, [1, 2], np.float32(3), np.arange(3).view(np.matrix), True)
        return [await rank.all_reduce(x, "max") for x in values]

    for got in run(main, 2, path=path):
        assert [(type(x), x.dtype.name, x.tolist()) for x in got] == [
            (np.ndarray, "int64", 2),
            (np.ndarray, "float64", 2.5),
            (np.ndarray, "int64", [1, 2]),
            (np.ndarray, "float32", 3.0),
            (np.ndarray, "int64", [[0, 1, 2]]),
            (np.ndarray, "bool", True),
        ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1, 3, 8, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 7))])
def test_non_roots_need_no_array(size: int, path: str) -> None:
    blocks = np.arange(size * 6).reshape(size * 2, 3)

    async def main(rank: overlap.Rank) -> list[Array]:
        issued = []
        for root in range(size):
            mine = rank.rank == root
            issued.append(rank.broadcast(blocks + root if mine else None, root))
            issued.append(rank.scatter(blocks + root if mine else None, root))
        return [await future for future in issued]

    for index, got in enumerate(run(main, size, path=path)):
        for root in range(size):
            assert np.array_equal(got[2 * root], blocks + root)
            assert np.array_equal(got[2 * root + 1], (blocks + root)[2 * index : 2 * index + 2])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1, 3, 8, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 7))])
def test_results_share_no_memory_with_anything(size: int, path: str) -> None:
    todo = [Case(kind=kind, shape=(size,), kwargs={"pairs": [(0, 0)]} if kind == "permute" else {}) for kind in KINDS]

    async def main(rank: overlap.Rank) -> list[Array]:
        inputs = [case.input(rank.rank) for case in todo]
        results = [await case.issue(rank.world, x) for case, x in zip(todo, inputs, strict=True)]
        return inputs + [result for result in results if result is not None]

    arrays = [array for arrays in run(main, size, path=path) for array in arrays]
    addresses = [array.__array_interface__["data"][0] for array in arrays]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", SIZES)
def test_barrier_waits_for_everybody(size: int, path: str) -> None:
    arrived: list[int] = []

    async def main(rank: overlap.Rank) -> int:
        await rank.compute(arrived.append, rank.rank)
        assert await rank.barrier() is None
        return len(arrived)

    assert run(main, size, path=path) == [size] * size


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_rank_alone_in_place_needs_no_threads(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to move, however large the array is."""
    monkeypatch.delattr(Workers, "submit")

    async def main(rank: overlap.Rank) -> None:
        x = np.arange(1 << 21, dtype=np.float32)
        assert await rank.all_reduce(x, out=x, op=op) is x
        np.testing.assert_array_equal(x, np.arange(1 << 21, dtype=np.float32))

    overlap.run(main, ranks=1)


# -- every collective against its numpy reference on modelled machines, in virtual time --------------------------------

MACHINES = ("local", "trn1.32xlarge", "dl1.24xlarge")
LEGAL_SIZES = (1, 2, 8)  # legal on all of them


@pytest.mark.parametrize("cluster", MACHINES)
@pytest.mark.parametrize("size", LEGAL_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_variants_and_shapes_on_modelled_machines(kind: str, size: int, cluster: str) -> None:
    todo = list(cases(kind, size))
    check_world(todo, overlap.run(issue_all, todo, ranks=size, cluster=cluster, clock="virtual"))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("size", LEGAL_SIZES)
def test_out_is_filled_from_futures_in_virtual_time(size: int) -> None:
    todo = out_cases(size)

    async def main(rank: overlap.Rank) -> Results:
        issued, outs = [], []
        for case in todo:
            want = case.expected(size)[rank.rank]
            outs.append(np.full_like(want, 99) if receives(case, rank.rank) else None)
            x = rank.compute(case.input, rank.rank, seconds=1e-6)
            issued.append(case.issue(rank.world, x, out=outs[-1]))
        results = [await future for future in issued]
        assert all(result is out for result, out in zip(results, outs, strict=True))
        return results

    check_world(todo, overlap.run(main, ranks=size, clock="virtual"))


@pytest.mark.slow
def test_large_arrays_in_virtual_time() -> None:
    todo = []
    for kind in KINDS:
        shape = (700_001 * 3,) if kind in SCATTERING else (700_001,)
        kwargs = {"pairs": [(0, 2), (2, 0)]} if kind == "permute" else {}
        todo.append(Case(kind=kind, shape=shape, dtype=np.dtype(np.float32), kwargs=kwargs))
    check_world(todo, overlap.run(issue_all, todo, ranks=3, clock="virtual"))
