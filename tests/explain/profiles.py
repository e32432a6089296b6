"""Files as PyTorch's profiler writes them, with planted causes: times are whole microseconds, and exact."""

import gzip
import json

MAIN, AUTOGRAD = 900, 901


class Recording:
    """Events of one rank, appended in any order; a launch takes 2 us, and its kernel begins when it is told to."""

    def __init__(self, *, rank=0, world=1, host="node", base_ns=0, device="NVIDIA H100 80GB HBM3"):
        self.events, self._correlation = [], 0
        self.header = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": device}] if device else [],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
            "host_name": host,
            "baseTimeNanoseconds": base_ns,
        }

    def add(self, cat, name, start, end, *, pid=1, tid=MAIN, **args):
        self.events.append({
            "ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args,
        })  # fmt: skip

    def op(self, name, start, end, *, tid=MAIN, **args):
        self.add("cpu_op", name, start, end, tid=tid, **args)

    def note(self, name, start, end):
        self.add("user_annotation", name, start, end)

    def frame(self, name, start, end, *, tid=MAIN):
        self.add("python_function", name, start, end, tid=tid)

    def call(self, name, start, end, *, tid=MAIN):
        self._correlation += 1
        self.add("cuda_runtime", name, start, end, tid=tid, correlation=self._correlation)
        return self._correlation

    def kernel(self, start, end, *, launch=None, name="ampere_sgemm_32x32", call="cudaLaunchKernel", tid=MAIN,
               stream=7, cat="kernel", length=2, **args):  # fmt: skip
        """Work of the device; `launch` is the start of its launch, by default 5 us before its own."""
        launch = start - 5 if launch is None else launch
        correlation = self.call(call, launch, launch + length, tid=tid)
        self.add(cat, name, start, end, pid=0, tid=stream, correlation=correlation, device=0, stream=stream, **args)

    def copy(self, start, end, *, kind="Memcpy HtoD (Pageable -> Device)", call="cudaMemcpyAsync", **more):
        self.kernel(start, end, name=kind, call=call, cat="gpu_memcpy", bytes=1024, **more)

    def collective(self, start, end, *, op="allreduce", count=1 << 20, size=2, group="0", **more):
        self.kernel(
            start, end, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", stream=20,
            **{"Collective name": op, "In msg nelems": count, "Out msg nelems": count, "Group size": size,
               "dtype": "Float", "Process Group Name": group}, **more,
        )  # fmt: skip

    def step(self, number, start, end):
        """The profiler's step, on the host and on the device."""
        self.note(f"ProfilerStep#{number}", start, end)
        self.add("gpu_user_annotation", f"ProfilerStep#{number}", start, end, pid=0, tid=7)

    def text(self):
        """The file as the profiler writes it: each event on lines of its own, and metadata after the events."""
        head = json.dumps(self.header)[:-1]
        events = ",\n".join(f"  {{\n    {json.dumps(event)[1:-1]}\n  }}" for event in self.events)
        return f'{head},\n  "traceEvents": [\n{events}\n  ],\n  "traceName": "x.json"\n}}\n'

    def write(self, path):
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path
