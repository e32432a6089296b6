"""Collectives as libraries and PyTorch's profiler name them: operations, bytes, and kernels that communicate.

Fields and their traps: pytorch/kineto, libkineto/src/output_json.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

COMM_KERNEL = re.compile(  # NCCL, RCCL, oneCCL; symmetric memory of PyTorch, NVSHMEM, DeepEP; kernels of vLLM, TensorRT
    r"(void )?(nccl|rccl|hccl|oneccl|nvshmem|mscclpp)|.*(ncclKernel|ncclDevKernel|multimem_|(one|two)_shot_all_reduce|"
    r"deep_ep::|nvshmem|cross_device_reduce|allreduce_fusion|quick_?reduce)",
    re.IGNORECASE,
)
_WIDTHS = {
    "float": 4, "float32": 4, "double": 8, "float64": 8, "half": 2, "float16": 2, "c10::half": 2, "bfloat16": 2,
    "c10::bfloat16": 2, "int": 4, "int32": 4, "long": 8, "long int": 8, "int64": 8, "byte": 1, "unsigned char": 1,
    "char": 1, "bool": 1, "int8": 1, "uint8": 1, "int16": 2,
}  # fmt: skip
_OPS = {
    "allreduce": "all_reduce", "_allgather_base": "all_gather", "allgather": "all_gather", "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter", "alltoall": "all_to_all",
    "all_to_all": "all_to_all", "all_to_allv": "all_to_all",
}  # fmt: skip
_KERNEL_OPS = (
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all_reduce", re.compile(r"all_?reduce", re.IGNORECASE)),
    ("all_gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("all_to_all", re.compile(r"all_?to_?all|send_?recv", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce", re.IGNORECASE)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFields:
    """Facts on a collective from an event of the profiler; what is unknown has the default."""

    op: str
    group: str = ""
    group_size: int = 0
    ranks: tuple[int, ...] = ()
    nbytes: int = 0
    dtype: str = ""
    seq: int | None = None


def operation_name(name: str) -> str:
    """Return the operation in an event's name, such as "all_reduce" for "ncclDevKernel_AllReduce_Sum_f32(...)".

    "gloo:NAME" and "overlap:NAME" give NAME; an unknown kernel gives its name up to "(", at most 60 characters. The
    kernel "SendRecv" of NCCL counts as an all-to-all.
    """
    short = name.partition(":")[2] if name.startswith(("gloo:", "overlap:")) else ""
    return short or next((op for op, pattern in _KERNEL_OPS if pattern.search(name)), name.split("(")[0][:60])


def collective_name(name: str) -> str:
    """Return the usual name of a collective: "_allgather_base" gives "all_gather". Unknown names stay as they are."""
    return _OPS.get(name.lower(), name)


def message_bytes(counts: Iterable[int | None], dtype: str, dims: object, types: object) -> int:
    """Return the bytes of a message: the larger of sent and received, or the sum of the inputs; 0 if unknown.

    Args:
        counts: Numbers of elements sent and received; None where unknown.
        dtype: Type of these elements.
        dims: Shapes of the inputs, used if all counts are None.
        types: Type of each input.
    """
    if known := [count for count in counts if count is not None]:
        # An unknown type counts as 4 bytes.
        return max(known) * _WIDTHS.get(dtype.lower(), 4)
    total = 0
    if isinstance(dims, list) and isinstance(types, list):
        for shape, of_shape in zip(dims, types, strict=False):
            extents = [extent if isinstance(extent, int) else 0 for extent in shape] if isinstance(shape, list) else []
            total += math.prod(extents) * _WIDTHS.get(str(of_shape).lower(), 4) if shape else 0
    return total
