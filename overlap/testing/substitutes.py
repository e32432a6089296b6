"""Data and weights for a run with fewer ranks: joined from the records of the ranks of a larger run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .tensor_parts import Part, digest, join_along_dim, join_parts


class StopRun(SystemExit):
    """Ends a rank that has made all updates that are compared."""


@dataclass(slots=True)
class Loss:
    """A loss whose backward pass was run."""

    value: float
    scale: float  # number by which a mean was multiplied to give the loss
    is_mean: bool  # whether the loss is a mean, perhaps times a number
    adds: bool  # whether parameters had gradients already, to which it adds
    line: str  # line of the backward call


@dataclass(slots=True)
class UpdateRecord:
    """Record of one update of a rank: everything since the update before."""

    data: list[torch.Tensor] = field(default_factory=list)  # tensors that entered models, in order
    weights: dict[str, Part] = field(default_factory=dict)  # by name, before the first forward
    losses: list[Loss] = field(default_factory=list)
    gradients: dict[str, Part] = field(default_factory=dict)  # by name of a parameter
    rates: dict[str, float] = field(default_factory=dict)  # learning rates, by name of a parameter
    line: str = ""  # line of the update
    draws: str = ""  # line of a model's forward that draws random numbers; "": none does
    issued: int = 0  # number of operations that the rank had issued before the update


class Declined(StopRun):
    """Runs cannot be compared; the text has the reason."""


class Substitute:
    """Source of data and weights for the ranks of a smaller run, each of which replaces several ranks.

    Attributes:
        models: As passed.
        declined: Why data or weights could not be joined; None: they could.

    Args:
        steps: For each rank of the larger run, the records of its first updates.
        classes: For each rank of the smaller run, the ranks whose data it gets.
        models: For each rank of the smaller run: one list of ranks for each part of its weights, which hold that part.
        updates: Number of first updates before which the ranks get weights, too.
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

    def _make_declined_error(self, reason: str) -> Declined:
        """Return the error that runs cannot be compared, and store it in `declined` for the code outside of ranks."""
        self.declined = Declined(reason)
        return self.declined

    def joined_weight(self, rank: int, step: int, name: str, own: Part) -> torch.Tensor | None:
        """Return the values that a parameter should have before an update; None if it keeps its values.

        Args:
            rank: The rank of the smaller run.
            step: The number of the update, from 0; from `updates` on, parameters keep their values.
            name: Name of the parameter.
            own: The rank's present values; only their shape is used.

        Raises:
            Declined: The recorded parts do not make a parameter of that shape.
        """
        if step >= self._updates:
            return None
        of_ranks = [steps[step].weights if step < len(steps) else {} for steps in self._steps]
        values = join_whole_tensor(name, of_ranks, self.models[rank], own.tensor.shape)
        if values is None:
            raise self._make_declined_error(f"the parts of '{name}' do not make one of shape {tuple(own.tensor.shape)}")
        return values

    def joined_datum(self, rank: int, step: int, number: int, own: torch.Tensor) -> torch.Tensor:
        """Return the data of all ranks that a rank replaces, joined.

        Args:
            rank: The rank of the smaller run.
            step: The number of the update, from 0.
            number: Index of the tensor among those that enter models before the update.
            own: The rank's own data, for the shape.

        Raises:
            Declined: The data of the ranks cannot be joined.
        """
        pieces: dict[str, torch.Tensor] = {}
        for each in self._classes[rank]:
            data = self._steps[each][step].data if step < len(self._steps[each]) else []
            if number >= len(data):
                raise self._make_declined_error(
                    "the number of batches of an update depends on the number of ranks; make it equal"
                )
            pieces.setdefault(digest(data[number]) + str(tuple(data[number].shape)), data[number])
        joined = _join_pieces(list(pieces.values()), own)
        if isinstance(joined, str):
            raise self._make_declined_error(joined)
        # Data that the program has computed from joined data is right already, perhaps in another order.
        return own if joined.numel() == own.numel() and _sorted_values(joined).equal(_sorted_values(own)) else joined


def _join_pieces(pieces: list[torch.Tensor], alone: torch.Tensor) -> torch.Tensor | str:
    """Return the data of all ranks as one tensor, or the reason why it cannot be joined.

    Pieces, each different one once, are joined along the first dim. If another dim is split as well, consecutive ranks
    hold the parts along it: pieces of shape (2, 3) of four ranks give (8, 3), or (4, 6) if `alone` has shape (n, 6).
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
    """Return all elements in ascending order, to compare data regardless of its order."""
    return data.flatten().sort().values


def join_whole_tensor(
    name: str, parts_of_ranks: Sequence[dict[str, Part]], ranks_by_part: list[list[int]], shape: Sequence[int]
) -> torch.Tensor | None:
    """Return the whole tensor `name` from its parts on several ranks; None if they do not make one of this shape.

    Args:
        name: Name of the tensor.
        parts_of_ranks: For each rank, its parts by name.
        ranks_by_part: For each part, the ranks that hold it.
        shape: Shape of the whole tensor.
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
    return join_along_dim(tensors, shape) if tensors else None
