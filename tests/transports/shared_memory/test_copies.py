"""What the compiled code does with arrays: the copy that bypasses the caches, and their addresses."""

import ml_dtypes
import numpy as np
import pytest

from transports.shared_memory import engine


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 4097])
def test_it_writes_these_bytes_wherever_they_lie(length: int) -> None:
    source = np.random.default_rng(length).integers(1, 256, length + 16, np.uint8)
    for start in range(16):
        target = np.zeros(length + 64, np.uint8)
        engine.copy_uncached(target[start : start + length], source[16 - start :][:length])
        assert np.array_equal(target[start : start + length], source[16 - start :][:length])
        assert not target[:start].any()
        assert not target[start + length :].any()


def test_it_takes_what_it_can_fill_in_one_piece() -> None:
    with pytest.raises(ValueError, match="7 bytes do not fill 8"):
        engine.copy_uncached(np.empty(8, np.uint8), np.empty(7, np.uint8))
    with pytest.raises(TypeError, match="read-write"):
        engine.copy_uncached(np.frombuffer(b"12345678", np.uint8), np.empty(8, np.uint8))
    with pytest.raises(TypeError, match="argument 1"):
        engine.copy_uncached(np.empty(16, np.uint8)[::2], np.empty(8, np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "complex128", "bool", ml_dtypes.bfloat16], ids=str)
def test_an_array_has_its_address_wherever_it_begins(dtype: object) -> None:
    array = np.zeros((3, 4), dtype)  # type: ignore[call-overload]
    array.flags.writeable = False
    for part in (array, array[1], array[1:, ::2], array[3:], array.reshape(-1)[5:6]):
        assert engine.address_of(part) == part.__array_interface__["data"][0]


def test_what_is_no_array_has_no_address() -> None:
    with pytest.raises(AttributeError, match="__array_struct__"):
        engine.address_of(bytearray(8))  # type: ignore[arg-type]
