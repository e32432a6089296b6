"""One bucket that ranks share at work: gradients are scattered, parts updated, parameters gathered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...runtime.future import Future
from ...runtime.group import Group
from ...runtime.rank import Rank
from ..work import MemoryWork, users_frame
from .gradients import Place
from .hooked import Hooked
from .plan import BucketPlan, Hook
from .shards import Shard

if TYPE_CHECKING:
    from ..tree import Array

IN_FLIGHT = 8
"""Operations of a stream at once: the library's own default."""


class SharedBucket:
    """A bucket's operations, each issued when it is asked for.

    Updates have a compute stream of their own, "optimizer": the update of a layer that is far behind backward runs
    while backward goes on.

    Attributes:
        shard: What this rank keeps of it.
        handed: Gradients of this step, by name; empty once they have been sent.
        sent: Whether this step's gradients have been.
        place: Where one was handed over last.
        reduced: This rank's part of the mean gradient, of the step that was sent last.
        updated: This rank's part of the newest parameters; in stages 1 and 2 all of those to begin with.
        unused: Gathers whose result nobody has asked for, but which may still read this rank's part.
        hooked: What the hook has around it, if there is one.
    """

    def __init__(
        self,
        rank: Rank,
        group: Group,
        shard: Shard,
        work: MemoryWork,
        *,
        priority: int,
        exact: bool,
        hook: Hook | None,
        shared: bool = False,
    ) -> None:
        self.shard, self.handed, self.sent = shard, dict[str, object](), False
        self.place: Place | None = None
        self.reduced: Future[Array] | None = None
        self.unused: list[Future[Any]] = []
        self._added = False  # whether gradients are kept that have not been in an update
        self._rank, self._group, self._work, self._priority, self._exact = rank, group, work, priority, exact
        self._shared = shared
        self._scatters = rank.stream(f"scatters of {group.name}", window=IN_FLIGHT)
        self._gathers = rank.stream(f"gathers of {group.name}", window=IN_FLIGHT)
        self._counts = None if shard.even else shard.counts
        self.hooked: Hooked | None = hook and Hooked(
            hook, rank, group, shard.plan, priority=priority, counts=shard.counts
        )
        self.updated: Future[Array]

    @property
    def plan(self) -> BucketPlan:
        """What is in it."""
        return self.shard.plan

    @property
    def full(self) -> bool:
        """Whether all gradients of this step are there."""
        return len(self.handed) == len(self.plan.slots)

    def begin(self, first: Array | Future[Array]) -> None:
        """Take over what all ranks begin with."""
        moved_bytes = 2 * self.plan.nbytes
        self.updated = self._work.compute(
            self.shard.begin, first, name="first weights", moved_bytes=moved_bytes, stream="optimizer"
        )

    def send(self, step: int, after: Future[Array] | None, *, keeps: bool) -> None:
        """Pack the gradients, as soon as `after` is done, and scatter their mean; what nobody handed over is 0.

        Args:
            step: Of the model, from 1.
            after: A future to wait for.
            keeps: Whether there are more to come before the update: then they are added up, in stage 1 before they
                travel, else after it.
        """
        handed = frozenset(self.handed)
        gradients = [self.handed.pop(name, None) for name in self.plan.names]
        self.sent, added, self._added = True, self._added, keeps
        moved_bytes = 0 if self.shard.alone and not (added or keeps) else 2 * self.plan.nbytes
        pack = partial(self.shard.pack, step, added, keeps, self.place, handed)
        free = [after, self.updated]  # the last update has read the gradient where the next one comes
        packed = self._work.compute(pack, free, *gradients, name="pack", moved_bytes=moved_bytes)
        if self.shard.adds_first:
            if not keeps:
                self.reduced = self._scatter(step, packed, None)
        elif added or keeps:
            part, collect = self._scatter(step, packed, None), partial(self.shard.collect, added)
            moved_bytes = 3 * self.shard.grad.nbytes
            self.reduced = self._work.compute(collect, part, name="add", moved_bytes=moved_bytes, stream="optimizer")
        else:
            self.reduced = self._scatter(step, packed, self.shard.place_of_gradient())

    def _scatter(self, step: int, packed: Future[Array], out: Array | None) -> Future[Array]:
        if self.hooked is not None:
            return self.hooked.start(packed, step)
        if self._group.size == 1:
            return packed
        return self._group.reduce_scatter(
            packed,
            op="mean",
            exact=self._exact,
            out=out,
            counts=self._counts,
            priority=self._priority,
            stream=self._scatters,
            name=f"scatter bucket {self.plan.index}",
            call_site=self.place,
        )

    def update(self, step: int, factors: Sequence[Future[object]] = ()) -> None:
        """Let the optimizer make a step with the gradient that was sent last, times these factors."""
        self.updated = self._work.compute(
            partial(self.shard.update, step),
            self.reduced,
            list(factors),
            *self.unused,
            name="update",
            moved_bytes=self.shard.moved_bytes,
            stream="optimizer",
        )
        self.sent = False
        self.unused.clear()

    def gather(self, *, when: bool = False) -> Future[Array]:
        """Return all parameters, flat, after the newest update.

        Args:
            when: Start it only when all that has been issued on the compute stream so far has run.
        """
        part = self.updated
        if when:
            run = self._rank.compute(self.shard.part, name="room", seconds=0.0)
            part = run if part.done else self._rank.compute(_last, run, part, name="room", stream="room", seconds=0.0)
        return self._gather(part)

    def gather_beside(self) -> Future[Array]:
        """Do so, but start it only when all that has been issued by `passed` so far has run."""
        part = self._rank.compute(_last, None, self.updated, name="room", stream="room", seconds=0.0)
        return self._gather(part)

    def passed(self, whole: Future[Array]) -> Future[None]:
        """Return when parameters have been gathered, without holding them."""
        return self._rank.compute(_nothing, whole, name="room", stream="room", seconds=0.0)

    def _gather(self, part: Future[Array]) -> Future[Array]:
        if self._group.size == 1:
            return part
        return self._group.all_gather(
            part,
            out=self.shard.place_of_whole(),
            counts=self._counts,
            shared=self._shared,
            priority=self._priority,
            stream=self._gathers,
            name=f"gather bucket {self.plan.index}",
            call_site=self.place,
        )

    def opened(self, whole: Future[Array]) -> Future[dict[str, Array]]:
        """Return the parameters by name, once they are there and all that was issued before has run."""
        return self._rank.compute(self.shard.opened, whole, name="open", seconds=0.0, call_site=users_frame())


def _last(_: object, part: Array) -> Array:
    """Return the second argument, once both are there."""
    return part


def _nothing(_: object) -> None:
    """Be done when the argument is there."""
