"""Calls of torch turned into operations of ours: options, limits, calling lines, errors, copies at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist

from ..errors import OverlapError, UsageError
from ..runtime.group import Group
from . import private
from .errors import CallError, backend_error
from .operations import CallKey, KnownCalls, frame_line, users_frame
from .tensors import copy_blocks, flat_input, list_tensors, same_kind
from .work import Handle, JoinedOperations, Work

Tensors = list[torch.Tensor]

# Coalesced tensors up to this length travel as one. Measured on 16 tensors, 2 processes of one host: 4 KiB each
# 0.4 instead of 1.3 ms, 64 KiB 1.0 instead of 2.2, 256 KiB as long, 1 MiB 51 instead of 35.
_FUSED_BYTES = 128 << 10


class Issuing(KnownCalls):
    """The common part of all operations of a process group."""

    _group: Group
    _work = Work

    def _issue(
        self,
        copy_back: Callable[..., None] | None,
        name: str,
        /,
        *args: Any,
        limit: float,
        site: FrameType | None = None,
        key: CallKey | None = None,
        **more: Any,
    ) -> Handle:
        """Issue an operation; `copy_back` writes its result to tensors that are not contiguous."""
        future = self._issue_here(name, args, more, limit, site or users_frame())
        if copy_back is None:
            if key is not None:
                self._group._ports.keep(key, future)
            return cast(Handle, future)
        if name in ("all_gather", "gather") and args[-1] is None:  # no `out`
            return JoinedOperations([future], lambda: copy_back(future.result(0)))
        return JoinedOperations([future], copy_back)

    def _issue_fused(self, name: str, outs: Tensors, xs: Tensors, *args: Any, limit: float) -> list[Handle]:
        """Issue one operation for several tensors, if there are any, and copy the results to them."""
        if not xs:
            return []
        future = self._issue_here(name, ([flat_input(x) for x in xs], *args), {}, limit, users_frame())

        def copy_back() -> None:
            for out, result in zip(outs, future.result(0), strict=True):
                copy_blocks(result, [out])

        return [JoinedOperations([future], copy_back)]

    def _split_by_size(self, outs: Tensors, xs: Tensors) -> tuple[list[int], list[int]]:
        """Return the indices of tensors that travel better as one operation, and of all others."""
        largest = [max(out.nbytes, x.nbytes) for out, x in zip(outs, xs, strict=True)]
        fused = [i for i, nbytes in enumerate(largest) if nbytes <= _FUSED_BYTES]
        if len(fused) < 2:
            fused = []
        return fused, [i for i in range(len(xs)) if i not in fused]

    def _issue_here(self, name: str, args: tuple[Any, ...], more: dict[str, Any], limit: float, site: FrameType) -> Any:
        """Issue an operation on the group, with errors as torch's programs expect them."""
        try:
            operation = getattr(self._group, name)(*args, timeout_s=limit, call_site=site, **more)
        except UsageError as error:
            raise CallError(f"{error} (called at {frame_line(site)})") from error
        except OverlapError as error:  # what a handler of signals raises meanwhile leaves as it is
            raise backend_error(error) from error
        self._seq += 1
        return operation

    def _reduction(
        self, x: torch.Tensor, opts: Any, timeout: timedelta | None, op: Any = None
    ) -> tuple[tuple[str, Any], float]:
        """Return the operator on a tensor, and the time limit of a call."""
        operator = op if op is not None else dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        name, factor = parse_reduction(operator)
        if name == "sum" and x.dtype is torch.bool and x.layout is torch.strided:
            name = "bor"  # as in c10d: a sum of truth values is their logical or
        if name == "mean" and not (x.is_floating_point() or x.is_complex()):
            raise CallError(
                f"op: AVG of {x.dtype} would not be exact, and gloo refuses it too; pass floats, or use SUM and divide"
            )
        return (name, factor), self._limit_s(opts, timeout)

    def _limit_s(self, opts: Any, timeout: timedelta | None) -> float:
        """Return the time limit of a call, in seconds; one that is not positive means the default."""
        if isinstance(opts, timedelta):
            timeout = opts
        elif timeout is None:
            timeout = getattr(opts, "timeout", None)
        if timeout is None or timeout <= timedelta(0):
            timeout = self._timeout
        return timeout.total_seconds()

    def _check_count(self, tensors: Sequence[object], argument: str, *, per_rank: int = 1) -> None:
        """Check that a list has `per_rank` tensors for each rank."""
        if len(tensors) != per_rank * self._group.size:
            expected = "one" if per_rank == 1 else per_rank
            raise CallError(
                f"{argument}: expected {expected} for each of the {self._group.size} ranks, got {len(tensors)}"
            )

    def _check_pairs(self, outs: Any, xs: Any, *, parts: str) -> tuple[Tensors, Tensors]:
        """Return outputs and inputs, after a check that the `parts` of each pair are one rank's share."""
        outs, xs = list_tensors(outs, "outputs"), list_tensors(xs, "inputs")
        if len(outs) != len(xs):
            raise CallError(f"outputs: expected one for each of the {len(xs)} inputs, got {len(outs)}")
        for index, (out, x) in enumerate(zip(outs, xs, strict=True)):
            same_kind([out, x], f"output, input {index}")
            (whole, part), name = ((out, x), "outputs") if parts == "inputs" else ((x, out), "inputs")
            if whole.numel() != part.numel() * self._group.size:
                expected = f"{self._group.size} x {part.numel()}"
                raise CallError(f"{name}: number {index} must have {expected} elements, has {whole.numel()}")
        return outs, xs

    def _check_sizes(self, tensors: Tensors, like: torch.Tensor, argument: str) -> None:
        """Check that tensors have as many elements as this rank's own."""
        for index, tensor in enumerate(tensors):
            if tensor.numel() != like.numel():
                raise CallError(
                    f"{argument}: all must have {like.numel()} elements, as this rank's own has, number {index} has "
                    f"{tensor.numel()}"
                )


def list_parts(tensors: Any, argument: str) -> Tensors:
    """Return the only list of tensors: the argument itself, or the one list in it."""
    if isinstance(tensors, list | tuple) and len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        return list_tensors(tensors[0], argument)
    if isinstance(tensors, list | tuple) and (not tensors or not isinstance(tensors[0], torch.Tensor)):
        raise CallError(f"{argument}: expected one list, for the one CPU of this rank, got {len(tensors)}")
    return list_tensors(tensors, argument)


def get_root(opts: Any, root: int | None, tensors: int = 1) -> int:
    """Return the root of a call: `root`, a number in place of c10d's options, the rank that they name, or 0."""
    if root is not None or opts is None:
        return root or 0
    if hasattr(opts, "__index__"):
        return int(opts)
    if not 0 <= getattr(opts, "rootTensor", 0) < tensors:
        raise CallError(f"rootTensor: expected 0 to {tensors - 1}, got {opts.rootTensor}")
    return int(opts.rootRank)


_Op = dist.ReduceOp.RedOpType
# By `op.op`: a ReduceOp equals its RedOpType, but has another hash.
_NAMES = {
    _Op.SUM: "sum",
    _Op.AVG: "mean",
    _Op.PRODUCT: "prod",
    _Op.MIN: "min",
    _Op.MAX: "max",
    _Op.BAND: "band",
    _Op.BOR: "bor",
    _Op.BXOR: "bxor",
}


def parse_reduction(op: Any) -> tuple[str, Any]:
    """Return the name of a reduction, and the factor by which each rank multiplies first, or None."""
    kind = getattr(op, "op", op)
    name = _NAMES.get(kind)
    if name is not None:
        return name, None
    if kind == _Op.PREMUL_SUM and (factor := private.get_factor(op)) is not None:
        return "sum", factor
    raise CallError(f"op: backend 'overlap' reduces by {', '.join(sorted(k.name for k in _NAMES))}, got {kind}")
