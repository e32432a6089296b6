"""ZeRO: data parallel ranks that share out optimizer state (stage 1), gradients (2) and parameters (3)."""

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
from .buckets.plan import BucketPlan, Hook, plan_by_size
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
    """A model that a group of ranks shares out; it is used as `DataParallel` is.

    ======  =====================================  =========================================================
    stage   a rank keeps 1/N of                    travels in a step, as part of the parameters' bytes
    ======  =====================================  =========================================================
    1       optimizer state                        gradients scattered, parameters gathered: 2 (N-1)/N
    2       and gradients                          the same
    3       and parameters                         gathered twice, for forward and for backward: 3 (N-1)/N
    ======  =====================================  =========================================================

        model = Sharded(rank, params, optimizer=Adam(lr=1e-3), stage=2)
        model.reduce("w", rank.compute(backward, model["w"], x))
        await model.step()

    Gradients are scattered while backward goes on, each part is updated beside it, and parameters are gathered under
    the computes before those that need them. All stages make the same numbers as `DataParallel`, bit by bit wherever
    the scatter adds in the order in which its all-reduce does: as in one process, and on the virtual clock.

    `model[name]` is a future of the newest weight; asking for it raises a `UsageError` once its gradient has been
    handed over in this step. The arrays are read-only. In stages 1 and 2 they change with the update after the next
    `step`; in stage 3 their memory is free once nobody has them.

    Args:
        rank: This rank.
        params: A dict, list or tuple of arrays, nested as you like; the same names, shapes and dtypes on all ranks.
            The root's values count. They are copied: drop them to save their memory.
        optimizer: Changes the weights; it is given parts of buckets.
        stage: Of ZeRO: 1, 2 or 3.
        group: Ranks to share with; by default all.
        bucket_bytes: When a bucket is full; in stage 3 buckets are gathered whole, so about as large as a layer is
            best. By default as in `DataParallel`.
        depth: In stage 3, how many buckets ahead of their use parameters are gathered.
        shared: In stage 3, ranks of one host have gathered parameters together, once: see `Calls` of a group.
        hook: Takes the place of reduce_scatter; see `GradientBucket`.
        exact: Add up every gradient in the order of ranks: the same bits as `DataParallel(..., exact=True)` on any
            wires.
        clip_norm: Limit of the norm of all mean gradients together. Then no weight is updated before the last
            gradient has come. The norm is added up from parts, so its last digits may differ from those of
            `DataParallel`.
        clip_group: Ranks that have other parts of the model, such as `mesh["pp", "tp"]`: the norm is the norm of
            all parts.
        clip_copies: How many ranks of that group have the same values of a parameter, by name: they count once.
        unused: Whether a parameter without a gradient on this rank is an "error", or counts as "zeros". Then each
            ``with no_sync()`` is one micro-batch.
        rebuild_buckets: Whether buckets travel, after the first step, in the order in which it filled them. They
            keep their contents, which ranks have shared out.
        uneven: Whether some ranks may have fewer steps than others: `finish` then takes part in the others' steps,
            and the mean is over the ranks that still have samples. In stage 3 each rank must make one.
        in_flight: In stages 2 and 3, how many buckets of gradients may be on the wire at once: each takes memory.
        ahead: How many steps the program may be ahead of its updates where it does `await model.step()`.
        batch: Whether the batch of each "rank" is constant when ranks are lost, or the "global" one; see `share`.

    Raises:
        UsageError: If an argument is invalid. At the first weight that is needed, if `params` differ.

    Attributes:
        rank: The rank that it runs on.
        group: The ranks whose gradients it averages.
        stage: Of ZeRO: 1, 2 or 3.
        steps: How many `step` calls there have been.
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
        self._shared = shared
        plans = plan_by_size(self._leaves, reversed(leaves), bucket_bytes)
        self._set_buckets([self._make_bucket(plan) for plan in plans])
        flats = [_concatenate_weights(rank, plan, leaves) for plan in plans]
        self._issue_first_weights(flats)
        self._gathering: Gathering = Prefetched(depth) if stage == 3 else Gathering()
        self._on_the_wire: deque[Future[Array]] = deque()
        self._rounds = self._last_rounds = 0  # micro-batches without an update in this step, and in the one before

    def _issue_first_weights(self, flats: list[Array]) -> None:
        """Issue the first weights of all buckets: those of the first rank."""
        alike: Future[None] | None = None
        if self.group.size > 1:  # the comparison is issued before all that waits for weights
            alike = self._compare_params()
        broadcast = partial(self._broadcast_weights, flats, alike, users_site())
        first = None if alike is None else self.rank.spawn(broadcast, name="first weights")
        for number, bucket in enumerate(self._buckets):
            bucket.begin(flats[number] if first is None else first[number])

    async def _broadcast_weights(self, flats: list[Array], alike: Future[None] | None, site: Site) -> list[Array]:
        """Return the weights of the first rank, once it is known that all ranks have the same parameters."""
        if alike is None:
            return flats
        await alike
        stream = self.rank.stream(f"first weights of {self.group.name}")
        sent = [
            self.group.broadcast(flat, stream=stream, name=RoleName("first weights", "library"), call_site=site)
            for flat in flats
        ]
        return [await each for each in sent]

    def _make_bucket(self, plan: BucketPlan) -> ScatteredBucket:
        depths = {name: depth for depth, name in enumerate(self._leaves)}
        priority = min(depths[name] for name in plan.names)
        return ScatteredBucket(
            self._context,
            plan,
            priority=priority,
            stage=self.stage,
            optimizer=self._optimizer,
            shared=self._shared,
        )

    # -- the loop ----------------------------------------------------------------------------------------------

    def newest_weight(self, name: str) -> Future[object]:
        """Return a future of the newest weight; refuse it after its gradient was handed over."""
        bucket = self._home[name]
        if bucket.sent or name in bucket.handed:
            raise UsageError(
                f"name: the gradient of {name!r} has been handed over in step {self.steps}, so its update may have "
                f"begun; ask for the weight before that, or after step()"
            )
        return self._gathering.visit(bucket)[name]

    def _send_bucket(self, bucket: ScatteredBucket) -> None:
        """Issue the scatter of a bucket, at most `in_flight` at once; under `no_sync`, the last one begins a round."""
        wire = self._on_the_wire
        before = wire.popleft() if len(wire) >= self._settings.in_flight else None
        bucket.send(self.steps + 1, before, keeps=not self._syncs)
        if self.stage > 1:
            wire.append(cast("Future[Array]", bucket.reduced))
        if not self._syncs and not self._queue.waiting:
            self._queue.begin()
            self._rounds += 1
            for each in self._buckets:
                each.sent = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up the gradients that are handed over inside the ``with``, each once for a micro-batch.

        The next ones take them along. So the mean over ranks is one of sums over micro-batches: divide the loss by
        their number. In stage 1 they are added up before they travel; in stages 2 and 3, where no rank has room for
        all, the gradients of each micro-batch travel.
        """
        with super().no_sync():
            rounds = self._rounds
            yield
            if self.stage > 1 and self._settings.unused == "zeros" and self._rounds == rounds:
                self._end_round()

    def _end_round(self) -> None:
        """Send the buckets of this micro-batch that are not full, with zeros for missing gradients."""
        for bucket in self._queue.rest():
            self._start_bucket(bucket)

    def _step_with_zeros(self) -> None:
        """Take part in a step of the other ranks with zeros, in the number of rounds of the step before."""
        self._gathering.repeat()
        for _ in range(self._last_rounds):
            with super().no_sync():
                self._end_round()
        self.step()

    def _end_step(self, factors: tuple[Future[object], ...]) -> Sequence[Future[object]]:
        """Issue the updates of all buckets, then gathers; return futures of the updated parts."""
        self._last_rounds, self._rounds = self._rounds, 0
        self._gathering.end_step()
        for bucket in self._buckets:
            bucket.update(self.steps, factors)
        self._gathering.begin_step(self._buckets)
        return [bucket.updated for bucket in self._buckets]

    def _norm_groups(self) -> list[Group]:
        """Return the groups over which sums of squares are added: first the ranks that share the buckets."""
        others_parts = [self.group] if self.group.size > 1 else []
        return others_parts + super()._norm_groups()

    def _reorder(self, order: Sequence[str]) -> None:
        """Sort the buckets by the place of their last gradient in `order`."""
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

    def kept(self) -> list[Shard]:
        """Return the pieces that this rank saves in a checkpoint: its part."""
        return [piece for bucket in self._buckets for piece in bucket.weights.pieces()]

    def wanted(self) -> list[Shard]:
        """Return the pieces that this rank reads of a checkpoint: its part; in stages 1 and 2 all parameters."""
        return [piece for bucket in self._buckets for piece in bucket.weights.pieces(whole=bucket.whole)]

    async def wait_updates(self) -> None:
        """Wait until all updates of this rank's part are done that have been issued."""
        for bucket in self._buckets:
            await bucket.updated

    def resume(self, steps: int, notes: Mapping[str, object], own: Mapping[str, object] | None) -> str:
        """Go on from that step; see `Bucketed`."""
        self._gathering.end_step()  # gathered parameters are of other weights
        return super().resume(steps, notes, own)

    # -- memory ------------------------------------------------------------------------------------------------

    def memory(self) -> ModelMemory:
        """Return the sizes of the arrays that the model keeps on this rank from step to step."""
        buckets, others = self._buckets, 0
        if self.stage < 3:
            others = sum(bucket.plan.nbytes - bucket.weights.flat.nbytes for bucket in buckets)
        gradients = sum(bucket.grad.nbytes for bucket in buckets)
        return measure_memory([bucket.weights for bucket in buckets], gradients=gradients, others=others)

    def expected_memory(self) -> ModelMemory:
        """Return the memory of this model, stage and group by the formula of ZeRO."""
        plans = [bucket.plan for bucket in self._buckets]
        kept = sum(
            each.itemsize * plan.size for plan in plans for each in self._optimizer.fresh(0, plan.dtype).values()
        )
        parameters = sum(plan.nbytes for plan in plans)
        return expected_memory(self.stage, self.group.size, parameters=parameters, optimizer=kept)


def _concatenate_weights(rank: Rank, plan: BucketPlan, leaves: dict[str, Array]) -> Array:
    flat = rank.empty(plan.size, plan.dtype)
    if flat.flags.writeable:
        np.concatenate([leaves[name].reshape(-1) for name in plan.names], out=flat)
    return flat
