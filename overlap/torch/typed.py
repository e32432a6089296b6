"""Typed futures: futures of lists of tensors whose values C++ code can read, unlike those of futures made in Python.

DDP's built-in hook FP16_COMPRESS, which is C++ code, needs them. From Python, torch makes such futures only for
scripted functions. So a scripted function waits for the operation, in a thread of torch's pool between operators.
"""

# Torch compiles scripted functions by their annotations, so `from __future__ import annotations` is not possible here.

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
    """Whether C++ code of torch's backward pass has called into this package, as DDP's hooks do.

    Then the innermost Python frame outside of this package is `_engine_run_backward`.

    Args:
        frames: Number of frames of this package above that frame, without the frame of this function.
    """
    return sys._getframe(frames + 1).f_code.co_name == "_engine_run_backward"


def needs_typed_future(tensors: object) -> bool:
    """Whether tensors may be those of DDP's hook FP16_COMPRESS, which needs a typed future: one tensor of float16."""
    return isinstance(tensors, list) and len(tensors) == 1 and tensors[0].dtype is torch.float16


def make_typed_future(wait_for_result: Callable[[], list[torch.Tensor]]) -> Any:
    """Return a typed future of the result of `wait_for_result`, which a thread of torch's pool calls once.

    A scripted function takes no Python function as argument. So it gets a number, by which `_wait_once` finds
    `wait_for_result`.
    """
    with _lock:
        number = next(_numbers)
        _waits[number] = wait_for_result
    return _scripted_fork()(number)


def _wait_in_pool(number: int) -> list[torch.Tensor]:
    # this function is scripted, and calls `_wait_once`, which stays in Python
    return _wait_once(number)


def _wait_once(number: int) -> list[torch.Tensor]:
    return _waits.pop(number)()


def _fork_wait(number: int) -> torch.jit.Future[list[torch.Tensor]]:
    """Start the wait of a number in torch's pool, and return its future."""
    return torch.jit.fork(_wait_in_pool, number)


@cache
def _scripted_fork() -> Any:
    """Return `_fork_wait` as a scripted function, whose future is a typed one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which has no successor for this
        torch.jit.ignore(_wait_once)
        return torch.jit.script(_fork_wait)
