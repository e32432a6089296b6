"""Futures of lists of tensors that C++ can read, unlike futures made in Python.

DDP's built-in FP16_COMPRESS hook, in C++, takes nothing else. Torch makes such futures in Python only of scripted
functions, so a scripted function waits for the operation, in a thread of torch's pool between operators.
"""

# Scripted functions are read with their annotations, so these are no strings here.

import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import torch

_waits: dict[int, Callable[[], list[torch.Tensor]]] = {}
_numbers, _lock = count(), threading.Lock()


def wanted(tensors: object, frames: int) -> bool:
    """Whether the caller is that hook: C++ under a backward pass, for one tensor of float16.

    Args:
        tensors: Tensors of the operation.
        frames: How many frames of ours lie between this call and the caller.
    """
    if not isinstance(tensors, list) or len(tensors) != 1 or tensors[0].dtype is not torch.float16:
        return False
    return sys._getframe(frames + 1).f_code.co_name == "_engine_run_backward"


def future(wait: Callable[[], list[torch.Tensor]]) -> Any:
    """Return a future of the result of `wait`."""
    with _lock:
        number = next(_numbers)
        _waits[number] = wait
    return _scripted()(number)


def _tensors_of_number(number: int) -> list[torch.Tensor]:
    return _tensors_of(number)


def _tensors_of(number: int) -> list[torch.Tensor]:
    return _waits.pop(number)()


def _begin(number: int) -> torch.jit.Future[list[torch.Tensor]]:
    return torch.jit.fork(_tensors_of_number, number)


@cache
def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which has no successor for this
        torch.jit.ignore(_tensors_of)
        return torch.jit.script(_begin)
