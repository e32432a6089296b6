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
# Virtual seconds that asking takes whether a future is done, if it is not.
_LOOK_S = 1e-6


class SaveFuture(Future[Any]):
    """Future of a function that runs in a further thread of a rank; waiting for it lets this thread run.

    Attributes:
        ended: Set in the event loop when the function has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended: trio.Event = trio.Event()

    def done(self) -> bool:
        """Return whether the function has ended. Asking takes a moment of virtual time, for loops that poll."""
        here = RankThread.current()
        if here is not None and not super().done():
            here.sleep(_LOOK_S)
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end, and return the result, or raise the error of the function."""
        return super().result(self._wait_for_end(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the error of the function, or None."""
        return super().exception(self._wait_for_end(timeout))

    def _wait_for_end(self, timeout_s: float | None) -> float | None:
        """Wait in virtual time, if a rank's thread calls; return the seconds to wait in real time.

        These are 0 for a rank's thread, otherwise `timeout_s` (None: without a limit).
        """
        thread = RankThread.current()
        if thread is None:
            return timeout_s
        if not super().done():
            thread.wait_until(super().done, lambda: self.ended, inf if timeout_s is None else timeout_s)
        return 0.0


def submit_to_rank(
    thread: RankThread[Any],
    original: Callable[..., Future[Any]],
    pool: ThreadPoolExecutor,
    function: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Future[Any]:
    """Run a function, in place of `ThreadPoolExecutor.submit`: one of PyTorch's checkpoints in a thread of the rank.

    Other functions run in the pool, as usual.

    Args:
        thread: Thread of the rank that calls.
        original: `submit` of the pool.
        pool: The pool.
        function: The function.
        args: Arguments of the function.
        options: Keyword arguments of the function.

    Raises:
        UntestableError: The function would save in a process of its own.
    """
    module = getattr(function, "__module__", None) or ""
    if not module.startswith(_CHECKPOINTS):
        return original(pool, function, *args, **options)
    if module == _OF_PROCESSES:
        raise UntestableError(
            f"{frame_line(users_frame())}: async_save: saves the checkpoint in a process of its own, and a test has "
            "one process: use AsyncCheckpointerType.THREAD"
        )
    future = SaveFuture()
    thread.start_thread(
        partial(_run_save, RANKS[thread], frame_line(users_frame()), future, partial(function, *args, **options))
    )
    return future


def _run_save(
    torch_rank: TorchRank, site: str, future: SaveFuture, function: Callable[[], Any], thread: RankThread[Any]
) -> None:
    """Run a function in a second thread of a rank, and settle its future; `site` is the line that saves."""
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
