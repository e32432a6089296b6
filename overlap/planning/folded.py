"""Steps with the inside of their layers folded: computes and exchanges of `tp`, `cp`, `ep` are simulated once.

Computes and exchanges inside an action of the schedule follow each other, and nothing hides them, so an action takes
the sum of its layers' times wherever it stands in a step. A folded step has one compute for each action, its first and
its last exchange, its messages, and the last microbatch with its buckets of gradients in full. Where no wire carries
operations inside an action and others at the same moment, 1F1B takes as long as the whole step, to the nanosecond;
other orders are up to 0.2 % off, as an exchange may begin a little earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from ..runtime.future import Future
from ..runtime.rank import Rank
from .amounts import Amounts
from .layout import Layout
from .parts import StepParts
from .program import TrainingStep

What: TypeAlias = Literal[
    "layer",
    "backward",
    "inputs",
    "weights",
    "scores",
    "scores backward",
    "scores inputs",
    "scores weights",
    "begin",
    "end",
]
Piece: TypeAlias = tuple[What, int]
"""(Part of an action, a layer of its kind): a layer forward, or backward, or the gradients of its inputs or its weights
alone; scores; the first and the last exchange."""

FOLDED = "folded"
"""First word of the names of folded computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPieces:
    """Parts of actions, each simulated alone."""

    parts: Mapping[Piece, StepParts]  # Their time, and its parts

    def ns(self, piece: Piece) -> int:
        """Return the time of a piece."""
        return round(self.parts[piece].step_ns)


def pieces_of(amounts: Amounts) -> list[Piece]:
    """Return the pieces that the folded actions of a layout consist of."""
    model, layout = amounts.model, amounts.layout
    layers: list[What] = ["layer"]
    scores: list[What] = ["scores"]
    if layout.zero_in_step < 2:
        split = layout.pipeline().splits_backward
        layers += ["inputs", "weights", "backward"] if split else ["backward"]
        scores += ["scores inputs", "scores weights", "scores backward"] if split else ["scores backward"]
    kinds = [layer for layer, _ in model.layer_kinds(range(model.layers + model.mtp_layers))]
    found: list[Piece] = [(what, layer) for what in layers for layer in kinds]
    found += [(what, 0) for what in scores]
    return [*found, ("begin", 0), ("end", 0)] if layout.tp > 1 and not layout.async_tp else found


def can_fold(layout: Layout) -> bool:
    """Return whether a layout's actions can be folded: gathered weights would cross their borders."""
    return layout.zero_in_step < 3


class PieceAlone(TrainingStep):
    """One piece of an action, on every rank."""

    async def run_piece(self, piece: Piece) -> None:
        """Run it."""
        await self._piece(piece)

    def _piece(self, piece: Piece) -> Future[Any]:
        kind, layer = piece
        x = self._shard
        if kind == "layer":
            return cast("Future[Any]", self._layer(layer, x, "forward"))
        if kind in ("backward", "inputs"):
            return cast("Future[Any]", self._layer_backward(0, layer, x, False, with_weights=kind == "backward"))
        if kind == "scores":
            return self._compute("scores", self._amounts.vocabulary_scores(), self._enter(x), gives=self._token)
        if kind == "begin":
            return self._compute("begin", self._amounts.vocabulary_scores().times(0.0), self._enter(x))
        if kind == "end":
            return self._leave(self._compute("end", self._amounts.vocabulary_scores().times(0.0)))
        if kind in ("weights", "scores weights"):
            work = self._amounts.weight_gradients(layer) if kind == "weights" else self._amounts.vocabulary_gradients()
            return self._compute("weights backward" if kind == "weights" else kind, work)
        work = self._amounts.vocabulary_scores(2.0 if kind == "scores backward" else 1.0)
        return self._leave(self._compute("scores backward", work))


class FoldedStep(TrainingStep):
    """The training step of one rank, in which most actions are one compute.

    Args:
        rank: The rank.
        amounts: Amounts of the model.
        pieces: Times of the pieces of actions.
        used: Takes the number of each piece that was folded, over all ranks that run.
    """

    def __init__(
        self, rank: Rank, amounts: Amounts, pieces: SimulatedPieces, used: Callable[[Piece, float], None]
    ) -> None:
        super().__init__(rank, amounts)
        self._pieces, self._used = pieces, used

    def _forward(self, stage: int, x: object) -> Future[Any]:
        if self._weights.waits_for_gather(stage):
            return super()._forward(stage, x)
        if stage == 0:
            x = self._leave(self._compute("embedding", self._amounts.embedding(), x))
        pieces: dict[Piece, int] = self._layers_as("layer", stage)
        if stage == self._last:
            pieces["scores", 0] = 1
            return self._add_up_loss(self._fold("forward", self._begun(pieces), self._outer(x), self._token))
        return self._ended("forward", self._begun(pieces), self._outer(x), leaves=self._leaves(stage))

    def _outer(self, x: object) -> object:
        """Issue the first exchange of an action outside it, unless that lies under computes."""
        return x if self._layout.async_tp else self._enter(x)

    def _begun(self, pieces: dict[Piece, int]) -> dict[Piece, int]:
        """Return the pieces of an action without its first exchange, which may overlap the action before."""
        enters = self._layout.tp > 1 and self._layout.sequence_parallel and not self._layout.async_tp
        return {**pieces, ("begin", 0): -1} if enters else pieces

    def _backward(self, stage: int, dy: object, last: bool, *, whole: bool) -> Future[Any]:
        if last or self._layout.zero_in_step == 2:
            return super()._backward(stage, dy, last, whole=whole)
        pieces = self._layers_as("backward" if whole else "inputs", stage)
        if stage == self._last:
            pieces["scores backward" if whole else "scores inputs", 0] = 1
        elif self._layout.checkpointing == "full" or not self._routes(stage):
            pieces, dy = self._begun(pieces), self._outer(dy)
        return self._ended("backward", pieces, dy, leaves=self._outside)

    def _weight_gradients(self, stage: int, last: bool) -> Future[Any]:
        if last or self._layout.zero_in_step == 2:
            return super()._weight_gradients(stage, last)
        pieces = self._layers_as("weights", stage)
        if stage == self._last:
            pieces["scores weights", 0] = 1
        return self._fold("weights", pieces, None, self._x)

    def _leaves(self, stage: int) -> bool:
        """Return whether the forward pass of a stage ends with an exchange; that of routed tokens is inside."""
        return self._outside and not self._routes(stage)

    @property
    def _outside(self) -> bool:
        return self._layout.tp > 1 and not self._layout.async_tp

    def _routes(self, stage: int) -> bool:
        return self._amounts.gathers_routed and self._model.has_experts(self._layers(stage)[-1])

    def _ended(self, what: str, pieces: dict[Piece, int], x: object, *, leaves: bool) -> Future[Any]:
        """Issue an action without its last exchange, which may overlap the action behind."""
        if not leaves:
            return self._fold(what, pieces, x, self._shard)
        return self._leave(self._fold(what, {**pieces, ("end", 0): -1}, x, self._x))

    def _layers_as(self, what: What, stage: int) -> dict[Piece, int]:
        return {(what, layer): like for layer, like in self._kinds(stage)}

    def _kinds(self, stage: int) -> list[tuple[int, int]]:
        """Return the layers of a stage by kind, each as the first one of all that kind."""
        model = self._model
        first = {model.has_experts(layer): layer for layer, _ in reversed(model.layer_kinds(range(model.layers)))}
        return [(first[model.has_experts(layer)], like) for layer, like in model.layer_kinds(self._layers(stage))]

    def _fold(self, what: str, pieces: dict[Piece, int], x: object, gives: object) -> Future[Any]:
        for piece, times in pieces.items():
            self._used(piece, times)
        total_ns = sum(times * self._pieces.ns(piece) for piece, times in pieces.items())
        return self._rank.compute(lambda *_: gives, x, name=f"{FOLDED} {what}", seconds=total_ns / 1e9)
