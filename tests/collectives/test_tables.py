"""Tables of schedules: which ranks they fit, how blocks are cut, and that they compute what numpy says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import topology
from overlap.collectives import StepKind, generate, project_all, slot_bounds, verify
from overlap.collectives.generators import GENERATORS, fits, misfit
from overlap.collectives.schedule import Buffer
from overlap.collectives.slicing import (
    LONGEST_BYTES,
    MOST_SLICES,
    SLICE_BYTES,
    longest_message_bytes,
    slice_count,
    slice_long_messages,
    slice_rows,
)
from overlap.collectives.uneven import block_starts, make_uneven, row_lengths
from overlap.cost.select import plan
from overlap.errors import ScheduleError

from .cases import NAMES, fitting, schedules
from .executor import execute
from .playback import replay
from .reference import expected, random_inputs, same

# -- which algorithms take which numbers of ranks: all take all, but for those that pair ranks -------------------------

SIZES = range(1, 34)
EVEN = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32]
TAKEN = {"kangaring": EVEN, "swing": [1, *EVEN]}


def test_what_fits_where() -> None:
    algorithms = {algorithm for algorithms in GENERATORS.values() for algorithm in algorithms}
    assert {name: [size for size in SIZES if fits(name, size)] for name in TAKEN} == TAKEN
    assert [(name, size) for name in algorithms - set(TAKEN) for size in SIZES if not fits(name, size)] == []


@pytest.mark.parametrize("algorithm", TAKEN)
def test_what_does_not_fit_is_refused(algorithm: str) -> None:
    for collective in [collective for collective, names in GENERATORS.items() if algorithm in names]:
        for size in set(SIZES) - set(TAKEN[algorithm]):
            with pytest.raises(ScheduleError, match=f"{algorithm} needs"):
                generate(collective, algorithm, size)


@pytest.mark.parametrize("algorithm", TAKEN)
def test_the_planner_gives_that_reason(algorithm: str) -> None:
    found = plan("all_reduce", 1 << 20, topology.cluster("local", ranks=3))
    reasons = {each.algorithm: each.why_not for each in found.alternatives}
    assert reasons[algorithm] == f"it {misfit(algorithm, 3)}" == "it needs an even number of ranks, and the group has 3"


# -- how blocks are cut in slots ---------------------------------------------------------------------------------------


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


# -- tables for blocks of different sizes: of every algorithm, proved, and worth what each block weighs ----------------

UNEVEN_SIZES = (1, 2, 3, 4, 6, 7, 8, 12)
KINDS = ("all_gather", "reduce_scatter", "all_to_all")
ALL = [(kind, algorithm) for kind in KINDS for algorithm in GENERATORS[kind]]


def tables(kind, algorithm):
    return [generate(kind, algorithm, size) for size in UNEVEN_SIZES if fits(algorithm, size)]


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
        np.testing.assert_allclose(row_lengths(found, counts), found.count, rtol=1e-12)


def test_what_travels_weighs_as_much_as_the_blocks():
    moved = row_lengths(make_uneven(generate("all_to_all", "mesh", 2)), (1, 2, 0, 1))
    assert sorted(moved.tolist()) == [0.0, 2 / 3, 2 / 3, 4 / 3]  # of 3 rows, which rank 0 gives and rank 1 gets


def test_a_table_that_adds_up_different_blocks_is_refused():
    table = generate("reduce_scatter", "mesh", 3)
    wrong = np.flatnonzero((table.src != table.dst) & (table.op == 1))[0]
    table.sslot[wrong] = (table.sslot[wrong] + 1) % 3
    with pytest.raises(ScheduleError, match="blocks cannot differ in size"):
        make_uneven(table)


# -- schedules compute what numpy says, on real arrays -----------------------------------------------------------------

REPLAYED_SIZES = range(1, 10)


@pytest.mark.parametrize(("collective", "algorithm", "size"), fitting(REPLAYED_SIZES))
def test_computes_what_numpy_says(collective: str, algorithm: str, size: int) -> None:
    for schedule in schedules(collective, algorithm, size):
        for block_elements in (0, 1, 13):
            inputs = random_inputs(schedule, block_elements)
            assert same(replay(schedule, inputs), expected(schedule, inputs)), (schedule, block_elements)


@pytest.mark.parametrize(("collective", "algorithm"), [n for n in NAMES if n[0] == "all_reduce"])
def test_all_ranks_get_the_same_bits(collective: str, algorithm: str) -> None:
    rng = np.random.default_rng(1)
    for size in (size for size in (2, 3, 4, 7, 8) if fits(algorithm, size)):
        for schedule in schedules(collective, algorithm, size):
            inputs = [rng.standard_normal(31).astype(np.float32) for _ in range(size)]
            results = replay(schedule, inputs, "sum")
            assert all(np.array_equal(results[0], other) for other in results)


@pytest.mark.parametrize("algorithm", [name for kind, name in NAMES if kind == "all_reduce"])
def test_signed_zeros_agree(algorithm: str) -> None:
    for schedule in schedules("all_reduce", algorithm, 8):
        inputs = [np.array([0.0, -0.0] if rank % 3 else [-0.0, 0.0], np.float32) for rank in range(8)]
        bits = {result.tobytes() for result in replay(schedule, inputs, "max") if result is not None}
        assert len(bits) == 1


def test_mean_divides_once() -> None:
    for collective, algorithm in NAMES:
        if collective in ("all_reduce", "reduce", "reduce_scatter"):
            for schedule in schedules(collective, algorithm, 4):
                inputs = [np.full(8 * schedule.blocks[0], 2.0**rank) for rank in range(4)]
                for result in replay(schedule, inputs, "mean"):
                    assert result is None or (result == 3.75).all()


@pytest.mark.parametrize(
    ("collective", "algorithm", "size", "message"),
    [
        ("all_reduce", "pigeon", 4, "all_reduce has no algorithm 'pigeon'; known are ring, multi_ring, mesh"),
        ("shout", "ring", 4, "unknown collective 'shout'; known are all_reduce"),
        ("all_reduce", "ring", 0, "0 ranks"),
    ],
)
def test_bad_names_and_sizes(collective: str, algorithm: str, size: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        generate(collective, algorithm, size)


def test_bad_roots_pairs_and_orders() -> None:
    with pytest.raises(ScheduleError, match="root: expected one of the group's 4 ranks, from 0, got 4"):
        generate("broadcast", "mesh", 4, root=4)
    with pytest.raises(ScheduleError, match="may be a destination once"):
        generate("permute", "mesh", 4, pairs=((0, 1), (2, 1)))
    with pytest.raises(ScheduleError, match="visit each of the 4 ranks once"):
        generate("all_reduce", "ring", 4, order=[0, 1, 2, 2])


def test_a_ring_follows_the_given_order() -> None:
    schedule = generate("all_gather", "ring", 4, order=[0, 2, 3, 1])
    remote = schedule.src != schedule.dst
    hops = set(zip(schedule.src[remote].tolist(), schedule.dst[remote].tolist(), strict=True))
    assert hops == {(0, 2), (2, 3), (3, 1), (1, 0)}


# -- slices of long messages: the same results, and what follows from a slice does not wait for the next one -----------


def check(schedule):
    inputs = random_inputs(schedule, 7)
    for shared in (False, True):
        got = execute(schedule, project_all(schedule), inputs, seed=1, shared=shared)
        for g, w in zip(got, expected(schedule, inputs), strict=True):
            assert (g is None and w is None) or w is None or np.array_equal(g, w)


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize(
    ("collective", "algorithm", "size"),
    [
        ("all_reduce", "ring", 2),
        ("all_reduce", "ring", 4),
        ("all_reduce", "mesh", 3),
        ("all_reduce", "recursive_doubling", 4),
        ("reduce_scatter", "ring", 3),
        ("all_gather", "bruck", 4),
        ("all_to_all", "pairwise", 3),
        ("broadcast", "binomial", 4),
        ("reduce", "binomial", 3),
    ],
)
def test_slices_give_the_same_results(collective, algorithm, size, slices):
    schedule = slice_rows(generate(collective, algorithm, size), slices)
    verify(schedule)
    check(schedule)


@pytest.mark.parametrize(
    ("collective", "algorithm", "size"),
    [
        ("all_reduce", "chain", 2),
        ("all_reduce", "double_binary_tree", 4),
        ("reduce_scatter", "multi_ring", 3),
        ("reduce", "double_binary_tree", 4),
        ("all_to_all", "hierarchical", 4),
        ("all_to_all", "bruck", 4),
        ("scatter", "hierarchical", 8),
    ],
)
def test_rows_of_different_lengths_are_cut_at_the_same_places(collective, algorithm, size):
    whole = generate(collective, algorithm, size)
    nbytes = 4 * SLICE_BYTES * max(whole.blocks[:2]) * whole.slots_per_block
    schedule = slice_long_messages(whole, nbytes)
    assert longest_message_bytes(schedule, nbytes) == SLICE_BYTES
    check(schedule)


def test_a_slice_is_passed_on_as_soon_as_it_has_come():
    whole = generate("all_reduce", "ring", 2)
    program = project_all(slice_rows(whole, 3))[0]
    sends, receives = program.queues
    first_gathered = next(at for at, step in enumerate(sends) if step.src.buffer != sends[0].src.buffer)
    assert first_gathered == 3
    [(queue, count)] = sends[first_gathered].waits
    assert queue == 1
    assert [step.kind for step in receives[:count]].count(StepKind.RECV) == 1
    assert [step.kind for step in receives].count(StepKind.RECV) == 6


def test_long_messages_from_which_something_follows_are_sliced():
    ring = generate("all_reduce", "ring", 4)
    assert longest_message_bytes(ring, 4 * SLICE_BYTES) == SLICE_BYTES
    assert [slice_count(ring, n * 4 * SLICE_BYTES) for n in (0, 1, 2, 3, 9)] == [1, 1, 2, 3, MOST_SLICES]
    assert slice_count(ring, 4 * 25 * LONGEST_BYTES) == 25
    assert slice_count(generate("all_gather", "ring", 2), 100 * SLICE_BYTES) == 1  # one message each, and that was all
    assert slice_count(generate("all_reduce", "ring", 1), 100 * SLICE_BYTES) == 1
