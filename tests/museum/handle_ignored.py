"""The handle of an asynchronous all-gather is dropped, and its result used.

https://github.com/vllm-project/vllm-ascend/pull/11961
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
size = dist.get_world_size()
keys, scales = torch.ones(4), torch.ones(1)
all_keys, all_scales = torch.empty(4 * size), torch.empty(size)
handle = dist.all_gather_into_tensor(all_keys, keys, async_op=True)
last = dist.all_gather_into_tensor(all_scales, scales, async_op=True)
if "--right" in sys.argv:
    handle.wait()
last.wait()
result = all_keys * 2  # wrong
handle.wait()
