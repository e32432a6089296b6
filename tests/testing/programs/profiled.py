"""Every rank profiles its steps, as scripts of training do, and looks at what it has found."""

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

dist.init_process_group("gloo")
rank = dist.get_rank()
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=1, warmup=1, active=1),
    on_trace_ready=lambda each: each.export_chrome_trace(f"rank{rank}.json"),
    record_shapes=True,
) as profiler:
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()
        profiler.step()
profiler.key_averages().table()
found = torch.tensor(int(any(each.key == "c10d::allreduce_" for each in profiler.key_averages())))
dist.all_reduce(found)
assert found >= 1
dist.destroy_process_group()
