"""The training strategies as programs for the virtual clock: each one waits, or overlaps, as it is told."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from overlap import Rank, parallel
from overlap.parallel import schedules

LAYERS, HIDDEN, TOKENS = 8, 4096, 2048
"""Layers, width of their square matrices (as with 7 billion weights), and tokens of a batch."""

TENSOR_TOKENS = 8192  # with few tokens, adding the gradients of the two halves takes longest

PRODUCT_FLOPS = 2.0 * TOKENS * HIDDEN * HIDDEN
"""Operations of a layer's forward; backward takes twice as many, for its input and for its weights."""

MICROBATCHES = 8
TP = 8  # neighbouring cores


def _stand_for_product(_: object, x: Any) -> Any:
    """Stand for a product: only its shape and time matter."""
    return x


async def data_parallel(rank: Rank, steps: int, overlapped: bool) -> None:
    """Wait for each layer and average all gradients at the end, or hand gradients over as they come."""
    await _train_by_layers(
        rank, parallel.DataParallel(rank, _weights(rank), optimizer=parallel.SGD(0.1)), steps, overlapped
    )


async def zero(rank: Rank, steps: int, overlapped: bool) -> None:
    """Gather a layer's weights when its turn comes (ZeRO-3), or a layer ahead."""
    depth = 1 if overlapped else 0
    model = parallel.Sharded(rank, _weights(rank), optimizer=parallel.SGD(0.1), stage=3, depth=depth)
    await _train_by_layers(rank, model, steps, overlapped)


async def _train_by_layers(rank: Rank, model: Any, steps: int, overlapped: bool) -> None:
    """Train by the loop that users write; without overlap it waits for each compute, and reduces at the end."""
    names = [f"layer{i}" for i in range(LAYERS)]
    gradient = rank.empty((HIDDEN, HIDDEN))
    for step in range(steps):
        with rank.step(step):
            x, backs = cast("Any", rank.empty((TOKENS, HIDDEN))), dict[str, Any]()
            for name in names:
                x = rank.compute(_stand_for_product, model[name], x, name="forward", flops=PRODUCT_FLOPS)
                if not overlapped:
                    await x
            for name in reversed(names):
                x = rank.compute(_stand_for_product, model[name], x, name="backward", flops=2 * PRODUCT_FLOPS)
                backs[name] = rank.compute(_stand_for_product, x, gradient, name="backward", seconds=0.0)
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


def _weights(rank: Rank) -> dict[str, Any]:
    return {f"layer{i}": rank.empty((HIDDEN, HIDDEN)) for i in range(LAYERS)}


async def tensor_parallel(rank: Rank, steps: int, overlapped: bool) -> None:
    """Sum the activations of a whole batch, or compute one half while the other half is summed."""
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


async def pipeline(rank: Rank, steps: int, overlapped: bool) -> None:
    """Run all forwards and then all backwards (GPipe), or fill the bubble (ZB-H1)."""
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
            await rank.compute(_stand_for_product, None, list(passed.gradients.values()), name="gradients", seconds=0.0)
