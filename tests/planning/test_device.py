"""Measured rates: products by shape beside published ones, attention by length, and what a compute adds up to."""

import csv
from dataclasses import replace
from importlib.resources import files
from statistics import median

import pytest

from overlap.planning import Layout, load
from overlap.planning.amounts import Amounts
from overlap.planning.device import Device, Rate
from topology import cluster

H100 = cluster("p5.48xlarge")
PLAIN = Device(
    products={"bf16": Rate(flops_per_s=1e12, start_s=1e-3), "fp8": Rate(flops_per_s=2e12, start_s=1e-3)},
    attention_flops_per_s=1e12, bytes_per_s=1e9,
)  # fmt: skip


def published():
    text = (files("overlap.planning") / "published" / "h100-bf16.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [(int(r["m"]), int(r["n"]), int(r["k"]), float(r["tflops"])) for r in csv.DictReader(lines)]


def test_products_of_an_h100_take_what_was_published_of_them():
    (of,) = [each for each in H100.machine.chip.products if each.kind == "bf16"]
    rate = Rate(flops_per_s=of.flops_per_s.value, start_s=of.start_s.value)
    device = replace(PLAIN, products={"bf16": rate}, bytes_per_s=1e15)
    errors = [
        abs(device.product_s(m, n, k, "bfloat16", 2) / (2e-12 * m * n * k / tflops) - 1)
        for m, n, k, tflops in published()
    ]
    assert len(errors) == 28
    assert median(errors) < 0.067
    assert max(errors) < 0.145


def test_a_product_takes_its_start_and_its_operations_or_its_bytes():
    assert PLAIN.product_s(1000, 1000, 1000, "bfloat16", 0) == 1e-3 + 2e-3
    assert PLAIN.product_s(1000, 1000, 1000, "float8_e4m3", 0) == 1e-3 + 1e-3
    assert PLAIN.product_s(1000, 1000, 1000, "float32", 0) == 1e-3 + 2e-3  # none is known: as in two bytes
    assert PLAIN.product_s(1, 1000, 1000, "bfloat16", 2000) == (1000 + 1000 * 1000 + 1000) * 2000 / 1e9
    assert PLAIN.product_s(0, 1000, 1000, "bfloat16", 2) == 0.0


def test_attention_is_slower_where_sequences_are_short():
    assert PLAIN.attention_s(1e12, 141) == 2.0
    assert PLAIN.attention_s(1e12, 14100) == 1.01
    assert PLAIN.attention_s(0.0, 10) == 0.0


def test_the_share_that_a_step_sustains_is_in_all_rates_but_the_memorys():
    device, chip = Device.of(H100), H100.machine.chip
    share = chip.sustained.value
    assert device.products["bf16"].flops_per_s == 827e12 * share
    assert device.attention_flops_per_s == 335e12 * share
    assert device.bytes_per_s == 3.35e12 * chip.memory_efficiency.value
    assert Device.of(cluster("trn2.48xlarge")) is None


def test_a_limit_of_its_power_slows_a_chip_by_its_cube_root_and_its_memory_not_at_all():
    chip = H100.machine.chip
    limited = replace(chip, power_limit_w=replace(chip.power_w, value=500))
    slower = Device.of(replace(H100, machine=replace(H100.machine, chip=limited)))
    device, share = Device.of(H100), (500 / 700) ** (1 / 3)
    assert slower.products["bf16"].flops_per_s == pytest.approx(device.products["bf16"].flops_per_s * share)
    assert slower.attention_flops_per_s == pytest.approx(device.attention_flops_per_s * share)
    assert slower.bytes_per_s == device.bytes_per_s
    beyond = replace(chip, power_limit_w=replace(chip.power_w, value=900))
    assert Device.of(replace(H100, machine=replace(H100.machine, chip=beyond))) == device


def test_a_layer_takes_its_products_its_attention_and_its_element_wise_work():
    model = replace(load("llama-8b"), sequence=1024)
    device = replace(PLAIN, products={"bf16": Rate(flops_per_s=1e15, start_s=0.0)}, bytes_per_s=1e30)
    amounts = Amounts(model=model, layout=Layout(), device=device)
    projections, scores = amounts.projections(), amounts.scores()
    assert projections.seconds == pytest.approx(projections.flops / 1e15)
    assert scores.flops == model.sequence * 512 * 4 * model.hidden  # causal: half of the sequence
    assert scores.seconds == pytest.approx(scores.flops / 1e12 * (1 + 141 / 1024))
    assert amounts.scores(1).flops == 2.5 * scores.flops
    moved = Amounts(model=model, layout=Layout(), device=replace(device, bytes_per_s=1e13)).projections()
    h, turned = 4096, 2 * (4096 + 1024)
    assert moved.seconds - projections.seconds == pytest.approx(1024 * (5 * h + turned) * 2 / 1e13)


def test_gradients_of_weights_and_of_inputs_together_are_the_backward_pass():
    amounts = Amounts(model=load("llama-8b"), layout=Layout(checkpointing="none"), device=Device.of(H100))
    both = amounts.projections(2).plus(amounts.perceptron(0, 2))
    apart = amounts.projections(1).plus(amounts.perceptron(0, 1)).plus(amounts.weight_gradients(0))
    assert apart.seconds == pytest.approx(both.seconds)
    assert apart.flops == pytest.approx(both.flops)


def test_computing_every_second_product_again_takes_half_of_the_forward_products():
    of = {name: Amounts(model=load("llama-8b"), layout=Layout(checkpointing=name)) for name in ("none", "products")}
    once, again = (each.perceptron(0, 2).flops for each in of.values())
    assert again - once == of["none"].perceptron(0).flops / 2
