"""A cost model in plain Python: one message after the other, no arrays, no short cuts."""

from collections import defaultdict

import numpy as np


def slow_cost(schedule, placement, nbytes, *, arrivals, contention=True):
    """Return when each rank finishes, in picoseconds, on a machine without overheads and memories.

    A message starts when its sender has all that came in the steps before, has started its other messages of these, and
    none of them is on the wire that it leaves on.
    """
    per_rank = schedule.collective in ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
    slot_bytes = nbytes / (schedule.slots_per_block * (schedule.size if per_rank else 1))
    ready, free, left, busy = list(arrivals), list(arrivals), list(arrivals), defaultdict(int)
    for step in range(schedule.steps):
        sent = defaultdict(float)
        for row in np.flatnonzero((schedule.step == step) & (schedule.src != schedule.dst)).tolist():
            sent[int(schedule.src[row]), int(schedule.dst[row])] += float(schedule.count[row])
        ways = {pair: placement.routes(*np.array(pair)[:, None]).wire.tolist() for pair in sent}
        wires, load = placement.wires(), defaultdict(float)
        for pair, slots in sent.items():
            for wire in ways[pair]:
                load[wire] += slots
        new_ready, new_free, new_busy = list(ready), list(free), defaultdict(int)
        for (src, dst), slots in sent.items():
            on_wire = [(load[w] if contention else slots) / wires.bytes_per_s[w] for w in ways[src, dst]]
            out = ways[src, dst][0]
            starts = max(ready[src], free[src], busy[out])
            leaves = starts + round(max(on_wire) * slot_bytes * 1e12)
            arrives = leaves + round(sum(wires.latency_s[w] for w in ways[src, dst]) * 1e12)
            new_ready[dst], new_free[src] = max(new_ready[dst], arrives), max(new_free[src], starts)
            left[src], new_busy[out] = max(left[src], leaves), max(new_busy[out], leaves)
        ready, free = new_ready, new_free
        busy.update(new_busy)
    return [max(pair) for pair in zip(ready, left, strict=True)]
