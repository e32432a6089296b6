"""Folded steps beside whole ones, and interleaved rounds that repeat."""

from dataclasses import replace

import pytest

import overlap
from overlap.planning import Layout, load
from overlap.planning.device import Device
from overlap.planning.parts import StepParts
from overlap.planning.simulating import FoldedSimulation, FullSimulation, fill_and_period
from topology import cluster

MODEL = replace(load("llama-8b"), layers=4, sequence=1024)
MACHINE = cluster("p5.48xlarge x2")
SIX = pytest.mark.slow


def simulations(microbatches, machine=MACHINE, model=MODEL, **figures):
    dp = machine.world_size // (figures.get("tp", 1) * figures.get("pp", 1))
    layout = Layout(dp=dp, global_batch=microbatches * dp, **figures)
    clock = overlap.Virtual(shapes_only=True, alike=layout.pipeline_place)
    whole = FullSimulation(model, layout, machine, clock, None, Device.of(machine))
    return whole, FoldedSimulation(whole), layout


@pytest.mark.parametrize(
    "figures",
    [
        {"tp": 8, "pp": 2},
        pytest.param({"tp": 8, "pp": 2, "sequence_parallel": False, "checkpointing": "none", "zero": 0}, marks=SIX),
        pytest.param({"tp": 8, "pp": 2, "schedule": "zb-v", "chunks": 2, "checkpointing": "selective"}, marks=SIX),
        pytest.param({"tp": 8, "pp": 2, "zero": 2}, marks=SIX),
        pytest.param({"tp": 8, "pp": 2, "zero": 3}, marks=SIX),
        pytest.param({"tp": 4, "pp": 2, "overlap_gather": True}, marks=SIX),
    ],
    ids=str,
)
def test_a_folded_step_takes_as_long_as_the_whole_one(figures):
    whole, folded, _ = simulations(5, **figures)
    one, other = whole.parts(5), folded.parts(5)
    assert other.step_ns == one.step_ns
    assert other.compute_ns == pytest.approx(one.compute_ns)
    assert sum(other.path.values()) == pytest.approx(sum(one.path.values()))
    for dimension, amount in one.by_dimension().items():
        assert other.by_dimension()[dimension].count == pytest.approx(amount.count)
    exposed = [sum(amount.exposed_ns for amount in each.operations.values()) for each in (one, other)]
    assert exposed[0] == pytest.approx(exposed[1])


@pytest.mark.slow
@pytest.mark.parametrize("figures", [{"schedule": "zb-h1"}, {"schedule": "interleaved-1f1b", "chunks": 2}], ids=str)
def test_of_other_orders_a_folded_step_is_nearly_as_long(figures):
    whole, folded, _ = simulations(8, tp=8, pp=2, **figures)
    assert folded.parts(8).step_ns == pytest.approx(whole.parts(8).step_ns, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatches", "figures"),
    [
        (16, {"schedule": "interleaved-1f1b", "chunks": 2, "pp": 4}),
        (12, {"schedule": "interleaved-1f1b", "chunks": 2, "pp": 2}),
        (13, {"schedule": "zb-v", "chunks": 2, "pp": 2}),
        (12, {"schedule": "dualpipe-v", "chunks": 2, "pp": 2}),
    ],
    ids=str,
)
def test_rounds_of_stages_repeat_to_the_nanosecond(microbatches, figures):
    model = replace(MODEL, layers=8)
    whole, _, layout = simulations(microbatches, model=model, tp=16 // figures["pp"], **figures)
    few, period = fill_and_period(layout)
    first, second = whole.parts(few), whole.parts(few + period)
    found = first.extrapolate(second, (microbatches - few) // period - 1)
    everything: StepParts = whole.parts(microbatches)
    assert few + period < microbatches
    assert found.step_ns == everything.step_ns


def test_microbatches_that_do_not_fill_rounds_are_all_simulated():
    assert fill_and_period(Layout(pp=4, schedule="interleaved-1f1b", chunks=2, global_batch=10)) == (10, 1)
    assert fill_and_period(Layout(pp=4, schedule="interleaved-1f1b", chunks=2, global_batch=16)) == (4, 4)
    assert fill_and_period(Layout(pp=4, schedule="zb-v", chunks=2, global_batch=17)) == (9, 2)
    assert fill_and_period(Layout(pp=4, global_batch=17)) == (4, 1)
