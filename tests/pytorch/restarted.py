"""A program whose rank 0 is killed in its first attempt and rank 1 in its second: while they meet, or at work."""

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

import overlap.torch  # noqa: F401  (registers the backend)

DIES = sys.argv[1]
ATTEMPT, RANK = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])


def die() -> None:
    if ATTEMPT == RANK:
        os.kill(os.getpid(), signal.SIGKILL)


if DIES == "meeting":
    threading.Timer(0.02, die).start()
dist.init_process_group("overlap")
x = torch.ones(1)
total = 0.0
for step in range(100):
    dist.all_reduce(y := x.clone())
    total += y.item()
    if step == 50:
        die()
dist.destroy_process_group()
print(f"rank {RANK} of {os.environ['WORLD_SIZE']}, attempt {ATTEMPT}: {total}\n", end="", flush=True)
