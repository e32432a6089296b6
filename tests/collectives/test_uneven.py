"""Tables for blocks of different sizes: of every algorithm, proved, and worth what each block weighs."""

import numpy as np
import pytest

from overlap.collectives import generate, verify
from overlap.collectives.generators import GENERATORS, fits
from overlap.collectives.schedule import Buffer
from overlap.collectives.uneven import block_starts, make_uneven, slots_moved
from overlap.errors import ScheduleError

SIZES = (1, 2, 3, 4, 6, 7, 8, 12)
KINDS = ("all_gather", "reduce_scatter", "all_to_all")
ALL = [(kind, algorithm) for kind in KINDS for algorithm in GENERATORS[kind]]


def tables(kind, algorithm):
    return [generate(kind, algorithm, size) for size in SIZES if fits(algorithm, size)]


@pytest.mark.parametrize(("kind", "algorithm"), ALL)
def test_every_algorithm_carries_uneven_blocks_and_is_proved_again(kind, algorithm):
    for table in tables(kind, algorithm):
        found = make_uneven(table)
        verify(found)
        assert (found.algorithm, found.channels, found.steps) == (table.algorithm, table.channels, table.steps)
        assert all(len(held) <= found.blocks[Buffer.SCRATCH] for held in found.held)


@pytest.mark.parametrize(("kind", "algorithm"), ALL)
def test_both_ends_of_every_row_agree_on_its_length(kind, algorithm):
    for table in tables(kind, algorithm):
        found, size = make_uneven(table), table.size
        counts = tuple(np.random.default_rng(size).integers(0, 9, size * size if kind == "all_to_all" else size))
        starts = [block_starts(found, rank, counts, 5) for rank in range(size)]
        k = found.slots_per_block

        def length(rank, buffer, slot, count, starts=starts, k=k):
            def at(slot):
                first, end = starts[rank][buffer][slot // k :][:2]
                return first + min(slot % k * -(-(end - first) // k), end - first)

            return at(slot + count) - at(slot)

        columns = (found.src, found.sbuf, found.sslot, found.dst, found.dbuf, found.dslot, found.count)
        for src, sbuf, sslot, dst, dbuf, dslot, count in zip(*(each.tolist() for each in columns), strict=True):
            assert length(src, sbuf, sslot, count) == length(dst, dbuf, dslot, count)


@pytest.mark.parametrize(("kind", "algorithm"), ALL)
def test_equal_blocks_weigh_what_their_slots_count(kind, algorithm):
    for table in tables(kind, algorithm):
        found, size = make_uneven(table), table.size
        counts = (3,) * (size * size if kind == "all_to_all" else size)
        np.testing.assert_allclose(slots_moved(found, counts), found.count, rtol=1e-12)


def test_what_travels_weighs_as_much_as_the_blocks():
    moved = slots_moved(make_uneven(generate("all_to_all", "mesh", 2)), (1, 2, 0, 1))
    assert sorted(moved.tolist()) == [0.0, 2 / 3, 2 / 3, 4 / 3]  # of 3 rows, which rank 0 gives and rank 1 gets


def test_a_table_that_adds_up_different_blocks_is_refused():
    table = generate("reduce_scatter", "mesh", 3)
    wrong = np.flatnonzero((table.src != table.dst) & (table.op == 1))[0]
    table.sslot[wrong] = (table.sslot[wrong] + 1) % 3
    with pytest.raises(ScheduleError, match="blocks cannot differ in size"):
        make_uneven(table)
