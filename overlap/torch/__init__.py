"""PyTorch on our ranks: the backend `overlap` of `torch.distributed`, registered by this import.

    import torch.distributed as dist
    import overlap.torch

    dist.init_process_group("overlap")

Tensors of the CPU, torch 2.7 or later: `pip install ".[torch]"`. Versions of torch that look for backends among
the entry points of what is installed need no import.
"""

# The map of this room:
#
#   backend        registers the backend, keeps the world under torch's default group, and reads launchers' environments
#   process_group  ProcessGroup, which torch's functions call: reductions and transfers, groups, barriers
#   operations     what all operations share: c10d's keywords, records of torch's profiler
#   issuing        from a call of torch to operations of ours: options, limits, the calling line, errors
#   tensors        tensors as arrays
#   work           the handle that torch waits for;  typed: its future for C++;  errors: ours as torch's
#   model          modules whose gradients leave in buckets:
#   data_parallel  DataParallel: every rank has all weights;  sharded: Sharded: ZeRO
#   recording      the computes of torch, in the timeline

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    from ..version import install_command

    raise ImportError(f"overlap.torch needs PyTorch 2.7 or later: {install_command('torch')}") from error

from .backend import register, world
from .data_parallel import DataParallel
from .process_group import ProcessGroup
from .recording import record
from .sharded import Sharded
from .work import Work

__all__ = ["DataParallel", "ProcessGroup", "Sharded", "Work", "record", "register", "world"]

register()
