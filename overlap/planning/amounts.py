"""What one rank computes, reads and sends of one layer and one microbatch, in closed form. Pure.

Formulas: Narayanan et al., arXiv 2104.04473, and Korthikanti et al., arXiv 2205.05198; what saved tensors are is
counted one by one, so that gated perceptrons and few heads of keys come out right.
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
        """Return both, one after the other."""
        return Work(flops=self.flops + other.flops, nbytes=self.nbytes + other.nbytes)

    def times(self, factor: float) -> Work:
        """Return a multiple."""
        return Work(flops=self.flops * factor, nbytes=self.nbytes * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Of a model under a layout."""

    model: Model  # Which
    layout: Layout  # How it lies

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return itemsize_of(self.layout.dtype)

    @property
    def tokens(self) -> int:
        """Of a microbatch, on a rank."""
        return self.layout.micro_batch * self.model.sequence // self.layout.cp

    @property
    def rows(self) -> int:
        """Of them, those that a rank holds between the halves of a layer."""
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
        """What every token meets after attention, forward: the perceptron, or router and shared experts."""
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
        """Of tokens on their way to the experts of others, from the busiest rank, or back: all of them together."""
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
        """Of keys and values that go on to the next rank of a ring; ranks of tp beyond their heads have the same."""
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
