"""PyTorch on our ranks: the backend `overlap` of `torch.distributed`, registered by this import.

    import torch.distributed as dist
    import overlap.torch

    dist.init_process_group("overlap")

Tensors of the CPU, torch 2.7 or later: `pip install ".[torch]"`. Versions of torch that look for backends among
the entry points of what is installed need no import.
"""

# The map of this room:
#
#   backend        registers it, and keeps the world under torch's default group
#   meeting        where processes meet that mpiexec or srun has started
#   process_group  what torch's functions call: ProcessGroup, of reductions, copies and messages
#   issuing        from such a call to operations of ours;  options: what torch asks for besides tensors
#   calling        where in the user's program it came from
#   tensors        tensors as arrays;  sparse: sums of those that have few elements
#   work           the handle that torch waits for
#   recording      what torch computes, in the timeline
#   monitored      the barrier that says who did not come
#   errors         our errors as torch's
#   model          modules whose gradients leave in buckets:
#   data_parallel  DataParallel: every rank has all weights;  sharded: Sharded: ZeRO

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
