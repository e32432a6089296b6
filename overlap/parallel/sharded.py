"""ZeRO: data parallel ranks that divide optimizer state (stage 1), also gradients (2), also parameters (3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from ..timeline.span import RoleName
from .buckets.bucketed import Bucketed
from .buckets.gathering import Gathering, Prefetched
from .buckets.plan import BucketPlan, Hook, plan_buckets_by_size
from .buckets.scattered import ScatteredBucket
from .checkpoints.pieces import Shard, Tensors
from .memory_work import users_site
from .optimizers import Optimizer, check_optimizer
from .parameters import ModelMemory, Stage, expected_memory, measure_memory
from .settings import Batch, Settings, Unused, check_count
from .tree import Params, Site, flatten

if TYPE_CHECKING:
    from .tree import Array


class Sharded(Bucketed[ScatteredBucket, Params]):
    """A model whose state is divided among the ranks of a group. It has the methods of `DataParallel`.

    ======  =====================================  =========================================================
    stage   a rank keeps 1/N of                    bytes sent in a step, relative to those of the parameters
    ======  =====================================  =========================================================
    1       optimizer state                        gradients scattered, parameters gathered: 2 (N-1)/N
    2       and gradients                          the same
    3       and parameters                         gathered twice, for forward and for backward: 3 (N-1)/N
    ======  =====================================  =========================================================

    N is the number of ranks::

        model = Sharded(rank, params, optimizer=Adam(lr=1e-3), stage=2)
        model.reduce("w", rank.compute(backward, model["w"], x))
        await model.step()

    Gradients are scattered and parts of the weights are updated while backward goes on. Parameters are gathered while
    earlier computes run. All stages compute the same numbers as `DataParallel`. The numbers are equal bit by bit
    wherever the scatter adds in the order of the all-reduce: in one process, and on the virtual clock.

    `model[name]` is a future of the newest weight. It raises a `UsageError` once the gradient of this weight has been
    handed over in this step. The arrays are read-only. In stages 1 and 2 they change with the update after the next
    `step`. In stage 3 the memory of an array is free once the program holds no reference to the array.

    Args:
        rank: This rank.
        params: A dict, list or tuple of arrays, nested as you like; the same names, shapes and dtypes on all ranks.
            The values of the group's first rank count. The model copies the arrays: drop yours to save memory.
        optimizer: Updates the weights, each call with a part of a bucket.
        stage: Stage of ZeRO: 1, 2 or 3.
        group: The ranks that divide the model; None: all.
        bucket_bytes: Size from which on a bucket is full; None: as in `DataParallel`. In stage 3 whole buckets are
            gathered, so the size of a layer is best.
        depth: In stage 3, the number of buckets that are gathered ahead of their use.
        shared: In stage 3, whether the ranks of one host have one common copy of gathered parameters.
        hook: Takes the place of reduce_scatter; see `GradientBucket`.
        exact: Whether every gradient is added up in the order of ranks: the bits are then the same as with
            `DataParallel(..., exact=True)`, on any transport.
        clip_norm: Limit of the norm of all mean gradients together; None: no limit. With a limit, no weight is updated
            before the last gradient has come. The norm is added up from parts, so its last digits may differ from
            those of `DataParallel`.
        clip_group: This rank and the ranks that have the other parts of the model, such as `mesh["pp", "tp"]`: the norm
            is that of all parts together.
        clip_copies: For parameters that several ranks of `clip_group` have with the same values, the number of these
            ranks, by name: such a parameter counts once in the norm.
        unused: Whether a parameter without a gradient on this rank is an "error", or counts as "zeros". With "zeros",
            each ``with no_sync()`` must be exactly one micro-batch.
        rebuild_buckets: Whether later steps send the buckets in the order in which the first step filled them. The
            contents of buckets stay, because ranks have divided them.
        uneven: Whether some ranks may have fewer steps than others. Then `finish` takes part in the others' steps, and
            the mean is over the ranks that still have samples. In stage 3 each rank must make at least one step.
        in_flight: In stages 2 and 3, the number of buckets of gradients that may be on the wire at once. Each of them
            takes memory.
        ahead: Number of steps that the program may be ahead of the updates, if it awaits `model.step()`.
        batch: Which number of samples stays the same when ranks are lost: "rank", that of each rank; "global", that of
            all ranks together. See `share`.

    Raises:
        UsageError: An argument is invalid; or, at the first use of a weight, `params` differ between ranks.

    Attributes:
        rank: The rank that the model runs on.
        group: The ranks whose gradients are averaged.
        stage: Stage of ZeRO: 1, 2 or 3.
        steps: Number of `step` calls so far.
    """

    stage: Stage
    _update_stream = "optimizer"

    def __init__(
        self,
        rank: Rank,
        params: Params,
        *,
        optimizer: Optimizer,
        stage: Stage = 3,
        group: Group | None = None,
        bucket_bytes: int | None = None,
        depth: int = 1,
        shared: bool = False,
        hook: Hook | None = None,
        exact: bool = False,
        clip_norm: float | None = None,
        clip_group: Group | None = None,
        clip_copies: Mapping[str, int] | None = None,
        unused: Unused = "error",
        rebuild_buckets: bool = True,
        uneven: bool = False,
        in_flight: int = 4,
        ahead: int = 2,
        batch: Batch = "rank",
    ) -> None:
        if stage not in (1, 2, 3):
            raise UsageError(f"stage: expected 1, 2 or 3, got {stage!r}")
        check_count("depth", depth, least=0)
        if shared and stage != 3:
            raise UsageError(f"shared: only stage 3 gathers parameters anew for each use; stage {stage} keeps them")
        settings = Settings(
            bucket_bytes=bucket_bytes, hook=hook, exact=exact, clip_norm=clip_norm, clip_group=clip_group,
            clip_copies=clip_copies, unused=unused, rebuild_buckets=rebuild_buckets, uneven=uneven, in_flight=in_flight,
            ahead=ahead, batch=batch,
        )  # fmt: skip
        check_optimizer(optimizer)
        super().__init__(rank, params, group, settings)
        self.stage, self._optimizer, leaves = stage, optimizer, flatten(params)
        plans = plan_buckets_by_size(self._leaves, reversed(leaves), bucket_bytes)
        # A bucket with a weight that forward needs early is urgent: its priority is the lowest index of its weights.
        depths = {name: depth for depth, name in enumerate(leaves)}
        priorities = [min(depths[name] for name in plan.names) for plan in plans]
        self._set_buckets(
            [
                ScatteredBucket(self._context, plan, priority=priority, stage=stage, optimizer=optimizer, shared=shared)
                for plan, priority in zip(plans, priorities, strict=True)
            ]
        )
        self._issue_first_weights([_concatenate_weights(rank, plan, leaves) for plan in plans])
        self._gathering: Gathering = Prefetched(depth) if stage == 3 else Gathering()
        self._on_the_wire: deque[Future[Array]] = deque()  # the scatters issued last, at most `in_flight`
        self._microbatch_count = self._last_microbatch_count = (
            0  # micro-batches without an update in this step, and in the one before
        )

    def _issue_first_weights(self, flats: list[Array]) -> None:
        """Issue the copy of the first rank's weights into all buckets; `flats` are this rank's, by bucket."""
        first: Sequence[Array] | Future[list[Array]] = flats
        if self.group.size > 1:  # ranks compare their parameters first
            broadcast = partial(self._broadcast_weights, flats, self._compare_params(), users_site())
            first = self.rank.spawn(broadcast, name="first weights")
        for number, bucket in enumerate(self._buckets):
            bucket.issue_first_copy(first[number])

    async def _broadcast_weights(self, flats: list[Array], alike: Future[None], site: Site) -> list[Array]:
        """Wait for `alike`, then return the weights of the first rank, one flat array for each bucket.

        `alike` fails if names, shapes or dtypes differ between ranks.
        """
        await alike
        stream = self.rank.stream(f"first weights of {self.group.name}")
        sent = [
            self.group.broadcast(flat, stream=stream, name=RoleName("first weights", "library"), call_site=site)
            for flat in flats
        ]
        return [await each for each in sent]

    # -- the loop ----------------------------------------------------------------------------------------------

    def newest_weight(self, name: str) -> Future[object]:
        """Return a future of the newest weight.

        Raises:
            UsageError: The weight's gradient has been handed over in this step.
        """
        bucket = self._bucket_by_name[name]
        if bucket.is_sent or name in bucket.unpacked_gradients:
            raise UsageError(
                f"name: the gradient of {name!r} has been handed over in step {self.steps}, so its update may have "
                f"begun; ask for the weight before that, or after step()"
            )
        return self._gathering.parameters_for_use(bucket)[name]

    def _send_bucket(self, bucket: ScatteredBucket) -> None:
        """Issue the scatter of a bucket; if `in_flight` scatters may be on the wire, it waits for the oldest of them.

        Under `no_sync`, the last bucket of a backward makes all buckets ready for the next backward.
        """
        wire = self._on_the_wire
        before = wire.popleft() if len(wire) >= self._settings.in_flight else None
        bucket.send(self.steps + 1, before, accumulates=not self._syncs)
        if self.stage > 1:
            wire.append(cast("Future[Array]", bucket.mean_part))
        # This was the last bucket of a backward under `no_sync`: the next backward sends all buckets again.
        if not self._syncs and not self._queue.unsent_buckets:
            self._queue.begin_step()
            self._microbatch_count += 1
            for each in self._buckets:
                each.is_sent = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients that are handed over inside the ``with``, and update with them in the next step.

        The mean over ranks is then a mean of sums over micro-batches: divide the loss by the number of micro-batches.
        In stage 1 gradients are added up before they are sent. In stages 2 and 3, where no rank has memory for all
        gradients, those of each micro-batch are sent.
        """
        with super().no_sync():
            rounds = self._microbatch_count
            yield
            if self.stage > 1 and self._settings.unused == "zeros" and self._microbatch_count == rounds:
                self._send_remaining_buckets()

    def _send_remaining_buckets(self) -> None:
        """Send the buckets of this micro-batch that are not full, with zeros for missing gradients."""
        for bucket in self._queue.take_remaining_buckets():
            self._count_and_send_bucket(bucket)

    def _step_with_zeros(self) -> None:
        """Take part with zeros in a step of the other ranks, with as many micro-batches as in this rank's last step."""
        # Gather the parameters in the order of the last step, as the other ranks do.
        self._gathering.repeat_gathers()
        for _ in range(self._last_microbatch_count):
            # The base class's `no_sync`, because that of this class may end the round by itself.
            with super().no_sync():
                self._send_remaining_buckets()
        self.step()

    def _end_step(self, factors: tuple[Future[object], ...]) -> Sequence[Future[object]]:
        """Issue the updates of all buckets, then the next gathers; return futures of the updated parts."""
        self._last_microbatch_count, self._microbatch_count = self._microbatch_count, 0
        self._gathering.end_step()
        for bucket in self._buckets:
            bucket.issue_update(self.steps, factors)
        self._gathering.issue_gathers(self._buckets)
        return [bucket.newest_part for bucket in self._buckets]

    def _norm_groups(self) -> list[Group]:
        """Return the groups over which sums of squares are added: first the ranks that divide the buckets."""
        others_parts = [self.group] if self.group.size > 1 else []
        return others_parts + super()._norm_groups()

    def _reorder_buckets(self, order: Sequence[str]) -> None:
        """Sort the buckets by when they become full, if gradients arrive in `order`."""
        ranking = {name: number for number, name in enumerate(order)}
        self._set_buckets(sorted(self._buckets, key=lambda bucket: max(ranking[name] for name in bucket.plan.names)))

    async def _await_weights(self) -> Params:
        """Wait for all updates, and gather the weights once more; return them."""
        leaves: dict[str, object] = {}
        for whole in [self._gathering.gather_to_keep(bucket) for bucket in self._buckets]:
            leaves |= await whole
        return self.rebuild_tree(leaves)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> Tensors:
        """Return dtype and shape of the weights and of the optimizer's state, by name."""
        return {name: form for bucket in self._buckets for name, form in bucket.weights.tensors().items()}

    def pieces_to_save(self) -> list[Shard]:
        """Return the pieces that this rank saves in a checkpoint: its part of weights and optimizer state."""
        return [piece for bucket in self._buckets for piece in bucket.weights.pieces()]

    def pieces_to_read(self) -> list[Shard]:
        """Return the pieces that this rank reads from a checkpoint: its part; in stages 1 and 2 also all weights."""
        return [piece for bucket in self._buckets for piece in bucket.weights.pieces(whole=bucket.whole)]

    async def wait_updates(self) -> None:
        """Wait until all updates of this rank's part that have been issued are done."""
        for bucket in self._buckets:
            await bucket.newest_part

    def resume(self, steps: int, notes: Mapping[str, object], own: Mapping[str, object] | None) -> str:
        """Adopt a checkpoint; see `Bucketed.resume`. Gathered parameters are dropped: they are older."""
        self._gathering.end_step()
        return super().resume(steps, notes, own)

    # -- memory ------------------------------------------------------------------------------------------------

    def memory(self) -> ModelMemory:
        """Return the sizes of the arrays that the model keeps on this rank from step to step."""
        buckets, others_bytes = self._buckets, 0
        if self.stage < 3:
            # In stages 1 and 2 this rank has all parameters, also the parts that other ranks update.
            others_bytes = sum(bucket.plan.nbytes - bucket.weights.flat.nbytes for bucket in buckets)
        gradients_bytes, weights = sum(bucket.grad.nbytes for bucket in buckets), [bucket.weights for bucket in buckets]
        return measure_memory(weights, gradients_bytes=gradients_bytes, others_bytes=others_bytes)

    def expected_memory(self) -> ModelMemory:
        """Return the memory of this model on one rank by the formulas of ZeRO; see `parameters.expected_memory`."""
        plans = [bucket.plan for bucket in self._buckets]
        optimizer_bytes = 0
        for plan in plans:
            states = self._optimizer.fresh(0, plan.dtype)  # of 0 elements, for the sizes of their items alone
            optimizer_bytes += plan.size * sum(state.itemsize for state in states.values())
        parameters = sum(plan.nbytes for plan in plans)
        return expected_memory(self.stage, self.group.size, parameters=parameters, optimizer=optimizer_bytes)


def _concatenate_weights(rank: Rank, plan: BucketPlan, leaves: dict[str, Array]) -> Array:
    """Return the weights of a bucket in one new flat array; in a world of shapes alone, an array without data."""
    flat = rank.empty(plan.size, plan.dtype)
    if flat.flags.writeable:
        np.concatenate([leaves[name].reshape(-1) for name in plan.names], out=flat)
    return flat
