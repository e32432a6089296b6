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
from .agreement import compare_items_of_ranks
from .bucket import Bucket, BucketContext, scale_gradient
from .gradients import Part, clip_factor, global_square_sum
from .queue import BucketQueue

if TYPE_CHECKING:
    from ..tree import Array

_ORDER = "the order in which gradients are handed over must be the same on all ranks, or rebuild_buckets=False: they"
_COMPARISON = "compare order of gradients"


B = TypeVar("B", bound=Bucket)


@hide_class_name
class Bucketed(Strategy[Params], Generic[B, Params]):
    """A model with gradients averaged over a group of ranks, in buckets.

    Buckets are sent in the same order on all ranks: each as soon as it is full and all buckets before it are sent.

    Args:
        rank: This rank.
        params: The first weights.
        group: The ranks whose gradients are averaged; None for all.
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
        self._copies: dict[str, int] = {}  # by parameter: number of ranks in the clip group that have the same values
        for part, copies in (settings.clip_copies or {}).items():
            self._copies |= dict.fromkeys(self._names.parameters_of(part), copies)
        self._uneven = settings.uneven and self.group.size > 1
        rebuilds = settings.rebuild_buckets and settings.unused == "error" and not settings.uneven
        # Names of the gradients of the first step in their order of arrival; None once buckets are rebuilt.
        self._observed_order: list[str] | None = [] if rebuilds else None
        self._known_order: Sequence[str] = ()  # the order of the first step, once it is known
        self._set_buckets([])
        self._syncs = True  # False inside `no_sync`
        self._sample_weight = 1.0  # this rank's samples over the mean number of samples of a rank
        self._joins = False  # whether this rank has no more samples, and takes part in the others' steps with zeros
        self._active_count: Future[Array] | None = None  # (1,) number of ranks that have samples in this step
        self._order_checks: tuple[Future[object], ...] = ()  # end when all ranks are known to have the same buckets

    def _set_buckets(self, buckets: list[B]) -> None:
        """Use these buckets from now on, in the order in which they travel."""
        self._queue = BucketQueue(buckets)
        self._buckets, self._bucket_by_name = buckets, self._queue.bucket_by_name

    # -- for subclasses -------------------------------------------------------------------------------------------

    def _prepare_bucket(self, bucket: B) -> None:
        """Issue the work that must precede the first gradient of a step in a bucket; by default none."""

    @abstractmethod
    def _send_bucket(self, bucket: B) -> None:
        """Send a bucket, with zeros for gradients that were not handed over."""

    @abstractmethod
    def _end_step(self, factors: tuple[Future[object], ...]) -> Sequence[Future[object]]:
        """Issue the updates by the gradients times `factors`, or record that they are due.

        Returns the futures that limit how far the program is ahead.
        """

    @abstractmethod
    def _reorder_buckets(self, order: Sequence[str]) -> None:
        """Rearrange the buckets for gradients that arrive in this order of names."""

    @abstractmethod
    async def _await_weights(self) -> Params:
        """Wait for all updates; return the weights."""

    def _step_with_zeros(self) -> None:
        """Take part in a step of the other ranks with zeros, as this rank has no more samples."""
        self.step()

    # -- the loop ------------------------------------------------------------------------------------------------

    def share(self, batch: int) -> slice:
        """Return the slice of the batch of all ranks that holds this rank's samples, for the next steps.

        If the model has ``batch="rank"``, `batch` is the number of samples of each rank. With ``batch="global"`` it is
        that of all ranks together: `share(10)` on four ranks returns 0:3, 3:6, 6:8 and 8:10, and gradients are weighted
        by the number of samples. In both cases hand over the mean gradient over the rank's own samples.

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
        """Return a gradient times (this rank's samples / mean number of samples of a rank); unchanged if that is 1."""
        if self._sample_weight == 1.0:
            return gradient
        shape, dtype = self._leaves[name]
        weigh, moved_bytes = partial(scale_gradient, factors=[self._sample_weight]), 2 * prod(shape) * dtype.itemsize
        return self._work.compute(weigh, gradient, name="weigh by samples", moved_bytes=moved_bytes)

    def take_gradients(self, gradients: Mapping[str, object], site: Site) -> None:
        """Give gradients to their buckets, and send full buckets as long as all buckets before them have left.

        Under `no_sync`, gradients of buckets with a buffer are only added up there. Arguments: see
        `Strategy.take_gradients`.

        Raises:
            UsageError: A gradient has been handed over in this step already.
        """
        gradients = {name: self._weigh_by_samples(name, gradient) for name, gradient in gradients.items()}
        for name, gradient in gradients.items():
            bucket = self._bucket_by_name[name]
            bucket.site = site
            if not bucket.unpacked_gradients:
                self._prepare_bucket(bucket)
            # Only a bucket with a buffer has views; one without sends the gradients of each micro-batch.
            if not self._syncs and bucket.views:
                bucket.add(name, gradient, self.steps + 1)
                continue
            if bucket.is_sent or name in bucket.unpacked_gradients:
                raise UsageError(
                    f"reduce: the gradient of {name!r} has been handed over in step {self.steps} already; of a weight "
                    "that is used twice, add the gradients up and hand over the sum; or has model.step() been "
                    "forgotten?"
                )
            bucket.store_gradient(name, gradient, site)
            if self._observed_order is not None:
                self._observed_order.append(name)
        for bucket in self._queue.take_full_buckets():
            self._count_and_send_bucket(bucket)

    def _count_and_send_bucket(self, bucket: B) -> None:
        """Send a bucket. With `uneven`, before the first bucket of a step, count the ranks that have samples in it."""
        if self._uneven and self._active_count is None:
            self._active_count = self._count_active_ranks(has_samples=True)
        self._prepare_bucket(bucket)
        self._send_bucket(bucket)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients that are handed over inside the ``with``, and send the sums with the next gradients.

        The mean over ranks is then a mean of sums over micro-batches: divide the loss by the number of micro-batches.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def step(self) -> Ahead:
        """End a step: send the buckets that are left, and update all weights once their means have come. Never waits.

        Returns:
            An awaitable: `await` it to keep the program at most `ahead` steps ahead of its gradients.

        Raises:
            UsageError: If a parameter has had no gradient in this step, unless the model has ``unused="zeros"``.
        """
        missing = [
            name
            for bucket in self._queue.unsent_buckets
            for name in bucket.plan.names
            if name not in bucket.unpacked_gradients
        ]
        if missing and self._settings.unused == "error" and not self._joins:
            raise UsageError(
                f"step: no gradient of {', '.join(map(repr, missing))} in step {self.steps}; "
                f"call model.reduce({missing[0]!r}, gradient) before step(), or pass unused='zeros'"
            )
        self._count_or_refuse_step()
        for bucket in self._queue.take_remaining_buckets():
            self._count_and_send_bucket(bucket)
        self.steps += 1
        self._queue.begin_step()
        # After the buckets were sent: the factors are computed from their means.
        issued = self._end_step((*self._active_ranks_factor(), *self._clip_factor(), *self._order_checks))
        self._rebuild_buckets()
        return Ahead(self.limit_steps(issued))

    async def finish(self) -> Params:
        """Wait until all updates are done; training may continue afterwards.

        With `uneven`, first take part in the steps that other ranks still make.

        Returns:
            The weights, in a tree like `params`.
        """
        if self._uneven:
            await self._join_remaining_steps()
        return await self._await_weights()

    # -- ranks with fewer samples --------------------------------------------------------------------------------

    def _count_active_ranks(self, *, has_samples: bool) -> Future[Array]:
        """Issue a count, collective over the group, of the ranks that have samples in this step; its future is (1,)."""
        stream = self.rank.stream(f"samples of {self.group.name}")
        site = users_frame()
        return self.group.all_reduce(
            np.array([float(has_samples)]),
            stream=stream,
            name=RoleName("ranks with samples", "library"),
            call_site=site,
        )

    async def _join_remaining_steps(self) -> None:
        """Take part with zeros in the steps of the other ranks, until no rank has samples."""
        self._joins = True
        while True:
            active = self._count_active_ranks(has_samples=False)
            if (await active)[0] == 0:
                break
            self._active_count = active
            self._step_with_zeros()
        self._joins = False

    def _active_ranks_factor(self) -> tuple[Future[object], ...]:
        """Return a tuple with a future of (number of ranks / number of ranks with samples); empty without `uneven`.

        In a world without data the factor is 1. Drops the count, so that the next step counts again.
        """
        active, self._active_count = self._active_count, None
        if active is None:
            return ()
        size, real = self.group.size, self._work.real
        factor = lambda count: size / count[0] if real else 1.0  # noqa: E731
        return (self._work.compute(factor, active, name="mean", stream=self._update_stream),)

    # -- the norm ------------------------------------------------------------------------------------------------

    def _clip_factor(self) -> tuple[Future[object], ...]:
        """Return a tuple with a future of the factor that limits the norm of all gradients to `clip_norm`.

        Empty without a limit, and in a world without data, where no norm is known.
        """
        limit, stream = self._settings.clip_norm, self._update_stream
        if limit is None or not self._work.real:
            return ()
        means: list[Future[Array]] = []
        parts: list[list[Part]] = []  # for each mean, the parameters in it
        for bucket in self._buckets:
            for mean, places in bucket.means_and_slices():
                means.append(mean)
                parts.append([(place, self._copies.get(name, 1)) for name, place in places])
        site = users_frame()
        nbytes = sum(bucket.plan.nbytes for bucket in self._buckets)
        squares: Future[Array] = self._work.compute(
            partial(global_square_sum, parts), *means, name="norm", moved_bytes=nbytes, stream=stream
        )
        for group in self._norm_groups():
            squares = group.all_reduce(squares, exact=True, name=RoleName("norm", "library"), call_site=site)
        return (self._work.compute(partial(clip_factor, limit), squares, name="norm", stream=stream),)

    def _norm_groups(self) -> list[Group]:
        """Return the groups over which sums of squares are added: their ranks have different parts of the model."""
        clip_group = self._settings.clip_group
        return [] if clip_group is None or clip_group.size == 1 else [clip_group]

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def notes(self) -> dict[str, object]:
        """Return facts that a checkpoint saves with the arrays.

        Returns:
            A dict. `order`: names of the parameters in the order in which buckets travel, which decides on the bits of
            sums; left out until it is known. `hooks`: whether a hook of a bucket has state. `lost`: a sentence on the
            first state of a hook that a checkpoint cannot hold; "" if there is none.
        """
        order = {"order": list(self._known_order)} if self._known_order else {}
        hooked = [bucket.bucket_hook for bucket in self._buckets if bucket.bucket_hook and bucket.bucket_hook.state]
        lost = next(filter(None, (hook.unsavable_reason for hook in hooked)), "")
        return order | {"hooks": bool(hooked), "lost": lost}

    def own_state(self) -> dict[str, object]:
        """Return the states of this rank's hooks, by the hooks' names, as far as checkpoints can hold them."""
        hooked = [bucket.bucket_hook for bucket in self._buckets if bucket.bucket_hook]
        return {name: state for hook in hooked for name, state in hook.state_to_save().items()}

    def resume(self, steps: int, notes: Mapping[str, object], own: Mapping[str, object] | None) -> str:
        """Adopt a checkpoint after its weights and optimizer state have been written into the model's memory.

        Sets `steps`, and restores the order of buckets and the states of hooks.

        Args:
            steps: Number of steps that the saved model had made.
            notes: The result of `notes` at the time of saving.
            own: The result of `own_state` on this rank at that time; None if other ranks saved the checkpoint.

        Returns:
            A sentence on what differs from the saved model; empty if nothing does.
        """
        # `notes` has "order" (parameters by arrival of their gradients), "hooks" (whether hooks had state) and "lost"
        self.steps = steps
        order = [name for name in cast("Sequence[str]", notes.get("order", ())) if name in self._bucket_by_name]
        if self._observed_order is not None and len(order) == len(self._bucket_by_name):
            self._observed_order, self._known_order = None, order
            self._reorder_buckets(order)
        hooked = [bucket.bucket_hook for bucket in self._buckets if bucket.bucket_hook]
        if own is None:
            return "the state of hooks starts from the beginning" if notes.get("hooks") else ""
        fit = [hook.restore_state(own) for hook in hooked]
        return str(notes.get("lost", "")) if all(fit) else "the state of hooks is of other buckets"

    # -- the order -----------------------------------------------------------------------------------------------

    def _rebuild_buckets(self) -> None:
        """Rebuild the buckets in the order in which the gradients of the first step arrived; later calls do nothing.

        Issues a comparison of the order between the ranks; later updates wait for it, and fail if orders differ.
        """
        order, self._observed_order = self._observed_order, None
        if order is None:
            return
        self._known_order = order
        if self.group.size > 1:
            self._order_checks = (
                compare_items_of_ranks(self._work, self.group, _ORDER, list(map(repr, order)), name=_COMPARISON),
            )
        self._reorder_buckets(order)
