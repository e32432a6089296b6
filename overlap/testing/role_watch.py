"""Observation of a rank's roles up to its first update: weights and input of the first forward, reduced gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from ctypes import string_at
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..torch.operations import frame_line, users_frame
from .record import FirstForward, Held, Issue, Record, Transfer
from .tensor_parts import Part, digest, local_tensor, ranks_with_same_part


class RoleWatch:
    """Watch of one rank's tensors up to its first update: which are weights, inputs, gradients or activations.

    Attributes:
        over: Whether the first update has been made.
        ranks_by_parameter: By id of a parameter, the ranks that share it by DistributedDataParallel.

    Args:
        rank: The rank.
        record: The record of the run.
        labelled: Returns the parameters of all models by name.
    """

    def __init__(self, rank: int, record: Record, labelled: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._rank, self._record, self._labelled = rank, record, labelled
        self._weights: dict[int, weakref.ref[nn.Parameter]] = {}  # parameters seen as arguments, by their storage
        self._leading: tuple[int, ...] = ()  # shape of the first input without features: batch, sequence
        # Names of parameters, by ("broadcast", address of the parameter) and ("all_reduce", address of its gradient).
        self._memory: dict[tuple[str, int], str] = {}
        self._sizes: dict[str, int] = {}  # bytes of parameters by name
        self._names: list[str] = []  # parameters of the operation that is about to be issued
        self.over: bool = False
        self.ranks_by_parameter: dict[int, tuple[int, ...]] = {}

    def record_ddp_group(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        """Record the group of a DistributedDataParallel."""
        ranks = tuple(dist.get_process_group_ranks(group))
        self.ranks_by_parameter.update((id(parameter), ranks) for parameter in model.parameters())

    def record_first_forward(self, func: Any, tensors: Iterable[Any]) -> bool:
        """Whether this is the first function in which data meets a trained parameter. If so, record a `FirstForward`.

        Args:
            func: The function of torch.
            tensors: Tensors among its arguments.
        """
        if not torch.is_grad_enabled() or func._schema.is_mutable:
            return False
        weight, data = None, []
        for tensor in tensors:
            memory = local_tensor(tensor)
            if type(memory) not in (torch.Tensor, nn.Parameter) or memory.layout is not torch.strided:
                return False  # such as a fake tensor of the compiler
            key = _memory_id(memory)
            if isinstance(tensor, nn.Parameter):
                self._weights[key] = weakref.ref(tensor)
            if (known := self._weights.get(key)) is None or known() is None:
                data.append(tensor)
            elif tensor.requires_grad:
                weight = tensor
        if weight is None or not data or func.is_view:
            return False
        largest = max(data, key=lambda tensor: tensor.numel())
        features = 1 if largest.dtype.is_floating_point else 0
        self._leading = tuple(largest.shape[: largest.ndim - features])
        labelled = self._labelled()
        weights = {
            name: Held(
                digest=digest(local_tensor(parameter)), trained=parameter.requires_grad,
                members=self.ranks_by_parameter.get(id(parameter)) or ranks_with_same_part(parameter),
            )
            for name, parameter in labelled.items()
        }  # fmt: skip
        self._record.first_forwards.append(
            FirstForward(
                rank=self._rank, line=frame_line(users_frame()), weights=weights,
                digest=digest(local_tensor(largest)), members=ranks_with_same_part(largest),
                parameter=next((name for name, each in labelled.items() if _memory_id(each) == _memory_id(weight)), ""),
            )
        )  # fmt: skip
        return True

    def find_operation_parameters(self, op: str, tensor: torch.Tensor, members: Iterable[int]) -> None:
        """Find the parameters that an operation broadcasts, or whose gradients it reduces, for `on_operation_issued`.

        The tensor is one of them, or a flat tensor with copies of several gradients. If its first dims are those of the
        first input, it is an activation, and its ranks are recorded.

        Args:
            op: "all_reduce" or "broadcast".
            tensor: Tensor of the operation.
            members: Ranks of its group.
        """
        self._names = []
        if self.over:
            return
        dims = len(self._leading)
        if op == "all_reduce" and dims and tensor.ndim > dims and tuple(tensor.shape[:dims]) == self._leading:
            self._record.activations[tuple(members), frame_line(users_frame())] = None
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_contiguous() and tensor.numel():
            if (op, tensor.data_ptr()) not in self._memory:
                self._memory = dict(self._find_parameter_memory())
            if (name := self._memory.get((op, tensor.data_ptr()))) is not None:
                self._names = [name]
            elif op == "all_reduce":
                self._names = self._gradients_copied_to(tensor)

    def on_operation_issued(self, issue: Issue) -> None:
        """Record an operation with the parameters that `find_operation_parameters` has found, if there are any."""
        if self._names:
            self._record.transfers.append(Transfer(issue=issue, names=tuple(self._names)))
            self._names = []

    def _find_parameter_memory(self) -> Iterator[tuple[tuple[str, int], str]]:
        """Yield ((op, address), name) for each parameter and its gradient, as `_memory` has them."""
        for name, parameter in self._labelled().items():
            for op, tensor in (("broadcast", parameter), ("all_reduce", parameter.grad)):
                part = None if tensor is None else Part.of(tensor)
                if part is not None and part.tensor.numel():
                    yield (op, part.tensor.data_ptr()), name
                    self._sizes[name] = part.tensor.nbytes

    def _gradients_copied_to(self, flat: torch.Tensor) -> list[str]:
        """Return the names of reduced gradients whose bytes fill a flat tensor from its start, one after another."""
        names: list[str] = []
        at, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        for (op, gradient), name in self._memory.items():
            size = self._sizes[name]
            if op == "all_reduce" and at + size <= end and string_at(at, size) == string_at(gradient, size):
                names.append(name)
                at += size
        return names


def _memory_id(tensor: torch.Tensor) -> int:
    """Return a number for the memory of a tensor, the same for all views of it while it lives."""
    return int(local_tensor(tensor).untyped_storage()._cdata)
