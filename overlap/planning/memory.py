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
With a pipeline zero 3 is as zero 1: see `Layout.zero_in_step`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost.parameters import itemsize_bytes
from .amounts import Amounts
from .layout import Layout
from .model import Model

_OPTIMIZER_BYTES = 12  # float32: the weight, and Adam's two means
_SCORE_AND_GRADIENT_BYTES = 8  # of a word and token: the scores in float32, and their gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the rank that needs most, by kind."""

    stage: int  # Its place in the pipeline
    weights: float  # Weights, with those that the rank has gathered
    gradients: float  # Gradients, with whole buckets that are being reduced
    optimizer: float  # State of the optimizer
    activations: float  # Activations of all live microbatches, and the scores of words

    @property
    def total(self) -> float:
        """Bytes of weights, gradients, optimizer and activations."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_of(model: Model, layout: Layout) -> Memory:
    """Return the memory of the fullest rank: the largest over the places of the pipeline."""
    amounts = Amounts(model=model, layout=layout)
    return max((_memory_at(amounts, rank) for rank in range(layout.pp)), key=lambda each: each.total)


def _memory_at(amounts: Amounts, rank: int) -> Memory:
    """Return the memory of a rank at a place of the pipeline."""
    layout, itemsize = amounts.layout, amounts.itemsize
    stages = list(layout.stages_of(rank))
    held = [amounts.stage_parameters(stage) for stage in stages]
    dense = sum(parameters for parameters, _ in held) + sum(map(amounts.table_parameters, stages))
    experts = sum(parameters for _, parameters in held)
    kinds = [
        layer for stage in stages for layer, _ in amounts.model.layer_kinds(layout.layers_of(amounts.model, stage))
    ]
    largest = max((amounts.dense_parameters(layer) + amounts.expert_parameters(layer) for layer in kinds), default=0)

    def parameters_from(from_stage: int) -> float:
        """Return the parameters on a rank: a share of them if the step has this stage of ZeRO or a later one."""
        if layout.zero_in_step < from_stage:
            return float(dense + experts)
        return dense / layout.sharers + experts / (layout.sharers // layout.ep)

    gathered = 2.0 * largest * itemsize if layout.zero_in_step == 3 else 0.0
    reduced = 2.0 * (largest * itemsize if layout.zero_in_step == 3 else min(layout.bucket_bytes, dense * itemsize))
    return Memory(
        stage=rank,
        weights=parameters_from(3) * itemsize + gathered,
        gradients=parameters_from(2) * itemsize + (reduced if layout.zero_in_step >= 2 else 0.0),
        optimizer=parameters_from(1) * _OPTIMIZER_BYTES,
        activations=_activations(amounts, rank, stages),
    )


def _activations(amounts: Amounts, rank: int, stages: list[int]) -> float:
    """Return the bytes of activations: of all live microbatches, of the running layer, and of the scores."""
    layout, model = amounts.layout, amounts.model
    live = layout.peak_live(rank)
    kinds = [each for stage in stages for each in model.layer_kinds(layout.layers_of(model, stage))]
    saved = sum(_saved_bytes(amounts, layer) * number for layer, number in kinds) / layout.chunks
    # The layer whose backward pass runs has all its activations, also those that are computed again.
    recomputed = max(
        (_backward_bytes(amounts, layer) - _saved_bytes(amounts, layer) for layer, _ in kinds), default=0.0
    )
    last = layout.pp * layout.chunks - 1
    scores = _SCORE_AND_GRADIENT_BYTES * amounts.tokens * model.vocabulary / layout.tp if last in stages else 0.0
    return live * saved + recomputed + scores


def _saved_bytes(amounts: Amounts, layer: int) -> float:
    """Return the bytes that a layer saves of a microbatch: its input alone, or all that its backward needs."""
    if amounts.layout.checkpointing == "full":
        return float(amounts.rows * amounts.model.hidden * amounts.itemsize)
    return _backward_bytes(amounts, layer, amounts.layout.recomputed_operations)


def _backward_bytes(amounts: Amounts, layer: int, recomputed: frozenset[str] = frozenset()) -> float:
    """Return the bytes that the backward pass of a layer needs: the inputs of each matrix, norm and activation.

    Operations that are computed again save no result of their own: half of the products' results are saved then.
    """
    model, layout, tokens = amounts.model, amounts.layout, amounts.tokens
    itemsize, factor_bytes = amounts.itemsize, itemsize_bytes(layout.dtype)
    if model.has_experts(layer):
        copies = float(model.top_k)
        width = (copies + model.shared_experts) * model.expert_width
    else:
        copies, width = 1.0, float(model.ffn)
    share = 0.5 if "products" in recomputed else 1.0
    # Between the halves of a layer: the inputs of both norms, and their results, which are factors of products.
    row_bytes = (1 + share) * itemsize + (0 if "norm" in recomputed else (1 + copies) * factor_bytes)
    heads = share * (model.query_width + model.kv_width) + (0 if "attention" in recomputed else model.value_width)
    perceptron_bytes = share * (2 if model.gated else 1) * itemsize + (
        0 if "activation" in recomputed else factor_bytes
    )
    inside_bytes = heads * itemsize + width * perceptron_bytes
    return float(amounts.rows * model.hidden * row_bytes + tokens * inside_bytes / layout.tp)
