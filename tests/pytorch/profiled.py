"""A program that trains under torch's profiler, and exchanges some of everything; each rank writes its profile."""

import sys

import torch
import torch.distributed as dist
from torch.profiler import profile

import overlap.torch  # noqa: F401  (registers the backend)


def main(folder: str) -> None:
    dist.init_process_group("overlap")
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024), bucket_cap_mb=1)
    x = torch.ones(1 << 22)
    dist.all_reduce(x)
    dist.barrier()
    with profile(record_shapes=True) as recorded:
        for _ in range(4):
            model(torch.ones(64, 1024)).sum().backward()
        for _ in range(8):
            dist.all_reduce(x)
            waits = [dist.broadcast(x, 0, async_op=True), dist.all_reduce(x, async_op=True)]
            torch.ones(100, 100) @ torch.ones(100, 100)
            for work in waits:
                work.wait()
        dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x)
        dist.reduce_scatter_tensor(torch.empty(1 << 21), x)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty_like(x), other)]
        ):
            work.wait()
        dist.barrier()
    recorded.export_chrome_trace(f"{folder}/rank{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
