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


def is_for_backward(frames: int) -> bool:
    """Whether DDP in C++ is the caller, `frames` frames of ours above: what it chains to a future does not wait."""
    return sys._getframe(frames + 1).f_code.co_name == "_engine_run_backward"


def needs_typed_future(tensors: object) -> bool:
    """Whether DDP's hook in C++ needs a typed future of some tensors: of one tensor of float16."""
    return isinstance(tensors, list) and len(tensors) == 1 and tensors[0].dtype is torch.float16


def future(wait_for_result: Callable[[], list[torch.Tensor]]) -> Any:
    """Return a future of the result of `wait_for_result`."""
    with _lock:
        number = next(_numbers)
        _waits[number] = wait_for_result
    return _scripted_fork()(number)


def _wait_in_pool(number: int) -> list[torch.Tensor]:
    return _wait_once(number)


def _wait_once(number: int) -> list[torch.Tensor]:
    return _waits.pop(number)()


def _fork(number: int) -> torch.jit.Future[list[torch.Tensor]]:
    """Start the wait for an operation in torch's pool."""
    return torch.jit.fork(_wait_in_pool, number)


@cache
def _scripted_fork() -> Any:
    """Return `_fork` as a scripted function, with a future that C++ can read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which has no successor for this
        torch.jit.ignore(_wait_once)
        return torch.jit.script(_fork)
