"""The torch.distributed of one rank: its operations, its groups, and the futures that C++ waits for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from ..ranklist import format_rank_list
from ..runtime.future import Future
from ..torch import private
from ..torch.process_group import ProcessGroup
from .record import Issue, Record
from .threads import RankThread
from .torch_store import SharedStore
from .watch import ArrayMemory, ModelWatch, Watch, random_digest
from .world import RecordingInjector


class Pending:
    """An operation under way, for which a rank's thread waits while other ranks run.

    Args:
        rank: The rank.
        future: The operation's future, which belongs to the event loop.
        issue: The record of the operation; None: it is not recorded.
    """

    def __init__(self, rank: TorchRank, future: Future[Any], issue: Issue | None) -> None:
        self._rank, self._issue = rank, issue
        self.future: Future[Any] = future

    @property
    def done(self) -> bool:
        """Whether the operation has ended. Asking takes a moment of virtual time, so that loops that poll go on."""
        if not self.future.done and RankThread.current() is not None:
            self._rank.thread.sleep(1e-6)
        return bool(self.future.done)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end of the operation, and return its result or raise its error.

        Args:
            timeout: Seconds of virtual time; None: without limit.

        Raises:
            TimeoutError: The operation has not ended within `timeout`.
        """
        if (error := self.exception(timeout)) is not None:
            raise error
        return self.future.result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the operation, and return its error, or None if it ended without one.

        Args:
            timeout: Seconds of virtual time; None: without limit.

        Raises:
            TimeoutError: The operation has not ended within `timeout`.
        """
        self._wait_for_end(timeout)
        error = self.future.exception(0)
        if error is not None:
            # Keep the error for the verdict: C++ passes on only its text.
            number = self._rank.thread.rank.rank
            self._rank.record.troubles[number] = error
        return error

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` in the event loop once the operation is done."""
        self.future.add_done_callback(callback)

    @property
    def src(self) -> Any:
        """For a receive from any source, the rank that sent the message."""
        return self.future.src  # type: ignore[attr-defined]

    def _wait_for_end(self, timeout_s: float | None) -> None:
        """Wait for the end of the operation, if the thread of its rank calls; return at once in other threads."""
        thread = self._rank.thread
        if RankThread.current() is not thread:
            return
        if not thread.wait(self.future, timeout_s):
            operation = "the operation" if self._issue is None else self._issue.title
            raise TimeoutError(
                f"rank {thread.rank.rank}: {operation} has not ended within {timeout_s:g} s; look for the rank that "
                "has not called it, or pass a longer timeout"
            )
        if self._issue is not None:
            self._rank.watch.on_operation_awaited(self._issue)
            if self._issue.waited_ns is None:
                self._issue.waited_ns = thread.kernel.now_ns


class NoPorts:
    """Stand-in for the caches of a group's calls: in a test every call is issued in full, to be recorded."""

    def reissue(self, *call: object, waits: bool = False) -> None:
        """Return None: the call must be issued in full."""

    def keep_for_reissue(self, key: object, operation: object) -> None:
        """Do nothing."""


class ThreadGroup:
    """A group of overlap whose operations are issued from a rank's thread; each method call returns a `Pending`.

    Args:
        torch_rank: The rank that makes the group. Other threads of this rank issue operations as themselves.
        group: The group of overlap, which belongs to the event loop.
    """

    def __init__(self, torch_rank: TorchRank, group: Any) -> None:
        self._torch, self._group = torch_rank, group
        self._ports = self._messages = NoPorts()
        self.rank: int = group.rank
        self.size: int = group.size
        self.name: str = group.name
        self.ranks: tuple[int, ...] = group.ranks

    def __getattr__(self, name: str) -> Callable[..., Pending]:
        method = getattr(self._group, name)

        def issue(*args: Any, **more: Any) -> Pending:
            issuer = current_rank() or self._torch
            if issuer.site and "call_site" in more:
                more["call_site"] = issuer.site
            return issuer.issue(partial(method, *args, **more))

        return issue

    def group(self, ranks: list[int], *, name: str | None = None) -> ThreadGroup:
        """Make a group of some ranks of this group, given by their indexes in it."""
        return ThreadGroup(self._torch, self._torch.thread.call(partial(self._group.group, ranks, name=name)))

    def abort(self, error: BaseException | str | None = None) -> None:
        """Fail all operations of the group."""
        self._torch.thread.call(partial(self._group.abort, error))


class TorchRank:
    """The torch.distributed of one rank: its groups, its store, and the operations of its thread.

    Args:
        thread: The rank's thread.
        store: Values of the store that all ranks share.
        record: The record of the run.
        injector: Injector of faults, which records operations.
        watch: Watch of the rank's functions of torch.
        models: Watch of the rank's models and optimizers.
    """

    def __init__(
        self,
        thread: RankThread[Any],
        store: dict[str, bytes],
        record: Record,
        injector: RecordingInjector,
        watch: Watch,
        models: ModelWatch,
    ) -> None:
        self.thread: RankThread[Any] = thread
        self.record: Record = record
        self.watch: Watch = watch
        self.models: ModelWatch = models
        self.store: SharedStore = SharedStore(store)
        self._injector = injector
        self._later: list[tuple[Pending | Any, torch.futures.Future[None]]] = []  # operations, and futures to complete
        self._unwaited: list[Pending | Any] = []  # ended operations whose futures C++ waits for
        self._groups: dict[tuple[int, ...], int] = {}  # number of groups made so far, by their ranks
        self.at_once: bool = False  # whether futures must be complete when made, as C++ waits without running Python
        self.site: str = ""  # in a further thread: the line that started it
        self._number = self._threads = 0  # number of this thread, and of the last one that was added
        self.backend_name: str = "gloo"  # the backend that the program has named
        self.dropped_by: str = ""  # the code of torch that issues operations now, and waits for none of them
        thread.on_resume = self.complete_ended_futures
        RANKS[thread] = self

    def add_thread(self, thread: RankThread[Any], site: str) -> TorchRank:
        """Return the `TorchRank` of another thread of this rank, which shares store and groups.

        Args:
            thread: The thread.
            site: Call site of all of its operations, as "file:line".
        """
        watch = Watch(thread, self.record, timed=False)
        other = TorchRank(thread, {}, self.record, self._injector, watch, self.models)
        other.store, other.backend_name, other._groups = self.store, self.backend_name, self._groups
        self._threads += 1
        other.site, other._number = site, self._threads
        return other

    def issue(self, method: Callable[[], Any]) -> Pending:
        """Issue an operation: call `method`, which returns its future, in the event loop; and record its arrays."""
        with self.watch.paused():
            randomness = random_digest()
            future = self.thread.call(method)
        issue, operation = self._injector.unfinished.get(id(future), (None, None))
        if issue is None or operation is None:
            return Pending(self, future, None)
        issue.thread, issue.dropped_by = self._number, self.dropped_by
        issue.randomness = randomness
        arrays = _array_memory(operation)
        self.watch.on_operation_issued(issue, arrays)
        self.models.on_operation_issued(issue, self.record.size, arrays)
        return Pending(self, future, issue)

    # -- futures of torch, which C++ waits for -----------------------------------------------------------------------

    def complete_when_ended(self, handle: Any, start: torch.futures.Future[None]) -> None:
        """Have a future of torch completed, in this rank's thread, when an operation has ended.

        Args:
            handle: The operation.
            start: The future.
        """
        self._later.append((handle, start))
        with suppress(RuntimeError):  # no backward pass is under way
            private.call_after_backward(self.wait_for_futures)

    def complete_ended_futures(self) -> None:
        """Complete the futures of torch whose operations have ended, without waiting for others."""
        ended = [pair for pair in self._later if has_ended(pair[0])]
        self._later = [pair for pair in self._later if pair not in ended]
        for handle, start in ended:
            self._unwaited.append(handle)
            start.set_result(None)

    def wait_for_futures(self) -> None:
        """Wait for every operation that has a future of torch, and complete these futures. No error is raised.

        C++ waits for such futures at the end of a backward pass, without letting other ranks run: so call this before.
        It is called after the program of a rank, too.
        """
        while self._later:
            handle, _ = self._later[0]
            handle.exception()  # waits, and records an error, which C++ raises from the future
            self.complete_ended_futures()  # removes the operation from `_later`
        unwaited, self._unwaited = self._unwaited, []
        for handle in unwaited:
            handle.exception()  # records the error, and that the program has waited for the operation

    # -- groups ------------------------------------------------------------------------------------------------------

    def make_group(self, request: Any) -> ProcessGroup:
        """Make the process group that torch asks for: of the ranks in the request, or of all if it names none."""
        ranks = list(request.global_ranks_in_group)
        group = ThreadGroup(self, self.thread.rank.world)
        if ranks:
            same = self._groups[tuple(ranks)] = self._groups.get(tuple(ranks), 0) + 1
            group = group.group(ranks, name=f"{format_rank_list(ranks)}{f', number {same}' if same > 1 else ''}")
        return ProcessGroup(request.store, group, request.timeout)  # type: ignore[arg-type]


def _array_memory(operation: Any) -> list[ArrayMemory]:
    """Return the memory of the output and the inputs of an operation, as far as they are arrays with elements."""
    arrays = [(operation.out, True)] if isinstance(operation.out, np.ndarray) else []
    inputs = operation.input if isinstance(operation.input, (list, tuple)) else [operation.input]
    arrays += [(array, False) for array in inputs if isinstance(array, np.ndarray) and array is not operation.out]
    return [ArrayMemory(array.ctypes.data, array.nbytes, is_written) for array, is_written in arrays if array.size]


def has_ended(handle: Any) -> bool:
    """Whether an operation has ended. Unlike `Pending.done`, this lets no other rank run."""
    return bool(handle.future.done) if isinstance(handle, Pending) else bool(handle._ended.is_set())


RANKS: dict[RankThread[Any], TorchRank] = {}
"""The `TorchRank` of each thread of a rank."""


def current_rank() -> TorchRank | None:
    """Return the `TorchRank` of the calling thread, or None in other threads."""
    thread = RankThread.current()
    return None if thread is None else RANKS.get(thread)
