"""The operations of torch.distributed that are measured, each by its name in the table."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

Operation: TypeAlias = "Callable[[int, Any], Callable[[], None]]"
"""Makes a call that moves so many bytes on a group."""


def _tensor(nbytes: int) -> torch.Tensor:
    """Return a tensor of about so many bytes whose elements all ranks can share."""
    size = dist.get_world_size()
    return torch.ones(max(2, nbytes // 4 // size) * size)


def all_reduce(nbytes: int, group: Any) -> Callable[[], None]:
    x = torch.ones(max(2, nbytes // 4))
    return lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)


def reduce(nbytes: int, group: Any) -> Callable[[], None]:
    x = _tensor(nbytes)
    return lambda: dist.reduce(x, dst=0, op=dist.ReduceOp.MAX, group=group)


def broadcast(nbytes: int, group: Any) -> Callable[[], None]:
    x = _tensor(nbytes)
    return lambda: dist.broadcast(x, src=0, group=group)


def all_gather(nbytes: int, group: Any) -> Callable[[], None]:
    x = _tensor(nbytes)
    part = x[: x.numel() // dist.get_world_size()].clone()
    return lambda: dist.all_gather_into_tensor(x, part, group=group)


def all_gather_list(nbytes: int, group: Any) -> Callable[[], None]:
    parts = list(_tensor(nbytes).chunk(dist.get_world_size()))
    own = parts[0].clone()
    return lambda: dist.all_gather(parts, own, group=group)


def reduce_scatter(nbytes: int, group: Any) -> Callable[[], None]:
    x = _tensor(nbytes)
    part = x[: x.numel() // dist.get_world_size()].clone()
    return lambda: dist.reduce_scatter_tensor(part, x, op=dist.ReduceOp.MAX, group=group)


def gather(nbytes: int, group: Any) -> Callable[[], None]:
    x = _tensor(nbytes)
    part = x[: x.numel() // dist.get_world_size()].clone()
    parts = list(x.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
    return lambda: dist.gather(part, parts, dst=0, group=group)


def scatter(nbytes: int, group: Any) -> Callable[[], None]:
    x = _tensor(nbytes)
    part = x[: x.numel() // dist.get_world_size()].clone()
    parts = list(x.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
    return lambda: dist.scatter(part, parts, src=0, group=group)


def all_to_all(nbytes: int, group: Any) -> Callable[[], None]:
    x = _tensor(nbytes)
    out = torch.empty_like(x)
    return lambda: dist.all_to_all_single(out, x, group=group)


def send_recv(nbytes: int, group: Any) -> Callable[[], None]:
    """There and back between neighbours: a rank of an even number sends first."""
    x = torch.ones(max(2, nbytes // 4))
    rank = dist.get_rank()

    def there_and_back() -> None:
        if rank % 2 == 0:
            dist.send(x, rank + 1, group=group)
            dist.recv(x, rank + 1, group=group)
        else:
            dist.recv(x, rank - 1, group=group)
            dist.send(x, rank - 1, group=group)

    return there_and_back


def send_recv_in_a_row(nbytes: int, group: Any) -> Callable[[], None]:
    """A hundred times there and back without a pause; fewer of more than 160 KiB, 16 MiB in all."""
    once, times = send_recv(nbytes, group), max(1, min(100, (16 << 20) // nbytes))

    def steadily() -> None:
        for _ in range(times):
            once()

    return steadily


def coalesced(nbytes: int, group: Any) -> Callable[[], None]:
    """Sixteen all-reduces in flight."""
    xs = [torch.ones(max(2, nbytes // 64)) for _ in range(16)]

    def many() -> None:
        works = [dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group, async_op=True) for x in xs]
        for work in works:
            work.wait()

    return many


OPERATIONS: dict[str, Operation] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather_into_tensor": all_gather,
    "all_gather": all_gather_list,
    "reduce_scatter_tensor": reduce_scatter,
    "gather": gather,
    "scatter": scatter,
    "all_to_all_single": all_to_all,
    "send_recv": send_recv,
    "send_recv in a row": send_recv_in_a_row,
    "16 all_reduces": coalesced,
}
