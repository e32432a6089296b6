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
"""Of parallelism, and the names of their streams."""

_AHEAD = 2  # actions of the schedule that are issued before earlier ones have run


async def train(rank: Rank, model: Model, layout: Layout, steps: int = 1, *, device: Device | None = None) -> None:
    """Run training steps on this rank.

    Args:
        rank: This rank, of `layout.world_size`.
        model: To be trained.
        layout: How it lies.
        steps: How many.
        device: Measured rates of the rank's computes; None: the clock prices operations and bytes.
    """
    mine = TrainingStep(rank, Amounts(model=model, layout=layout, device=device))
    for index in range(steps):
        with rank.step(index):
            await mine.run()


class TrainingStep:
    """The training step of one rank."""

    def __init__(self, rank: Rank, amounts: Amounts) -> None:
        layout = amounts.layout
        self._rank, self._amounts, self._layout, self._model = rank, amounts, layout, amounts.model
        mesh = rank.mesh(**layout.axes)
        for dimension in DIMENSIONS:
            rank.stream(dimension)
        self._tp, self._pp, self._cp, self._ep = (mesh[axis] for axis in ("tp", "pp", "cp", "ep"))
        self._place, self._last = mesh.coordinates["pp"], layout.pp * layout.chunks - 1
        dtype = numpy_dtype(layout.carried)
        copies = mesh["replicate"] if layout.replicate > 1 else None
        self._weights = StepWeights(rank, amounts, dtype, mesh["dp", "cp", "ep"], mesh["dp", "cp"], copies, self._place)
        self._shard = rank.empty((amounts.rows, amounts.model.hidden), dtype)
        self._x = rank.empty((amounts.tokens, amounts.model.hidden), dtype) if layout.tp > 1 else self._shard
        self._kv = rank.empty(amounts.ring_bytes // dtype.itemsize, dtype)
        self._routed = rank.empty((layout.ep, amounts.routed_bytes // dtype.itemsize // layout.ep), dtype)
        there = (layout.tp if amounts.gathers_routed else 1) * layout.ep
        self._at_experts = rank.empty((there, self._routed.shape[1]), dtype)
        self._token = rank.empty(amounts.tokens, np.float32)
        self._first: dict[object, Future[Any]] = {}  # by the last compute of a product in pieces
        self._passing = StagePassing(self._pp, layout.pipeline(), [_like(self._shard)] * self._last, "pp")

    async def run(self) -> None:
        """Issue the schedule, and the update of the weights."""
        schedule = self._layout.pipeline()
        self._weights.begin()
        running: deque[Future[Any]] = deque()
        for action in schedule.rows[self._place]:
            running.append(self._issue(action))
            if len(running) > _AHEAD:
                await running.popleft()
        for each in running:
            await each
        await self._weights.update()

    # -- the schedule --------------------------------------------------------------------------------------------

    def _issue(self, action: Action) -> Future[Any]:
        stage, kind, i = action
        last = i == self._layout.microbatches - 1
        if kind is Kind.WEIGHT_GRADIENT:
            return self._weight_gradients(stage, last)
        if kind is Kind.FORWARD:
            y = self._forward(stage, self._passing.receive(kind, stage, i) if stage else self._shard)
            self._weights.forwarded(stage)
            if stage == self._last:
                self._passing.deliver(Kind.BACKWARD, stage, i, y)
            else:
                self._passing.deliver(kind, stage + 1, i, y)
            return y
        dx = self._backward(stage, self._passing.receive(Kind.BACKWARD, stage, i), last, whole=kind is Kind.BACKWARD)
        self._passing.deliver(Kind.BACKWARD, stage - 1, i, dx)
        return dx

    # -- forward and backward of a stage ---------------------------------------------------------------------------

    def _forward(self, stage: int, x: object) -> Future[Any]:
        if stage == 0:
            held = self._weights.ahead(self._layers(stage)[0])
            x = self._leave(self._compute("embedding", self._amounts.embedding(), x, held))
        for layer in self._layers(stage):
            x = self._layer(layer, x, "forward")
        if stage < self._last:
            return cast("Future[Any]", x)
        return self._add_up_loss(self._compute("scores", self._amounts.scoring(), self._enter(x), gives=self._token))

    def _add_up_loss(self, found: Future[Any]) -> Future[Any]:
        """Exchange the largest of scores cut by words, their sums, and the scores of the targets, as Megatron does."""
        for _ in range(3 if self._layout.tp > 1 else 0):
            found = self._tp.all_reduce(found, stream="tp", name="tp all_reduce")
        return found

    def _layers(self, stage: int) -> range:
        return self._layout.layers_of(self._model, stage)

    def _layer(self, layer: int, x: object, what: str) -> object:
        """Issue a layer's forward, for the first time or `again` for its backward."""
        held = [*self._weights.gathered(layer), *self._weights.ahead(layer)]
        x = self._leave(self._attention(self._enter(x), held, self._amounts.projections(), what))
        return self._perceptron(layer, x, held, 0.0, what)

    def _backward(self, stage: int, dy: object, last: bool, *, whole: bool) -> Future[Any]:
        times = 2.0 if whole else 1.0  # gradients of inputs, and of weights unless they come later
        if stage == self._last:
            dy = self._leave(self._compute("scores backward", self._amounts.scoring(times), dy))
        for layer in reversed(self._layers(stage)):
            dy = self._layer_backward(stage, layer, dy, last, with_weights=whole)
        return cast("Future[Any]", dy)

    def _layer_backward(self, stage: int, layer: int, dy: object, last: bool, *, with_weights: bool) -> object:
        full, times = self._layout.checkpointing == "full", 2.0 if with_weights else 1.0
        if full:
            self._layer(layer, dy, "again")
        held = [] if full else self._weights.gathered(layer)
        dy = self._enter(self._perceptron(layer, dy, held, times, "backward"))
        buckets = self._weights.complete(stage, layer, last=last) if with_weights else []
        attention = self._attention(dy, held, self._amounts.projections(times), "backward", buckets)
        self._weights.reduce(buckets, attention, last=last)
        return self._leave(attention[0] if buckets else attention)

    def _weight_gradients(self, stage: int, last: bool) -> Future[Any]:
        amounts, gradients = self._amounts, None
        if stage == self._last:
            gradients = self._compute("scores weights", amounts.scoring_weights())
        for layer in reversed(self._layers(stage)):
            buckets = self._weights.complete(stage, layer, last=last)
            gradients = self._compute("weights backward", amounts.weight_gradients(layer), gives=(self._x, *buckets))
            self._weights.reduce(buckets, gradients, last=last)
        assert gradients is not None
        return gradients

    # -- halves of a layer -----------------------------------------------------------------------------------------

    def _attention(
        self, x: object, held: object, projections: Compute, phase: str, buckets: Sequence[Array] = ()
    ) -> Future[Any]:
        """From all of x to this rank's part of the sum; with buckets, to a tuple of it and them."""
        scores = self._amounts.scores(1 if phase == "backward" else 0)
        gives = (self._x, *buckets) if buckets else self._x
        if self._layout.cp > 1:
            attention = self._ring(x, held, projections, scores, phase, gives)
        else:
            attention = self._compute(f"attention {phase}", projections.plus(scores), x, held, gives=gives)
        self._weights.computed(attention)
        return attention

    def _ring(
        self, x: object, held: object, projections: Compute, scores: Compute, phase: str, gives: object
    ) -> Future[Any]:
        """Attend to the keys of one rank after the other; backward, their gradients go along, and one hop further."""
        size, group, back = self._layout.cp, self._cp, phase == "backward"
        there, source = (group.rank + 1) % size, (group.rank - 1) % size
        first = self._compute(f"projections {phase}", projections, x, held, gives=self._kv)
        keys: Future[Any] = first
        coming: Future[Any] | None = None
        for hop in range(size):
            needs = (keys, coming)
            if hop < size - 1:
                group.send(keys, there, 0, stream="cp", name="cp message")
                keys = group.recv(_like(self._kv), source, 0, stream="cp", name="cp message")
            at_end = hop == size - 1 and not back
            scored = self._compute(f"scores {phase}", scores, first, *needs, gives=gives if at_end else self._kv)
            if back:
                group.send(scored, there, 1, stream="cp", name="cp message")
                coming = group.recv(_like(self._kv), source, 1, stream="cp", name="cp message")
        return self._compute(f"join {phase}", _NOTHING, coming, gives=gives) if back else scored

    def _perceptron(self, layer: int, x: object, held: object, times: float, phase: str) -> object:
        """From a shard to a shard."""
        if self._model.has_experts(layer):
            return self._sparse(x, held, times, phase)
        work = self._amounts.perceptron(layer, times)
        return self._leave(self._compute(f"perceptron {phase}", work, self._enter(x), held))

    def _sparse(self, x: object, held: object, times: float, phase: str) -> object:
        """Issue a layer of experts: tokens go there and come back, while the shared experts compute."""
        amounts, gathers = self._amounts, self._amounts.gathers_routed
        gathered = x if gathers else self._enter(x)
        y = self._compute(f"router {phase}", amounts.router(times), gathered, held, gives=self._routed)
        y = self._exchange(y)
        both = [self._shared(x if gathers else gathered, held, times, phase)] if self._model.shared_experts else []
        if gathers:
            y = self._tp.all_gather(y, stream="tp", name="tp gather routed")
        y = self._compute(f"experts {phase}", amounts.experts(times), y, gives=self._at_experts)
        if gathers:
            y = self._tp.reduce_scatter(y, stream="tp", name="tp scatter routed")
        gives = self._shard if gathers else self._x
        y = self._compute(f"combine {phase}", amounts.combining(), self._exchange(y), *both, gives=gives)
        return y if gathers else self._leave(y)

    def _shared(self, x: object, held: object, times: float, what: str) -> Future[Any]:
        """Issue the shared experts, which all tokens meet."""
        work = self._amounts.shared(times)
        if not self._amounts.gathers_routed:
            return self._compute(f"shared {what}", work, x, held)
        return self._leave(self._compute(f"shared {what}", work, self._enter(x), held))

    def _exchange(self, x: Future[Any]) -> Future[Any]:
        return x if self._layout.ep == 1 else self._ep.all_to_all(x, stream="ep", name="ep all_to_all")

    # -- between halves ----------------------------------------------------------------------------------------------

    def _enter(self, x: object) -> object:
        """Gather an array of which each rank of tp has a part."""
        if self._layout.tp == 1 or not self._layout.sequence_parallel:
            return x
        gathered = self._tp.all_gather(cast("Array", x), stream="tp", name="tp all_gather")
        return _TokenPieces(x, gathered) if self._layout.async_tp else gathered

    def _leave(self, y: Future[Any]) -> Future[Any]:
        """Add up the arrays of all ranks of tp, and leave each rank its part."""
        if self._layout.tp == 1:
            return y
        if self._layout.sequence_parallel:
            first = self._first.pop(y, None)
            if first is None:
                return self._tp.reduce_scatter(y, stream="tp", name="tp reduce_scatter")
            scattered = self._tp.reduce_scatter(first, stream="tp", name="tp reduce_scatter")
            return self._compute("join", _NOTHING, scattered, y, gives=self._shard)
        return self._tp.all_reduce(y, stream="tp", name="tp all_reduce")

    def _compute(self, name: str, work: Compute, *needs: object, gives: object = None) -> Future[Any]:
        result = self._x if gives is None else gives
        for place, need in enumerate(needs):
            if isinstance(need, _TokenPieces):
                rest = (*needs[:place], *needs[place + 1 :])
                return self._by_pieces(name, work, need, rest, result)
        return self._rank.compute(
            lambda *_: result, *needs, name=name, flops=work.flops, bytes_moved=work.nbytes, seconds=work.seconds
        )

    def _by_pieces(
        self, name: str, work: Compute, x: _TokenPieces, needs: tuple[object, ...], gives: object
    ) -> Future[Any]:
        """Compute with this rank's piece, then with the pieces that arrive next, and with the last one on its own."""
        share = work.times(1 / self._layout.tp)
        first = self._compute(name, share, x.own, *needs, gives=self._x)
        if self._layout.tp > 2:
            self._compute(name, work.plus(share.times(-2.0)), first, *needs, gives=self._x)
        last = self._compute(name, share, first, x.gathered, gives=gives)
        self._first[last] = first
        return last


@dataclass(frozen=True, slots=True)
class _TokenPieces:
    """An array of which each rank of tp has a piece, while it is gathered."""

    own: object
    gathered: object


_NOTHING = Compute(flops=0.0, nbytes=0.0)


def _like(array: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return array.shape, array.dtype
