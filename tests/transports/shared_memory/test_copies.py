"""The copy that bypasses the caches."""

import numpy as np
import pytest

from transports.shared_memory.engine import copy_uncached


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 4097])
def test_it_writes_these_bytes_wherever_they_lie(length: int) -> None:
    source = np.random.default_rng(length).integers(1, 256, length + 16, np.uint8)
    for start in range(16):
        target = np.zeros(length + 64, np.uint8)
        copy_uncached(target[start : start + length], source[16 - start :][:length])
        assert np.array_equal(target[start : start + length], source[16 - start :][:length])
        assert not target[:start].any()
        assert not target[start + length :].any()


def test_it_takes_what_it_can_fill_in_one_piece() -> None:
    with pytest.raises(ValueError, match="7 bytes do not fill 8"):
        copy_uncached(np.empty(8, np.uint8), np.empty(7, np.uint8))
    with pytest.raises(TypeError, match="read-write"):
        copy_uncached(np.frombuffer(b"12345678", np.uint8), np.empty(8, np.uint8))
    with pytest.raises(TypeError, match="argument 1"):
        copy_uncached(np.empty(16, np.uint8)[::2], np.empty(8, np.uint8))
