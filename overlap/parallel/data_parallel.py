"""Data parallel: every rank has all weights and its own samples; gradients are averaged while backward goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .buckets.agreement import compare_replicas
from .buckets.averaged import AveragedBucket
from .buckets.bucketed import Bucketed
from .buckets.plan import BucketPlan, Hook, plan_by_size
from .checkpoints.pieces import Shard, Tensors, share_pieces
from .memory_work import nothing
from .optimizers import Optimizer, check_optimizer
from .parameters import ModelMemory, Parameters, measure_memory
from .settings import IN_FLIGHT, Batch, Settings, Unused, check_count
from .surviving import make_surviving_steps
from .tree import Params, flatten

if TYPE_CHECKING:
    from .tree import Array


class DataParallel(Bucketed[AveragedBucket, Params]):
    """A model with gradients averaged over a group of ranks.

    Parameters are named in the order of forward; their gradients may be handed over in any order, the same on all
    ranks. Nothing in the loop waits: the update of a weight is issued when the weight is next asked for, and whatever
    needs it waits on the compute stream. Gradients that are not finite fail the rank that hands them over.

        model = DataParallel(rank, {"w": np.zeros(8, np.float32)}, optimizer=SGD(lr=0.1))
        for x in batches:
            model.reduce("w", rank.compute(backward, model["w"], x))
            await model.step()
        weights = await model.finish()

    `model[name]` is the newest weight, or a future of it; `await model[name]` is the array in either case. The array is
    the model's own: it changes with the update after the next `step`; copy what you keep.

    The first weights are the group's first rank's: models may be initialised as one likes, on all ranks differently.

    Under `overlap run --survive` the model of the next epoch goes on with the weights, the optimizer's state and the
    `steps` of the model before: write the loop as ``while model.steps < n``. See `surviving`.

    Args:
        rank: This rank.
        params: A dict, list or tuple of arrays, nested as you like; the same names, shapes and dtypes on all ranks.
        optimizer: Changes the weights.
        group: Ranks to average over; by default all.
        bucket_bytes: When a bucket is full. By default 1 MiB for the first and 25 MiB for the others, and gradients
            of 1 MiB and more travel alone. Gradients of weights that forward needs first overtake others.
        hook: Takes the place of all_reduce; see `GradientBucket`.
        exact: Add up every gradient in the order of ranks: the same bits for any buckets, order, bound, algorithm
            and wires. `overlap plan all_reduce --exact` tells the cost; in one process there is none.
        clip_norm: Limit of the norm of all mean gradients together. Then no weight is updated before the last
            gradient has come: no communication is hidden under forward.
        clip_group: Ranks that have other parts of the model, such as `mesh["pp", "tp"]`: the norm is the norm of
            all parts.
        clip_copies: How many ranks of that group have the same values of a parameter, such as the gains of a norm
            between tensor-parallel layers, by name: they count once.
        unused: Whether a parameter without a gradient on this rank is an "error", or counts as "zeros".
        rebuild_buckets: Whether buckets are made anew after the first step, in the order in which it had gradients.
        uneven: Whether some ranks may have fewer steps than others: `finish` then takes part in the others' steps,
            and the mean is over the ranks that still have samples.
        in_flight: How many buckets may be on the wire at once.
        ahead: How many steps the program may be ahead of its gradients where it does `await model.step()`.
        compare_every: Number of steps after which ranks compare their weights; by default never. If they differ,
            all fail with a `ReplicaError` that names the ranks in the minority.
        batch: Whether the batch of each "rank" is constant when ranks are lost, or the "global" one; see `share`.

    Raises:
        UsageError: If an argument is invalid. At the first weight that is needed, if `params` differ.

    Attributes:
        rank: The rank that it runs on.
        group: The ranks whose gradients it averages.
        steps: How many `step` calls there have been.
    """

    def __init__(
        self,
        rank: Rank,
        params: Params,
        *,
        optimizer: Optimizer,
        group: Group | None = None,
        bucket_bytes: int | None = None,
        hook: Hook | None = None,
        exact: bool = False,
        clip_norm: float | None = None,
        clip_group: Group | None = None,
        clip_copies: Mapping[str, int] | None = None,
        unused: Unused = "error",
        rebuild_buckets: bool = True,
        uneven: bool = False,
        in_flight: int = IN_FLIGHT,
        ahead: int = 2,
        compare_every: int | None = None,
        batch: Batch = "rank",
    ) -> None:
        settings = Settings(
            bucket_bytes=bucket_bytes, hook=hook, exact=exact, clip_norm=clip_norm, clip_group=clip_group,
            clip_copies=clip_copies, unused=unused, rebuild_buckets=rebuild_buckets, uneven=uneven, in_flight=in_flight,
            ahead=ahead, batch=batch,
        )  # fmt: skip
        check_optimizer(optimizer)
        super().__init__(rank, params, group, settings)
        if compare_every is not None:
            check_count("compare_every", compare_every)
        self._compare_every = compare_every
        leaves = flatten(params)
        self._bucket_bytes = bucket_bytes
        self._backward = list(reversed(leaves))
        fresh = Parameters(rank, leaves, optimizer, order=self._backward)
        self._surviving, self._parameters = make_surviving_steps(
            rank, self._work, self.group, fresh, hook=hook, exact=exact
        )
        self.steps = rank.epoch.step
        self._stream = rank.stream(f"gradients of {self.group.name}", window=in_flight)
        self._factors: tuple[Future[object], ...] = ()  # of the gradients of the step that was sent last
        self._all_hidden = False  # whether all gradients but the last were on all ranks when backward ended
        self._issued: deque[Future[dict[str, Array]]] = deque()  # updates that are not known to be done
        self._newest: dict[str, Future[dict[str, Array]]] = {}
        first = self._broadcast_first_weights(self._parameters) if self._parameters is fresh else []
        if first:
            views = self._work.compute(lambda *_: self._parameters.views, *first, name="first weights")
            self._newest = dict.fromkeys(leaves, views)
        self._plan_buckets()

    def _plan_buckets(self) -> None:
        """Make the buckets, for gradients that come in the order of `_backward`."""
        plans = plan_by_size(self._leaves, self._backward, self._bucket_bytes)
        depths = {name: depth for depth, name in enumerate(self._leaves)}
        priorities = [min(depths[name] for name in plan.names) for plan in plans]
        last = max(range(len(plans)), key=lambda index: (priorities[index], index))
        self._set_buckets(
            [
                AveragedBucket(
                    self._context,
                    plan,
                    priority=priority,
                    stream=self._stream,
                    parameters=self._parameters,
                    comes_last=plan.index == last,
                )
                for plan, priority in zip(plans, priorities, strict=True)
            ]
        )

    @property
    def plans(self) -> tuple[BucketPlan, ...]:
        """The buckets, in the order in which they travel."""
        return tuple(bucket.plan for bucket in self._buckets)

    def memory(self) -> ModelMemory:
        """Return the sizes of the arrays that the model keeps on this rank from step to step."""
        return measure_memory(self._parameters.weights.values(), gradients=sum(plan.nbytes for plan in self.plans))

    # -- the loop ----------------------------------------------------------------------------------------------

    def newest_weight(self, name: str) -> Array | Future[object]:
        """Return the newest weight; if its update is due, issue it first."""
        bucket = self._home[name]
        if bucket.update_due:
            self._issue_update(bucket)
        newest = self._newest.get(name)
        if newest is None or (newest.done and not newest.failed):
            return self._parameters.views[name]
        return newest[name]

    def gradient(self, name: str) -> Array:
        """Return the place where the gradient of a parameter is packed: backward may write it there, and saves a copy.

        Backward may write it in the next compute after the weight has been asked for, once in each step; ask for the
        place anew in each step.

        Raises:
            UsageError: If there is no such parameter.
        """
        if name not in self._home:
            raise UsageError(f"name: {name!r} is no parameter; known are {', '.join(self._home)}")
        return self._home[name].views[name]

    def _prepare_bucket(self, bucket: AveragedBucket) -> None:
        """Issue the update of a bucket if it is due, before the buffer is written again."""
        if bucket.update_due:
            self._issue_update(bucket)

    def _send_bucket(self, bucket: AveragedBucket) -> None:
        bucket.send(self.steps + 1)

    def _end_step(self, factors: tuple[Future[object], ...]) -> Sequence[Future[object]]:
        """Return futures of the means; updates are issued here, or with the next uses of the weights."""
        reduced = [each for bucket in self._buckets for each in bucket.arrived]
        if self._surviving is not None:
            factors = (*factors, self._surviving.agree(self._buckets, factors, self.steps))
        self._factors = factors
        for bucket in self._buckets:
            bucket.sent = False
        self._work.compute(partial(self._record_arrivals, reduced), name="look")
        compares = self._compare_every is not None and self.steps % self._compare_every == 0
        if self._all_hidden or compares:
            self._issue_due_updates()
        if compares:
            compare_replicas(self._work, self.group, self._parameters.views, self.steps)
        return reduced

    async def _await_weights(self) -> Params:
        await self.wait_updates()
        return self.rebuild_tree(self._parameters.views)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> Tensors:
        """Return dtype and shape of the weights and of the optimizer's state, by name."""
        return self._parameters.tensors()

    def kept(self) -> list[Shard]:
        """Return the pieces that this rank saves in a checkpoint: its share of the weights and state of all."""
        return share_pieces(self._parameters.pieces(), self.group.rank, self.group.size)

    def wanted(self) -> list[Shard]:
        """Return the pieces that this rank reads of a checkpoint: all of them."""
        return self._parameters.pieces()

    async def wait_updates(self) -> None:
        """Wait until all updates that are issued or due have ended."""
        self._issue_due_updates()
        for update in [*self._issued, *set(self._newest.values())]:
            await update
        await self._work.compute(nothing, name="wait updates")

    # -- updates ---------------------------------------------------------------------------------------------------

    def _issue_due_updates(self) -> None:
        for bucket in self._buckets:
            self._prepare_bucket(bucket)

    def _issue_update(self, bucket: AveragedBucket) -> None:
        """Issue the update of a bucket, and make it the newest of the bucket's weights."""
        newest = bucket.update(*self._factors)
        issued = self._issued
        while issued and issued[0].done and not issued[0].failed:
            issued.popleft()
        issued.append(newest)
        self._newest.update(dict.fromkeys(bucket.plan.names, newest))

    def _record_arrivals(self, reduced: list[Future[Array]]) -> None:
        """Note, when backward ends, whether only the last bucket is still on the wire.

        If not, weights are updated all at once after the next step, while that bucket travels; else each of them right
        before it is needed, as forward must not wait for weights that it needs later.
        """
        self._all_hidden = sum(not future.done for future in reduced) <= 1

    def _reorder(self, order: Sequence[str]) -> None:
        if order != self._backward:
            self._issue_due_updates()
            self._backward = list(order)
            self._plan_buckets()
