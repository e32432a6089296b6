"""Cross-entropy of scores that are cut by words over a group: no rank ever has those of all words."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .memory_work import MemoryWork
from .pending import has_no_data

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    Array = NDArray[Any]

_FLOAT_BYTES = 4  # of a score, for the virtual clock


class VocabularyLoss:
    """The mean of -log(probability) of the words that came, of scores as a last `ColumnLinear` leaves them.

    Two all-reduces, of one number for each token and of two, where gathering the scores would take a number for each
    token and word. Megatron-LM, arXiv:1909.08053, section 3. A pipeline takes it for its `loss`.

    Args:
        rank: This rank.
        group: The ranks that share the words, each a block of them, in the order of the group.
        words: Of all ranks.
        tokens: Of a batch, for the virtual clock.

    Raises:
        UsageError: If the words do not divide by the ranks of the group.
    """

    def __init__(self, rank: Rank, group: Group, words: int, *, tokens: int | None = None) -> None:
        if words % group.size:
            raise UsageError(f"words: {words} do not divide by the {group.size} ranks of group '{group.name}'")
        self.rank, self.group, self.words = rank, group, words
        self._work, self._each = MemoryWork(rank), words // group.size
        self._moved_bytes = 2 * _FLOAT_BYTES * self._each * (tokens or 0)

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
            self._top, scores, target, name="highest score", moved_bytes=moved_bytes
        )
        if group.size > 1:
            top = group.all_reduce(top, op="max", name="highest scores")
        sums: Future[Array] = self._work.compute(
            self._sums, scores, target, top, name="sum of scores", moved_bytes=moved_bytes
        )
        if group.size > 1:
            sums = group.all_reduce(sums, name="sums of scores")
        return cast(
            "Future[object]",
            self._work.compute(self._both, scores, target, top, sums, name="loss", moved_bytes=moved_bytes),
        )

    # -- on the compute stream ---------------------------------------------------------------------------------------

    def _top(self, scores: Array, target: Array) -> Array:
        if scores.shape[-1:] != (self._each,) or scores.shape[:-1] != np.shape(target):
            raise UsageError(
                f"loss: scores have shape {scores.shape} and targets {np.shape(target)}; expected "
                f"{(*np.shape(target), self._each)}"
            )
        if has_no_data(scores):
            return np.broadcast_to(scores.flat[0], scores.shape[:-1])
        wrong = np.flatnonzero((target < 0) | (target >= self.words))
        if wrong.size:
            raise UsageError(f"target: expected 0 to {self.words - 1}, got {np.asarray(target).flat[wrong[0]]}")
        top: Array = scores.max(-1)
        return top

    def _sums(self, scores: Array, target: Array, top: Array) -> Array:
        """Return the sum of this rank's exponentials, and the score of the word that came if it is here: (2, ...)."""
        if has_no_data(scores):
            return np.broadcast_to(scores.flat[0], (2, *scores.shape[:-1]))
        here, word = self._here(target)
        came = np.take_along_axis(scores, word[..., None], -1)[..., 0] - top
        return np.stack([np.exp(scores - top[..., None]).sum(-1), np.where(here, came, scores.dtype.type(0))])

    def _both(self, scores: Array, target: Array, top: Array, sums: Array) -> tuple[Array, float]:
        if has_no_data(scores):
            return scores, 0.0
        total, came = sums
        p = np.exp(scores - top[..., None])
        p /= total[..., None]
        here, word = self._here(target)
        at = (*np.nonzero(here), word[here])
        p[at] -= 1
        p /= np.asarray(total.size, p.dtype)
        return p, float((np.log(total) - came).mean())

    def _here(self, target: Array) -> tuple[Array, Array]:
        """Return which targets are this rank's, and their places here, 0 for the others."""
        place = np.asarray(target) - self.group.rank * self._each
        here = (place >= 0) & (place < self._each)
        return here, np.where(here, place, 0)
