"""What exports its memory is read and written there: the result of `out=` is the caller's own object."""

import array
import ctypes
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import overlap
from overlap import UsageError
from overlap.runtime.memory.foreign import as_input_array, as_output_array
from tests.errors import error_of

from .worlds import run


class Exported:
    """Speaks DLPack and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **how: object) -> object:
        return self.values.__dlpack__(**how)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> object:
        return self.values.__dlpack_device__()


class Interfaced:
    """Says where its memory is, in numpy's way."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    @property
    def __array_interface__(self) -> dict[str, object]:
        return self.values.__array_interface__


def ctypes_array(values: list[float]) -> object:
    return (ctypes.c_double * len(values))(*values)


WRITABLE = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.2.5", reason="numpy before 2.2.5 makes arrays from DLPack read-only"
)
MAKERS: dict[str, Callable[[list[float]], object]] = {
    "array.array": lambda values: array.array("d", values),
    "memoryview": lambda values: memoryview(array.array("d", values)),
    "ctypes": ctypes_array,
    "DLPack": lambda values: Exported(np.array(values)),
    "array interface": lambda values: Interfaced(np.array(values)),
    "another class of array": lambda values: np.array(values).view(np.recarray),
}


@pytest.mark.parametrize("maker", [pytest.param(name, marks=WRITABLE) if name == "DLPack" else name for name in MAKERS])
def test_input_and_output_without_a_copy(maker: str, path: str) -> None:
    make = MAKERS[maker]

    async def main(rank: overlap.Rank) -> list[object]:
        x, out = make([1.0, 2.0]), make([0.0, 0.0])
        result = await rank.all_reduce(x, out=out)
        in_place = await rank.all_reduce(x, out=x)
        received = make([0.0, 0.0])
        rank.send(x, rank.rank)
        return [
            result is out,
            as_input_array(out).tolist(),
            in_place is x,
            as_input_array(x).tolist(),
            await rank.recv(received, rank.rank) is received,
            as_input_array(received).tolist(),
        ]

    assert run(main, 2, path=path) == [[True, [2.0, 4.0], True, [2.0, 4.0], True, [2.0, 4.0]]] * 2


def test_bytes_that_may_be_written() -> None:
    async def main(rank: overlap.Rank) -> bytes:
        x = bytearray(b"\x01\x02")
        await rank.all_reduce(x, out=x)
        x.append(7)  # nothing holds it any more
        return bytes(x)

    assert run(main, 2) == [b"\x02\x04\x07"] * 2


def test_what_is_in_flight_cannot_be_resized() -> None:
    async def main(rank: overlap.Rank) -> int:
        x = bytearray(b"\x01\x02")
        future = rank.send(x, 0)
        with pytest.raises(BufferError):
            x.append(7)
        rank.recv(((2,), np.uint8), 0)
        await future
        del future
        x.append(7)
        return len(x)

    assert run(main, 1) == [3]


REFUSED: list[tuple[object, str]] = [
    ([0.0], "^out: expected an array, got list; a result needs memory that can be written: pass a numpy array or"),
    (None, "^out: expected an array, got NoneType; a result needs"),
    (3.0, "^out: expected an array, got float; a result needs"),
    (b"abc", "^out: is read-only"),
    (memoryview(b"abc"), "^out: is read-only"),
    (memoryview(array.array("d", [1.0] * 4))[::2], "^out: must be C-contiguous, got strides"),
    (Exported(np.ones((2, 2)).T), "^out: must be C-contiguous, got strides"),
    (Exported(np.ones(2, ml_dtypes.bfloat16)), "^out: expected an array, got Exported; .*dtype"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_what_cannot_be_written_is_refused(value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        as_output_array(value, "out")


def test_masked_arrays_are_refused() -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        masked, texts = np.ma.masked_array(np.ones(2), [True, False]), []
        for call in (lambda: rank.all_reduce(masked), lambda: rank.all_reduce(np.ones(2), out=masked)):
            texts.append(str(error_of(overlap.UsageError, call)))
        return texts

    told = "is a masked array; pass x.filled(value), or its .data and .mask one after the other"
    assert run(main, 1) == [[f"x: {told}", f"out: {told}"]]
