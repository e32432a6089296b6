"""PyTorch in a test: many ranks of `torch.distributed` in one process, each with a default group of its own.

It needs private names of torch, which `check_torch` looks for: the world of groups, the registry of groups by thread,
and the function that makes a group of any backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import FrameType, ModuleType
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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import UsageError
from ..runtime.rank import Rank
from ..torch import recording
from ..torch.operations import frame_line, users_frame
from ..torch.process_group import ProcessGroup
from ..torch.work import Work
from .guards import Patches
from .record import GroupCall
from .threads import RankThread
from .torch_profiler import Profiler
from .torch_rank import RANKS, TorchRank, current_rank, has_ended
from .torch_store import STORES, clear_stores
from .watch import ModelWatch

BACKEND = "overlap_testing"
_FSDP_TIMES = "torch.distributed.fsdp._debug_utils"
rendezvous: ModuleType = sys.modules["torch.distributed.rendezvous"]  # `dist.rendezvous` is its function
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
    """Refuse versions of torch without the private names that tests need; the UsageError has the name."""
    for owner, name in _PRIVATE:
        if not hasattr(owner, name):
            raise UsageError(
                f"ranks: torch {torch.__version__} has no {name}, which tests of many ranks in one process need; "
                "install one of torch 2.7 to 2.13"
            )


class WorldOfThread:
    """Replacement of torch's record of process groups, `c10d._world`: one for each rank, not one for the process."""

    def __init__(self) -> None:
        object.__setattr__(self, "_worlds", {})

    def _groups_of_caller(self) -> Any:
        """Return the groups of the calling thread's rank; outside of ranks, the groups of the process."""
        worlds: dict[object, Any] = object.__getattribute__(self, "_worlds")
        owner = RankThread.owner()
        rank = None if owner is None else owner.rank
        if rank not in worlds:
            worlds[rank] = _TorchGroups()
        return worlds[rank]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._groups_of_caller(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._groups_of_caller(), name, value)


class _TorchGroups:
    """The groups of one rank, with the attributes of torch's class `_World`, which keeps them in globals."""

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
        """Return []: facts on groups for the logs of other backends."""
        return []


def _create_group(request: Any, _: object = None) -> ProcessGroup:
    """Make a group of the test's backend, when torch asks for it in the thread of a rank."""
    rank = current_rank()
    assert rank is not None, "groups of this backend are made in the thread of a rank"
    return rank.make_group(request)


def _init_process_group(
    torch_rank: TorchRank,
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
    """Join the ranks of the test by its own backend and store; the backend of the program is only shown to it.

    Raises ValueError if the program expects another number of ranks, or another rank; -1 stands for any.
    """
    size, number = torch_rank.thread.rank.world_size, torch_rank.thread.rank.rank
    if world_size not in (-1, size):
        raise ValueError(
            f"world_size: the program says {world_size}, and the test has {size} ranks; pass ranks={world_size}"
        )
    if rank not in (-1, number):
        raise ValueError(
            f"rank: the program says {rank} on rank {number} of the test; take it from the environment, RANK"
        )
    torch_rank.backend_name = str(backend or "gloo").lower()
    original(
        BACKEND, timeout=timeout or timedelta(minutes=30), world_size=size, rank=number, store=torch_rank.store,
        group_name=group_name,
    )  # fmt: skip


def _make_recorded_group(
    torch_rank: TorchRank,
    original: Callable[..., tuple[Any, Any]],
    group_size: int,
    group_rank: int,
    global_ranks: Sequence[int],
    backend: object,
    store: object,
    group_name: str,
    **options: Any,
) -> tuple[Any, Any]:
    """Make a group of the test's backend, in place of torch's helper that makes every group; record the call.

    To the program, the group seems to be of the backend that it has named. Ranks outside of the group call as well,
    with a negative `group_rank`. `global_ranks` is empty for the group of all. Options for the named backend are left
    out.
    """
    if global_ranks:
        call = GroupCall(
            rank=torch_rank.thread.rank.rank, ranks=tuple(global_ranks), line=frame_line(users_frame()),
            alone=_is_called_by_members(),
        )  # fmt: skip
        torch_rank.record.group_calls.append(call)
    own_options = {name: value for name, value in options.items() if name not in ("backend_options", "device_id")}
    ours = c10d.Backend(BACKEND)
    group, prefix_store = original(group_size, group_rank, global_ranks, ours, store, group_name, **own_options)
    if group in c10d._world.pg_map:
        name = str(backend).lower()
        _, store_of_group = c10d._world.pg_map[group]
        c10d._world.pg_map[group] = torch_rank.backend_name if BACKEND in name else name, store_of_group
    return group, prefix_store


def _is_called_by_members() -> bool:
    """Whether only members make the present call of `new_group`, by its argument `use_local_synchronization`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_group_with_tag":
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals.get("use_local_synchronization", False))


def _find_timeline_rank(torch_rank: TorchRank, original: Callable[[Rank | None], Rank], rank: Rank | None) -> Rank:
    """Return the calling thread's rank if `rank` is None after `init_process_group`, otherwise what `original` does."""
    return torch_rank.thread.rank if rank is None and dist.is_initialized() else original(rank)


def _get_future(work: Work) -> torch.futures.Future[Any]:
    """Return a future that is completed in the thread of the operation's rank, in place of `Work.get_future`.

    With `at_once` this waits for the end of the operation first, as C++ will wait for the future without running
    Python. If the operation has ended, or the calling thread has no rank, the future is complete; otherwise it is
    completed later.
    """
    rank = current_rank()
    if work._future is None:
        start: torch.futures.Future[None] = torch.futures.Future()
        work._future = start.then(work._wait_for_tensors)
        if rank is not None and rank.at_once:
            work._handle.exception()  # waits for the end; the future raises the error
        if rank is None or has_ended(work._handle):
            start.set_result(None)
        else:
            rank.complete_when_ended(work._handle, start)
    return work._future


@contextmanager
def separating_torch_of_ranks() -> Iterator[None]:
    """Give every rank's thread a torch.distributed of its own during a `with` block, and restore torch after it."""
    check_torch()
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])
    threads = torch.get_num_threads()
    state = torch.random.get_rng_state()
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    patches = Patches(current_rank)
    with patches.stack as stack:
        stack.enter_context(patch.object(c10d, "_world", WorldOfThread()))
        stack.enter_context(patch.object(Work, "get_future", _get_future))
        for module in (c10d, dist):
            patches.replace_function(module, "init_process_group", _init_process_group)
        patches.replace_function(c10d, "_new_process_group_helper", _make_recorded_group)
        profiler = Profiler()
        patches.replace_function(torch.autograd.profiler, "_prepare_profiler", profiler.start)
        patches.replace_function(torch.autograd.profiler, "_enable_profiler", profiler.start)
        patches.replace_function(torch.autograd.profiler, "_disable_profiler", profiler.stop)
        patches.replace_function(recording, "find_rank", _find_timeline_rank)
        patches.replace_function(DistributedDataParallel, "__init__", _replace_ddp_init)
        for op in ("all_reduce", "broadcast"):
            patches.replace_function(ProcessGroup, f"_issue_{op}", partial(_issue_recorded_operation, op))
        # In one call of C++, it issues all operations of the first update of a static graph, and waits for them.
        patches.replace_function(_distributed_c10d.Reducer, "_delay_all_reduce", _delay_all_reduce)
        patches.replace_function(DistributedDataParallel, "_delayed_all_reduce_hook", _delayed_all_reduce_hook)
        patches.replace_function(DistributedDataParallel, "register_comm_hook", _register_comm_hook)
        patches.replace_function(Join, "__exit__", _leave_join)
        # `DDP.join` waits for futures of DDP's reducer, which are of torch's base class.
        patches.replace_function(torch._C.Future, "wait", _call_after_operations)
        patches.replace_function(torch.futures, "wait_all", _call_after_operations)
        for name, store in STORES.items():
            for module in (dist, rendezvous):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, store))
        stack.enter_context(_watching_models())
        getattr(_distributed_c10d, _ISOLATION)(True)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            getattr(_distributed_c10d, _ISOLATION)(False)
            torch.set_num_threads(threads)
            torch.random.set_rng_state(state)
            torch.set_default_dtype(dtype)
            if torch.are_deterministic_algorithms_enabled() != deterministic:  # only then: it imports the compiler
                torch.use_deterministic_algorithms(deterministic)
            RANKS.clear()
            clear_stores()


@contextmanager
def _watching_models() -> Iterator[None]:
    """Record the modules and optimizers that ranks make, and their updates, during a `with` block."""

    def record_module(module: torch.nn.Module, name: str, part: Any) -> None:
        """Record a module that gets a parameter or a module."""
        if (rank := current_rank()) is not None:
            rank.models.add_module(module)

    def make_update_hook(method: Callable[[ModelWatch, Any], None]) -> Callable[..., None]:
        """Return a hook that calls a method of the calling rank's `ModelWatch`, whose work is not itself recorded."""

        def call_watch(optimizer: Any, *_: Any) -> None:
            if (rank := current_rank()) is not None:
                with rank.watch.paused():
                    method(rank.models, optimizer)

        return call_watch

    hooks = [
        torch.nn.modules.module.register_module_parameter_registration_hook(record_module),
        torch.nn.modules.module.register_module_module_registration_hook(record_module),
        register_optimizer_step_pre_hook(make_update_hook(ModelWatch.on_update_begin)),
        register_optimizer_step_post_hook(make_update_hook(ModelWatch.on_update_end)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _call_after_operations(rank: TorchRank, original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Wait for the rank's operations before `original`, in which C++ waits without letting other ranks run."""
    rank.wait_for_futures()
    return original(*args, **keywords)


def _replace_ddp_init(
    rank: TorchRank, original: Callable[..., None], model: Any, *args: Any, **keywords: Any
) -> None:  # fmt: skip
    """Call `DistributedDataParallel.__init__`, and record that all ranks of this model should have equal weights."""
    original(model, *args, **keywords)
    rank.models.is_wrapped = True
    rank.models.roles.record_ddp_group(model, model.process_group)


def _issue_recorded_operation(
    op: str, rank: TorchRank, original: Callable[..., Any], group: Any, tensor: torch.Tensor, *args: Any
) -> Any:
    """Issue an operation `op` on a tensor, and record the parameter, gradient or activation in the tensor."""
    rank.models.roles.find_operation_parameters(op, tensor, group._group.ranks)
    return original(group, tensor, *args)


def _record_call(rank: TorchRank, original: Callable[..., Any], module: Any, *args: Any, **keywords: Any) -> Any:
    """Call a module, in place of `Module.__call__`; if runs are compared, record its data."""
    if rank.models.batches is None:
        return original(module, *args, **keywords)
    return rank.models.batches.call_module(original, module, args, keywords)


def _record_parameters(rank: TorchRank, original: Callable[..., None], optimizer: Any, group: dict[str, Any]) -> None:
    """Add a group of parameters to an optimizer, and record the parameters for the comparison of runs."""
    original(optimizer, group)
    rank.models.known.update((id(parameter), parameter) for parameter in optimizer.param_groups[-1]["params"])


@contextmanager
def recording_batches() -> Iterator[None]:
    """Record the data of modules and the parameters of optimizers during a `with` block, without torch's compiler."""
    patches = Patches(current_rank)
    with patches.stack as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        patches.replace_function(torch.nn.Module, "__call__", _record_call)
        patches.replace_function(torch.optim.Optimizer, "add_param_group", _record_parameters)
        yield


def _delay_all_reduce(rank: TorchRank, original: Callable[[Any], None], reducer: Any) -> None:
    """Reduce all gradients of a static graph, with futures that are complete when C++ gets them."""
    rank.at_once = True
    try:
        original(reducer)
    finally:
        rank.at_once = False


def _leave_join(rank: TorchRank, original: Callable[..., Any], *args: Any) -> Any:
    """Leave a `Join` context for uneven inputs, and restart the count of updates, which differs between ranks."""
    result = original(*args)
    rank.models.restart_update_count()
    return result


def _delayed_all_reduce_hook(rank: TorchRank, original: Callable[..., Any], *args: Any) -> Any:
    """Issue DDP's operations for delayed parameters, with a note for verdicts that DDP never waits for them."""
    rank.dropped_by = "DistributedDataParallel, for delay_all_reduce_named_params,"
    try:
        return original(*args)
    finally:
        rank.dropped_by = ""


def _register_comm_hook(
    rank: TorchRank, original: Callable[..., None], model: Any, state: object, hook: Callable[..., Any]
) -> None:
    """Register a hook of DDP; of local SGD, record that weights of ranks may differ between averages."""
    original(model, state, hook)
    if isinstance(state, PostLocalSGDState):
        rank.models.is_wrapped = False


def save_torch_state() -> Callable[[], None]:
    """Return a function that restores the present state of torch.

    That is: random numbers, default dtype, whether `loss_parallel` is active, and the timing of FSDP1.
    """
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
    """Whether `loss_parallel` has replaced operations of DTensor, which it does for the whole process."""
    loss = sys.modules.get(_LOSS)
    return loss is not None and not loss.customized_loss_ops.keys().isdisjoint(
        loss.DTensor._op_dispatcher._custom_op_handlers
    )
