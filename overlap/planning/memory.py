"""What a rank holds of device memory at its fullest. Pure.

States, for N replicas, Adam, weights and gradients of two bytes, 12 bytes of copy and means in float32:

======  ============  ============  ============
zero    weights       gradients     optimizer
======  ============  ============  ============
0       2             2             12
1       2             2             12 / N
2       2             2 / N         12 / N
3       2 / N         2 / N         12 / N
======  ============  ============  ============

Rajbhandari et al., arXiv 1910.02054, section 5. Zero 2 and 3 hold two buckets or layers in whole besides.
"""

from __future__ import annotations

from dataclasses import dataclass

from .amounts import Amounts
from .layout import Layout
from .model import Model

_OPTIMIZER_BYTES = 12  # float32: the weight, and Adam's two means
_FILLED = 3  # microbatches for each stage, after which a pipeline holds no more
_SCORE_BYTES = 8  # of a word and token: the scores in float32, and their gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the rank that holds most."""

    stage: int  # Its place in the pipeline
    weights: float  # With those that it has gathered
    gradients: float  # Likewise
    optimizer: float  # State
    activations: float  # Of all microbatches that are under way, and the scores of words

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_of(model: Model, layout: Layout) -> Memory:
    """Return what the fullest rank holds."""
    amounts = Amounts(model=model, layout=layout)
    return max((_on(amounts, rank) for rank in range(layout.pp)), key=lambda each: each.total)


def _on(amounts: Amounts, rank: int) -> Memory:
    layout, width = amounts.layout, amounts.itemsize
    stages = list(layout.stages_of(rank))
    held = [amounts.held(stage) for stage in stages]
    dense = sum(each for each, _ in held) + sum(map(amounts.tables, stages))
    experts = sum(each for _, each in held)
    kinds = [one for stage in stages for one, _ in amounts.model.kinds(layout.layers_of(amounts.model, stage))]
    whole = max((amounts.dense(one) + amounts.own_experts(one) for one in kinds), default=0)

    def shared(from_stage: int) -> float:
        """Parameters, shared by the replicas of each from a stage of ZeRO on."""
        if layout.zero < from_stage:
            return float(dense + experts)
        return dense / layout.replicas + experts / (layout.replicas // layout.ep)

    gathered = 2.0 * whole * width if layout.zero == 3 else 0.0
    reduced = 2.0 * (whole * width if layout.zero == 3 else min(layout.bucket_bytes, dense * width))
    return Memory(
        stage=rank,
        weights=shared(3) * width + gathered,
        gradients=shared(2) * width + (reduced if layout.zero >= 2 else 0.0),
        optimizer=shared(1) * _OPTIMIZER_BYTES,
        activations=_activations(amounts, rank, stages),
    )


def _activations(amounts: Amounts, rank: int, stages: list[int]) -> float:
    layout, model = amounts.layout, amounts.model
    few = layout.with_microbatches(min(layout.microbatches, _FILLED * layout.pp * layout.chunks))
    live = few.pipeline().peak_live[rank]
    kinds = [each for stage in stages for each in model.kinds(layout.layers_of(model, stage))]
    kept = sum(_kept(amounts, one) * like for one, like in kinds) / layout.chunks
    once = max(_whole(amounts, one) for one, _ in kinds) if layout.checkpointing == "full" and kinds else 0.0
    last = layout.pp * layout.chunks - 1
    scores = _SCORE_BYTES * amounts.tokens * model.vocabulary / layout.tp if last in stages else 0.0
    return live * kept + once + scores


def _kept(amounts: Amounts, layer: int) -> float:
    """Return what is kept of a layer and a microbatch: all, all but scores, or what goes in."""
    if amounts.layout.checkpointing == "full":
        return float(amounts.rows * amounts.model.hidden * amounts.itemsize)
    return _whole(amounts, layer)


def _whole(amounts: Amounts, layer: int) -> float:
    """Return what the backward pass of a layer needs: what goes into each matrix, norm and activation."""
    model, layout, tokens = amounts.model, amounts.layout, amounts.tokens
    attention = model.query_width + model.kv_width + model.value_width
    if model.has_experts(layer):
        inside, into = (3 if model.gated else 2) * model.expert_width, model.top_k * layout.imbalance
        perceptron = (model.top_k * layout.imbalance + model.shared_experts) * inside
    else:
        perceptron, into = float((3 if model.gated else 2) * model.ffn), 1.0
    held = amounts.rows * model.hidden * (3 + into) + tokens * (attention + perceptron) / layout.tp
    total = held * amounts.itemsize
    if layout.checkpointing == "none":  # scores and their softmax
        total += 2.0 * amounts.itemsize * tokens * (model.sequence // layout.cp) * model.heads / layout.tp
    return float(total)
