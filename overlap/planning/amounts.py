"""Amounts of one rank in closed form: operations and bytes of a layer and a microbatch, and device memory. Pure.

Formulas: Narayanan et al., arXiv 2104.04473, and Korthikanti et al., arXiv 2205.05198; what saved tensors are is
counted one by one, so that gated perceptrons and few heads of keys come out right.

Memory of states, for N replicas, Adam, weights and gradients of two bytes, 12 bytes of copy and means in float32:

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
from typing import Any

import numpy as np

from ..cost.parameters import itemsize_of
from .layout import Layout
from .model import Model

# Adam on weights of two bytes: it reads the gradient (2), the weight's copy in float32 and both means (12), and writes
# those and the weight (14).
UPDATE_BYTES = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One compute."""

    flops: float  # Operations
    nbytes: float  # Of memory, read and written

    def plus(self, other: Work) -> Work:
        """Return the sum of two computes."""
        return Work(flops=self.flops + other.flops, nbytes=self.nbytes + other.nbytes)

    def times(self, factor: float) -> Work:
        """Return a multiple."""
        return Work(flops=self.flops * factor, nbytes=self.nbytes * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Amounts of a model under a layout."""

    model: Model  # The model
    layout: Layout  # Its layout

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return itemsize_of(self.layout.dtype)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank."""
        return self.layout.micro_batch * self.model.sequence // self.layout.cp

    @property
    def rows(self) -> int:
        """Tokens that a rank holds between the halves of a layer."""
        return self.tokens // (self.layout.tp if self.layout.sequence_parallel else 1)

    # -- computes ------------------------------------------------------------------------------------------------

    def _matrix(self, parameters: float, width: float) -> Work:
        """Return the product of all tokens with this rank's part of some matrices; `width` goes in and out."""
        own = parameters / self.layout.tp
        moved = (own + self.tokens * (2 * self.model.hidden + width / self.layout.tp)) * self.itemsize
        return Work(flops=2.0 * own * self.tokens, nbytes=moved)

    def projections(self) -> Work:
        """Queries, keys, values and what comes after the heads, forward."""
        of = self.model
        return self._matrix(of.attention_parameters, of.query_width + of.kv_width + of.value_width)

    def scores(self) -> Work:
        """Attention of a rank's tokens to as many keys: all of a sequence, or a part of it with `cp`; forward."""
        of, tp = self.model, self.layout.tp
        keys = of.sequence // self.layout.cp
        moved = self.tokens * (of.query_width + of.kv_width + of.value_width) * self.itemsize / tp
        return Work(flops=self.tokens * of.score_flops(keys) / tp, nbytes=moved)

    def perceptron(self, layer: int) -> Work:
        """Perceptron, or router and shared experts: the computes of every token after attention, forward."""
        of = self.model
        if not of.has_experts(layer):
            return self._matrix(of.perceptron(of.ffn), 3 * of.ffn)
        return self.router().plus(self.shared()) if of.shared_experts else self.router()

    def router(self) -> Work:
        """The choice of experts, forward."""
        of = self.model
        return Work(flops=2.0 * self.rows * of.hidden * of.experts, nbytes=1.0 * self.rows * of.hidden * self.itemsize)

    def shared(self) -> Work:
        """The experts that every token goes to, forward."""
        of = self.model
        return self._matrix(of.shared_experts * of.perceptron(of.expert_width), 3 * of.shared_experts * of.expert_width)

    def experts(self) -> Work:
        """The experts of the busiest rank, forward."""
        of, layout = self.model, self.layout
        each = of.perceptron(of.expert_width) / layout.tp
        met = self.tokens * of.top_k * layout.imbalance
        moved = each * of.experts / layout.ep + met * (2 * of.hidden + 3 * of.expert_width / layout.tp)
        return Work(flops=2.0 * met * each, nbytes=moved * self.itemsize)

    def combining(self) -> Work:
        """Adding up what came back from a token's experts."""
        of = self.model
        return Work(flops=0.0, nbytes=(of.top_k + 1.0) * self.rows * of.hidden * self.itemsize)

    def embedding(self) -> Work:
        """Looking up tokens."""
        return Work(flops=0.0, nbytes=2.0 * self.tokens * self.model.hidden * self.itemsize)

    def scoring(self) -> Work:
        """Scores of all words, forward."""
        return self._matrix(self.model.embedding_parameters, 3 * self.model.vocabulary)

    # -- bytes that travel ---------------------------------------------------------------------------------------

    @property
    def routed_bytes(self) -> int:
        """Bytes of all tokens that the busiest rank sends to the experts of other ranks, or gets back."""
        of, layout = self.model, self.layout
        nbytes = self.rows * of.top_k * of.hidden * self.itemsize * layout.imbalance
        return -(-int(nbytes) // (layout.ep * self.itemsize)) * layout.ep * self.itemsize

    @property
    def gathers_routed(self) -> bool:
        """Whether each rank of tp sends its own rows to experts elsewhere, whose ranks of tp then gather them.

        All of those have a part of each matrix, so all of them need all that came (as in Megatron's dispatcher).
        """
        return self.layout.ep > 1 and self.layout.tp > 1 and self.layout.sequence_parallel

    @property
    def ring_bytes(self) -> int:
        """Bytes of keys and values that a rank sends on in a ring; ranks of tp beyond the heads hold equal ones."""
        shares = min(self.layout.tp, self.model.kv_parts)
        return max(1, self.tokens * self.model.kv_width // shares) * self.itemsize

    # -- weights -------------------------------------------------------------------------------------------------

    def dense(self, layer: int) -> int:
        """Parameters of a layer on a rank, but for its experts."""
        return -(-(self.model.layer_parameters(layer) - self._experts_of(layer)) // self.layout.tp)

    def own_experts(self, layer: int) -> int:
        """Parameters of a layer's experts on a rank."""
        return -(-self._experts_of(layer) // (self.layout.tp * self.layout.ep))

    def held(self, stage: int) -> tuple[int, int]:
        """Parameters of a stage's layers on a rank: but for experts, and those of experts."""
        kinds = self.model.kinds(self.layout.layers_of(self.model, stage))
        dense = sum(self.dense(one) * like for one, like in kinds)
        return dense, sum(self.own_experts(one) * like for one, like in kinds)

    def tables(self, stage: int) -> int:
        """Parameters of embedding and scores on a rank of a stage."""
        last = self.layout.pp * self.layout.chunks - 1
        both = (stage == 0) + (stage == last and not (self.model.tied and last == 0))
        return -(-both * self.model.embedding_parameters // self.layout.tp)

    def _experts_of(self, layer: int) -> int:
        of = self.model
        return of.experts * of.perceptron(of.expert_width) if of.has_experts(layer) else 0


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return a dtype of numpy or ml_dtypes by its name.

    Raises:
        UsageError: If there is none.
    """
    itemsize_of(name)  # refuses what is no dtype
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


# -- memory ----------------------------------------------------------------------------------------------------------

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
    """Return the bytes kept of a layer and a microbatch: its input alone, or all that its backward needs."""
    if amounts.layout.checkpointing == "full":
        return float(amounts.rows * amounts.model.hidden * amounts.itemsize)
    return _whole(amounts, layer)


def _whole(amounts: Amounts, layer: int) -> float:
    """Return the bytes that the backward pass of a layer needs: the inputs of each matrix, norm and activation."""
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
