"""Parts of distributed tensors: their names, digests, and the ranks that have the same part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ..torch.tensors import as_array


def part_label(value: torch.Tensor, rank: int) -> str:
    """Return the part of a distributed tensor, or of FSDP1's parameter, that a rank has; "" is all of it."""
    if getattr(value, "_fsdp_flattened", False):
        return f" [part {rank}]"
    placements = getattr(value, "placements", ())
    mesh = getattr(value, "device_mesh", None)
    if mesh is None:
        return ""
    at = [f"{c}" for c, p in zip(mesh.get_coordinate() or (), placements, strict=False) if p.is_shard()]
    return f" [part {', '.join(at)}]" if at else ""


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return the part of a distributed tensor that this rank has."""
    return getattr(value, "_local_tensor", value)


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes; "" for a dtype that numpy lacks."""
    try:
        data = as_array(tensor.detach().contiguous())
    except ValueError:  # of a type that has no array
        return ""
    return xxhash.xxh64_hexdigest(data.reshape(-1).view("u1").data)


def same_ranks(value: torch.Tensor) -> tuple[int, ...]:
    """Return the ranks that have the same part of a distributed tensor; empty for another one."""
    placements = getattr(value, "placements", ())
    at = value.device_mesh.get_coordinate() if placements else None
    if at is None or any(placement.is_partial() for placement in placements):
        return ()
    index = tuple(slice(None) if p.is_replicate() else c for p, c in zip(placements, at, strict=True))
    return tuple(value.device_mesh.mesh[index].reshape(-1).tolist())


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that a rank has, and where it is in the whole one.

    Attributes:
        placements: Of a distributed tensor, for each dim of its mesh; empty: the part may be all.
        at: The rank's coordinate in the mesh.
    """

    tensor: torch.Tensor
    placements: tuple[Any, ...] = ()
    at: tuple[int, ...] = ()

    @staticmethod
    def of(value: torch.Tensor) -> Part | None:
        """Return the part that this rank has of a tensor; None if it has none, or an uninitialised one."""
        local = local_tensor(value)
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout is not torch.strided:
            return None
        placements = tuple(getattr(value, "placements", ()))
        at = value.device_mesh.get_coordinate() if placements else ()
        return None if at is None else Part(local.detach(), placements, tuple(at))

    def copy(self) -> Part:
        """Return a part with memory of its own."""
        return Part(self.tensor.clone(), self.placements, self.at)


def join_parts(parts: Sequence[Part]) -> torch.Tensor:
    """Return the whole tensor of all its parts.

    Dims of a mesh that split one dim of the tensor do so in their order, the first one coarsest; where a strided one
    does, it is the finest.
    """
    placements = parts[0].placements
    pieces = {part.at: part.tensor for part in parts}
    strided = [dim for dim, placement in enumerate(placements) if "Strided" in type(placement).__name__]
    for dim in [*strided, *(dim for dim in reversed(range(len(placements))) if dim not in strided)]:
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


def join_along(tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor | None:
    """Return plain tensors joined along the dim in which they are shorter than `shape`; None if they do not fit."""
    if tuple(tensors[0].shape) == tuple(shape):
        return tensors[0]
    for dim, size in enumerate(shape):
        others = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
        if others == {(*shape[:dim], *shape[dim + 1 :])} and sum(tensor.shape[dim] for tensor in tensors) == size:
            return torch.cat(list(tensors), dim)
    return None
