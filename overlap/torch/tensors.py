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
    """Return an array that is the tensor's memory, or raise a CallError with a conversion that helps."""
    try:
        return tensor_array(tensor)
    except (TypeError, RuntimeError) as error:
        raise CallError(
            _unsupported_reason(tensor) or f"tensor: cannot use the memory of a {tensor.dtype} tensor: {error}"
        ) from None


def flat_input(tensor: torch.Tensor) -> Array:
    """Return the elements of a tensor in order: a view where they are in order in memory, else a copy."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    view = as_array(tensor)
    return view.reshape(-1)


def flat_output(tensor: torch.Tensor) -> tuple[Array, Callable[[], None] | None]:
    """Return flat memory for the elements of a tensor, and a function that copies them to it if that is a copy.

    Returns:
        A flat view and None where the tensor is contiguous; else a flat copy and a function that copies it back.
    """
    if tensor.is_neg() or tensor.is_conj():  # its memory holds the opposites or conjugates of its elements
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return as_array(plain).reshape(-1), lambda: copy_to([tensor], plain)
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
    """Return the flat tensor over tensors that follow each other in memory, as after `chunk`.

    Returns:
        None for tensors with gaps or in another order, and for a tensor with permuted strides or lazy conjugation.
    """
    first = tensors[0]
    begin = end = first.data_ptr()
    storage = first.untyped_storage()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        end += tensor.nbytes
    if end == begin or end > storage.data_ptr() + storage.nbytes():
        return None
    return first.detach().as_strided(((end - begin) // first.itemsize,), (1,))


def copy_blocks(flat: Array, tensors: Iterable[torch.Tensor]) -> None:
    """Write consecutive blocks of a flat array to tensors."""
    start = 0
    for tensor in tensors:
        out, copy_back = flat_output(tensor)
        np.copyto(out, flat[start : start + out.size])
        if copy_back is not None:
            copy_back()
        start += out.size


def copy_to(tensors: Iterable[torch.Tensor], tensor: torch.Tensor) -> None:
    """Copy a tensor to each of several."""
    with torch.no_grad():
        for target in tensors:
            target.copy_(tensor)


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have one storage, perhaps different parts of it."""
    return bool(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())


def list_tensors(tensors: Any, argument: str) -> list[torch.Tensor]:
    """Return a list of tensors, from a list or a single tensor."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if not isinstance(tensors, list | tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise TypeError(f"{argument}: expected a tensor or a list of tensors, got {tensors!r:.200}")
    if not tensors:
        raise CallError(f"{argument}: expected at least one tensor, got an empty list")
    return list(tensors)


def one_tensor(tensors: Any, argument: str) -> torch.Tensor:
    """Return a tensor, or the only one of a list: a process has one device, the CPU."""
    if type(tensors) is list and len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
        return tensors[0]
    candidates = list_tensors(tensors, argument)
    if len(candidates) != 1:
        raise CallError(f"{argument}: expected one tensor, for the one CPU of this rank, got {len(candidates)}")
    return candidates[0]


def check_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Check the memory of each tensor, as `as_array` does, before an operation starts with the first."""
    for tensor in tensors:
        as_array(tensor)


def same_kind(tensors: Iterable[torch.Tensor], argument: str) -> None:
    """Refuse tensors of several devices, dtypes or layouts, which cannot travel together."""
    first: torch.Tensor | None = None
    for index, tensor in enumerate(tensors):
        first = tensor if first is None else first
        if tensor.device != first.device:
            raise CallError(
                f"{argument}: all tensors must be on one device, number 0 is on {first.device} and number {index} on "
                f"{tensor.device}"
            )
        if tensor.dtype != first.dtype:
            raise _difference_error(argument, "dtype", first.dtype, index, tensor.dtype)
        if tensor.layout != first.layout:
            raise _difference_error(argument, "layout", first.layout, index, tensor.layout)


def same_shape(tensors: list[torch.Tensor], argument: str) -> None:
    """Refuse tensors of several shapes, which cannot be combined."""
    for index, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            raise _difference_error(argument, "shape", tuple(tensors[0].shape), index, tuple(tensor.shape))


def _difference_error(argument: str, attribute: str, first: object, index: int, other: object) -> CallError:
    return CallError(
        f"{argument}: all tensors must have one {attribute}, number 0 is {first} and number {index} {other}"
    )


def _unsupported_reason(tensor: torch.Tensor) -> str | None:
    """Return why the memory of a tensor cannot be used, and a conversion that helps; None if unknown."""
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
