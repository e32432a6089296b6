"""Send matrices as products of two thin ones, and keep the difference for later steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UsageError
from ...timeline.span import RoleName
from .operations import Floats, Values, beside, check_floats

if TYPE_CHECKING:
    from ..buckets.plan import GradientBucket

# Matrices that would not send at least so many times less are sent whole, as torch does (powerSGD_hook.py).
_MIN_GAIN = 2


def power_sgd(rank: int = 4, *, warm_up: int = 10, seed: int = 0) -> Callable[[GradientBucket], Awaitable[Values]]:
    """Return a hook that sends a low-rank approximation of each matrix, with error feedback.

    Of a gradient g, seen as n rows and m columns, with the error e of the last step: a = g + e; P = mean of a Q, made
    orthogonal; Q = mean of aᵀ P; the result is P Qᵀ. Q is where the next step begins. Vogels, Karimireddy, Jaggi,
    "PowerSGD", arXiv:1905.13727. A rank keeps e = a - P (aᵀ P)ᵀ (`bucket.state["error"]`, float32), with its own Q: of
    the same mean as with that of all, without what a rank's gradient differs by from the mean, which would pile up.

    The same bits on all ranks where their processors are alike: each rank orthogonalises the same P.

    Cost: rank * (n + m) floats in place of n * m, in two dependent all-reduces; 10 n m rank operations. Vectors, and
    matrices that would not get half as large, travel whole with the first of them.

    Args:
        rank: Columns of P and Q. 1 to 4 are usual.
        warm_up: Steps at the start that send everything: early gradients are far from low rank.
        seed: Of the first Q, the same on all ranks.

    Raises:
        UsageError: For a rank below 1, or a negative warm-up.
    """
    for name, value, least in (("rank", rank, 1), ("warm_up", warm_up, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name}: expected a whole number from {least}, got {value!r}")

    async def hook(bucket: GradientBucket) -> Values:
        check_floats(bucket, "power_sgd")
        group, priority, state, place = bucket.group, bucket.priority, bucket.state, bucket.place
        calls = state["calls"] = state.get("calls", 0) + 1
        if calls <= warm_up:
            return await group.all_reduce(
                bucket.buffer, op="mean", priority=priority, name=RoleName("all_reduce", "bucket"), call_site=place
            )
        plan = _Plan.of(bucket.shapes, rank)
        if "q" not in state:
            state["q"] = plan.random(np.random.default_rng([seed, bucket.index]))
            state["error"] = np.zeros(bucket.buffer.size, np.float32)
        sent = await beside(bucket, partial(plan.first, state), bucket.buffer, passes=2 * rank, name="power_sgd P")
        p = await group.all_reduce(sent, op="mean", priority=priority, name=RoleName("P", "bucket"), call_site=place)
        sent = await beside(bucket, partial(plan.second, state), p, passes=2 * rank, name="power_sgd Q")
        q = await group.all_reduce(sent, op="mean", priority=priority, name=RoleName("Q", "bucket"), call_site=place)
        return await beside(bucket, partial(plan.third, state), p, q, bucket.buffer, passes=2 * rank, name="power_sgd")

    return hook


@dataclass(frozen=True)
class _Plan:
    """The parts of a bucket that are sent as two thin matrices, and the parts that are sent whole."""

    shapes: list[tuple[int, int, int]] = field(default_factory=list)  # (rows, columns, thin columns) of each matrix
    places: list[slice] = field(default_factory=list)  # Where each is in the bucket
    whole: list[slice] = field(default_factory=list)  # Places of the parts that are sent whole

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], rank: int) -> _Plan:
        plan, start = cls(), 0
        for shape in shapes:
            place = slice(start, start := start + prod(shape))
            rows, columns = shape[0] if shape else 1, prod(shape[1:])
            thin = min(rank, rows, columns)
            if thin and (rows + columns) * thin * _MIN_GAIN < rows * columns:
                plan.shapes.append((rows, columns, thin))
                plan.places.append(place)
            else:
                plan.whole.append(place)
        return plan

    def random(self, numbers: np.random.Generator) -> list[Floats]:
        return [_orthogonal(numbers.standard_normal((m, r), np.float32)) for _, m, r in self.shapes]

    def first(self, state: dict[str, Any], gradient: Values) -> Floats:
        """Add the error to the matrices, which then hold a; return all a Q, and behind them the whole parts."""
        a: Floats = state["error"]
        a += gradient.astype(np.float32, copy=False)
        thin = [self._matrix(a, i) @ q for i, q in enumerate(state["q"])]
        return np.concatenate([each.reshape(-1) for each in (*thin, *(a[place] for place in self.whole))])

    def second(self, state: dict[str, Any], sent: Floats) -> Floats:
        """Make the mean P orthogonal; return all aᵀ P, and leave a - P (aᵀ P)ᵀ."""
        a: Floats = state["error"]
        state["p"], parts = self._orthogonal_parts(sent), []
        for i, p in enumerate(state["p"]):
            matrix = self._matrix(a, i)
            parts.append(matrix.T @ p)
            matrix -= p @ parts[-1].T
        for place in self.whole:
            a[place] = 0
        return np.concatenate([np.empty(0, np.float32), *(part.reshape(-1) for part in parts)])

    def third(self, state: dict[str, Any], first: Floats, second: Floats, like: Values) -> Values:
        """Return the mean of the bucket; its Q is where the next step begins."""
        mean, start = np.empty(like.size, np.float32), 0
        state["q"] = []
        for i, (_, m, r) in enumerate(self.shapes):
            q = second[start : start + m * r].reshape(m, r)
            start += m * r
            np.matmul(state["p"][i], q.T, out=self._matrix(mean, i))
            state["q"].append(_orthogonal(q))
        start = sum(n * r for n, _, r in self.shapes)
        for place in self.whole:
            mean[place] = first[start : (start := start + place.stop - place.start)]
        return mean.astype(like.dtype, copy=False)

    def _orthogonal_parts(self, sent: Floats) -> list[Floats]:
        parts, start = [], 0
        for n, _, r in self.shapes:
            parts.append(_orthogonal(sent[start : start + n * r].reshape(n, r)))
            start += n * r
        return parts

    def _matrix(self, flat: Floats, index: int) -> Floats:
        return flat[self.places[index]].reshape(self.shapes[index][:2])


def _orthogonal(matrix: Floats) -> Floats:
    """Return a basis of the columns by Gram and Schmidt; a dependent column becomes 0."""
    basis = matrix.astype(np.float32)  # a copy
    for column in range(basis.shape[1]):
        mine = basis[:, column]
        before = np.linalg.norm(mine)
        for _ in range(2):  # once more because of rounding
            mine -= basis[:, :column] @ (basis[:, :column].T @ mine)
        length = np.linalg.norm(mine)
        mine *= 0 if length <= 1e-6 * before else 1 / length
    return basis
