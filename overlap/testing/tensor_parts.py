"""Parts of distributed tensors: their names, digests, and the ranks that have the same part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ..torch.tensors import as_array


def shard_label(value: torch.Tensor, rank: int) -> str:
    """Return a text that names a rank's shard of a tensor, such as " [part 0, 1]"; "" if the rank has the whole tensor.

    Args:
        value: A distributed tensor: the text has the rank's coordinates in the sharded dims of the mesh. A parameter of
            FSDP1: the text has the rank. Or another tensor.
        rank: The rank.
    """
    if getattr(value, "_fsdp_flattened", False):
        return f" [part {rank}]"
    placements = getattr(value, "placements", ())
    mesh = getattr(value, "device_mesh", None)
    if mesh is None:
        return ""
    at = [f"{c}" for c, p in zip(mesh.get_coordinate() or (), placements, strict=False) if p.is_shard()]
    return f" [part {', '.join(at)}]" if at else ""


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a distributed tensor; another tensor itself."""
    return getattr(value, "_local_tensor", value)


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes, or "" for a dtype that numpy lacks."""
    try:
        data = as_array(tensor.detach().contiguous())
    except ValueError:  # of a type that has no array
        return ""
    return xxhash.xxh64_hexdigest(data.reshape(-1).view("u1").data)


def ranks_with_same_part(value: torch.Tensor) -> tuple[int, ...]:
    """Return the ranks that have the same part of a distributed tensor as this rank; () for another tensor."""
    placements = getattr(value, "placements", ())
    at = value.device_mesh.get_coordinate() if placements else None
    if at is None or any(placement.is_partial() for placement in placements):
        return ()
    index = tuple(slice(None) if p.is_replicate() else c for p, c in zip(placements, at, strict=True))
    return tuple(value.device_mesh.mesh[index].reshape(-1).tolist())


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a tensor, and its position in the whole tensor.

    Attributes:
        tensor: The part.
        placements: For a distributed tensor, the placement in each dim of its mesh; (): another tensor.
        at: The rank's coordinates in the mesh.
    """

    tensor: torch.Tensor
    placements: tuple[Any, ...] = ()
    at: tuple[int, ...] = ()

    @staticmethod
    def of(value: torch.Tensor) -> Part | None:
        """Return this rank's part of a tensor; None if the rank is not in its mesh, or has no memory of it."""
        local = local_tensor(value)
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout is not torch.strided:
            return None
        placements = tuple(getattr(value, "placements", ()))
        at = value.device_mesh.get_coordinate() if placements else ()
        return None if at is None else Part(local.detach(), placements, tuple(at))

    def copy(self) -> Part:
        """Return the same part with a copy of its tensor."""
        return Part(self.tensor.clone(), self.placements, self.at)


def join_parts(parts: Sequence[Part]) -> torch.Tensor:
    """Return the whole tensor from all of its parts.

    If several mesh dims split one dim of the tensor, the first mesh dim splits it into the largest pieces; a strided
    placement makes the smallest pieces. So parts are joined from the last mesh dim to the first, strided ones first.
    """
    placements = parts[0].placements
    pieces = {part.at: part.tensor for part in parts}
    strided = [dim for dim, placement in enumerate(placements) if "Strided" in type(placement).__name__]
    for dim in [*strided, *(dim for dim in reversed(range(len(placements))) if dim not in strided)]:
        # Pieces whose positions differ only in this mesh dim become one piece.
        groups: dict[tuple[int, ...], list[tuple[int, torch.Tensor]]] = {}
        for position, tensor in pieces.items():
            groups.setdefault((*position[:dim], 0, *position[dim + 1 :]), []).append((position[dim], tensor))
        split = placements[dim].dim if placements[dim].is_shard() or dim in strided else None
        pieces = {}
        for position, group in groups.items():
            tensors = [tensor for _, tensor in sorted(group, key=lambda pair: pair[0])]
            if placements[dim].is_partial():
                total = torch.stack(tensors).sum(0)
                pieces[position] = total / len(tensors) if placements[dim].reduce_op == "avg" else total
            else:
                pieces[position] = tensors[0] if split is None else torch.cat(tensors, split)
    return next(iter(pieces.values()))


def join_along_dim(tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor | None:
    """Join tensors along the dim in which their lengths add up to that of `shape`; None if there is no such dim.

    Tensors of shapes (2, 3) and (2, 5) and `shape` (2, 8) are joined along dim 1. If the first has this shape, it is
    returned alone.
    """
    if tuple(tensors[0].shape) == tuple(shape):
        return tensors[0]
    for dim, size in enumerate(shape):
        others = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
        if others == {(*shape[:dim], *shape[dim + 1 :])} and sum(tensor.shape[dim] for tensor in tensors) == size:
            return torch.cat(list(tensors), dim)
    return None
