"""Tensor-parallel linear layers: a matrix cut by columns or by rows over a group (Megatron-LM, arXiv 1909.08053).

Use a column layer, then elementwise functions, then a row layer: the pair needs one collective in forward and one in
backward.

===============  =======================  ==========================
layer            forward                  backward
===============  =======================  ==========================
column           nothing                  all-reduce of `dx`
row              all-reduce of `y`        nothing
column sequence  all-gather of `x`        reduce-scatter of `dx`, all-gather of `x`
row sequence     reduce-scatter of `y`    all-gather of `dy`
===============  =======================  ==========================

In sequence-parallel layers (arXiv 2205.05198) each rank has a block of the rows (axis 0) outside the pair: the same
bytes travel, and activations there take 1/t of the memory, with t ranks. A rank sends 2(t-1)/t of the array for an
all-reduce, and (t-1)/t for the other collectives.

Collectives of backward travel while weight gradients are computed. `Sequential(parts=2)` hides those of forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

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
    """A linear layer whose matrix is cut over a group.

    The whole layer's weights are {"weight": (inputs, outputs), "bias": (outputs,)}; the bias may be left out.

    Args:
        rank: This rank.
        group: The ranks that share the matrix.
        inputs: Number of columns of the whole layer's input.
        outputs: Number of columns of the whole layer's output.
        sequence: Whether the layer is sequence-parallel: each rank has a block of the rows outside the pair of layers.
        tokens: Number of rows of the input, over all ranks, in one part of a `Sequential`; for the cost on the virtual
            clock.

    Raises:
        UsageError: The size that is cut does not divide by the number of ranks.
    """

    rank: Rank
    group: Group
    inputs: int
    outputs: int
    sequence: bool
    _cut: ClassVar[str]
    """The size that is cut: "inputs" or "outputs"."""
    _axes: ClassVar[Mapping[str, int]]
    """By name of a weight, the axis along which it is cut; other weights are whole on all ranks."""

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
        _check_divides(self._cut, getattr(self, self._cut), group)
        self._flops = None if tokens is None else 2.0 * tokens * inputs * outputs / group.size

    def shard(self, whole: Weights) -> dict[str, Array]:
        """Return copies of this rank's blocks of the whole layer's weights.

        Raises:
            UsageError: A weight of `whole` has another shape than the layer.
        """
        expected = {"weight": (self.inputs, self.outputs), "bias": (self.outputs,)}
        for name, array in whole.items():
            if array.shape != expected.get(name):
                known = " and ".join(f"{each} {shape}" for each, shape in expected.items())
                raise UsageError(f"whole: expected {known}, got {name} {array.shape}")
        return {name: self.cuts("")[name].block(array).copy() for name, array in whole.items()}

    def cuts(self, name: str) -> dict[str, Cut]:
        """Return the place of this rank's blocks in the whole weights, by "weight" and "bias", for `Checkpoints`.

        Args:
            name: Name of the layer in the whole model, where the weights are called "NAME.weight" and "NAME.bias".
        """
        size, index = self.group.size, self.group.rank
        return {each: Cut(f"{name}.{each}", axis, index, size) for each, axis in self._axes.items()} | {
            each: Cut(f"{name}.{each}") for each in {"weight", "bias"}.difference(self._axes)
        }

    def _issue_product(self, fn: Callable[..., object], *args: object, name: str | None = None) -> Future[object]:
        """Issue a compute that costs the flops of one product with this rank's block on the virtual clock."""
        return self.rank.compute(fn, *args, flops=self._flops, name=name, call_site=users_frame())

    def _gather_rows(self, x: object, name: str) -> object:
        """With `sequence`, issue the gather of the rows of all ranks; else return `x`, which has all rows."""
        if not self.sequence:
            return x
        return self.group.all_gather(cast("Array", x), name=f"gather {name}", call_site=users_frame())

    def _sum_over_group(self, partial: object, name: str) -> object:
        """Issue the sum over the group; return a future of the sum: all rows, or with `sequence` this rank's block.

        The summand `partial` has all rows.
        """
        if self.sequence:
            return self.group.reduce_scatter(cast("Array", partial), name=f"scatter {name}", call_site=users_frame())
        return self.group.all_reduce(cast("Array", partial), name=f"sum {name}", call_site=users_frame())

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the gradients of `x` and of the weights; return both, as futures.

        Args:
            w: This rank's blocks of the weights.
            kept: The second result of `forward`.
            dy: Gradient of the output.
        """
        dx, needed = self.backward_input(w, kept, dy)
        return dx, self.backward_weights(w, needed)

    @abstractmethod
    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the gradient of `x`, with its collective; return it, and the pair (x, dy) for `backward_weights`.

        Arguments: see `backward`.
        """

    def backward_weights(self, w: object, kept: object) -> Future[object]:
        """Issue the gradients of the weights, a dict like `w`; `kept` is the second result of `backward_input`."""
        x, dy = cast("Pair", kept)
        return self._issue_product(_weight_gradients, w, x, dy)


def _check_divides(argument: str, count: int, group: Group) -> None:
    """Refuse a number that the ranks of a group cannot share equally."""
    if count % group.size:
        raise UsageError(
            f"{argument}: {count} do not divide by the {group.size} ranks of group '{group.name}'; "
            f"choose a multiple of {group.size}"
        )


class ColumnLinear(_Linear):
    """y_i = x W_i + b_i: rank i has a block of the columns of W and of the bias, and computes these columns of y.

    `x` has all rows on all ranks; with `sequence`, a rank passes its own rows. They are gathered in forward, and again
    in backward, so that a rank holds only its block in between.
    """

    _cut = "outputs"
    _axes: ClassVar = {"weight": 1, "bias": 0}

    def forward(self, w: object, x: object) -> Pair:
        """Issue the product: (..., inputs) to (..., outputs / t). Return its future, and the given `x` for backward.

        Args:
            w: This rank's blocks of the weights.
            x: All rows, or with `sequence` this rank's rows.
        """
        return self._issue_product(_multiply, w, self._gather_rows(x, "x"), name="column product"), x

    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the gradient of `x`, summed over the group. See `_Linear.backward_input`."""
        x = self._gather_rows(kept, "x again")
        partial = self._issue_product(_input_gradient, w, dy, name="column input gradient")
        return self._sum_over_group(partial, "dx"), (x, dy)


class RowLinear(_Linear):
    """y = (sum over ranks of x_i W_i) + b: rank i has some columns of x, and the same rows of W.

    Each rank gets all rows of `y`, or with `sequence` its block of the rows. The first rank adds the bias.
    """

    _cut = "inputs"
    _axes: ClassVar = {"weight": 0}

    def forward(self, w: object, x: object) -> Pair:
        """Issue the product, (..., inputs / t) to (..., outputs), and the sum over ranks; return the sum, and `x`.

        Args:
            w: This rank's blocks of the weights; only the first rank of the group uses the bias.
            x: This rank's columns, with all rows.
        """
        adds_bias = self.group.rank == 0  # the bias must be in the sum once
        partial = self._issue_product(_multiply, w, x, adds_bias, name="row product")
        return self._sum_over_group(partial, "y"), x

    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the gradient of this rank's columns of `x`. See `_Linear.backward_input`."""
        whole = self._gather_rows(dy, "dy")
        return self._issue_product(_input_gradient, w, whole, name="row input gradient"), (kept, whole)


def _multiply(w: Weights, x: Array, adds_bias: bool = True) -> Array:
    """Return x W, plus the bias if `adds_bias` and there is one; if `x` has no data, an array without data."""
    if has_no_data(x):
        return np.broadcast_to(x.flat[0], (*x.shape[:-1], w["weight"].shape[1]))
    y: Array = x @ w["weight"]
    if adds_bias and "bias" in w:
        y += w["bias"]
    return y


def _input_gradient(w: Weights, dy: Array) -> Array:
    """Return the gradient of x, given that of y; if `dy` has no data, an array without data."""
    if has_no_data(dy):
        return np.broadcast_to(dy.flat[0], (*dy.shape[:-1], w["weight"].shape[0]))
    dx: Array = dy @ w["weight"].T
    return dx


def _weight_gradients(w: Weights, x: Array, dy: Array) -> dict[str, Array]:
    """Return the gradients of the weight, and of the bias if `w` has one, summed over all rows.

    If the arrays have no data, the weights themselves are returned: they have the right shapes.
    """
    if has_no_data(dy):
        # Nothing reads their values: only shapes count.
        return dict(w)
    rows = dy.reshape(-1, dy.shape[-1])
    gradients = {"weight": x.reshape(-1, x.shape[-1]).T @ rows}
    return gradients | ({"bias": rows.sum(0)} if "bias" in w else {})


_FLOAT_BYTES = 4  # assumed size of a score, for the virtual clock


class VocabularyLoss:
    """Cross-entropy loss over a vocabulary that is divided among ranks, as a last `ColumnLinear` layer leaves it.

    The loss is the mean over tokens of -log(softmax probability of the target word). It takes two all-reduces, of one
    and of two numbers for each token; gathering the scores would take one number for each token and word. Megatron-LM,
    arXiv:1909.08053, section 3. Pass it to a `Pipeline` as `loss`.

    Args:
        rank: This rank.
        group: The ranks that share the vocabulary: each has a block of the words, in the order of the group.
        words: Number of words of the whole vocabulary.
        tokens: Number of tokens of one call, for the cost on the virtual clock.

    Raises:
        UsageError: The number of words does not divide by the number of ranks.
    """

    rank: Rank
    group: Group
    words: int

    def __init__(self, rank: Rank, group: Group, words: int, *, tokens: int | None = None) -> None:
        _check_divides("words", words, group)
        self.rank, self.group, self.words = rank, group, words
        self._work, self._words_per_rank = MemoryWork(rank), words // group.size
        self._moved_bytes = 2 * _FLOAT_BYTES * self._words_per_rank * (tokens or 0)

    def issue(self, scores: object, target: object) -> Future[object]:
        """Issue the loss and the gradient.

        Args:
            scores: (..., words / t) The scores (logits) of this rank's words, or a future of them.
            target: (...) The index of the target word of each token, from 0, the same on all ranks of the group.

        Returns:
            A future of the pair (gradient of this rank's scores, loss); the loss is the same on all ranks.

        Raises:
            UsageError: At the await: a target is no index of a word, or scores and targets differ in shape.
        """
        group = self.group
        top = self._issue_over_scores(self._highest_scores, scores, target, name="highest score")
        if group.size > 1:
            top = group.all_reduce(top, op="max", name="highest scores", call_site=users_frame())
        sums = self._issue_over_scores(self._exponential_sums, scores, target, top, name="sum of scores")
        if group.size > 1:
            sums = group.all_reduce(sums, name="sums of scores", call_site=users_frame())
        return self._issue_over_scores(self._gradient_and_loss, scores, target, top, sums, name="loss")

    def _issue_over_scores(self, fn: Callable[..., Any], *args: object, name: str) -> Future[Any]:
        """Issue a compute that costs reading and writing all scores of this rank."""
        return self._work.compute(fn, *args, name=name, role="program", moved_bytes=self._moved_bytes)

    # -- on the compute stream ---------------------------------------------------------------------------------------

    def _highest_scores(self, scores: Array, target: Array) -> Array:
        """Return the highest of this rank's scores for each token; refuse wrong shapes and unknown words."""
        if scores.shape[-1:] != (self._words_per_rank,) or scores.shape[:-1] != np.shape(target):
            raise UsageError(
                f"loss: for targets of shape {np.shape(target)}, expected scores of shape "
                f"{(*np.shape(target), self._words_per_rank)}, got {scores.shape}"
            )
        if has_no_data(scores):
            return np.broadcast_to(scores.flat[0], scores.shape[:-1])
        # A word that no rank has would pass unnoticed later, and give a wrong loss.
        wrong = np.flatnonzero((target < 0) | (target >= self.words))
        if wrong.size:
            raise UsageError(f"target: expected 0 to {self.words - 1}, got {np.asarray(target).flat[wrong[0]]}")
        top: Array = scores.max(-1)
        return top

    def _exponential_sums(self, scores: Array, target: Array, top: Array) -> Array:
        """Return (2, ...), for each token: this rank's sum of exp(score - top), and target score - top.

        The second number is 0 if another rank has the target word, so the sum over ranks is the target's. `top`, the
        highest score on all ranks, is subtracted so that no exponential overflows.
        """
        if has_no_data(scores):
            return np.broadcast_to(scores.flat[0], (2, *scores.shape[:-1]))
        is_own, word = self._find_own_words(target)
        target_score = np.take_along_axis(scores, word[..., None], -1)[..., 0] - top
        return np.stack([np.exp(scores - top[..., None]).sum(-1), np.where(is_own, target_score, scores.dtype.type(0))])

    def _gradient_and_loss(self, scores: Array, target: Array, top: Array, sums: Array) -> tuple[Array, float]:
        """Return the gradient of this rank's scores, (probability - one-hot target) / tokens, and the mean loss.

        `sums` are those of `_exponential_sums`, of all ranks together. Scores without data are their own gradient, and
        the loss is then 0.
        """
        if has_no_data(scores):
            return scores, 0.0
        total, target_score = sums
        p = np.exp(scores - top[..., None])
        p /= total[..., None]
        is_own, word = self._find_own_words(target)
        at = (*np.nonzero(is_own), word[is_own])
        p[at] -= 1  # the gradient: probability - 1 at the target word, probability elsewhere
        p /= np.asarray(total.size, p.dtype)
        return p, float((np.log(total) - target_score).mean())

    def _find_own_words(self, target: Array) -> tuple[Array, Array]:
        """Return a mask of the targets that are words of this rank, and their columns in this rank's scores, else 0."""
        word = np.asarray(target) - self.group.rank * self._words_per_rank
        is_own = (word >= 0) & (word < self._words_per_rank)
        return is_own, np.where(is_own, word, 0)
