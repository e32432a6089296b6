"""Local SGD and DiLoCo against plain numpy, and their outer reductions against the clock."""

from itertools import pairwise

import numpy as np
import pytest

import overlap
from overlap import parallel

from .programs import alone, backward, forward, loss_gradient, samples, train, weights

SGD = parallel.SGD(0.1)


def inner_step(params, rank, ranks, step, lr=0.1):
    """One step of plain descent of one rank on its own samples."""
    x, y = samples(step, ranks)[:, rank::ranks]
    acts = []
    for w in params.values():
        acts.append(x)
        x = forward(w, x)
    grad = loss_gradient(x, y)
    found = {}
    for name, seen in zip(reversed(params), reversed(acts), strict=True):
        grad, dw = backward(params[name], seen, grad)
        found[name] = params[name] - lr * dw
    return {name: found[name] for name in params}


def reference(ranks, steps, *, period, delay, outer, fragments=1):
    """What each rank has in the end, with `outer(whole, mean change, velocity)` for each parameter."""
    names = list(weights())
    whole, velocity = weights(), dict.fromkeys(names, 0.0)
    mine = [dict(whole) for _ in range(ranks)]
    sent = {}

    def send(step, name):
        sent[name] = (step, [params[name] for params in mine], np.mean([whole[name] - p[name] for p in mine], axis=0))

    def apply(step, name):
        at, then, mean = sent.pop(name)
        whole[name], velocity[name] = outer(whole[name], mean, velocity[name])
        for params, before in zip(mine, then, strict=True):
            params[name] = whole[name] if at == step else params[name] + (whole[name] - before)

    last = dict.fromkeys(names, 0)
    for step in range(1, steps + 1):
        mine = [inner_step(params, rank, ranks, step - 1) for rank, params in enumerate(mine)]
        for number, name in enumerate(names):
            if name in sent and sent[name][0] + delay == step:
                apply(step, name)
            if step % period == (number % fragments + 1) * period // fragments % period:
                last[name] = step
                send(step, name)
                if delay == 0:
                    apply(step, name)
    for name in names:
        if name in sent:
            apply(steps, name)
        if last[name] < steps:
            send(steps, name)
            apply(steps, name)
    return mine


def average(whole, mean, velocity):
    return whole - mean, velocity


def nesterov(whole, mean, velocity):
    velocity = 0.9 * velocity + mean
    return whole - 0.7 * (mean + 0.9 * velocity), velocity


def check(make, expected, *, steps, ranks=3, clock="real"):
    async def main(rank):
        return await train(rank, make, steps)

    found = overlap.run(main, ranks=ranks, clock=clock, timeout_s=60)
    for mine, theirs in zip(found, expected, strict=True):
        assert {name: w.tobytes() for name, w in mine.items()} == {name: w.tobytes() for name, w in found[0].items()}
        for name, w in theirs.items():
            np.testing.assert_allclose(mine[name], w, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("clock", ["real", "virtual"])
@pytest.mark.parametrize(("period", "delay", "fragments"), [(3, 0, 1), (3, 1, 1), (4, 3, 1), (4, 1, 2), (4, 0, 4)])
def test_local_sgd_averages_what_ranks_have_learned_apart(period, delay, fragments, clock):
    def make(rank):
        options = {"period": period, "delay": delay, "fragments": fragments}
        return parallel.LocalSGD(rank, weights(), optimizer=SGD, **options)

    options = {"period": period, "delay": delay, "fragments": fragments}
    check(make, reference(3, 10, outer=average, **options), steps=10, clock=clock)


@pytest.mark.parametrize(("delay", "fragments"), [(0, 1), (1, 1), (1, 2)])
def test_diloco_takes_the_mean_change_for_a_gradient(delay, fragments):
    def make(rank):
        return parallel.DiLoCo(rank, weights(), optimizer=SGD, period=4, delay=delay, fragments=fragments)

    check(make, reference(3, 12, period=4, delay=delay, fragments=fragments, outer=nesterov), steps=12)


def test_local_sgd_of_one_step_is_data_parallel():
    expected = [alone(SGD, ranks=4)] * 4
    check(lambda rank: parallel.LocalSGD(rank, weights(), optimizer=SGD, period=1, delay=0), expected, steps=5, ranks=4)


def test_one_rank_trains_as_without_it():
    optimizer = parallel.Adam(1e-2)
    check(lambda rank: parallel.LocalSGD(rank, weights(), optimizer=optimizer, period=2, delay=1),
          [alone(optimizer, ranks=1)], steps=5, ranks=1)  # fmt: skip


def test_ranks_begin_with_the_weights_of_the_first():
    def make(rank):
        return parallel.LocalSGD(rank, weights(seed=rank.rank), optimizer=SGD, period=3)

    check(make, reference(3, 4, period=3, delay=1, outer=average), steps=4)


def outer_spans(delay, steps=8, period=4):
    """When outer steps travel and what rank 0 computes, in virtual time; inner steps take 10 ms."""
    big = {"w": np.zeros((256, 256), np.float32)}

    async def main(rank):
        model = parallel.LocalSGD(rank, big, optimizer=SGD, period=period, delay=delay)
        for step in range(steps):
            with rank.step(step):
                model.reduce("w", rank.compute(np.ones_like, model["w"], seconds=0.01, name="backward"))
                model.step()
        await model.finish()
        return rank.recorder.spans()

    spans = overlap.run(main, ranks=8, cluster="trn1.32xlarge", clock="virtual")[0]
    return [each for each in spans if each.name == "outer step"], [each for each in spans if each.name == "backward"]


def test_the_outer_reduction_travels_under_the_next_inner_step():
    sent, inner = outer_spans(delay=1)
    assert len(sent) == 2
    assert inner[4].start_ns <= sent[0].start_ns < sent[0].end_ns < inner[4].end_ns
    gaps = [after.start_ns - before.end_ns for before, after in pairwise(inner)]
    assert gaps[0] == gaps[1], "of inner updates alone"
    assert gaps[3] < sent[0].duration_ns + gaps[0], "and of the copy of what is sent"


def test_without_a_delay_it_is_waited_for():
    sent, inner = outer_spans(delay=0)
    assert inner[3].end_ns < sent[0].start_ns < sent[0].end_ns <= inner[4].start_ns


def test_inner_steps_send_nothing():
    sent, _ = outer_spans(delay=1, steps=9, period=3)
    assert len(sent) == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"period": 0}, "period: expected a whole number from 1, got 0"),
        ({"period": 4, "delay": 4}, "delay: expected less than the period of 4, got 4"),
        ({"period": 4, "delay": -1}, "delay: expected a whole number from 0, got -1"),
        ({"period": 4, "fragments": 3}, "fragments: expected a number that divides the period of 4, got 3"),
        ({"period": 5, "fragments": 5}, "fragments: expected at most one for each of the 4 parameters, got 5"),
    ],
)
def test_arguments_that_cannot_be_meant(options, told):
    async def main(rank):
        with pytest.raises(overlap.UsageError) as caught:
            parallel.LocalSGD(rank, weights(), optimizer=SGD, **options)
        assert str(caught.value) == told

    overlap.run(main, ranks=1)


def test_gradients_that_are_missing_or_come_twice_are_named():
    async def main(rank):
        model = parallel.DiLoCo(rank, weights(), optimizer=SGD)
        model.reduce("w1", weights()["w1"])
        with pytest.raises(overlap.UsageError) as caught:
            model.reduce("w1", weights()["w1"])
        assert str(caught.value) == (
            "reduce: the gradient of 'w1' has been handed over in step 0 already; of a weight that is used twice, add "
            "the gradients up and hand over the sum; or has model.step() been forgotten?"
        )
        with pytest.raises(overlap.UsageError) as caught:
            model.step()
        assert str(caught.value) == "step: no gradient of 'w0', 'w2', 'w3' in step 0; hand it over"

    overlap.run(main, ranks=1)


def test_nesterov_refuses_what_cannot_be_meant():
    for options, told in (
        ({"lr": -1}, "lr: expected a number from 0, or a function of the step, got -1"),
        ({"momentum": 1}, "momentum: expected at least 0 and less than 1, got 1"),
    ):
        with pytest.raises(overlap.UsageError) as caught:
            parallel.Nesterov(**options)
        assert str(caught.value) == told
