"""Run a function on several ranks of torch.distributed, each a fork of this process, and collect what they return.

Forks start in milliseconds, where starting Python with torch takes seconds. Whoever forks must not have used threads of
torch before: run this in a process of its own.
"""

import io
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(size: int, backend: str, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """Return what `function(*args)` returns on each rank, in order.

    Raises:
        RuntimeError: If a rank failed; with its traceback.
    """
    context = torch.multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            told = (sender, rank, size, backend, folder, function, args, timeout_s)
            process = context.Process(target=_rank, args=told)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        results = []
        try:
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(timeout_s):
                    raise RuntimeError(f"rank {rank} has said nothing within {timeout_s} s")
                well, value = pipe.recv()
                if not well:
                    raise RuntimeError(f"rank {rank}:\n{value}")
                results.append(torch.load(io.BytesIO(value), weights_only=False))
        finally:
            for process in processes:
                if len(results) < size:
                    process.terminate()
                process.join(10)
        return results


def _rank(
    sender: Any, rank: int, size: int, backend: str, folder: str, function: Any, args: Any, timeout_s: float
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        written = io.BytesIO()  # whole: a pipe would hand on descriptors of memory that ends with this process
        torch.save(function(*args), written)
        sender.send((True, written.getvalue()))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send((False, traceback.format_exc()))
        raise
    finally:
        sender.close()
    os._exit(0)
