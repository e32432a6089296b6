"""The pool: memory comes back once nobody can reach it, never before, and it says what it keeps."""

import ctypes
import gc
import threading
import tracemalloc
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import overlap
from overlap.runtime.memory import buffer_pool
from overlap.runtime.memory.buffer_pool import IDLE_NS, SMALLEST_BYTES, BufferPool
from tests.threads import run_threads

from .worlds import run

# -- memory comes back once nobody can reach it, never before, and not more of it is kept than was asked for -----------

BYTE = np.dtype(np.uint8)
LARGE = (1 << 20,)

HOLDERS: dict[str, Callable[[np.ndarray], object]] = {
    "itself": lambda array: array,
    "a slice": lambda array: array[5:9],
    "a slice of a slice": lambda array: array[5:90][3:][:4],
    "one element": lambda array: array[:1],
    "a transpose": lambda array: array.reshape(2, -1).T,
    "another dtype": lambda array: array.view(np.float32)[::2],
    "another shape": lambda array: array.reshape(4, -1)[1],
    "a broadcast": lambda array: np.broadcast_to(array, (3, *array.shape))[1],
    "a subclass": lambda array: array.view(np.recarray)[2:4],
    "a memoryview": lambda array: memoryview(array)[4:],
    "a memoryview of a slice": lambda array: memoryview(array[4:8]),
    "frombuffer": lambda array: np.frombuffer(array, np.uint16)[1:],
    "frombuffer of a memoryview": lambda array: np.frombuffer(memoryview(array)[4:], np.uint8),
    "a DLPack export": lambda array: array.__dlpack__(),
    "an import from DLPack": lambda array: np.from_dlpack(array)[3:],
    "a ctypes array": lambda array: (ctypes.c_char * 4).from_buffer(array),
    "a ctypes pointer": lambda array: array.ctypes.data_as(ctypes.c_void_p),
    "an iterator": lambda array: np.nditer(array),
    "a flat iterator": lambda array: array.flat,
    "a closure": lambda array: lambda: array,
}


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_dropped_array_is_used_again() -> None:
    pool = BufferPool()
    first = pool.empty(LARGE, BYTE)
    where = address(first)
    del first
    second = pool.empty((1 << 18,), np.dtype(np.float32))
    assert address(second) == where
    figures = pool.statistics()
    assert (figures.hits, figures.misses, figures.used_bytes, figures.held_bytes) == (1, 1, 1 << 20, 0)


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_anything_can_reach_is_left_alone(holder: str) -> None:
    pool = BufferPool()
    array = pool.empty(LARGE, BYTE)
    where = address(array)
    held = HOLDERS[holder](array)
    del array
    others = [pool.empty(LARGE, BYTE) for _ in range(3)]
    assert where not in map(address, others)
    del held
    gc.collect(1)  # of what is young
    again = [pool.empty(LARGE, BYTE) for _ in range(2)]
    assert where in map(address, again)


def test_a_tensor_of_another_library_holds_it() -> None:
    torch = pytest.importorskip("torch", reason="only what torch does with numpy's memory is tested here")
    pool = BufferPool()
    array = pool.empty(LARGE, BYTE)
    where = address(array)
    tensors = [torch.from_numpy(array)[7:]]
    del array
    tensors.append(torch.from_dlpack(pool.empty(LARGE, BYTE)))
    assert where not in [address(pool.empty(LARGE, BYTE)), tensors[1].data_ptr()]


def test_content_stays_while_a_slice_lives_and_much_goes_by() -> None:
    pool = BufferPool()
    slices = []
    for value in range(20):
        array = pool.empty(LARGE, BYTE)
        array[:] = value
        slices.append(array[value : value + 2])
    assert [part.tolist() for part in slices] == [[value] * 2 for value in range(20)]


def test_long_lived_neighbours_do_not_keep_the_rest_from_being_used_again() -> None:
    pool = BufferPool()
    kept = [pool.empty(LARGE, BYTE) for _ in range(50)]
    for _ in range(50):
        array = pool.empty(LARGE, BYTE)
        del array
    assert pool.statistics().misses == len(kept) + 1


@pytest.mark.parametrize("dtype", [np.dtype(kind) for kind in ("?", "i1", "f2", "f4", "f8", "c16", "i8")])
@pytest.mark.parametrize("shape", [(1 << 20,), (3, 1 << 18), (1, 7, 99999), (262145, 1)])
def test_shapes_and_dtypes(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
    pool = BufferPool()
    for _ in range(2):
        array = pool.empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        array[...] = 1
        assert (array == 1).all()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_dtypes(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    pool = BufferPool()
    for _ in range(2):
        array = pool.empty(LARGE, dtype)
        assert array.dtype == dtype
        array[...] = 2
        assert float(array[-1]) == 2.0
        del array
    assert pool.statistics().hits == 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (SMALLEST_BYTES - 1,)])
def test_small_arrays_are_numpys_own(shape: tuple[int, ...]) -> None:
    pool = BufferPool()
    assert pool.empty(shape, BYTE).base is None
    assert pool.statistics().misses == 0


def test_arrays_of_objects_are_numpys_own() -> None:
    assert BufferPool().empty(LARGE, np.dtype(object)).base is None


def test_a_copy() -> None:
    pool = BufferPool()
    array = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    copied = pool.copy(array.T)
    assert copied.flags.c_contiguous
    assert (copied == array.T).all()


@pytest.mark.parametrize("nbytes", [SMALLEST_BYTES, SMALLEST_BYTES + 1, 163_840, 163_841, (1 << 27) - 1, 1 << 27])
def test_at_most_a_quarter_is_wasted(nbytes: int) -> None:
    pool = BufferPool()
    array = pool.empty((nbytes,), BYTE)
    assert nbytes <= pool.statistics().used_bytes <= nbytes * 1.25
    assert array.nbytes == nbytes


def test_idle_memory_is_bounded_and_the_oldest_goes_first() -> None:
    time_ns = 0
    pool = BufferPool(3 << 20, now_ns=lambda: time_ns)
    sizes = [(1 << 20) - index for index in range(3)] + [1 << 21]
    arrays = [pool.empty((size,), BYTE) for size in sizes]
    places = list(map(address, arrays))
    while arrays:
        time_ns += 1
        del arrays[0]
        pool.statistics()
    figures = pool.statistics()
    assert (figures.held_bytes, figures.used_bytes, figures.dropped) == (3 << 20, 0, 2)
    survivors = [pool.empty((1 << 20,), BYTE), pool.empty((1 << 21,), BYTE)]
    assert list(map(address, survivors)) == places[2:]


def test_the_limit_holds_even_if_nobody_takes_again() -> None:
    pool = BufferPool(8 << 20)
    tracemalloc.start()
    try:
        arrays = [pool.empty((1 << 20,), BYTE) for _ in range(64)]
        arrays.clear()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 8 << 20 <= kept_bytes <= (8 + 17) << 20  # sixteen may wait to be looked at
    assert pool.statistics().held_bytes == 8 << 20


def test_what_exceeds_the_limit_is_not_kept() -> None:
    pool = BufferPool(1 << 20)
    array = pool.empty(((1 << 20) + 1,), BYTE)
    assert array.base is None
    del array
    assert pool.statistics().held_bytes == 0


def test_idle_memory_is_let_go_after_a_while() -> None:
    time_ns = 0
    pool = BufferPool(now_ns=lambda: time_ns)
    huge = pool.empty((1 << 26,), BYTE)
    del huge
    for _ in range(10):
        time_ns += IDLE_NS // 4
        array = pool.empty(LARGE, BYTE)
        del array
    figures = pool.statistics()
    assert (figures.held_bytes, figures.dropped, figures.hits) == (1 << 20, 1, 9)


def test_without_memory_what_is_idle_is_let_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BufferPool()
    array = pool.empty((1 << 22,), BYTE)
    del array
    assert pool.statistics().held_bytes == 1 << 22
    empty, failures = np.empty, [MemoryError()]

    def scarce(size: int, dtype: object) -> np.ndarray:
        if failures:
            raise failures.pop()
        return empty(size, dtype)

    monkeypatch.setattr(buffer_pool.np, "empty", scarce)
    array = pool.empty((1 << 23,), BYTE)
    assert array.shape == (1 << 23,)
    assert pool.statistics().held_bytes == 0


def test_arrays_outlive_the_pool() -> None:
    pool = BufferPool()
    array = pool.empty(LARGE, BYTE)
    array[:] = 7
    idle = pool.empty(LARGE, BYTE)
    del idle
    pool.close()
    assert pool.statistics().held_bytes == 0
    part = array[3:5]
    del array
    assert pool.empty(LARGE, BYTE).base is None
    assert part.tolist() == [7, 7]


def test_where_references_are_not_counted_every_array_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "_COUNTS_REFERENCES", False)
    pool = BufferPool()
    assert pool.empty(LARGE, BYTE).base is None
    assert pool.statistics().limit_bytes == 0


def test_many_threads_make_and_drop() -> None:
    """No two arrays that are alive at once share memory, whoever drops them."""
    pool, errors = BufferPool(), []
    handed: list[np.ndarray] = []

    def work(number: int) -> None:
        for turn in range(200):
            array = pool.empty((SMALLEST_BYTES + turn % 3 * SMALLEST_BYTES,), BYTE)
            array[:] = number
            handed.append(array[1:])  # dropped by whoever comes next
            if len(handed) > 4:
                handed.pop(0)
            if not (array == number).all():
                errors.append(number)

    run_threads(threading.Thread(target=work, args=(number,)) for number in range(4))
    handed.clear()
    figures = pool.statistics()
    assert errors == []
    assert (figures.used_bytes, figures.hits + figures.misses) == (0, 800)


def test_the_garbage_collector_may_drop_arrays_while_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BufferPool()
    cycle: list[object] = [pool.empty((8 << 20,), BYTE)]
    cycle.append(cycle)
    del cycle
    empty = np.empty

    def collecting(size: int, dtype: object) -> np.ndarray:
        gc.collect()
        return empty(size, dtype)

    monkeypatch.setattr(buffer_pool.np, "empty", collecting)
    array = pool.empty(LARGE, BYTE)
    assert array.shape == LARGE
    assert pool.statistics().held_bytes == 8 << 20


# -- results, scratch and staging come from one pool of the world, which says what it keeps ----------------------------

ELEMENTS = 1 << 18  # 1 MiB of float32


def test_dropped_results_are_used_again(path: str) -> None:
    """Twenty operations of two ranks, each with a staged input and a result; a few of these are alive at a time."""

    async def main(rank: overlap.Rank) -> tuple[int, int]:
        x = np.full((ELEMENTS, 2), 1.0, np.float32)[:, 0]  # not contiguous: it is staged
        for _ in range(20):
            result = await rank.all_reduce(x)
            assert result[-1] == 2
        await rank.barrier()
        figures = rank.statistics().buffer_pool
        return figures.hits + figures.misses, figures.misses

    for made, new in run(main, 2, path=path):
        assert made >= 80
        assert 4 <= new <= 16


def test_results_that_are_kept_are_not_written_to_again() -> None:
    async def main(rank: overlap.Rank) -> list[float]:
        kept = []
        for value in range(10):
            result = await rank.all_reduce(np.full(ELEMENTS, value, np.float32))
            kept.append(result[7:9].reshape(2, 1))
            del result
        return [float(part.sum()) for part in kept]

    assert run(main, 2) == [[4.0 * value for value in range(10)]] * 2


def test_results_outlive_their_world() -> None:
    async def main(rank: overlap.Rank) -> np.ndarray:
        return await rank.all_reduce(np.full(ELEMENTS, 1, np.float32))

    results = [result for _ in range(3) for result in run(main, 2)]
    assert {float(result.sum()) for result in results} == {2.0 * ELEMENTS}


def test_the_statistics_are_those_of_the_world() -> None:
    async def main(rank: overlap.Rank) -> list[int]:
        result = await rank.broadcast(np.zeros(ELEMENTS, np.float32))
        figures = rank.statistics().buffer_pool
        seen = [figures.used_bytes, figures.held_bytes]
        del result
        figures = rank.statistics().buffer_pool
        return [*seen, figures.used_bytes, figures.held_bytes]

    assert run(main, 1) == [[1 << 20, 0, 0, 1 << 20]]


@pytest.mark.parametrize("like", [(5, "f4"), ([5], "f4"), ((np.int64(5),), np.float32)])
def test_shapes_of_what_is_received(like: tuple[object, object]) -> None:
    async def main(rank: overlap.Rank) -> tuple[int, ...]:
        rank.send(np.zeros(5, np.float32), 0)
        return (await rank.recv(like, 0)).shape

    assert run(main, 1) == [(5,)]
