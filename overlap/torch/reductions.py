"""Operations of a process group that combine tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from . import sparse
from .issuing import Issuing, Tensors, listed, nested
from .tensors import flat_input, flat_output, one_tensor, overlaps, same_kind
from .work import Handle, Joined, Work


class Reductions(Issuing):
    """all_reduce, reduce, reduce_scatter, in the forms that torch has of them."""

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Combine a tensor of all ranks, in place."""
        tensor = one_tensor(listed(tensors), "tensors")
        op, limit = self._reduction(opts, timeout)
        if tensor.layout is not torch.strided:
            return sparse.all_reduce(self._group, tensor, op, limit)
        return Work(self._all_reduce(tensor, op, limit), [tensor])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Combine several tensors of all ranks, each in place."""
        same_kind(tensors, "tensors")
        op, limit = self._reduction(opts, None)
        (name, factor), (fused, rest) = op, self._parted(tensors, tensors)
        handles = [self._all_reduce(tensors[i], op, limit) for i in rest]
        small = [tensors[i] if factor is None else tensors[i].mul_(factor) for i in fused]
        return Work(Joined([*handles, *self._issue_fused("all_reduce", small, small, name, limit=limit)]), tensors)

    def _all_reduce(self, tensor: torch.Tensor, op: Any, limit: float) -> Handle:
        name, factor = op
        if factor is not None:
            tensor.mul_(factor)
        out, place = flat_output(tensor)
        return self._issue(place, "all_reduce", out, name, out, limit=limit)

    def reduce(
        self, tensors: Any, root: Any = None, op: Any = None, timeout: timedelta | None = None, opts: Any = None
    ) -> Work:
        """Combine a tensor of all ranks on the root; what the tensors of the others then hold is not said."""
        opts = opts if opts is not None else None if isinstance(root, int) else root
        tensor = one_tensor(listed(tensors), "tensors")
        (name, factor), limit = self._reduction(opts if opts is not None else op, timeout)
        dst = root if isinstance(root, int) else int(opts.rootRank)
        if factor is not None:
            tensor.mul_(factor)
        if self._group.rank != dst:
            return Work(self._issue(None, "reduce", flat_input(tensor), dst, name, limit=limit), [tensor])
        out, place = flat_output(tensor)
        return Work(self._issue(place, "reduce", out, dst, name, out, limit=limit), [tensor])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Combine as many tensors of all ranks as there are ranks; rank r keeps the r-th."""
        output = one_tensor(listed(outputs), "output_tensors")
        parts = nested(inputs, "input_tensors")
        self._check_count(parts, "input_tensors")
        (name, factor), limit = self._reduction(opts, timeout)
        flat = torch.cat([part.reshape(-1) for part in parts])
        if factor is not None:
            flat.mul_(factor)
        counts = [part.numel() for part in parts]
        even = None if len(set(counts)) == 1 else counts
        return Work(self._reduce_scatter(output, flat, name, limit, even), [output])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Combine a tensor of all ranks; rank r keeps its r-th part."""
        (name, factor), limit = self._reduction(opts, None)
        x = input if factor is None else input * factor
        return Work(self._reduce_scatter(output, x, name, limit), [output])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Do so with several tensors."""
        (name, factor), limit = self._reduction(opts, None)
        scaled = [x if factor is None else x * factor for x in inputs]
        fused, rest = self._parted(outputs, scaled)
        handles = [self._reduce_scatter(outputs[i], scaled[i], name, limit) for i in rest]
        outs, xs = [outputs[i] for i in fused], [scaled[i] for i in fused]
        return Work(Joined([*handles, *self._issue_fused("reduce_scatter", outs, xs, name, limit=limit)]), outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, output: torch.Tensor, x: torch.Tensor, op: str, limit: float, counts: list[int] | None = None
    ) -> Handle:
        same_kind([output, x], "output, input")
        source = flat_input(x)
        if overlaps(output, x):
            source = source.copy()
        out, place = flat_output(output)
        return self._issue(place, "reduce_scatter", source, op, out, counts=counts, limit=limit)
