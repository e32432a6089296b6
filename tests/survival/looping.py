"""Program for tests of `--survive`: all_reduces until the wanted epoch has had some, then the results."""

import os
import sys

import numpy as np

import overlap

MEMBER = os.environ.get("OVERLAP_NODE_RANK", "0")
LAST_EPOCH = int(sys.argv[1])
MANNER = sys.argv[2] if len(sys.argv) > 2 else ""


async def main(rank):
    epoch = rank.epoch
    epoch.memory["worlds"] = [*epoch.memory.get("worlds", []), rank.world_size]
    print(f"pid {os.getpid()} of member {MEMBER} epoch {epoch.number}", flush=True)
    count = 0
    while epoch.number < LAST_EPOCH or count < 40:
        total = await rank.all_reduce(np.full(1 << 16, rank.rank + 1, np.float32))
        assert total[0] == rank.world_size * (rank.world_size + 1) / 2
        count += 1
        if count == 20:
            print(f"goes on {epoch.number}", flush=True)
            if MANNER == "raises" and rank.rank == 1:
                raise ValueError("own code")
    return epoch.members, epoch.memory["worlds"]


print(f"result {overlap.run(main, survive=True if MANNER == 'asks' else None)}", flush=True)
