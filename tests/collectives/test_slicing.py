"""Slices of long messages: the same results, and what follows from a slice does not wait for the next one."""

import numpy as np
import pytest

from overlap.collectives import StepKind, generate, project_all, verify
from overlap.collectives.slicing import (
    LONGEST_BYTES,
    MOST_SLICES,
    SLICE_BYTES,
    in_slices,
    message_bytes,
    slice_count,
    slice_rows,
)

from .executor import execute
from .reference import expected, random_inputs


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
    schedule = in_slices(whole, nbytes)
    assert message_bytes(schedule, nbytes) == SLICE_BYTES
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
    assert message_bytes(ring, 4 * SLICE_BYTES) == SLICE_BYTES
    assert [slice_count(ring, n * 4 * SLICE_BYTES) for n in (0, 1, 2, 3, 9)] == [1, 1, 2, 3, MOST_SLICES]
    assert slice_count(ring, 4 * 25 * LONGEST_BYTES) == 25
    assert slice_count(generate("all_gather", "ring", 2), 100 * SLICE_BYTES) == 1  # one message each, and that was all
    assert slice_count(generate("all_reduce", "ring", 1), 100 * SLICE_BYTES) == 1
