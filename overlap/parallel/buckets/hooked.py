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
    """A hook as it is used for one bucket, with a separate communication stream.

    Args:
        hook: The function that returns the mean of a bucket.
        rank: This rank.
        group: The ranks whose gradients are averaged.
        plan: The gradients in the bucket.
        priority: Priority of the hook's operations.
        counts: Number of elements of the mean that each rank needs; None: every rank needs all. See `GradientBucket`.

    Attributes:
        state: Values that the hook stores from step to step.
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

    def start_hook(self, packed: Future[Array], step: int, site: Site | None) -> Future[Array]:
        """Start a task that waits for the gradients and calls the hook; return a future of the mean.

        With `counts`, the mean is this rank's part only.

        Args:
            packed: This rank's gradients of the bucket, flat.
            step: Step of the model, from 1.
            site: The line that handed over a gradient last; None if none was handed over.
        """
        return self._rank.spawn(self._call_hook, packed, step, site, name=f"hook of bucket {self._plan.index}")

    @property
    def unsavable_reason(self) -> str:
        """A sentence on why a checkpoint cannot hold the state; empty if it can."""
        try:
            pack_tree({"state": self.state}, CODES)
        except UsageError as error:
            return f"the state of a hook is not in it: {error}"
        return ""

    def state_to_save(self) -> dict[str, object]:
        """Return {name of the hook: {names of the parameters, state}}; empty if there is no state that can be saved."""
        saved = {"names": self._plan.names, "state": self.state}
        return {} if not self.state or self.unsavable_reason else {self._name: saved}

    def restore_state(self, own: Mapping[str, Any]) -> bool:
        """Adopt the state that a checkpoint has for this hook.

        Args:
            own: The states of all hooks of this rank, as `state_to_save` returned them.

        Returns:
            False, with nothing changed, if the state belongs to a bucket of other parameters; True otherwise, also if
            there is no state for this hook.
        """
        saved = own.get(self._name)
        if saved is None or saved["names"] != self._plan.names:
            return saved is None
        self.state = saved["state"]
        return True

    async def _call_hook(self, packed: Future[Array], step: int, site: Site | None) -> Array:
        """Call the hook for one step, and return the mean; with `counts`, this rank's part of the mean.

        Raises a `UsageError` if the hook is no async function, or if its result is no array like the bucket.
        """
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
        # A hook may return a future of the mean, instead of waiting for it.
        reduced = await reduced if isinstance(reduced, Future) else reduced
        if not isinstance(reduced, np.ndarray):
            raise UsageError(
                f"hook: its result for bucket {index} is of type {type(reduced).__name__}, not an array; return one"
            )
        return self._checked_rank_part(reduced, buffer)

    def _checked_rank_part(self, reduced: Array, buffer: Array) -> Array:
        """Return the hook's result, or with `counts` this rank's part of it; refuse a wrong shape or dtype."""
        part = slice(0, buffer.size)
        if self._counts is not None:
            start = sum(self._counts[: self._group.rank])
            part = slice(start, start + self._counts[self._group.rank])
            # With `counts`, a hook may return this rank's part alone.
            if (reduced.shape, reduced.dtype) == ((part.stop - part.start,), buffer.dtype):
                return reduced
        if (reduced.shape, reduced.dtype) != (buffer.shape, buffer.dtype):
            raise UsageError(
                f"hook: bucket {self._plan.index} is {buffer.dtype} {buffer.shape}, the result of the hook is "
                f"{reduced.dtype} {reduced.shape}; return one like the bucket"
            )
        return reduced[part]
