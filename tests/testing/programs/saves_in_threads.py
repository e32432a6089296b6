"""Each rank writes a file in a thread while its ranks communicate."""

import os
import threading

import torch
import torch.distributed as dist


def write(path: str, text: str) -> None:
    """Write a file in one step."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.tmp", path)


dist.init_process_group("gloo")
for step in range(20):
    thread = threading.Thread(target=write, args=(f"rank{dist.get_rank()}.txt", str(step)))
    thread.start()
    dist.all_reduce(torch.ones(4))
    thread.join()
    with open(f"rank{dist.get_rank()}.txt", encoding="utf-8") as file:
        assert file.read() == str(step)
dist.destroy_process_group()
