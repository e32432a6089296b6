"""Transfers of a rank's weights and gradients: buckets, ZeRO, and the update."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..collectives.reduce import Array
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .amounts import Amounts

_REPLICA_STREAM = "dp"
_COPY_STREAM = "replicate"
_PREFETCHED_LAYERS = 2  # layers of gathered weights that a rank has at once (ZeRO-3)


class StepWeights:
    """Weights and gradients of one rank.

    Args:
        rank: The rank.
        amounts: Amounts of the model.
        dtype: Type of weights and gradients.
        replicas: The group that shares equal weights.
        expert_replicas: The group that shares equal experts.
        copies: The ranks of further such groups that have the same share (HSDP); None if there is one group.
        position: The rank's place in the pipeline.
    """

    def __init__(
        self,
        rank: Rank,
        amounts: Amounts,
        dtype: np.dtype[Any],
        replicas: Group,
        expert_replicas: Group,
        copies: Group | None,
        position: int,
    ) -> None:
        self._rank, self._amounts, self._layout = rank, amounts, amounts.layout
        self._lowest, self._last = position, self._layout.pp * self._layout.chunks - 1
        bucket_elements = self._layout.bucket_bytes // dtype.itemsize
        self._dense = _WeightPool(rank, replicas, copies, dtype, bucket_elements, amounts)
        self._experts = _WeightPool(rank, expert_replicas, copies, dtype, bucket_elements, amounts)
        self._stages = self._layout.stages_of(position)
        self._ahead: dict[int, list[object]] = {}  # by layer
        self._computed: deque[Future[Any] | None] = deque([None] * _PREFETCHED_LAYERS, _PREFETCHED_LAYERS)
        self._pools: list[_WeightPool] = []

    # -- ZeRO-3 ----------------------------------------------------------------------------------------------------

    def gather_layer(self, layer: int) -> list[object]:
        """Issue the gathering of a layer's weights (ZeRO-3) after the compute two layers before; return futures."""
        if self._layout.zero_in_step < 3:
            return []
        after = self._computed[0]
        sizes = (
            (self._dense, self._amounts.dense_parameters(layer)),
            (self._experts, self._amounts.expert_parameters(layer)),
        )
        return [pool.gather(size, after) for pool, size in sizes if size]

    def note_compute(self, done: Future[Any]) -> None:
        """Note the compute that used the weights gathered last; the gathering after next waits for it."""
        self._computed.append(done)

    # -- weights that the step before has changed ------------------------------------------------------------------

    def gather_ahead(self) -> None:
        """Issue the gathering of the weights that the step before changed, first layers first; only if needed."""
        if not self._layout.gathers_ahead:
            return
        layers = [
            (stage, layer) for stage in self._stages for layer in self._layout.layers_of(self._amounts.model, stage)
        ]
        for pool, sizes in (
            (self._dense, [self._parameters_with_tables(*each) for each in layers]),
            (self._experts, [self._amounts.expert_parameters(layer) for _, layer in layers]),
        ):
            for (_, layer), held in zip(layers, pool.gather_buckets(sizes), strict=True):
                self._ahead.setdefault(layer, []).extend(held)

    def gathered_ahead(self, layer: int) -> list[object]:
        """Return gathered weights that a layer's first computes of a step wait for; none after its forward pass."""
        return self._ahead.get(layer, [])

    def waits_for_gather(self, stage: int) -> bool:
        """Return whether the next computes of a stage wait for weights that the step before has changed."""
        return any(self._ahead.get(layer) for layer in self._layout.layers_of(self._amounts.model, stage))

    def note_forward(self, stage: int) -> None:
        """Note that a stage's forward pass was issued: later computes need not wait for its weights."""
        for layer in self._layout.layers_of(self._amounts.model, stage) if self._ahead else ():
            self._ahead.pop(layer, None)

    # -- gradients -------------------------------------------------------------------------------------------------

    def complete_buckets(self, stage: int, layer: int, *, last: bool) -> list[Array]:
        """Return the buckets that a layer's backward pass completes, in the `last` or another microbatch."""
        self._pools = []
        if not last and self._layout.zero_in_step < 2:
            return []
        ends = self._layout.zero_in_step == 3 or self._is_lowest(stage, layer)
        dense = self._dense.add(self._parameters_with_tables(stage, layer), ends=ends)
        experts = self._experts.add(self._amounts.expert_parameters(layer), ends=ends)
        self._pools = [self._dense] * len(dense) + [self._experts] * len(experts)
        return [*dense, *experts]

    def reduce(self, buckets: list[Array], computed: Future[Any], *, last: bool) -> None:
        """Issue the reduction of the buckets of `complete_buckets`, which are results 1, 2, ... of a compute."""
        for index, (pool, bucket) in enumerate(zip(self._pools, buckets, strict=False), 1):
            pool.reduce(computed[index], bucket.size, last=last)

    def _is_lowest(self, stage: int, layer: int) -> bool:
        """Return whether no gradients of this rank come after those of a layer."""
        return stage == self._lowest and layer == self._layout.layers_of(self._amounts.model, stage)[0]

    def _parameters_with_tables(self, stage: int, layer: int) -> int:
        """Return the parameters of a layer, with the embedding or the scores if it is the first or last layer."""
        layers, model = self._layout.layers_of(self._amounts.model, stage), self._amounts.model
        table, parameters = -(-model.embedding_parameters // self._layout.tp), self._amounts.dense_parameters(layer)
        parameters += table if stage == 0 and layer == layers[0] else 0
        has_scores = stage == self._last and layer == layers[-1] and not (model.tied and stage == 0)
        return parameters + (table if has_scores else 0)

    async def update(self) -> None:
        """Issue the update by buckets, and the gathering of new weights; return when they have arrived."""
        for each in [*self._dense.update(), *self._experts.update()]:
            await each


class _WeightPool:
    """Weights that the ranks of one group share; the groups of `copies` have the same shares."""

    def __init__(
        self,
        rank: Rank,
        group: Group,
        copies: Group | None,
        dtype: np.dtype[Any],
        bucket_elements: int,
        amounts: Amounts,
    ) -> None:
        self._rank, self._group, self._copies, self._dtype, self._amounts = rank, group, copies, dtype, amounts
        self._zero = amounts.layout.zero_in_step
        self._bucket = -(-max(bucket_elements, 1) // group.size) * group.size
        self._bucket_fill = 0
        self._reduced: list[tuple[int, object]] = []

    def _padded_size(self, size: int) -> int:
        """Return the size of an array, rounded up to a multiple of the group."""
        return -(-size // self._group.size) * self._group.size

    def gather(self, size: int, after: Future[Any] | None) -> object:
        """Issue the gathering of `size` weights once `after` is done; return its future, or an array of one rank."""
        share = self._rank.empty(self._padded_size(size) // self._group.size, self._dtype)
        if self._group.size == 1:
            return share
        own_share: Array | Future[Array] = share
        if after is not None:
            own_share = self._rank.compute(lambda _: share, after, name="prefetch", seconds=0.0, stream="prefetch")
        return self._group.all_gather(own_share, stream=_REPLICA_STREAM, name="dp gather weights")

    def gather_buckets(self, sizes: Sequence[int]) -> Iterator[list[object]]:
        """Gather weights of layers bucket by bucket, and yield the futures that each layer waits for.

        Args:
            sizes: Parameters of each layer.
        """
        gathered: dict[int, object] = {}
        total, start = sum(sizes), 0
        for size in sizes:
            end = start + size
            numbers = range(start // self._bucket, -(-end // self._bucket) if size else start // self._bucket)
            for number in numbers:
                if number not in gathered and self._group.size > 1:
                    gathered[number] = self.gather(min(self._bucket, total - number * self._bucket), None)
            yield [gathered[number] for number in numbers if number in gathered]
            start = end

    def add(self, size: int, *, ends: bool) -> list[Array]:
        """Add gradients of `size` elements; return the full buckets, with `ends` also the last, partial one."""
        full, self._bucket_fill = divmod(self._bucket_fill + size, self._bucket)
        sizes = [self._bucket] * full
        if ends and self._bucket_fill:
            sizes, self._bucket_fill = [*sizes, self._padded_size(self._bucket_fill)], 0
        return [self._rank.empty(each, self._dtype) for each in sizes]

    def reduce(self, bucket: Future[Any], size: int, *, last: bool) -> None:
        """Issue the mean of a bucket of gradients over the group and its copies; keep the `last` for `update`."""
        reduced: Any = bucket
        if self._group.size > 1:
            issue = self._group.reduce_scatter if self._zero else self._group.all_reduce
            reduced = issue(bucket, op="mean", stream=_REPLICA_STREAM, name="dp reduce gradients")
        if self._copies is not None:
            reduced = self._copies.all_reduce(reduced, op="mean", stream=_COPY_STREAM, name="replicate all_reduce")
        if last:
            self._reduced.append((size, reduced))

    def update(self) -> Iterator[Any]:
        """Issue the update of each reduced bucket, then yield the new weights, gathered if ZeRO-1 or 2 needs it."""
        buckets, self._reduced = self._reduced, []
        for size, reduced in buckets:
            share_size = size // (self._group.size if self._zero else 1)
            share = self._rank.empty(share_size, self._dtype)
            work = self._amounts.weight_update(share_size)
            new = self._rank.compute(
                lambda _, share=share: share, reduced, name="update", bytes_moved=work.nbytes, seconds=work.seconds
            )
            gathers = self._group.size > 1 and self._zero in (1, 2) and not self._amounts.layout.gathers_ahead
            yield self._group.all_gather(new, stream=_REPLICA_STREAM, name="dp gather weights") if gathers else new
