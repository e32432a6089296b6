"""Programs that use torch.distributed in unusual or wrong ways; `python -m tests.pytorch.misused NAME` prints the end.

Each is run on two forked ranks. Rank 0's value is printed as JSON.
"""

import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from overlap.torch.backend import world

from .forked import on_ranks


def told(call: Callable[[], Any]) -> str:
    """Return the kind and the text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def total() -> float:
    """Return a sum over all ranks of the default group."""
    x = torch.ones(2)
    dist.all_reduce(x)
    return float(x[0])


def other_devices() -> Any:
    """Tensors of another device; this machine may have no CUDA, but every torch has `meta`."""
    x, outs = torch.ones(2, device="meta"), [torch.ones(2), torch.ones(2)]
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather(outs, x),
        lambda: dist.send(x, 1 - dist.get_rank()),
    ]
    return [*(told(call) for call in calls), total()]


def groups_destroyed_while_used() -> Any:
    """A group within a group: its operations go on though it is destroyed, and the world as well."""
    pair = dist.new_group([0, 1])
    again = dist.new_group([0, 1])
    x, y = torch.ones(1 << 20), torch.ones(4)
    works = [dist.all_reduce(x, group=pair, async_op=True), dist.all_reduce(y, group=again, async_op=True)]
    dist.destroy_process_group(pair)
    dist.destroy_process_group(again)
    for work in works:
        work.wait()
    return [float(x[-1]), float(y[0]), total()]


def groups_destroyed() -> Any:
    """Many groups, one after the other: once they are destroyed, communicators and shared memory are given back."""

    def kept() -> list[int]:
        joined = world()
        assert joined is not None
        shared: Any = joined.rank._communicators
        parts = [shared.engine._transport]
        while not hasattr(parts[-1], "_boards"):
            parts += getattr(parts.pop(), "parts", ())[::-1]
        boards = parts[-1]._boards
        with boards.loan_pool._lock:
            boards.loan_pool._free_released()
        return [len(shared), len(shared.spanning), len(boards._open), sum(boards.loan_pool._heap._sizes.values())]

    total()
    before, most = kept(), 0
    gc.collect()
    gc.disable()
    for turn in range(30):
        pair = dist.new_group([0, 1])
        for x in (torch.ones(4), torch.ones(1 << 20)):
            dist.all_reduce(x, group=pair)
            assert float(x[-1]) == 2.0
        y, peer = torch.full((2,), float(turn)), 1 - dist.get_rank()
        works = [dist.isend(y, peer, group=pair), dist.irecv(z := torch.empty(2), peer, group=pair)]
        for work in works:
            work.wait()
        assert float(z[0]) == turn
        most = max(most, kept()[0])
        dist.destroy_process_group(pair)
    del pair, works, work
    until = time.monotonic() + 20
    while kept() != before and time.monotonic() < until:
        time.sleep(0.001)
    return [kept() == before, most > before[0], total()]


def initialised_twice() -> Any:
    """The second call fails, and the first group lives."""
    return [told(lambda: dist.init_process_group("overlap")), total()]


def one_after_the_other() -> Any:
    """Three default groups, each with a store of its own; the caller's is the first."""
    rank, found = dist.get_rank(), [total()]
    path = [tempfile.mkdtemp()]
    dist.broadcast_object_list(path)
    for number in range(2):
        dist.destroy_process_group()
        dist.init_process_group("overlap", init_method=f"file://{path[0]}/{number}", rank=rank, world_size=2)
        found.append(total())
    return found


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid() if index == 0 else index


def loader_workers() -> Any:
    """Workers of a DataLoader are forks of a rank, and end while it lives on."""
    pids = set[int]()
    for _ in range(2):
        loader = DataLoader(_Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        batches = [batch.tolist() for batch in loader]
        pids.add(batches[0][0])
        assert batches[1:] == [[2, 3], [4, 5], [6, 7]]
        total()
    return [len(pids - {os.getpid()}), total()]


class _Summing(Dataset[str]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return told(total)


def loader_workers_that_communicate() -> Any:
    """A fork is no rank: it hears so at once."""
    loader = DataLoader(_Summing(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=20)
    return [*loader, total()]


def remote_calls() -> Any:
    """RPC of torch lives beside our world, and is ended before it."""
    from torch.distributed import rpc

    rank = dist.get_rank()
    path = [tempfile.mkdtemp()]
    dist.broadcast_object_list(path)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path[0]}/rpc", _transports=["uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    found = [float(rpc.rpc_sync(f"worker{1 - rank}", torch.add, (torch.ones(1), rank))[0]), total()]
    rpc.shutdown()
    return [*found, total()]


def beside_another_backend() -> Any:
    """Ours for the CPU, another one for the devices that ours does not carry."""
    return [total(), dist.get_backend_config(), dist.get_backend()]


class Stop(Exception):
    """Of the program's own."""


def handlers_that_raise() -> Any:
    """A handler of signals raises while its rank waits for the other one; the sum is there all the same."""
    found = []
    for error in (Stop, TimeoutError, KeyboardInterrupt):
        for limit in (None, timedelta(seconds=60)):
            x = torch.ones(2)
            if dist.get_rank():
                dist.recv(torch.ones(1), 0)
            work = dist.all_reduce(x, async_op=True)
            if dist.get_rank() == 0:
                found.append(_interrupted(work, error, limit))
            work.wait()
            found.append(float(x[0]))
    return found


def _interrupted(work: Any, error: type[BaseException], limit: timedelta | None) -> str:
    """Wait for an operation until a handler raises, and only then let the other rank come to it."""

    def raises(*_: object) -> None:
        raise error("from a handler")

    signal.signal(signal.SIGALRM, raises)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        work.wait() if limit is None else work.wait(limit)
    except BaseException as caught:
        dist.send(torch.ones(1), 1)
        return f"{type(caught).__name__}: {caught}"
    return "no error"


def negative_tensors() -> Any:
    """The memory of such tensors holds the opposite of their elements."""
    x = torch.view_as_complex(torch.ones(3, 2) * (dist.get_rank() + 1)).conj().imag
    dist.all_reduce(x)
    y = torch.view_as_complex(torch.full((2, 2), float(dist.get_rank()))).conj().imag
    dist.broadcast(y, 1)
    return [*x.tolist(), *y.tolist()]


RANKS = {
    program.__name__: program
    for program in (
        other_devices, groups_destroyed, groups_destroyed_while_used, initialised_twice, one_after_the_other,
        loader_workers, loader_workers_that_communicate, remote_calls, beside_another_backend, handlers_that_raise,
        negative_tensors,
    )
}  # fmt: skip


def a_port_in_use() -> Any:
    """Another program listens where rank 0 is to."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = told(
            lambda: dist.init_process_group(
                "overlap", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=timedelta(seconds=5)
            )
        )
    return [found.replace(str(port), "PORT"), dist.is_initialized()]


def a_device() -> Any:
    """A device id binds a group to an accelerator."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            told(
                lambda device=device: dist.init_process_group(
                    "overlap", init_method=f"file://{folder}/store", rank=0, world_size=1, device_id=device
                )
            )
            for device in (torch.device("cpu"), torch.device("cuda", 0))
        ]


ALONE = {program.__name__: program for program in (a_port_in_use, a_device)}


def a_store_that_dies() -> Any:
    """The process with the store ends; the ranks go on, and make groups."""
    context = torch.multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    port = pipe.recv()
    ranks = []
    for rank in range(2):
        mine, other = context.Pipe()
        process = context.Process(target=_live_on, args=(other, rank, port))
        process.start()
        ranks.append((mine, process))
    for mine, _ in ranks:
        assert mine.recv() == "met"
    server.terminate()
    server.join(10)
    for mine, _ in ranks:
        mine.send("it is gone")
    found = [mine.recv() for mine, _ in ranks]
    for _, process in ranks:
        process.join(20)
    return [*found[0], [process.exitcode for _, process in ranks]]


def _serve(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def _live_on(pipe: Any, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("overlap", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=5))
    total()
    pipe.send("met")
    pipe.recv()
    found, x = total(), torch.ones(1)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    pipe.send([found, float(x[0]), total()])
    dist.destroy_process_group()


APART = {"a_store_that_dies": a_store_that_dies}


def main(name: str) -> None:
    """Run one of them."""
    if name in RANKS:
        backend = "cpu:overlap,cuda:gloo" if name == "beside_another_backend" else "overlap"
        found = on_ranks(2, backend, RANKS[name], timeout_s=60)[0]
    else:
        found = {**ALONE, **APART}[name]()
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
