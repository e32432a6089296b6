"""Data and weights of ranks that stand for others: recorded before updates, and joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .tensor_parts import Part, digest, join_along, join_parts


class StopRun(SystemExit):
    """Ends a rank that has made all updates that are compared."""


@dataclass(slots=True)
class Loss:
    """A scalar whose backward pass was run."""

    value: float
    scale: float  # by which a mean was multiplied
    is_mean: bool
    adds: bool  # whether there were gradients already
    line: str


@dataclass(slots=True)
class UpdateRecord:
    """All that came before one update of a rank."""

    data: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, Part] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    gradients: dict[str, Part] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # learning rates, by the name of a parameter
    line: str = ""  # of the update
    draws: str = ""  # the line of a model's forward that draws random numbers
    issued: int = 0  # operations of the rank before the update


class Declined(StopRun):
    """Runs cannot be compared; the text has the reason."""


class Substitute:
    """Data and weights of ranks that stand for others, of which each gets the joined data.

    Args:
        classes: For each rank, the ranks for which it stands.
        models: For each rank, ranks with the same weights, whose parts make its own.
        updates: Before which of the first updates ranks get weights, too.
        steps: For each rank, its first updates.
    """

    def __init__(
        self,
        steps: list[list[UpdateRecord]],
        classes: list[list[int]],
        models: list[list[list[int]]],
        *,
        updates: int = 2,
    ) -> None:
        self._steps, self._classes, self._updates = steps, classes, updates
        self.models: list[list[list[int]]] = models
        self.declined: Declined | None = None

    def _decline(self, reason: str) -> Declined:
        self.declined = Declined(reason)
        return self.declined

    def joined_weight(self, rank: int, step: int, name: str, own: Part) -> torch.Tensor | None:
        """Return the joined values of a parameter before update `step`; None: the rank's own values stay."""
        if step >= self._updates:
            return None
        of_ranks = [steps[step].weights if step < len(steps) else {} for steps in self._steps]
        values = join_whole(name, of_ranks, self.models[rank], own.tensor.shape)
        if values is None:
            raise self._decline(f"the parts of '{name}' do not make one of shape {tuple(own.tensor.shape)}")
        return values

    def joined_datum(self, rank: int, step: int, number: int, own: torch.Tensor) -> torch.Tensor:
        """Return the joined data in place of a rank's own."""
        pieces: dict[str, torch.Tensor] = {}
        for each in self._classes[rank]:
            data = self._steps[each][step].data if step < len(self._steps[each]) else []
            if number >= len(data):
                raise self._decline("the number of batches of an update depends on the number of ranks")
            pieces.setdefault(digest(data[number]) + str(tuple(data[number].shape)), data[number])
        joined = _join_pieces(list(pieces.values()), own)
        if isinstance(joined, str):
            raise self._decline(joined)
        # data that the program takes of joined data is right already, and may have another order
        return own if joined.numel() == own.numel() and _sorted_values(joined).equal(_sorted_values(own)) else joined


def _join_pieces(pieces: list[torch.Tensor], alone: torch.Tensor) -> torch.Tensor | str:
    """Return the data of all ranks as one tensor, or the reason why it cannot be joined.

    Pieces are joined along the first dim. If another dim is split as well, consecutive ranks have the parts along it.

    Args:
        pieces: Data of the ranks, each different piece once.
        alone: Data of one rank that runs alone, for its shape.
    """
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if not first.ndim:
        is_sum = torch.allclose(alone.double(), torch.stack(pieces).sum().double())
        return alone if is_sum else "a number that is computed of the data differs"
    if any(piece.shape != first.shape for piece in pieces) or alone.ndim != first.ndim:
        return f"batches of ranks have different shapes, such as {tuple(first.shape)} and {tuple(pieces[-1].shape)}"
    cut_dims = [dim for dim in range(1, alone.ndim) if alone.shape[dim] > first.shape[dim]]
    parts = {dim: alone.shape[dim] // first.shape[dim] for dim in cut_dims}
    if len(parts) > 1 or any(len(pieces) % count for count in parts.values()):
        return f"data of shape {tuple(first.shape)} on {len(pieces)} ranks is no part of {tuple(alone.shape)}"
    for dim, count in parts.items():
        pieces = [torch.cat(pieces[at : at + count], dim) for at in range(0, len(pieces), count)]
    return torch.cat(pieces)


def _sorted_values(data: torch.Tensor) -> torch.Tensor:
    return data.flatten().sort().values


def join_whole(
    name: str, parts_of_ranks: Sequence[dict[str, Part]], ranks_by_part: list[list[int]], shape: Sequence[int]
) -> torch.Tensor | None:
    """Return the whole tensor of a name from its parts on several ranks.

    Args:
        name: Name of the tensor.
        parts_of_ranks: Parts by name, for each rank.
        ranks_by_part: Ranks that hold the same part, for each part.
        shape: Shape of the whole tensor.

    Returns:
        None if the parts do not make a tensor of this shape.
    """
    named_parts = [parts[name] for parts in parts_of_ranks if name in parts]
    placements = named_parts[0].placements if named_parts else ()
    first_of_part = [
        next((parts_of_ranks[rank][name].tensor for rank in ranks if name in parts_of_ranks[rank]), None)
        for ranks in ranks_by_part
    ]
    own_part = first_of_part[0]
    has_shape = own_part is not None and own_part.shape == torch.Size(shape)
    if placements and (not has_shape or any(placement.is_partial() for placement in placements)):
        values = join_parts(named_parts)
        return values if values.shape == torch.Size(shape) else None
    tensors = [tensor for tensor in first_of_part if tensor is not None]
    return join_along(tensors, shape) if tensors else None
