"""Published rows, what is made of them, and how far off the model is."""

from collections import Counter
from pathlib import Path

import pytest

import topology
from overlap.cost import measurements, validation
from overlap.cost.measurements import Knee, Measurement
from overlap.cost.select import plan
from overlap.cost.validation import Accuracy, Crossover, Validation, ValidationRow, validate
from overlap.errors import UsageError


@pytest.fixture(scope="module")
def everything():
    return validate()


def row(**changes):
    fields = {"machine": "x", "ranks": 4, "collective": "all_reduce", "nbytes": 3_000_000, "source": "", "unit": "us"}
    return Measurement(**(fields | {"figure": 250.0} | changes))


def test_figures_become_times_and_back():
    times = {
        "us": (row(), 250e-6),
        "algbw": (row(unit="algbw GB/s", figure=6.0), 0.5e-3),
        "all-reduce": (row(unit="nw_bw MB/s", figure=4500.0), 1e-3),
        "reduce-scatter": (row(unit="nw_bw MB/s", figure=4500.0, collective="reduce_scatter"), 0.5e-3),
    }
    for name, (each, measured_s) in times.items():
        assert each.measured_s == pytest.approx(measured_s, rel=1e-12), name
        assert each.as_published(measured_s) == pytest.approx(each.figure, rel=1e-12), name


def test_dl1_bandwidths_are_the_times_that_the_document_means():
    found = {
        (each.collective, each.peer_direct): round(each.measured_s * 1e3, 2)
        for each in measurements.COLLECTIVES
        if each.machine == "dl1.24xlarge x4"
    }
    assert found == {
        ("all_reduce", False): 5.12,
        ("all_reduce", True): 2.93,
        ("reduce_scatter", False): 3.35,
        ("reduce_scatter", True): 1.78,
    }


@pytest.mark.slow
def test_every_published_row_is_judged(everything):
    machines = Counter(each.of.machine for each in everything.rows)
    assert machines == {
        "trn2.48xlarge": 14 + 8,
        "inf2.xlarge": 5 + 1,
        "trn1.32xlarge": 1 + 1,
        "trn1.32xlarge x2": 3 + 1,
        "dl1.24xlarge x4": 4,
        "dl1.24xlarge x16": 1,
        "p5.48xlarge x2": 5 + 3 + 3,
        "p5.48xlarge x8": 5 + 3 + 3,
        "a3mega.toml x2": 7 + 6,
        "p4d.24xlarge x2": 6 + 1,
        "p4d.24xlarge": 1,
        "p4de.24xlarge x2": 4,
        "h100ib.toml x2": 2,
        "h100ib.toml x8": 3,
        "u-p6e-gb200x72": 3,
        "u-p6e-gb200x72 x2": 3,
        "p6-b200.48xlarge": 4,
        "p5en.48xlarge": 5,
        "mi300x": 7,
        "mi300x x2": 7,
    }


@pytest.mark.slow
def test_rows_of_a_known_library_are_predicted_by_what_it_has(everything):
    """Neuron's runtime has no trees, which we could run between two nodes."""
    pair = [
        each
        for each in everything.rows
        if each.of.source == "nccom-test, one rank and one adapter of each of two nodes"
    ]
    assert [each.of.nbytes for each in pair] == [1 << 16, 4 << 20, 128 << 20]
    for each in pair:
        place = "all_reduce", each.of.nbytes, topology.cluster("trn1.32xlarge x2"), (0, 32)
        prices = [
            plan(*place, dtype="uint8", algorithm=name).predicted_s for name in ("mesh", "one_shot", "ring", "rdh")
        ]
        assert each.predicted == min(prices)
    found = plan(*place, dtype="uint8")
    assert (found.library, found.predicted_s) == ("NeuronX", min(prices))
    assert found.proposals[0].algorithm == "double_binary_tree"  # it is faster, and no promise


@pytest.mark.slow
def test_the_planner_judges_by_class(everything):
    """By chip, network and dtype; ratios are no rows of it."""
    assert [(each.name, each.dtype, each.unseen.rows, each.fitted) for each in everything.classes] == [
        ("Trainium2, one node", "float32", 11, 3),
        ("Trainium2, one node", "bfloat16", 8, 0),
        ("Inferentia2, one node", "uint8", 4, 2),
        ("Trainium1, one node", "float32", 1, 1),
        ("Trainium1, across nodes", "uint8", 1, 2),
        ("Trainium1, across nodes", "float32", 1, 0),
        ("Gaudi, across nodes", "float32", 0, 4),
        ("H100, across nodes", "float32", 26, 14),
        ("A100, across nodes", "float32", 7, 4),
        ("A100, one node", "float32", 1, 0),
        ("GB200 GPU, one node", "float32", 3, 0),
        ("GB200 GPU, across nodes", "float32", 3, 0),
        ("B200, one node", "float32", 4, 0),
        ("H200, one node", "float32", 3, 2),
        ("MI300X, one node", "float32", 7, 0),
        ("MI300X, across nodes", "float32", 7, 0),
    ]
    assert everything.unseen.rows == sum(each.unseen.rows for each in everything.classes) == 87


@pytest.mark.slow
def test_how_good_the_planner_is(everything):
    """Medians as asked of all of Trainium and Inferentia together, and of GPU clusters described by data."""
    neuron = [e for e in everything.collectives if e.of.machine.startswith(("trn", "inf")) and not e.fits]
    p5 = [e for e in everything.collectives if e.of.machine.startswith("p5.")]
    gpus = [e for e in everything.collectives if e.of.machine not in {row.of.machine for row in (*neuron, *p5)}]
    gpus = [e for e in gpus if not e.of.machine.startswith(("trn", "inf", "dl1"))]
    assert Accuracy.of(neuron).median <= 0.04
    # One row is far off: 128 MiB between two single adapters take 1.4 times what 4 MiB let expect.
    far = [each for each in neuron if abs(each.error) > 0.17]
    assert [(each.of.machine, each.of.ranks, each.of.nbytes >> 20) for each in far] == [("trn1.32xlarge x2", 2, 128)]
    missed = ["Trainium1, across nodes", "A100, across nodes", "B200, one node", "MI300X, across nodes"]
    assert [each.name for each in everything.classes if not each.as_asked] == missed
    assert (Accuracy.of(p5).median <= 0.15, Accuracy.of(p5).worst <= 0.40) == (True, True)
    assert len(gpus) == 59
    every = [*gpus, *p5]
    assert (Accuracy.of(every).median <= 0.12, Accuracy.of(every).worst <= 0.5) == (True, True)
    unseen = Accuracy.of([each for each in every if not each.fits])
    assert (unseen.rows, unseen.median <= 0.13, unseen.worst <= 0.5) == (61, True, True)
    assert all(each.inside for each in everything.crossovers)


@pytest.mark.slow
def test_the_page_has_the_errors_of_today(everything):
    page = " ".join((Path(__file__).parents[2] / "docs/accuracy.md").read_text(encoding="utf-8").split())
    chips = ("A100", "H100", "H200", "B200", "GB200 GPU")
    of = Accuracy.together(each.unseen for each in everything.classes if each.name.split(",")[0] in chips)
    assert f"Over {of.rows} rows that others published of A100, H100, H200, B200 and GB200" in page
    told = f"the median error is {of.median:.0%}, and the worst {of.worst:.0%}: 1 MiB on one p6-b200.48xlarge"
    assert told.replace("%", " %") in page
    neuron = {(each.name, each.dtype): each.unseen for each in everything.classes}
    two = neuron["Trainium1, across nodes", "float32"]
    assert f"and {two.worst:.1%} for the one row of all cores of two trn1.32xlarge".replace("%", " %") in page


@pytest.mark.slow
def test_extrapolated_is_what_no_fitted_rows_enclose(everything):
    found = {
        (each.of.collective, each.of.nbytes >> 20): each.extrapolated
        for each in everything.collectives
        if each.of.machine == "trn2.48xlarge" and each.of.dtype == "float32"
    }
    inside = {key for key, extrapolated in found.items() if not extrapolated}
    assert inside == {
        *(("all_gather", size) for size in (32, 128, 512, 2048)),
        ("reduce_scatter", 1),
    }


@pytest.mark.slow
def test_only_one_machine():
    found = validate("inf2.xlarge")
    assert {each.of.machine for each in found.rows} == {"inf2.xlarge"}
    assert (found.training, found.crossovers) == (None, ())
    assert {each.of.machine for each in validate("p5.48xlarge x8").rows} == {"p5.48xlarge x8"}
    assert {each.of.machine for each in validate("dl1.24xlarge").rows} == {"dl1.24xlarge x4", "dl1.24xlarge x16"}


def test_no_such_machine():
    with pytest.raises(
        UsageError, match=r"nothing is published of 'trn9'; known are a3mega.toml, dl1.24xlarge, h100ib"
    ):
        validate("trn9")


def judged(measured, predicted, fits="", machine="trn2.48xlarge"):
    return ValidationRow(of=row(machine=machine), measured=measured, predicted=predicted, fits=fits, extrapolated=False)


def validation_of(*rows, crossovers=()):
    return Validation(collectives=rows, training=None, crossovers=crossovers)


def test_errors_and_their_summary():
    found = validation_of(judged(1.0, 1.25), judged(2.0, 1.0), judged(4.0, 4.0), judged(1.0, 9.0, fits="something"))
    assert [each.error for each in found.rows] == [0.25, -0.5, 0.0, 8.0]
    summaries = [(of.rows, of.median, of.worst) for of in (found.unseen, found.all, validation_of().all)]
    assert summaries == [(3, 0.25, 0.5), (4, 0.375, 8.0), (0, 0.0, 0.0)]


def test_what_is_not_as_asked():
    assert validation_of(judged(1.0, 1.07), judged(1.0, 1.19), judged(1.0, 1.0)).as_asked
    assert not validation_of(judged(1.0, 1.21), judged(1.0, 1.0), judged(1.0, 1.0)).as_asked
    assert not validation_of(judged(1.0, 1.09), judged(1.0, 1.09), judged(1.0, 1.0)).as_asked
    gpus = {"machine": "p5.48xlarge"}
    assert validation_of(judged(1.0, 1.49, **gpus), judged(1.0, 1.14, **gpus), judged(1.0, 1.0, **gpus)).as_asked
    assert not validation_of(judged(1.0, 1.51, **gpus), judged(1.0, 1.0, **gpus), judged(1.0, 1.0, **gpus)).as_asked
    knee = measurements.KNEES[0]
    near, far, never = (Crossover(knee=knee, predicted_bytes=size) for size in (1_000_000, 2_000_001, None))
    assert [each.inside for each in (near, far, never)] == [True, False, False]
    assert validation_of(crossovers=(near,)).as_asked
    assert not validation_of(crossovers=(near, far)).as_asked


def knee(**changes):
    fields = {"machine": "trn2.48xlarge", "ranks": 64, "collective": "all_gather", "below": "mesh", "above": "rdh"}
    bounds = {"least_bytes": 500_000, "most_bytes": 2_000_000, "seen": "", "source": ""}
    return Knee(**(fields | bounds | changes))


def test_a_crossover_is_where_the_plan_changes(monkeypatch):
    monkeypatch.setattr(validation, "KNEES", (knee(), knee(least_bytes=100_000_000, most_bytes=200_000_000)))
    here, elsewhere = validate("trn2.48xlarge").crossovers
    machine = topology.cluster("trn2.48xlarge")
    sizes = (round(here.predicted_bytes / 1.02), here.predicted_bytes)
    assert [validation.plan("all_gather", size, machine).cheapest for size in sizes] == ["mesh", "rdh"]
    assert elsewhere.predicted_bytes is None
