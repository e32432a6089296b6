"""Data parallel: every rank has all weights and its own samples; gradients are averaged while backward goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from sys import _getframe
from types import CodeType
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..errors import UsageError
from ..notice import notify
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .agreement import agreement
from .ahead import Ahead
from .buckets import BucketPlan, Hook, plan_by_size
from .finite import Blame
from .memory import ModelMemory
from .memory_work import MemoryWork
from .names import Names
from .norms import clip_factor
from .optimizers import Optimizer
from .parameters import Parameters
from .pieces import Piece, Tensors, divided
from .reduction import Reduction, Wiring
from .settings import IN_FLIGHT, Order, Settings, Unused
from .tree import flatten, rebuild
from .tuning import CANDIDATES, RECORDED, Choice, Tuner

if TYPE_CHECKING:
    from .tree import Array, Tree

__all__ = ["DataParallel"]

_ORDER = "the order in which gradients are handed over must be the same on all ranks, or rebuild_buckets=False: they"


class DataParallel:
    """A model whose gradients are averaged over a group of ranks.

    Parameters are named in the order of forward; their gradients may be handed over in any order, the same on all
    ranks. Nothing in the loop waits: the update of a weight is issued when the weight is next asked for, and whatever
    needs it waits on the compute stream. Gradients that are not finite fail the rank that hands them over.

    The first weights are the group's first rank's: models may be initialised as one likes, on all ranks differently.

    Attributes:
        rank: That it runs on.
        group: Whose gradients it averages.
        steps: How many `step` calls there have been.
        choice: Of bucket_bytes="auto", once it has been made; None before, and without it.
    """

    def __init__(
        self,
        rank: Rank,
        params: Tree,
        *,
        optimizer: Optimizer,
        group: Group | None = None,
        bucket_bytes: int | Literal["auto"] | None = None,
        order: Order = "forward",
        hook: Hook | None = None,
        exact: bool = False,
        clip_norm: float | None = None,
        unused: Unused = "error",
        rebuild_buckets: bool = True,
        uneven: bool = False,
        in_flight: int = IN_FLIGHT,
        ahead: int = 2,
    ) -> None:
        """Take the weights over: copies of `params`.

        Args:
            rank: This rank.
            params: A dict, list or tuple of arrays, nested as you like; the same names, shapes and dtypes on all ranks.
            optimizer: What changes the weights.
            group: Ranks to average over; by default all.
            bucket_bytes: When a bucket is full. By default 1 MiB for the first and 25 MiB for the others, and gradients
                of 1 MiB and more travel alone. "auto" replays recorded steps with other sizes and orders on the virtual
                clock, and takes the best; it needs loops that await `step()`, and real time.
            order: "forward" lets the weights that forward needs first overtake; "fifo" sends in the order of backward.
            hook: Takes the place of all_reduce; see `GradientBucket`.
            exact: Add up every gradient in the order of ranks: the same bits whatever buckets, order, bound, algorithm
                and wires. What that costs, `overlap plan all_reduce --exact` says; in one process it is nothing.
            clip_norm: Limit of the norm of all mean gradients together. Then no weight is updated before the last
                gradient has come: what overlaps with forward is lost.
            unused: What a parameter without a gradient is: an "error", or "zeros", on this rank.
            rebuild_buckets: Whether buckets are made anew after the first step, in the order in which it had gradients.
            uneven: Whether some ranks may have fewer steps than others: `finish` then takes part in the others' steps,
                and the mean is over the ranks that still have samples.
            in_flight: How many buckets may be on the wire at once.
            ahead: How many steps the program may be ahead of what it awaits with `await model.step()`.

        Raises:
            UsageError: If an argument cannot be meant. At the first weight that is needed, if `params` differ.
        """
        self._leaves = leaves = flatten(params)
        self._settings = Settings(
            bucket_bytes=bucket_bytes, order=order, hook=hook, exact=exact, clip_norm=clip_norm, unused=unused,
            rebuild_buckets=rebuild_buckets, uneven=uneven, in_flight=in_flight, ahead=ahead,
        )  # fmt: skip
        self.rank, self.group, self.steps = rank, group or rank.world, 0
        self.choice: Choice | None = None
        self._like, self._order, self._uneven = params, order, uneven and self.group.size > 1
        self._tuner: Tuner | None = None
        if bucket_bytes == "auto":
            bucket_bytes, self._tuner = None, Tuner(rank, partial(DataParallel, optimizer=optimizer), leaves)
        self._bucket_bytes = bucket_bytes
        self._names = Names(params)
        self._backward = list(reversed(leaves))
        self._observed: list[str] | None = [] if rebuild_buckets and unused == "error" and not uneven else None
        self._parameters = Parameters(rank, leaves, optimizer, order=self._backward)
        self._wiring = Wiring(
            rank=rank,
            group=self.group,
            stream=rank.stream(f"gradients of {self.group.name}", window=in_flight),
            hook=hook,
            exact=exact,
            parameters=self._parameters,
            work=MemoryWork(rank),
            blame=Blame(rank, self.group),
        )
        self._syncs = True
        self._factors: tuple[Future[object], ...] = ()  # what the gradients of the step that was sent last wait for
        self._agreed: tuple[Future[object], ...] = ()  # that the ranks have the same buckets
        self._active: Future[Array] | None = None  # how many ranks have samples in this step
        self._joins = False
        self._all_hidden = False  # whether all gradients but the last were on all ranks when backward ended
        self._sent: deque[list[Future[Array]]] = deque()
        self._issued: deque[Future[dict[str, Array]]] = deque()  # updates that are not known to be done
        self._newest: dict[str, Future[dict[str, Array]]] = {}
        if self.group.size > 1:
            self._newest = dict.fromkeys(leaves, self._broadcast())
        self._plan()

    def _plan(self) -> None:
        """Make the buckets, for gradients that come in the order of `_backward`."""
        gradients = {name: (leaf.shape, leaf.dtype) for name, leaf in self._leaves.items()}
        plans = plan_by_size(gradients, self._backward, self._bucket_bytes)
        places = {name: place if self._order == "forward" else 0 for place, name in enumerate(self._leaves)}
        self._buckets = [
            Reduction(self._wiring, plan, priority=min(places[name] for name in plan.names)) for plan in plans
        ]
        self._home = {name: bucket for bucket in self._buckets for name in bucket.plan.names}
        self._next = 0  # bucket to be sent

    def _broadcast(self) -> Future[dict[str, Array]]:
        """Give all ranks the weights of the first, once it is known that they have the same parameters."""
        told = [f"{name!r}, {leaf.dtype} {leaf.shape}," for name, leaf in self._leaves.items()]
        alike = agreement(self.rank, self.group, "params", told)
        flats = [flat.view() for flat in self._parameters.flat.values()]
        sent = [self.group.broadcast(flat, out=flat, name="first weights") for flat in flats]
        return self.rank.compute(lambda *_: self._parameters.views, alike, *sent, name="first weights", seconds=0.0)

    @property
    def plans(self) -> tuple[BucketPlan, ...]:
        """The buckets, in the order in which they travel."""
        return tuple(bucket.plan for bucket in self._buckets)

    def memory(self) -> ModelMemory:
        """Return what the model keeps on this rank from step to step: the sizes of the arrays that it has."""
        kept = self._parameters
        return ModelMemory(
            parameters=sum(flat.nbytes for flat in kept.flat.values()),
            gradients=sum(plan.nbytes for plan in self.plans),
            optimizer=sum(each.nbytes for state in kept.state.values() for each in state.values()),
        )

    # -- the loop ----------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> object:
        """Return the newest weight, or a future of it; of a part of the tree, a dict of them to pass to a compute.

        The array is the model's own: it changes with the update after the next `step`; copy what you keep.

        Raises:
            UsageError: If there is no such parameter.
        """
        return self._names.find(name, self._weight)

    def _weight(self, name: str) -> Array | Future[object]:
        bucket = self._home[name]
        if bucket.waits:
            self._update(bucket)
        newest = self._newest.get(name)
        if newest is None or (newest.done and newest.exception() is None):
            return self._parameters.views[name]
        return newest[name]

    def gradient(self, name: str) -> Array:
        """Return where the gradient of a parameter is packed: backward may write it there, and no copy is made.

        It may do so in its next compute after the weight has been asked for, in each step, once; ask anew in each step.

        Raises:
            UsageError: If there is no such parameter.
        """
        if name not in self._home:
            raise UsageError(f"name: {name!r} is no parameter; known are {', '.join(self._home)}")
        return self._home[name].views[name]

    def reduce(self, name: str, grad: object) -> None:
        """Hand over a gradient, or a future of it; it travels as soon as its bucket is full.

        Args:
            name: Of the parameter, or of a part of the tree.
            grad: An array of the parameter's shape, or a future of one; for a part, a tree of them, or a future of one.
                It belongs to the model until the update: large gradients are sent from where they are.

        Raises:
            UsageError: If there is no such parameter, or it has had its gradient in this step. At the await of a weight
                or of `finish`, if the gradient has another shape.
            NonFiniteError: There, if the gradient is not finite.
        """
        frame = _getframe(1)
        for leaf, gradient in list(self._names.pairs(name, grad)):
            self._hand_over(leaf, gradient, (frame.f_code, frame.f_lasti))

    def _hand_over(self, name: str, grad: object, place: tuple[CodeType, int]) -> None:
        bucket = self._home[name]
        bucket.place = place
        if self._tuner is not None:
            self._tuner.handed_over(self.steps, name, grad)
        if bucket.waits:
            self._update(bucket)
        if not self._syncs:
            bucket.add(name, grad)
            return
        if self._next > bucket.plan.index or name in bucket.handed:
            raise UsageError(f"reduce: the gradient of {name!r} has been handed over in step {self.steps + 1} already")
        bucket.handed[name] = grad
        if self._observed is not None:
            self._observed.append(name)
        while self._next < len(self._buckets) and self._buckets[self._next].full:
            self._send(self._buckets[self._next])

    def _send(self, bucket: Reduction) -> None:
        if bucket.waits:
            self._update(bucket)
        if self._uneven and self._next == 0 and not self._joins:
            self._active = self._count(1.0)
        bucket.send(self.steps + 1)
        self._next += 1

    def _count(self, mine: float) -> Future[Array]:
        """Ask how many ranks have samples in this step."""
        return self.group.all_reduce(np.array([mine]), stream=self._wiring.stream, name="ranks with samples")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up the gradients that are handed over inside the ``with``, here; the next ones take them along.

        So the mean over ranks is one of sums over micro-batches: divide the loss by their number.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def step(self) -> Ahead:
        """Let all weights make a step, once their gradients are there. Issues, and never waits.

        Returns:
            What may be awaited, to keep the program at most `ahead` steps ahead of its gradients.

        Raises:
            UsageError: If a parameter has had no gradient, and `unused` does not allow that.
        """
        late = self._buckets[self._next :]
        missing = [name for bucket in late for name in bucket.plan.names if name not in bucket.handed]
        if missing and self._settings.unused == "error" and not self._joins:
            raise UsageError(
                f"step: no gradient of {', '.join(map(repr, missing))} in step {self.steps + 1}; "
                "hand it over, or pass unused='zeros'"
            )
        for bucket in late:
            self._send(bucket)
        self.steps += 1
        self._next = 0
        reduced = [bucket.reduced for bucket in self._buckets if bucket.reduced is not None]
        self._factors = (*self._mean_factor(), *self._clip(reduced), *self._agreed)
        self._sent.append(reduced)
        self.rank.compute(partial(self._look, reduced), name="look", seconds=0.0)
        if self._order == "fifo" or self._all_hidden:
            self._update_all()
        self._rebuild()
        then = self._tune if self._tuner is not None and self.steps == RECORDED else None
        return Ahead(self._sent.popleft() if len(self._sent) > self._settings.ahead else [], then)

    async def _tune(self) -> None:
        """Choose buckets and order, the same on all ranks."""
        assert self._tuner is not None
        await self.finish()
        told = await self._tuner.choose() if self.group.rank == 0 else None
        self.choice = Choice.told(await self.group.broadcast(told, name="choice of buckets"))
        self._tuner = None
        if self.group.rank == 0:
            notify(str(self.choice))
        self._bucket_bytes, self._order = CANDIDATES[self.choice.candidate]
        self._plan()

    async def finish(self) -> object:
        """Wait until all updates are done; then go on, if you like.

        Returns:
            The weights, in a tree like `params`; the arrays are the model's own.
        """
        if self._uneven:
            await self._join()
        await self.settle()
        return rebuild(self._like, self._parameters.views)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def unsaved(self) -> str:
        """What of its state no checkpoint has: that of its hook."""
        return "" if self._wiring.hook is None else "what the hook keeps from step to step"

    def tensors(self) -> Tensors:
        """Return dtype and shape of the weights, and of what the optimizer keeps of them, by name."""
        return {piece.tensor: (piece.dtype.name, piece.shape) for piece in self._parameters.pieces()}

    def kept(self) -> list[Piece]:
        """Return what this rank saves in a checkpoint: its share of what all have."""
        return divided(self._parameters.pieces(), self.group.rank, self.group.size)

    def wanted(self) -> list[Piece]:
        """Return what this rank reads of a checkpoint: everything."""
        return self._parameters.pieces()

    async def settle(self) -> None:
        """Wait until all updates are done that have been issued or are due."""
        self._update_all()
        for update in [*self._issued, *set(self._newest.values())]:
            await update
        await self.rank.compute(_nothing, name="settle", seconds=0.0)

    def resume(self, steps: int) -> None:
        """Go on from that step: weights and the optimizer's state have been written into place."""
        self.steps = steps

    async def _join(self) -> None:
        """Take part, with zeros, in the steps of ranks that have more samples."""
        self._joins = True
        while True:
            active = self._count(0.0)
            if (await active)[0] == 0:
                break
            self._active = active
            self.step()
        self._joins = False

    # -- updates ---------------------------------------------------------------------------------------------------

    def _update_all(self) -> None:
        for bucket in self._buckets:
            if bucket.waits:
                self._update(bucket)

    def _update(self, bucket: Reduction) -> None:
        newest = bucket.update(*self._factors)
        issued = self._issued
        while issued and issued[0].done and issued[0].exception() is None:
            issued.popleft()
        issued.append(newest)
        self._newest.update(dict.fromkeys(bucket.plan.names, newest))

    def _look(self, reduced: list[Future[Array]]) -> None:
        """See, when backward ends, whether there is anything but the last bucket on the wire.

        If not, weights are updated all at once after the next step, while that bucket travels; else each of them right
        before it is needed, as forward must not wait for weights that it needs later.
        """
        self._all_hidden = sum(not future.done for future in reduced) <= 1

    def _mean_factor(self) -> tuple[Future[object], ...]:
        """Return what makes the mean over all ranks one over those that have samples."""
        if self._active is None:
            return ()
        size, active, self._active = self.group.size, self._active, None
        real = self._parameters.real
        return (self.rank.compute(lambda told: size / told[0] if real else 1.0, active, name="mean", seconds=0.0),)

    def _clip(self, reduced: list[Future[Array]]) -> tuple[Future[object], ...]:
        if self._settings.clip_norm is None or not self._parameters.real:
            return ()
        factor = partial(clip_factor, self._settings.clip_norm, self.plans)
        moved_bytes = sum(plan.nbytes for plan in self.plans)
        return (self._wiring.work.compute(factor, *reduced, name="norm", moved_bytes=moved_bytes),)

    def _rebuild(self) -> None:
        """Make the buckets anew after the first step, in the order in which its gradients have come."""
        order, self._observed = self._observed, None
        if order is None:
            return
        if self.group.size > 1:
            self._agreed = (agreement(self.rank, self.group, _ORDER, list(map(repr, order))),)
        if order != self._backward:
            self._update_all()
            self._backward = order
            self._plan()


def _nothing(*_: object, **__: object) -> None:
    """Be done when all computes before it are."""
