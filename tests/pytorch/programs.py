"""Programs of torch.distributed as people write them: each returns what it has computed, whatever the backend."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

Result = list[torch.Tensor]


def _model(seed: int = 0, width: int = 24) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(12, 8, generator=made), torch.randn(12, 4, generator=made)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        x, y = _batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def _weights(model: nn.Module) -> Result:
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad):
            if tensor is not None:
                tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes())  # raises where it is fixed
    return [parameter.detach().clone() for parameter in model.parameters()]


def ddp() -> Result:
    """DistributedDataParallel, with buckets small enough that there are several; none needs a thread for its future."""
    model = nn.parallel.DistributedDataParallel(_model(dist.get_rank()), bucket_cap_mb=0.001)
    with mock.patch("overlap.torch.work._complete_in_thread", side_effect=AssertionError("a bucket needs a thread")):
        _train(model, torch.optim.Adam(model.parameters(), 0.01))
    return _weights(model)


def ddp_float16_hook() -> Result:
    """DistributedDataParallel whose hook sends float16, and chains what follows to the future."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = nn.parallel.DistributedDataParallel(_model())
    model.register_comm_hook(None, fp16_compress_hook)
    _train(model, torch.optim.SGD(model.parameters(), 0.01))
    return _weights(model)


def ddp_float16_in_cpp() -> Result:
    """DistributedDataParallel whose hook of C++ sends float16, and asks for a future of a list of tensors."""
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.001)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    _train(model, torch.optim.SGD(model.parameters(), 0.01))
    return _weights(model)


def ddp_compiled() -> Result:
    """DistributedDataParallel traced by torch's compiler, which meets what its C++ calls of a backend."""
    model = nn.parallel.DistributedDataParallel(_model())
    _train(torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters(), 0.01))
    return _weights(model)


def ddp_uneven_inputs() -> Result:
    """DistributedDataParallel whose ranks have different numbers of batches, and divide by the ranks that have one."""
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.001)
    with model.join(divide_by_initial_world_size=False):
        _train(model, torch.optim.SGD(model.parameters(), 0.01), steps=2 + dist.get_rank())
    return _weights(model)


def ddp_power_sgd() -> Result:
    """DistributedDataParallel with PowerSGD, which issues and waits in what it chains to a future."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    model = nn.parallel.DistributedDataParallel(_model(width=64))
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, power_sgd.powerSGD_hook)
    _train(model, torch.optim.SGD(model.parameters(), 0.01))
    return _weights(model)


def fsdp2() -> Result:
    """fully_shard, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = _model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(model, torch.optim.Adam(model.parameters(), 0.01))
    return [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]


def _fsdp1(strategy: str) -> Result:
    """FullyShardedDataParallel, which resizes the storages of weights and gradients between their uses."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        _model(),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    _train(model, torch.optim.Adam(model.parameters(), 0.01))
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def fsdp1_full_shard() -> Result:
    """FullyShardedDataParallel that shares out weights, gradients and optimizer state."""
    return _fsdp1("FULL_SHARD")


def fsdp1_shard_grad_op() -> Result:
    """FullyShardedDataParallel that shares out gradients and optimizer state."""
    return _fsdp1("SHARD_GRAD_OP")


def fsdp1_no_shard() -> Result:
    """FullyShardedDataParallel that shares out nothing, and averages gradients."""
    return _fsdp1("NO_SHARD")


def post_local_sgd() -> Result:
    """DistributedDataParallel that averages gradients for two steps, and weights in every second step after them."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = nn.parallel.DistributedDataParallel(_model(dist.get_rank()))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    state = post_local.PostLocalSGDState(None, alone, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    _train(model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.01), averager), steps=6)
    return _weights(model)


def zero_redundancy() -> Result:
    """ZeroRedundancyOptimizer under DistributedDataParallel."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(_model())
    _train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))
    return _weights(model)


def tensor_parallel() -> Result:
    """DTensor tensor parallel: columns, then rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = _model(), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(3):
        x, y = _batch(step, 0)  # the same on all ranks
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def pipeline() -> Result:
    """A pipeline of as many stages as ranks, one forward one backward."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(16, 8, generator=torch.Generator().manual_seed(7)), torch.zeros(16, 8)
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=y)
    else:
        schedule.step()
    return [p.grad.clone() for p in part.parameters() if p.grad is not None]


def functional() -> Result:
    """The functional collectives, which C++ calls."""
    import torch.distributed._functional_collectives as functional

    rank, world = dist.get_rank(), dist.group.WORLD
    x = torch.arange(4 * dist.get_world_size(), dtype=torch.float32) + rank
    return [
        functional.all_reduce(x, "sum", world) + 0,
        functional.all_gather_tensor(x, 0, world) + 0,
        functional.reduce_scatter_tensor(x, "sum", 0, world) + 0,
        functional.all_to_all_single(x, None, None, world) + 0,
        functional.broadcast(x, 0, world) + 0,
    ]


def narrow_types() -> Result:
    """Tensors that numpy has no types for, and strides that it must put in order."""
    rank, found = dist.get_rank(), []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.full((3,), float(rank + 1)).to(dtype)
        outs = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(outs, x) if dtype == torch.bfloat16 else dist.all_gather(
            [out.view(torch.uint8) for out in outs], x.view(torch.uint8)
        )
        found += [out.to(torch.float32) for out in outs]
    return found


PROGRAMS: dict[str, Callable[[], Any]] = {
    program.__name__: program
    for program in (
        ddp, ddp_float16_hook, ddp_float16_in_cpp, ddp_compiled, ddp_uneven_inputs, ddp_power_sgd, post_local_sgd,
        fsdp1_full_shard, fsdp1_shard_grad_op, fsdp1_no_shard, fsdp2, zero_redundancy, tensor_parallel, pipeline,
        functional, narrow_types,
    )
}  # fmt: skip
