"""One bucket at work: gradients come in, their mean over the group comes back, the weights are updated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.future import Future
from ...runtime.group import Group
from ...runtime.rank import Rank
from ...runtime.stream import Stream
from ..parameters import Parameters
from ..work import MemoryWork
from .gradients import Blame, Place, check_gradient, check_packed
from .hooked import Hooked
from .plan import BUCKET_BYTES, BucketPlan, Hook

if TYPE_CHECKING:
    from ..tree import Array

_PARTS = 4  # so a quarter of its update is not hidden; more parts would cost latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What all buckets of a model share."""

    rank: Rank  # This rank
    group: Group  # Whose gradients are averaged
    stream: Stream  # That their operations take
    hook: Hook | None  # What takes the place of all_reduce
    exact: bool  # Whether every gradient is added up in the order of ranks
    parameters: Parameters  # The weights
    work: MemoryWork  # What issues computes that move memory
    blame: Blame  # Who finds out whose gradient was not finite


class Reduction:
    """A bucket of one model on one rank: planned once, started each step.

    It has one buffer for good. That is enough, as everything that writes it is a compute of this rank: the gradients of
    a step are packed after the update of the step before, which has waited for what was on the wire.

    Attributes:
        plan: What is in it.
        handed: Gradients of this step that have not been packed, by name.
        sent: Whether the gradients of this step have been.
        place: Where one was handed over last.
        views: Where they are packed, by name, each in its parameter's shape.
        parts: Where in it what comes back by itself is.
        arrived: The mean over the group, part by part, of the step that was sent last.
        hooked: What the hook has around it, if there is one.
    """

    def __init__(self, wiring: Wiring, plan: BucketPlan, *, priority: int, comes_last: bool = False) -> None:
        self.plan, self.handed, self.sent = plan, dict[str, object](), False
        self.arrived: list[Future[Array]] = []
        self.place: Place | None = None
        self._wiring, self._priority = wiring, priority
        self._rank, self._parameters = wiring.rank, wiring.parameters
        self._runs = wiring.parameters.runs(plan)
        self._buffer = buffer = wiring.rank.empty(plan.size, plan.dtype, common=True)
        self.views = {slot.name: buffer[slot.start : slot.stop].reshape(slot.shape) for slot in plan.slots}
        self._group = wiring.group
        self.hooked: Hooked | None = None
        if wiring.hook is not None:
            self.hooked = Hooked(wiring.hook, wiring.rank, wiring.group, plan, priority=priority)
        self._step = self._updated = 0  # that was sent last, and updated last
        self._added: set[str] = set()  # of which the buffer holds gradients that have not been sent
        self._alone = len(plan.slots) == 1 and wiring.hook is None  # so it need not be copied
        cut = comes_last and self._alone and wiring.group.size > 1
        self.parts = _parts(plan) if cut else [slice(0, plan.size)]
        self._looks_late = self._alone and wiring.rank.clock == "real"  # ranks ask each other then, which takes threads
        self._mine: Array | None = None  # this rank's gradient, if it has been sent from where it was
        self._update: Future[dict[str, Array]] | None = None

    @property
    def full(self) -> bool:
        """Whether all gradients of this step are there."""
        return len(self.handed) == len(self.plan.slots)

    def add(self, name: str, gradient: object) -> None:
        """Add a gradient to the buffer, to be sent with later ones."""
        assert not self.waits, "an update reads the buffer first"
        fill = partial(self._fill, name, name in self._added, self._step + 1)
        self._added.add(name)
        self._wiring.work.compute(fill, gradient, name="add", moved_bytes=3 * self.views[name].nbytes)

    def send(self, step: int) -> None:
        """Pack the gradients and send them; what nobody has handed over is 0."""
        assert not self.waits, "an update reads the buffer first"
        gradients = [self.handed.get(name) for name in self.plan.names]
        handed = frozenset(self.handed)
        self.handed.clear()
        places = [self._buffer[part] for part in self.parts]  # views for this step: those of the last may be locked
        pack = partial(self._packed, places, frozenset(self._added), handed, step)
        moved_bytes = 0 if self._alone else 2 * self.plan.nbytes
        packed: Future[Any] = self._wiring.work.compute(pack, *gradients, name="pack", moved_bytes=moved_bytes)
        self.arrived = [self._reduce(packed[index], place, step) for index, place in enumerate(places)]
        self._step, self.sent = step, True
        self._added.clear()

    def _reduce(self, packed: Future[Any], out: Array, step: int) -> Future[Array]:
        if self.hooked is not None:
            return self.hooked.start(packed, step)
        if self._group.size == 1:
            return packed
        return self._group.all_reduce(
            packed,
            op="mean",
            exact=self._wiring.exact,
            out=out,
            priority=self._priority,
            stream=self._wiring.stream,
            name=f"bucket {self.plan.index}",
            call_site=self.place,
        )

    @property
    def waits(self) -> bool:
        """Whether an update is due that has not been issued."""
        return self._updated != self._step

    def update(self, *after: object) -> Future[dict[str, Array]]:
        """Issue the update of the step that was sent last.

        Args:
            after: What its gradient is multiplied with: numbers, or futures of numbers.
        """
        self._updated = self._step
        moved_bytes = self._parameters.moved_bytes(self.plan) / len(self.parts)
        for part, arrived in zip(self.parts, self.arrived, strict=True):
            apply = partial(self._apply, self._step, part)
            newest = self._wiring.work.compute(apply, arrived, *after, name="update", moved_bytes=moved_bytes)
        return newest

    # -- on the compute stream, and in tasks -------------------------------------------------------------------

    def _packed(
        self, places: list[Array], added: frozenset[str], handed: frozenset[str], step: int, *gradients: Array | None
    ) -> list[Array]:
        """Return the gradients, flat, part by part: in their places, or from where they are."""
        for slot, gradient in zip(self.plan.slots, gradients, strict=True):
            if slot.name in handed:
                check_gradient(slot.name, gradient, slot.shape, self.plan.dtype, step)
        flat = self._pack(self._buffer, added, step, *gradients)
        return places if flat is self._buffer else [flat[part] for part in self.parts]

    def _pack(self, buffer: Array, added: frozenset[str], step: int, *gradients: Array | None) -> Array:
        self._mine = self._ready(gradients[0]) if self._alone and not added else None
        if self._mine is not None:
            if not self._looks_late:
                self._check(self._mine, dict(zip(self.plan.names, gradients, strict=True)), step)
            return self._mine
        for name, gradient in zip(self.plan.names, gradients, strict=True):
            if gradient is not None:
                self._fill(name, name in added, step, gradient)
            elif name not in added and self._parameters.real:
                self.views[name].fill(0)
        if self._looks_late and self._group.size == 1:
            self._mine = buffer  # which nobody adds to
        elif self._parameters.real:
            self._check(buffer, self.views, step)
        return buffer

    def _check(self, buffer: Array, views: Mapping[str, Array | None], step: int) -> None:
        known = {name: view for name, view in views.items() if view is not None}
        check_packed(buffer, known, rank=self._rank.rank, step=step, place=self.place)

    def _ready(self, gradient: Array | None) -> Array | None:
        """Return a gradient, flat, if it can be sent from where it is."""
        [view] = self.views.values()
        if not self._parameters.real or not isinstance(gradient, np.ndarray) or not gradient.flags.c_contiguous:
            return None
        if _is_same(gradient, view):  # then it is in the buffer already
            return None
        return gradient.reshape(-1) if (gradient.shape, gradient.dtype) == (view.shape, view.dtype) else None

    def _fill(self, name: str, add: bool, step: int, gradient: Array) -> None:
        view = self.views[name]
        check_gradient(name, gradient, view.shape, view.dtype, step)
        if not self._parameters.real:
            return
        if add:
            np.add(view, gradient, out=view, casting="unsafe")
        elif not _is_same(gradient, view):
            view[...] = gradient

    def _apply(self, step: int, part: slice, reduced: Array, *factors: float | None) -> dict[str, Array]:
        for factor in factors:
            if factor not in (None, 1.0) and self._parameters.real:
                reduced = reduced * reduced.dtype.type(factor)
        runs = self._runs
        if len(self.parts) > 1:
            begin = runs[0][0].start
            runs = [(slice(begin + part.start, begin + part.stop), slice(0, part.stop - part.start))]
        if not self._parameters.update(self.plan.dtype, runs, reduced, step, check=self._looks_late):
            [(name, view)] = self.views.items()
            self._wiring.blame.find(name, self._mine, view, step, self.place)
        if part.stop == self.plan.size:
            self._mine = None
        return self._parameters.views


def _parts(plan: BucketPlan) -> list[slice]:
    """Return where the gradient that comes last is cut, if it is large: nothing hides the update of its last part."""
    count = max(1, min(_PARTS, plan.nbytes // BUCKET_BYTES))
    ends = [plan.size * (index + 1) // count for index in range(count)]
    return [slice(start, stop) for start, stop in pairwise([0, *ends])]


def _is_same(gradient: Array, view: Array) -> bool:
    """Whether a gradient is where it belongs already."""
    return (
        gradient.__array_interface__["data"] == view.__array_interface__["data"]
        and gradient.strides == view.strides
        and gradient.dtype == view.dtype
    )
