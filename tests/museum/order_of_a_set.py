"""Collectives in the order of a set of strings, which differs between processes.

https://github.com/NVIDIA/nvalchemi-toolkit/pull/143
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
sizes = {"energy": 1, "forces": 12, "stress": 6, "charges": 4}
active = set(sizes) & {"energy", "stress", "forces"}
outputs = sorted(active) if "--right" in sys.argv else active
for name in outputs:
    dist.all_reduce(torch.ones(sizes[name]))  # wrong
