"""Models with gradients averaged in buckets, in one order on all ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import numpy as np

from ...errors import UsageError
from ...hints import hide_class_name
from ...runtime.future import Future
from ...runtime.group import Group
from ...runtime.rank import Rank
from ...timeline.span import RoleName
from ..memory_work import users_frame
from ..settings import Settings, check_count
from ..strategy import Ahead, Strategy
from ..tree import Params, Site
from .agreement import issue_check
from .bucket import Bucket, BucketContext, scale_gradient
from .gradients import Part, clip_factor, square_sums
from .queue import BucketQueue

if TYPE_CHECKING:
    from ..tree import Array

_ORDER = "the order in which gradients are handed over must be the same on all ranks, or rebuild_buckets=False: they"
_COMPARISON = "compare order of gradients"


B = TypeVar("B", bound=Bucket)


@hide_class_name
class Bucketed(Strategy[Params], Generic[B, Params]):
    """A model with gradients averaged over a group of ranks, in buckets.

    Buckets leave in the same order on all ranks, each as soon as it is full and those before it have left.

    Args:
        rank: This rank.
        params: The first weights.
        settings: Options of the strategy.
    """

    _update_stream: str | None = None  # compute stream of updates, and of their factors
    steps: int

    def __init__(self, rank: Rank, params: Params, group: Group | None, settings: Settings) -> None:
        super().__init__(rank, params, group, settings.ahead)
        self._settings = settings
        self._context = BucketContext(
            rank=rank, group=self.group, hook=settings.hook, exact=settings.exact, work=self._work
        )
        self._copies = self._count_copies(settings)
        self._uneven = settings.uneven and self.group.size > 1
        rebuilds = settings.rebuild_buckets and settings.unused == "error" and not settings.uneven
        self._observed: list[str] | None = [] if rebuilds else None
        self._seen: Sequence[str] = ()  # the order of the first step, once it is known
        self._set_buckets([])
        self._syncs, self._sample_weight = True, 1.0
        self._joins = False  # whether this rank only takes part in the others' steps
        self._active: Future[Array] | None = None  # how many ranks have samples in this step
        self._agreed: tuple[Future[object], ...] = ()  # that the ranks have the same buckets

    def _count_copies(self, settings: Settings) -> dict[str, int]:
        """Return by parameter the number of ranks in the clip group with the same values, from `clip_copies`."""
        copied: dict[str, int] = {}
        for name, copies in (settings.clip_copies or {}).items():
            self._names.find(name, lambda leaf, copies=copies: copied.__setitem__(leaf, copies))  # type: ignore[misc]
        return copied

    def _set_buckets(self, buckets: list[B]) -> None:
        """Use these buckets from now on, in the order in which they travel."""
        self._queue = BucketQueue(buckets)
        self._buckets, self._home = buckets, self._queue.home

    # -- for each strategy ----------------------------------------------------------------------------------------

    def _prepare_bucket(self, bucket: B) -> None:
        """Issue the work that must precede the first gradient of a step in a bucket; by default none."""

    @abstractmethod
    def _send_bucket(self, bucket: B) -> None:
        """Send a bucket, with zeros for gradients that nobody has handed over."""

    @abstractmethod
    def _end_step(self, factors: tuple[Future[object], ...]) -> Sequence[Future[object]]:
        """Issue the updates, now or later; return the futures that a program waits for which is too far ahead.

        Args:
            factors: Numbers that gradients are multiplied with.
        """

    @abstractmethod
    def _reorder(self, order: Sequence[str]) -> None:
        """Rearrange buckets for gradients that arrive in this order of names."""

    @abstractmethod
    async def _await_weights(self) -> Params:
        """Wait for all updates; return the weights."""

    def _step_with_zeros(self) -> None:
        """Take part in a step of the other ranks with zeros, as this rank has no more samples."""
        self.step()

    # -- the loop ------------------------------------------------------------------------------------------------

    def share(self, batch: int) -> slice:
        """Return this rank's samples of the next steps, by their places in the batch of all ranks.

        With ``batch="rank"`` each rank has that many, in any number of ranks. With ``batch="global"`` all ranks
        together have that many; where they do not divide, the first ranks have one more, and the mean of gradients is
        weighted by samples. Hand over the mean over the rank's own samples in either case.

        Args:
            batch: Number of samples in a step: of a rank, or of all ranks.

        Raises:
            UsageError: There are fewer samples than ranks.
        """
        check_count("batch", batch, least=1 if self._settings.batch == "rank" else self.group.size)
        rank, size = self.group.rank, self.group.size
        if self._settings.batch == "rank":
            return slice(rank * batch, (rank + 1) * batch)
        least, rest = divmod(batch, size)
        start, count = rank * least + min(rank, rest), least + (rank < rest)
        self._sample_weight = count * size / batch
        return slice(start, start + count)

    def _weigh_by_samples(self, name: str, gradient: object) -> object:
        """Return the gradient times (this rank's samples / mean samples of a rank); unchanged if these are equal."""
        if self._sample_weight == 1.0:
            return gradient
        shape, dtype = self._leaves[name]
        weigh, moved_bytes = partial(_scale_gradient, self._sample_weight), 2 * prod(shape) * dtype.itemsize
        return self._work.compute(weigh, gradient, name="weigh by samples", moved_bytes=moved_bytes)

    def take_gradients(self, gradients: Mapping[str, object], site: Site) -> None:
        """Hand gradients to their buckets, and start each bucket that is full and the next to travel."""
        gradients = {name: self._weigh_by_samples(name, gradient) for name, gradient in gradients.items()}
        for name, gradient in gradients.items():
            bucket = self._home[name]
            bucket.site = site
            if not bucket.handed:
                self._prepare_bucket(bucket)
            if not self._syncs and bucket.views:
                bucket.add(name, gradient, self.steps + 1)
                continue
            if bucket.sent or name in bucket.handed:
                raise self._duplicate_error(name)
            bucket.hand_over(name, gradient, site)
            if self._observed is not None:
                self._observed.append(name)
        for bucket in self._queue.due():
            self._start_bucket(bucket)

    def _start_bucket(self, bucket: B) -> None:
        """Send a bucket; with uneven ranks, count first how many ranks have samples in this step."""
        if self._uneven and self._active is None:
            self._active = self._count_active_ranks(1.0)
        self._prepare_bucket(bucket)
        self._send_bucket(bucket)

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
            An awaitable that keeps the program at most `ahead` steps ahead of its gradients.

        Raises:
            UsageError: If a parameter has had no gradient, and `unused` does not allow that.
        """
        missing = [name for bucket in self._queue.waiting for name in bucket.plan.names if name not in bucket.handed]
        if missing and self._settings.unused == "error" and not self._joins:
            raise UsageError(
                f"step: no gradient of {', '.join(map(repr, missing))} in step {self.steps}; "
                "hand it over, or pass unused='zeros'"
            )
        self._record_first_step()
        for bucket in self._queue.rest():
            self._start_bucket(bucket)
        self.steps += 1
        self._queue.begin()
        issued = self._end_step((*self._mean_factor(), *self._clip_factor(), *self._agreed))
        self._rebuild_buckets()
        return Ahead(self.limit_steps(issued))

    async def finish(self) -> Params:
        """Wait until all updates are done; then go on, if you like.

        Returns:
            The weights, in a tree like `params`.
        """
        if self._uneven:
            await self._join_remaining_steps()
        return await self._await_weights()

    # -- ranks with fewer samples --------------------------------------------------------------------------------

    def _count_active_ranks(self, samples: float) -> Future[Array]:
        """Issue the count of the ranks that have samples in this step; this rank counts as `samples`, 0 or 1."""
        stream = self.rank.stream(f"samples of {self.group.name}")
        site = users_frame()
        return self.group.all_reduce(
            np.array([samples]), stream=stream, name=RoleName("ranks with samples", "library"), call_site=site
        )

    async def _join_remaining_steps(self) -> None:
        """Take part, with zeros, in the steps of ranks that have more samples."""
        self._joins = True
        while True:
            active = self._count_active_ranks(0.0)
            if (await active)[0] == 0:
                break
            self._active = active
            self._step_with_zeros()
        self._joins = False

    def _mean_factor(self) -> tuple[Future[object], ...]:
        """Return a future of the number of ranks over the number with samples, in a tuple; empty if ranks are even."""
        active, self._active = self._active, None
        if active is None:
            return ()
        size, real = self.group.size, self._work.real
        factor = lambda count: size / count[0] if real else 1.0  # noqa: E731
        return (self._work.compute(factor, active, name="mean", stream=self._update_stream),)

    # -- the norm ------------------------------------------------------------------------------------------------

    def _clip_factor(self) -> tuple[Future[object], ...]:
        """Return a future of the factor that limits the norm of all gradients, in a tuple; empty without a limit."""
        limit, stream = self._settings.clip_norm, self._update_stream
        if limit is None or not self._work.real:
            return ()
        arrived = [mean for bucket in self._buckets for mean in bucket.means()]
        parts: list[list[Part]] = [
            [(part, self._copies.get(name, 1)) for name, part in parts_of_mean] for _, parts_of_mean in arrived
        ]
        reduced, site = [future for future, _ in arrived], users_frame()
        nbytes = sum(bucket.plan.nbytes for bucket in self._buckets)
        squares: Future[Array] = self._work.compute(
            partial(square_sums, parts), *reduced, name="norm", moved_bytes=nbytes, stream=stream
        )
        for group in self._norm_groups():
            squares = group.all_reduce(squares, exact=True, name=RoleName("norm", "library"), call_site=site)
        return (self._work.compute(partial(clip_factor, limit), squares, name="norm", stream=stream),)

    def _norm_groups(self) -> list[Group]:
        """Return the groups over which the sums of squares are added: ranks that have other parts of the model."""
        clip_group = self._settings.clip_group
        return [] if clip_group is None or clip_group.size == 1 else [clip_group]

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def notes(self) -> dict[str, object]:
        """Return facts that a checkpoint saves with the arrays.

        Returns:
            order: Names of parameters in the order in which buckets travel, once known: it decides on bits.
            hooks: Whether a hook of a bucket has state.
            lost: The first state of a hook that a checkpoint cannot hold, for people; "" if there is none.
        """
        order = {"order": list(self._seen)} if self._seen else {}
        hooked = [bucket.hooked for bucket in self._buckets if bucket.hooked and bucket.hooked.state]
        lost = next(filter(None, (hook.unsavable for hook in hooked)), "")
        return order | {"hooks": bool(hooked), "lost": lost}

    def own(self) -> dict[str, object]:
        """Return the state of this rank's hooks, by their names."""
        hooked = [bucket.hooked for bucket in self._buckets if bucket.hooked]
        return {name: state for hook in hooked for name, state in hook.saved_state().items()}

    def resume(self, steps: int, notes: Mapping[str, object], own: Mapping[str, object] | None) -> str:
        """Go on from that step: weights and the optimizer's state have been written into place.

        Args:
            steps: Number of steps before the checkpoint.
            notes: The result of `notes` when it was saved.
            own: The result of `own` on this rank; None if other ranks saved it.

        Returns:
            The difference to the saved model, for people to read; empty if there is none.
        """
        self.steps = steps
        order = [name for name in cast("Sequence[str]", notes.get("order", ())) if name in self._home]
        if self._observed is not None and len(order) == len(self._home):
            self._observed, self._seen = None, order
            self._reorder(order)
        hooked = [bucket.hooked for bucket in self._buckets if bucket.hooked]
        if own is None:
            return "the state of hooks starts from the beginning" if notes.get("hooks") else ""
        fit = [hook.resume(own) for hook in hooked]
        return str(notes.get("lost", "")) if all(fit) else "the state of hooks is of other buckets"

    # -- the order -----------------------------------------------------------------------------------------------

    def _rebuild_buckets(self) -> None:
        """Rebuild the buckets in the order in which the gradients of the first step arrived."""
        order, self._observed = self._observed, None
        if order is None:
            return
        self._seen = order
        if self.group.size > 1:
            self._agreed = (issue_check(self._work, self.group, _ORDER, list(map(repr, order)), name=_COMPARISON),)
        self._reorder(order)


def _scale_gradient(weight: float, gradient: Array) -> Array:
    return scale_gradient(gradient, [weight])
