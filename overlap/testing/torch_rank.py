"""The torch.distributed of one rank: its operations, its groups, and the futures that C++ waits for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from ..ranklist import listed
from ..runtime.future import Future
from ..torch import private
from ..torch.process_group import ProcessGroup
from .record import Issue, Record
from .threads import RankThread
from .torch_store import SharedStore
from .watch import ModelWatch, Watch, random_digest
from .world import RecordingInjector


class Pending:
    """A future of ours, for which a rank's thread waits by giving others the baton.

    Args:
        rank: The rank.
        issue: The operation; None: it is not recorded.
    """

    def __init__(self, rank: TorchRank, future: Future[Any], issue: Issue | None) -> None:
        self._rank, self._issue = rank, issue
        self.future: Future[Any] = future

    @property
    def done(self) -> bool:
        """Whether the operation has ended; the question takes a moment of virtual time."""
        if not self.future.done and RankThread.current() is not None:
            self._rank.thread.sleep(1e-6)
        return bool(self.future.done)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end of the operation, and raise its error."""
        if (error := self.exception(timeout)) is not None:
            raise error
        return self.future.result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the operation, and return its error."""
        self._wait(timeout)
        error = self.future.exception(0)
        if error is not None:  # C++ passes on only its text
            self._rank.record.troubles[self._rank.thread.rank.rank] = error
        return error

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` in the event loop once the operation is done."""
        self.future.add_done_callback(callback)

    @property
    def src(self) -> Any:
        """Rank that sent a message, of a receive from any source."""
        return self.future.src  # type: ignore[attr-defined]

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for the end of the operation in its rank's thread; other threads find it ended."""
        thread = self._rank.thread
        if RankThread.current() is not thread:
            return
        if not thread.wait(self.future, timeout_s):
            raise TimeoutError(f"the operation has not ended within {timeout_s:g} s")
        if self._issue is not None:
            self._rank.watch.operation_awaited(self._issue)
            if self._issue.waited_ns is None:
                self._issue.waited_ns = thread.kernel.now_ns


class NoPorts:
    """Ports and messages of a group in a test: no call is issued again in few steps, because every one is recorded."""

    def reissue(self, *call: object, waits: bool = False) -> None:
        """Return None: the call must be issued in full."""

    def keep(self, key: object, operation: object) -> None:
        """Keep nothing."""


class ThreadGroup:
    """A group of ours, as the process group of a rank's thread uses it."""

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
        """Make a group of some ranks of this one."""
        return ThreadGroup(self._torch, self._torch.thread.call(partial(self._group.group, ranks, name=name)))

    def abort(self, error: BaseException | str | None = None) -> None:
        """Fail all operations of the group."""
        self._torch.thread.call(partial(self._group.abort, error))


class TorchRank:
    """The torch.distributed of one rank: its groups, its store, and the operations of its thread.

    Args:
        record: What tests know of the run.
        injector: Injects faults and orders.
        watch: Observes functions of torch.
        models: Observes models and optimizers.
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
        self._later: list[tuple[Pending | Any, torch.futures.Future[None]]] = []
        self._unwaited: list[Pending | Any] = []  # operations that ended in another wait; C++ waits for their futures
        self._groups: dict[tuple[int, ...], int] = {}  # how many have been made of the same ranks
        self.at_once: bool = False  # whether futures are made complete, as C++ waits for them before Python runs again
        self.site: str = ""  # the line of the program that started this thread, if another thread did
        self._number = self._threads = 0  # of this thread, and of the last one that was begun
        self.named: str = "gloo"  # the backend that the program has named
        self.dropped_by: str = ""  # the code of torch that issues operations now and waits for none of them
        thread.on_resume = self.deliver
        RANKS[thread] = self

    def add_thread(self, thread: RankThread[Any], site: str) -> TorchRank:
        """Return the torch of another thread of this rank, which shares store and groups.

        Args:
            thread: The thread.
            site: Line of its operations, as "file:line".
        """
        watch = Watch(thread, self.record, timed=False)
        other = TorchRank(thread, {}, self.record, self._injector, watch, self.models)
        other.store, other.named, other._groups = self.store, self.named, self._groups
        self._threads += 1
        other.site, other._number = site, self._threads
        return other

    def issue(self, method: Callable[[], Any]) -> Pending:
        """Issue an operation, in the event loop."""
        with self.watch.paused():
            randomness = random_digest()
            future = self.thread.call(method)
        issue, operation = self._injector.unfinished.get(id(future), (None, None))
        if issue is None or operation is None:
            return Pending(self, future, None)
        issue.thread, issue.dropped_by = self._number, self.dropped_by
        issue.randomness = randomness
        arrays = _array_memory(operation)
        self.watch.operation_issued(issue, arrays)
        self.models.operation_issued(issue, self.record.size, arrays)
        return Pending(self, future, issue)

    # -- futures of torch, which C++ waits for -----------------------------------------------------------------------

    def complete_later(self, handle: Any, start: torch.futures.Future[None]) -> None:
        """Complete a future of torch in this rank's thread, when an operation has ended."""
        self._later.append((handle, start))
        with suppress(RuntimeError):  # no backward pass is under way
            private.after_backward(self.finish)

    def deliver(self) -> None:
        """Complete the futures of operations that ended."""
        ended = [pair for pair in self._later if has_ended(pair[0])]
        self._later = [pair for pair in self._later if pair not in ended]
        for handle, start in ended:
            self._unwaited.append(handle)
            start.set_result(None)

    def finish(self) -> None:
        """Wait for all operations with futures that C++ may wait for; the end of a real process does not wait."""
        while self._later:
            self._later[0][0].exception()
            self.deliver()
        unwaited, self._unwaited = self._unwaited, []
        for handle in unwaited:
            handle.exception()

    # -- groups ------------------------------------------------------------------------------------------------------

    def make_group(self, request: Any) -> ProcessGroup:
        """Make the process group that torch asks for."""
        ranks = list(request.global_ranks_in_group)
        group = ThreadGroup(self, self.thread.rank.world)
        if ranks:
            same = self._groups[tuple(ranks)] = self._groups.get(tuple(ranks), 0) + 1
            group = group.group(ranks, name=f"{listed(ranks)}{f', number {same}' if same > 1 else ''}")
        return ProcessGroup(request.store, group, request.timeout)  # type: ignore[arg-type]


def _array_memory(operation: Any) -> list[tuple[int, int, bool]]:
    """Return the address and bytes of each array of an operation, and whether it is written."""
    arrays = [(operation.out, True)] if isinstance(operation.out, np.ndarray) else []
    inputs = operation.input if isinstance(operation.input, (list, tuple)) else [operation.input]
    arrays += [(array, False) for array in inputs if isinstance(array, np.ndarray) and array is not operation.out]
    return [(array.ctypes.data, array.nbytes, written) for array, written in arrays if array.size]


def has_ended(handle: Any) -> bool:
    """Whether an operation has ended; the caller keeps the baton."""
    return bool(handle.future.done) if isinstance(handle, Pending) else bool(handle._ended.is_set())


RANKS: dict[RankThread[Any], TorchRank] = {}


def current_rank() -> TorchRank | None:
    """Return the `TorchRank` of the calling thread; None in other threads."""
    thread = RankThread.current()
    return None if thread is None else RANKS.get(thread)
