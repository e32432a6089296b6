"""Operations of a process group that combine tensors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from math import prod
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from ..runtime.group import Group
from .errors import CallError
from .issuing import Issuing, Tensors, get_root, list_parts
from .operations import CallKey, c10d_operation, users_frame
from .tensors import (
    check_memory,
    check_same_kind,
    check_same_shape,
    copy_to_each,
    flat_input,
    flat_output,
    list_tensors,
    one_tensor,
    share_storage,
)
from .work import Handle, JoinedOperations, Work


class Reductions(Issuing):
    """all_reduce, reduce, reduce_scatter, in the forms that torch has of them.

    c10d passes operator, root and time limit in an options object `opts`, or as arguments, which take precedence. The
    defaults are a sum, rank 0, and the time limit of the group. Each method returns a `Work` at once, and raises
    `CallError` for arguments that do not fit.
    """

    @c10d_operation("allreduce_", "all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, op: Any = None) -> Work:
        """Combine a tensor of each rank; all ranks get the result in place.

        Args:
            tensors: A tensor, or a list of tensors of one shape and dtype. The tensors of a list are combined with each
                other, too, and all get the same result.
            opts: Options of c10d, with operator and time limit, or an operator.
            timeout: Time limit; None: that of the options.
            op: Operator; None: that of the options.
        """
        key: CallKey | None = None
        # Only a call in the form of `dist.all_reduce` is kept, under a key with everything that its operation depends
        # on.
        usual = type(opts) is dist.AllreduceOptions and op is timeout is None
        if usual and type(tensors) is list and len(tensors) == 1:
            x = tensors[0]
            key = "all_reduce", x.dtype, x.numel(), opts.reduceOp.op.value
            if (work := self._reissue_call(key, x, x, opts, tensors)) is not None:
                return work
        inputs = list_tensors(tensors, "tensors")
        reduction, limit = self._reduction_and_limit(inputs[0], opts, timeout, op)
        if len(inputs) > 1:
            check_same_kind(inputs, "tensors")
            check_same_shape(inputs, "tensors")
        if inputs[0].layout is not torch.strided:
            return _sum_sparse(self._group, inputs, reduction, limit)
        if len(inputs) == 1:
            return Work(self._issue_all_reduce(inputs[0], reduction, limit, key), inputs)
        first = _combine_local_tensors(inputs, reduction[0])
        joined = JoinedOperations(
            [self._issue_all_reduce(first, reduction, limit)], lambda: copy_to_each(first, inputs)
        )
        return Work(joined, inputs)

    @c10d_operation("allreduce_coalesced_", "all_reduce")
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Combine several tensors of each rank, each for itself and in place; `opts`: see `Reductions`."""
        tensors = list_tensors(tensors, "tensors")
        check_same_kind(tensors, "tensors")
        check_memory(tensors)
        op, limit = self._reduction_and_limit(tensors[0], opts, None)
        (name, factor), (fused, rest) = op, self._split_indices_by_size(tensors, tensors)
        handles = [self._issue_all_reduce(tensors[i], op, limit) for i in rest]
        small = [tensors[i] if factor is None else tensors[i].mul_(factor) for i in fused]
        return Work(
            JoinedOperations([*handles, *self._issue_fused("all_reduce", small, small, name, limit=limit)]), tensors
        )

    def _issue_all_reduce(self, tensor: torch.Tensor, op: Any, limit: float, key: CallKey | None = None) -> Handle:
        """Issue the all-reduce of one tensor in place; if `op`, (name, factor or None), has a factor, multiply first.

        A call with a factor is not kept under `key`, because the multiplication must be done each time.
        """
        name, factor = op
        if factor is not None:
            tensor.mul_(factor)
        out, copy_back = flat_output(tensor)
        return self._issue_operation(copy_back, "all_reduce", out, name, out, limit=limit, key=None if factor else key)

    @c10d_operation("reduce_", "reduce")
    def reduce(
        self, tensors: Any, root: Any = None, op: Any = None, timeout: timedelta | None = None, opts: Any = None
    ) -> Work:
        """Combine a tensor of each rank on the root; do not rely on the tensors of other ranks afterwards.

        Args:
            tensors: The tensor, or a list with only this tensor; on the root it gets the result.
            root: Group rank of the root, or options of c10d.
            op: Operator; None: that of the options.
            timeout: Time limit; None: that of the options.
            opts: Options of c10d, with operator, root and time limit. Their root takes precedence over `root`.
        """
        tensor = one_tensor(tensors, "tensors")
        if opts is None and not hasattr(root, "__index__"):  # c10d's form reduce(tensors, opts), or no root
            opts = root
        (name, factor), limit = self._reduction_and_limit(tensor, opts, timeout, op)
        # the options, if there are any, name the root
        dst = get_root(root if opts is None else opts, None)
        key: CallKey | None = None
        if factor is not None:
            # such a call is not kept: the multiplication must come first each time
            tensor.mul_(factor)
        elif timeout is None:  # a call like an earlier one, by its key, is issued again without its checks
            key = "reduce", tensor.dtype, tensor.numel(), name, dst
            result = tensor if self._group.rank == dst else None
            if (work := self._reissue_call(key, tensor, result, opts, [tensor])) is not None:
                return work
        if self._group.rank != dst:
            handle = self._issue_operation(None, "reduce", flat_input(tensor), dst, name, limit=limit, key=key)
            return Work(handle, [tensor])
        out, copy_back = flat_output(tensor)
        return Work(self._issue_operation(copy_back, "reduce", out, dst, name, out, limit=limit, key=key), [tensor])

    @c10d_operation("reduce_scatter_", "reduce_scatter")
    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        op: Any = None,
    ) -> Work:
        """Combine lists of tensors: rank r gets the combination of the r-th tensors of all ranks.

        Args:
            output_tensors: The tensor that gets the result, or a list with only this tensor.
            input_tensors: A list with a tensor for each rank, or a list that has only this list; sizes may differ.
            opts: Options of c10d, with operator and time limit, or an operator.
            timeout: Time limit; None: that of the options.
            op: Operator; None: that of the options.
        """
        output = one_tensor(output_tensors, "output_tensors")
        parts = list_parts(input_tensors, "input_tensors")
        self._check_tensor_count(parts, "input_tensors")
        check_same_kind([output, *parts], "output, input_tensors")
        (name, factor), limit = self._reduction_and_limit(output, opts, timeout, op)
        flat = torch.cat([part.reshape(-1) for part in parts])
        if factor is not None:
            flat.mul_(factor)
        counts = [part.numel() for part in parts]
        even = None if len(set(counts)) == 1 else counts
        return Work(self._issue_reduce_scatter(output, flat, name, limit, even), [output])

    @c10d_operation("_reduce_scatter_base_", "reduce_scatter")
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Combine a tensor of each rank; rank r gets the r-th part of the result.

        Args:
            output: Tensor that gets this rank's part.
            input: The whole tensor of this rank.
            opts: See `Reductions`.
        """
        key: CallKey | None = None
        if type(opts) is dist.ReduceScatterOptions:
            key = "reduce_scatter", input.dtype, input.numel(), opts.reduceOp.op.value, output.dtype, output.numel()
            if (work := self._reissue_call(key, input, output, opts, [output])) is not None:
                return work
        (name, factor), limit = self._reduction_and_limit(input, opts, None)
        x = input if factor is None else input * factor
        return Work(self._issue_reduce_scatter(output, x, name, limit, key=None if factor else key), [output])

    @c10d_operation("reduce_scatter_tensor_coalesced_", "reduce_scatter")
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Combine several tensors of each rank, each for itself; rank r gets the r-th part of each result.

        Args:
            outputs: A tensor for each input, which gets this rank's part.
            inputs: Whole tensors of this rank.
            opts: See `Reductions`.
        """
        outputs, inputs = self._check_outputs_and_inputs(outputs, inputs, joined_side="inputs")
        (name, factor), limit = self._reduction_and_limit(inputs[0], opts, None)
        scaled = [x if factor is None else x * factor for x in inputs]
        fused, rest = self._split_indices_by_size(outputs, scaled)
        handles = [self._issue_reduce_scatter(outputs[i], scaled[i], name, limit) for i in rest]
        outs, xs = [outputs[i] for i in fused], [scaled[i] for i in fused]
        return Work(
            JoinedOperations([*handles, *self._issue_fused("reduce_scatter", outs, xs, name, limit=limit)]), outputs
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _issue_reduce_scatter(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        op: str,
        limit: float,
        counts: list[int] | None = None,
        key: CallKey | None = None,
    ) -> Handle:
        """Issue a reduce-scatter to an output that may overlap the whole tensor `x` of this rank.

        `counts` has the number of elements of each rank's part; None: all are equal.
        """
        check_same_kind([output, x], "output, input")
        source = flat_input(x)
        if share_storage(output, x):
            source = source.copy()
        out, copy_back = flat_output(output)
        return self._issue_operation(copy_back, "reduce_scatter", source, op, out, counts=counts, limit=limit, key=key)


# By operator: the function that combines tensors of one rank. A mean is a sum here, because c10d divides by the number
# of ranks, not by that of tensors.
_LOCAL_OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def _combine_local_tensors(tensors: Tensors, op: str) -> torch.Tensor:
    """Combine tensors of one shape of this rank, and return the result, which overwrites the first tensor."""
    first = tensors[0].detach()
    for other in tensors[1:]:
        _LOCAL_OPERATORS[op](first, other.detach(), out=first)
    return first


def _sum_sparse(group: Group, tensors: Tensors, op: tuple[str, Any], limit_s: float) -> Work:
    """Sum the sparse tensors of all ranks in place; block until the numbers of elements of all have come.

    The tensors are in coordinate layout, with equally many sparse axes on all ranks; each gets the sum. `op` must be
    ("sum", None). It costs an all-gather of the numbers of elements, then one of positions and one of values. Raises a
    `CallError` for another layout, or if the reduction is no plain sum.
    """
    tensor, *others = tensors
    if tensor.layout is not torch.sparse_coo:
        raise CallError(f"tensor: it is {tensor.layout}; backend 'overlap' sums sparse_coo tensors; pass .to_dense()")
    if op != ("sum", None):
        raise CallError(f"op: sparse tensors can be summed only, got {op[0]!r}; pass .to_dense()")
    # first the sum of this rank's tensors, then the numbers of elements of all ranks, then positions and values
    local = tensor.detach().coalesce()
    for addend in others:
        local = (local + addend.detach()).coalesce()
    count, axes = len(local.values()), local.sparse_dim()
    call: dict[str, Any] = {"timeout_s": limit_s, "call_site": users_frame()}
    counts, all_axes = group.all_gather(np.array([count, axes], np.int64), **call).result().reshape(-1, 2).T.tolist()
    if set(all_axes) != {axes}:
        raise CallError(f"tensor: expected equally many sparse axes on all ranks, got {all_axes}")
    width = prod(local.shape[axes:])  # number of values at each position
    places = flat_input(local.indices().t().contiguous()).reshape(-1, axes)
    values = flat_input(local.values().contiguous()).reshape(-1, width)
    gathered = [group.all_gather(x, counts=counts, **call) for x in (places, values)]

    def sum_gathered() -> None:
        indices, values = (torch.from_numpy(np.array(future.result(0))) for future in gathered)
        shape = (sum(counts), *local.shape[axes:])
        total = torch.sparse_coo_tensor(indices.t(), values.reshape(shape), local.shape, check_invariants=False)
        copy_to_each(total.coalesce(), tensors)

    return Work(JoinedOperations(cast("list[Handle]", gathered), sum_gathered), tensors)
