"""Tensor-parallel linear layers: a matrix cut by columns or by rows over a group (Megatron-LM, arXiv 1909.08053).

Column first, then functions of single elements, then row: one collective forward and one backward for the two.

===============  =======================  ==========================
layer            forward                  backward
===============  =======================  ==========================
column           nothing                  all-reduce of `dx`
row              all-reduce of `y`        nothing
column sequence  all-gather of `x`        reduce-scatter of `dx`, all-gather of `x`
row sequence     reduce-scatter of `y`    all-gather of `dy`
===============  =======================  ==========================

The sequence-parallel ones (arXiv 2205.05198) leave each rank a block of the rows (axis 0) wherever no matrix is cut:
the same bytes travel, and activations there take 1/t of the memory. Bytes sent by a rank, of t: 2(t-1)/t of the array
for an all-reduce, (t-1)/t for the others.

Collectives of backward travel under the gradients of the weights; forward, `Sequential(parts=2)` hides it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .checkpoints.pieces import Cut
from .layers import Pair
from .memory_work import MemoryWork, users_frame
from .tree import has_no_data

if TYPE_CHECKING:
    from .tree import Array

    Weights = Mapping[str, Array]


class _Linear(ABC):
    """A matrix cut over a group: weights {"weight": (inputs, outputs), "bias": (outputs,)}; the bias may be left out.

    Args:
        rank: This rank.
        group: The ranks that share the matrix.
        inputs: Columns of the input of the whole layer.
        outputs: Columns of the output of the whole layer.
        sequence: Whether each rank has a block of the rows outside the pair of layers.
        tokens: Rows of the input, for the virtual clock: of all ranks, in one part.

    Raises:
        UsageError: If the size that is cut does not divide by the ranks of the group.
    """

    _cut: ClassVar[str]
    rank: Rank
    group: Group
    inputs: int
    outputs: int
    sequence: bool

    """The size that is cut: "inputs" or "outputs"."""
    _axes: ClassVar[Mapping[str, int]]
    """The axis along which a weight is cut; others are whole on all ranks."""

    def __init__(
        self,
        rank: Rank,
        group: Group,
        inputs: int,
        outputs: int,
        *,
        sequence: bool = False,
        tokens: int | None = None,
    ) -> None:
        self.rank, self.group, self.inputs, self.outputs, self.sequence = rank, group, inputs, outputs, sequence
        cut: int = getattr(self, self._cut)
        if cut % group.size:
            raise UsageError(
                f"{self._cut}: {cut} do not divide by the {group.size} ranks of group '{group.name}'; "
                f"choose a multiple of {group.size}"
            )
        self._flops = None if tokens is None else 2.0 * tokens * inputs * outputs / group.size

    def shard(self, whole: Weights) -> dict[str, Array]:
        """Return copies of this rank's parts of the whole layer's weights.

        Raises:
            UsageError: If they have other shapes.
        """
        expected = {"weight": (self.inputs, self.outputs), "bias": (self.outputs,)}
        for name, array in whole.items():
            if array.shape != expected.get(name):
                known = " and ".join(f"{each} {shape}" for each, shape in expected.items())
                raise UsageError(f"whole: {name!r} has shape {array.shape}; the layer has {known}")
        return {name: self.cuts("")[name].block(array).copy() for name, array in whole.items()}

    def cuts(self, name: str) -> dict[str, Cut]:
        """Return where this rank's parts lie in the whole layer, for `Checkpoints`.

        Args:
            name: Name of the layer in the whole model; its weights are "NAME.weight" and "NAME.bias".
        """
        size, index = self.group.size, self.group.rank
        return {each: Cut(f"{name}.{each}", axis, index, size) for each, axis in self._axes.items()} | {
            each: Cut(f"{name}.{each}") for each in {"weight", "bias"}.difference(self._axes)
        }

    def _compute(self, fn: Callable[..., object], *args: object, name: str | None = None) -> Future[object]:
        """Issue a compute of the matrix's size, with its flops on the virtual clock."""
        return self.rank.compute(fn, *args, flops=self._flops, name=name, call_site=users_frame())

    def _gather_rows(self, x: object, name: str) -> object:
        """Issue the gather of the rows of all ranks; without `sequence`, return `x`, which has them all."""
        if not self.sequence:
            return x
        return self.group.all_gather(cast("Array", x), name=f"gather {name}", call_site=users_frame())

    def _sum_over_group(self, partial: object, name: str) -> object:
        """Issue the sum over the group: of all rows, or of this rank's with `sequence`."""
        if self.sequence:
            return self.group.reduce_scatter(cast("Array", partial), name=f"scatter {name}", call_site=users_frame())
        return self.group.all_reduce(cast("Array", partial), name=f"sum {name}", call_site=users_frame())

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the gradients of `x` and of the weights."""
        dx, needed = self.backward_input(w, kept, dy)
        return dx, self.backward_weights(w, needed)

    @abstractmethod
    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the gradient of `x`, and its collective."""

    def backward_weights(self, w: object, kept: object) -> Future[object]:
        """Issue the gradients of the weights."""
        x, dy = cast("Pair", kept)
        return self._compute(_weight_gradients, w, x, dy)


class ColumnLinear(_Linear):
    """y_i = x W_i + b_i: rank i has a block of the columns of W, and gets the same columns of y.

    `x` is whole on all ranks, or this rank's rows of it with `sequence`: then it is gathered forward, and again
    backward, so that only a block is kept.
    """

    _cut = "outputs"
    _axes: ClassVar = {"weight": 1, "bias": 0}

    def forward(self, w: object, x: object) -> Pair:
        """Issue the product: (..., inputs) to (..., outputs / t)."""
        return self._compute(_multiply, w, self._gather_rows(x, "x"), name="column product"), x

    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the gradient of `x`, summed over the group."""
        x = self._gather_rows(kept, "x again")
        partial = self._compute(_input_gradient, w, dy, name="column input gradient")
        return self._sum_over_group(partial, "dx"), (x, dy)


class RowLinear(_Linear):
    """y = sum of x_i W_i, + b: rank i has the rows of W that belong to its columns of x.

    `y` is whole on all ranks, or this rank's rows of it with `sequence`. The bias is added once, by the first rank.
    """

    _cut = "inputs"
    _axes: ClassVar = {"weight": 0}

    def forward(self, w: object, x: object) -> Pair:
        """Issue the product, and its sum: (..., inputs / t) to (..., outputs)."""
        partial = self._compute(_multiply, w, x, self.group.rank == 0, name="row product")
        return self._sum_over_group(partial, "y"), x

    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the gradient of `x`, of which each rank has its columns."""
        whole = self._gather_rows(dy, "dy")
        return self._compute(_input_gradient, w, whole, name="row input gradient"), (kept, whole)


def _multiply(w: Weights, x: Array, biased: bool = True) -> Array:
    """Return x W, with the bias if `biased` and there is one; without data, an array of that shape."""
    if has_no_data(x):
        return np.broadcast_to(x.flat[0], (*x.shape[:-1], w["weight"].shape[1]))
    y: Array = x @ w["weight"]
    if biased and "bias" in w:
        y += w["bias"]
    return y


def _input_gradient(w: Weights, dy: Array) -> Array:
    """Return the gradient of x from that of y."""
    if has_no_data(dy):
        return np.broadcast_to(dy.flat[0], (*dy.shape[:-1], w["weight"].shape[0]))
    dx: Array = dy @ w["weight"].T
    return dx


def _weight_gradients(w: Weights, x: Array, dy: Array) -> dict[str, Array]:
    """Return the gradients of weight and bias, summed over all rows."""
    if has_no_data(dy):
        return dict(w)
    rows = dy.reshape(-1, dy.shape[-1])
    gradients = {"weight": x.reshape(-1, x.shape[-1]).T @ rows}
    return gradients | ({"bias": rows.sum(0)} if "bias" in w else {})


_FLOAT_BYTES = 4  # of a score, for the virtual clock


class VocabularyLoss:
    """The mean of -log(probability) of the words that came, of scores as a last `ColumnLinear` leaves them.

    Two all-reduces, of one number for each token and of two, where gathering the scores would take a number for each
    token and word. Megatron-LM, arXiv:1909.08053, section 3. A pipeline takes it for its `loss`.

    Args:
        rank: This rank.
        group: The ranks that share the words, each a block of them, in the order of the group.
        words: Words of all ranks.
        tokens: Tokens of a batch, for the virtual clock.

    Raises:
        UsageError: If the words do not divide by the ranks of the group.
    """

    rank: Rank
    group: Group
    words: int

    def __init__(self, rank: Rank, group: Group, words: int, *, tokens: int | None = None) -> None:
        if words % group.size:
            raise UsageError(
                f"words: {words} do not divide by the {group.size} ranks of group '{group.name}'; "
                f"choose a multiple of {group.size}"
            )
        self.rank, self.group, self.words = rank, group, words
        self._work, self._words_per_rank = MemoryWork(rank), words // group.size
        self._moved_bytes = 2 * _FLOAT_BYTES * self._words_per_rank * (tokens or 0)

    def issue(self, scores: object, target: object) -> Future[object]:
        """Issue the loss, and its gradient.

        Args:
            scores: (..., words / t) This rank's, or a future of them.
            target: (...) The words that came, from 0, the same on all ranks of the group.

        Returns:
            A future of two: the gradient of this rank's scores; the loss, the same on all ranks.

        Raises:
            UsageError: At the await, if a target is no word, or their shape is not that of the tokens.
        """
        group, moved_bytes = self.group, self._moved_bytes
        top: Future[Array] = self._work.compute(
            self._highest_scores, scores, target, name="highest score", role="program", moved_bytes=moved_bytes
        )
        if group.size > 1:
            top = group.all_reduce(top, op="max", name="highest scores", call_site=users_frame())
        sums: Future[Array] = self._work.compute(
            self._exponential_sums, scores, target, top, name="sum of scores", role="program", moved_bytes=moved_bytes
        )
        if group.size > 1:
            sums = group.all_reduce(sums, name="sums of scores", call_site=users_frame())
        return cast(
            "Future[object]",
            self._work.compute(
                self._gradient_and_loss, scores, target, top, sums, name="loss", role="program", moved_bytes=moved_bytes
            ),
        )

    # -- on the compute stream ---------------------------------------------------------------------------------------

    def _highest_scores(self, scores: Array, target: Array) -> Array:
        """Return the highest of this rank's scores for each token; refuse wrong shapes and unknown words."""
        if scores.shape[-1:] != (self._words_per_rank,) or scores.shape[:-1] != np.shape(target):
            raise UsageError(
                f"loss: scores have shape {scores.shape} and targets {np.shape(target)}; expected "
                f"{(*np.shape(target), self._words_per_rank)}"
            )
        if has_no_data(scores):
            return np.broadcast_to(scores.flat[0], scores.shape[:-1])
        wrong = np.flatnonzero((target < 0) | (target >= self.words))
        if wrong.size:
            raise UsageError(f"target: expected 0 to {self.words - 1}, got {np.asarray(target).flat[wrong[0]]}")
        top: Array = scores.max(-1)
        return top

    def _exponential_sums(self, scores: Array, target: Array, top: Array) -> Array:
        """Return by token the sum of exponentials here, and the target's score if it is here: (2, ...), less `top`."""
        if has_no_data(scores):
            return np.broadcast_to(scores.flat[0], (2, *scores.shape[:-1]))
        is_own, word = self._find_own_words(target)
        target_score = np.take_along_axis(scores, word[..., None], -1)[..., 0] - top
        return np.stack([np.exp(scores - top[..., None]).sum(-1), np.where(is_own, target_score, scores.dtype.type(0))])

    def _gradient_and_loss(self, scores: Array, target: Array, top: Array, sums: Array) -> tuple[Array, float]:
        """Return the gradient of this rank's scores, (probability - one-hot target) / tokens, and the mean loss."""
        if has_no_data(scores):
            return scores, 0.0
        total, target_score = sums
        p = np.exp(scores - top[..., None])
        p /= total[..., None]
        is_own, word = self._find_own_words(target)
        at = (*np.nonzero(is_own), word[is_own])
        p[at] -= 1  # probabilities less the wanted ones, which are 1 at the target
        p /= np.asarray(total.size, p.dtype)
        return p, float((np.log(total) - target_score).mean())

    def _find_own_words(self, target: Array) -> tuple[Array, Array]:
        """Return which targets are words of this rank, and their columns here, 0 for the others."""
        word = np.asarray(target) - self.group.rank * self._words_per_rank
        is_own = (word >= 0) & (word < self._words_per_rank)
        return is_own, np.where(is_own, word, 0)
