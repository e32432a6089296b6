"""Threads of PyTorch that save checkpoints, as `async_save` starts them: each takes turns with the thread of its rank.

The threads in which `torch.distributed.checkpoint` stages and saves communicate. Each becomes a second thread of its
rank, which runs one function and ends.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any

import trio
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

from ..torch.operations import frame_line, users_frame
from .threads import RankThread, UntestableError
from .torch_rank import RANKS, TorchRank

_CHECKPOINTS = "torch.distributed.checkpoint."
_OF_PROCESSES = f"{_CHECKPOINTS}_async_process_executor"
# Virtual time of a look at a future that is not done.
_LOOK_S = 1e-6


class SaveFuture(Future[Any]):
    """Future of a function that runs in a thread of the rank; a wait for it gives the turn to the thread."""

    ended: trio.Event

    def __init__(self) -> None:
        super().__init__()
        self.ended = trio.Event()

    def done(self) -> bool:
        """Return whether the function has ended; the question takes a moment of virtual time."""
        here = RankThread.current()
        if here is not None and not super().done():
            here.sleep(_LOOK_S)
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end, and return the result."""
        return super().result(self._wait(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the error."""
        return super().exception(self._wait(timeout))

    def _wait(self, timeout_s: float | None) -> float | None:
        """Wait for the end in the thread of a rank; return the time that is left for a real wait."""
        thread = RankThread.current()
        if thread is None:
            return timeout_s
        if not super().done():
            thread.wait_until(super().done, lambda: self.ended, inf if timeout_s is None else timeout_s)
        return 0.0


def submit(
    thread: RankThread[Any],
    original: Callable[..., Future[Any]],
    pool: ThreadPoolExecutor,
    function: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Future[Any]:
    """Run a function of a pool of threads; one of PyTorch's checkpoints runs in a thread of the rank."""
    module = getattr(function, "__module__", None) or ""
    if not module.startswith(_CHECKPOINTS):
        return original(pool, function, *args, **options)
    if module == _OF_PROCESSES:
        raise UntestableError(
            "the program saves a checkpoint in a process of its own, and a test has one process: use "
            "AsyncCheckpointerType.THREAD"
        )
    future = SaveFuture()
    thread.start_thread(
        partial(_run_in_thread, RANKS[thread], frame_line(users_frame()), future, partial(function, *args, **options))
    )
    return future


def _run_in_thread(
    torch_rank: TorchRank, site: str, future: SaveFuture, function: Callable[[], Any], thread: RankThread[Any]
) -> None:
    torch_rank.add_thread(thread, site)
    for group, name in c10d._world.pg_names.items():
        _distributed_c10d._register_process_group(name, group)  # C++ keeps names by thread
    try:
        result = function()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
    thread.call(future.ended.set)
