"""CPU tensors of torch as arrays of numpy: views of the same memory, bfloat16 and float8 included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch

from ..runtime.memory.foreign import tensor_array
from .errors import CallError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def as_array(tensor: torch.Tensor) -> Array:
    """Return an array that shares the tensor's memory.

    Raises:
        CallError: The memory cannot be used; the error names a conversion that helps.
    """
    try:
        return tensor_array(tensor)
    except (TypeError, RuntimeError) as error:
        raise CallError(
            _unsupported_reason(tensor) or f"tensor: cannot use the memory of a {tensor.dtype} tensor: {error}"
        ) from None


def flat_input(tensor: torch.Tensor) -> Array:
    """Return the elements of a tensor as a flat array: a view if the tensor is contiguous, otherwise a copy."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    view = as_array(tensor)
    return view.reshape(-1)


def flat_output(tensor: torch.Tensor) -> tuple[Array, Callable[[], None] | None]:
    """Return flat memory for the result of an operation that a tensor is to get.

    Returns:
        If the tensor is contiguous, a flat view of it, and None. Otherwise a flat copy of its elements, and a function
        that copies the result back to the tensor.
    """
    if tensor.is_neg() or tensor.is_conj():  # the memory has the opposites or conjugates of the elements
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return as_array(plain).reshape(-1), lambda: copy_to_each(plain, [tensor])
    view = as_array(tensor)
    if view.flags.c_contiguous:
        return view.reshape(-1), None
    staged = np.ascontiguousarray(view).reshape(-1)
    return staged, lambda: np.copyto(view, staged.reshape(view.shape))


PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a CPU tensor of torch's own class whose elements are in order in memory."""
    return (
        type(tensor) in PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def join_adjacent(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Return one flat tensor over tensors that follow each other in memory, as those of `torch.chunk` do.

    None if there are gaps between them, if they are in another order, or if one is not contiguous.
    """
    first = tensors[0]
    begin = end = first.data_ptr()
    storage = first.untyped_storage()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        end += tensor.nbytes
    # there are no elements; or the tensors are neighbours only by chance, in several storages
    if end == begin or end > storage.data_ptr() + storage.nbytes():
        return None
    return first.detach().as_strided(((end - begin) // first.itemsize,), (1,))


def copy_flat_to_tensors(flat: Array, tensors: Iterable[torch.Tensor]) -> None:
    """Copy the elements of a flat array to tensors, one tensor after the other."""
    start = 0
    for tensor in tensors:
        out, copy_back = flat_output(tensor)
        np.copyto(out, flat[start : start + out.size])
        if copy_back is not None:
            copy_back()
        start += out.size


def copy_to_each(tensor: torch.Tensor, targets: Iterable[torch.Tensor]) -> None:
    """Copy a tensor to each of the targets, without a record for autograd."""
    with torch.no_grad():
        for target in targets:
            target.copy_(tensor)


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same storage, even if they are different parts of it."""
    return bool(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())


def list_tensors(tensors: Any, argument: str) -> list[torch.Tensor]:
    """Return a list of tensors, from a list or a single tensor.

    Args:
        tensors: The list or the tensor.
        argument: Name of the argument, for errors.

    Raises:
        TypeError: The argument is neither a tensor nor a list of tensors.
        CallError: The list is empty.
    """
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if not isinstance(tensors, list | tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise TypeError(f"{argument}: expected a tensor or a list of tensors, got {tensors!r:.200}")
    if not tensors:
        raise CallError(f"{argument}: expected at least one tensor, got an empty list")
    return list(tensors)


def one_tensor(tensors: Any, argument: str) -> torch.Tensor:
    """Return the tensor, or the only tensor of a list; c10d has a tensor for each device, and here there is one.

    Arguments and errors are as of `list_tensors`; a list of several tensors raises `CallError`, too.
    """
    if type(tensors) is list and len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
        return tensors[0]
    candidates = list_tensors(tensors, argument)
    if len(candidates) != 1:
        raise CallError(f"{argument}: expected one tensor, for the one CPU of this rank, got {len(candidates)}")
    return candidates[0]


def check_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Raise the error of `as_array` if the memory of a tensor cannot be used, before an operation is issued for any."""
    for tensor in tensors:
        as_array(tensor)


def check_same_kind(tensors: Iterable[torch.Tensor], argument: str) -> None:
    """Raise `CallError` if tensors have different devices, dtypes or layouts.

    Args:
        tensors: The tensors.
        argument: Name of the argument, for the error.
    """
    first: torch.Tensor | None = None
    for index, tensor in enumerate(tensors):
        first = tensor if first is None else first
        if tensor.device != first.device:
            raise CallError(
                f"{argument}: all tensors must be on one device, number 0 is on {first.device} and number {index} on "
                f"{tensor.device}; pass .cpu() of each"
            )
        if tensor.dtype != first.dtype:
            raise _difference_error(argument, "dtype", first.dtype, index, tensor.dtype, f"pass .to({first.dtype})")
        if tensor.layout != first.layout:
            raise _difference_error(argument, "layout", first.layout, index, tensor.layout, "pass .to_dense()")


def check_same_shape(tensors: list[torch.Tensor], argument: str) -> None:
    """Raise `CallError` if tensors have different shapes. Arguments are as of `check_same_kind`."""
    for index, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            first, other = tuple(tensors[0].shape), tuple(tensor.shape)
            raise _difference_error(argument, "shape", first, index, other, "reshape or pad them")


def _difference_error(argument: str, name: str, first: object, index: int, other: object, advice: str) -> CallError:
    """Return the error of two tensors of a list whose attribute `name`, such as "dtype", is `first` and `other`."""
    return CallError(
        f"{argument}: all tensors must have one {name}, number 0 is {first} and number {index} {other}; {advice}"
    )


def _unsupported_reason(tensor: torch.Tensor) -> str | None:
    """Return why the memory of a tensor cannot be used, and a conversion that helps; None if the reason is unknown."""
    if tensor.device.type != "cpu":
        return (
            f"tensor: it is on {tensor.device}, and backend 'overlap' carries tensors of the CPU; pass .cpu(), or give "
            "that device a backend of its own, as in init_process_group('cpu:overlap,cuda:nccl')"
        )
    if tensor.layout is not torch.strided:
        return f"tensor: it is {tensor.layout}, which only all_reduce(op=SUM) takes; pass .to_dense()"
    if tensor.is_quantized:
        return f"tensor: it is {tensor.dtype}; pass .dequantize(), or .int_repr() for its integers"
    return None
