"""Weights and optimizer state in flat arrays, one set for each dtype, and the memory that a model takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from ..runtime.rank import Rank
from .buckets.gradients import is_finite
from .buckets.plan import BucketPlan, Slot, plan_buckets_by_dtype
from .checkpoints.pieces import Shard, state_name
from .optimizers import Optimizer

if TYPE_CHECKING:
    from .tree import Array

_BLOCK = 1 << 16
"""Elements looked at and updated at once: 256 KiB of float32, which a core's second-level cache holds."""

DType: TypeAlias = "np.dtype[np.generic]"

Stage: TypeAlias = Literal[1, 2, 3]
"""A stage of ZeRO: ranks divide the optimizer's state (1), also the gradients (2), also the parameters (3)."""

Run: TypeAlias = tuple[slice, slice]
"""Elements that are contiguous in the flat weights and in a bucket: their slice of each."""


class FlatWeights:
    """Weights of one dtype side by side in memory, or a rank's part of them, with the optimizer's state.

    Args:
        rank: The rank.
        plan: Names, shapes and places of all the weights.
        optimizer: Makes the state.
        part: Elements of the plan that this rank has; by default all.
        flat: Memory for the weights of the part; by default new memory.

    Attributes:
        plan: Names, shapes and places of the weights.
        part: Elements of the plan that this rank has.
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
        # In a world of shapes alone arrays are read-only. A state of 0 elements is made there, to learn its dtypes.
        real = self.flat.flags.writeable
        state = optimizer.fresh(size if real else 0, plan.dtype)
        self.state: dict[str, Array] = (
            state if real else {key: rank.empty(size, array.dtype) for key, array in state.items()}
        )

    def arrays(self) -> list[Array]:
        """Return the flat arrays of this rank: the weights, then the optimizer's state, sorted by name."""
        return [self.flat, *(self.state[key] for key in sorted(self.state))]

    def slots_in_part(self) -> list[tuple[Slot, slice]]:
        """Return each weight that has elements in this rank's part, with the slice of `flat` that holds them.

        Example: the part is 4:10 of the plan. Of a weight in 2:6, the part has 4:6, which are elements 0:2 of `flat`.
        """
        begin, end, slots = self.part.start, self.part.stop, self.plan.slots
        places = [(slot, slice(max(slot.start, begin) - begin, min(slot.stop, end) - begin)) for slot in slots]
        return [(slot, place) for slot, place in places if place.start < place.stop]

    def tensors(self, prefix: str = "") -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of all weights of the plan and of their optimizer state, by name in checkpoints.

        Args:
            prefix: Text before the name of each state.
        """
        tensors = {slot.name: (self.plan.dtype.name, slot.shape) for slot in self.plan.slots}
        for key, array in self.state.items():
            for slot in self.plan.slots:
                tensors[state_name(prefix + key, slot.name)] = (array.dtype.name, slot.shape)
        return tensors

    def pieces(self, *, whole: Array | None = None, prefix: str = "") -> list[Shard]:
        """Return the weights and the optimizer state of this rank's part as pieces, whose data are the arrays here.

        Args:
            whole: (plan.size,) All weights of the plan. If given, they are returned in the place of the part's weights.
            prefix: Text before the name of each state.
        """
        pieces: list[Shard] = []
        if whole is not None:
            pieces = [
                Shard.of_whole_tensor(slot.name, slot.shape, whole[slot.start : slot.stop])
                for slot in self.plan.slots
                if slot.stop > slot.start  # checkpoints have no tensors without elements
            ]
        for slot, place in self.slots_in_part():
            arrays = {} if whole is not None else {slot.name: self.flat}
            # `start`, `stop`: the part's elements of this weight, counted in the weight.
            arrays |= {state_name(prefix + key, slot.name): array for key, array in self.state.items()}
            start, stop = (at + self.part.start - slot.start for at in (place.start, place.stop))
            pieces += [
                Shard(tensor=name, shape=slot.shape, start=start, stop=stop, data=array[place])
                for name, array in arrays.items()
            ]
        return pieces


class Parameters:
    """All weights of a model on one rank: one flat array for each dtype.

    Args:
        rank: The rank.
        leaves: First values of the weights, by name.
        optimizer: Makes the optimizer's state, and updates the weights.
        order: Names of the weights in the order in which they lie in memory; by default that of `leaves`.

    Attributes:
        views: The weights by name, in their shapes: read-only views of the flat arrays.
        weights: For each dtype, the flat weights with the optimizer's state; changed by `apply_gradient` only.
        real: Whether arrays have data. In a world of shapes alone it is False, and nothing is ever written.
    """

    def __init__(
        self, rank: Rank, leaves: Mapping[str, Array], optimizer: Optimizer, *, order: Iterable[str] | None = None
    ) -> None:
        self.views: dict[str, Array] = {}
        self.weights: dict[DType, FlatWeights] = {}
        self._optimizer = optimizer
        self._slices: dict[str, slice] = {}
        for plan in plan_buckets_by_dtype(
            {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}, order or leaves
        ):
            weights = self.weights[plan.dtype] = FlatWeights(rank, plan, optimizer)
            self._slices |= {slot.name: slice(slot.start, slot.stop) for slot in plan.slots}
            self.views |= plan.views(weights.flat)
        self.views = {name: self.views[name] for name in leaves}
        self.real: bool = all(weights.flat.flags.writeable for weights in self.weights.values())
        for name, view in self.views.items():
            if self.real:
                view[...] = leaves[name]
            view.setflags(write=False)

    def has_same_layout(self, other: Parameters) -> bool:
        """Whether another model's weights have the same names, shapes, dtypes and places in memory."""
        return {t: w.plan.slots for t, w in self.weights.items()} == {t: w.plan.slots for t, w in other.weights.items()}

    def runs_of_bucket(self, plan: BucketPlan) -> list[Run]:
        """Return the places of a bucket's weights: pairs of a slice of the flat weights and a slice of the bucket.

        Weights that follow each other in both are merged into one run.
        """
        runs: list[Run] = []
        for slot in plan.slots:
            weights, bucket = self._slices[slot.name], slice(slot.start, slot.stop)
            last_weights, last_bucket = runs[-1] if runs else (weights, bucket)
            # In a bucket, weights always follow each other. Only their places in the flat weights can have gaps.
            if runs and last_weights.stop == weights.start:
                weights, bucket = slice(last_weights.start, weights.stop), slice(last_bucket.start, bucket.stop)
                runs.pop()
            runs.append((weights, bucket))
        return runs

    def apply_gradient(
        self, dtype: DType, runs: Iterable[Run], gradient: Array, step: int, *, check: bool = False
    ) -> bool:
        """Let the optimizer make a step with the gradient of a bucket.

        Args:
            dtype: Dtype of the weights.
            runs: Places of the weights, and of their gradients in the bucket.
            gradient: Gradient of the bucket, flat.
            step: Number of the step, from 1.
            check: Whether to look for gradients that are not finite, while they are in the caches anyway.

        Returns:
            False if `check` found an element that is not finite: then the weights are updated in part, or not at all.
            True otherwise.
        """
        if not self.real:
            return True
        flat, state = self.weights[dtype].flat, self.weights[dtype].state
        for weights, bucket in cut_runs_into_blocks(runs):
            part = gradient[bucket]
            if check and not is_finite(part):
                return False
            self._optimizer.update(flat[weights], part, {key: array[weights] for key, array in state.items()}, step)
        return True

    def tensors(self, prefix: str = "") -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of the weights, then of the optimizer's state, by name; see `FlatWeights.tensors`."""
        tensors = {name: form for weights in self.weights.values() for name, form in weights.tensors(prefix).items()}
        # The weights first, in the order in which they were given.
        return {name: tensors[name] for name in [*self.views, *tensors]}

    def pieces(self, prefix: str = "") -> list[Shard]:
        """Return all weights and the optimizer's state as pieces; see `FlatWeights.pieces`."""
        return [piece for weights in self.weights.values() for piece in weights.pieces(prefix=prefix)]

    def bytes_moved_by_update(self, plan: BucketPlan) -> int:
        """Return the bytes that an update of a bucket reads and writes: the gradient once, weights and state twice."""
        state = sum(2 * array.dtype.itemsize for array in self.weights[plan.dtype].state.values())
        return plan.size * (3 * plan.dtype.itemsize + state)


def cut_runs_into_blocks(runs: Iterable[Run]) -> Iterator[Run]:
    """Yield the runs, cut into runs of at most `_BLOCK` elements."""
    for here, there in runs:
        for start in range(0, here.stop - here.start, _BLOCK):
            stop = min(start + _BLOCK, here.stop - here.start)
            yield slice(here.start + start, here.start + stop), slice(there.start + start, there.start + stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Bytes that a model keeps on one rank from step to step."""

    parameters: float  # Bytes of the weights
    gradients: float  # Bytes of the gradients, as far as they stay until the optimizer's step
    optimizer: float  # Bytes of the optimizer's state

    @property
    def total(self) -> float:
        """Sum of the three, in bytes."""
        return self.parameters + self.gradients + self.optimizer

    def beside(self, expected: ModelMemory) -> str:
        """Return a table, as text, of these measured sizes next to the sizes that the formula predicts."""
        rows = [("", "measured", "formula")]
        for name in (*(field.name for field in fields(self)), "total"):
            rows.append((name, f"{getattr(self, name):,.0f} B", f"{getattr(expected, name):,.0f} B"))
        wide = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(f"{a:{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}".rstrip() for a, b, c in rows)


def measure_memory(sets: Iterable[FlatWeights], *, gradients_bytes: int, others_bytes: int = 0) -> ModelMemory:
    """Return the bytes that a model keeps on this rank.

    Args:
        sets: The weights of this rank, with the optimizer's state.
        gradients_bytes: Bytes of gradients that stay until the optimizer's step.
        others_bytes: Bytes of weights of other ranks' parts that this rank has as well.
    """
    arrays = [weights.arrays() for weights in sets]
    return ModelMemory(
        parameters=others_bytes + sum(flat.nbytes for flat, *_ in arrays),
        gradients=gradients_bytes,
        optimizer=sum(array.nbytes for _, *state in arrays for array in state),
    )


def expected_memory(stage: Stage, ranks: int, *, parameters: int, optimizer: int) -> ModelMemory:
    """Return the memory of each of N ranks, for P bytes of parameters, P of gradients and S of optimizer state.

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
        ranks: Number of ranks, N.
        parameters: Bytes of all parameters, P.
        optimizer: Bytes of all optimizer state, S.
    """
    return ModelMemory(
        parameters=parameters / (ranks if stage > 2 else 1),
        gradients=parameters / (ranks if stage > 1 else 1),
        optimizer=optimizer / ranks,
    )
