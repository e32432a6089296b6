"""A process that holds results in common with others: `holding.py RANK SIZE FOLDER KILLED`; it prints what it saw."""

import gc
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import overlap

#: Of each result: float32.
ELEMENTS = 1 << 18
TIMEOUT_S = 60.0


class FileStore:
    """Values as files of a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def set(self, key: str, value: bytes) -> None:
        """Keep a value; it is there as a whole, or not at all."""
        path = self._folder / key.replace("/", "_")
        path.with_suffix(".part").write_bytes(value)
        path.with_suffix(".part").rename(path)

    def get(self, key: str) -> bytes:
        """Wait for a value; whoever has started this process bounds that."""
        path = self._folder / key.replace("/", "_")
        while not path.exists():
            os.sched_yield()
        return path.read_bytes()


def mapped() -> int:
    """Return how many pieces of memory in common this process maps."""
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="ascii").count("/memfd:overlap")


def main(rank: int, size: int, folder: str, killed: int) -> dict[str, Any]:
    """Hold a result in the memory of each process, see one die, and let go."""
    world = overlap.connect(rank, size, store=FileStore(folder), timeout_s=TIMEOUT_S)
    x = np.full(ELEMENTS, rank + 1, np.float32)
    kept = [world.rank.all_reduce(x * place, shared=True).result(TIMEOUT_S) for place in range(size)]
    world.rank.barrier().result(TIMEOUT_S)
    if rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    error: BaseException | None
    try:
        error = world.rank.all_reduce(x, shared=True).exception(TIMEOUT_S)
    except overlap.PeerFailedError as ended:  # the process has died before the call
        error = ended
    with suppress(overlap.OverlapError):  # for that reason
        world.close(TIMEOUT_S)
    del world
    right = [bool((each == place * sum(range(1, size + 1))).all()) for place, each in enumerate(kept)]
    held = mapped()
    view = kept[killed][5:]
    kept.clear()
    one = mapped()
    del view
    culprit = getattr(error, "culprit", None)
    return {"culprit": culprit, "right": right, "mapped": [held, one, mapped()]}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))), flush=True)
