"""Published steps: what they are, their bands, and the recorded errors beside what is predicted today."""

from dataclasses import replace

import pytest

from overlap.planning import validation
from overlap.planning.memory import memory_of
from overlap.planning.validation import (
    StepBand,
    StepComparison,
    class_band,
    compare_steps,
    left_out_errors,
    published_steps,
    step_class,
)
from topology import cluster

CHEAP = ("tt-8b-8", "mpt-7b-32k")


def test_every_published_step_has_a_source_fits_and_has_a_recorded_error():
    assert len(published_steps()) == 16
    for row in published_steps():
        assert row.source
        row.layout.check(row.model)
        assert row.layout.world_size == row.cluster.world_size
        assert memory_of(row.model, row.layout).total <= row.cluster.memory_bytes(), row.id
    assert {row.id: row.step_class for row in published_steps()} == {
        name: of for name, (of, _) in left_out_errors().items()
    }


def test_a_class_is_a_chip_and_whether_products_are_in_eight_bits():
    assert step_class(cluster("p5.48xlarge"), "float8_e4m3") == "H100 fp8"
    assert step_class(cluster("p5.48xlarge x2"), "bfloat16") == "H100 bf16"


def test_a_band_covers_four_of_five_errors():
    band = StepBand.over("some", [-0.1, 0.2, -0.3, 0.4, 0.5])
    assert (band.rows, band.typical, band.covering, band.worst) == (5, 0.3, 0.4, 0.5)
    for of in {of for of, _ in left_out_errors().values()}:
        errors = [abs(error) for own, error in left_out_errors().values() if own == of]
        assert sum(error <= StepBand.over(of, errors).covering for error in errors) >= 0.8 * len(errors)


def test_a_class_with_few_rows_has_no_narrower_band_than_all_have(monkeypatch):
    rows = {str(n): ("H100 bf16", 0.01 * n) for n in range(1, 9)} | {"one": ("A100 bf16", 0.001)}
    monkeypatch.setattr(validation, "left_out_errors", lambda: rows)
    every = class_band(cluster("trn2.48xlarge"), "bfloat16")
    assert (every.name, every.rows) == ("all classes", 9)
    assert class_band(cluster("p4d.24xlarge"), "bfloat16") == every
    assert class_band(cluster("p5.48xlarge"), "bfloat16").name == "H100 bf16"


@pytest.mark.slow
def test_a_row_is_predicted_without_itself():
    rows = [row for row in published_steps() if row.id in CHEAP]
    one, other = compare_steps(rows)
    assert isinstance(one, StepComparison)
    # With computes alone, the only other row says how much slower these are.
    wanted = other.published.measured_s / other.predicted_s
    assert one.left_out_s == pytest.approx(one.predicted_s * (one.compute * wanted + 1 - one.compute), rel=0.02)
    slow = replace(rows[0], measured_s=rows[0].measured_s * 2)
    assert compare_steps([slow, rows[1]])[1].left_out_s > other.left_out_s


@pytest.mark.soak  # it predicts every published step, for minutes
def test_the_recorded_errors_are_those_of_today():
    for row in compare_steps(published_steps()):
        assert left_out_errors()[row.published.id][1] == pytest.approx(row.unseen, abs=0.03), row.published.id
