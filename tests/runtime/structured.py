"""Programs of a Trio user: errors that nobody awaits, cancelled receives, daemons. Each prints what happens, in order.

A process of a job runs one of them: `overlap run --processes 2 structured.py NAME`.
"""

import gc
import logging
import sys
import threading
import weakref
from contextlib import suppress
from itertools import count

import numpy as np
import trio
from trio.testing import wait_all_tasks_blocked

import overlap

GO, DATA = 1, 2
TIMEOUT_S = 60.0  # far above what any of them takes
NUMBER = ((1,), np.int64)


def boom() -> None:
    raise ValueError("boom")


async def task_boom() -> None:
    raise ValueError("boom")


async def wait_for(future: overlap.Future[object]) -> object:
    return await future


def when(rank: overlap.Rank) -> str:
    return f" at {rank.now_ns() / 1e9:g} s" if rank.clock == "virtual" else ""


# -- errors that nobody awaits: the line that issues is marked ---------------------------------------------------------


async def compute_dropped(rank: overlap.Rank) -> None:
    if rank.rank == 0:
        rank.compute(boom, seconds=0.1)  # raises
    try:
        await rank.recv(NUMBER, src=1 - rank.rank)
    finally:
        if rank.rank == 0:
            print(f"stopped{when(rank)}")


async def compute_kept(rank: overlap.Rank) -> None:
    if rank.rank == 0:
        future = rank.compute(boom, seconds=0.1)  # raises
    try:
        await rank.recv(NUMBER, src=1 - rank.rank)
    finally:
        if rank.rank == 0:
            print(f"stopped{when(rank)}, {future.failed}")


async def task_dropped(rank: overlap.Rank) -> None:
    if rank.rank == 0:
        rank.spawn(task_boom)  # raises
    try:
        await trio.sleep(30)
        print("slept")
    finally:
        if rank.rank == 0:
            print(f"stopped{when(rank)}")


# -- receives ----------------------------------------------------------------------------------------------------------


async def receive_cancelled(rank: overlap.Rank) -> None:
    """All three messages come, the first of them to the receive after the cancelled one."""
    if rank.rank == 0:
        await rank.recv(NUMBER, src=1, tag=GO)
        for i in range(3):
            await rank.send(np.array([i]), dst=1, tag=DATA)
        return
    with trio.move_on_after(0.01) as scope:
        await rank.recv(src=0, tag=DATA)
    rank.send(np.array([0]), dst=0, tag=GO)
    got = [int((await rank.recv(src=0, tag=DATA))[0]) for _ in range(3)]
    print(f"cancelled {scope.cancelled_caught}, got {got}")


async def receive_of_nothing(rank: overlap.Rank) -> None:
    """A cancelled receive for which no message ever comes keeps nobody waiting."""
    if rank.rank == 1:
        with trio.move_on_after(0.01):
            await rank.recv(NUMBER, src=0, tag=DATA)
    await rank.barrier()
    print(f"rank {rank.rank} went on")


async def cancel(rank: overlap.Rank) -> None:
    if rank.rank == 0:
        await rank.recv(NUMBER, src=1, tag=GO)
        await rank.send(np.array([7]), dst=1, tag=DATA)
        return
    first, second = (rank.recv(NUMBER, src=0, tag=DATA) for _ in range(2))
    unmet = first.cancel()
    raised = "nothing"
    try:
        await first
    except overlap.FutureCancelledError:
        raised = "FutureCancelledError"
    waits = rank.compute(lambda x: x, second, seconds=0.1)
    unbegun = rank.compute(boom, seconds=0.1)
    cancelled = unbegun.cancel()
    rank.send(np.array([0]), dst=0, tag=GO)
    got = int((await waits)[0])
    print(f"{unmet}, {raised}, {cancelled}, {unbegun.cancelled()}, got {got}, {second.cancel()}, {waits.cancel()}")


# -- tasks -------------------------------------------------------------------------------------------------------------


async def daemon(rank: overlap.Rank) -> None:
    ended = []

    async def log_for_ever() -> None:
        try:
            for _ in count():
                await trio.sleep(0.01)
        finally:
            ended.append("ended")

    rank.spawn(log_for_ever, daemon=True)
    task = rank.spawn(log_for_ever)
    await trio.lowlevel.checkpoint()
    cancelled = task.cancel()
    try:
        await task
    except overlap.FutureCancelledError:
        print(f"{cancelled}, {task.cancelled()}, {ended}, {task.cancel()}")


# -- what is kept ------------------------------------------------------------------------------------------------------


class Large:
    pass


async def errors_that_were_seen(rank: overlap.Rank) -> None:
    """Without the cycle collector: what raised is forgotten once the program has handled it."""
    references: list[weakref.ref[Large]] = []

    def fail() -> None:
        large = Large()
        references.append(weakref.ref(large))
        raise ValueError("boom")

    async def fail_in_task() -> None:
        fail()

    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            for issue in (lambda: rank.compute(fail, seconds=1e-3), lambda: rank.spawn(fail_in_task)):
                with suppress(ValueError):
                    await issue()
        await rank.compute(int, seconds=1e-3)  # its thread has left the last of them
        await wait_all_tasks_blocked()
        print(len(references), sum(reference() is not None for reference in references))
    finally:
        gc.enable()


async def waits_in_vain(rank: overlap.Rank) -> None:
    future = rank.recv(NUMBER, src=1 - rank.rank)

    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.extend(future.wait(timeout=0) for _ in range(200)))
    thread.start()
    thread.join()  # which needs no loop
    print(sum(ended), len(ended), len(future._threads or ()))
    await rank.barrier()
    await rank.send(np.array([1]), dst=1 - rank.rank)
    await future


async def callback_that_raises(rank: overlap.Rank) -> None:
    logging.getLogger("overlap").addHandler(logging.NullHandler())
    future, called = rank.recv(NUMBER, src=1 - rank.rank), trio.Event()
    for callback in (lambda _: boom(), lambda _: called.set()):
        future.add_done_callback(callback)
    await rank.barrier()
    await rank.send(np.array([1]), dst=1 - rank.rank)
    await called.wait()
    print(f"called {bool(future.done)}")


if __name__ == "__main__":
    overlap.run(globals()[sys.argv[1]], timeout_s=TIMEOUT_S)
