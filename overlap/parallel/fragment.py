"""Fragments of a model that trains in local steps: groups of weights with common outer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..runtime.future import Future
from .buckets.plan import BucketPlan
from .parameters import Parameters
from .work import MemoryWork

if TYPE_CHECKING:
    from .tree import Array


class Fragment:
    """Weights of one dtype with common outer steps.

    Memory: two copies of them and the outer optimizer's state; while an outer step is on the wire, two more. All
    methods are called on the compute stream.

    Attributes:
        plan: Names and places of the weights.
        sends_at: Number of the step in each period after which the change of the weights is sent.
        pending: Future of the mean change of all ranks; None if no change is on the wire.
        sent_at: Step after which the last change was sent.
        due: Step after which the pending mean is applied.
        rounds: Number of outer steps that have been issued.
    """

    plan: BucketPlan
    sends_at: int
    sent_at: int
    due: int
    rounds: int

    def __init__(self, plan: BucketPlan, parameters: Parameters, common: Parameters, *, sends_at: int) -> None:
        self.plan, self.sends_at = plan, sends_at
        self.pending: Future[Array] | None = None
        self.sent_at = self.due = self.rounds = 0
        self._parameters, self._common, self._runs = parameters, common, parameters.runs(plan)
        self._own: Array = parameters.weights[plan.dtype].flat
        self._whole: Array = common.weights[plan.dtype].flat
        self._sent = self._own  # a copy of this rank's weights of the fragment, once they are sent

    def notes(self) -> dict[str, object]:
        """Return the counters of the outer steps, which are equal on all ranks."""
        return {"sent_at": self.sent_at, "due": self.due, "rounds": self.rounds, "pending": self.pending is not None}

    def arrays_under_way(self) -> dict[str, Array]:
        """Return the mean change that is on the wire, once it has arrived, and the sent weights; empty if none is."""
        return {} if self.pending is None else {"sent": self._sent, "mean": self.pending.result()}

    def resume(self, notes: Mapping[str, Any], arrays: Mapping[str, Array] | None, work: MemoryWork) -> None:
        """Go on from a checkpoint; without the change that was under way, as if it had not been sent."""
        self.sent_at, self.rounds = notes["sent_at"], notes["rounds"]
        if arrays is None:
            self._copy_common()
        elif notes["pending"]:
            mean, self._sent, self.due = arrays["mean"], arrays["sent"], notes["due"]
            self.pending = work.compute(lambda: mean, name="outer step")

    def change(self) -> Array:
        """Return the common weights less this rank's: the gradient of the outer optimizer."""
        if not self._parameters.real:
            return np.broadcast_to(self._own[:1], self.plan.size)
        self._sent, change = (np.empty(self.plan.size, self.plan.dtype) for _ in range(2))
        for here, there in self._runs:
            self._sent[there] = self._own[here]
            np.subtract(self._whole[here], self._sent[there], out=change[there])
        return change

    def make_outer_step(self, number: int, since: bool, mean: Array) -> dict[str, Array]:
        """Make an outer step with the mean change of all ranks, and keep this rank's progress since it was sent.

        Args:
            number: Number of the outer step, from 1.
            since: Whether this rank has made steps since.
            mean: Mean of the changes.

        Returns:
            This rank's weights, by name.
        """
        self._common.update(self.plan.dtype, self._runs, mean, number)
        if not since:
            self._copy_common()
        elif self._parameters.real:
            for here, there in self._runs:
                self._own[here] += self._whole[here] - self._sent[there]
        return self._parameters.views

    def _copy_common(self) -> None:
        """Overwrite this rank's weights of the fragment with the common ones."""
        if self._parameters.real:
            for here, _ in self._runs:
                self._own[here] = self._whole[here]
