"""ZeRO: data parallel ranks that share out optimizer state (stage 1), gradients (2) and parameters (3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import fsum, sqrt
from sys import _getframe
from typing import TYPE_CHECKING, cast

import numpy as np

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .agreement import agreement
from .ahead import Ahead
from .buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, BucketPlan, plan_buckets
from .gathering import Gathering, Kept, Prefetched
from .memory import ModelMemory, expected_memory
from .memory_work import MemoryWork
from .names import Names
from .norms import square_sum
from .optimizers import Optimizer
from .pieces import Piece, Tensors, state_name
from .settings import Order
from .shards import Gauge, Place, Shard, Stage
from .shared_bucket import SharedBucket
from .tree import flatten, rebuild

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .tree import Array, Tree

__all__ = ["Sharded"]


class Sharded:
    """A model that a group of ranks shares out; it is used as `DataParallel` is.

    ======  =====================================  =========================================================
    stage   a rank keeps 1/N of                    travels in a step, as part of the parameters' bytes
    ======  =====================================  =========================================================
    1       optimizer state                        gradients scattered, parameters gathered: 2 (N-1)/N
    2       and gradients                          the same
    3       and parameters                         gathered twice, for forward and for backward: 3 (N-1)/N
    ======  =====================================  =========================================================

    Gradients are scattered while backward goes on, each part is updated beside it, and parameters are gathered under
    the computes before those that need them. All stages make the same numbers as `DataParallel`, bit by bit wherever
    the scatter adds in the order in which its all-reduce does: as in one process, and on the virtual clock.

    Attributes:
        rank: That it runs on.
        group: Whose gradients it averages.
        stage: What is shared out.
        steps: How many `step` calls there have been.
    """

    def __init__(
        self,
        rank: Rank,
        params: Tree,
        *,
        optimizer: Optimizer,
        stage: Stage = 3,
        group: Group | None = None,
        bucket_bytes: int | None = None,
        depth: int = 1,
        order: Order = "forward",
        exact: bool = False,
        clip_norm: float | None = None,
        in_flight: int = 4,
        ahead: int = 2,
    ) -> None:
        """Take a share of the weights over.

        Args:
            rank: This rank.
            params: A dict, list or tuple of arrays, nested as you like; the same names, shapes and dtypes on all ranks.
                The root's values count. They are copied: drop them to save their memory.
            optimizer: What changes the weights; it is given parts of buckets.
            stage: Of ZeRO: 1, 2 or 3.
            group: Ranks to share with; by default all.
            bucket_bytes: When a bucket is full; in stage 3 buckets are gathered whole, so about as large as a layer is
                best. By default as in `DataParallel`.
            depth: In stage 3, how many buckets ahead of their use parameters are gathered.
            order: "forward" lets what forward needs first overtake; "fifo" sends in the order of backward.
            exact: Add up every gradient in the order of ranks: the same bits as `DataParallel(..., exact=True)` on any
                wires.
            clip_norm: Limit of the norm of all mean gradients together. Then no weight is updated before the last
                gradient has come. The norm is added up from parts, so its last digits may differ from those of
                `DataParallel`.
            in_flight: In stages 2 and 3, how many buckets of gradients may be on the wire at once: each takes memory.
            ahead: How many steps the program may be ahead of what it awaits with `await model.step()`.

        Raises:
            UsageError: If an argument cannot be meant. At the first weight that is needed, if `params` differ.
        """
        leaves = flatten(params)
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm: expected a number above 0, got {clip_norm!r}")
        _check(stage=stage, depth=depth, order=order, in_flight=in_flight, ahead=ahead, bucket_bytes=bucket_bytes)
        self.rank, self.group, self.stage, self.steps = rank, group or rank.world, stage, 0
        self._names, self._like = Names(params), rebuild(params, {name: name for name in leaves})
        self._in_flight, self._ahead, self._clip_norm, self._keeps = in_flight, ahead, clip_norm, False
        self._optimizer, self._gauge, self._work = optimizer, Gauge(), MemoryWork(rank)
        plans = plan_buckets(
            {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()},
            reversed(leaves),
            bucket_bytes=bucket_bytes or BUCKET_BYTES,
            first_bytes=FIRST_BUCKET_BYTES,
            alone_bytes=None if bucket_bytes else FIRST_BUCKET_BYTES,
        )
        self._buckets = self._make_buckets(plans, list(leaves), ordered=order == "forward", exact=exact)
        flats = [_flat(rank, plan, leaves) for plan in plans]
        told = [f"{name!r}, {leaf.dtype} {leaf.shape}," for name, leaf in leaves.items()]
        first: Future[list[Array]] | None = None
        if self.group.size > 1:  # what is compared is issued before all that waits for weights
            alike = agreement(rank, self.group, "params", told)
            first = rank.spawn(self._broadcast, flats, alike, name="first weights")
        for place, bucket in enumerate(self._buckets):
            bucket.begin(flats[place] if first is None else cast("Future[Array]", first[place]))
        self._home = {name: bucket for bucket in self._buckets for name in bucket.shard.plan.names}
        self._gathering: Gathering = Prefetched(depth) if stage == 3 else Kept()
        self._next = 0  # bucket to be sent
        self._on_the_wire: deque[Future[Array]] = deque()
        self._sent: deque[list[Future[Array]]] = deque()

    async def _broadcast(self, flats: list[Array], alike: Future[None]) -> list[Array]:
        """Return the weights of the first rank, once it is known that all ranks have the same parameters."""
        await alike
        stream = self.rank.stream(f"first weights of {self.group.name}")
        sent = [self.group.broadcast(flat, stream=stream, name="first weights") for flat in flats]
        return [await each for each in sent]

    def _make_buckets(
        self, plans: tuple[BucketPlan, ...], names: list[str], *, ordered: bool, exact: bool
    ) -> list[SharedBucket]:
        places = {name: place for place, name in enumerate(names)}
        return [
            SharedBucket(
                self.rank,
                self.group,
                Shard(
                    self.rank,
                    plan,
                    ranks=self.group.size,
                    place=self.group.rank,
                    stage=self.stage,
                    optimizer=self._optimizer,
                    gauge=self._gauge,
                ),
                self._work,
                place=min(places[name] for name in plan.names) if ordered else 0,
                exact=exact,
            )
            for plan in plans
        ]

    # -- the loop ----------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> object:
        """Return a future of the newest weight; of a part of the tree, a dict of futures, to be passed to a compute.

        The arrays are read-only. In stages 1 and 2 they change with the update after the next `step`; in stage 3 their
        memory is free once nobody has them.

        Raises:
            UsageError: If there is no such parameter, or its gradient has been handed over in this step.
        """
        return self._names.find(name, self._weight)

    def _weight(self, name: str) -> Future[object]:
        bucket = self._home[name]
        if bucket.sent or name in bucket.handed:
            raise UsageError(
                f"name: the gradient of {name!r} has been handed over in step {self.steps + 1}, so its update may have "
                f"begun; ask for the weight before that, or after step()"
            )
        return self._gathering.visit(bucket)[name]

    def reduce(self, name: str, grad: object) -> None:
        """Hand over a gradient, or a future of it; it travels as soon as its bucket is full.

        Nothing that is issued later in the step may use the parameter: its update may run beside the rest of backward.

        Args:
            name: Of the parameter, or of a part of the tree.
            grad: An array of the parameter's shape, or a future of one; for a part, a tree of them, or a future of one.

        Raises:
            UsageError: If there is no such parameter, or it has had its gradient in this step. At the await of a weight
                or of `finish`, if the gradient has another shape.
            NonFiniteError: There, if the gradient is not finite.
        """
        frame = _getframe(1)
        pairs = list(self._names.pairs(name, grad))
        for leaf, _ in pairs:
            if self._home[leaf].sent or leaf in self._home[leaf].handed:
                raise UsageError(
                    f"reduce: the gradient of {leaf!r} has been handed over in step {self.steps + 1} already"
                )
        for leaf, gradient in pairs:
            self._home[leaf].handed[leaf] = gradient
        while self._next < len(self._buckets) and self._full(self._buckets[self._next]):
            self._send(self._buckets[self._next], (frame.f_code, frame.f_lasti))
            self._next += 1
        if self._keeps and self._next == len(self._buckets):
            self._next = 0
            for bucket in self._buckets:
                bucket.sent = False

    def _full(self, bucket: SharedBucket) -> bool:
        return len(bucket.handed) == len(bucket.shard.plan.slots)

    def _send(self, bucket: SharedBucket, place: Place) -> None:
        wire = self._on_the_wire
        before = wire.popleft() if len(wire) >= self._in_flight else None
        bucket.send(self.steps + 1, place, before, keeps=self._keeps)
        if self.stage > 1:
            wire.append(cast("Future[Array]", bucket.reduced))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up the gradients that are handed over inside the ``with``, each once for a micro-batch.

        The next ones take them along. So the mean over ranks is one of sums over micro-batches: divide the loss by
        their number. In stage 1 they are added up before they travel; in stages 2 and 3, where no rank has room for
        all, those of each micro-batch travel.
        """
        before, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = before

    def step(self) -> Ahead:
        """Let all weights make a step, once their gradients are there. Issues, and never waits.

        Returns:
            What may be awaited, to keep the program at most `ahead` steps ahead of its computes.

        Raises:
            UsageError: If a parameter has had no gradient.
        """
        missing = [name for name, bucket in self._home.items() if not bucket.sent and name not in bucket.handed]
        if missing:
            raise UsageError(f"step: no gradient of {', '.join(map(repr, missing))} in step {self.steps + 1}")
        self.steps += 1
        self._next = 0
        self._gathering.ends()
        factor = self._clip()
        for bucket in self._buckets:
            bucket.update(self.steps, factor)
        self._gathering.begins(self._buckets)
        self._sent.append([bucket.updated for bucket in self._buckets])
        return Ahead(self._sent.popleft() if len(self._sent) > self._ahead else [])

    def _clip(self) -> Future[float] | None:
        """Return what all gradients are multiplied with, if there is a limit."""
        limit = self._clip_norm
        if limit is None or not self._buckets[0].shard.real:
            return None
        reduced = [bucket.reduced for bucket in self._buckets]
        squares = self._work.compute(
            _square_sum, *reduced, name="norm", moved_bytes=self.memory().gradients, stream="optimizer"
        )
        total = self.group.all_reduce(squares, exact=True, name="norm") if self.group.size > 1 else squares
        return self.rank.compute(partial(_factor, limit), total, name="norm", seconds=0.0, stream="optimizer")

    async def finish(self) -> object:
        """Wait until all updates are done.

        Returns:
            The weights, whole, in a tree like `params`: in stage 3, that gathers them once more.
        """
        leaves: dict[str, object] = {}
        for whole in [self._gathering.all_of(bucket) for bucket in self._buckets]:
            leaves |= await whole
        return rebuild(self._like, leaves)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def unsaved(self) -> str:
        """What of its state no checkpoint has: nothing."""
        return ""

    def tensors(self) -> Tensors:
        """Return dtype and shape of the weights, and of what the optimizer keeps of them, by name."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for shard in (bucket.shard for bucket in self._buckets):
            for slot in shard.plan.slots:
                found[slot.name] = (shard.plan.dtype.name, slot.shape)
                for key, kept in shard.state.items():
                    found[state_name(key, slot.name)] = (kept.dtype.name, slot.shape)
        return found

    def kept(self) -> list[Piece]:
        """Return what this rank saves in a checkpoint: its part."""
        return [piece for bucket in self._buckets for piece in bucket.shard.pieces(whole=False)]

    def wanted(self) -> list[Piece]:
        """Return what this rank reads of a checkpoint: its part; in stages 1 and 2 all parameters."""
        return [piece for bucket in self._buckets for piece in bucket.shard.pieces(whole=True)]

    async def settle(self) -> None:
        """Wait until all updates of this rank's part are done that have been issued."""
        for bucket in self._buckets:
            await bucket.updated

    def resume(self, steps: int) -> None:
        """Go on from that step: weights and the optimizer's state have been written into place."""
        self.steps = steps
        self._gathering.ends()  # what has been gathered is of other weights

    # -- memory ------------------------------------------------------------------------------------------------

    def memory(self) -> ModelMemory:
        """Return what the model keeps on this rank from step to step: the sizes of the arrays that it has."""
        shards = [bucket.shard for bucket in self._buckets]
        return ModelMemory(
            parameters=sum((shard.param if shard.whole is None else shard.whole).nbytes for shard in shards),
            gradients=sum(shard.grad.nbytes for shard in shards),
            optimizer=sum(each.nbytes for shard in shards for each in shard.state.values()),
        )

    def expected_memory(self) -> ModelMemory:
        """Return what the formula of ZeRO says of this model, stage and group."""
        plans = [bucket.shard.plan for bucket in self._buckets]
        kept = sum(
            each.itemsize * plan.size for plan in plans for each in self._optimizer.fresh(0, plan.dtype).values()
        )
        parameters = sum(plan.nbytes for plan in plans)
        return expected_memory(self.stage, self.group.size, parameters=parameters, optimizer=kept)

    @property
    def gathered_bytes(self) -> int:
        """Parameters that have been gathered and are still there, in stage 3."""
        return self._gauge.now

    @property
    def peak_gathered_bytes(self) -> int:
        """The most that were there at once, so far."""
        return self._gauge.peak


def _square_sum(*parts: Array) -> NDArray[np.float64]:
    return np.array([fsum(map(square_sum, parts))])


def _factor(limit: float, total: Array) -> float:
    """As `clip_factor` has it."""
    return min(1.0, limit / (sqrt(float(total[0])) + 1e-6))


def _flat(rank: Rank, plan: BucketPlan, leaves: dict[str, Array]) -> Array:
    flat = rank.empty(plan.size, plan.dtype)
    if flat.flags.writeable:
        np.concatenate([leaves[name].reshape(-1) for name in plan.names], out=flat)
    return flat


def _check(*, stage: int, order: str, bucket_bytes: int | None, **counts: int) -> None:
    if stage not in (1, 2, 3):
        raise UsageError(f"stage: expected 1, 2 or 3, got {stage!r}")
    if order not in ("forward", "fifo"):
        raise UsageError(f"order: expected 'forward' or 'fifo', got {order!r}")
    if bucket_bytes is not None:
        counts["bucket_bytes"] = bucket_bytes
    for name, value in counts.items():
        least = 0 if name == "depth" else 1
        if not isinstance(value, int) or value < least:
            raise UsageError(f"{name}: expected a whole number from {least}, got {value!r}")
