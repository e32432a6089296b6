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
    """One compute of a rank: its operations, its memory traffic and, where it is known, its time."""

    flops: float  # Operations
    nbytes: float  # Bytes of memory that products read and write
    seconds: float | None = None  # Its time, where the rates of the device are known

    def plus(self, other: Compute) -> Compute:
        """Return the sum of two computes; its time is None if that of either is."""
        sum_s = None if self.seconds is None or other.seconds is None else self.seconds + other.seconds
        return Compute(flops=self.flops + other.flops, nbytes=self.nbytes + other.nbytes, seconds=sum_s)

    def times(self, factor: float) -> Compute:
        """Return the compute with operations, bytes and time multiplied by `factor`."""
        scaled_s = None if self.seconds is None else self.seconds * factor
        return Compute(flops=self.flops * factor, nbytes=self.nbytes * factor, seconds=scaled_s)


class Product(NamedTuple):
    """A matrix product of a rank: (rows x inner) times (inner x columns) numbers."""

    rows: float
    columns: float
    inner: float


# Passes over memory, where kernels fuse neighbouring element-wise operations, in numbers read and written.
_NORM_PASSES = 5  # of the hidden width, forward: the sum with the residual, and its norm
_NORM_BACK_PASSES = 6
_CAST_BYTES = 4  # bytes of a factor in eight bits: two are read, one is written, and one of the transposed factor
_LOSS_BYTES = 14  # of a score forward: written in two bytes; in four written, and read twice
_LOSS_BYTES_BACK = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Operations, bytes and times of one rank, by the parts of a layer, for a model under a layout."""

    model: Model  # The model
    layout: Layout  # Its layout
    device: Device | None = None  # The measured rates, if they are known

    @property
    def itemsize(self) -> int:
        """Bytes of a number of weights, activations and gradients."""
        return itemsize_bytes(self.layout.storage_dtype)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank."""
        return self.layout.micro_batch * self.model.sequence // self.layout.cp

    @property
    def rows(self) -> int:
        """Tokens that a rank holds between the halves of a layer."""
        return self.tokens // (self.layout.tp if self.layout.sequence_parallel else 1)

    # -- computes ------------------------------------------------------------------------------------------------

    def _matrix_product(self, parameters: float, width: float) -> Compute:
        """Return the product of all tokens with a rank's part of matrices that take or give `width` numbers a token."""
        own_parameters = parameters / self.layout.tp
        moved_bytes = (own_parameters + self.tokens * (2 * self.model.hidden + width / self.layout.tp)) * self.itemsize
        return Compute(flops=2.0 * own_parameters * self.tokens, nbytes=moved_bytes)

    def _add_seconds(
        self, work: Compute, products: Sequence[Product], moved_bytes: float, dtype: str | None = None
    ) -> Compute:
        """Return `work` with the time of its products and element-wise bytes; unchanged without a device."""
        device = self.device
        if device is None:
            return work
        kind, size = dtype or self.layout.dtype, self.itemsize
        products_s = sum(device.product_s(*each, kind, size) for each in products)
        return replace(work, seconds=products_s + device.elementwise_s(moved_bytes))

    def _elementwise_bytes(self, back: float, numbers: tuple[float, float], factors: tuple[float, float]) -> float:
        """Return bytes of element-wise work from (forward, backward) pairs: numbers, and factors that are cast."""
        casts = _CAST_BYTES if self.layout.dtype != self.layout.storage_dtype else 0
        phase = 1 if back else 0
        return numbers[phase] * self.itemsize + factors[phase] * casts

    def _recomputes(self, operation: str, back: float) -> bool:
        """Return whether the backward pass computes an operation of `layout.OPERATIONS` again."""
        return bool(back) and operation in self.layout.recomputed_operations

    def projections(self, back: float = 0) -> Compute:
        """Queries, keys, values and the product after the heads, with norm and positions.

        Args:
            back: 0 forward; backward 1 for gradients of inputs, 2 for those of weights too.
        """
        model, tp, tokens = self.model, self.layout.tp, self.tokens
        projected = model.query_width + model.kv_width
        work = self._matrix_product(model.attention_parameters, projected + model.value_width).times(back or 1)
        products = [
            Product(tokens, (model.attention_parameters / model.hidden - model.value_width) / tp, model.hidden),
            Product(tokens, model.hidden, model.value_width / tp),
        ]
        rows, rotated = self.rows * model.hidden, 2 * tokens * (model.query_width + model.kv_width / 2) / tp
        recomputed = _NORM_PASSES * rows * self._recomputes("norm", back)
        numbers = _NORM_PASSES * rows + rotated, _NORM_BACK_PASSES * rows + rotated + recomputed
        factors = tokens * (model.hidden + model.value_width / tp), tokens * (model.hidden + projected / tp)
        return self._half_layer(work, products, back, self._elementwise_bytes(back, numbers, factors))

    def _half_layer(self, work: Compute, products: Sequence[Product], back: float, moved_bytes: float) -> Compute:
        """Return half a layer: its products once forward, `back` times backward, plus half of them if recomputed."""
        times = (back or 1) + (0.5 if self._recomputes("products", back) else 0)
        return self._add_seconds(work.times(times / (back or 1)), _repeat_products(products, times), moved_bytes)

    def scores(self, back: float = 0) -> Compute:
        """Attention of the tokens of a rank to the keys of one rank of `cp`; its backward pass if `back` is not 0."""
        model, tp = self.model, self.layout.tp
        keys = model.attended_tokens / self.layout.cp
        moved_bytes = self.tokens * (model.query_width + model.kv_width + model.value_width) * self.itemsize / tp
        # Five products backward to two forward, and the forward ones again if attention is recomputed.
        times = (2.5 + self._recomputes("attention", back)) if back else 1.0
        work = Compute(flops=self.tokens * model.score_flops(keys) / tp, nbytes=moved_bytes).times(times)
        if self.device is None:
            return work
        reach = min(model.window or model.sequence, model.sequence) / self.layout.cp
        return replace(work, seconds=self.device.attention_s(work.flops, reach))

    def perceptron(self, layer: int, back: float = 0) -> Compute:
        """Perceptron of a layer, or its router and shared experts: all that each token computes after attention."""
        model = self.model
        if not model.has_experts(layer):
            return self._perceptron_compute(model.perceptron(model.ffn), model.ffn, self.tokens, back, self.rows)
        return self.router(back).plus(self.shared_perceptron(back)) if model.shared_experts else self.router(back)

    def _perceptron_compute(self, parameters: float, ffn: float, tokens: float, back: float, rows: float) -> Compute:
        """Return a perceptron with its norm: `parameters` of width `ffn` on `tokens`; norms are of `rows`."""
        model, width = self.model, ffn / self.layout.tp
        work = self._matrix_product(parameters, 3 * ffn).times(back or 1)
        into = (2 if model.gated else 1) * width
        products = [Product(tokens, into, model.hidden), Product(tokens, model.hidden, width)]
        recomputed = (_NORM_PASSES * rows * model.hidden * self._recomputes("norm", back)) + (
            (into + width) * tokens * self._recomputes("activation", back)
        )
        numbers = (
            _NORM_PASSES * rows * model.hidden + (into + width) * tokens,
            _NORM_BACK_PASSES * rows * model.hidden + (2 * into + width) * tokens + recomputed,
        )
        factors = tokens * (model.hidden + width), tokens * (model.hidden + into)
        return self._half_layer(work, products, back, self._elementwise_bytes(back, numbers, factors))

    def router(self, back: float = 0) -> Compute:
        """The matrix product, in float32, and the norm by which each token chooses its experts."""
        model = self.model
        nbytes = 1.0 * self.rows * model.hidden * self.itemsize
        work = Compute(flops=2.0 * self.rows * model.hidden * model.experts, nbytes=nbytes).times(back or 1)
        norm = (_NORM_BACK_PASSES if back else _NORM_PASSES) * nbytes
        return self._add_seconds(
            work, _repeat_products([Product(self.rows, model.experts, model.hidden)], back or 1), norm, "float32"
        )

    def shared_perceptron(self, back: float = 0) -> Compute:
        """The shared experts, which compute every token, as one perceptron."""
        model = self.model
        width = model.shared_experts * model.expert_width
        return self._perceptron_compute(
            model.shared_experts * model.perceptron(model.expert_width), width, self.tokens, back, 0.0
        )

    def experts(self, back: float = 0) -> Compute:
        """The experts on a rank, for the tokens that are routed to them; all experts get equally many."""
        model, layout = self.model, self.layout
        size = model.perceptron(model.expert_width) / layout.tp
        routed, experts = self.tokens * model.top_k, model.experts / layout.ep
        numbers_moved = size * experts + routed * (2 * model.hidden + 3 * model.expert_width / layout.tp)
        work = Compute(flops=2.0 * routed * size, nbytes=numbers_moved * self.itemsize).times(back or 1)
        if self.device is None:
            return work
        width = model.expert_width / layout.tp
        into = (2 if model.gated else 1) * width
        products = [Product(routed, into, model.hidden), Product(routed, model.hidden, width)]
        weights = size * (experts - 1) * self.itemsize * (back or 1)  # the products of one matrix count those of one
        numbers = (into + width) * routed, (2 * into + width) * routed
        bytes_moved = weights + self._elementwise_bytes(
            back, numbers, (routed * (model.hidden + width), routed * (model.hidden + into))
        )
        return self._add_seconds(work, _repeat_products(products, back or 1), bytes_moved)

    def weight_gradients(self, layer: int) -> Compute:
        """Return the gradients of a layer's weights alone, where a schedule splits the backward pass."""
        gradients = self.projections(2).plus(self.projections(1).times(-1.0))
        gradients = gradients.plus(self.perceptron(layer, 2)).plus(self.perceptron(layer, 1).times(-1.0))
        if self.model.has_experts(layer):
            gradients = gradients.plus(self.experts(2)).plus(self.experts(1).times(-1.0))
        return gradients

    def expert_sum(self) -> Compute:
        """Sum of the outputs that the experts of each token sent back."""
        model = self.model
        nbytes = (model.top_k + 1.0) * self.rows * model.hidden * self.itemsize
        return self._add_seconds(Compute(flops=0.0, nbytes=nbytes), [], nbytes)

    def embedding(self) -> Compute:
        """Looking up the embedding of each token: memory traffic only."""
        nbytes = 2.0 * self.tokens * self.model.hidden * self.itemsize
        return self._add_seconds(Compute(flops=0.0, nbytes=nbytes), [], nbytes)

    def vocabulary_scores(self, back: float = 0) -> Compute:
        """Scores of all words and their loss, also of the tokens that further prediction layers predict."""
        model, tp = self.model, self.layout.tp
        words, times = model.vocabulary / tp, (back or 1) * (1 + model.mtp_layers)
        work = self._matrix_product(model.embedding_parameters, 3 * model.vocabulary).times(times)
        joining = Product(self.rows, model.hidden * model.mtp_layers, 2 * model.hidden)
        products = [Product(self.tokens, words * (1 + model.mtp_layers), model.hidden), joining]
        moved_bytes = (_LOSS_BYTES_BACK if back else _LOSS_BYTES) * self.tokens * words * (1 + model.mtp_layers)
        return self._add_seconds(work, _repeat_products(products, back or 1), moved_bytes, self.layout.storage_dtype)

    def vocabulary_gradients(self) -> Compute:
        """Return the gradients of the weights of the scores' matrix alone."""
        return self.vocabulary_scores(2).plus(self.vocabulary_scores(1).times(-1.0))

    def weight_update(self, parameters: float) -> Compute:
        """One update by Adam of `parameters` weights: memory traffic only."""
        nbytes = UPDATE_BYTES * parameters
        return self._add_seconds(Compute(flops=0.0, nbytes=nbytes), [], nbytes)

    # -- bytes that travel ---------------------------------------------------------------------------------------

    @property
    def routed_bytes(self) -> int:
        """Bytes of all tokens that a rank exchanges in one all_to_all with the experts of other ranks."""
        model, layout = self.model, self.layout
        return -(-self.rows * model.top_k * model.hidden // layout.ep) * layout.ep * self.itemsize

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

    def dense_parameters(self, layer: int) -> int:
        """Parameters of a layer on a rank, without its experts."""
        return -(-(self.model.layer_parameters(layer) - self._all_expert_parameters(layer)) // self.layout.tp)

    def expert_parameters(self, layer: int) -> int:
        """Parameters of a layer's experts on a rank."""
        return -(-self._all_expert_parameters(layer) // (self.layout.tp * self.layout.ep))

    def stage_parameters(self, stage: int) -> tuple[int, int]:
        """Parameters of a stage's layers on a rank: (without experts, of experts)."""
        kinds = self.model.layer_kinds(self.layout.layers_of(self.model, stage))
        dense = sum(self.dense_parameters(layer) * like for layer, like in kinds)
        return dense, sum(self.expert_parameters(layer) * like for layer, like in kinds)

    def table_parameters(self, stage: int) -> int:
        """Parameters of the embedding, and of the matrix of the scores, on a rank of a stage; 0 for inner stages."""
        last = self.layout.pp * self.layout.chunks - 1
        number = (stage == 0) + (stage == last and not (self.model.tied and last == 0))
        return -(-number * self.model.embedding_parameters // self.layout.tp)

    def _all_expert_parameters(self, layer: int) -> int:
        """Return the parameters of all routed experts of a layer, on all ranks; 0 without experts."""
        model = self.model
        return model.experts * model.perceptron(model.expert_width) if model.has_experts(layer) else 0


def _repeat_products(products: Sequence[Product], times: float) -> list[Product]:
    """Return the products `times` times; the half of 1.5 or 2.5 times is every second product."""
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

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
