"""Schedules compute what numpy says, on real arrays."""

import numpy as np
import pytest

from overlap.collectives import fits, generate
from overlap.errors import ScheduleError

from .cases import NAMES, fitting, schedules
from .playback import replay
from .reference import expected, random_inputs, same

SIZES = range(1, 10)


@pytest.mark.parametrize(("collective", "algorithm", "size"), fitting(SIZES))
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
