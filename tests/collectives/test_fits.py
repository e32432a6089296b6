"""Which algorithms take which numbers of ranks: all take all, but for those that pair ranks."""

import pytest

import topology
from overlap.collectives import GENERATORS, fits, generate
from overlap.collectives.generators import misfit
from overlap.cost.select import plan
from overlap.errors import ScheduleError

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
