"""PyTorch in a test: many ranks of `torch.distributed` in one process, each with a default group of its own.

Stands on names of torch that are not public, all of which `check_torch` looks for: the world of groups by thread
(`torch.testing._internal.distributed.multi_threaded_pg`), the registry of groups by thread, and the function that
makes a group of any backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.autograd import Variable
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ..errors import UsageError
from ..runtime.rank import Rank
from ..torch import recording
from ..torch.backend import rank_of
from ..torch.issuing import line_of, users_frame
from ..torch.process_group import ProcessGroup
from ..torch.work import Work
from .record import Made, Record
from .threads import RankThread
from .torch_profiler import Profiler
from .torch_rank import RANKS, TorchRank, here, over
from .torch_store import STORES, forget
from .watch import ModelWatch, Watch
from .world import TestedCommunicators

BACKEND = "overlap_testing"
_FSDP_TIMES = "torch.distributed.fsdp._debug_utils"
rendezvous = sys.modules["torch.distributed.rendezvous"]  # `dist.rendezvous` is its function
_LOSS = "torch.distributed.tensor.parallel.loss"
_ISOLATION = "_set_thread_isolation_mode"
_PRIVATE = (
    (_distributed_c10d, _ISOLATION),
    (c10d, "_new_process_group_helper"),
    (c10d, "_world"),
    (c10d, "_World"),
    (Variable._execution_engine, "queue_callback"),
    (DistributedDataParallel, "_delayed_all_reduce_hook"),
    *((torch.autograd.profiler, f"_{name}_profiler") for name in ("prepare", "enable", "disable")),
)


def check_torch() -> None:
    """Refuse versions of torch that lack parts that tests need.

    Raises:
        UsageError: Names the missing part.
    """
    for owner, name in _PRIVATE:
        if not hasattr(owner, name):
            raise UsageError(
                f"ranks: torch {torch.__version__} has no {name}, on which tests of many ranks in one process stand; "
                "known to work are 2.7 to 2.13"
            )


class WorldOfThread:
    """Process groups of torch, one set for each rank; torch has one set for each process."""

    def __init__(self) -> None:
        object.__setattr__(self, "_worlds", {})

    def _world(self) -> Any:
        worlds: dict[object, Any] = object.__getattribute__(self, "_worlds")
        owner = RankThread.owner()
        rank = None if owner is None else owner.rank
        if rank not in worlds:
            worlds[rank] = _State()
        return worlds[rank]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._world(), name, value)


class _State:
    """The groups of a process, as `torch.distributed` records them: the attributes of its `_World`, without globals."""

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
    torch_rank = here()
    if torch_rank is None:
        original(backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id)
        return
    size, number = torch_rank.thread.rank.world_size, torch_rank.thread.rank.rank
    if world_size not in (-1, size):
        raise ValueError(
            f"world_size: the program says {world_size}, and the test has {size} ranks; pass ranks={world_size}"
        )
    if rank not in (-1, number):
        raise ValueError(f"rank: the program says {rank} on rank {number} of the test")
    torch_rank.named = str(backend or "gloo").lower()
    original(
        BACKEND, timeout=timeout or timedelta(minutes=30), world_size=size, rank=number, store=torch_rank.store,
        group_name=group_name,
    )  # fmt: skip


def _new_group_helper(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Make a group of our backend, for any backend that the program names, and record the call of the rank."""
    torch_rank = here()
    if torch_rank is None:
        return original(*args, **options)
    size, number, ranks, named, *rest = args
    caller = sys._getframe(1)
    while caller.f_back is not None and caller.f_code.co_name not in ("_new_group_with_tag",):
        caller = caller.f_back
    if ranks:
        alone = bool(caller.f_locals.get("use_local_synchronization", False))
        torch_rank.record.made.append(
            Made(rank=torch_rank.thread.rank.rank, ranks=tuple(ranks), line=line_of(users_frame()), alone=alone)
        )
    options.pop("backend_options", None)
    options.pop("device_id", None)
    group = original(size, number, ranks, c10d.Backend(BACKEND), *rest[:2], **options)
    if group[0] in c10d._world.pg_map:
        c10d._world.pg_map[group[0]] = (_named_backend(named, torch_rank), c10d._world.pg_map[group[0]][1])
    return group


def _rank_of(original: Callable[[Rank | None], Rank], rank: Rank | None) -> Rank:
    """Return the rank of the timeline: by default, of a program that has joined, the rank of its thread."""
    mine = here()
    if rank is None and mine is not None and dist.is_initialized():
        return mine.thread.rank
    return original(rank)


def _named_backend(named: Any, rank: TorchRank) -> str:
    """Return the backend that the program named."""
    name = str(named).lower()
    return rank.named if BACKEND in name else name


def _get_future(work: Work) -> torch.futures.Future[Any]:
    """Return a future that is completed in the thread of the rank; see `Work.get_future`."""
    rank = here()
    if work._future is None:
        start: torch.futures.Future[None] = torch.futures.Future()
        work._future = start.then(work._value)
        if rank is not None and rank.at_once:
            work._handle.exception()
        if rank is None or over(work._handle):
            start.set_result(None)
        else:
            rank.later(work._handle, start)
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
        profiler, module = Profiler(), torch.autograd.profiler
        put(module, "_prepare_profiler", partial(profiler.start, module._prepare_profiler))
        put(module, "_enable_profiler", partial(profiler.start, module._enable_profiler))
        put(module, "_disable_profiler", partial(profiler.stop, module._disable_profiler))
        put(Work, "get_future", _get_future)
        put(recording, "rank_of", partial(_rank_of, rank_of))
        put(DistributedDataParallel, "__init__", _wrapping(DistributedDataParallel.__init__))
        # issues all operations of the first update of a static graph, and waits for them, in one call of C++
        reducer: Any = _distributed_c10d.Reducer
        put(reducer, "_delay_all_reduce", _delaying(reducer._delay_all_reduce))
        put(
            DistributedDataParallel, "_delayed_all_reduce_hook",
            _dropping(DistributedDataParallel._delayed_all_reduce_hook),
        )  # fmt: skip
        put(DistributedDataParallel, "register_comm_hook", _hooking(DistributedDataParallel.register_comm_hook))
        put(Join, "__exit__", _joining(Join.__exit__))
        # the futures of DDP's reducer, as `DDP.join` waits for them, are of the base class
        put(torch._C.Future, "wait", _method(torch._C.Future.wait))
        put(torch.futures, "wait_all", partial(_finishing, torch.futures.wait_all))
        for name, store in STORES.items():
            put(dist, name, store)
            if hasattr(rendezvous, name):
                put(rendezvous, name, store)
        getattr(_distributed_c10d, _ISOLATION)(True)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            getattr(_distributed_c10d, _ISOLATION)(False)
            torch.set_num_threads(threads)
            torch.random.set_rng_state(state)
            torch.set_default_dtype(dtype)
            if torch.are_deterministic_algorithms_enabled() != deterministic:  # imports the compiler
                torch.use_deterministic_algorithms(deterministic)
            RANKS.clear()
            forget()


def _method(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any) -> Any:
        return _finishing(original, self)

    return wait


def _wrapping(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        rank = here()
        if rank is not None:
            rank.models.wrapped = True

    return init


def _delaying(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def delay(self: Any) -> None:
        rank = here()
        if rank is None:
            original(self)
            return
        rank.at_once = True
        try:
            original(self)
        finally:
            rank.at_once = False

    return delay


def _joining(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, *error: Any) -> Any:
        result = original(self, *error)
        rank = here()
        if rank is not None:
            rank.models.joined()
        return result

    return leave


def _dropping(original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self: Any, gradient: torch.Tensor) -> Any:
        rank = here()
        if rank is None:
            return original(self, gradient)
        rank.dropped_by = "DistributedDataParallel, for delay_all_reduce_named_params,"
        try:
            return original(self, gradient)
        finally:
            rank.dropped_by = ""

    return hook


def _hooking(original: Callable[..., None]) -> Callable[..., None]:
    def register(self: Any, state: object, hook: Callable[..., Any]) -> None:
        original(self, state, hook)
        rank = here()
        if rank is not None and isinstance(state, PostLocalSGDState):
            rank.models.wrapped = False  # ranks take updates of their own between averages of their weights

    return register


def exchange() -> Callable[[], None]:
    """Return a function that restores torch's random numbers, default type, `loss_parallel` and FSDP1's measuring."""
    state, dtype = torch.default_generator.get_state(), torch.get_default_dtype()
    parallel = _has_parallel_loss()
    measured = set(sys.modules[_FSDP_TIMES].SimpleProfiler.profiling) if _FSDP_TIMES in sys.modules else set()

    def restore() -> None:
        torch.default_generator.set_state(state)
        torch.set_default_dtype(dtype)
        if _has_parallel_loss() != parallel:
            loss = sys.modules[_LOSS]
            (loss._enable_custom_loss_ops if parallel else loss._disable_custom_loss_ops)()
        if _FSDP_TIMES in sys.modules:
            sys.modules[_FSDP_TIMES].SimpleProfiler.profiling = measured

    return restore


def _has_parallel_loss() -> bool:
    """Whether `loss_parallel` has replaced operations of DTensor; it does so once in a process."""
    loss = sys.modules.get(_LOSS)
    return loss is not None and not loss.customized_loss_ops.keys().isdisjoint(
        loss.DTensor._op_dispatcher._custom_op_handlers
    )


def enter(
    thread: RankThread[Any],
    store: dict[str, bytes],
    record: Record,
    shared: TestedCommunicators,
    watch: Watch,
    models: ModelWatch,
) -> TorchRank:
    """Give a rank its torch."""
    made = RANKS[thread] = TorchRank(thread, store, record, shared, watch, models)
    return made
