"""Operations of a process group that combine tensors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from ..runtime.group import Group
from .errors import CallError
from .issuing import Issuing, Tensors, get_root, list_parts
from .operations import CallKey, operation, users_frame
from .tensors import (
    check_memory,
    copy_to,
    flat_input,
    flat_output,
    list_tensors,
    one_tensor,
    overlaps,
    same_kind,
    same_shape,
)
from .work import Handle, JoinedOperations, Work


class Reductions(Issuing):
    """all_reduce, reduce, reduce_scatter, in the forms that torch has of them."""

    @operation("allreduce_", "all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, op: Any = None) -> Work:
        """Combine a tensor of all ranks, in place; several tensors of one shape are combined with each other too."""
        key: CallKey | None = None
        usual = type(opts) is dist.AllreduceOptions and op is timeout is None
        if usual and type(tensors) is list and len(tensors) == 1:
            x = tensors[0]
            key = "all_reduce", x.dtype, x.numel(), opts.reduceOp.op
            work = self._issue_again(key, x, x, opts, tensors)
            if work is not None:
                return cast(Work, work)
        inputs = list_tensors(tensors, "tensors")
        reduction, limit = self._reduction(inputs[0], opts, timeout, op)
        if len(inputs) > 1:
            same_kind(inputs, "tensors")
            same_shape(inputs, "tensors")
        if inputs[0].layout is not torch.strided:
            return _sum_sparse(self._group, inputs, reduction, limit)
        if len(inputs) == 1:
            return Work(self._all_reduce(inputs[0], reduction, limit, key), inputs)
        first = _combine_local(inputs, reduction[0])
        handle = self._all_reduce(first, reduction, limit)
        return Work(JoinedOperations([handle], lambda: copy_to(inputs, first)), inputs)

    @operation("allreduce_coalesced_", "all_reduce")
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Combine several tensors of all ranks, each in place."""
        tensors = list_tensors(tensors, "tensors")
        same_kind(tensors, "tensors")
        check_memory(tensors)
        op, limit = self._reduction(tensors[0], opts, None)
        (name, factor), (fused, rest) = op, self._split_by_size(tensors, tensors)
        handles = [self._all_reduce(tensors[i], op, limit) for i in rest]
        small = [tensors[i] if factor is None else tensors[i].mul_(factor) for i in fused]
        return Work(
            JoinedOperations([*handles, *self._issue_fused("all_reduce", small, small, name, limit=limit)]), tensors
        )

    def _all_reduce(self, tensor: torch.Tensor, op: Any, limit: float, key: CallKey | None = None) -> Handle:
        """Issue the all-reduce of one tensor, multiplied first if the operator has a factor."""
        name, factor = op
        if factor is not None:
            tensor.mul_(factor)
        out, copy_back = flat_output(tensor)
        return self._issue(copy_back, "all_reduce", out, name, out, limit=limit, key=None if factor else key)

    @operation("reduce_", "reduce")
    def reduce(
        self, tensors: Any, root: Any = None, op: Any = None, timeout: timedelta | None = None, opts: Any = None
    ) -> Work:
        """Combine a tensor of all ranks on the root; the other ranks' tensors are undefined then."""
        tensor = one_tensor(tensors, "tensors")
        opts = opts if opts is not None else None if hasattr(root, "__index__") else root
        (name, factor), limit = self._reduction(tensor, opts, timeout, op)
        dst = get_root(root if opts is None else opts, None)
        key: CallKey | None = None
        if factor is not None:
            tensor.mul_(factor)
        elif timeout is None:
            key = "reduce", tensor.dtype, tensor.numel(), name, dst
            work = self._issue_again(key, tensor, tensor if self._group.rank == dst else None, opts, [tensor])
            if work is not None:
                return cast(Work, work)
        if self._group.rank != dst:
            handle = self._issue(None, "reduce", flat_input(tensor), dst, name, limit=limit, key=key)
            return Work(handle, [tensor])
        out, copy_back = flat_output(tensor)
        return Work(self._issue(copy_back, "reduce", out, dst, name, out, limit=limit, key=key), [tensor])

    @operation("reduce_scatter_", "reduce_scatter")
    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        op: Any = None,
    ) -> Work:
        """Combine a list of tensors, one for each rank, with those of all ranks; rank r keeps the r-th result."""
        output = one_tensor(output_tensors, "output_tensors")
        parts = list_parts(input_tensors, "input_tensors")
        self._check_count(parts, "input_tensors")
        same_kind([output, *parts], "output, input_tensors")
        (name, factor), limit = self._reduction(output, opts, timeout, op)
        flat = torch.cat([part.reshape(-1) for part in parts])
        if factor is not None:
            flat.mul_(factor)
        counts = [part.numel() for part in parts]
        even = None if len(set(counts)) == 1 else counts
        return Work(self._reduce_scatter(output, flat, name, limit, even), [output])

    @operation("_reduce_scatter_base_", "reduce_scatter")
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Combine one tensor of all ranks; rank r keeps the r-th part of the result."""
        key: CallKey | None = None
        if type(opts) is dist.ReduceScatterOptions:
            key = "reduce_scatter", input.dtype, input.numel(), opts.reduceOp.op, output.dtype, output.numel()
        work = None if key is None else self._issue_again(key, input, output, opts, [output])
        if work is not None:
            return cast(Work, work)
        (name, factor), limit = self._reduction(input, opts, None)
        x = input if factor is None else input * factor
        return Work(self._reduce_scatter(output, x, name, limit, key=None if factor else key), [output])

    @operation("reduce_scatter_tensor_coalesced_", "reduce_scatter")
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Combine several tensors of all ranks; rank r keeps the r-th part of each."""
        outputs, inputs = self._check_pairs(outputs, inputs, parts="outputs")
        (name, factor), limit = self._reduction(inputs[0], opts, None)
        scaled = [x if factor is None else x * factor for x in inputs]
        fused, rest = self._split_by_size(outputs, scaled)
        handles = [self._reduce_scatter(outputs[i], scaled[i], name, limit) for i in rest]
        outs, xs = [outputs[i] for i in fused], [scaled[i] for i in fused]
        return Work(
            JoinedOperations([*handles, *self._issue_fused("reduce_scatter", outs, xs, name, limit=limit)]), outputs
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        op: str,
        limit: float,
        counts: list[int] | None = None,
        key: CallKey | None = None,
    ) -> Handle:
        """Issue a reduce-scatter to an output that may overlap its input."""
        same_kind([output, x], "output, input")
        source = flat_input(x)
        if overlaps(output, x):
            source = source.copy()
        out, copy_back = flat_output(output)
        return self._issue(copy_back, "reduce_scatter", source, op, out, counts=counts, limit=limit, key=key)


# How tensors of one rank are combined; a mean is divided by the number of ranks only, as c10d does it.
_LOCALLY: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def _combine_local(tensors: Tensors, op: str) -> torch.Tensor:
    """Combine the tensors of this rank in the first, and return it."""
    first = tensors[0].detach()
    for other in tensors[1:]:
        _LOCALLY[op](first, other.detach(), out=first)
    return first


def _sum_sparse(group: Group, tensors: Tensors, op: tuple[str, Any], limit_s: float) -> Work:
    """Sum the sparse tensors of all ranks in place; returns once their counts of elements have arrived.

    Args:
        tensors: Tensors of this rank, in coordinate layout, with the same axes on all ranks; each becomes the sum.
        op: The reduction asked for, which must be a sum.
        limit_s: How long each part may take.

    Cost: two all-gathers of all elements and their places, after one of their numbers.

    Raises:
        CallError: If they are in another layout, or not to be summed.
    """
    tensor = tensors[0]
    if tensor.layout is not torch.sparse_coo:
        raise CallError(f"tensor: it is {tensor.layout}; backend 'overlap' sums sparse_coo tensors; pass .to_dense()")
    if op != ("sum", None):
        raise CallError(f"op: sparse tensors can be summed only, got {op[0]!r}; pass .to_dense()")
    # First the sum of this rank, then the lengths of all ranks' sums, then their places and values.
    local = tensor.detach().coalesce()
    for addend in tensors[1:]:
        local = (local + addend.detach()).coalesce()
    count, axes = len(local.values()), local.sparse_dim()
    call: dict[str, Any] = {"timeout_s": limit_s, "call_site": users_frame()}
    sizes = group.all_gather(np.array([count, axes], np.int64), **call).result().reshape(-1, 2)
    if (sizes[:, 1] != axes).any():
        raise CallError(f"tensor: expected equally many sparse axes on all ranks, got {sizes[:, 1].tolist()}")
    counts = sizes[:, 0].tolist()
    width = local.values()[0:1].numel() if count else _values_per_index(local)
    places = flat_input(local.indices().t().contiguous()).reshape(-1, axes)
    values = flat_input(local.values().contiguous()).reshape(-1, width)
    gathered = [group.all_gather(x, counts=counts, **call) for x in (places, values)]

    def add_up() -> None:
        indices, values = (torch.from_numpy(np.array(future.result(0))) for future in gathered)
        shape = (sum(counts), *local.shape[axes:])
        total = torch.sparse_coo_tensor(indices.t(), values.reshape(shape), local.shape, check_invariants=False)
        copy_to(tensors, total.coalesce())

    return Work(JoinedOperations(cast("list[Handle]", gathered), add_up), tensors)


def _values_per_index(tensor: torch.Tensor) -> int:
    return int(np.prod(tensor.shape[tensor.sparse_dim() :], dtype=np.int64))
