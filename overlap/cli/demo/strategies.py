"""The training strategies as demos: each the same program twice, once waiting and once not, on modelled instances.

Arrays have no data but where it decides who sends what, so what is shown is time alone: the virtual clock knows what
computes and links take.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ... import Rank, parallel
from ...parallel import schedules

LAYERS, HIDDEN, TOKENS = 8, 4096, 2048
"""Of the model: square matrices, as wide as those of a transformer with 7 billion weights; and tokens of a batch."""

TENSOR_TOKENS = 8192  # all of them pass on every rank; with few, adding up the gradients of two parts takes longest

PRODUCT_FLOPS = 2.0 * TOKENS * HIDDEN * HIDDEN
"""Of a layer's forward; backward takes twice as many, for its input and for its weights."""

MICROBATCHES = 8
TP = 8  # neighbouring cores

PERIOD = 3
"""Steps that ranks train apart: as many as are looked at."""

EXPERTS, EXPERT_WIDTH, EXPERT_TOKENS = 64, 1024, 256
"""Of a layer, columns of a token, and tokens of a rank; an expert is four times as wide inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A demo."""

    title: str  # What it is, for a list
    cluster: str  # Where it runs
    without: str  # What the first program does, as the end of a sentence
    overlapped: str  # What the second does
    train: Callable[[Rank, int, bool], Awaitable[None]]  # The program: some steps, waiting or not
    has_data: bool = False  # Whether arrays have


def _same(_: object, x: Any) -> Any:
    """Stand for a product: here only shapes matter, and time."""
    return x


async def _data(rank: Rank, steps: int, overlapped: bool) -> None:
    await _loop(rank, parallel.DataParallel(rank, _weights(rank), optimizer=parallel.SGD(0.1)), steps, overlapped)


async def _zero(rank: Rank, steps: int, overlapped: bool) -> None:
    depth = 1 if overlapped else 0
    model = parallel.Sharded(rank, _weights(rank), optimizer=parallel.SGD(0.1), stage=3, depth=depth)
    await _loop(rank, model, steps, overlapped)


async def _loop(rank: Rank, model: Any, steps: int, overlapped: bool) -> None:
    """Train by the loop that users write; without overlap it waits for each compute, and reduces at the end."""
    names = [f"layer{i}" for i in range(LAYERS)]
    gradient = rank.empty((HIDDEN, HIDDEN))
    for step in range(steps):
        with rank.step(step):
            x, backs = cast("Any", rank.empty((TOKENS, HIDDEN))), dict[str, Any]()
            for name in names:
                x = rank.compute(_same, model[name], x, name="forward", flops=PRODUCT_FLOPS)
                if not overlapped:
                    await x
            for name in reversed(names):
                x = rank.compute(_same, model[name], x, name="backward", flops=2 * PRODUCT_FLOPS)
                backs[name] = rank.compute(_same, x, gradient, name="backward", seconds=0.0)
                if overlapped:
                    model.reduce(name, backs[name])
                else:
                    await x
            if not overlapped:
                for name, back in backs.items():
                    model.reduce(name, back)
            model.step()
            if not overlapped and isinstance(model, parallel.DataParallel):
                await model.finish()
    await model.finish()


async def _apart(rank: Rank, steps: int, overlapped: bool) -> None:
    delay = PERIOD - 1 if overlapped else 0
    model = parallel.DiLoCo(rank, _weights(rank), optimizer=parallel.SGD(0.1), period=PERIOD, delay=delay)
    await _loop(rank, model, steps, overlapped=True)


async def _experts(rank: Rank, steps: int, overlapped: bool) -> None:
    row = {"flops": 2 * 2.0 * EXPERT_WIDTH * 4 * EXPERT_WIDTH}  # two matrices
    row_back, all_rows = {"flops": 2 * row["flops"]}, {"flops": EXPERT_TOKENS * row["flops"]}
    all_back = {"flops": 2 * all_rows["flops"]}
    shared = parallel.Local(rank, _pass, _pass_back, costs={"forward": all_rows, "backward": all_back})
    layer = parallel.Experts(
        rank, rank.world, _pass, None if overlapped else _pass_back, experts=EXPERTS, top_k=2,
        backward_input=_pass_back if overlapped else None, backward_weights=_same if overlapped else None,
        shared=shared if overlapped else None,
        costs={"route": {"flops": 2.0 * EXPERT_TOKENS * EXPERT_WIDTH * EXPERTS}, "forward": row, "backward": row_back,
               "backward_input": row, "backward_weights": row},
    )  # fmt: skip
    draw = np.random.default_rng(rank.rank).standard_normal
    x, router = draw((EXPERT_TOKENS, EXPERT_WIDTH), np.float32), draw((EXPERT_WIDTH, EXPERTS), np.float32)
    weights = {"router": router, "experts": [None] * (EXPERTS // rank.world_size), "shared": None}
    for step in range(steps):
        with rank.step(step):
            y, kept = await layer.forward(weights, x)
            if not overlapped:
                await y  # type: ignore[misc]
                await shared.backward(None, *reversed(shared.forward(None, y)))[0]  # type: ignore[misc]
            dx, gradients = layer.backward(weights, kept, y)
            await dx  # type: ignore[misc]
            await cast("Any", gradients)["experts"]


def _pass(_: object, x: Any) -> tuple[Any, None]:
    """Stand for a forward that keeps nothing."""
    return x, None


def _pass_back(weights: object, _: object, dy: Any) -> tuple[Any, object]:
    """Stand for a backward."""
    return dy, weights


def _weights(rank: Rank) -> dict[str, Any]:
    return {f"layer{i}": rank.empty((HIDDEN, HIDDEN)) for i in range(LAYERS)}


async def _tensor(rank: Rank, steps: int, overlapped: bool) -> None:
    tp = rank.mesh(dp=rank.world_size // TP, tp=TP)["tp"]
    layers, parts = dict[str, parallel.Layer](), 2 if overlapped else 1
    for i in range(LAYERS // 2):
        layers[f"up{i}"] = parallel.ColumnLinear(rank, tp, HIDDEN, 4 * HIDDEN, tokens=TENSOR_TOKENS // parts)
        layers[f"down{i}"] = parallel.RowLinear(rank, tp, 4 * HIDDEN, HIDDEN, tokens=TENSOR_TOKENS // parts)
    cut = {"up": (HIDDEN, 4 * HIDDEN // TP), "down": (4 * HIDDEN // TP, HIDDEN)}
    weights = {name: {"weight": rank.empty(cut[name.rstrip("0123456789")])} for name in layers}
    model = parallel.Sequential(rank, layers, parts=parts)
    for step in range(steps):
        with rank.step(step):
            y, kept = await model.forward(weights, rank.empty((TENSOR_TOKENS, HIDDEN)))
            dx, _ = model.backward(weights, kept, y)
            await dx  # type: ignore[misc]


async def _pipeline(rank: Rank, steps: int, overlapped: bool) -> None:
    schedule = schedules.make("zb-h1" if overlapped else "gpipe", ranks=rank.world_size, microbatches=MICROBATCHES)
    rows = TOKENS // MICROBATCHES
    part = {"flops": PRODUCT_FLOPS / MICROBATCHES * LAYERS / 2}
    layer = parallel.Local(
        rank,
        lambda w, x: (x, x),
        lambda w, kept, dy: (dy, w),
        backward_input=lambda w, kept, dy: (dy, w),
        backward_weights=lambda w, kept: w,
        costs={
            "forward": part,
            "backward": {"flops": 2 * part["flops"]},
            "backward_input": part,
            "backward_weights": part,
        },
    )
    weights = {rank.rank: rank.empty((HIDDEN, HIDDEN))}
    boundary = (rows, HIDDEN), np.float32
    pipeline = parallel.Pipeline(
        rank, schedule, {rank.rank: layer}, weights, loss=lambda y, _: (y, 0.0), loss_cost={"seconds": 0.0},
        boundary=boundary,
    )  # fmt: skip
    batch = [rank.empty((rows, HIDDEN)) for _ in range(MICROBATCHES)]
    for step in range(steps):
        with rank.step(step):
            passed = await pipeline.run(batch, batch)
            await rank.compute(_same, None, list(passed.gradients.values()), name="gradients", seconds=0.0)


STRATEGIES = {
    "data": Strategy(
        title="data parallel: gradients travel under the backward pass, weights that forward needs first overtake",
        cluster="trn1.32xlarge x2",
        without="waits for each layer, averages all gradients after the backward pass, and waits for the update",
        overlapped="hands gradients over as they come, and never waits",
        train=_data,
    ),
    "zero": Strategy(
        title="ZeRO-3: weights are gathered a layer ahead of their use, and gradients scattered behind it",
        cluster="trn1.32xlarge",
        without="gathers a layer's weights when it comes to it, and scatters all gradients after the backward pass",
        overlapped="gathers a layer ahead, scatters gradients as they come, and never waits",
        train=_zero,
    ),
    "tensor": Strategy(
        title="tensor parallel: half of a batch is computed while the other half is summed over 8 cores",
        cluster="trn1.32xlarge",
        without="sums the activations of a whole batch after each pair of layers, which nothing can hide",
        overlapped="cuts each batch in two, one of which is computed while the other travels",
        train=_tensor,
    ),
    "pipeline": Strategy(
        title="pipeline parallel: zero bubble (ZB-H1) against GPipe, 8 microbatches on 32 stages",
        cluster="trn1.32xlarge",
        without="runs all forwards and then all backwards (GPipe)",
        overlapped="computes weights' gradients where it would have waited (ZB-H1)",
        train=_pipeline,
    ),
    "experts": Strategy(
        title="expert parallel: a shared expert and the gradients of weights are computed while tokens travel",
        cluster="trn2.3xlarge x2",
        without="computes the shared expert when the tokens are back, and whole backwards before gradients return",
        overlapped="computes the shared expert while tokens travel, and gradients of weights behind those of inputs",
        train=_experts,
        has_data=True,
    ),
    "diloco": Strategy(
        title="DiLoCo: ranks train apart for 3 steps, and the outer step travels under the next ones",
        cluster="trn1.32xlarge x2",
        without="waits for the outer step",
        overlapped="goes on meanwhile, and takes it in two steps later",
        train=_apart,
    ),
}
"""By name, in the order of a list."""
