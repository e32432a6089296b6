"""A small training loop that hits one of its ranks: which, how and when is in its environment."""

import os
import signal
import sys
import time

import numpy as np
import trio
import trio.lowlevel

import overlap

FAULT, MOMENT = os.environ["FAULT"], os.environ["MOMENT"]
VICTIM = int(os.environ["VICTIM"])  # a rank
LAST = int(os.environ.get("WORLD_SIZE", "1")) - 1
BIG = 1 << 20  # elements: 4 MiB
PLACE = os.environ.get("PLACE", "private")  # of gradients; "common" to processes of one host, as "shared" means too


def strike() -> None:
    """Do it."""
    print(f"struck {os.getpid()} {time.monotonic()}", flush=True)
    if FAULT == "raise":
        raise ValueError("on purpose")
    if FAULT == "exit":
        sys.exit(3)
    if FAULT == "vanish":
        os._exit(0)
    if FAULT == "interrupt":
        raise KeyboardInterrupt
    if FAULT == "hit":  # the test does it, from outside
        return
    os.kill(os.getpid(), getattr(signal, FAULT))


async def train(rank: overlap.Rank) -> float:
    """Go through every moment, and strike in one of them."""

    def at(moment: str) -> None:
        if moment == MOMENT and rank.rank == VICTIM:
            strike()

    def compute(x: np.ndarray) -> np.ndarray:
        at("compute")
        return x + 1

    await rank.barrier()
    if MOMENT == "idle":
        await trio.sleep(0.1)
        at("idle")
        await trio.sleep(1e6 if rank.rank != VICTIM or FAULT == "hit" else 0.1)
    x = await rank.compute(compute, np.ones(4, np.float32))
    if rank.rank == VICTIM:
        await trio.sleep(0.1)  # so that the others wait in it
        at("collective")
    await rank.all_reduce(x, name="loss")
    grad = rank.empty(BIG, common=PLACE != "private")
    grad[...] = 1
    out = grad if PLACE == "common" else None
    for step in range(10_000 if MOMENT == "moving" else 3):
        with rank.step(step):
            moving = rank.all_reduce(grad, "mean", out, shared=PLACE == "shared", name="gradient")
            if step == 2:
                if FAULT != "raise":  # which says what is unfinished: in memory, it may have ended by then
                    await trio.lowlevel.checkpoint()
                at("moving")
            grad = await moving
    at("writing")
    with open(f"weights-{rank.rank}.npy", "wb") as file:  # noqa: ASYNC230 (as programs do)
        np.save(file, grad)
        if MOMENT == "in file":
            at("in file")
    try:
        await rank.barrier()
        at("ending")
    finally:
        at("finally")
    return float(grad[0])


if MOMENT == "starting" and VICTIM in (int(os.environ.get("RANK", "0")),):
    strike()
results = overlap.run(train)
if MOMENT == "after" and int(os.environ.get("RANK", "0")) == VICTIM:
    strike()
print("results", results, flush=True)
