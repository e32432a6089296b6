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
from .buckets.plan import BucketPlan, Hook, plan_buckets_by_size
from .checkpoints.pieces import Shard, Tensors, pieces_of_rank
from .memory_work import do_nothing
from .optimizers import Optimizer, check_optimizer
from .parameters import ModelMemory, Parameters, measure_memory
from .settings import IN_FLIGHT, Batch, Settings, Unused, check_count
from .surviving import make_surviving_steps
from .tree import Params, flatten

if TYPE_CHECKING:
    from .tree import Array


class DataParallel(Bucketed[AveragedBucket, Params]):
    """A model with gradients averaged over a group of ranks.

    List parameters in the order in which forward uses them. Their gradients may be handed over in any order, the same
    on all ranks. Nothing in the loop waits: the update of a weight is issued when the program next asks for the weight,
    and computes that need the weight wait on the compute stream. A gradient that is not finite makes the rank fail.

        model = DataParallel(rank, {"w": np.zeros(8, np.float32)}, optimizer=SGD(lr=0.1))
        for x in batches:
            model.reduce("w", rank.compute(backward, model["w"], x))
            await model.step()
        weights = await model.finish()

    `model[name]` is the newest weight, or a future of it; `await model[name]` is the array in either case. The array
    belongs to the model, and changes with the update after the next `step`: copy an array that you keep.

    All ranks begin with the weights of the group's first rank, whatever values the other ranks pass in `params`.

    Under `overlap run --survive` the model of the next epoch goes on with the weights, the optimizer's state and the
    `steps` of the model before: write the loop as ``while model.steps < n``. See `surviving`.

    Args:
        rank: This rank.
        params: A dict, list or tuple of arrays, nested as you like; the same names, shapes and dtypes on all ranks.
        optimizer: Updates the weights.
        group: The ranks whose gradients are averaged; None: all.
        bucket_bytes: Size from which on a bucket is full. None: 1 MiB for the first and 25 MiB for the others, and
            gradients of 1 MiB and more travel alone. Buckets with weights that forward needs early have priority.
        hook: Takes the place of all_reduce; see `GradientBucket`.
        exact: Whether every gradient is added up in the order of ranks. The bits are then the same for any buckets,
            algorithm and transport. `overlap plan all_reduce --exact` prints the cost; in one process there is none.
        clip_norm: Limit of the norm of all mean gradients together; None: no limit. With a limit, no weight is updated
            before the last gradient has come, so no communication is hidden under forward.
        clip_group: This rank and the ranks that have the other parts of the model, such as `mesh["pp", "tp"]`: the norm
            is that of all parts together.
        clip_copies: For parameters that several ranks of `clip_group` have with the same values, the number of these
            ranks, by name: such a parameter counts once in the norm. Example: the gains of a norm between
            tensor-parallel layers.
        unused: Whether a parameter without a gradient on this rank is an "error", or counts as "zeros".
        rebuild_buckets: Whether buckets are made again after the first step, in the order in which gradients arrived.
        uneven: Whether some ranks may have fewer steps than others. Then `finish` takes part in the others' steps, and
            the mean is over the ranks that still have samples.
        in_flight: Number of buckets that may be on the wire at once.
        ahead: Number of steps that the program may be ahead of its gradients, if it awaits `model.step()`.
        compare_every: Number of steps after which ranks compare their weights; None: never. If the weights differ, all
            ranks fail with a `ReplicaError` that names the ranks in the minority.
        batch: Which number of samples stays the same when ranks are lost: "rank", that of each rank; "global", that of
            all ranks together. See `share`.

    Raises:
        UsageError: An argument is invalid; or, at the first use of a weight, `params` differ between ranks.

    Attributes:
        rank: The rank that the model runs on.
        group: The ranks whose gradients are averaged.
        steps: Number of `step` calls so far.
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
        self.steps: int = rank.epoch.step
        self._stream = rank.stream(f"gradients of {self.group.name}", window=in_flight)
        # Futures of the numbers that the gradients of the step that was sent last are multiplied with.
        self._factors: tuple[Future[object], ...] = ()
        self._means_are_hidden = False  # whether at most one mean was still under way when the last backward ended
        self._issued: deque[Future[dict[str, Array]]] = deque()  # updates that are not known to be done
        self._newest: dict[str, Future[dict[str, Array]]] = {}  # by parameter: its newest update that was issued
        # If not `fresh`, a process was lost under `--survive`, and the parameters are those of the earlier model, which
        # are equal on all ranks.
        first = self._broadcast_first_weights(self._parameters) if self._parameters is fresh else []
        if first:
            # A weight may be used once all broadcasts have ended.
            views = self._work.compute(lambda *_: self._parameters.views, *first, name="first weights")
            self._newest = dict.fromkeys(leaves, views)
        self._plan_buckets()

    def _plan_buckets(self) -> None:
        """Make the buckets, for gradients that come in the order of `_backward`."""
        plans = plan_buckets_by_size(self._leaves, self._backward, self._bucket_bytes)
        # A bucket with a weight that forward needs early is urgent: its priority is the lowest index of its weights.
        depths = {name: depth for depth, name in enumerate(self._leaves)}
        priorities = [min(depths[name] for name in plan.names) for plan in plans]
        # The messages of the least urgent bucket come last; of several, those of the bucket that leaves last.
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
        gradients_bytes = sum(plan.nbytes for plan in self.plans)
        return measure_memory(self._parameters.weights.values(), gradients_bytes=gradients_bytes)

    # -- the loop ----------------------------------------------------------------------------------------------

    def newest_weight(self, name: str) -> Array | Future[object]:
        """Return the newest weight: the array, or a future of it while its update is under way.

        If the update of its bucket is due, it is issued first.
        """
        bucket = self._bucket_by_name[name]
        if bucket.is_update_due:
            self._issue_update(bucket)
        newest = self._newest.get(name)
        if newest is None or (newest.done and not newest.failed):
            return self._parameters.views[name]
        return newest[name]

    def gradient(self, name: str) -> Array:
        """Return the memory where the gradient of a parameter is packed: backward may write it there to save a copy.

        Write to it in a compute that is issued after the weight has been asked for, once in each step. Call this method
        again in each step.

        Raises:
            UsageError: There is no such parameter.
        """
        if name not in self._bucket_by_name:
            raise UsageError(f"name: {name!r} is no parameter; known are {', '.join(self._bucket_by_name)}")
        return self._bucket_by_name[name].views[name]

    def _prepare_bucket(self, bucket: AveragedBucket) -> None:
        """Issue the update of a bucket if it is due: it must read the buffer before the next gradients are packed."""
        if bucket.is_update_due:
            self._issue_update(bucket)

    def _send_bucket(self, bucket: AveragedBucket) -> None:
        bucket.send(self.steps + 1)

    def _end_step(self, factors: tuple[Future[object], ...]) -> Sequence[Future[object]]:
        """Return futures of the means; updates are issued here, or with the next uses of the weights."""
        reduced = [each for bucket in self._buckets for each in bucket.mean_futures]
        if self._surviving is not None:
            factors = (*factors, self._surviving.issue_agreement(self._buckets, factors, self.steps))
        self._factors = factors
        for bucket in self._buckets:
            bucket.is_sent = False
        # A compute, because it must look when backward has ended on the compute stream.
        self._work.compute(partial(self._record_hidden_means, reduced), name="look")
        compares = self._compare_every is not None and self.steps % self._compare_every == 0
        # All updates now, before the next forward; otherwise each is issued with the next use of a weight.
        if self._means_are_hidden or compares:
            self._issue_due_updates()
        if compares:
            compare_replicas(self._work, self.group, self._parameters.views, self.steps)
        return reduced

    async def _await_weights(self) -> Params:
        """Wait for all updates; return the weights, which are the model's own arrays."""
        await self.wait_updates()
        return self.rebuild_tree(self._parameters.views)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> Tensors:
        """Return dtype and shape of the weights and of the optimizer's state, by name."""
        return self._parameters.tensors()

    def pieces_to_save(self) -> list[Shard]:
        """Return the pieces that this rank saves in a checkpoint: 1 / ranks of all weights and state."""
        return pieces_of_rank(self._parameters.pieces(), self.group.rank, self.group.size)

    def pieces_to_read(self) -> list[Shard]:
        """Return the pieces that this rank reads from a checkpoint: all weights and state."""
        return self._parameters.pieces()

    async def wait_updates(self) -> None:
        """Wait until all updates that are issued or due have ended."""
        self._issue_due_updates()
        for update in [*self._issued, *set(self._newest.values())]:
            await update
        await self._work.compute(do_nothing, name="wait updates")

    # -- updates ---------------------------------------------------------------------------------------------------

    def _issue_due_updates(self) -> None:
        for bucket in self._buckets:
            self._prepare_bucket(bucket)

    def _issue_update(self, bucket: AveragedBucket) -> None:
        """Issue the update of a bucket, and make it the newest of the bucket's weights."""
        newest = bucket.issue_update(*self._factors)
        issued = self._issued
        while issued and issued[0].done and not issued[0].failed:
            issued.popleft()
        issued.append(newest)
        self._newest.update(dict.fromkeys(bucket.plan.names, newest))

    def _record_hidden_means(self, reduced: list[Future[Array]]) -> None:
        """Record, when backward has ended, whether at most one mean is still under way (`_means_are_hidden`).

        If so, the next step issues all updates at its end: they run while the last bucket travels. If not, each update
        is issued right before its weight is used, so that forward does not wait for weights that it needs later.
        """
        self._means_are_hidden = sum(not future.done for future in reduced) <= 1

    def _reorder_buckets(self, order: Sequence[str]) -> None:
        """Make the buckets again for another order of gradients; updates that are due are issued first."""
        if order != self._backward:
            self._issue_due_updates()
            self._backward = list(order)
            self._plan_buckets()
