"""A cost model in plain Python: one message after the other, no arrays, no short cuts."""

from collections import defaultdict

import numpy as np


def slow_cost(schedule, placement, nbytes, *, arrivals, contention=True):
    """Return when each rank finishes, in picoseconds, on a machine without overheads and memories."""
    per_rank = schedule.collective in ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
    slot_bytes = nbytes / (schedule.slots_per_block * (schedule.size if per_rank else 1))
    ready, free = list(arrivals), list(arrivals)
    for step in range(schedule.steps):
        sent = defaultdict(float)
        for row in np.flatnonzero((schedule.step == step) & (schedule.src != schedule.dst)).tolist():
            sent[int(schedule.src[row]), int(schedule.dst[row])] += float(schedule.count[row])
        ways = {pair: placement.routes(*np.array(pair)[:, None]).wire.tolist() for pair in sent}
        wires, load = placement.wires(), defaultdict(float)
        for pair, slots in sent.items():
            for wire in ways[pair]:
                load[wire] += slots
        new_ready, new_free = list(ready), list(free)
        for (src, dst), slots in sent.items():
            on_wire = [(load[w] if contention else slots) / wires.bytes_per_s[w] for w in ways[src, dst]]
            leaves = max(ready[src], free[src]) + round(max(on_wire) * slot_bytes * 1e12)
            arrives = leaves + round(sum(wires.latency_s[w] for w in ways[src, dst]) * 1e12)
            new_ready[dst], new_free[src] = max(new_ready[dst], arrives), max(new_free[src], leaves)
        ready, free = new_ready, new_free
    return [max(pair) for pair in zip(ready, free, strict=True)]
