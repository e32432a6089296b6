"""Ten hangs of programs of torch with gloo: each leaves a dump of every rank in a folder, but for missing ones."""

import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "100"

import torch
import torch.distributed as dist

SIZE = 3


def did_not_come(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(torch.ones(8))


def size(rank: int) -> None:
    dist.all_reduce(torch.ones(8 if rank != 2 else 16), async_op=True)


def operation(rank: int) -> None:
    if rank == 2:
        dist.broadcast(torch.ones(8), 0, async_op=True)
    else:
        dist.all_reduce(torch.ones(8), async_op=True)


def order(rank: int) -> None:
    if rank == 0:
        dist.broadcast(torch.ones(2), 0, async_op=True)
    dist.all_reduce(torch.ones(8), async_op=True)
    if rank != 0:
        dist.broadcast(torch.ones(2), 0, async_op=True)


def dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(8, dtype=torch.float64 if rank == 1 else torch.float32), async_op=True)


def send_without_receive(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(1 << 20), 1)
    dist.all_reduce(torch.ones(8))


def circle(rank: int) -> None:
    one, two = (dist.new_group(list(range(SIZE)), group_desc=name) for name in ("tp", "dp"))
    for group in (one, two):
        dist.all_reduce(torch.ones(1), group=group)
    dist.all_reduce(torch.ones(4), group=one if rank == 0 else two)


def raised(rank: int) -> None:
    if rank == 2:
        try:
            raise ValueError("no label")
        finally:
            time.sleep(60)
    dist.barrier()


def missing(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(torch.ones(8))


def compute(rank: int) -> None:
    if rank == 0:
        while True:
            torch.ones(100, 100) @ torch.ones(100, 100)
    dist.all_reduce(torch.ones(8))


CASES = (did_not_come, size, operation, order, dtype, send_without_receive, circle, raised, missing, compute)


def run(case, rank: int, folder: Path) -> None:
    """Be one rank: dump once all ranks have begun the planted part, and end."""
    store = dist.FileStore(str(folder / "meeting"), SIZE)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=60)
    )  # fmt: skip
    dist.all_reduce(torch.ones(4))

    def dump() -> None:
        time.sleep(1.5)
        if not (case is missing and rank == 1):
            content = torch._C._distributed_c10d._dump_fr_trace()
            (folder / f"trace_{rank}").write_bytes(content)
            if rank == 0:
                (folder / "json").mkdir()
                (folder / "json" / f"trace_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace_json())
        time.sleep(1.5)  # the others dump before the connections to this rank break
        os._exit(0)

    threading.Thread(target=dump).start()
    with suppress(RuntimeError):  # of gloo, which notices sizes that differ
        case(rank)
    time.sleep(60)


if __name__ == "__main__":
    for case in CASES:
        folder = Path(sys.argv[1], case.__name__)
        folder.mkdir()
        children = []
        for rank in range(SIZE):
            if (pid := os.fork()) == 0:
                run(case, rank, folder)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
