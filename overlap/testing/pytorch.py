"""PyTorch in a test: many ranks of `torch.distributed` in one process, each with a default group of its own.

Stands on names of torch that are not public, all of which `check_torch` looks for: the world of groups by thread
(`torch.testing._internal.distributed.multi_threaded_pg`), the registry of groups by thread, and the function that
makes a group of any backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import trio
import xxhash
from torch._C import _distributed_c10d
from torch.autograd import Variable
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from ..errors import UsageError
from ..runtime.future import Future
from ..torch.issuing import line_of, users_frame
from ..torch.process_group import ProcessGroup
from ..torch.work import Work
from .record import Made, Record
from .threads import RankThread
from .watch import Models, Watch
from .world import TestedCommunicators

BACKEND = "overlap_testing"
_ISOLATION = "_set_thread_isolation_mode"
_PRIVATE = (
    (_distributed_c10d, _ISOLATION),
    (c10d, "_new_process_group_helper"),
    (c10d, "_world"),
    (c10d, "_World"),
    (Variable._execution_engine, "queue_callback"),
)


def check_torch() -> None:
    """Refuse versions of torch that lack what tests stand on.

    Raises:
        UsageError: Naming what is missing.
    """
    for owner, name in _PRIVATE:
        if not hasattr(owner, name):
            raise UsageError(
                f"ranks: torch {torch.__version__} has no {name}, on which tests of many ranks in one process stand; "
                "known to work are 2.7 to 2.13"
            )


class WorldOfThread:
    """The process groups of torch, kept apart by rank: what torch keeps once a process."""

    def __init__(self) -> None:
        object.__setattr__(self, "_worlds", {})

    def _world(self) -> Any:
        worlds: dict[object, Any] = object.__getattribute__(self, "_worlds")
        here = RankThread.here()
        if here not in worlds:
            worlds[here] = _State()
        return worlds[here]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._world(), name, value)


class _State:
    """What `torch.distributed` knows of the groups of a process; the attributes of its `_World`, without globals."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.group_count = 0
        self.comms: list[Any] = []
        for name in (
            "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state",
        ):  # fmt: skip
            setattr(self, name, {})

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """Return nothing: it is for the logs of another backend."""
        return []


class Store(dist.Store):  # type: ignore[misc]
    """Store that the ranks of a test share; a rank that waits for a key lets others go on.

    Args:
        values: Of all ranks.
    """

    def __init__(self, values: dict[str, bytes]) -> None:
        super().__init__()
        self._values = values
        self._timeout = timedelta(minutes=5)

    def set(self, key: str, value: Any) -> None:
        """Set a value, and wake the ranks that wait for it."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        _changed()

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key], self._timeout)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        number = int(self._values.get(key, b"0")) + amount
        self.set(key, str(number))
        return number

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a value if it is as expected, or if there is none and nothing is expected; return the present value."""
        expected, desired = (each.encode() if isinstance(each, str) else bytes(each) for each in (expected, desired))
        if self._values.get(key, b"") == expected:
            self.set(key, desired)
        return bytes(self._values.get(key, expected))

    def check(self, keys: list[str]) -> bool:
        """Return whether all values are there."""
        _let_others_go_on()
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many values there are."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` waits."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get` waits."""
        return self._timeout

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all values are there.

        Raises:
            DistStoreError: If they are not in time.
        """
        limit_s = (timeout or self._timeout).total_seconds()
        here = RankThread.here()

        def there() -> bool:
            return all(key in self._values for key in keys)

        if not there() and (here is None or not here.wait_until(there, _change, limit_s)):
            missing = [key for key in keys if key not in self._values]
            raise dist.DistStoreError(f"wait timeout after {limit_s:g} s, keys: {', '.join(missing)}")


_events: list[trio.Event] = []


def _change() -> trio.Event:
    if not _events:
        _events.append(trio.Event())
    return _events[0]


def _changed() -> None:
    here = RankThread.here()
    if _events and here is not None:
        event = _events.pop()
        here.call(event.set)


def _let_others_go_on() -> None:
    here = RankThread.here()
    if here is not None:
        here.sleep(1e-6)


class Pending:
    """A future of ours, for which a rank's thread waits by giving others the baton.

    Args:
        thread: Of the rank.
        future: Of the operation.
        noted: Called when the program has waited for it.
    """

    def __init__(self, thread: RankThread[Any], future: Future[Any], noted: Callable[[], None]) -> None:
        self._thread, self.future, self._noted = thread, future, noted

    @property
    def done(self) -> bool:
        """Whether it has ended; to ask takes a moment."""
        if not self.future.done and RankThread.here() is not None:
            self._thread.sleep(1e-6)
        return bool(self.future.done)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for its end, and raise its error."""
        self._wait(timeout)
        return self.future.result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for its end, and return its error."""
        self._wait(timeout)
        return self.future.exception(0)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` once it is done, in the event loop."""
        self.future.add_done_callback(callback)

    @property
    def src(self) -> Any:
        """Where a message came from, of a receive from any source."""
        return self.future.src  # type: ignore[attr-defined]

    def _wait(self, timeout_s: float | None) -> None:
        if RankThread.here() is not self._thread:
            return
        if not self._thread.wait(self.future, timeout_s):
            raise TimeoutError(f"the operation has not ended within {timeout_s:g} s")
        self._noted()


class ThreadGroup:
    """A group of ours, as the process group of a rank's thread uses it.

    Args:
        ranks: The torch of this rank.
        group: Ours.
    """

    def __init__(self, torch_rank: TorchRank, group: Any) -> None:
        self._torch, self._group = torch_rank, group
        self.rank, self.size, self.name, self.ranks = group.rank, group.size, group.name, group.ranks

    def __getattr__(self, name: str) -> Callable[..., Pending]:
        method = getattr(self._group, name)

        def issue(*args: Any, **more: Any) -> Pending:
            return self._torch.issue(partial(method, *args, **more))

        return issue

    def group(self, ranks: list[int], *, name: str | None = None) -> ThreadGroup:
        """Make a group of some of these."""
        return ThreadGroup(self._torch, self._torch.thread.call(partial(self._group.group, ranks, name=name)))

    def abort(self, error: BaseException | str | None = None) -> None:
        """Fail all operations of the group."""
        self._torch.thread.call(partial(self._group.abort, error))


class TorchRank:
    """The torch of one rank.

    Args:
        thread: Of the rank.
        store: Of all ranks.
        record: Is written to.
        shared: Where operations meet.
        watch: Sees its functions.
        models: Its weights.
    """

    def __init__(
        self,
        thread: RankThread[Any],
        store: dict[str, bytes],
        record: Record,
        shared: TestedCommunicators,
        watch: Watch,
        models: Models,
    ) -> None:
        self.thread, self.record, self.watch, self.models = thread, record, watch, models
        self.store = Store(store)
        self._shared = shared
        self._later: list[tuple[Pending | Any, torch.futures.Future[None]]] = []
        self.named = "gloo"  # the backend that the program has named
        thread.on_resume = self.deliver

    def issue(self, method: Callable[[], Any]) -> Pending:
        """Issue an operation, in the event loop."""
        self.watch.inside += 1
        try:
            state = torch.default_generator.get_state()
            future = self.thread.call(method)
        finally:
            self.watch.inside -= 1
        issue, operation = self._shared.noted.get(id(future), (None, None))
        if issue is None or operation is None:
            return Pending(self.thread, future, _nothing)
        issue.randomness = xxhash.xxh64_hexdigest(memoryview(state.numpy()))
        self.watch.begun(issue, _memory(operation))

        def waited() -> None:
            self.watch.ended(issue)
            if issue.waited_ns is None:
                issue.waited_ns = self.thread.kernel.now_ns

        return Pending(self.thread, future, waited)

    def end(self) -> None:
        """Wait for what the program has left unfinished, as the end of a process of torch does not."""
        self.finish()

    # -- futures of torch, which C++ waits for -----------------------------------------------------------------------

    def later(self, handle: Any, begun: torch.futures.Future[None]) -> None:
        """Complete a future of torch in this rank's thread, when an operation has ended."""
        self._later.append((handle, begun))
        with suppress(RuntimeError):  # no backward pass is under way
            Variable._execution_engine.queue_callback(self.finish)

    def deliver(self) -> None:
        """Complete the futures whose operations have ended."""
        ended = [each for each in self._later if _over(each[0])]
        self._later = [each for each in self._later if each not in ended]
        for _, begun in ended:
            begun.set_result(None)

    def finish(self) -> None:
        """Wait for all operations whose futures C++ may wait for."""
        while self._later:
            self._later[0][0].exception()
            self.deliver()

    # -- groups ------------------------------------------------------------------------------------------------------

    def make(self, asked: Any) -> ProcessGroup:
        """Make the process group that torch asks for."""
        ranks = list(asked.global_ranks_in_group)
        world = ThreadGroup(self, self.thread.rank.world)
        return ProcessGroup(asked.store, world.group(ranks) if ranks else world, asked.timeout)  # type: ignore[arg-type]


def _nothing() -> None:
    """Nobody is told."""


def _memory(operation: Any) -> list[tuple[int, int, bool]]:
    """Return address and bytes of an operation's arrays, and whether it writes to them."""
    found = [(operation.out, True)] if isinstance(operation.out, np.ndarray) else []
    inputs = operation.input if isinstance(operation.input, (list, tuple)) else [operation.input]
    found += [(each, False) for each in inputs if isinstance(each, np.ndarray) and each is not operation.out]
    return [(array.ctypes.data, array.nbytes, written) for array, written in found if array.size]


def _over(handle: Any) -> bool:
    """Whether an operation has ended, without giving others the baton."""
    return bool(handle.future.done) if isinstance(handle, Pending) else bool(handle._over.is_set())


_ranks: dict[RankThread[Any], TorchRank] = {}


def here() -> TorchRank | None:
    """Return the torch of the rank whose thread calls."""
    thread = RankThread.here()
    return None if thread is None else _ranks.get(thread)


def _create(asked: Any, _: object = None) -> ProcessGroup:
    rank = here()
    assert rank is not None, "groups of this backend are made in the thread of a rank"
    return rank.make(asked)


def _init_process_group(
    original: Callable[..., None],
    backend: Any = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Join the ranks of the test, whatever backend and meeting the program names."""
    mine = here()
    if mine is None:
        original(backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id)
        return
    size, number = mine.thread.rank.world_size, mine.thread.rank.rank
    if world_size not in (-1, size):
        raise ValueError(f"world_size: the program says {world_size}, and the test has {size} ranks")
    if rank not in (-1, number):
        raise ValueError(f"rank: the program says {rank} on rank {number} of the test")
    mine.named = str(backend or "gloo").lower()
    original(
        BACKEND, timeout=timeout or timedelta(minutes=30), world_size=size, rank=number, store=mine.store,
        group_name=group_name,
    )  # fmt: skip


def _new_group_helper(original: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Make a group of our backend, whichever the program names, and note that the rank has come here."""
    mine = here()
    if mine is None:
        return original(*args, **more)
    size, number, ranks, named, *rest = args
    caller = sys._getframe(1)
    while caller.f_back is not None and caller.f_code.co_name not in ("_new_group_with_tag",):
        caller = caller.f_back
    if ranks:
        alone = bool(caller.f_locals.get("use_local_synchronization", False))
        mine.record.made.append(
            Made(rank=mine.thread.rank.rank, ranks=tuple(ranks), line=line_of(users_frame()), alone=alone)
        )
    more.pop("backend_options", None)
    more.pop("device_id", None)
    made = original(size, number, ranks, c10d.Backend(BACKEND), *rest[:2], **more)
    if made[0] in c10d._world.pg_map:
        c10d._world.pg_map[made[0]] = (_told(named, mine), c10d._world.pg_map[made[0]][1])
    return made


def _told(named: Any, rank: TorchRank) -> str:
    """Return the backend that the program believes in."""
    name = str(named).lower()
    return rank.named if BACKEND in name else name


def _get_future(work: Work) -> torch.futures.Future[Any]:
    """Return a future that is completed in the thread of the rank; see `Work.get_future`."""
    rank = here()
    if work._future is None:
        begun: torch.futures.Future[None] = torch.futures.Future()
        work._future = begun.then(work._value)
        if rank is None or _over(work._handle):
            begun.set_result(None)
        else:
            rank.later(work._handle, begun)
    return work._future


def _finishing(original: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Let operations end before C++ waits for their futures with the baton in its hand."""
    rank = here()
    if rank is not None:
        rank.finish()
    return original(*args, **more)


@contextmanager
def torch_of_ranks() -> Iterator[None]:
    """Let every rank's thread have a torch.distributed of its own."""
    check_torch()
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    threads = torch.get_num_threads()
    state = torch.random.get_rng_state()
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value))

        put(c10d, "_world", WorldOfThread())
        joined = partial(_init_process_group, c10d.init_process_group)
        put(c10d, "init_process_group", joined)
        put(dist, "init_process_group", joined)
        put(c10d, "_new_process_group_helper", partial(_new_group_helper, c10d._new_process_group_helper))
        put(Work, "get_future", _get_future)
        put(DistributedDataParallel, "__init__", _wrapping(DistributedDataParallel.__init__))
        put(torch.futures.Future, "wait", _method(torch.futures.Future.wait))
        put(torch.futures, "wait_all", partial(_finishing, torch.futures.wait_all))
        getattr(_distributed_c10d, _ISOLATION)(True)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            getattr(_distributed_c10d, _ISOLATION)(False)
            torch.set_num_threads(threads)
            torch.random.set_rng_state(state)
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(deterministic)
            _ranks.clear()
            _events.clear()


def _method(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any) -> Any:
        return _finishing(original, self)

    return wait


def _wrapping(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        rank = here()
        if rank is not None:
            rank.models.synchronised = True

    return init


def exchange() -> Callable[[], None]:
    """Return a function that restores the present state of torch's random numbers and its default type."""
    state, dtype = torch.default_generator.get_state(), torch.get_default_dtype()

    def restore() -> None:
        torch.default_generator.set_state(state)
        torch.set_default_dtype(dtype)

    return restore


def enter(
    thread: RankThread[Any],
    store: dict[str, bytes],
    record: Record,
    shared: TestedCommunicators,
    watch: Watch,
    models: Models,
) -> TorchRank:
    """Give a rank its torch."""
    made = _ranks[thread] = TorchRank(thread, store, record, shared, watch, models)
    return made
