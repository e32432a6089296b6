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

PieceKind: TypeAlias = Literal[
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
Piece: TypeAlias = tuple[PieceKind, int]
"""(Part of an action, a layer of its kind): a layer forward, or backward, or the gradients of its inputs or its weights
alone; scores; the first and the last exchange."""

FOLDED = "folded"
"""First word of the names of folded computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPieces:
    """Times of the pieces of actions, each simulated alone."""

    parts: Mapping[Piece, StepParts]  # Their time, and its parts

    def ns(self, piece: Piece) -> int:
        """Return the time of a piece in nanoseconds."""
        return round(self.parts[piece].step_ns)


def action_pieces(amounts: Amounts) -> list[Piece]:
    """Return the pieces to simulate, of which the folded actions of a layout consist."""
    model, layout = amounts.model, amounts.layout
    layers: list[PieceKind] = ["layer"]
    scores: list[PieceKind] = ["scores"]
    if layout.zero_in_step < 2:
        split = layout.pipeline().splits_backward
        layers += ["inputs", "weights", "backward"] if split else ["backward"]
        scores += ["scores inputs", "scores weights", "scores backward"] if split else ["scores backward"]
    kinds = [layer for layer, _ in model.layer_kinds(range(model.layers + model.mtp_layers))]
    pieces: list[Piece] = [(what, layer) for what in layers for layer in kinds]
    pieces += [(what, 0) for what in scores]
    return [*pieces, ("begin", 0), ("end", 0)] if layout.tp > 1 and not layout.async_tp else pieces


def can_fold(layout: Layout) -> bool:
    """Return whether actions can be folded: not with ZeRO-3, which gathers weights across their borders."""
    return layout.zero_in_step < 3


class PieceAlone(TrainingStep):
    """Program of one piece of an action alone, on every rank."""

    async def run_piece(self, piece: Piece) -> None:
        """Run the piece, until it is done."""
        await self._issue_piece(piece)

    def _issue_piece(self, piece: Piece) -> Future[Any]:
        """Issue one piece as the full step would; return its last operation."""
        kind, layer = piece
        x = self._shard
        if kind == "layer":
            return cast("Future[Any]", self._forward_layer(layer, x, "forward"))
        if kind in ("backward", "inputs"):
            return cast("Future[Any]", self._backward_layer(0, layer, x, False, with_weights=kind == "backward"))
        if kind == "scores":
            return self._issue_compute(
                "scores", self._amounts.vocabulary_scores(), self._gather_rows(x), gives=self._token_values
            )
        if kind == "begin":
            return self._issue_compute("begin", self._amounts.vocabulary_scores().times(0.0), self._gather_rows(x))
        if kind == "end":
            return self._reduce_rows(self._issue_compute("end", self._amounts.vocabulary_scores().times(0.0)))
        if kind in ("weights", "scores weights"):
            work = self._amounts.weight_gradients(layer) if kind == "weights" else self._amounts.vocabulary_gradients()
            return self._issue_compute("weights backward" if kind == "weights" else kind, work)
        work = self._amounts.vocabulary_scores(2.0 if kind == "scores backward" else 1.0)
        return self._reduce_rows(self._issue_compute("scores backward", work))


class FoldedStep(TrainingStep):
    """The training step of one rank, in which most actions are one compute.

    Args:
        rank: The rank.
        amounts: Amounts of the model.
        pieces: Times of the pieces of actions.
        count_piece: Called with each folded piece and its number, which is less than 0 for pieces issued on their own.
    """

    def __init__(
        self, rank: Rank, amounts: Amounts, pieces: SimulatedPieces, count_piece: Callable[[Piece, float], None]
    ) -> None:
        super().__init__(rank, amounts)
        self._pieces, self._count_piece = pieces, count_piece

    def _forward_stage(self, stage: int, x: object) -> Future[Any]:
        """Issue the forward pass of a stage as one compute; in full if it waits for gathered weights."""
        if self._weights.waits_for_gather(stage):
            return super()._forward_stage(stage, x)
        if stage == 0:
            x = self._reduce_rows(self._issue_compute("embedding", self._amounts.embedding(), x))
        pieces: dict[Piece, int] = self._layer_pieces("layer", stage)
        if stage == self._last_stage:
            pieces["scores", 0] = 1
            return self._add_up_loss(
                self._issue_folded(
                    "forward", self._without_first_exchange(pieces), self._gather_outside(x), self._token_values
                )
            )
        return self._fold_action(
            "forward",
            self._without_first_exchange(pieces),
            self._gather_outside(x),
            reduces=self._reduces_outside(stage),
        )

    def _gather_outside(self, x: object) -> object:
        """Issue the first exchange of an action on its own, unless it is asynchronous, and so under computes."""
        return x if self._layout.async_tp else self._gather_rows(x)

    def _without_first_exchange(self, pieces: dict[Piece, int]) -> dict[Piece, int]:
        """Return pieces less the first exchange, which is issued on its own as it may overlap the action before."""
        enters = self._layout.tp > 1 and self._layout.sequence_parallel and not self._layout.async_tp
        return {**pieces, ("begin", 0): -1} if enters else pieces

    def _backward_stage(self, stage: int, dy: object, last: bool, *, whole: bool) -> Future[Any]:
        """Issue the backward pass of a stage as one compute; in full if it reduces gradients."""
        if last or self._layout.zero_in_step == 2:
            return super()._backward_stage(stage, dy, last, whole=whole)
        pieces = self._layer_pieces("backward" if whole else "inputs", stage)
        if stage == self._last_stage:
            pieces["scores backward" if whole else "scores inputs", 0] = 1
        elif self._layout.checkpointing == "full" or not self._gathers_routed(stage):
            pieces, dy = self._without_first_exchange(pieces), self._gather_outside(dy)
        return self._fold_action("backward", pieces, dy, reduces=self._exchanges_outside)

    def _stage_weight_gradients(self, stage: int, last: bool) -> Future[Any]:
        """Issue the gradients of weights as one compute; in full if they are reduced."""
        if last or self._layout.zero_in_step == 2:
            return super()._stage_weight_gradients(stage, last)
        pieces = self._layer_pieces("weights", stage)
        if stage == self._last_stage:
            pieces["scores weights", 0] = 1
        return self._issue_folded("weights", pieces, None, self._full_rows)

    def _reduces_outside(self, stage: int) -> bool:
        """Return whether the forward pass of a stage ends with an exchange; that of routed tokens is inside."""
        return self._exchanges_outside and not self._gathers_routed(stage)

    @property
    def _exchanges_outside(self) -> bool:
        """Whether actions begin and end with exchanges of tp that do not overlap their computes."""
        return self._layout.tp > 1 and not self._layout.async_tp

    def _gathers_routed(self, stage: int) -> bool:
        """Return whether the last layer of a stage has experts whose tokens the ranks of tp gather."""
        return self._amounts.gathers_routed and self._model.has_experts(self._stage_layers(stage)[-1])

    def _fold_action(self, what: str, pieces: dict[Piece, int], x: object, *, reduces: bool) -> Future[Any]:
        """Issue an action as one compute, and its last exchange on its own: it may overlap the next action."""
        if not reduces:
            return self._issue_folded(what, pieces, x, self._shard)
        return self._reduce_rows(self._issue_folded(what, {**pieces, ("end", 0): -1}, x, self._full_rows))

    def _layer_pieces(self, what: PieceKind, stage: int) -> dict[Piece, int]:
        """Return the pieces of one kind for all layers of a stage, with their numbers."""
        return {(what, layer): number for layer, number in self._stage_kinds(stage)}

    def _stage_kinds(self, stage: int) -> list[tuple[int, int]]:
        """Return (layer, number) by kind for a stage; the layer is the first one of its kind in the model."""
        model = self._model
        first = {model.has_experts(layer): layer for layer, _ in reversed(model.layer_kinds(range(model.layers)))}
        return [
            (first[model.has_experts(layer)], number) for layer, number in model.layer_kinds(self._stage_layers(stage))
        ]

    def _issue_folded(self, what: str, pieces: dict[Piece, int], x: object, gives: object) -> Future[Any]:
        """Issue a compute that takes the sum of the times of pieces, and count these pieces."""
        for piece, times in pieces.items():
            self._count_piece(piece, times)
        total_ns = sum(times * self._pieces.ns(piece) for piece, times in pieces.items())
        return self._rank.compute(lambda *_: gives, x, name=f"{FOLDED} {what}", seconds=total_ns / 1e9)
