"""Stores of the program's own: a queue of jobs, and waits in loops for the numbers of other ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
whole = dist.PrefixStore("whole", dist.distributed_c10d._get_default_store())
whole.add("come", 1)
while whole.add("come", 0) < size:
    pass
port, limit = torch.tensor(0), timedelta(seconds=30)
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=limit, wait_for_workers=False)
    port.fill_(store.port)
dist.broadcast(port, src=0)
if rank != 0:
    store = dist.TCPStore("127.0.0.1", int(port), size, timeout=limit, wait_for_workers=False)
if rank == 0:
    for job in range(4):
        store.set(f"job {job}", str(job))
    assert sum(int(store.get(f"done {job}")) for job in range(4)) == 12
    store.set("phase", "over")
else:
    while (job := store.add("next", 1) - 1) < 4:
        store.set(f"done {job}", str(2 * int(store.get(f"job {job}"))))
    while not store.check(["phase"]) or store.get("phase") != b"over":
        pass
file = dist.FileStore("store", size)
file.set(str(rank), "here")
file.wait([str(each) for each in range(size)])
dist.TCPStore("127.0.0.1", 29876, size, rank == 0, limit).set("a", "b")  # waits until all have come
dist.destroy_process_group()
