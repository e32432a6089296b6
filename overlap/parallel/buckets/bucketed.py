"""What models that average gradients have in common: gradients come by name, and leave in buckets, in one order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from sys import _getframe
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import numpy as np

from ...errors import UsageError
from ...runtime.future import Future
from ...runtime.group import Group
from ...runtime.rank import Rank
from ..ahead import Ahead
from ..checkpoints.names import Own
from ..settings import Settings, group_of
from ..tree import Names, flatten, rebuild
from ..work import MemoryWork
from .agreement import agreement
from .gradients import Part, Place, check_gradient, clip_factor, square_sums
from .hooked import Hooked
from .plan import BucketPlan

if TYPE_CHECKING:
    from ..tree import Array, Tree

_ORDER = "the order in which gradients are handed over must be the same on all ranks, or rebuild_buckets=False: they"


class Bucket(Protocol):
    """What a model needs of its buckets."""

    hooked: Hooked | None  # What the hook has around it, if there is one
    handed: dict[str, object]  # Gradients of this step that have not been sent, by name
    place: Place | None  # Where one was handed over last

    @property
    def plan(self) -> BucketPlan:
        """What is in it."""

    @property
    def sent(self) -> bool:
        """Whether the gradients of this step have been."""

    @property
    def full(self) -> bool:
        """Whether all gradients of this step are there."""


B = TypeVar("B", bound=Bucket)


class Bucketed(ABC, Generic[B]):
    """A model whose gradients are averaged over a group of ranks, in buckets.

    Buckets leave in the same order on all ranks, each as soon as it is full and those before it have left.

    Attributes:
        rank: That it runs on.
        group: Whose gradients it averages.
        steps: How many `step` calls there have been.
    """

    _update_stream: str | None = None  # compute stream of updates, and of what they need

    def __init__(self, rank: Rank, params: Tree, group: Group | None, settings: Settings) -> None:
        leaves = flatten(params)
        self.rank, self.group, self.steps = rank, group_of(rank, group), 0
        self._settings, self._names, self._work = settings, Names(params), MemoryWork(rank)
        self._like = rebuild(params, {name: name for name in leaves})
        self._leaves = {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
        self._real = rank.empty(1).flags.writeable  # else the world has no data
        self._copies = self._copies_of(settings)
        self._uneven = settings.uneven and self.group.size > 1
        rebuilds = settings.rebuild_buckets and settings.unused == "error" and not settings.uneven
        self._observed: list[str] | None = [] if rebuilds else None
        self._seen: Sequence[str] = ()  # the order of the first step, once it is known
        self._buckets: list[B] = []
        self._home: dict[str, B] = {}
        self._next = 0  # bucket to be sent
        self._syncs = True
        self._joins = False  # whether this rank only takes part in the others' steps
        self._active: Future[Array] | None = None  # how many ranks have samples in this step
        self._agreed: tuple[Future[object], ...] = ()  # that the ranks have the same buckets
        self._sent: deque[Sequence[Future[object]]] = deque()

    def _copies_of(self, settings: Settings) -> dict[str, int]:
        """Return how many ranks of the clip group have each parameter, where that is more than one."""
        found: dict[str, int] = {}
        for name, copies in (settings.clip_copies or {}).items():
            self._names.find(name, lambda leaf, copies=copies: found.__setitem__(leaf, copies))  # type: ignore[misc]
        return found

    def _alike(self) -> Future[None]:
        """Compare the parameters of all ranks."""
        told = [f"{name!r}, {dtype} {shape}," for name, (shape, dtype) in self._leaves.items()]
        return agreement(self.rank, self.group, "params", told)

    def _use(self, buckets: list[B]) -> None:
        """Take these buckets from now on, in the order in which they travel."""
        self._buckets = buckets
        self._home = {name: bucket for bucket in buckets for name in bucket.plan.names}

    # -- what a strategy adds ------------------------------------------------------------------------------------

    @abstractmethod
    def _weight(self, name: str) -> object:
        """Return the newest weight, or a future of it."""

    @abstractmethod
    def _send(self, bucket: B) -> None:
        """Send a bucket; what nobody has handed over is 0."""

    @abstractmethod
    def _end_step(self, factors: tuple[Future[object], ...]) -> Sequence[Future[object]]:
        """Issue the updates, or see to it; return what a program that is not too far ahead waits for.

        Args:
            factors: What gradients are multiplied with.
        """

    @abstractmethod
    def _reorder(self, order: Sequence[str]) -> None:
        """Let buckets fit gradients that come in that order."""

    @abstractmethod
    def _arrived(self, bucket: B) -> Iterator[tuple[Future[Array], list[tuple[str, slice]]]]:
        """Yield what comes back of a bucket that has been sent, and where parameters are in it."""

    @abstractmethod
    async def _whole(self) -> object:
        """Wait for all updates; return the weights."""

    def _shadow(self) -> None:
        """Take part in a step of the other ranks, with zeros."""
        self.step()

    # -- the loop ------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> object:
        """Return the newest weight, or a future of it; of a part of the tree, a dict of them to pass to a compute.

        Raises:
            UsageError: If there is no such parameter.
        """
        return self._names.find(name, self._weight)

    def reduce(self, name: str, grad: object) -> None:
        """Hand over a gradient, or a future of it; it travels as soon as its bucket is full.

        Args:
            name: Of the parameter, or of a part of the tree.
            grad: An array of the parameter's shape, or a future of one; for a part, a tree of them, or a future of one.
                It belongs to the model until the update: large gradients are sent from where they are.

        Raises:
            UsageError: If there is no such parameter, it has had its gradient in this step, or the gradient has another
                shape; at the await of a weight or of `finish`, if it is a future.
            NonFiniteError: There, if the gradient is not finite.
        """
        frame = _getframe(1)
        place = frame.f_code, frame.f_lasti
        for leaf, gradient in list(self._names.pairs(name, grad)):
            if not isinstance(gradient, Future):
                check_gradient(leaf, gradient, *self._leaves[leaf], self.steps + 1)
            bucket = self._home[leaf]
            bucket.place = place
            self._take(bucket, leaf, gradient)
        while self._next < len(self._buckets) and self._buckets[self._next].full:
            self._send_next()

    def _take(self, bucket: B, name: str, gradient: object) -> None:
        if bucket.sent or name in bucket.handed:
            raise UsageError(
                f"reduce: the gradient of {name!r} has been handed over in step {self.steps + 1} already; of a weight "
                "that is used twice, add the gradients up and hand over the sum"
            )
        bucket.handed[name] = gradient
        if self._observed is not None:
            self._observed.append(name)

    def _send_next(self) -> None:
        if self._uneven and self._active is None:
            self._active = self._count(1.0)
        bucket = self._buckets[self._next]
        self._next += 1
        self._send(bucket)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up the gradients that are handed over inside the ``with``; the next ones take them along.

        So the mean over ranks is one of sums over micro-batches: divide the loss by their number.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def step(self) -> Ahead:
        """Let all weights make a step, once their gradients are there. Issues, and never waits.

        Returns:
            What may be awaited, to keep the program at most `ahead` steps ahead of its gradients.

        Raises:
            UsageError: If a parameter has had no gradient, and `unused` does not allow that.
        """
        late = self._buckets[self._next :]
        missing = [name for bucket in late for name in bucket.plan.names if name not in bucket.handed]
        if missing and self._settings.unused == "error" and not self._joins:
            raise UsageError(
                f"step: no gradient of {', '.join(map(repr, missing))} in step {self.steps + 1}; "
                "hand it over, or pass unused='zeros'"
            )
        for _ in late:
            self._send_next()
        self.steps += 1
        self._next = 0
        self._sent.append(self._end_step((*self._mean_factor(), *self._clip(), *self._agreed)))
        self._rebuild()
        return Ahead(self._sent.popleft() if len(self._sent) > self._settings.ahead else [])

    async def finish(self) -> object:
        """Wait until all updates are done; then go on, if you like.

        Returns:
            The weights, in a tree like `params`.
        """
        if self._uneven:
            await self._join()
        return await self._whole()

    # -- ranks with fewer samples --------------------------------------------------------------------------------

    def _count(self, mine: float) -> Future[Array]:
        """Ask how many ranks have samples in this step."""
        stream = self.rank.stream(f"samples of {self.group.name}")
        return self.group.all_reduce(np.array([mine]), stream=stream, name="ranks with samples")

    async def _join(self) -> None:
        """Take part, with zeros, in the steps of ranks that have more samples."""
        self._joins = True
        while True:
            active = self._count(0.0)
            if (await active)[0] == 0:
                break
            self._active = active
            self._shadow()
        self._joins = False

    def _mean_factor(self) -> tuple[Future[object], ...]:
        """Return what makes the mean over all ranks one over those that have samples."""
        active, self._active = self._active, None
        if active is None:
            return ()
        size, real, stream = self.group.size, self._real, self._update_stream
        told = self.rank.compute(
            lambda told: size / told[0] if real else 1.0, active, name="mean", seconds=0.0, stream=stream
        )
        return (told,)

    # -- the norm ------------------------------------------------------------------------------------------------

    def _clip(self) -> tuple[Future[object], ...]:
        """Return what limits the norm of all gradients."""
        limit, stream = self._settings.clip_norm, self._update_stream
        if limit is None or not self._real:
            return ()
        arrived = [each for bucket in self._buckets for each in self._arrived(bucket)]
        parts: list[list[Part]] = [
            [(place, self._copies.get(name, 1)) for name, place in places] for _, places in arrived
        ]
        reduced = [future for future, _ in arrived]
        nbytes = sum(bucket.plan.nbytes for bucket in self._buckets)
        squares: Future[Array] = self._work.compute(
            partial(square_sums, parts), *reduced, name="norm", moved_bytes=nbytes, stream=stream
        )
        for group in self._with_other_parts():
            squares = group.all_reduce(squares, exact=True, name="norm")
        return (self.rank.compute(partial(clip_factor, limit), squares, name="norm", seconds=0.0, stream=stream),)

    def _with_other_parts(self) -> list[Group]:
        """Return the groups whose ranks have other gradients than this one, after their means."""
        clip_group = self._settings.clip_group
        return [] if clip_group is None or clip_group.size == 1 else [clip_group]

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def notes(self) -> dict[str, object]:
        """Return the order in which buckets travel, once gradients have shown it: it decides on bits; and of hooks."""
        order = {"order": list(self._seen)} if self._seen else {}
        hooked = [bucket.hooked for bucket in self._buckets if bucket.hooked and bucket.hooked.state]
        lost = next((found for each in hooked if (found := each.unsavable)), "")
        return order | {"hooks": bool(hooked), "lost": lost}

    def own(self) -> dict[str, Array]:
        """Return what this rank's hook keeps."""
        hooked = [bucket.hooked for bucket in self._buckets if bucket.hooked]
        return {name: array for each in hooked for name, array in each.own().items()}

    def resume(self, steps: int, notes: Mapping[str, object], own: Own | None) -> str:
        """Go on from that step: weights and the optimizer's state have been written into place.

        Args:
            steps: That had been made.
            notes: What `notes` has told.
            own: What `own` has told on this rank; None if there were other ranks.

        Returns:
            What is not as it was, for people to read; empty if everything is.
        """
        self.steps = steps
        order = [name for name in cast("Sequence[str]", notes.get("order", ())) if name in self._home]
        if self._observed is not None and len(order) == len(self._home):
            self._observed, self._seen = None, order
            self._reorder(order)
        hooked = [bucket.hooked for bucket in self._buckets if bucket.hooked]
        if own is None:
            return "what hooks keep begins anew" if notes.get("hooks") else ""
        fit = [each.resume(own) for each in hooked]
        return str(notes.get("lost", "")) if all(fit) else "what hooks keep of other buckets begins anew"

    # -- the order -----------------------------------------------------------------------------------------------

    def _rebuild(self) -> None:
        """Let buckets fit the order in which the gradients of the first step have come."""
        order, self._observed = self._observed, None
        if order is None:
            return
        self._seen = order
        if self.group.size > 1:
            self._agreed = (agreement(self.rank, self.group, _ORDER, list(map(repr, order))),)
        self._reorder(order)
