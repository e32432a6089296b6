"""When ranks reduce slices of inputs that are copied."""

import numpy as np
import pytest

pytest.importorskip("transports.shared_memory._native", reason="it was not compiled")

from .test_collectives_of_engines import Host, carry_out, made

_RESULT = 3  # the word of a row that says where a slice lies


@pytest.mark.parametrize(
    ("size", "kib", "slices"), [(3, 1024, False), (4, 1024, False), (8, 160, False), (8, 192, True)]
)
def test_ranks_slice_what_saves_them_much_to_read(size: int, kib: int, slices: bool) -> None:
    """Slices cost a second meeting of all ranks."""
    host = Host(size)
    carry_out(host, made("all_reduce", "sum", np.float32, kib * 256, size), 0, seed=1)
    assert [bool(host.word(rank, 0, _RESULT)[0]) for rank in range(size)] == [slices] * size
    host.close()
