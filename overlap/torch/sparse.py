"""Sums of sparse tensors: every rank gets the elements of all, and adds up those at one place."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from ..runtime.group import Group
from .calling import users_frame
from .tensors import flat_input
from .work import Handle, Joined, Work


def all_reduce(group: Group, tensor: torch.Tensor, op: tuple[str, Any], limit_s: float) -> Work:
    """Add up the sparse tensors of all ranks, in place; returns once all ranks have said how many elements they have.

    Args:
        group: Of the ranks.
        tensor: In coordinate layout, with the same axes on all ranks.
        op: The reduction asked for, which must be a sum.
        limit_s: How long each part may take.

    Cost: two all-gathers of all elements and their places, after one of their numbers.

    Raises:
        ValueError: If it is in another layout, or not to be summed.
    """
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"tensor: it is {tensor.layout}; backend 'overlap' sums sparse_coo tensors; pass .to_dense()")
    if op != ("sum", None):
        raise ValueError(f"op: sparse tensors can be summed only, got {op[0]!r}; pass .to_dense()")
    mine = tensor.detach().coalesce()
    count, axes = len(mine.values()), mine.sparse_dim()
    said: dict[str, Any] = {"timeout_s": limit_s, "call_site": users_frame()}
    told = group.all_gather(np.array([count, axes], np.int64), **said).result().reshape(-1, 2)
    if (told[:, 1] != axes).any():
        raise ValueError(f"tensor: all ranks must have as many sparse axes, they have {told[:, 1].tolist()}")
    counts = told[:, 0].tolist()
    width = mine.values()[0:1].numel() if count else _width(mine)
    places = flat_input(mine.indices().t().contiguous()).reshape(-1, axes)
    values = flat_input(mine.values().contiguous()).reshape(-1, width)
    gathered = [group.all_gather(x, counts=counts, **said) for x in (places, values)]

    def add_up() -> None:
        where, what = (torch.from_numpy(np.array(future.result(0))) for future in gathered)
        shape = (sum(counts), *mine.shape[axes:])
        total = torch.sparse_coo_tensor(where.t(), what.reshape(shape), mine.shape, check_invariants=False)
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    return Work(Joined(cast("list[Handle]", gathered), add_up), [tensor])


def _width(tensor: torch.Tensor) -> int:
    """Return how many numbers lie at one place."""
    return int(np.prod(tensor.shape[tensor.sparse_dim() :], dtype=np.int64))
