"""Goodput: the closed forms beside failures that are drawn one by one, and the published run of Llama 3."""

import math

import pytest

from overlap import UsageError
from overlap.planning.goodput import LLAMA_3_CHIP_HOURS, Failures

ONE = Failures(chips=1000, chip_hours=20_000.0, write_s=60.0, restart_s=300.0)


def test_a_run_fails_as_often_as_its_chips_together():
    assert ONE.between_s == 20 * 3600
    assert Failures(chips=16384).between_s * 419 == pytest.approx(54 * 86400)
    assert pytest.approx(50_676, rel=1e-4) == LLAMA_3_CHIP_HOURS


def test_young_and_daly_are_their_formulas_and_near_the_best():
    assert ONE.young_s == math.sqrt(2 * 60 * 72_000)
    x = 60 / 144_000
    assert ONE.daly_s == pytest.approx(ONE.young_s * (1 + math.sqrt(x) / 3 + x / 9) - 60)
    assert ONE.best_s() == pytest.approx(ONE.daly_s, rel=2e-3)
    assert ONE.share(ONE.best_s()) >= ONE.share(ONE.young_s)
    assert Failures(chips=1, chip_hours=1.0, write_s=8000.0).daly_s == 3600


@pytest.mark.parametrize("every_s", [600.0, ONE.young_s, 20_000.0])
def test_the_closed_form_is_the_mean_of_failures_drawn_one_by_one(every_s):
    assert ONE.simulated(every_s, intervals=40_000) == pytest.approx(ONE.share(every_s), rel=5e-3)


def test_restarts_that_fail_too_count_and_a_hopeless_run_has_no_share():
    often = Failures(chips=1000, chip_hours=500.0, write_s=60.0, restart_s=900.0)
    assert often.simulated(300.0, intervals=40_000) == pytest.approx(often.share(300.0), rel=2e-2)
    assert Failures(chips=10**9, chip_hours=1.0).share(3600.0) == 0.0


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"chips": 0}, "chips: expected more than 0, got 0"),
        ({"chip_hours": math.inf}, "chip_hours: expected more than 0, got inf"),
        ({"write_s": 0.0}, "write_s: expected more than 0, got 0.0"),
        ({"restart_s": -1.0}, "restart_s: expected 0 or more, got -1.0"),
    ],
)
def test_a_figure_that_cannot_be_meant_is_refused(figures, expected):
    with pytest.raises(UsageError) as refused:
        Failures(**{"chips": 8, **figures})
    assert str(refused.value) == expected
