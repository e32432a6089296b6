"""The search for a layout: the same as trying all, what it leaves out and why, and what an interrupt leaves."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest

import overlap
from overlap.planning import Layout, estimate, load, memory_of
from overlap.planning import search as searching
from overlap.planning.search import CANNOT_WIN, FAR, NO_TIME, OUT_OF_MEMORY, SearchResult, candidates, search
from topology import TopologyError, cluster

MACHINE = cluster("trn2.3xlarge")
MODEL = replace(load("llama-8b"), name="small", layers=2, sequence=1024)
CLOCK = overlap.Virtual(efficiency=0.5)
LIKE = Layout(global_batch=16)
NAMES = ("tp", "pp", "dp", "bucket_bytes", "order", "zero")

SOME = ("tp", "pp", "dp", "zero")


@cache
def searched(model=MODEL, names=NAMES, like=LIKE):
    found = SearchResult()
    ordered = candidates(model, like, names, MACHINE, CLOCK, found)
    search(model, ordered, MACHINE, CLOCK, found)
    return found, ordered


def step_of(layout, model=MODEL):
    try:
        return estimate(model, layout, MACHINE, CLOCK).step_s
    except TopologyError:  # illegal there
        return float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("names", [SOME, ("tp", "pp", "dp", "bucket_bytes", "order", "checkpointing")], ids=len)
def test_the_best_layout_is_that_of_trying_all(names):
    found, ordered = searched(names=names, like=replace(LIKE, global_batch=8))
    steps = {each.layout: step_of(each.layout) for each in ordered}
    assert len(found.simulated) < len(ordered)
    assert found.complete
    assert found.best.step_s == min(steps.values())
    assert all(each.bound_s <= steps[each.layout] for each in ordered)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_of_any_small_model_the_best_layout_is_that_of_trying_all(seed):
    random = Random(seed)
    heads = random.choice((4, 8, 16))
    model = replace(
        load(random.choice(("llama-8b", "mixtral-8x7b", "gpt3-175b"))), name="random", layers=random.randint(1, 5),
        hidden=heads * random.choice((64, 128)), heads=heads, kv_heads=heads // random.choice((1, 2, 4)),
        ffn=random.choice((1024, 4096, 16384)), expert_ffn=0, sequence=random.choice((256, 1024, 4096)),
    )  # fmt: skip
    like = Layout(global_batch=random.choice((8, 16)), zero=random.randint(0, 3))
    names = ("tp", "pp", "dp", "schedule", "checkpointing", random.choice(("micro_batch", "order", "bucket_bytes")))
    found, ordered = searched(model, names, like)
    steps = [step_of(each.layout, model) for each in ordered]
    assert found.complete
    assert found.best.step_s == min(steps)
    assert all(each.bound_s <= step for each, step in zip(ordered, steps, strict=True))


@pytest.mark.slow
def test_every_layout_is_simulated_or_left_out_for_a_reason():
    found, _ = searched(names=SOME)
    assert found.tried == len(found.simulated) + sum(map(len, found.left_out.values()))
    assert CANNOT_WIN in found.left_out


def test_what_needs_more_memory_than_there_is_is_left_out():
    large = replace(MODEL, layers=32)
    found, ordered = searched(large, SOME)
    there = MACHINE.memory_bytes()
    assert all(memory_of(large, each.layout).total <= there for each in ordered)
    assert found.left_out[OUT_OF_MEMORY]
    assert all(memory_of(large, each).total > there for each in found.left_out[OUT_OF_MEMORY])


@pytest.mark.slow
def test_orders_of_axes_that_are_the_same_are_tried_once():
    _, ordered = searched(names=("tp", "pp", "dp", "order"))
    alone = [each.layout for each in ordered if each.layout.dp == MACHINE.world_size]
    assert len(alone) == 1


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_found(monkeypatch):
    tried = []

    def interrupted(*args, **kwargs):
        if tried:
            raise KeyboardInterrupt
        tried.append(estimate(*args, **kwargs))
        return tried[0]

    monkeypatch.setattr(searching, "estimate", interrupted)
    found = SearchResult()
    everything = [replace(each, bound_s=0.0) for each in candidates(MODEL, LIKE, NAMES, MACHINE, CLOCK, found)]
    with pytest.raises(KeyboardInterrupt):
        search(MODEL, everything, MACHINE, CLOCK, found)
    assert found.best is tried[0]
    assert (len(found.simulated), found.complete) == (1, False)


def test_a_search_ends_in_its_time_and_says_what_no_layout_is_below():
    found = SearchResult()
    everything = [replace(each, bound_s=1e-9 * n, near=True) for n, each in
                  enumerate(candidates(MODEL, LIKE, SOME, MACHINE, CLOCK, found), 1)]  # fmt: skip
    ticks = iter(range(0, 1000, 10))  # seconds: each simulation takes ten
    search(MODEL, everything, MACHINE, CLOCK, found, within_s=55.0, clock=lambda: float(next(ticks)))
    assert (len(found.simulated), found.complete) == (2, False)
    assert found.bound_s == everything[2].bound_s
    assert len(found.left_out[NO_TIME]) == len(everything) - 2
    assert found.best.step_s == min(step_s for _, step_s in found.simulated)


def test_one_layout_is_simulated_however_little_time_there_is():
    found = SearchResult()
    ordered = candidates(MODEL, LIKE, ("pp", "dp"), MACHINE, CLOCK, found)
    search(MODEL, ordered, MACHINE, CLOCK, found, within_s=0.0)
    assert len(found.simulated) == 1


def test_ranks_that_share_a_matrix_are_joined_by_fast_wires_unless_it_is_asked():
    machine, found = cluster("p5.48xlarge x2"), SearchResult()
    clock, like = overlap.Virtual(), Layout(global_batch=16)
    searched_for = candidates(MODEL, like, ("tp", "dp"), machine, clock, found)
    assert {each.layout.tp for each in searched_for} == {1, 2, 4, 8}
    assert [layout.tp for layout in found.left_out[FAR]] == [16]
    asked = candidates(MODEL, replace(like, tp=16), ("pp", "dp"), machine, clock, SearchResult())
    assert {each.layout.tp for each in asked} == {16}


def test_what_cannot_be_searched_for_is_refused():
    with pytest.raises(overlap.UsageError) as refused:
        searched(names=("tp", "sequence"))
    assert str(refused.value) == (
        "--search: 'sequence' cannot be searched for; known are tp, pp, dp, cp, ep, micro_batch, bucket_bytes, order, "
        "schedule, zero, checkpointing"
    )
