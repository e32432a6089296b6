"""Weights and optimizer state in flat arrays, one set for each dtype, and the memory that a model takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from ..runtime.rank import Rank
from .buckets.gradients import is_finite
from .buckets.plan import BucketPlan
from .checkpoints.pieces import Shard, state_name
from .optimizers import Optimizer

if TYPE_CHECKING:
    from .tree import Array

_BLOCK = 1 << 16
"""Elements looked at and updated at once: 256 KiB of float32, which a core's second-level cache holds."""

DType: TypeAlias = "np.dtype[np.generic]"

Stage: TypeAlias = Literal[1, 2, 3]
"""A stage of ZeRO: ranks share out the optimizer's state; gradients as well; parameters as well."""

Run: TypeAlias = tuple[slice, slice]
"""Elements that lie side by side among the weights, and in a bucket: where in either."""


class Parameters:
    """The weights of a model on one rank, side by side in memory, in an order of choice.

    A world without data has arrays without data here as well: `real` is False then, and nothing is ever written.

    Attributes:
        views: The weights by name, in the shapes that they were given in; read-only for everybody else.
        flat: All weights of a dtype; written by `update` only.
        state: The optimizer's state: flat arrays by name.
    """

    def __init__(
        self, rank: Rank, leaves: Mapping[str, Array], optimizer: Optimizer, *, order: Iterable[str] | None = None
    ) -> None:
        self.views: dict[str, Array] = {}
        self.flat: dict[DType, Array] = {}
        self.state: dict[DType, dict[str, Array]] = {}
        self._optimizer = optimizer
        self._slices: dict[str, slice] = {}
        names = list(leaves) if order is None else list(order)
        for dtype in {leaves[name].dtype: None for name in names}:
            self._place(rank, [name for name in names if leaves[name].dtype == dtype], dtype, leaves)
        self.views = {name: self.views[name] for name in leaves}
        self.real: bool = all(flat.flags.writeable for flat in self.flat.values())

    def _place(self, rank: Rank, names: list[str], dtype: DType, leaves: Mapping[str, Array]) -> None:
        start = 0
        for name in names:
            self._slices[name] = slice(start, start + leaves[name].size)
            start += leaves[name].size
        flat = self.flat[dtype] = rank.empty(start, dtype)
        real = flat.flags.writeable
        kept = self._optimizer.fresh(start if real else 0, dtype)
        self.state[dtype] = kept if real else {key: rank.empty(start, each.dtype) for key, each in kept.items()}
        for name in names:
            view = flat[self._slices[name]]
            if real:
                view[:] = leaves[name].reshape(-1)
            view = view.reshape(leaves[name].shape)
            view.setflags(write=False)
            self.views[name] = view

    def is_like(self, other: Parameters) -> bool:
        """Whether another set of weights has the same names, shapes, dtypes and places."""
        same = {name: (view.shape, view.dtype) for name, view in self.views.items()}
        return self._slices == other._slices and same == {n: (v.shape, v.dtype) for n, v in other.views.items()}

    def runs(self, plan: BucketPlan) -> list[Run]:
        """Return where the weights of a bucket lie: neighbours in both places are one run."""
        runs: list[Run] = []
        for slot in plan.slots:
            here, there = self._slices[slot.name], slice(slot.start, slot.stop)
            if runs and runs[-1][0].stop == here.start:
                here, there = slice(runs[-1][0].start, here.stop), slice(runs[-1][1].start, there.stop)
                runs.pop()
            runs.append((here, there))
        return runs

    def update(self, dtype: DType, runs: Iterable[Run], gradient: Array, step: int, *, check: bool = False) -> bool:
        """Let the optimizer make a step with the gradient of a bucket.

        Args:
            dtype: Dtype of the weights.
            runs: Where they are, and where their gradients are in the bucket.
            gradient: Gradient of the bucket, flat.
            step: From 1.
            check: Whether to look for elements that are not finite, while they are in the caches anyway.

        Returns:
            Whether nothing was found; else the update has not been made, or not all of it.
        """
        if not self.real:
            return True
        flat, state = self.flat[dtype], self.state[dtype]
        for here, there in blocks(runs):
            part = gradient[there]
            if check and not is_finite(part):
                return False
            kept = {key: each[here] for key, each in state.items()}
            self._optimizer.update(flat[here], part, kept, step)
        return True

    def make_step(self, gradients: Mapping[str, Array], step: int) -> None:
        """Let the optimizer make a step with gradients that come one by one, by name."""
        if not self.real:
            return
        for name, gradient in gradients.items():
            dtype, here = self.views[name].dtype, self._slices[name]
            kept = {key: each[here] for key, each in self.state[dtype].items()}
            self._optimizer.update(self.flat[dtype][here], gradient.reshape(-1), kept, step)

    def pieces(self) -> list[Shard]:
        """Return all weights and the optimizer's state, as they lie in memory."""
        found: list[Shard] = []
        for name, view in self.views.items():
            place = self._slices[name]
            found.append(Shard.whole(name, view.shape, self.flat[view.dtype][place]))
            for key, kept in self.state[view.dtype].items():
                found.append(Shard.whole(state_name(key, name), view.shape, kept[place]))
        return found

    def moved_bytes(self, plan: BucketPlan) -> int:
        """Return the bytes that an update of a bucket reads and writes: gradient, weights, and all state twice."""
        kept = sum(2 * each.dtype.itemsize for each in self.state[plan.dtype].values())
        return plan.size * (3 * plan.dtype.itemsize + kept)


def blocks(runs: Iterable[Run]) -> Iterator[Run]:
    """Cut runs into such pieces as the caches hold."""
    for here, there in runs:
        for start in range(0, here.stop - here.start, _BLOCK):
            stop = min(start + _BLOCK, here.stop - here.start)
            yield slice(here.start + start, here.start + stop), slice(there.start + start, there.start + stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Bytes that a model keeps on one rank from step to step."""

    parameters: float  # Weights
    gradients: float  # Where they are kept for the optimizer
    optimizer: float  # The optimizer's state

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer

    def beside(self, expected: ModelMemory) -> str:
        """Return a table of these measured sizes beside the sizes by formula."""
        rows = [("", "measured", "formula")]
        for name in (*(field.name for field in fields(self)), "total"):
            rows.append((name, f"{getattr(self, name):,.0f} B", f"{getattr(expected, name):,.0f} B"))
        wide = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(f"{a:{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}".rstrip() for a, b, c in rows)


def expected_memory(stage: Stage, ranks: int, *, parameters: int, optimizer: int) -> ModelMemory:
    """Return the memory of each of N ranks for P bytes of parameters, as many of gradients, and S of optimizer state.

    ======  ============  ============  ============
    stage   parameters    gradients     optimizer
    ======  ============  ============  ============
    1       P             P             S / N
    2       P             P / N         S / N
    3       P / N         P / N         S / N
    ======  ============  ============  ============

    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", arXiv 1910.02054,
    section 5.

    Args:
        stage: Stage of ZeRO.
        ranks: N.
        parameters: P.
        optimizer: S.
    """
    return ModelMemory(
        parameters=parameters / (ranks if stage > 2 else 1),
        gradients=parameters / (ranks if stage > 1 else 1),
        optimizer=optimizer / ranks,
    )
