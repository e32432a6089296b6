"""Transfers of a rank's weights and gradients: buckets, ZeRO, and the update."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..collectives.reduce import Array
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .amounts import Amounts

_STREAM = "dp"
_PREFETCHED = 2  # layers of gathered weights that a rank has at once (ZeRO-3)


class Weights:
    """Weights and gradients of one rank.

    Args:
        rank: The rank.
        amounts: Amounts of the model.
        dtype: Type of weights and gradients.
        replicas: The group that holds equal weights.
        expert_replicas: The group that holds equal experts.
        place: The rank's place in the pipeline.
    """

    def __init__(
        self, rank: Rank, amounts: Amounts, dtype: np.dtype[Any], replicas: Group, expert_replicas: Group, place: int
    ) -> None:
        self._rank, self._amounts, self._layout = rank, amounts, amounts.layout
        self._lowest, self._last = place, self._layout.pp * self._layout.chunks - 1
        least = self._layout.bucket_bytes // dtype.itemsize
        self._dense = _Pool(rank, replicas, dtype, least, amounts)
        self._experts = _Pool(rank, expert_replicas, dtype, least, amounts)
        self._computed: deque[Future[Any] | None] = deque([None] * _PREFETCHED, _PREFETCHED)
        self._pools: list[_Pool] = []

    # -- ZeRO-3 ----------------------------------------------------------------------------------------------------

    def gathered(self, layer: int) -> list[object]:
        """Issue the gathering of a layer's weights, once the computes of the layer two before it are done."""
        if self._layout.shards < 3:
            return []
        after = self._computed[0]
        sizes = (self._dense, self._amounts.dense(layer)), (self._experts, self._amounts.own_experts(layer))
        return [pool.gather(size, after) for pool, size in sizes if size]

    def computed(self, done: Future[Any]) -> None:
        """Note the compute that used the weights gathered last."""
        self._computed.append(done)

    # -- gradients -------------------------------------------------------------------------------------------------

    def complete(self, stage: int, layer: int, *, last: bool) -> list[Array]:
        """Return the buckets that are complete with a layer's backward of one microbatch, the `last` or another."""
        self._pools = []
        if not last and self._layout.shards < 2:
            return []
        ends = self._layout.shards == 3 or self._is_lowest(stage, layer)
        dense = self._dense.add(self._grown(stage, layer), ends=ends)
        experts = self._experts.add(self._amounts.own_experts(layer), ends=ends)
        self._pools = [self._dense] * len(dense) + [self._experts] * len(experts)
        return [*dense, *experts]

    def reduce(self, buckets: list[Array], computed: Future[Any], *, last: bool) -> None:
        """Issue the reduction of the buckets that `complete` has returned: the results 1, 2, ... of a compute."""
        for index, (pool, bucket) in enumerate(zip(self._pools, buckets, strict=False), 1):
            pool.reduce(computed[index], bucket.size, last=last)

    def _is_lowest(self, stage: int, layer: int) -> bool:
        return stage == self._lowest and layer == self._layout.layers_of(self._amounts.model, stage)[0]

    def _grown(self, stage: int, layer: int) -> int:
        """Return the parameters of a layer, with the tables that are before or after it."""
        layers, of = self._layout.layers_of(self._amounts.model, stage), self._amounts.model
        table, grown = -(-of.embedding_parameters // self._layout.tp), self._amounts.dense(layer)
        grown += table if stage == 0 and layer == layers[0] else 0
        return grown + (table if stage == self._last and layer == layers[-1] and not (of.tied and stage == 0) else 0)

    async def update(self) -> None:
        """Issue the optimizer bucket by bucket, and the gathering of new weights; return when they have arrived."""
        for each in [*self._dense.update(), *self._experts.update()]:
            await each


class _Pool:
    """Weights that one group of ranks holds."""

    def __init__(self, rank: Rank, group: Group, dtype: np.dtype[Any], least: int, amounts: Amounts) -> None:
        self._rank, self._group, self._dtype, self._amounts = rank, group, dtype, amounts
        self._zero = amounts.layout.shards
        self._bucket = -(-max(least, 1) // group.size) * group.size
        self._filled = 0
        self._reduced: list[tuple[int, object]] = []

    def _padded(self, size: int) -> int:
        return -(-size // self._group.size) * self._group.size

    def gather(self, size: int, after: Future[Any] | None) -> object:
        share = self._rank.empty(self._padded(size) // self._group.size, self._dtype)
        if self._group.size == 1:
            return share
        mine: Array | Future[Array] = share
        if after is not None:
            mine = self._rank.compute(lambda _: share, after, name="prefetch", seconds=0.0, stream="prefetch")
        return self._group.all_gather(mine, stream=_STREAM, name="dp gather weights")

    def add(self, size: int, *, ends: bool) -> list[Array]:
        """Return the buckets that are full now; with `ends` also the last one, full or not."""
        full, self._filled = divmod(self._filled + size, self._bucket)
        sizes = [self._bucket] * full
        if ends and self._filled:
            sizes, self._filled = [*sizes, self._padded(self._filled)], 0
        return [self._rank.empty(each, self._dtype) for each in sizes]

    def reduce(self, bucket: Future[Any], size: int, *, last: bool) -> None:
        reduced: object = bucket
        if self._group.size > 1:
            issue = self._group.reduce_scatter if self._zero else self._group.all_reduce
            reduced = issue(bucket, op="mean", stream=_STREAM, name="dp reduce gradients")
        if last:
            self._reduced.append((size, reduced))

    def update(self) -> Iterator[Any]:
        """Change the weights of each bucket."""
        buckets, self._reduced = self._reduced, []
        for size, reduced in buckets:
            own = size // (self._group.size if self._zero else 1)
            share = self._rank.empty(own, self._dtype)
            work = self._amounts.updating(own)
            new = self._rank.compute(
                lambda _, share=share: share, reduced, name="update", bytes_moved=work.nbytes, seconds=work.seconds
            )
            gathers = self._group.size > 1 and self._zero in (1, 2)
            yield self._group.all_gather(new, stream=_STREAM, name="dp gather weights") if gathers else new
