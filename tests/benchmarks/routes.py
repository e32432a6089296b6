"""Files and Python calls on the warm routes of operations, and their limits.

A call is a call of a Python function in a file of overlap, transports or topology, or in code that these generate. A
resumed coroutine counts again. Functions of C, Trio and numpy do not count, nor do instruments of the event loop and
timers. A figure is the least of several warm rounds, because other tasks of the loop may run in between.
"""

import json
import os
import subprocess
import sys
import threading
from math import inf
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import trio

import overlap
from overlap.runtime.event_loop import FairPauses

PACKAGES = ("overlap", "transports", "topology")
OUTPUT = "OVERLAP_ROUTES_OUTPUT"  # environment: beginning of the names of the files of a process's figures
GENERATED = "<generated>"

_ROUNDS = 30
_ROUNDS_OF_PROCESSES = 200  # on a busy machine few of them are undisturbed: a receive polls only on a core of its own
_COLD = 4  # the first rounds compile, open and cache
_INSTRUMENTS = {"before_io_wait", "after_io_wait", "_run_rank"}  # of the loop, at each of its turns
_TIMERS = {"_look_periodically", "_take_sample", "_watch"}  # with all that they call
_DEPTH = 12  # frames above a call in which a timer is looked for


class Count(NamedTuple):
    """Size of a route, and its calls as "file:function" for who looks for the one too many."""

    files: int
    calls: int
    route: tuple[str, ...] = ()


#: Most files and calls of each route. A change that makes a route shorter lowers its limit.
LIMITS = {
    "all_reduce, first rank": Count(5, 7),
    "all_reduce, last rank": Count(9, 17),
    "send and recv, one process": Count(10, 31),
    "compute": Count(8, 30),
    "send, between processes": Count(9, 12),
    "recv, between processes": Count(14, 33),
    "send, torch": Count(11, 18),
    "recv, torch": Count(13, 25),
    "all_reduce, torch": Count(4, 8),
}


class Tracer:
    """Records calls between `start` and `stop`, in this thread and in all that start after `install`."""

    def __init__(self) -> None:
        self._on = False
        self._calls: list[str] = []
        self._rounds: dict[str, list[list[str]]] = {}
        self._places: dict[str, str] = {}

    def install(self) -> None:
        """Watch the calling thread, and later threads."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def remove(self) -> None:
        """Watch no more."""
        sys.setprofile(None)
        threading.setprofile(None)

    def start(self) -> None:
        """Start a round."""
        self._calls, self._on = [], True

    def stop(self, route: str) -> None:
        """End a round of a route."""
        self._on = False
        self._rounds.setdefault(route, []).append(self._calls)

    def counts(self) -> dict[str, Count]:
        """Return the least of the warm rounds of each route."""
        return {
            route: min((_count(calls) for calls in rounds[_COLD:]), key=lambda count: (count.calls, count.files))
            for route, rounds in self._rounds.items()
        }

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self._on and (place := self._place(frame)):
            if place == GENERATED and (frame.f_back is None or not self._place(frame.f_back)):
                return
            if frame.f_code.co_name not in _INSTRUMENTS and not _is_in_timer(frame):
                self._calls.append(f"{place}:{frame.f_code.co_name}")

    def _place(self, frame: FrameType) -> str:
        """Return the file of a call in its package; "" for files of others."""
        name = frame.f_code.co_filename
        place = self._places.get(name)
        if place is None:
            generated = name.startswith("<") and not name.startswith("<frozen")
            parts = Path(name).parts
            own = [index for index, part in enumerate(parts[:-1]) if part in PACKAGES and "tests" not in parts]
            place = GENERATED if generated else "/".join(parts[own[-1] :]) if own else ""
            self._places[name] = place
        return place


def _count(calls: list[str]) -> Count:
    return Count(len({each.partition(":")[0] for each in calls} - {GENERATED}), len(calls), tuple(calls))


def _is_in_timer(frame: FrameType | None) -> bool:
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name in _TIMERS:
            return True
        frame = frame.f_back
    return False


def routes_of_one_process() -> dict[str, Count]:
    """Count the routes of two ranks in one process, which is a new one: it has nothing of earlier programs."""
    done = subprocess.run([sys.executable, __file__, "one"], check=True, stdout=subprocess.PIPE, timeout=120)
    return {route: Count(*count) for route, count in json.loads(done.stdout).items()}


def _run_one_process() -> None:
    """Count the routes of two ranks in this process, and print them."""
    # On a busy machine each round takes so long that an await of an ended operation lets other tasks run.
    FairPauses.__init__.__defaults__ = (inf,)
    tracer = Tracer()
    issued = [[trio.Event() for _ in range(_ROUNDS)] for _ in range(2)]
    ended = [[trio.Event() for _ in range(_ROUNDS)] for _ in range(2)]

    async def first(rank: overlap.Rank) -> None:
        x = np.ones(1)
        for round_ in range(_ROUNDS):
            tracer.start()
            future = rank.all_reduce(x)
            tracer.stop("all_reduce, first rank")
            issued[0][round_].set()
            await ended[0][round_].wait()
            await future
        await rank.barrier()
        for round_ in range(_ROUNDS):
            await issued[1][round_].wait()
            await rank.send(x, dst=1)
            ended[1][round_].set()
        await rank.barrier()
        for _ in range(_ROUNDS):
            tracer.start()
            await rank.compute(np.negative, x)
            tracer.stop("compute")

    async def last(rank: overlap.Rank) -> None:
        x, out = np.ones(1), np.empty(1)  # of its own: an array that another rank reads takes a longer route
        for round_ in range(_ROUNDS):
            await issued[0][round_].wait()
            tracer.start()
            await rank.all_reduce(x)
            tracer.stop("all_reduce, last rank")
            ended[0][round_].set()
        await rank.barrier()
        for round_ in range(_ROUNDS):
            tracer.start()
            future = rank.recv(out, src=0)
            issued[1][round_].set()
            await future
            tracer.stop("send and recv, one process")
            await ended[1][round_].wait()
        await rank.barrier()

    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 0:
            tracer.install()
        await rank.barrier()
        await (last if rank.rank else first)(rank)
        await rank.barrier()
        tracer.remove()

    overlap.run(main, ranks=2)
    print(json.dumps(tracer.counts()))


async def _message(rank: overlap.Rank, tracer: Tracer) -> None:
    x, out = np.ones(1), np.empty(1)
    for _ in range(_ROUNDS_OF_PROCESSES):
        await rank.barrier()
        if rank.rank == 0:
            await trio.sleep(0.005)  # so that the receiver waits
            tracer.start()
            await rank.send(x, dst=1)
            tracer.stop("send, between processes")
        else:
            tracer.start()
            await rank.recv(out, src=0)
            tracer.stop("recv, between processes")


async def _main_of_process(rank: overlap.Rank) -> None:
    tracer = Tracer()
    tracer.install()
    await _message(rank, tracer)
    await rank.barrier()
    tracer.remove()
    _write(rank.rank, tracer)


def _run_torch() -> None:
    import torch
    import torch.distributed as dist

    import overlap.torch  # noqa: F401 - registers the backend

    dist.init_process_group(backend="overlap")
    rank, tracer, x = dist.get_rank(), Tracer(), torch.ones(1)
    tracer.install()
    for _ in range(_ROUNDS):
        dist.barrier()
        tracer.start()
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        tracer.stop("recv, torch" if rank else "send, torch")
        total = torch.ones(1)
        tracer.start()
        dist.all_reduce(total)
        tracer.stop("all_reduce, torch")
    dist.barrier()
    tracer.remove()
    _write(rank, tracer)
    dist.destroy_process_group()


def _write(rank: int, tracer: Tracer) -> None:
    Path(f"{os.environ[OUTPUT]}.{rank}").write_text(json.dumps(tracer.counts()))


def routes_of_processes(folder: Path, *, torch: bool = False) -> dict[str, Count]:
    """Count the routes of two processes, of ranks or of PyTorch."""
    launcher = ["torch.distributed.run", "--nproc-per-node", "2"]
    if not torch:
        launcher = ["overlap", "run", "--processes", "2", "--ranks", "2"]
    environment = {**os.environ, OUTPUT: str(folder / "counts"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, __file__, *(["torch"] if torch else [])]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    read = [json.loads((folder / f"counts.{rank}").read_text()) for rank in range(2)]
    return {route: Count(*count) for each in read for route, count in each.items()}


if __name__ == "__main__":
    if sys.argv[1:] == ["torch"]:
        _run_torch()
    elif sys.argv[1:] == ["one"]:
        _run_one_process()
    else:
        overlap.run(_main_of_process)
