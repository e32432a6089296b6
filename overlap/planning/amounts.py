"""Amounts of one rank in closed form: operations, bytes and time of a layer and a microbatch. Pure.

Formulas: Narayanan et al., arXiv 2104.04473. Attention is fused (Dao et al., arXiv 2205.14135): no scores reach memory,
masked ones are not computed, and its backward has five products where its forward has two.

Where the device's measured rates are known, a compute takes the sum of its kernels' times: products by shape,
attention, and element-wise work by the memory's bandwidth. Elsewhere the roofline of operations and bytes prices it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..cost.parameters import itemsize_bytes
from .device import Device
from .layout import Layout
from .model import Model

# Adam on weights of two bytes: it reads the gradient (2), the weight's copy in float32 and both means (12), and writes
# those and the weight (14).
UPDATE_BYTES = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One compute."""

    flops: float  # Operations
    nbytes: float  # Bytes of memory that products read and write
    seconds: float | None = None  # Its time, where the rates of the device are known

    def plus(self, other: Compute) -> Compute:
        """Return the sum of two computes."""
        both = None if self.seconds is None or other.seconds is None else self.seconds + other.seconds
        return Compute(flops=self.flops + other.flops, nbytes=self.nbytes + other.nbytes, seconds=both)

    def times(self, factor: float) -> Compute:
        """Return a multiple."""
        longer = None if self.seconds is None else self.seconds * factor
        return Compute(flops=self.flops * factor, nbytes=self.nbytes * factor, seconds=longer)


class Product(NamedTuple):
    """A matrix product of a rank: of rows x inner and inner x columns numbers."""

    rows: float
    columns: float
    inner: float


# Passes over memory where kernels fuse neighbouring element-wise operations, in numbers read and written.
_NORM = 5  # of the hidden width, forward: the sum with the residual, and its norm
_NORM_BACK = 6
_CAST = 4  # bytes of a factor in eight bits: two are read, one is written, and one of the transposed factor
_LOSS_BYTES = 14  # of a score forward: written in two bytes; in four written, and read twice
_LOSS_BYTES_BACK = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Amounts of a model under a layout."""

    model: Model  # The model
    layout: Layout  # Its layout
    device: Device | None = None  # The measured rates, if they are known

    @property
    def itemsize(self) -> int:
        """Bytes of a number of weights, activations and gradients."""
        return itemsize_bytes(self.layout.carried)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank."""
        return self.layout.micro_batch * self.model.sequence // self.layout.cp

    @property
    def rows(self) -> int:
        """Tokens that a rank holds between the halves of a layer."""
        return self.tokens // (self.layout.tp if self.layout.sequence_parallel else 1)

    # -- computes ------------------------------------------------------------------------------------------------

    def _matrix(self, parameters: float, width: float) -> Compute:
        """Return the product of all tokens with this rank's part of some matrices; `width` goes in and out."""
        own = parameters / self.layout.tp
        moved = (own + self.tokens * (2 * self.model.hidden + width / self.layout.tp)) * self.itemsize
        return Compute(flops=2.0 * own * self.tokens, nbytes=moved)

    def _timed(self, work: Compute, products: Sequence[Product], moved: float, dtype: str | None = None) -> Compute:
        """Return a compute with its time, if the device is known: of products, and of element-wise bytes."""
        device = self.device
        if device is None:
            return work
        kind, size = dtype or self.layout.dtype, self.itemsize
        each_s = sum(device.product_s(*each, kind, size) for each in products)
        return replace(work, seconds=each_s + device.moving_s(moved))

    def _moved(self, back: float, numbers: tuple[float, float], factors: tuple[float, float]) -> float:
        """Return bytes of element-wise work: of numbers forward or backward, and of the casts of factors, likewise."""
        casts = _CAST if self.layout.dtype != self.layout.carried else 0
        which = 1 if back else 0
        return numbers[which] * self.itemsize + factors[which] * casts

    def _again(self, operation: str, back: float) -> bool:
        return bool(back) and operation in self.layout.recomputed

    def projections(self, back: float = 0) -> Compute:
        """Queries, keys, values and the product after the heads, with norm and positions.

        Args:
            back: 0 forward; backward 1 for gradients of inputs, 2 for those of weights too.
        """
        model, tp, tokens = self.model, self.layout.tp, self.tokens
        inside = model.query_width + model.kv_width
        work = self._matrix(model.attention_parameters, inside + model.value_width).times(back or 1)
        products = [
            Product(tokens, (model.attention_parameters / model.hidden - model.value_width) / tp, model.hidden),
            Product(tokens, model.hidden, model.value_width / tp),
        ]
        rows, turned = self.rows * model.hidden, 2 * tokens * (model.query_width + model.kv_width / 2) / tp
        again = _NORM * rows * self._again("norm", back)
        numbers = _NORM * rows + turned, _NORM_BACK * rows + turned + again
        factors = tokens * (model.hidden + model.value_width / tp), tokens * (model.hidden + inside / tp)
        return self._halves(work, products, back, self._moved(back, numbers, factors))

    def _halves(self, work: Compute, products: Sequence[Product], back: float, moved: float) -> Compute:
        """Return half a layer: products once forward, `back` times backward, and half of them again if they are."""
        times = (back or 1) + (0.5 if self._again("products", back) else 0)
        return self._timed(work.times(times / (back or 1)), _repeated(products, times), moved)

    def scores(self, back: float = 0) -> Compute:
        """Attention of a rank's tokens to the keys of one rank of `cp`; backward if `back`."""
        model, tp = self.model, self.layout.tp
        keys = model.attended / self.layout.cp
        moved = self.tokens * (model.query_width + model.kv_width + model.value_width) * self.itemsize / tp
        times = (2.5 + self._again("attention", back)) if back else 1.0
        work = Compute(flops=self.tokens * model.score_flops(keys) / tp, nbytes=moved).times(times)
        if self.device is None:
            return work
        reach = min(model.window or model.sequence, model.sequence) / self.layout.cp
        return replace(work, seconds=self.device.attention_s(work.flops, reach))

    def perceptron(self, layer: int, back: float = 0) -> Compute:
        """Perceptron, or router and shared experts: the computes of every token after attention."""
        of = self.model
        if not of.has_experts(layer):
            return self._perceptron(of.perceptron(of.ffn), of.ffn, self.tokens, back, self.rows)
        return self.router(back).plus(self.shared(back)) if of.shared_experts else self.router(back)

    def _perceptron(self, parameters: float, ffn: float, tokens: float, back: float, rows: float) -> Compute:
        model, wide = self.model, ffn / self.layout.tp
        work = self._matrix(parameters, 3 * ffn).times(back or 1)
        into = (2 if model.gated else 1) * wide
        products = [Product(tokens, into, model.hidden), Product(tokens, model.hidden, wide)]
        again = (_NORM * rows * model.hidden * self._again("norm", back)) + (
            (into + wide) * tokens * self._again("activation", back)
        )
        numbers = (
            _NORM * rows * model.hidden + (into + wide) * tokens,
            _NORM_BACK * rows * model.hidden + (2 * into + wide) * tokens + again,
        )
        factors = tokens * (model.hidden + wide), tokens * (model.hidden + into)
        return self._halves(work, products, back, self._moved(back, numbers, factors))

    def router(self, back: float = 0) -> Compute:
        """The choice of experts."""
        of = self.model
        nbytes = 1.0 * self.rows * of.hidden * self.itemsize
        work = Compute(flops=2.0 * self.rows * of.hidden * of.experts, nbytes=nbytes).times(back or 1)
        norm = (_NORM_BACK if back else _NORM) * nbytes
        return self._timed(work, _repeated([Product(self.rows, of.experts, of.hidden)], back or 1), norm, "float32")

    def shared(self, back: float = 0) -> Compute:
        """The experts that every token goes to."""
        of = self.model
        width = of.shared_experts * of.expert_width
        return self._perceptron(of.shared_experts * of.perceptron(of.expert_width), width, self.tokens, back, 0.0)

    def experts(self, back: float = 0) -> Compute:
        """The experts of a rank."""
        model, layout = self.model, self.layout
        size = model.perceptron(model.expert_width) / layout.tp
        routed, experts = self.tokens * model.top_k, model.experts / layout.ep
        moved = size * experts + routed * (2 * model.hidden + 3 * model.expert_width / layout.tp)
        work = Compute(flops=2.0 * routed * size, nbytes=moved * self.itemsize).times(back or 1)
        if self.device is None:
            return work
        wide = model.expert_width / layout.tp
        into = (2 if model.gated else 1) * wide
        products = [Product(routed, into, model.hidden), Product(routed, model.hidden, wide)]
        weights = size * (experts - 1) * self.itemsize * (back or 1)  # the products of one matrix count those of one
        numbers = (into + wide) * routed, (2 * into + wide) * routed
        bytes_moved = weights + self._moved(
            back, numbers, (routed * (model.hidden + wide), routed * (model.hidden + into))
        )
        return self._timed(work, _repeated(products, back or 1), bytes_moved)

    def weight_gradients(self, layer: int) -> Compute:
        """Return the gradients of a layer's weights alone, where a schedule splits the backward pass."""
        found = self.projections(2).plus(self.projections(1).times(-1.0))
        found = found.plus(self.perceptron(layer, 2)).plus(self.perceptron(layer, 1).times(-1.0))
        if self.model.has_experts(layer):
            found = found.plus(self.experts(2)).plus(self.experts(1).times(-1.0))
        return found

    def combining(self) -> Compute:
        """Sum of the outputs that the experts of a token sent back."""
        model = self.model
        nbytes = (model.top_k + 1.0) * self.rows * model.hidden * self.itemsize
        return self._timed(Compute(flops=0.0, nbytes=nbytes), [], nbytes)

    def embedding(self) -> Compute:
        """Looking up tokens."""
        nbytes = 2.0 * self.tokens * self.model.hidden * self.itemsize
        return self._timed(Compute(flops=0.0, nbytes=nbytes), [], nbytes)

    def scoring(self, back: float = 0) -> Compute:
        """Scores of all words, and their loss; of further tokens too, with the join of each with its embedding."""
        of, tp = self.model, self.layout.tp
        words, times = of.vocabulary / tp, (back or 1) * (1 + of.mtp_layers)
        work = self._matrix(of.embedding_parameters, 3 * of.vocabulary).times(times)
        joined = Product(self.rows, of.hidden * of.mtp_layers, 2 * of.hidden)
        products = [Product(self.tokens, words * (1 + of.mtp_layers), of.hidden), joined]
        moved = (_LOSS_BYTES_BACK if back else _LOSS_BYTES) * self.tokens * words * (1 + of.mtp_layers)
        return self._timed(work, _repeated(products, back or 1), moved, self.layout.carried)

    def scoring_weights(self) -> Compute:
        """Return the gradients of the scores' matrix alone."""
        return self.scoring(2).plus(self.scoring(1).times(-1.0))

    def updating(self, parameters: float) -> Compute:
        """Adam on some parameters."""
        nbytes = UPDATE_BYTES * parameters
        return self._timed(Compute(flops=0.0, nbytes=nbytes), [], nbytes)

    # -- bytes that travel ---------------------------------------------------------------------------------------

    @property
    def routed_bytes(self) -> int:
        """Bytes of all tokens that a rank sends to the experts of other ranks, or gets back."""
        of, layout = self.model, self.layout
        return -(-self.rows * of.top_k * of.hidden // layout.ep) * layout.ep * self.itemsize

    @property
    def gathers_routed(self) -> bool:
        """Whether each rank of tp sends its own rows to experts elsewhere, and their ranks of tp then gather the rows.

        Every rank of tp has a part of each matrix, so it needs all rows that arrived (as in Megatron's dispatcher).
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
        """Parameters of a stage's layers on a rank: first without experts, then of experts."""
        kinds = self.model.kinds(self.layout.layers_of(self.model, stage))
        dense = sum(self.dense(layer) * like for layer, like in kinds)
        return dense, sum(self.own_experts(layer) * like for layer, like in kinds)

    def tables(self, stage: int) -> int:
        """Parameters of embedding and scores on a rank of a stage."""
        last = self.layout.pp * self.layout.chunks - 1
        both = (stage == 0) + (stage == last and not (self.model.tied and last == 0))
        return -(-both * self.model.embedding_parameters // self.layout.tp)

    def _experts_of(self, layer: int) -> int:
        of = self.model
        return of.experts * of.perceptron(of.expert_width) if of.has_experts(layer) else 0


def _repeated(products: Sequence[Product], times: float) -> list[Product]:
    """Return the products, each `times`; of half a time, every second one."""
    whole = list(products) * int(times)
    return [*whole, *products[::2]] if times % 1 else whole


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return a dtype of numpy or ml_dtypes by its name.

    Raises:
        UsageError: If there is none.
    """
    itemsize_bytes(name)  # refuses what is no dtype
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
