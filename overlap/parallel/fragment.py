"""Fragments of a model that trains in local steps: groups of weights with common outer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..runtime.future import Future
from ..runtime.rank import Rank
from ..timeline.span import RoleName
from .buckets.plan import BucketPlan
from .checkpoints.pieces import Shard, state_name
from .optimizers import Optimizer
from .parameters import Parameters

if TYPE_CHECKING:
    from .tree import Array


class Fragment:
    """Weights of one dtype with common outer steps.

    Memory: two copies of them and the outer optimizer's state; while an outer step is on the wire, two more. All
    methods are called on the compute stream.

    Attributes:
        plan: Which weights.
        sends_at: In which step of each period their change is sent.
        pending: The mean change of all ranks, if it is on the wire.
        sent_at: The step that it was sent at last.
        due: The step that it is to come in at, while it is pending.
        rounds: How many outer steps have been issued.
    """

    plan: BucketPlan
    sends_at: int
    sent_at: int
    due: int
    rounds: int

    def __init__(
        self, rank: Rank, plan: BucketPlan, parameters: Parameters, outer: Optimizer, *, sends_at: int
    ) -> None:
        self.plan, self.sends_at = plan, sends_at
        self.pending: Future[Array] | None = None
        self.sent_at = self.due = self.rounds = 0
        self._parameters, self._outer, self._runs = parameters, outer, parameters.runs(plan)
        self._whole: Array = rank.empty(plan.size, plan.dtype)  # on which all ranks agree
        self._state = outer.fresh(plan.size if parameters.real else 0, plan.dtype)
        self._sent = self._whole
        self._nothing = None if parameters.real else rank.empty(plan.size, plan.dtype)

    @property
    def moved_bytes(self) -> int:
        """Bytes that an outer step reads and writes, beside a copy."""
        return 4 * self.plan.nbytes

    def pieces(self) -> list[Shard]:
        """Return the common weights and the outer optimizer's state, as they lie in memory."""
        pieces: list[Shard] = []
        for slot in self.plan.slots:
            place = slice(slot.start, slot.stop)
            pieces.append(Shard.whole(slot.name, slot.shape, self._whole[place]))
            for key, kept in self._state.items():
                pieces.append(Shard.whole(state_name(f"outer {key}", slot.name), slot.shape, kept[place]))
        return pieces

    def notes(self) -> dict[str, object]:
        """Return the counters of its outer steps, which all ranks have alike."""
        return {"sent_at": self.sent_at, "due": self.due, "rounds": self.rounds, "pending": self.pending is not None}

    def own(self) -> dict[str, Array]:
        """Return the mean change under way, once it has arrived."""
        return {} if self.pending is None else {"sent": self._sent, "mean": self.pending.result()}

    def resume(self, notes: Mapping[str, Any], own: Mapping[str, Array] | None, rank: Rank) -> None:
        """Go on from a checkpoint; without the change that was under way, as if it had not been sent."""
        self.sent_at, self.rounds = notes["sent_at"], notes["rounds"]
        if own is None:
            self._take_common()
        elif notes["pending"]:
            mean, self._sent, self.due = own["mean"], own["sent"], notes["due"]
            self.pending = rank.compute(lambda: mean, name=RoleName("outer step", "library"), seconds=0.0)

    def _take_common(self) -> None:
        flat: Array = self._parameters.flat[self.plan.dtype]
        for here, there in self._runs:
            flat[here] = self._whole[there]

    def begin(self) -> None:
        """Copy the weights that all ranks begin with."""
        if self._nothing is None:
            self._whole[:] = self._local()

    def change(self) -> Array:
        """Return the common weights less this rank's: the gradient of the outer optimizer."""
        if self._nothing is not None:
            return self._nothing
        self._sent = self._local()
        return self._whole - self._sent

    def apply(self, round_: int, since: bool, mean: Array) -> None:
        """Make an outer step with the mean change of all ranks; keep the progress of this rank since it was sent.

        Args:
            round_: From 1.
            since: Whether it has made steps since.
            mean: Mean of the changes.
        """
        if self._nothing is not None:
            return
        self._outer.update(self._whole, mean, self._state, round_)
        moved = self._whole - self._sent if since else None
        flat: Array = self._parameters.flat[self.plan.dtype]
        if moved is None:
            self._take_common()
            return
        for here, there in self._runs:
            flat[here] += moved[there]

    def _local(self) -> Array:
        flat: Array = self._parameters.flat[self.plan.dtype]
        pieces: Array = np.empty(self.plan.size, self.plan.dtype)
        for here, there in self._runs:
            pieces[there] = flat[here]
        return pieces
