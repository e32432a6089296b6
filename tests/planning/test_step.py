"""A predicted step: what travels in it, where its time goes, what is added to what was simulated, and its bound."""

import random
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import pytest

import overlap
from overlap.cli.model.page import page
from overlap.cost.validation import accuracy_classes
from overlap.parallel.schedules import FAMILIES
from overlap.planning import Layout, Model, estimate, load, train
from overlap.planning.amounts import Amounts
from overlap.planning.bound import bound_s
from overlap.planning.estimates import SLOWER
from overlap.planning.parts import MESSAGE, StepOperation, StepParts
from overlap.planning.simulating import simulate_step
from overlap.planning.trust import operation_band, step_band
from overlap.planning.validation import COVERED, class_band, left_out_errors
from overlap.simulation.conditions import ALL
from overlap.simulation.flow import Flow
from overlap.timeline import Timeline
from topology import cluster

MACHINE = cluster("trn2.48xlarge")
SMALL = cluster("trn2.3xlarge")
DENSE = replace(load("llama-8b"), name="small", layers=3, sequence=1024)
FOUR = replace(DENSE, layers=4)
SPARSE = replace(load("mixtral-8x7b"), name="sparse", layers=2, sequence=1024)
CLOCK = overlap.Virtual(efficiency=0.5)


@cache
def predicted(model=DENSE, microbatches=2, machine=MACHINE, clock=CLOCK, **figures):
    dp = machine.world_size // (figures.get("tp", 1) * figures.get("pp", 1) * figures.get("cp", 1))
    layout = Layout(dp=dp, global_batch=microbatches * dp * figures.get("micro_batch", 1), **figures)
    return estimate(model, layout, machine, clock)


def sent(one, dimension):
    """What a rank has part in, by operation: how often, and bytes."""
    found = {}
    for each, amount in one.parts.operations.items():
        if each.dimension == dimension:
            found.setdefault(each.op, []).append((amount.count, each.nbytes))
    return found


def total(found, op):
    return sum(count * nbytes for count, nbytes in found[op])


def test_every_nanosecond_of_a_step_is_told_once():
    parts = predicted(tp=4, pp=2).parts
    exposed = sum(amount.exposed_ns for amount in parts.operations.values())
    assert parts.compute_ns + exposed + parts.idle_ns == pytest.approx(parts.step_ns, abs=1)
    assert sum(parts.path.values()) == parts.step_ns


def test_tensor_parallel_sums_activations_four_times_a_layer_and_microbatch():
    one = predicted(tp=4, sequence_parallel=False, checkpointing="selective", zero=0)
    bsh = DENSE.sequence * DENSE.hidden * 2
    large = [each for each in sent(one, "tp")["all_reduce"] if each[1] == bsh]
    # and once for the embedding, and once for the gradient of what scores are made of
    assert large == [(2 * (4 * DENSE.layers + 2), bsh)]


def test_sequence_parallel_sends_the_same_as_gathers_and_scatters_and_recomputation_half_as_many_again():
    bsh = DENSE.sequence * DENSE.hidden * 2
    for checkpointing, each in (("selective", 4), ("full", 6)):
        found = sent(predicted(tp=4, checkpointing=checkpointing, zero=0), "tp")
        scattered = sum(count for count, nbytes in found["reduce_scatter"] if nbytes == bsh)
        assert scattered == 2 * (each * DENSE.layers + 2)


@pytest.mark.parametrize(
    ("zero", "expected"),  # in units of the gradients, which are as large as the weights; two microbatches
    [
        (0, {"all_reduce": 1}),
        (1, {"reduce_scatter": 1, "all_gather": 1}),
        (2, {"reduce_scatter": 2, "all_gather": 1}),
        (3, {"reduce_scatter": 2, "all_gather": 4}),
    ],
)
def test_zero_sends_what_its_papers_say(zero, expected):
    one = predicted(zero=zero)
    weights, found = 2 * DENSE.parameters, sent(one, "dp")
    layers = 2 * sum(map(DENSE.layer_parameters, range(DENSE.layers)))  # tables are not gathered layer by layer
    assert set(found) == set(expected)
    for op, times in expected.items():
        whole = layers if zero == 3 and op == "all_gather" else weights
        assert total(found, op) == pytest.approx(times * whole, rel=1e-5)  # buckets are padded to whole shares


GPUS = cluster("p5.48xlarge x2")


@pytest.mark.parametrize(("zero", "times"), [(1, (1, 1)), (3, (2, 4))])
def test_hsdp_shares_weights_inside_a_group_and_adds_up_shares_across_groups(zero, times):
    one = predicted(machine=GPUS, zero=zero, replicate=2)
    weights, reductions, gathers = 2 * DENSE.parameters, *times
    layers = 2 * sum(map(DENSE.layer_parameters, range(DENSE.layers)))
    within, across = sent(one, "dp"), sent(one, "replicate")
    assert total(within, "reduce_scatter") == pytest.approx(reductions * weights, rel=1e-5)
    assert total(within, "all_gather") == pytest.approx(gathers * (layers if zero == 3 else weights), rel=1e-5)
    assert total(across, "all_reduce") == pytest.approx(reductions * weights / 8, rel=1e-5)
    groups = {(each.dimension, each.ranks) for each in one.parts.operations if 0 in each.ranks}
    assert groups == {("dp", tuple(range(8))), ("replicate", (0, 8))}  # a node, and its like on the other


@pytest.mark.parametrize("figures", [{}, {"tp": 8, "pp": 2}, {"replicate": 2}], ids=str)
def test_weights_gathered_under_the_next_step_are_as_many_and_cost_less(figures):
    late, ahead = (predicted(microbatches=4, machine=GPUS, overlap_gather=each, **figures) for each in (False, True))
    if "tp" not in figures:  # else each rank of dp is alone
        gathered = [total(sent(each, "dp"), "all_gather") for each in (late, ahead)]
        assert gathered[1] == pytest.approx(gathered[0], rel=1e-5)
        assert ahead.step_s < late.step_s
    else:
        assert ahead.step_s == late.step_s


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"dp": 8, "replicate": 3}, r"replicate: expected a divisor of dp / ep \(8 / 1\), got 3"),
        ({"dp": 8, "ep": 4, "replicate": 4}, r"replicate: expected a divisor of dp / ep \(8 / 4\), got 4"),
        ({"dp": 8, "replicate": 0}, "replicate: expected a whole number from 1, got 0"),
        ({"dp": 8, "replicate": 2, "zero": 0}, "replicate: expected zero 1, 2 or 3 beside it"),
        ({"overlap_gather": True, "zero": 3}, "overlap_gather: expected zero 1 or 2 beside it: 3 gathers them layer"),
        ({"overlap_gather": True, "zero": 0}, "overlap_gather: expected zero 1 or 2 beside it: 0 gathers none"),
    ],
)
def test_what_cannot_be_shared_so_is_refused(figures, why):
    with pytest.raises(overlap.UsageError, match=why):
        Layout(global_batch=8, **figures)


@pytest.mark.slow
def test_experts_exchange_tokens_four_times_a_layer_and_microbatch():
    one = predicted(SPARSE, tp=4, ep=4, checkpointing="selective")
    routed = SPARSE.sequence // 4 * SPARSE.top_k * SPARSE.hidden * 2
    assert sent(one, "ep") == {"all_to_all": [(2 * 4 * SPARSE.layers, routed)]}


def test_all_ranks_of_tp_get_what_came_to_the_experts_they_share_and_give_their_parts_back():
    one = predicted(SPARSE, tp=4, ep=4, checkpointing="selective")
    came = SPARSE.sequence * SPARSE.top_k * SPARSE.hidden * 2  # tokens of four ranks, a quarter of which is here
    found = sent(one, "tp")
    for op in ("all_gather", "reduce_scatter"):
        assert [each for each in found[op] if each[1] == came] == [(2 * 2 * SPARSE.layers, came)]
    apart = predicted(SPARSE, tp=4, ep=4, checkpointing="selective", sequence_parallel=False)
    assert came not in [nbytes for each in sent(apart, "tp").values() for _, nbytes in each]
    assert sent(apart, "ep") == {"all_to_all": [(2 * 4 * SPARSE.layers, came)]}  # each sends them all to its like


def test_keys_and_values_go_round_the_ring_and_their_gradients_one_hop_further():
    one = predicted(tp=4, cp=4, checkpointing="selective")
    kv = DENSE.sequence // 4 * DENSE.kv_width // 4 * 2
    ((count, nbytes),) = sent(one, "cp")["send/recv"]
    assert nbytes == kv
    # forward 3 hops, backward 3 and 4 of gradients; each has a sender and a receiver
    assert count == 2 * DENSE.layers * 2 * (3 + 3 + 4)


def test_ranks_beyond_the_heads_of_keys_pass_on_the_same_ones():
    head = 2 * DENSE.sequence // 4 * 2 * 128  # a rank's tokens, keys and values of 128 numbers, in two bytes
    sent = [Amounts(model=DENSE, layout=Layout(tp=tp, cp=4)).ring_bytes for tp in (4, 8, 16)]  # of eight heads
    assert sent == [2 * head, head, head]
    latent = load("deepseek-v3")
    whole = 2 * latent.sequence // 4 * (latent.kv_rank + latent.rope_dim)
    assert Amounts(model=latent, layout=Layout(tp=8, cp=4)).ring_bytes == whole


@pytest.mark.parametrize(
    "figures",
    [
        {"pp": 4, "machine": SMALL},
        pytest.param({"tp": 8, "pp": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 4, "pp": 4, "schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param({"tp": 4, "zero": 3}, marks=pytest.mark.slow),
        pytest.param({"tp": 4, "pp": 2, "zero": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 4, "pp": 2, "overlap_gather": True}, marks=pytest.mark.slow),
        pytest.param({"tp": 4, "pp": 4, "schedule": "gpipe"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_further_microbatches_cost_what_they_would_have_cost(figures):
    one = predicted(replace(DENSE, layers=4), microbatches=10, **figures)
    assert one.simulated == figures.get("pp", 1) + 1
    all_of_it = StepParts.of(simulate_step(one.model, one.layout, one.cluster, one.virtual))
    assert one.parts.step_ns == all_of_it.step_ns
    assert one.parts.compute_ns == pytest.approx(all_of_it.compute_ns)
    told, known = one.parts.by_dimension(), all_of_it.by_dimension()
    exposed, expected = ({each: of[each].exposed_ns for each in of} for of in (told, known))
    assert sum(exposed.values()) == pytest.approx(sum(expected.values()))
    # Where two dimensions communicate at once, exposed time is one's or the other's: 76 ns of the eighth microbatch of
    # gpipe change sides.
    assert exposed == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "figures",
    [
        {"tp": 8, "pp": 2},
        {"tp": 4, "pp": 2, "schedule": "zb-h1"},
        pytest.param({"tp": 4, "pp": 2, "schedule": "zb-h2"}, marks=pytest.mark.slow),
        pytest.param({"model": FOUR, "tp": 4, "pp": 2, "schedule": "zb-v", "chunks": 2}, marks=pytest.mark.slow),
        pytest.param({"model": FOUR, "tp": 4, "pp": 2, "schedule": "dualpipe-v", "chunks": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 4, "cp": 4}, marks=pytest.mark.slow),
        {"tp": 4, "sequence_parallel": False, "checkpointing": "none"},
        {"zero": 0, "checkpointing": "selective"},
        {"zero": 3},
        {"overlap_gather": True},
        pytest.param({"model": SPARSE, "tp": 4, "ep": 8, "pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_step_is_below_its_bound_which_is_near(figures):
    figures = dict(figures)
    # Long enough that computes, and not only the gradients, take most of a step.
    model = replace(figures.pop("model", DENSE), sequence=4096)
    one = predicted(model, microbatches=4, **figures)
    at_least_s = bound_s(one.model, one.layout, MACHINE, CLOCK)
    assert 0.65 * one.step_s < at_least_s <= one.step_s


@pytest.mark.slow
def test_a_zero_bubble_schedule_and_an_interleaved_one_wait_less_than_1f1b():
    more = replace(DENSE, layers=4)
    steps = {
        name: predicted(more, tp=4, pp=2, microbatches=8, schedule=name, chunks=FAMILIES[name].chunks or 2).step_s
        for name in FAMILIES
    }
    assert max(steps[each] for each in ("zb-h1", "interleaved-1f1b", "zb-v", "dualpipe-v")) < steps["1f1b"]


@pytest.mark.slow
def test_ranks_that_stand_for_others_take_what_all_of_them_take():
    one = predicted()
    everyone = replace(one.virtual, alike=0)
    whole = StepParts.of(simulate_step(one.model, one.layout, MACHINE, everyone))
    assert one.parts.step_ns == whole.step_ns


@pytest.mark.slow
def test_the_band_is_that_of_rows_that_nothing_was_fitted_to():
    one = predicted(tp=4)
    bands = {each.dimension: operation_band(MACHINE, each) for each in one.parts.operations}
    assert bands["dp"].source == "Trainium2, one node, bfloat16"
    assert 0 < bands["dp"].typical < bands["dp"].worst
    far = StepOperation(dimension="dp", op="all_reduce", nbytes=1 << 20, dtype="float64", ranks=tuple(range(128)))
    joined = operation_band(cluster("trn2.48xlarge x2"), far)  # no row of this chip: all across nodes
    errors = [error for each in accuracy_classes(place="across nodes") for error in each.unseen.errors]
    assert (joined.rows, joined.typical, joined.worst) == (len(errors), median(errors), max(errors))


def test_collectives_of_published_sizes_and_groups_are_measured_and_messages_are_not():
    node = cluster("trn2.48xlarge")

    def is_measured(op, nbytes, size):
        of = StepOperation(dimension="dp", op=op, nbytes=nbytes, dtype="bfloat16", ranks=tuple(range(size)))
        return operation_band(node, of).measured

    tried = [
        ("all_gather", 64 << 20, 64),
        ("all_gather", 1 << 14, 64),
        ("all_gather", 64 << 20, 32),
        (MESSAGE, 64 << 20, 64),
    ]
    assert [is_measured(*each) for each in tried] == [True, False, False, False]


def test_the_band_of_a_step_is_that_of_published_steps_and_never_narrower_than_its_communication():
    one = predicted(tp=4)
    seen = class_band(MACHINE, "bfloat16")
    assert step_band(MACHINE, one.layout, one.parts) == seen
    errors = sorted(abs(error) for _, error in left_out_errors().values())
    within = sum(error <= seen.covering for error in errors)
    assert (seen.name, seen.rows, seen.worst) == ("all classes", len(errors), errors[-1])
    assert within >= COVERED * len(errors)
    key = next(key for key in one.parts.operations if key.dimension == "tp")
    slow = {key: replace(one.parts.operations[key], wire_ns=one.parts.step_ns * 10)}
    wide = step_band(MACHINE, one.layout, replace(one.parts, operations=slow))
    assert wide.covering == 10 * operation_band(MACHINE, key).typical > seen.covering


@pytest.mark.parametrize(
    "figures", [{"tp": 4}, pytest.param({"zero": 3}, marks=pytest.mark.slow),
                pytest.param({"tp": 4, "pp": 2}, marks=pytest.mark.slow)], ids=str,
)  # fmt: skip
def test_what_overlaps_and_slows_each_other_down_makes_a_step_as_much_longer_as_is_told(figures):
    one = predicted(**figures)
    both = overlap.Interference(compute={ALL: 1 + SLOWER}, communication={ALL: 1 + SLOWER})
    slower = predicted.__wrapped__(clock=replace(CLOCK, interference=both), **figures)
    assert 0 < slower.parts.step_ns - one.parts.step_ns <= SLOWER * one.parts.overlapped_ns


def test_ranks_that_are_too_many_and_groups_that_are_illegal_are_refused():
    with pytest.raises(overlap.UsageError) as refused:
        estimate(DENSE, Layout(dp=2, global_batch=2), MACHINE, CLOCK)
    assert (
        str(refused.value)
        == "layout: tp=1 pp=1 dp=2 makes 2 ranks, but trn2.48xlarge has 64; choose sizes with that product"
    )
    with pytest.raises(ValueError, match="rule trn2-outer-inner-lnc2"):
        predicted(tp=32)


@pytest.mark.parametrize(
    "figures",
    [
        {"tp": 4},
        {"pp": 4, "zero": 0},
        {"dp": 4, "ep": 4},
        {"dp": 4, "zero": 3},
        {"dp": 4, "zero": 3, "replicate": 2},
        {"dp": 2, "pp": 2, "overlap_gather": True},
    ],
    ids=str,
)
def test_the_same_step_runs_on_the_real_clock_and_sends_the_same(figures):
    model = Model(
        name="tiny", layers=4, hidden=16, heads=4, ffn=32, vocabulary=64, sequence=8, experts=4, top_k=2
    )  # fmt: skip
    layout = Layout(global_batch=4 * figures.get("dp", 1), dtype="float32", **figures)
    recorders = []

    async def main(rank):
        await train(rank, model, layout)
        recorders.append(rank.recorder)

    overlap.run(main, ranks=4)
    clock = replace(CLOCK, shapes_only=True, dtype="float32")
    assert sent_by(Timeline.collect(recorders, world_size=4)) == sent_by(simulate_step(model, layout, SMALL, clock))


def sent_by(timeline):
    return Counter(
        (span.rank, span.lane, span.info.op, span.info.nbytes) for span in timeline.spans if span.kind == "comm"
    )


def test_collectives_count_in_a_bound_unless_it_is_asked_without_them():
    one = predicted(tp=8, pp=2, microbatches=4)
    where = one.model, one.layout, MACHINE, CLOCK
    assert bound_s(*where) == bound_s(*where, planned=True) > bound_s(*where, planned=False)


def printed(one):
    return list(page(one, 0.0, 400))


def test_the_page_tells_how_long_one_operation_is_in_flight():
    (key, amount), *_ = predicted(tp=4).parts.operations.items()
    one = predicted(tp=4)
    amount = replace(amount, count=4.0, busy_ns=12_000_000.0)
    told = printed(replace(one, parts=replace(one.parts, operations={key: amount})))
    lines = [line for line in told if line.startswith(("operation", f"{key.dimension} {key.op}"))]
    at = lines[0].index("in flight") + len("in flight")
    assert lines[1][:at].endswith(" 3 ms")


def test_the_verdict_names_a_reason_only_where_something_is_exposed():
    one = predicted(tp=4)
    hidden = {key: replace(amount, wire_ns=0.0, waiting_ns=0.0) for key, amount in one.parts.operations.items()}
    assert ", mostly " in printed(one)[-1]
    assert ", exposed 0%, idle " in printed(replace(one, parts=replace(one.parts, operations=hidden)))[-1]


@pytest.mark.slow
def test_a_step_takes_as_long_after_much_else(monkeypatch):
    """Nothing that other worlds leave in the process, such as cached plans or addresses of objects, changes a time."""
    asked = [{"tp": 8, "pp": 2}, {"tp": 4, "pp": 2, "schedule": "zb-h1"}, {"zero": 3}, {"tp": 4, "cp": 4}]
    expected = [time_in_a_fresh_process(figures) for figures in asked]
    for machine, others in ((SMALL, {"tp": 2}), (MACHINE, {"tp": 2, "pp": 2}), (MACHINE, {"tp": 8, "zero": 1})):
        predicted.__wrapped__(machine=machine, **others)
    scattered = random.Random(3)
    numbers = defaultdict(lambda: scattered.getrandbits(60))
    monkeypatch.setattr(Flow, "__hash__", lambda flow: numbers[flow.key])
    kept = []  # so that objects lie elsewhere
    for turn in range(2):
        order = scattered.sample(range(len(asked)), len(asked))
        again = {}
        for place in order:
            kept.append([object() for _ in range(scattered.randrange(10_000))])
            again[place] = time_of(asked[place])
        assert [again[place] for place in range(len(asked))] == expected, turn


def time_of(figures):
    return predicted.__wrapped__(microbatches=4, **figures).step_s


def time_in_a_fresh_process(figures):
    program = f"from tests.planning.test_step import time_of; print(time_of({figures}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    return float(done.stdout)
