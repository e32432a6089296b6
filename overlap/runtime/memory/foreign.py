"""Arrays in the memory of foreign objects, which are read and written in place, without a copy.

Foreign objects are CPU tensors of torch in any dtype that collectives carry (bfloat16 and float8 too, which ml_dtypes
adds to numpy), objects with a buffer (`array.array`, `bytearray`, `memoryview`, `ctypes` arrays), and objects with
DLPack or numpy's array protocols.

They cannot be made read-only while an operation uses them. A tensor counts its changes: if it was changed while an
operation read it, the operation fails. A `bytearray` or an `array.array` cannot be resized in that time. Changes of
other objects may or may not be sent, as for changes through views of an array.

An operation leaves a tensor as resizable as it was. `Tensor.numpy()` would fix the size of the tensor's storage for
good, and FSDP resizes storages; arrays from DLPack are read-only with the oldest versions of numpy and torch. So the
array of a tensor is made from the tensor's address. As with gloo, a storage that is resized in flight is freed memory.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ...collectives.reduce import Array
from ...errors import UsageError


def as_input_array(value: object) -> Array:
    """Return a value as an array: itself, an array in the memory that it exports, or, if it exports none, a copy.

    Raises:
        UsageError: The value cannot be an array of numbers, or is a masked array.
    """
    tensor = _torch_if_tensor(value)
    if tensor is not None:
        return _checked_tensor_array(value, tensor, "x")
    _refuse_masked_array(value, "x")
    try:
        x = np.from_dlpack(value) if _exports_only_dlpack(value) else np.asarray(value)  # type: ignore[arg-type]
    except Exception as error:
        raise UsageError(f"x: cannot make an array of {type(value).__name__}: {error}; pass a numpy array") from error
    if x.dtype.kind in "OSUMm" or x.dtype.names is not None:
        hint = "; broadcast_object, gather_object and their like carry objects" if x.dtype.kind in "OSU" else ""
        raise UsageError(f"x: expected an array of numbers, got {type(value).__name__} with dtype {x.dtype}{hint}")
    return x


def as_output_array(value: object, argument: str) -> Array:
    """Return a writable array in the memory of a value.

    Args:
        value: An array, or an object that exports its memory.
        argument: Name of the argument that has the value, for the error.

    Raises:
        UsageError: The value exports no memory, or memory that is read-only or not C-contiguous.
    """
    _refuse_masked_array(value, argument)
    array = value if isinstance(value, np.ndarray) else _foreign_array(value, argument)
    if not array.flags.c_contiguous:
        raise UsageError(
            f"{argument}: must be C-contiguous, got strides {array.strides} for shape {array.shape}; pass a new array"
        )
    if not array.flags.writeable:
        raise UsageError(f"{argument}: is read-only; pass an array that may be written (is it still in flight?)")
    return array


def _refuse_masked_array(value: object, argument: str) -> None:
    """Raise `UsageError` for a masked array: a reduction would include the masked elements."""
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError(
            f"{argument}: is a masked array; pass x.filled(value), or its .data and .mask one after the other"
        )


def make_change_check(value: object) -> Callable[[], bool] | None:
    """Return a function: has the value changed since this call? None if the value does not count its changes."""
    if _torch_if_tensor(value) is None:
        return None
    tensor: Any = value
    try:
        # Count of the changes of this tensor and of those that share its memory; torch has no public name for it.
        version = tensor._version
    except (AttributeError, RuntimeError):  # torch has renamed it; or an inference tensor, which does not count
        return None
    return lambda: bool(tensor._version != version)


def _foreign_array(value: object, argument: str) -> Array:
    """Return an array in the object's memory. Raise `UsageError`, which names `argument`, if it exports none."""
    tensor = _torch_if_tensor(value)
    if tensor is not None:
        return _checked_tensor_array(value, tensor, argument)
    kind = type(value)
    try:
        if _exports_only_dlpack(value):
            return np.from_dlpack(value)  # type: ignore[arg-type]
        if hasattr(kind, "__array_interface__"):
            return np.asarray(value)
        return np.asarray(memoryview(value))  # type: ignore[arg-type]
    except Exception as error:
        if isinstance(error, TypeError) and not hasattr(kind, "__dlpack__"):  # an object without any such protocol
            error = TypeError("a result needs memory that can be written: pass a numpy array or a CPU tensor")
        raise UsageError(f"{argument}: expected an array, got {kind.__name__}; {error}") from error


def _exports_only_dlpack(value: object) -> bool:
    """Whether the value has DLPack, and neither of numpy's array protocols."""
    kind = type(value)
    return hasattr(kind, "__dlpack__") and not hasattr(kind, "__array__") and not hasattr(kind, "__array_interface__")


def _torch_if_tensor(value: object) -> Any:  # a module, which is not imported here
    """Return torch if `value` is a tensor, else None. A program that has a tensor has imported torch."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)  # absent while torch is being imported
    return torch if tensor is not None and isinstance(value, tensor) else None


def _checked_tensor_array(value: object, torch: Any, argument: str) -> Array:
    """Raise `UsageError`, which names `argument`, without plain memory on the CPU, or if gradients are tracked."""
    hint = _tensor_refusal_reason(value, torch)
    if hint is not None:
        raise UsageError(f"{argument}: cannot use the memory of this {type(value).__name__}: {hint}")
    try:
        return tensor_array(value)
    except (TypeError, RuntimeError) as error:
        raise UsageError(f"{argument}: cannot use the memory of this {type(value).__name__}: {error}") from error


class _TensorMemory(ctypes.c_char * sys.maxsize):  # type: ignore[misc]
    """Memory from an address on, without an end, as the base of an array, which has the right length.

    Attributes:
        storage: Storage of a tensor, which this attribute keeps alive as long as the array.
    """

    __slots__ = ("storage",)


_memory_at = _TensorMemory.from_address  # looked up once: half the time


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Return `nbytes` bytes of memory at an address; the caller keeps the memory alive."""
    return memoryview(_memory_at(address)).cast("B")[:nbytes]


def tensor_array(tensor: Any) -> Array:
    """Return an array in the memory of a CPU tensor of torch, with the tensor's shape and strides.

    The tensor may track gradients. The array keeps the tensor's storage alive, and leaves it resizable.

    Cost: 1.5 us on the calling thread for a contiguous tensor, as `detach().numpy()`; 2 us for one with other strides.

    Raises:
        TypeError: The tensor has no memory of plain numbers on the CPU; the text has the reason.
        RuntimeError: torch has no address for the tensor.
    """
    dtype = _dtypes.get(tensor.dtype) or _numpy_dtype_of(tensor)
    address = tensor.data_ptr()
    if not address or not tensor.is_cpu or tensor.is_neg() or (dtype.kind == "c" and tensor.is_conj()):
        return _array_without_address(tensor, dtype)
    memory = _memory_at(address)
    memory.storage = tensor.untyped_storage()
    if tensor.is_contiguous():
        return np.ndarray(tensor.shape, dtype, memory)
    nbytes = dtype.itemsize
    return np.ndarray(tensor.shape, dtype, memory, 0, tuple([nbytes * step for step in tensor.stride()]))


def _array_without_address(tensor: Any, dtype: np.dtype[np.generic]) -> Array:
    """Return the array of an empty tensor, or, after a wait, of the result of a pending collective of torch.

    All other tensors raise a `TypeError` with the reason why they have no memory to use.
    """
    if not tensor.is_cpu:
        raise TypeError(f"it is on {tensor.device}; pass .cpu()")
    if tensor.is_neg() or tensor.is_conj():
        raise TypeError("it is a lazy conjugate or negative; pass .resolve_conj().resolve_neg()")
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor):
        return tensor_array(tensor.wait())
    if tensor.numel() > 0:
        raise TypeError(
            "it has no memory of its own: its storage was freed, or it wraps other tensors; pass a plain tensor"
        )
    return np.empty(tensor.shape, dtype)


_dtypes: dict[object, np.dtype[np.generic]] = {}  # by dtype of torch

_SAME_NAMES = {
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip


def _numpy_dtype_of(tensor: Any) -> np.dtype[np.generic]:
    """Return a dtype of numpy or ml_dtypes, and cache it in `_dtypes`; raise `TypeError` if there is none."""
    name = str(tensor.dtype).removeprefix("torch.")
    scalar: Any = name if name in _SAME_NAMES else None
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes  # only these types need it

        scalar = getattr(ml_dtypes, name, None)
    if scalar is None:
        raise TypeError(f"numpy has no dtype for {tensor.dtype}; convert it, as by .float()")
    return _dtypes.setdefault(tensor.dtype, np.dtype(scalar))


def _tensor_refusal_reason(tensor: Any, torch: Any) -> str | None:
    """Return the reason why the tensor's memory cannot be used, with advice; None if it can."""
    if tensor.device.type != "cpu":
        return f"it is on {tensor.device}; pass a tensor on the CPU, such as .cpu()"
    if tensor.layout is not torch.strided:
        return f"it is {tensor.layout}; pass .to_dense()"
    if tensor.requires_grad:
        return "gradients do not flow through collectives; pass .detach(), which shares its memory"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a lazy conjugate or negative; pass .resolve_conj().resolve_neg()"
    return None
