"""Hooks at work: the call for one bucket, checks of the result, and the state for checkpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UsageError
from ...runtime.future import Future
from ...runtime.group import Group
from ...runtime.rank import Rank
from ...state.files import CODES
from ...state.trees import pack_tree
from .plan import BucketPlan, GradientBucket, Hook

if TYPE_CHECKING:
    from ..tree import Array, Site


class BucketHook:
    """A hook at work on one bucket, with a stream of the bucket's own.

    Args:
        hook: From the bucket to its mean.
        rank: This rank.
        group: The ranks whose mean it is.
        plan: The gradients in the bucket.
        priority: Priority of its operations.
        counts: Elements of the mean that each rank needs, where no rank needs all; see `GradientBucket`.

    Attributes:
        state: The hook's own, from step to step.
    """

    def __init__(
        self,
        hook: Hook,
        rank: Rank,
        group: Group,
        plan: BucketPlan,
        *,
        priority: int,
        counts: Sequence[int] | None = None,
    ) -> None:
        self.state: dict[str, Any] = {}
        self._name = f"hook:{plan.index}"  # in checkpoints
        self._hook, self._rank, self._plan, self._priority = hook, rank, plan, priority
        self._group = group.on(rank.stream(f"gradients of {group.name}, bucket {plan.index}"))
        self._counts = None if counts is None else tuple(counts)

    def start(self, packed: Future[Array], step: int, site: Site | None) -> Future[Array]:
        """Return a future of the hook's mean of packed gradients: all of it, or this rank's part with `counts`."""
        return self._rank.spawn(self._call_hook, packed, step, site, name=f"hook of bucket {self._plan.index}")

    @property
    def unsavable(self) -> str:
        """The part of the state that checkpoints cannot hold, for people to read; empty if there is none."""
        try:
            pack_tree({"state": self.state}, CODES)
        except UsageError as error:
            return f"the state of a hook is not in it: {error}"
        return ""

    def saved_state(self) -> dict[str, object]:
        """Return the hook's state for a checkpoint, by its name; empty if there is none, or none that can be saved."""
        saved = {"names": self._plan.names, "state": self.state}
        return {} if not self.state or self.unsavable else {self._name: saved}

    def resume(self, own: Mapping[str, Any]) -> bool:
        """Adopt the state of a checkpoint, if there is one; return False if that is of another bucket."""
        saved = own.get(self._name)
        if saved is None or saved["names"] != self._plan.names:
            return saved is None
        self.state = saved["state"]
        return True

    async def _call_hook(self, packed: Future[Array], step: int, site: Site | None) -> Array:
        """Call the hook for one step of its bucket, and return this rank's part of the mean that it made."""
        buffer, index = await packed, self._plan.index
        bucket = GradientBucket(
            rank=self._rank,
            group=self._group,
            index=index,
            step=step,
            names=self._plan.names,
            shapes=tuple(slot.shape for slot in self._plan.slots),
            buffer=buffer,
            priority=self._priority,
            place=site,
            counts=self._counts,
            state=self.state,
            rng=np.random.default_rng((step, index, self._rank.rank)),
        )
        result = self._hook(bucket)
        if not isinstance(result, Awaitable):
            raise UsageError(f"hook: expected an async function; of bucket {index} it returned {type(result).__name__}")
        reduced = await result
        reduced = await reduced if isinstance(reduced, Future) else reduced
        if not isinstance(reduced, np.ndarray):
            raise UsageError(
                f"hook: its result for bucket {index} is of type {type(reduced).__name__}, not an array; return one"
            )
        return self._rank_part(reduced, buffer)

    def _rank_part(self, reduced: Array, buffer: Array) -> Array:
        """Return this rank's part of the hook's result, flat; refuse another size or dtype."""
        part = slice(0, buffer.size)
        if self._counts is not None:
            start = sum(self._counts[: self._group.rank])
            part = slice(start, start + self._counts[self._group.rank])
            if (reduced.shape, reduced.dtype) == ((part.stop - part.start,), buffer.dtype):
                return reduced
        if (reduced.shape, reduced.dtype) != (buffer.shape, buffer.dtype):
            raise UsageError(
                f"hook: bucket {self._plan.index} is {buffer.dtype} {buffer.shape}, the result of the hook is "
                f"{reduced.dtype} {reduced.shape}; return one like the bucket"
            )
        return reduced[part]
