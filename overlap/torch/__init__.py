"""PyTorch on our ranks: the backend `overlap` of `torch.distributed`, registered by this import.

    import torch.distributed as dist
    import overlap.torch

    dist.init_process_group("overlap")

Tensors of the CPU, torch 2.7 or later: `pip install ".[torch]"`. Versions of torch that look for backends among
the entry points of installed packages need no import.
"""

# The map of this folder:
#
#   backend        registers the backend, keeps the world under torch's default group, and reads launchers' environments
#   process_group  ProcessGroup, which torch's functions call: reductions and transfers, groups, barriers
#   operations     the common part of all operations: c10d's keywords, records of torch's profiler
#   issuing        from a call of torch to operations of ours: options, limits, the calling line, errors
#   tensors        tensors as arrays
#   work           the handle that torch waits for;  typed: its future for C++;  errors: ours as torch's
#   surviving      next_world: programs go on after a loss
#   recording      the computes of torch, in the timeline
#   private        every use of torch's private names

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    from ..version import install_command

    raise ImportError(f"overlap.torch needs PyTorch 2.7 or later: {install_command('torch')}") from _error

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from .backend import register, world
from .process_group import ProcessGroup
from .recording import record
from .work import Work

if TYPE_CHECKING:
    from .surviving import NextWorld, next_world

__all__ = [
    "NextWorld", "ProcessGroup", "Work", "next_world", "record", "register", "world",
]  # fmt: skip

# Few programs go on after a loss.
_LOADED_WHEN_USED = {
    "NextWorld": "surviving",
    "next_world": "surviving",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(_import_module(f".{_LOADED_WHEN_USED[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register()
