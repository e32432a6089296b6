"""Weights and optimizer state in flat arrays, one set for each dtype, and the memory that a model takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from ..runtime.rank import Rank
from .buckets.gradients import is_finite
from .buckets.plan import BucketPlan, Slot, plan_by_dtype
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
"""Neighbouring elements: their slice of the flat weights, and their slice of a bucket."""


class FlatWeights:
    """Weights of one dtype side by side, with the optimizer's state: all of them, or the part that a rank has.

    Args:
        rank: The rank.
        plan: Names, shapes and places of the weights.
        optimizer: Makes the state.
        part: Elements of the plan that this rank has; by default all.
        flat: Memory of these weights; by default new memory.

    Attributes:
        plan: As given.
        part: As given.
        flat: The weights of the part.
        state: The optimizer's state of the part: flat arrays by name.
    """

    def __init__(
        self,
        rank: Rank,
        plan: BucketPlan,
        optimizer: Optimizer,
        *,
        part: slice | None = None,
        flat: Array | None = None,
    ) -> None:
        self.plan = plan
        self.part: slice = part or slice(0, plan.size)
        size = self.part.stop - self.part.start
        self.flat: Array = rank.empty(size, plan.dtype) if flat is None else flat
        real = self.flat.flags.writeable
        state = optimizer.fresh(size if real else 0, plan.dtype)
        self.state: dict[str, Array] = (
            state if real else {key: rank.empty(size, array.dtype) for key, array in state.items()}
        )

    def arrays(self) -> list[Array]:
        """Return the weights, then the optimizer's state sorted by name, all flat."""
        return [self.flat, *(self.state[key] for key in sorted(self.state))]

    def places(self) -> list[tuple[Slot, slice]]:
        """Return each weight with elements in the part of this rank, and the slice of `flat` with these."""
        begin, end, slots = self.part.start, self.part.stop, self.plan.slots
        places = [(slot, slice(max(slot.start, begin) - begin, min(slot.stop, end) - begin)) for slot in slots]
        return [(slot, place) for slot, place in places if place.start < place.stop]

    def tensors(self, prefix: str = "") -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of all weights of the plan and of their state, by name.

        Args:
            prefix: Prefix of the names of the state.
        """
        tensors = {slot.name: (self.plan.dtype.name, slot.shape) for slot in self.plan.slots}
        for key, array in self.state.items():
            for slot in self.plan.slots:
                tensors[state_name(prefix + key, slot.name)] = (array.dtype.name, slot.shape)
        return tensors

    def pieces(self, *, whole: Array | None = None, prefix: str = "") -> list[Shard]:
        """Return the weights and the state of the part, as they lie in memory.

        Args:
            whole: All weights of the plan, to be returned in the place of the part.
            prefix: Prefix of the names of the state.
        """
        pieces: list[Shard] = []
        if whole is not None:
            pieces = [Shard.whole(slot.name, slot.shape, whole[slot.start : slot.stop]) for slot in self.plan.slots]
        for slot, place in self.places():
            arrays = {} if whole is not None else {slot.name: self.flat}
            arrays |= {state_name(prefix + key, slot.name): array for key, array in self.state.items()}
            start, stop = (at + self.part.start - slot.start for at in (place.start, place.stop))
            pieces += [
                Shard(tensor=name, shape=slot.shape, start=start, stop=stop, data=array[place])
                for name, array in arrays.items()
            ]
        return pieces


class Parameters:
    """The weights of a model on one rank, side by side in memory, in an order of choice.

    A world without data has arrays without data here as well: `real` is False then, and nothing is ever written.

    Args:
        leaves: First values by name.

    Attributes:
        views: The weights by name, in the shapes that they were given in; read-only for everybody else.
        weights: All weights of a dtype, and the optimizer's state; written by `update` only.
    """

    def __init__(
        self, rank: Rank, leaves: Mapping[str, Array], optimizer: Optimizer, *, order: Iterable[str] | None = None
    ) -> None:
        self.views: dict[str, Array] = {}
        self.weights: dict[DType, FlatWeights] = {}
        self._optimizer = optimizer
        self._slices: dict[str, slice] = {}
        for plan in plan_by_dtype({name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}, order or leaves):
            weights = self.weights[plan.dtype] = FlatWeights(rank, plan, optimizer)
            self._slices |= {slot.name: slice(slot.start, slot.stop) for slot in plan.slots}
            self.views |= plan.views(weights.flat)
        self.views = {name: self.views[name] for name in leaves}
        self.real: bool = all(weights.flat.flags.writeable for weights in self.weights.values())
        for name, view in self.views.items():
            if self.real:
                view[...] = leaves[name]
            view.setflags(write=False)

    def is_like(self, other: Parameters) -> bool:
        """Whether another set of weights has the same names, shapes, dtypes and places."""
        return {t: w.plan.slots for t, w in self.weights.items()} == {t: w.plan.slots for t, w in other.weights.items()}

    def runs(self, plan: BucketPlan) -> list[Run]:
        """Return the places of a bucket's weights in flat memory and in the bucket; neighbours in both are one run."""
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
            Whether all elements are finite, as far as that is checked; else the update is made in part, or not at all.
        """
        if not self.real:
            return True
        flat, state = self.weights[dtype].flat, self.weights[dtype].state
        for here, there in cut_into_blocks(runs):
            part = gradient[there]
            if check and not is_finite(part):
                return False
            self._optimizer.update(flat[here], part, {key: array[here] for key, array in state.items()}, step)
        return True

    def tensors(self, prefix: str = "") -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of the weights and of the optimizer's state, by name; see `FlatWeights`."""
        tensors = {name: form for weights in self.weights.values() for name, form in weights.tensors(prefix).items()}
        return {name: tensors[name] for name in [*self.views, *tensors]}

    def pieces(self, prefix: str = "") -> list[Shard]:
        """Return all weights and the optimizer's state, as they lie in memory; see `FlatWeights`."""
        return [piece for weights in self.weights.values() for piece in weights.pieces(prefix=prefix)]

    def moved_bytes(self, plan: BucketPlan) -> int:
        """Return the bytes that an update of a bucket reads and writes: gradient, weights, and all state twice."""
        state = sum(2 * array.dtype.itemsize for array in self.weights[plan.dtype].state.values())
        return plan.size * (3 * plan.dtype.itemsize + state)


def cut_into_blocks(runs: Iterable[Run]) -> Iterator[Run]:
    """Yield runs in blocks of at most `_BLOCK` elements."""
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
        """Sum of the three, in bytes."""
        return self.parameters + self.gradients + self.optimizer

    def beside(self, expected: ModelMemory) -> str:
        """Return a table of these measured sizes, with the expected sizes by formula in the next column."""
        rows = [("", "measured", "formula")]
        for name in (*(field.name for field in fields(self)), "total"):
            rows.append((name, f"{getattr(self, name):,.0f} B", f"{getattr(expected, name):,.0f} B"))
        wide = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(f"{a:{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}".rstrip() for a, b, c in rows)


def measure_memory(sets: Iterable[FlatWeights], *, gradients: int, others: int = 0) -> ModelMemory:
    """Return the memory of weights on this rank, of gradients, and of `others`: bytes of weights of other ranks."""
    arrays = [weights.arrays() for weights in sets]
    return ModelMemory(
        parameters=others + sum(flat.nbytes for flat, *_ in arrays),
        gradients=gradients,
        optimizer=sum(array.nbytes for _, *state in arrays for array in state),
    )


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
