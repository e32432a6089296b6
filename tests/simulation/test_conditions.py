"""What is not perfect: by seed, for each rank its own, and refused where it cannot be meant."""

from math import nan
from statistics import fmean

import pytest

from overlap.errors import UsageError
from overlap.simulation import CALM, NO_INTERFERENCE, Conditions, Interference


def draws(conditions, rank, count=1000):
    jitter = conditions.jitter_of(rank)
    return [jitter.compute_ns(1_000_000) for _ in range(count)]


def test_calm_changes_nothing():
    assert draws(CALM, 0, 3) == [1_000_000] * 3
    assert not CALM.is_straggler(0)


def test_jitter_is_each_ranks_own_and_the_same_again():
    conditions = Conditions(seed=7, jitter=0.05)
    assert draws(conditions, 0) == draws(Conditions(seed=7, jitter=0.05), 0)
    assert draws(conditions, 0) != draws(conditions, 1)
    assert draws(conditions, 0) != draws(Conditions(seed=8, jitter=0.05), 0)
    # The same numbers on every version: a change would change everybody's simulations.
    assert draws(conditions, 0, 3) == [1062559, 964323, 1129218]
    assert 0.99e6 < fmean(draws(conditions, 0)) < 1.01e6
    assert min(draws(conditions, 0)) < 0.9e6 < 1.1e6 < max(draws(conditions, 0))


def test_stragglers():
    slow = Conditions(stragglers=(3,), straggler_factor=1.5)
    assert draws(slow, 3, 2) == [1_500_000] * 2
    assert draws(slow, 2, 2) == [1_000_000] * 2
    some = Conditions(seed=1, straggler_share=0.1, straggler_factor=2.0)
    chosen = [rank for rank in range(1000) if some.is_straggler(rank)]
    assert 60 < len(chosen) < 140
    assert chosen == [rank for rank in range(1000) if Conditions(seed=1, straggler_share=0.1).is_straggler(rank)]
    assert draws(some, chosen[0], 1) == [2_000_000]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("jitter", value) for value in (-0.1, nan)),
        *(("straggler_share", value) for value in (-0.1, 1.1, nan)),
        *(("slow_wire_share", value) for value in (-0.1, 1.1, nan)),
        *(("straggler_factor", value) for value in (0.9, nan)),
        *(("slow_wire_factor", value) for value in (0, 1.1, nan)),
    ],
)
def test_what_cannot_be_meant(name, value):
    with pytest.raises(UsageError, match=f"^{name}: expected .*, got {value!r}"):
        Conditions(**{name: value})


def test_interference():
    assert NO_INTERFERENCE.off
    assert str(NO_INTERFERENCE) == "compute and communication do not slow each other down"
    stated = Interference(compute={"flops": 1.1, "*": 1.3}, communication={"all_reduce": 1.2})
    assert (stated.of_compute("flops"), stated.of_compute("memory")) == (1.1, 1.3)
    assert (stated.of_communication("all_reduce"), stated.of_communication("send")) == (1.2, 1.0)
    assert not stated.off
    assert str(stated) == (
        "compute (flops) x1.1 while its rank communicates; compute (*) x1.3 while its rank communicates; "
        "all_reduce x1.2 while its ranks compute"
    )
    for factor in (0.5, nan, float("inf")):
        with pytest.raises(UsageError, match="interference: compute 'flops' expected 1 or more"):
            Interference(compute={"flops": factor})
