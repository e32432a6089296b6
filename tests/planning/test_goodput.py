"""Goodput of long jobs: drawn losses beside a count by hand, and the formulas of Young and Daly."""

import math
from random import Random

import pytest

from overlap import UsageError
from overlap.planning.goodput import Loss, RestartingJob, SurvivingJob, goodput

RESTARTS = RestartingJob(between_s=72_000.0, write_s=60.0, restart_s=300.0)
LOSS = Loss(repeated_s=2.0, pause_s=1.0)


def job(**changes):
    return SurvivingJob(**{"units": 4, "between_s": 1000.0, "speed": float, "losses": (LOSS,)} | changes)


def test_young_and_daly_are_their_formulas():
    assert RESTARTS.young_s == math.sqrt(2 * 60 * 72_000)
    x = 60 / 144_000
    assert RESTARTS.daly_s == pytest.approx(RESTARTS.young_s * (1 + math.sqrt(x) / 3 + x / 9) - 60)
    assert RestartingJob(between_s=3600.0, write_s=8000.0, restart_s=1.0).daly_s == 3600
    assert RESTARTS.share(RESTARTS.daly_s) > RESTARTS.share(RESTARTS.daly_s / 2)
    assert RestartingJob(between_s=1.0, write_s=60.0, restart_s=300.0).share(3600.0) == 0.0
    with pytest.raises(UsageError, match=r"write_s: expected more than 0, got 0"):
        RestartingJob(between_s=1.0, write_s=0, restart_s=1.0)


def drawn_s(count, means, seed=0):
    draw, now_s, instants = Random(f"{seed}, goodput"), 0.0, []
    for mean_s in means[:count]:
        now_s += draw.expovariate(1 / mean_s)
        draw.choice((LOSS,))
        instants.append(now_s)
    return instants


def test_without_a_spare_the_job_becomes_smaller():
    first_s, second_s = drawn_s(2, [1000.0, 1000.0 * 4 / 3])
    length_s = (first_s + second_s) / 2
    result = goodput(job(), length_s)
    work = (first_s - 2) * 4 + (length_s - first_s - 1) * 3
    assert result.share == pytest.approx(work / (4 * length_s), rel=1e-12)
    assert (result.losses, result.units, result.spares_used) == (1, 3, 0)
    assert result.repeated_share == pytest.approx(2 / length_s)
    assert result.pause_share == pytest.approx(1 / length_s)
    total = result.share + result.smaller_share + result.repeated_share + result.pause_share
    assert total == pytest.approx(1.0, rel=1e-12)


def test_a_spare_takes_the_place_and_receives_the_state():
    first_s, second_s = drawn_s(2, [1000.0, 1000.0])
    length_s = (first_s + second_s) / 2
    result = goodput(job(spares=1, join_s=5.0), length_s)
    assert result.share == pytest.approx((length_s - 2 - 1 - 5) / length_s, rel=1e-12)
    assert (result.losses, result.units, result.spares_used) == (1, 4, 1)


def test_a_repaired_unit_joins_again():
    forever = goodput(job(repair_s=100.0), 1e6)
    assert forever.units in (3, 4)
    assert 900 < forever.losses < 1100
    assert forever.share > 0.95
    assert goodput(job(repair_s=100.0), 1e6) == forever
    assert goodput(job(repair_s=100.0), 1e6, seed=1) != forever


def test_a_loss_in_a_pause_repeats_nothing_more():
    often = goodput(job(between_s=1e-3, losses=(Loss(repeated_s=2.0, pause_s=1e9),), spares=10), 100.0)
    assert often.losses == 14
    assert often.repeated_share < 1e-3
    assert often.ended_s is not None
    assert often.share + often.pause_share + often.repeated_share == pytest.approx(1.0)


def test_a_number_of_units_that_cannot_run_ends_the_job():
    result = goodput(job(speed=lambda units: 0.0 if units < 3 else 4.0), 1e9)
    assert (result.units, result.losses) == (2, 2)
    assert result.ended_s == pytest.approx(drawn_s(2, [1000.0, 4000 / 3])[1])
