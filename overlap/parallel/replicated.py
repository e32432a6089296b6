"""Replicas of the shards of a ZeRO model on a neighbour, so that training goes on without a disk after a loss.

After every K steps a rank copies its shard (parameters and optimizer state) and sends the copy to a neighbour, on
another host where there is one, under the computes of the next steps. A replica is prepared on a rank when its own copy
and its neighbour's have the right digest; complete when all ranks have prepared it, which a small all_reduce finds out.
The copies of the last complete replica stay until then. After a loss the survivors share them out again, and go on from
their step.

Memory: four times the shard, for two replicas at once. Traffic: the shard, once in K steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash

from ..errors import OverlapError, UsageError
from ..notice import notify
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.memory.arrays import metadata
from ..runtime.rank import Rank
from ..survival.agreement import Prepared, StepProgress
from ..timeline.ranklist import listed
from ..timeline.span import RoleName
from .buckets.scattered import ScatteredBucket, shares
from .checkpoints.pieces import Shard
from .work import MemoryWork, users_site

if TYPE_CHECKING:
    from .tree import Array, Site

T = TypeVar("T")

_STREAM = "overlap.replicas"
_CHUNK_BYTES = 4 << 20  # urgent gradients overtake between two chunks
_PRIORITY = 1 << 20  # behind the gradients of any model
_ALIGNMENT = 64
_SOURCES = 2  # replicas of one step that ranks may differ in, as after a loss right at the beginning
_TAIL_BYTES = 16  # digest, and the step
_TAG = (1 << 24) - 7  # of messages between ranks that share out a replica


class ReplicaLostError(UsageError):
    """No replica can be made whole: ranks and their neighbours were lost, or a copy has changed in memory."""


class _Layout:
    """Places of the arrays of a shard in a flat buffer of bytes, the same for the shard of each rank.

    Args:
        buckets: Buckets of the model.
        ranks: Number of ranks with a shard.
    """

    def __init__(self, buckets: Sequence[ScatteredBucket], ranks: int) -> None:
        self.ranks = ranks
        self.sizes: list[int] = []  # Elements of an array on all ranks together
        self.starts: list[int] = []
        self._dtypes: list[np.dtype[np.generic]] = []
        start = 0
        for bucket in buckets:
            for array in bucket.weights.arrays():
                self.sizes.append(bucket.plan.size)
                self.starts.append(start)
                self._dtypes.append(array.dtype)
                nbytes = shares(bucket.plan.size, ranks)[0] * array.itemsize
                start += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes: int = start + _TAIL_BYTES

    def shard(self, index: int, rank: int) -> slice:
        """Return the elements of an array, by its index, that are in the shard of a rank."""
        least, rest = divmod(self.sizes[index], self.ranks)
        start = rank * least + min(rank, rest)
        return slice(start, start + least + (rank < rest))

    def view(self, flat: Array, index: int, elements: int) -> Array:
        """Return the first elements of an array, by its index, as a view of a flat buffer."""
        start, dtype = self.starts[index], self._dtypes[index]
        return flat[start : start + elements * dtype.itemsize].view(dtype)


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """Copies of shards after one step, as far as this rank has them."""

    step: int
    ranks: int  # Number of ranks that shared the state out
    shards: dict[int, Array] = field(default_factory=dict)  # Flat copies by rank: the own one, and a neighbour's


class _ReplicaProgress(StepProgress[object]):
    """Progress from replica to replica."""

    def prepare(self, step: int, means: Sequence[object] = ()) -> None:
        """Note that this rank has valid copies of its own shard and its neighbour's."""
        self._assert_open(step >= self.agreed, f"replica of step {step} prepared after {self.agreed}")
        self._latest = Prepared(step, means)


class ShardReplicas:
    """Replicas of a model on one rank in one epoch: `rank.epoch.survivor`.

    Attributes:
        rank: The rank.
        every: Number of steps from one replica to the next.
        complete: Copies of the last complete replica of this epoch; None before the first.
        sources: Copies that the next epoch may begin with.
        repeated: Number of steps that were made again after the last loss.
        made: Number of steps whose updates are done on this rank.
    """

    rank: Rank

    def __init__(self, rank: Rank, group: Group, buckets: Sequence[ScatteredBucket], every: int) -> None:
        if group.size != rank.world_size:
            raise UsageError(
                f"group: {group.name} is not all ranks; --survive goes on with models of all ranks only; "
                "leave out group="
            )
        earlier = rank.epoch.survivor
        if earlier is not None and (not isinstance(earlier, ShardReplicas) or earlier.rank is rank):
            raise UsageError(
                "replicate: --survive goes on with one model in a program, and this is the second; "
                "put all parameters into one"
            )
        self.every, self.rank, self._group = every, rank, group
        self.complete: Snapshot | None = None
        self.sources: list[Snapshot] = []
        self._sources: list[Snapshot] = [] if earlier is None else earlier.sources
        self.made: int = rank.epoch.step
        self.repeated: int = 0 if earlier is None else earlier.made - rank.epoch.step
        self._buckets = sorted(buckets, key=lambda bucket: bucket.plan.index)
        self._layout = _Layout(self._buckets, group.size)
        self._work = MemoryWork(rank)
        self._progress = _ReplicaProgress(rank.epoch.step)
        self._prepared: Snapshot | None = None
        self._under_way: Future[None] | None = None
        self._restored: Future[list[Array] | None] | None = None
        self._updates: deque[tuple[int, list[Future[Array]]]] = deque()  # that are not known to be done, by step
        self._spare: list[Array] = []  # buffers of replicas that are not needed any more
        self._site: Site = users_site()
        self._table: Future[list[list[int]]] = self._spawn(self._share_table, name="replicas")
        rank.epoch.survivor = self

    def _spawn(self, fn: Callable[..., Awaitable[T]], *args: object, name: str) -> Future[T]:
        """Start a task of replicas; its error is raised where it is awaited."""
        return self.rank.spawn(fn, *args, name=name, errors="await", call_site=self._site)

    @property
    def nbytes(self) -> int:
        """Bytes of the shard of this rank."""
        return sum(array.nbytes for bucket in self._buckets for array in bucket.weights.arrays())

    @property
    def prepared(self) -> int:
        """Step of the newest replica that this rank has."""
        return self._progress.prepared

    # -- while training ------------------------------------------------------------------------------------------------

    def end_step(self, step: int) -> None:
        """Issue a replica after the updates of a step, once in `every` steps."""
        self._updates.append((step, [bucket.updated for bucket in self._buckets]))
        self._count_done_steps()
        if step % self.every == 0:
            self.send(step)

    def _count_done_steps(self) -> None:
        """Set `made` to the last step whose updates are all done."""
        while self._updates and all(update.done and not update.failed for update in self._updates[0][1]):
            self.made = self._updates.popleft()[0]

    def send(self, step: int) -> None:
        """Issue the copy of this rank's shard behind all updates, then the exchange with the neighbours."""
        copy = self._work.compute(
            self._copy_shard, self._under_way, self._restored, name="copy for a replica", stream="optimizer",
            moved_bytes=2 * self.nbytes,
        )  # fmt: skip
        self._under_way = self._spawn(self._send_replica, step, copy, name=f"replica of step {step}")

    async def _send_replica(self, step: int, copy: Future[Array]) -> None:
        """Exchange copies of shards with the neighbours; the replica is complete if all ranks have valid ones."""
        group, stream, size = self._group, self.rank.stream(_STREAM), self._group.size
        distance = _neighbour_distance([row[0] for row in await self._table])
        flat, name = await copy, RoleName(f"replica of step {step}", "library")
        sign = partial(self._write_tail, step, flat)  # no argument of the compute, which writes into it
        await self._work.compute(sign, name="digest of a replica", stream=_STREAM, moved_bytes=flat.nbytes)
        options: dict[str, Any] = {"stream": stream, "priority": _PRIORITY, "name": name, "call_site": self._site}
        replica = Snapshot(step=step, ranks=size, shards={group.rank: flat})
        if size > 1:
            other = self._take_buffer()
            pairs = [(rank, (rank + distance) % size) for rank in range(size)]
            for part in (slice(start, start + _CHUNK_BYTES) for start in range(0, flat.size, _CHUNK_BYTES)):
                await group.permute(flat[part], pairs, other[part], **options)
            replica.shards[(group.rank - distance) % size] = other
        valid = await self._issue_check(replica)
        if valid == replica.shards.keys():
            self._prepared = replica
            self._progress.prepare(step)
        ready = metadata([valid == replica.shards.keys()], np.int8)
        if (await group.all_reduce(ready, op="min", **options))[0] or not self._work.real:
            self._progress.agree(step)
            before, self.complete, self._prepared = self.complete, replica, None
            self._recycle_buffers(before)
        else:
            self._prepared = None
            self._recycle_buffers(replica)
            notify(f"replica of step {step} is dropped: a copy differs from its digest")

    def _take_buffer(self) -> Array:
        """Return a flat buffer for a shard: a spare one, or new memory."""
        if self._spare:
            return self._spare.pop()
        made: Array = self.rank.empty(self._layout.nbytes, np.uint8)
        return made

    def _recycle_buffers(self, replica: Snapshot | None) -> None:
        """Keep the buffers of a replica for the next ones, if it is of this number of ranks."""
        if replica is not None:
            self._spare += [flat for flat in replica.shards.values() if flat.size == self._layout.nbytes]

    def _issue_check(self, replica: Snapshot) -> Future[set[int]]:
        """Issue the check of a replica; return a future of the ranks whose shards are valid."""
        return self._work.compute(
            partial(self._find_valid_shards, replica), name="check replica", stream=_STREAM, moved_bytes=2 * self.nbytes
        )

    # -- on compute streams --------------------------------------------------------------------------------------------

    def _copy_shard(self, *_: object) -> Array:
        """Return a copy of this rank's shard in a flat buffer, behind all its arguments."""
        flat = self._take_buffer()
        if self._work.real:
            arrays = [array for bucket in self._buckets for array in bucket.weights.arrays()]
            for index, array in enumerate(arrays):
                self._layout.view(flat, index, array.size)[:] = array
        return flat

    def _write_tail(self, step: int, flat: Array) -> None:
        """Write digest and step behind the shard in its buffer."""
        if self._work.real:
            flat[-_TAIL_BYTES:] = _tail_bytes(flat, step)

    def _find_valid_shards(self, replica: Snapshot) -> set[int]:
        """Return the ranks of a replica whose shards have the digest that was stored with them."""
        if not self._work.real:
            return set(replica.shards)
        step = replica.step
        return {
            rank
            for rank, flat in replica.shards.items()
            if bytes(flat[-_TAIL_BYTES:]) == bytes(_tail_bytes(flat, step))
        }

    # -- after a loss --------------------------------------------------------------------------------------------------

    def report(self) -> int:
        """Return the step of the newest replica that all ranks have; nothing is agreed after this call."""
        self._count_done_steps()
        self._updates.clear()
        return self._progress.report()

    def advance(self, step: int) -> None:
        """Choose the replica of a step that all ranks have prepared."""
        self._progress.following(step)
        complete = self._sources if self.complete is None else [self.complete]
        self.sources = [source for source in (self._prepared, *complete) if source is not None and source.step == step]

    async def _share_table(self) -> list[list[int]]:
        """Return by rank: its node, then by replica the number of shards and the two valid ones here, -1 for none."""
        row = [self.rank.node]
        for source in self._sources:
            valid = await self._issue_check(source)
            source.shards = {shard: flat for shard, flat in source.shards.items() if shard in valid}
            row += [source.ranks, *sorted(valid), -1, -1][:3]
        row += [-1] * (1 + 3 * _SOURCES - len(row))  # three numbers for each source: ranks, and two shards
        name = RoleName("replicas", "library")
        return await self._group.gather_row(row, name=name, stream=self.rank.stream(_STREAM), call_site=self._site)

    def restore(self, first: Callable[[], Awaitable[Sequence[Array]]]) -> Future[list[Array]]:
        """Share out the state of the last complete replica among the ranks of this epoch, into the buckets.

        Args:
            first: Returns the weights of the first rank, for a loss before the first replica.

        Returns:
            A future of the weights by bucket: all in stages 1 and 2, this rank's shard in stage 3. It raises a
            `ReplicaLostError` if no rank has a valid copy of some shard.
        """
        self._restored = self._spawn(self._restore_buckets, first, name="state from replicas")
        return self._restored

    async def _restore_buckets(self, first: Callable[[], Awaitable[Sequence[Array]]]) -> list[Array]:
        """Return the weights by bucket, from replicas of the surviving ranks, or the first weights before step 1."""
        step, group = self.rank.epoch.step, self._group
        table = await self._table
        holders = _find_holders(table)
        if not holders and not step:
            return [bucket.fill(flat) for bucket, flat in zip(self._buckets, await first(), strict=True)]
        ranks = next((ranks for ranks, ranks_of in holders.items() if None not in ranks_of), None)
        if ranks is None:
            lost = [[shard for shard, rank in enumerate(ranks_of) if rank is None] for ranks_of in holders.values()]
            names = f"shards {listed(lost[0])} of {next(iter(holders))}" if lost else "its shards"
            raise ReplicaLostError(
                f"replicate: step {step} cannot be made whole: {names} have no valid copy on the ranks that live; "
                "save checkpoints with Checkpoints(rank), and let main begin with `await checkpoints.restore(model)`"
            )
        self._sources = [source for source in self._sources if source.ranks == ranks]
        await self._exchange_shards(
            _Layout(self._buckets, ranks), [rank for rank in holders[ranks] if rank is not None]
        )
        if group.rank == 0:
            notify(f"going on from replica of step {step}, repeated steps: {self.repeated} (replicate={self.every})")
        return [bucket.newest for bucket in self._buckets]

    async def wait_for_loss_reason(self) -> str:
        """Return why the state cannot be restored, empty if it can; then the buckets wait for a checkpoint."""
        if self._restored is None:
            return ""
        try:
            await self._restored
        except ReplicaLostError as error:
            with suppress(OverlapError):
                await self._under_way  # type: ignore[misc]
            for bucket in self._buckets:
                bucket.begin_empty()
            return str(error)
        return ""

    async def _exchange_shards(self, old_layout: _Layout, holders: Sequence[int]) -> None:
        """Send the holders' copies to the ranks that need them now, and write them into the buckets."""
        group, stream = self._group, self.rank.stream(_STREAM)
        copies = {shard: flat for source in self._sources for shard, flat in source.shards.items()}
        moves: list[Future[object]] = []
        arrays = [array for bucket in self._buckets for array in bucket.weights.arrays()]
        name = RoleName("state from replicas", "library")
        options: dict[str, Any] = {"stream": stream, "name": name, "call_site": self._site}
        for index, array in enumerate(arrays):
            shard = _make_shard(self._layout.shard(index, group.rank), array)
            for number, holder in enumerate(holders):
                elements = old_layout.shard(index, number)
                if holder != group.rank:
                    part = shard.between(elements.start, elements.stop)
                    if part.data.size:
                        moves.append(group.recv(part.data, holder, _TAG, **options))
                    continue
                size = elements.stop - elements.start
                if self._work.real:
                    source = _make_shard(elements, old_layout.view(copies[number], index, size))
                else:
                    source = _make_shard(elements, self.rank.empty(size, array.dtype))
                for rank in range(group.size):
                    target = self._layout.shard(index, rank)
                    part = source.between(target.start, target.stop)
                    if rank != holder and part.data.size:
                        moves.append(group.send(part.data, rank, _TAG, **options))
                    elif rank == holder and self._work.real:
                        shard.between(part.start, part.stop).data[:] = part.data
        for move in moves:
            await move
        for bucket in self._buckets:
            if bucket.whole is not None and group.size > 1:
                await bucket.gather_whole()

    def drop(self, step: int) -> None:
        """Forget all replicas, as the model continues from a checkpoint of `step`."""
        self.complete = self._prepared = self._under_way = self._restored = None
        self._sources = []
        self._progress = _ReplicaProgress(step)


def _tail_bytes(flat: Array, step: int) -> Array:
    """Return the digest of a flat shard without its tail, and the step, as 16 bytes."""
    digest = xxhash.xxh3_64_intdigest(flat[:-_TAIL_BYTES].data)
    return np.array([digest, step], np.uint64).view(np.uint8)


def _find_holders(table: Sequence[Sequence[int]]) -> dict[int, list[int | None]]:
    """Return, by number of shards of a replica, the first rank with a copy of each shard; None if lost."""
    # Of several ranks with a copy the first one counts: the dict keeps the last value, so ranks come in reverse.
    copies = {
        (row[start], shard): rank
        for rank, row in reversed([*enumerate(table)])
        for start in range(1, len(row), 3)
        for shard in row[start + 1 : start + 3]
    }
    numbers = sorted({row[start] for row in table for start in range(1, len(row), 3)} - {-1})
    return {ranks: [copies.get((ranks, shard)) for shard in range(ranks)] for ranks in numbers}


def _make_shard(elements: slice, array: Array) -> Shard:
    """Return elements of an array without a name, as a shard that can be cut."""
    return Shard(tensor="", shape=(elements.stop,), start=elements.start, stop=elements.stop, data=array)


def _neighbour_distance(nodes: Sequence[int]) -> int:
    """Return the smallest distance by rank at which most ranks have a neighbour on another node."""
    size = len(nodes)
    elsewhere = {
        distance: sum(nodes[rank] != nodes[(rank + distance) % size] for rank in range(size))
        for distance in range(1, size)
    }
    return max(elsewhere, key=lambda distance: (elsewhere[distance], -distance), default=0)


async def replica_loss_reason(rank: Rank) -> str:
    """Return why the state of the last replica cannot be made whole; empty if it is, or there are no replicas."""
    survivor = rank.epoch.survivor
    return await survivor.wait_for_loss_reason() if isinstance(survivor, ShardReplicas) else ""
