"""How blocks are cut in slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.collectives import slot_bounds


@pytest.mark.parametrize(
    ("slot", "bounds"),
    [(0, (0, 2)), (1, (2, 4)), (2, (4, 5)), (3, (5, 5)), (4, (5, 7)), (6, (9, 10)), (7, (10, 10))],
)
def test_last_slots_are_clipped(slot: int, bounds: tuple[int, int]) -> None:
    assert slot_bounds(slot, 4, 5) == bounds


@given(k=st.integers(1, 9), block=st.integers(0, 40), blocks=st.integers(1, 3))
def test_slots_tile_their_buffer(k: int, block: int, blocks: int) -> None:
    bounds = [slot_bounds(slot, k, block) for slot in range(k * blocks)]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == block * blocks
