"""Data parallel: every rank has all weights and its own samples; gradients are averaged while backward goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Hook, plan_buckets
from .memory_work import MemoryWork
from .optimizers import Optimizer
from .parameters import Parameters
from .reduction import Reduction
from .tree import flatten, rebuild

if TYPE_CHECKING:
    from .tree import Array, Tree

__all__ = ["Ahead", "DataParallel", "Order"]

Order: TypeAlias = Literal["forward", "fifo"]

IN_FLIGHT = 64
"""Buckets on the wire at once. They are reduced in place, so more of them take no more memory."""


class Ahead:
    """What `model.step()` returns; `await` it to wait until the program is only so many steps ahead.

    Nobody has to: it is for loops that would issue thousands of steps before the first has run.
    """

    __slots__ = ("_pending",)

    def __init__(self, pending: list[Future[Array]]) -> None:
        self._pending = pending

    def __await__(self) -> Generator[object, object, None]:
        for future in self._pending:
            yield from future.__await__()


class DataParallel:
    """A model whose gradients are averaged over a group of ranks.

    The loop names parameters in the order of forward, and hands over their gradients in any order, the same on all
    ranks. Nothing in it waits: the update of a weight is issued when the weight is next asked for.

    Attributes:
        rank: That it runs on.
        group: Whose gradients it averages.
        steps: How many `step` calls there have been.
    """

    def __init__(
        self,
        rank: Rank,
        params: Tree,
        *,
        optimizer: Optimizer,
        group: Group | None = None,
        bucket_bytes: int | None = None,
        order: Order = "forward",
        hook: Hook | None = None,
        in_flight: int = IN_FLIGHT,
        ahead: int = 2,
    ) -> None:
        """Take the weights over: copies of `params`, the same on all ranks.

        Args:
            rank: This rank.
            params: A dict, list or tuple of arrays, nested as you like; the same names, shapes and dtypes on all ranks.
                The root's values count.
            optimizer: What changes the weights.
            group: Ranks to average over; by default all.
            bucket_bytes: When a bucket is full. By default 1 MiB for the first and 25 MiB for the others, and gradients
                of 1 MiB and more travel alone.
            order: "forward" lets the weights that forward needs first overtake; "fifo" sends in the order of backward.
            hook: Takes the place of all_reduce; see `GradientBucket`.
            in_flight: How many buckets may be on the wire at once.
            ahead: How many steps the program may be ahead of what it awaits with `await model.step()`.

        Raises:
            UsageError: If an argument cannot be meant.
        """
        leaves = flatten(params)
        _check_choice("order", order, ("forward", "fifo"))
        _check_count("in_flight", in_flight)
        _check_count("ahead", ahead)
        if bucket_bytes is not None:
            _check_count("bucket_bytes", bucket_bytes)
        self.rank, self.group, self.steps = rank, group or rank.world, 0
        self._like, self._order, self._ahead = params, order, ahead
        backward = list(reversed(leaves))
        self._parameters = Parameters(rank, leaves, optimizer, order=backward)
        plans = plan_buckets(
            {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()},
            backward,
            bucket_bytes=bucket_bytes or BUCKET_BYTES,
            first_bytes=FIRST_BUCKET_BYTES,
            alone_bytes=None if bucket_bytes else FIRST_BUCKET_BYTES,
        )
        places = {name: place for place, name in enumerate(leaves)}
        stream = rank.stream(f"gradients of {self.group.name}", window=in_flight)
        work = MemoryWork(rank)
        self._buckets = [
            Reduction(
                rank,
                self.group,
                plan,
                self._parameters,
                work,
                stream=stream,
                hook=hook,
                priority=min(places[name] for name in plan.names) if order == "forward" else 0,
            )
            for plan in plans
        ]
        self._home = {name: bucket for bucket in self._buckets for name in bucket.plan.names}
        self._next = 0  # bucket to be sent
        self._sent: deque[list[Future[Array]]] = deque()
        self._start = self._broadcast() if self.group.size > 1 else None

    def _broadcast(self) -> Future[dict[str, Array]]:
        """Give all ranks the weights of the first, so that models may be initialised as one likes."""
        flats = [flat.view() for flat in self._parameters.flat.values()]
        told = [self.group.broadcast(flat, out=flat, name="first weights") for flat in flats]
        return self.rank.compute(lambda *_: self._parameters.views, *told, name="first weights", seconds=0.0)

    # -- the loop ----------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Array | Future[object]:
        """Return the newest weight, or a future of it.

        The array is the model's own: it changes with the update after the next `step`; copy what you keep.

        Raises:
            UsageError: If there is no such parameter.
        """
        newest = self._bucket(name).newest()
        newest = self._start if newest is None else newest
        if newest is None or newest.done:
            return self._parameters.views[name]
        return newest[name]

    def reduce(self, name: str, grad: object) -> None:
        """Hand over a gradient, or a future of it; it travels as soon as its bucket is full.

        Args:
            name: Of the parameter.
            grad: An array of the parameter's shape, or a future of one. It belongs to the model until it has been
                copied, which is the next thing on the compute stream once its bucket is full.

        Raises:
            UsageError: If there is no such parameter, or it has had its gradient in this step.
        """
        bucket = self._bucket(name)
        if name in bucket.handed:
            raise UsageError(f"reduce: the gradient of {name!r} has been handed over in step {self.steps + 1} already")
        bucket.handed[name] = grad
        while self._next < len(self._buckets) and self._buckets[self._next].full:
            self._buckets[self._next].send(self.steps + 1)
            self._next += 1

    def step(self) -> Ahead:
        """Let all weights make a step, once their gradients are there. Issues, and never waits.

        Returns:
            What may be awaited, to keep the program at most `ahead` steps ahead of its computes.

        Raises:
            UsageError: If a parameter has had no gradient.
        """
        missing = [name for name, bucket in self._home.items() if self._next <= bucket.plan.index]
        missing = [name for name in missing if name not in self._home[name].handed]
        if missing:
            raise UsageError(f"step: no gradient of {', '.join(map(repr, missing))} in step {self.steps + 1}")
        self.steps += 1
        self._next = 0
        self._sent.append([bucket.reduced for bucket in self._buckets if bucket.reduced is not None])
        if self._order == "fifo":
            for bucket in self._buckets:
                bucket.newest()
        return Ahead(self._sent.popleft() if len(self._sent) > self._ahead else [])

    async def finish(self) -> object:
        """Wait until all updates are done.

        Returns:
            The weights, in a tree like `params`; the arrays are the model's own.
        """
        last = [newest for bucket in self._buckets if (newest := bucket.newest()) is not None]
        for newest in [*last, *([self._start] if self._start is not None else [])]:
            await newest
        await self.rank.compute(_nothing, name="finish", seconds=0.0)
        return rebuild(self._like, self._parameters.views)

    def _bucket(self, name: str) -> Reduction:
        bucket = self._home.get(name)
        if bucket is None:
            raise UsageError(f"name: {name!r} is no parameter; known are {', '.join(self._parameters.views)}")
        return bucket


def _nothing() -> None:
    """Be done when all computes before it are."""


def _check_choice(argument: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{argument}: expected {' or '.join(map(repr, known))}, got {value!r}")


def _check_count(argument: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{argument}: expected a whole number from 1, got {value!r}")
