"""Calls of torch as operations of a `Group`: options, time limits, call sites, errors, and copies at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist

from ..errors import OverlapError, UsageError
from . import private
from .errors import CallError, backend_error
from .operations import CallKey, KnownCalls, frame_line, users_frame
from .tensors import check_same_kind, copy_flat_to_tensors, flat_input, list_tensors
from .work import Handle, JoinedOperations, Work

Tensors = list[torch.Tensor]

# Coalesced tensors up to this length are packed into one operation. Measured for 16 tensors between 2 processes of one
# host, packed and separately: with 4 KiB each 0.4 and 1.3 ms, 64 KiB 1.0 and 2.2 ms, 256 KiB equal, 1 MiB 51 and 35 ms.
_FUSED_BYTES = 128 << 10


class Issuing(KnownCalls[Work]):
    """The common part of all operations of a process group. A `limit` of its methods is in seconds."""

    _work = Work

    def _issue_operation(
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
        """Issue an operation by the method `name` of the group, and return its handle.

        `copy_back` is called at the end to copy the result to tensors that are not contiguous; for gathers without
        `out` it is called with the gathered array. None: the result is in place. The call site is the line of `site`;
        None: the innermost line of the program. A call with a `key` is kept for `_reissue_call`. The limit is in
        seconds.
        """
        future = self._issue_on_group(name, args, more, limit, site or users_frame())
        if copy_back is None:
            if key is not None:
                self._group._ports.keep_for_reissue(key, future)
            return cast(Handle, future)
        if name in ("all_gather", "gather") and args[-1] is None:  # no `out`
            # `copy_back` runs after the end of the operation, so the wait of 0 s succeeds
            return JoinedOperations([future], lambda: copy_back(future.result(0)))
        return JoinedOperations([future], copy_back)

    def _issue_fused(self, name: str, outs: Tensors, xs: Tensors, *args: Any, limit: float) -> list[Handle]:
        """Issue one operation for several tensors, whose results are copied to `outs` at the end; return [its handle].

        The method `name` of the group gets a list of the flat inputs, then `args`. The result is empty without tensors.
        The limit is in seconds.
        """
        if not xs:
            return []
        future = self._issue_on_group(name, ([flat_input(x) for x in xs], *args), {}, limit, users_frame())

        def copy_back() -> None:
            for out, result in zip(outs, future.result(0), strict=True):
                copy_flat_to_tensors(result, [out])

        return [JoinedOperations([future], copy_back)]

    def _split_indices_by_size(self, outs: Tensors, xs: Tensors) -> tuple[list[int], list[int]]:
        """Return the indices of small tensors, which are packed into one operation, and the indices of all others."""
        largest = [max(out.nbytes, x.nbytes) for out, x in zip(outs, xs, strict=True)]
        fused = [i for i, nbytes in enumerate(largest) if nbytes <= _FUSED_BYTES]
        if len(fused) < 2:
            fused = []
        return fused, [i for i in range(len(xs)) if i not in fused]

    def _issue_on_group(
        self, name: str, args: tuple[Any, ...], more: dict[str, Any], limit: float, site: FrameType
    ) -> Any:
        """Issue an operation by the method `name` of the group, count it, and return it; the limit is in seconds.

        Raises:
            CallError: The arguments are wrong.
            DistBackendError: The operation has failed at the call.
        """
        try:
            operation = getattr(self._group, name)(*args, timeout_s=limit, call_site=site, **more)
        except UsageError as error:
            raise CallError(f"{error} (called at {frame_line(site)})") from error
        except OverlapError as error:  # errors of the program's own signal handlers are not caught
            raise backend_error(error) from error
        self._seq += 1
        return operation

    def _reduction_and_limit(
        self, x: torch.Tensor, opts: Any, timeout: timedelta | None, op: Any = None
    ) -> tuple[tuple[str, Any], float]:
        """Return (name of the operator, factor or None), as `parse_reduction` does, and the time limit in seconds.

        `op` and `timeout` take precedence over `opts`: options of c10d, or an operator; None is a sum. The operator
        must fit the dtype of `x`.
        """
        if op is None:
            op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        name, factor = parse_reduction(op)
        if name == "sum" and x.dtype is torch.bool and x.layout is torch.strided:
            name = "bor"  # as in c10d: a sum of truth values is their logical or
        if name == "mean" and not (x.is_floating_point() or x.is_complex()):
            raise CallError(
                f"op: AVG of {x.dtype} would not be exact, and gloo refuses it too; pass floats, or use SUM and divide"
            )
        return (name, factor), self._time_limit_s(opts, timeout)

    def _time_limit_s(self, opts: Any, timeout: timedelta | None) -> float:
        """Return the time limit of a call, in seconds; one that is not positive means the default of the group.

        `opts` are options of c10d, or a time limit, which then takes precedence over `timeout`.
        """
        if isinstance(opts, timedelta):
            timeout = opts
        elif timeout is None:
            timeout = getattr(opts, "timeout", None)
        if timeout is None or timeout <= timedelta(0):
            timeout = self._timeout
        return timeout.total_seconds()

    def _check_tensor_count(self, tensors: Sequence[object], argument: str, *, per_rank: int = 1) -> None:
        """Raise `CallError` unless a list has `per_rank` tensors for each rank."""
        if len(tensors) != per_rank * self._group.size:
            expected = "one" if per_rank == 1 else per_rank
            raise CallError(
                f"{argument}: expected {expected} for each of the {self._group.size} ranks, got {len(tensors)}"
            )

    def _check_outputs_and_inputs(self, outs: Any, xs: Any, *, joined_side: str) -> tuple[Tensors, Tensors]:
        """Return outputs and inputs as two lists, after a check that each output fits the input with the same index.

        `joined_side` is "outputs" or "inputs": which of the two have the parts of all ranks; the others have one part.
        Raises a `CallError` if their numbers differ, or if a pair differs in dtype, device or layout, or does not fit
        in size.
        """
        outs, xs = list_tensors(outs, "outputs"), list_tensors(xs, "inputs")
        if len(outs) != len(xs):
            raise CallError(f"outputs: expected one for each of the {len(xs)} inputs, got {len(outs)}")
        for index, (out, x) in enumerate(zip(outs, xs, strict=True)):
            check_same_kind([out, x], f"output, input {index}")
            joined, part = (out, x) if joined_side == "outputs" else (x, out)
            if joined.numel() != part.numel() * self._group.size:
                expected = f"{self._group.size} x {part.numel()}"
                raise CallError(f"{joined_side}: number {index} must have {expected} elements, has {joined.numel()}")
        return outs, xs

    def _check_element_counts(self, tensors: Tensors, like: torch.Tensor, argument: str) -> None:
        """Raise `CallError` unless each tensor has as many elements as `like`, this rank's own."""
        for index, tensor in enumerate(tensors):
            if tensor.numel() != like.numel():
                raise CallError(
                    f"{argument}: all must have {like.numel()} elements, as this rank's own has, number {index} has "
                    f"{tensor.numel()}"
                )


def list_parts(tensors: Any, argument: str) -> Tensors:
    """Return a list of tensors: the argument itself, or the only list in it; raise `CallError` for several lists."""
    if isinstance(tensors, list | tuple) and len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        return list_tensors(tensors[0], argument)
    # several lists, or none: c10d has a list for each device of a rank
    if isinstance(tensors, list | tuple) and (not tensors or not isinstance(tensors[0], torch.Tensor)):
        raise CallError(f"{argument}: expected one list, for the one CPU of this rank, got {len(tensors)}")
    return list_tensors(tensors, argument)


def get_root(opts: Any, root: int | None, tensors: int = 1) -> int:
    """Return the root of a call.

    Args:
        opts: Options of c10d with the root, or the root as a number; None: rank 0.
        root: The root, which takes precedence; None: that of the options.
        tensors: Number of tensors of the call. The options name one of them, whose index is checked.
    """
    if root is not None or opts is None:
        return root or 0
    if hasattr(opts, "__index__"):
        return int(opts)
    if not 0 <= getattr(opts, "rootTensor", 0) < tensors:
        raise CallError(f"rootTensor: expected 0 to {tensors - 1}, got {opts.rootTensor}")
    return int(opts.rootRank)


_Op = dist.ReduceOp.RedOpType
# Look-ups use `op.op`, because a ReduceOp equals its RedOpType, but has another hash.
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
    """Return the name of a reduction in overlap, and the factor by which each rank multiplies its input first, or None.

    Raises:
        CallError: The backend has no such reduction.
    """
    kind = getattr(op, "op", op)
    name = _NAMES.get(kind)
    if name is not None:
        return name, None
    if kind == _Op.PREMUL_SUM and (factor := private.get_factor(op)) is not None:
        return "sum", factor
    raise CallError(f"op: backend 'overlap' reduces by {', '.join(sorted(k.name for k in _NAMES))}, got {kind}")
