"""One bucket on one rank of several that share it: what this rank keeps of it, and the plain functions of its steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from ...runtime.rank import Rank
from ..checkpoints.pieces import Piece, state_name
from ..optimizers import Optimizer
from .gradients import Place, check_gradient, check_packed
from .plan import BucketPlan, Slot

if TYPE_CHECKING:
    from ..tree import Array

Stage: TypeAlias = Literal[1, 2, 3]
"""What is shared out: the optimizer's state; gradients as well; parameters as well."""


class Gauge:
    """How many bytes are there now, and how many there were at most; any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run while its holder adds
        self.now = self.peak = 0

    def add(self, nbytes: int) -> None:
        """Take note of bytes that have come, or, below 0, gone."""
        with self._lock:
            self.now += nbytes
            self.peak = max(self.peak, self.now)


class _Gathered(dict[str, "Array"]):
    """Whole parameters by name, for as long as somebody has them."""

    __slots__ = ("__weakref__",)


def shares(size: int, ranks: int) -> tuple[int, ...]:
    """Return how many of `size` elements each rank has: as even as can be, the first ones have one more."""
    return tuple(size // ranks + (rank < size % ranks) for rank in range(ranks))


class Shard:
    """A bucket's parameters, gradients and optimizer state, as far as a stage leaves them on this rank.

    Its methods are called on compute streams, and write what is theirs through views of their own: a collective that
    has been issued locks the arrays that it was given, long before it uses them.

    Attributes:
        plan: What is in the bucket.
        counts: Elements of every rank.
        param: This rank's part of the parameters; in stages 1 and 2 a view of `whole`.
        whole: All parameters, in stages 1 and 2.
        grad: All gradients in stage 1, this rank's part in stages 2 and 3.
        state: What the optimizer keeps of this rank's part.
    """

    def __init__(
        self, rank: Rank, plan: BucketPlan, *, ranks: int, place: int, stage: Stage, optimizer: Optimizer, gauge: Gauge
    ) -> None:
        self.plan, self.counts, self._optimizer, self._gauge = plan, shares(plan.size, ranks), optimizer, gauge
        mine = self.counts[place]
        stop = list(accumulate(self.counts))[place]
        self.mine = slice(stop - mine, stop)
        self.whole = rank.empty(plan.size, plan.dtype) if stage < 3 else None
        self.param = rank.empty(mine, plan.dtype) if self.whole is None else self.whole[self.mine]
        self.real = rank.empty(1).flags.writeable  # else the world has no data
        self.grad = rank.empty(plan.size if stage == 1 else mine, plan.dtype)
        kept = optimizer.fresh(mine if self.real else 0, plan.dtype)
        self.state = kept if self.real else {key: rank.empty(mine, each.dtype) for key, each in kept.items()}
        self._stage, self._rank = stage, rank.rank
        self._nothing = None if self.real else rank.empty(plan.size, plan.dtype)
        self._views = None if self.whole is None else self._cut(self.whole)

    @property
    def even(self) -> bool:
        """Whether all ranks have equally many elements."""
        return len(set(self.counts)) == 1

    @property
    def alone(self) -> bool:
        """Whether there is only one gradient in the bucket."""
        return len(self.plan.slots) == 1

    @property
    def adds_first(self) -> bool:
        """Whether gradients are added up before they travel: where all of them are kept."""
        return self._stage == 1

    @property
    def moved_bytes(self) -> int:
        """What an update reads and writes: the gradient, the parameters and all state twice."""
        return 3 * self.param.nbytes + 2 * sum(each.nbytes for each in self.state.values())

    def places(self) -> list[tuple[str, slice]]:
        """Return where parameters are in this rank's part."""
        found = ((slot, max(slot.start, self.mine.start), min(slot.stop, self.mine.stop)) for slot in self.plan.slots)
        before = self.mine.start
        return [(slot.name, slice(start - before, stop - before)) for slot, start, stop in found if start < stop]

    def pieces(self, *, whole: bool) -> list[Piece]:
        """Return this rank's part of the parameters and of what the optimizer keeps of them, as they lie in memory.

        Args:
            whole: Return all parameters that are kept here, those of other ranks' parts included.
        """
        found: list[Piece] = []
        for slot in self.plan.slots:
            if whole and self.whole is not None:
                found.append(Piece.whole(slot.name, slot.shape, self.whole[slot.start : slot.stop]))
            else:
                found += self._mine(slot, slot.name, self.param)
            for key, kept in self.state.items():
                found += self._mine(slot, state_name(key, slot.name), kept)
        return found

    def _mine(self, slot: Slot, name: str, part: Array) -> list[Piece]:
        """Return what of a parameter is in this rank's part of something, if anything is."""
        start, stop = max(slot.start, self.mine.start), min(slot.stop, self.mine.stop)
        if start >= stop:
            return []
        data = part[start - self.mine.start : stop - self.mine.start]
        return [Piece(tensor=name, shape=slot.shape, start=start - slot.start, stop=stop - slot.start, data=data)]

    def begin(self, flat: Array) -> Array:
        """Take over the parameters that all ranks begin with; return what is kept of them."""
        target, source = (self.param[:], flat[self.mine]) if self.whole is None else (self.whole[:], flat)
        if self.real:
            target[:] = source
        return target

    def part(self) -> Array:
        """Return this rank's part of the parameters."""
        return self.param[:]

    def place_of_gradient(self) -> Array | None:
        """Return where the mean gradient of this rank's part comes; None if that is not kept."""
        return self.grad[:] if self._stage > 1 and self.real else None

    def place_of_whole(self) -> Array | None:
        """Return where gathered parameters come; None if they are not kept."""
        return None if self.whole is None or not self.real else self.whole[:]

    def pack(
        self,
        step: int,
        add: bool,
        keeps: bool,
        place: Place | None,
        handed: Collection[str],
        _: object,
        *gradients: Array | None,
    ) -> Array:
        """Return the whole gradient, flat. The sixth argument is only waited for.

        Args:
            step: Of the model, from 1.
            add: Whether, in stage 1, it is added to what is kept.
            keeps: Whether, in stage 1, it is kept.
            place: Where the gradients were handed over.
            handed: Names of the gradients that were.
            gradients: In the order of the bucket; of what nobody handed over, None. The only one of a bucket is sent
                from where it is.

        Raises:
            UsageError: If one has another shape than its parameter.
            NonFiniteError: If one is not finite.
        """
        for slot, gradient in zip(self.plan.slots, gradients, strict=True):
            if slot.name in handed:
                check_gradient(slot.name, gradient, slot.shape, self.plan.dtype, step)
        if self._nothing is not None:
            return self._nothing
        flat = self._side_by_side(gradients)
        check_packed(flat, self._cut(flat), rank=self._rank, step=step, place=place)
        return self._keep(flat, add) if self.adds_first and (add or keeps) else flat

    def _side_by_side(self, gradients: tuple[Array | None, ...]) -> Array:
        first = gradients[0]
        if self.alone and first is not None and first.flags.c_contiguous and first.dtype == self.plan.dtype:
            return first.reshape(-1)
        flat = np.empty(self.plan.size, self.plan.dtype)
        for slot, gradient in zip(self.plan.slots, gradients, strict=True):
            flat[slot.start : slot.stop] = 0 if gradient is None else gradient.reshape(-1)
        return flat

    def collect(self, add: bool, part: Array) -> Array:
        """Keep the mean gradient of this rank's part, or add it to what is kept; return what is kept."""
        return self._keep(part, add) if self.real else self.grad

    def _keep(self, gradient: Array, add: bool) -> Array:
        kept = self.grad[:]
        if add:
            np.add(kept, gradient, out=kept)
        else:
            kept[:] = gradient
        return kept

    def update(self, step: int, gradient: Array, factors: Sequence[float | None], *_: Array) -> Array:
        """Let the optimizer make a step with the mean gradient of this rank's part; return the part.

        Args:
            step: Of the model, from 1.
            gradient: Flat.
            factors: What it is multiplied with; None is nothing.
        """
        if self.real and self.param.size:
            for factor in factors:
                if factor not in (None, 1.0):
                    gradient = gradient * gradient.dtype.type(factor)
            self._optimizer.update(self.param[:], gradient, self.state, step)
        return self.param[:]

    def opened(self, whole: Array) -> dict[str, Array]:
        """Return the parameters by name, in their shapes, read-only."""
        if self._views is not None:
            return self._views
        gathered = _Gathered(self._cut(whole))
        self._gauge.add(whole.nbytes)
        weakref.finalize(gathered, self._gauge.add, -whole.nbytes).atexit = False
        return gathered

    def _cut(self, flat: Array) -> dict[str, Array]:
        views = {slot.name: flat[slot.start : slot.stop].reshape(slot.shape) for slot in self.plan.slots}
        for view in views.values():
            view.setflags(write=False)
        return views
