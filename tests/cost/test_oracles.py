"""Published results of other simulators, to the last printed digit."""

import dataclasses

import pytest

from overlap.collectives import generate
from overlap.cost import Resolution, cost, on, rounds

from .star import Star


@pytest.mark.parametrize(("size", "printed_s"), [(256, "0.160395"), (1024, "0.163936")])
def test_simgrid_cm02(size, printed_s):
    """A star with 1 us and 12.5e9 B/s on both halves; the figure for 1024 is the closed form's."""
    star = Star(size, latency_s=2e-6, bytes_per_s=12.5e9)
    found = cost(on(star, rounds(generate("all_reduce", "ring", size))), 1e9)
    assert f"{found.total_s:.6f}" == printed_s
    assert found.total_s == round(2 * (size - 1) * (2_000_000 + 80 * 10**12 // size / 1000)) / 10**12


def test_simgrid_cm02_first_200_steps():
    whole = rounds(generate("all_reduce", "ring", 1024))
    first, second, *_ = whole.rounds
    cut = dataclasses.replace(whole, rounds=(first, dataclasses.replace(second, repeat=199)))
    assert f"{cost(on(Star(1024, latency_s=2e-6, bytes_per_s=12.5e9), cut), 1e9).total_s:.6f}" == "0.016025"


@pytest.mark.parametrize(("size", "expected_ns"), [(64, 36_733_788), (256, 37_362_090), (1024, 38_237_694)])
def test_astra_sim(size, expected_ns):
    """50 "GB/s" is 50 * 2**30, and every message is cut to whole nanoseconds."""
    star = Star(size, latency_s=500e-9, bytes_per_s=50 * 2**30)
    table = rounds(generate("all_reduce", "ring", size))
    found = cost(on(star, table), 1e9, resolution=Resolution(ticks_per_s=10**9, rounding="down"))
    assert found.total_s == expected_ns / 10**9
