"""The training step as a program on ranks, like a user's: it issues the amounts of work in the order of the schedule.

Each dimension of parallelism has a communication stream of its own name, so a timeline tells them apart:

* tp: after (and with sequence parallelism before) each half of a layer, forward and backward. Nothing hides it, unless
  it is asynchronous: then a rank computes with its own piece while others come, and sends pieces while it computes.
* cp: keys and values go round the ring while attention to the ones that are here is computed.
* ep: tokens go to their experts and come back; with sequence parallel, the ranks of tp gather them there.
* pp: activations and their gradients from stage to stage, as the schedule says.
* dp: gradients in buckets under the backward pass of the last microbatch, weights after the update or under the
  next step (ZeRO-1, 2); or weights two layers ahead, gradients layer by layer (ZeRO-3).
* replicate: sums of what the ranks of dp have reduced and scattered over further groups of such ranks (HSDP).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..collectives.reduce import Array
from ..parallel.passing import StagePassing
from ..parallel.schedules import Action, Kind
from ..runtime.future import Future
from ..runtime.rank import Rank
from .amounts import Amounts, Compute, numpy_dtype
from .device import Device
from .layout import Layout
from .model import Model
from .weights import StepWeights

DIMENSIONS = ("tp", "ep", "cp", "dp", "replicate", "pp")
"""Dimensions of parallelism, which are also the names of their streams."""

_ACTIONS_AHEAD = 2  # actions of the schedule that are issued before earlier ones have run


async def train(rank: Rank, model: Model, layout: Layout, steps: int = 1, *, device: Device | None = None) -> None:
    """Run training steps on this rank.

    Args:
        rank: This rank, of `layout.world_size`.
        model: The model to train.
        layout: Its layout on the ranks.
        steps: Number of steps.
        device: Measured rates of the rank's computes; None: the clock prices operations and bytes.
    """
    step = TrainingStep(rank, Amounts(model=model, layout=layout, device=device))
    for index in range(steps):
        with rank.step(index):
            await step.run()


class TrainingStep:
    """The training step of one rank."""

    def __init__(self, rank: Rank, amounts: Amounts) -> None:
        layout = amounts.layout
        self._rank, self._amounts, self._layout, self._model = rank, amounts, layout, amounts.model
        mesh = rank.mesh(**layout.axes)
        for dimension in DIMENSIONS:
            rank.stream(dimension)
        self._tp, self._pp, self._cp, self._ep = (mesh[axis] for axis in ("tp", "pp", "cp", "ep"))
        self._position, self._last_stage = mesh.coordinates["pp"], layout.pp * layout.chunks - 1
        dtype = numpy_dtype(layout.storage_dtype)
        copies = mesh["replicate"] if layout.replicate > 1 else None
        self._weights = StepWeights(
            rank, amounts, dtype, mesh["dp", "cp", "ep"], mesh["dp", "cp"], copies, self._position
        )
        # Results of all computes: only their sizes matter. A shard has the rows of this rank, full rows all of tp.
        self._shard = rank.empty((amounts.rows, amounts.model.hidden), dtype)
        self._full_rows = rank.empty((amounts.tokens, amounts.model.hidden), dtype) if layout.tp > 1 else self._shard
        self._kv = rank.empty(amounts.ring_bytes // dtype.itemsize, dtype)
        self._routed = rank.empty((layout.ep, amounts.routed_bytes // dtype.itemsize // layout.ep), dtype)
        blocks = (layout.tp if amounts.gathers_routed else 1) * layout.ep
        self._at_experts = rank.empty((blocks, self._routed.shape[1]), dtype)
        self._token_values = rank.empty(amounts.tokens, np.float32)
        self._first_pieces: dict[object, Future[Any]] = {}  # the first piece of a product, by its last
        self._passing = StagePassing(
            self._pp, layout.pipeline(), [_shape_and_dtype(self._shard)] * self._last_stage, "pp"
        )

    async def run(self) -> None:
        """Issue the actions of the schedule, and the update of the weights; return when all are done."""
        schedule = self._layout.pipeline()
        self._weights.gather_ahead()
        running: deque[Future[Any]] = deque()
        for action in schedule.rows[self._position]:
            running.append(self._issue_action(action))
            if len(running) > _ACTIONS_AHEAD:
                await running.popleft()
        for each in running:
            await each
        await self._weights.update()

    # -- the schedule --------------------------------------------------------------------------------------------

    def _issue_action(self, action: Action) -> Future[Any]:
        """Issue an action of the schedule; return its output, which is also passed to the stage that needs it."""
        stage, kind, i = action
        last = i == self._layout.microbatches - 1
        if kind is Kind.WEIGHT_GRADIENT:
            return self._stage_weight_gradients(stage, last)
        if kind is Kind.FORWARD:
            y = self._forward_stage(stage, self._passing.receive(kind, stage, i) if stage else self._shard)
            self._weights.note_forward(stage)
            if stage == self._last_stage:
                self._passing.deliver(Kind.BACKWARD, stage, i, y)
            else:
                self._passing.deliver(kind, stage + 1, i, y)
            return y
        received = self._passing.receive(Kind.BACKWARD, stage, i)
        dx = self._backward_stage(stage, received, last, whole=kind is Kind.BACKWARD)
        self._passing.deliver(Kind.BACKWARD, stage - 1, i, dx)
        return dx

    # -- forward and backward of a stage ---------------------------------------------------------------------------

    def _forward_stage(self, stage: int, x: object) -> Future[Any]:
        """Issue the forward pass of a stage, with embedding or scores at the ends; return its output or the loss."""
        if stage == 0:
            held = self._weights.gathered_ahead(self._stage_layers(stage)[0])
            x = self._reduce_rows(self._issue_compute("embedding", self._amounts.embedding(), x, held))
        for layer in self._stage_layers(stage):
            x = self._forward_layer(layer, x, "forward")
        if stage < self._last_stage:
            return cast("Future[Any]", x)
        return self._add_up_loss(
            self._issue_compute(
                "scores", self._amounts.vocabulary_scores(), self._gather_rows(x), gives=self._token_values
            )
        )

    def _add_up_loss(self, sums: Future[Any]) -> Future[Any]:
        """Issue all_reduces of the loss of scores cut over tp: of largest, sum and target, as Megatron does."""
        for _ in range(3 if self._layout.tp > 1 else 0):
            sums = self._tp.all_reduce(sums, stream="tp", name="tp all_reduce")
        return sums

    def _stage_layers(self, stage: int) -> range:
        """Return the layers of a stage."""
        return self._layout.layers_of(self._model, stage)

    def _forward_layer(self, layer: int, x: object, what: str) -> object:
        """Issue a layer's forward pass; `what` is "forward", or "again" where its backward pass recomputes it."""
        held = [*self._weights.gather_layer(layer), *self._weights.gathered_ahead(layer)]
        x = self._reduce_rows(self._attention(self._gather_rows(x), held, self._amounts.projections(), what))
        return self._perceptron(layer, x, held, 0.0, what)

    def _backward_stage(self, stage: int, dy: object, last: bool, *, whole: bool) -> Future[Any]:
        """Issue the backward pass of a stage, `whole` with the gradients of weights; return that of its input."""
        times = 2.0 if whole else 1.0  # gradients of inputs, and of weights unless they come later
        if stage == self._last_stage:
            dy = self._reduce_rows(self._issue_compute("scores backward", self._amounts.vocabulary_scores(times), dy))
        for layer in reversed(self._stage_layers(stage)):
            dy = self._backward_layer(stage, layer, dy, last, with_weights=whole)
        return cast("Future[Any]", dy)

    def _backward_layer(self, stage: int, layer: int, dy: object, last: bool, *, with_weights: bool) -> object:
        """Issue a layer's backward pass, and reduce the buckets it completes; return the gradient of its input."""
        full, times = self._layout.checkpointing == "full", 2.0 if with_weights else 1.0
        if full:
            self._forward_layer(layer, dy, "again")
        held = [] if full else self._weights.gather_layer(layer)
        dy = self._gather_rows(self._perceptron(layer, dy, held, times, "backward"))
        buckets = self._weights.complete_buckets(stage, layer, last=last) if with_weights else []
        attention = self._attention(dy, held, self._amounts.projections(times), "backward", buckets)
        self._weights.reduce(buckets, attention, last=last)
        return self._reduce_rows(attention[0] if buckets else attention)

    def _stage_weight_gradients(self, stage: int, last: bool) -> Future[Any]:
        """Issue the gradients of the weights of a stage alone, and their reduction; return the last compute."""
        amounts, gradients = self._amounts, None
        if stage == self._last_stage:
            gradients = self._issue_compute("scores weights", amounts.vocabulary_gradients())
        for layer in reversed(self._stage_layers(stage)):
            buckets = self._weights.complete_buckets(stage, layer, last=last)
            gradients = self._issue_compute(
                "weights backward", amounts.weight_gradients(layer), gives=(self._full_rows, *buckets)
            )
            self._weights.reduce(buckets, gradients, last=last)
        assert gradients is not None
        return gradients

    # -- halves of a layer -----------------------------------------------------------------------------------------

    def _attention(
        self, x: object, held: object, projections: Compute, phase: str, buckets: Sequence[Array] = ()
    ) -> Future[Any]:
        """Issue attention from full rows to this rank's part of a sum; the result is a tuple with `buckets`, if any."""
        scores = self._amounts.scores(1 if phase == "backward" else 0)
        gives = (self._full_rows, *buckets) if buckets else self._full_rows
        if self._layout.cp > 1:
            attention = self._ring_attention(x, held, projections, scores, phase, gives)
        else:
            attention = self._issue_compute(f"attention {phase}", projections.plus(scores), x, held, gives=gives)
        self._weights.note_compute(attention)
        return attention

    def _ring_attention(
        self, x: object, held: object, projections: Compute, scores: Compute, phase: str, gives: object
    ) -> Future[Any]:
        """Issue attention to the keys of each rank of cp in turn; backward, gradients travel one hop further."""
        size, group, back = self._layout.cp, self._cp, phase == "backward"
        target, source = (group.rank + 1) % size, (group.rank - 1) % size
        first = self._issue_compute(f"projections {phase}", projections, x, held, gives=self._kv)
        keys: Future[Any] = first
        gradients: Future[Any] | None = None
        for hop in range(size):
            needs = (keys, gradients)
            if hop < size - 1:
                group.send(keys, target, 0, stream="cp", name="cp message")
                keys = group.recv(_shape_and_dtype(self._kv), source, 0, stream="cp", name="cp message")
            at_end = hop == size - 1 and not back
            scored = self._issue_compute(f"scores {phase}", scores, first, *needs, gives=gives if at_end else self._kv)
            if back:
                group.send(scored, target, 1, stream="cp", name="cp message")
                gradients = group.recv(_shape_and_dtype(self._kv), source, 1, stream="cp", name="cp message")
        return self._issue_compute(f"join {phase}", _NO_WORK, gradients, gives=gives) if back else scored

    def _perceptron(self, layer: int, x: object, held: object, times: float, phase: str) -> object:
        """Issue the second half of a layer, a perceptron or experts, from a shard of rows to a shard."""
        if self._model.has_experts(layer):
            return self._expert_layer(x, held, times, phase)
        work = self._amounts.perceptron(layer, times)
        return self._reduce_rows(self._issue_compute(f"perceptron {phase}", work, self._gather_rows(x), held))

    def _expert_layer(self, x: object, held: object, times: float, phase: str) -> object:
        """Issue a layer of experts: tokens travel there and back, and the shared experts compute in parallel."""
        amounts, gathers = self._amounts, self._amounts.gathers_routed
        gathered = x if gathers else self._gather_rows(x)
        y = self._issue_compute(f"router {phase}", amounts.router(times), gathered, held, gives=self._routed)
        y = self._exchange_tokens(y)
        shared = (
            [self._shared_experts(x if gathers else gathered, held, times, phase)] if self._model.shared_experts else []
        )
        if gathers:
            y = self._tp.all_gather(y, stream="tp", name="tp gather routed")
        y = self._issue_compute(f"experts {phase}", amounts.experts(times), y, gives=self._at_experts)
        if gathers:
            y = self._tp.reduce_scatter(y, stream="tp", name="tp scatter routed")
        gives = self._shard if gathers else self._full_rows
        y = self._issue_compute(
            f"combine {phase}", amounts.expert_sum(), self._exchange_tokens(y), *shared, gives=gives
        )
        return y if gathers else self._reduce_rows(y)

    def _shared_experts(self, x: object, held: object, times: float, what: str) -> Future[Any]:
        """Issue the shared experts, which compute all tokens."""
        work = self._amounts.shared_perceptron(times)
        if not self._amounts.gathers_routed:
            return self._issue_compute(f"shared {what}", work, x, held)
        return self._reduce_rows(self._issue_compute(f"shared {what}", work, self._gather_rows(x), held))

    def _exchange_tokens(self, x: Future[Any]) -> Future[Any]:
        """Issue the all_to_all between the ranks that share the experts; return `x` if there is one such rank."""
        return x if self._layout.ep == 1 else self._ep.all_to_all(x, stream="ep", name="ep all_to_all")

    # -- between halves ----------------------------------------------------------------------------------------------

    def _gather_rows(self, x: object) -> object:
        """Gather the rows that the ranks of tp have parts of, if they are cut; pieces of them if tp is asynchronous."""
        if self._layout.tp == 1 or not self._layout.sequence_parallel:
            return x
        gathered = self._tp.all_gather(cast("Array", x), stream="tp", name="tp all_gather")
        return _TokenPieces(x, gathered) if self._layout.async_tp else gathered

    def _reduce_rows(self, y: Future[Any]) -> Future[Any]:
        """Sum an array over the ranks of tp; with sequence parallelism each rank receives its own rows only."""
        if self._layout.tp == 1:
            return y
        if self._layout.sequence_parallel:
            first = self._first_pieces.pop(y, None)
            if first is None:
                return self._tp.reduce_scatter(y, stream="tp", name="tp reduce_scatter")
            scattered = self._tp.reduce_scatter(first, stream="tp", name="tp reduce_scatter")
            return self._issue_compute("join", _NO_WORK, scattered, y, gives=self._shard)
        return self._tp.all_reduce(y, stream="tp", name="tp all_reduce")

    def _issue_compute(self, name: str, work: Compute, *needs: object, gives: object = None) -> Future[Any]:
        """Issue a compute after `needs` that returns the buffer `gives`, by pieces if a need arrives by pieces."""
        result = self._full_rows if gives is None else gives
        for place, need in enumerate(needs):
            if isinstance(need, _TokenPieces):
                rest = (*needs[:place], *needs[place + 1 :])
                return self._compute_by_pieces(name, work, need, rest, result)
        return self._rank.compute(
            lambda *_: result, *needs, name=name, flops=work.flops, bytes_moved=work.nbytes, seconds=work.seconds
        )

    def _compute_by_pieces(
        self, name: str, work: Compute, x: _TokenPieces, needs: tuple[object, ...], gives: object
    ) -> Future[Any]:
        """Issue computes on the own piece, on the pieces that arrive next, and on the last one; return the last."""
        share = work.times(1 / self._layout.tp)
        first = self._issue_compute(name, share, x.own, *needs, gives=self._full_rows)
        if self._layout.tp > 2:
            self._issue_compute(name, work.plus(share.times(-2.0)), first, *needs, gives=self._full_rows)
        last = self._issue_compute(name, share, first, x.gathered, gives=gives)
        self._first_pieces[last] = first
        return last


@dataclass(frozen=True, slots=True)
class _TokenPieces:
    """Rows that the ranks of tp have pieces of, while they are gathered."""

    own: object
    gathered: object


_NO_WORK = Compute(flops=0.0, nbytes=0.0)


def _shape_and_dtype(array: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the description of an array by which a receive is issued."""
    return array.shape, array.dtype
