"""Device memory of one rank in closed form. Pure.

Formulas: Korthikanti et al., arXiv 2205.05198; what saved tensors are is counted one by one, so that gated perceptrons
and few heads of keys come out right. Fused attention saves no scores. Factors of products in eight bits are saved so.

Memory of states, for N ranks that share them (of HSDP those of one group), Adam, weights and gradients of two bytes, 12
bytes of copy and means in float32:

======  ============  ============  ============
zero    weights       gradients     optimizer
======  ============  ============  ============
0       2             2             12
1       2             2             12 / N
2       2             2 / N         12 / N
3       2 / N         2 / N         12 / N
======  ============  ============  ============

Rajbhandari et al., arXiv 1910.02054, section 5. Zero 2 and 3 hold two buckets or layers in whole besides.
With a pipeline zero 3 is as zero 1: see `Layout.shards`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost.parameters import itemsize_bytes
from .amounts import Amounts
from .layout import Layout
from .model import Model

_OPTIMIZER_BYTES = 12  # float32: the weight, and Adam's two means
_SCORE_BYTES = 8  # of a word and token: the scores in float32, and their gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the rank that holds most."""

    stage: int  # Its place in the pipeline
    weights: float  # With those that it has gathered
    gradients: float  # Likewise
    optimizer: float  # State
    activations: float  # All microbatches in flight, and the scores of words

    @property
    def total(self) -> float:
        """Bytes of all four."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_of(model: Model, layout: Layout) -> Memory:
    """Return the memory of the fullest rank."""
    amounts = Amounts(model=model, layout=layout)
    return max((_on(amounts, rank) for rank in range(layout.pp)), key=lambda each: each.total)


def _on(amounts: Amounts, rank: int) -> Memory:
    layout, width = amounts.layout, amounts.itemsize
    stages = list(layout.stages_of(rank))
    held = [amounts.held(stage) for stage in stages]
    dense = sum(parameters for parameters, _ in held) + sum(map(amounts.tables, stages))
    experts = sum(parameters for _, parameters in held)
    kinds = [layer for stage in stages for layer, _ in amounts.model.kinds(layout.layers_of(amounts.model, stage))]
    largest = max((amounts.dense(layer) + amounts.own_experts(layer) for layer in kinds), default=0)

    def shared(from_stage: int) -> float:
        """Parameters, shared by the ranks that hold equal ones from a stage of ZeRO on."""
        if layout.shards < from_stage:
            return float(dense + experts)
        return dense / layout.sharers + experts / (layout.sharers // layout.ep)

    gathered = 2.0 * largest * width if layout.shards == 3 else 0.0
    reduced = 2.0 * (largest * width if layout.shards == 3 else min(layout.bucket_bytes, dense * width))
    return Memory(
        stage=rank,
        weights=shared(3) * width + gathered,
        gradients=shared(2) * width + (reduced if layout.shards >= 2 else 0.0),
        optimizer=shared(1) * _OPTIMIZER_BYTES,
        activations=_activations(amounts, rank, stages),
    )


def _activations(amounts: Amounts, rank: int, stages: list[int]) -> float:
    layout, model = amounts.layout, amounts.model
    live = layout.peak_live(rank)
    kinds = [each for stage in stages for each in model.kinds(layout.layers_of(model, stage))]
    kept = sum(_kept(amounts, one) * like for one, like in kinds) / layout.chunks
    once = max((_whole(amounts, one) - _kept(amounts, one) for one, _ in kinds), default=0.0)  # of a layer in its turn
    last = layout.pp * layout.chunks - 1
    scores = _SCORE_BYTES * amounts.tokens * model.vocabulary / layout.tp if last in stages else 0.0
    return live * kept + once + scores


def _kept(amounts: Amounts, layer: int) -> float:
    """Return the bytes kept of a layer and a microbatch: its input alone, or all that its backward needs."""
    if amounts.layout.checkpointing == "full":
        return float(amounts.rows * amounts.model.hidden * amounts.itemsize)
    return _whole(amounts, layer, amounts.layout.recomputed)


def _whole(amounts: Amounts, layer: int, recomputed: frozenset[str] = frozenset()) -> float:
    """Return the bytes that the backward pass of a layer needs: the inputs of each matrix, norm and activation.

    Operations that are computed again save no result of their own: half of the products' results are saved then.
    """
    model, layout, tokens = amounts.model, amounts.layout, amounts.tokens
    width, factor = amounts.itemsize, itemsize_bytes(layout.dtype)
    if model.has_experts(layer):
        into = float(model.top_k)
        inside = (into + model.shared_experts) * model.expert_width
    else:
        into, inside = 1.0, float(model.ffn)
    half = 0.5 if "products" in recomputed else 1.0
    # Between the halves: the inputs of both norms, and their results, which are factors.
    rows = (1 + half) * width + (0 if "norm" in recomputed else (1 + into) * factor)
    heads = half * (model.query_width + model.kv_width) + (0 if "attention" in recomputed else model.value_width)
    active = half * (2 if model.gated else 1) * width + (0 if "activation" in recomputed else factor)
    return float(amounts.rows * model.hidden * rows + tokens * (heads * width + inside * active) / layout.tp)
