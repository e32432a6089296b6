"""One rank of PyTorch, whose rank 0 prints a line of JSON.

`torchrun -m tests.benchmarks.pytorch.ranks '{"warmup": 5, "samples": 20}'`

Both backends live in each process. Their samples follow each other, so that whatever else the machine does hits both.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns, process_time_ns
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

import overlap.torch  # noqa: F401 - registers the backend

from . import BUCKETS_MIB, SIZES
from .operations import OPERATIONS, Operation

Calls: TypeAlias = Mapping[str, Callable[[], None]]
Measured: TypeAlias = Callable[[Calls], dict[str, list[int]]]

LAYERS, WIDTH, BATCH = 8, 1024, 256
_RATE = 1e-3


def main(
    warmup: int,
    samples: int,
    buckets: Sequence[int] = BUCKETS_MIB,
    names: Sequence[str] = tuple(OPERATIONS),
    sizes: Sequence[int] = SIZES,
    row: int = 0,
) -> None:
    """Measure training steps with buckets of some MiB, if there are any, and operations with tensors of some bytes.

    Operations are timed one by one in rows of `row`, if that is given.
    """
    torch.set_num_threads(1)
    dist.init_process_group("overlap")
    groups = {"gloo": dist.new_group(backend="gloo"), "overlap": dist.group.WORLD}
    measured = partial(_measured, warmup, samples, groups["gloo"])
    told: dict[str, Any] = {"version": f"PyTorch {torch.__version__}", "steps": {}, "operations": {}}
    for bucket in buckets:
        steps = {
            name: _trainer(nn.parallel.DistributedDataParallel(_net(), process_group=group, bucket_cap_mb=bucket))
            for name, group in groups.items()
        }
        silent = nn.parallel.DistributedDataParallel(_net(), bucket_cap_mb=bucket)
        silent.register_comm_hook(None, lambda _, bucket: _finished(bucket.buffer()))
        told["steps"][bucket] = measured({**steps, "nothing": _trainer(silent), "alone": _trainer(_net())})
    for name in names:
        told["operations"][name] = [
            _in_rows(OPERATIONS[name], size, groups, warmup, samples, row)
            if row
            else _alone(OPERATIONS[name], size, groups, measured)
            for size in sizes
        ]
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.destroy_process_group()


def _finished(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return the future of a hook that sends nothing: what a step takes longer with it is DDP's own."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done


def _measured(warmup: int, samples: int, group: Any, calls: Mapping[str, Callable[[], None]]) -> dict[str, list[int]]:
    """Call one after the other, in turn; return the durations in nanoseconds."""
    taken: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(warmup + samples):
        for name, call in calls.items():
            dist.barrier(group)
            begun_ns = perf_counter_ns()
            call()
            taken[name].append(perf_counter_ns() - begun_ns)
    return {name: each[warmup:] for name, each in taken.items()}


def _in_rows(
    operation: Operation, size: int, groups: Mapping[str, Any], warmup: int, samples: int, row: int
) -> dict[str, list[int]]:
    """Return the duration of each operation in rows, for each backend in turn, and the processor time of one."""
    calls = {name: operation(size, group) for name, group in groups.items()}
    taken: dict[str, list[int]] = {name: [] for name in calls}
    busy_ns = dict.fromkeys(calls, 0)
    for turn in range(warmup + samples):
        for name, call in calls.items():
            dist.barrier(groups["gloo"])
            begun_busy_ns = process_time_ns()
            for _ in range(row):
                begun_ns = perf_counter_ns()
                call()
                taken[name].append(perf_counter_ns() - begun_ns)
            busy_ns[name] += (process_time_ns() - begun_busy_ns) * (turn >= warmup)
    return {name: each[warmup * row :] for name, each in taken.items()} | {
        f"{name}, busy": [total // (samples * row)] for name, total in busy_ns.items()
    }


def _alone(operation: Operation, size: int, groups: Mapping[str, Any], measured: Measured) -> dict[str, list[int]]:
    """Return the durations of an operation of so many bytes, for each backend; small ones are called in a row."""
    repeats = 20 if size <= 1 << 16 else 1
    calls = {name: partial(_repeated, operation(size, group), repeats) for name, group in groups.items()}
    return {name: [t // repeats for t in each] for name, each in measured(calls).items()}


def _repeated(call: Callable[[], None], repeats: int) -> None:
    for _ in range(repeats):
        call()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())])


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(BATCH, WIDTH, generator=made), torch.randn(BATCH, WIDTH, generator=made)


def _trainer(model: nn.Module) -> Callable[[], None]:
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), _RATE), _batch()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
