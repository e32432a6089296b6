"""Program for tests of spares: the training of `training`, with spares that are late, die or never begin.

Argument: as of `training`. Variables, each with processes by number: DIES, as they would begin; HANGS, instead. A spare
waits before its run for the file READY, if it is given. Else training begins when all spares are ready.
"""

import os
import signal
import sys
import time
from pathlib import Path

import trio

import overlap
from tests.survival.training import train

PROCESS, PROCESSES = os.environ["OVERLAP_NODE_RANK"], os.environ["OVERLAP_NNODES"]


def count_spares():
    return len([*Path(os.environ["OVERLAP_WITNESS"]).glob("attempt-0/run-0/spare-*")])


async def main(rank, steps):
    awaited = int(os.environ["OVERLAP_SPARES"]) if rank.epoch.number == 0 and "READY" not in os.environ else 0
    while count_spares() < awaited:  # noqa: ASYNC110  other processes make the files
        await trio.sleep(0.01)
    print(f"joined {rank.epoch.joined} memory {rank.epoch.memory} in epoch {rank.epoch.number}", flush=True)
    rank.epoch.memory["first"] = rank.epoch.memory.get("first", rank.epoch.number)
    if PROCESS in os.environ.get("DIES", "").split():
        os.kill(os.getpid(), signal.SIGKILL)
    if PROCESS in os.environ.get("HANGS", "").split():
        await trio.sleep_forever()
    return await train(rank, steps)


if int(PROCESS) >= int(PROCESSES):
    print(f"spare {PROCESS} has pid {os.getpid()}", flush=True)
    while not Path(os.environ.get("READY", "/")).exists():
        time.sleep(0.01)
print(f"results {overlap.run(main, int(sys.argv[1]))}", flush=True)
