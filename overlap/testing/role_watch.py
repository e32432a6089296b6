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
from .tensor_parts import Part, digest, local_tensor, same_ranks


class RoleWatch:
    """Roles of one rank; `wrapped` has the ranks that share a parameter, by its identity.

    Args:
        record: What tests know of the run.
        labelled: Returns the parameters of all models by name.
    """

    def __init__(self, rank: int, record: Record, labelled: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._rank, self._record, self._labelled = rank, record, labelled
        self._weights: dict[int, weakref.ref[nn.Parameter]] = {}  # arguments of functions, by their memory
        self._leading: tuple[int, ...] = ()  # the first dims of the first input, which are not features
        self._memory: dict[
            tuple[str, int], str
        ] = {}  # names of parameters: by "all_reduce" and their gradient's address
        self._sizes: dict[str, int] = {}  # bytes of parameters by name
        self._names: list[str] = []  # of the operation that is about to be issued
        self.over: bool = False  # after the first update
        self.wrapped: dict[int, tuple[int, ...]] = {}

    def wrap(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        """Record the group of a DistributedDataParallel."""
        ranks = tuple(dist.get_process_group_ranks(group))
        self.wrapped.update((id(parameter), ranks) for parameter in model.parameters())

    def is_first_forward(self, func: Any, tensors: Iterable[Any]) -> bool:
        """Record the first function in which data meets a trained parameter; return whether `func` is that function."""
        if not torch.is_grad_enabled() or func._schema.is_mutable:
            return False
        weight, data = None, []
        for tensor in tensors:
            memory = local_tensor(tensor)
            if type(memory) not in (torch.Tensor, nn.Parameter) or memory.layout is not torch.strided:
                return False  # such as the fake tensors of the compiler
            key = _memory(memory)
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
                members=self.wrapped.get(id(parameter)) or same_ranks(parameter),
            )
            for name, parameter in labelled.items()
        }  # fmt: skip
        self._record.first_forwards.append(
            FirstForward(
                rank=self._rank, line=frame_line(users_frame()), weights=weights,
                digest=digest(local_tensor(largest)), members=same_ranks(largest),
                parameter=next((name for name, each in labelled.items() if _memory(each) == _memory(weight)), ""),
            )
        )  # fmt: skip
        return True

    def before_operation(self, op: str, tensor: torch.Tensor, members: Iterable[int]) -> None:
        """Record the parameter, or the gradients, in the memory of an operation, alone or copied one after another.

        And note ranks that add up a tensor with the leading dims of the first input: an activation.
        """
        self._names = []
        if self.over:
            return
        dims = len(self._leading)
        if op == "all_reduce" and dims and tensor.ndim > dims and tuple(tensor.shape[:dims]) == self._leading:
            self._record.activations[tuple(members), frame_line(users_frame())] = None
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_contiguous() and tensor.numel():
            if (op, tensor.data_ptr()) not in self._memory:
                self._memory = dict(self._find_memory())
            if (name := self._memory.get((op, tensor.data_ptr()))) is not None:
                self._names = [name]
            elif op == "all_reduce":
                self._names = self._gradients_copied_to(tensor)

    def operation_issued(self, issue: Issue) -> None:
        """Record the operation of `before_operation`."""
        if self._names:
            self._record.transfers.append(Transfer(issue=issue, names=tuple(self._names)))
            self._names = []

    def _find_memory(self) -> Iterator[tuple[tuple[str, int], str]]:
        """Yield the address of each parameter and of its gradient, with its name."""
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


def _memory(tensor: torch.Tensor) -> int:
    return int(local_tensor(tensor).untyped_storage()._cdata)
