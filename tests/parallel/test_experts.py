"""A mixture of experts: what a loop over all experts computes, on any number of ranks; what travels under what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel import Experts, Local
from tests.core.companies import by_sockets, run_far
from tests.core.worlds import run
from tests.parallel import blocks as b
from tests.simulation.worlds import mesh, simulate, spans

Array = np.ndarray
EXPERTS, STEPS = 4, 3


def all_weights(*, shared: bool) -> dict[str, Any]:
    """Experts that are one matrix, for all ranks."""
    weights = {"router": b.draw(1, b.WIDTH, EXPERTS) * 0.5, "experts": [expert(i) for i in range(EXPERTS)]}
    return weights | ({"shared": expert(99)} if shared else {})


def expert(seed: int) -> dict[str, Array]:
    return {"weight": b.draw(10 + seed, b.WIDTH, b.WIDTH) * 0.4, "bias": b.draw(50 + seed, b.WIDTH) * 0.1}


def whole_backward(w, x, dy):
    return b.linear_input(w, x, dy)[0], b.linear_weights(w, (x, dy))


def loop(w: dict[str, Any], x: Array, target: Array, *, top_k: int, normalised: bool, balance: float) -> dict[str, Any]:
    """Compute it on one rank, expert by expert; return the gradients of the mean square."""
    p = np.exp(x @ w["router"])
    p /= p.sum(-1, keepdims=True)
    chosen = np.argsort(-p, axis=1)[:, :top_k]
    weight = np.zeros_like(p)
    for t, experts in enumerate(chosen):
        weight[t, experts] = p[t, experts] / (p[t, experts].sum() if normalised else 1)
    outs = np.stack([b.linear(each, x)[0] for each in w["experts"]], 1)
    y = (weight[:, :, None] * outs).sum(1) + (b.linear(w["shared"], x)[0] if "shared" in w else 0)
    dy = b.square_loss(y, target)[0]
    d_weight = (dy[:, None] * outs).sum(-1)
    dp = np.zeros_like(p)
    for t, experts in enumerate(chosen):
        own, total = d_weight[t, experts], p[t, experts].sum()
        dp[t, experts] = (own - (own * weight[t, experts]).sum()) / total if normalised else own
    dp += balance * EXPERTS * np.bincount(chosen.ravel(), minlength=EXPERTS) / chosen.size / len(x)
    gradients: dict[str, Any] = {"router": x.T @ (p * (dp - (dp * p).sum(-1, keepdims=True)))}
    gradients["experts"] = [b.linear_weights({}, (x, dy * weight[:, e, None])) for e in range(EXPERTS)]
    return gradients | ({"shared": b.linear_weights({}, (x, dy))} if "shared" in w else {})


def descend(w: Any, dw: Any) -> Any:
    if isinstance(w, dict):
        return {name: descend(w[name], dw[name]) for name in w}
    return [descend(*each) for each in zip(w, dw, strict=True)] if isinstance(w, list) else w - b.LR * dw


def learnt_by_loop(*, shared: bool, **options: Any) -> dict[str, Any]:
    w = all_weights(shared=shared)
    for step in range(STEPS):
        w = descend(w, loop(w, *b.batch(step), **options))
    return w


def layer_of(rank: overlap.Rank, group: overlap.Group, *, shared: bool, halves: bool, **options: Any) -> Experts:
    ways = {"backward_input": b.linear_input, "backward_weights": b.linear_weights}
    every = Local(rank, b.linear, whole_backward, costs={name: {"seconds": 0} for name in ("forward", "backward")})
    costs = {name: {"seconds": 0} for name in ("route", "forward", "backward", *ways)}
    return Experts(
        rank, group, b.linear, **(ways if halves else {"backward": whole_backward}), experts=EXPERTS,
        shared=every if shared else None, costs=costs,
        balance_over=rank.world if group.size < rank.world_size else None, **options,
    )  # fmt: skip


async def train(rank: overlap.Rank, ep: int, shared: bool, halves: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Train on a mesh: `ep` ranks share the experts; return what this rank has learnt, and its first expert."""
    axes = rank.mesh(edp=rank.world_size // ep, ep=ep)
    group, sgd = axes["ep"], parallel.SGD(b.LR)
    layer = layer_of(rank, group, shared=shared, halves=halves, **options)
    weights, each = all_weights(shared=shared), EXPERTS // ep
    mine = weights.pop("experts")[group.rank * each : (group.rank + 1) * each]
    everywhere = parallel.DataParallel(rank, weights, optimizer=sgd)
    here = parallel.DataParallel(rank, mine, optimizer=sgd, group=axes["edp"])
    rows = slice(rank.rank * b.ROWS // rank.world_size, (rank.rank + 1) * b.ROWS // rank.world_size)
    for step in range(STEPS):
        x, target = (whole[rows] for whole in b.batch(step))
        w: dict[str, Any] = {"router": everywhere["router"]}
        w["experts"] = [{name: here[f"{i}.{name}"] for name in ("weight", "bias")} for i in range(each)]
        if shared:
            w["shared"] = {name: everywhere[f"shared.{name}"] for name in ("weight", "bias")}
        y, kept = await layer.forward(w, x)
        _, dw = layer.backward(w, kept, rank.compute(b.square_loss, y, target, seconds=0)[0])
        for i in range(each):
            for name in ("weight", "bias"):
                here.reduce(f"{i}.{name}", dw["experts"][i][name])
        for name in ("weight", "bias") if shared else ():
            everywhere.reduce(f"shared.{name}", dw["shared"][name])
        everywhere.reduce("router", dw["router"])
        everywhere.step()
        here.step()
    return {**await everywhere.finish(), "experts": await here.finish()}


def as_by_loop(found: list[dict[str, Any]], ep: int, *, shared: bool, options: dict[str, Any]) -> bool:
    expected, each = learnt_by_loop(shared=shared, **options), EXPERTS // ep
    return all(
        b.close(w, expected | {"experts": expected["experts"][rank % ep * each : (rank % ep + 1) * each]})
        for rank, w in enumerate(found)
    )


ONE = {"top_k": 1, "normalised": False, "balance": 0.0}
TWO = {"top_k": 2, "normalised": True, "balance": 0.01}
ALL = {"top_k": 4, "normalised": False, "balance": 0.0}


@pytest.mark.parametrize("options", [ONE, TWO, ALL], ids=["top 1", "top 2", "all"])
@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_ranks_with_some_experts_learn_what_a_loop_over_all_learns(
    ranks: int, ep: int, halves: bool, options: dict[str, Any]
) -> None:
    found = run(train, ranks, ep, halves, halves, options)
    assert as_by_loop(found, ep, shared=halves, options=options)


@pytest.mark.slow
def test_in_virtual_time() -> None:
    found, _ = simulate(train, 4, 2, True, True, TWO)
    assert as_by_loop(found, 2, shared=True, options=TWO)


@pytest.mark.slow
@pytest.mark.parametrize("options", [ONE, TWO], ids=["top 1", "top 2"])
def test_over_efa(options: dict[str, Any]) -> None:
    assert as_by_loop(run_far(train, 2, 2, 4, True, True, options, wires=by_sockets), 4, shared=True, options=options)


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_all_tokens_of_all_ranks_to_one_expert(halves: bool) -> None:
    """The others have no rows, and gradients of zero; tokens keep their shape, and their gradient is exact."""

    async def main(rank: overlap.Rank) -> list[bool]:
        layer = layer_of(rank, rank.world, shared=False, halves=halves, top_k=1)
        mine = [expert(2 * rank.rank), expert(2 * rank.rank + 1)]
        w = {"router": np.outer(np.ones(b.WIDTH), [0, 0, 9.0, 0]), "experts": mine}
        x = np.abs(b.draw(rank.rank, 2, 3, b.WIDTH)) + 1
        y, kept = await layer.forward(w, x)
        dx, dw = layer.backward(w, kept, np.ones_like(x))
        gradients = await dw["experts"]
        biases = [gradient["bias"].tolist() for gradient in gradients]
        used = [[6.0] * b.WIDTH if 2 * rank.rank + i == 2 else [0.0] * b.WIDTH for i in range(2)]
        want = b.linear(expert(2), x)[0], np.ones_like(x) @ expert(2)["weight"].T
        return [
            layer.load(kept).tolist() == [0, 0, 12, 0],
            b.close([await y, await dx], want),
            b.close(biases, used),
        ]

    assert run(main, 2) == [[True] * 3] * 2


def test_the_gradient_of_a_token_is_that_of_finite_differences() -> None:
    async def main(rank: overlap.Rank) -> float:
        layer = layer_of(rank, rank.world, shared=True, halves=False, **TWO | {"balance": 0.0})
        w, (x, dy) = all_weights(shared=True), b.batch(0)

        async def passed(x: Array) -> Array:
            return await (await layer.forward(w, x))[0]

        _, kept = await layer.forward(w, x)
        dx = await layer.backward(w, kept, dy)[0]
        worst = 0.0
        for place in [(0, 0), (3, 5), (15, 2)]:
            step = np.zeros_like(x)
            step[place] = 1e-6
            slope = ((await passed(x + step) - await passed(x - step)) * dy).sum() / 2e-6
            worst = max(worst, abs(slope - dx[place]))
        return worst

    assert run(main, 1)[0] < 1e-8


# -- what travels under what -------------------------------------------------------------------------------------------


async def forward_and_back(rank: overlap.Rank) -> None:
    """Each rank's 16 tokens go to both experts; every compute takes milliseconds, an all-to-all one."""
    ms, eighth = {"seconds": 4e-3}, {"seconds": 1e-3 / 8}
    layer = Experts(
        rank, rank.world, b.linear, experts=2, top_k=2,
        backward_input=b.linear_input, backward_weights=b.linear_weights,
        shared=Local(rank, shared, whole_backward, costs={"forward": ms, "backward": ms}),
        costs={"route": ms, "forward": eighth, "backward_input": eighth, "backward_weights": eighth},
    )  # fmt: skip
    w = {"router": b.draw(0, b.WIDTH, 2), "experts": [expert(rank.rank)], "shared": expert(9)}
    y, kept = await layer.forward(w, b.draw(rank.rank, 16, b.WIDTH))
    dx, dw = layer.backward(w, kept, await y)
    await dx
    await dw["experts"]


def shared(w, x):
    return b.linear(w, x)


def test_rows_travel_under_the_shared_expert_and_gradients_under_what_does_not_need_them() -> None:
    _, timeline = simulate(forward_and_back, 2, cluster=mesh(2, bytes_per_s=16 * b.WIDTH * 8 / 1e-3))
    computes = {name: (start, end) for name, start, end in spans(timeline, 0, "compute")}
    travels = {name: (start, end) for name, start, end in spans(timeline, 0, "comm")}
    under = {
        "tokens to experts": "shared",
        "gradients to experts": "route",  # its gradient
        "gradients to tokens": "backward_weights",
    }
    for what, compute in under.items():
        start, end = travels[what]
        assert end - start == 1_000_000
        assert computes[compute][0] <= start < end <= computes[compute][1], what


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"experts": 3}, "experts: 3 do not divide by the 2 ranks of group 'ep'; choose a multiple of 2"),
        ({"experts": 0}, "experts: 0 do not divide by the 2 ranks of group 'ep'; choose a multiple of 2"),
        ({"top_k": 5}, "top_k: expected 1 to 4, the number of experts, got 5"),
        ({"backward": None}, "backward: give it, or its halves backward_input and backward_weights"),
        (
            {"backward_weights": b.linear_weights},
            "backward_input, backward_weights: one is the half of the other; give both, or none",
        ),
    ],
)
def test_what_cannot_be_meant_is_told_on_every_rank(wrong: dict[str, Any], told: str) -> None:
    async def main(rank: overlap.Rank) -> str:
        given = {"backward": whole_backward, "experts": 4} | wrong
        with pytest.raises(overlap.UsageError) as caught:
            Experts(rank, rank.mesh(ep=2)["ep"], b.linear, **given)
        return str(caught.value)

    assert run(main, 2) == [told] * 2
