"""One rank of PyTorch between the hosts: `python -m tests.benchmarks.two_hosts.ddp SAMPLING BUCKETS`.

DistributedDataParallel on gloo trains the same perceptron with one compute thread; rank 0 prints a line of JSON.
"""

import json
import os
import sys
from collections.abc import Callable
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap.cli.bench.sampling import Sampling

from .perceptron import LAYERS, RATE, WIDTH, batch


def main(text: str, buckets: str) -> None:
    """Train with every bucket size, in MiB; 25 is PyTorch's default."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sampling = Sampling(**json.loads(text))
    samples = {bucket: _sampled(_trainer(float(bucket)), sampling) for bucket in json.loads(buckets)}
    told = {bucket: _gathered(mine) for bucket, mine in samples.items()}
    if dist.get_rank() == 0:
        print(json.dumps({"version": f"PyTorch {torch.__version__}", "samples_ns": told}), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # without the end of threads of torch, which aborts one process of gloo's in twenty


def _trainer(bucket_mib: float) -> Callable[[], None]:
    """Return a function that takes one step."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=bucket_mib)
    descent = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = map(torch.from_numpy, batch(dist.get_rank()))

    def step() -> None:
        descent.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        descent.step()

    return step


def _sampled(step: Callable[[], None], sampling: Sampling) -> list[int]:
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        dist.barrier()
        begun_ns = perf_counter_ns()
        step()
        samples.append(perf_counter_ns() - begun_ns)
    return samples[sampling.warmup :]


def _gathered(mine: list[int]) -> list[list[int]]:
    told = [torch.empty(len(mine), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(told, torch.tensor(mine))
    return [one.tolist() for one in told]


if __name__ == "__main__":
    main(*sys.argv[1:])
