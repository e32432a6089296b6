"""One process of `overlap demo --survive`: `overlap run --survive ... -m overlap.cli.demo.survivor STEPS FOLDER`.

It prints lines of JSON, and writes its timeline of all epochs, as if it had been one rank, into the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import trio

from ...config import overriding
from ...data import digits
from ...front import run
from ...parallel import AdamW, DataParallel
from ...processes.shared_folder import WITNESS
from ...runtime.epoch import Epoch
from ...runtime.rank import Rank
from ...timeline import Timeline
from ...timeline.columnar import SpanColumns
from ...timeline.files.tracefile import write_trace
from .model import Floats, Labels

BATCH = 32  # images of each rank in a step
_STEP_S = 0.005  # least time of a backward, so that steps can be seen beside the pause
_READY_S = 20.0  # within which the spare has started

Show = Callable[[dict[str, object]], None]


async def train(rank: Rank, steps: int, show: Show, pace_s: float) -> str:
    """Train a softmax regression up to so many steps; return a digest of the weights."""
    epoch = rank.epoch
    training, _ = digits().split()
    images, labels = training.images, training.labels
    params = {"w": np.zeros((images.shape[1], 10), np.float32)}
    model = DataParallel(rank, params, optimizer=AdamW(lr=0.01), exact=True)
    show({"epoch": epoch.number, "members": epoch.members, "step": epoch.step, "pid": os.getpid()})
    while model.steps < steps:
        with rank.step(model.steps):
            chosen = (BATCH * (model.steps * rank.world_size + rank.rank) + np.arange(BATCH)) % len(images)
            gradient = partial(_softmax_gradient, images[chosen], labels[chosen], pace_s)
            model.reduce("w", rank.compute(gradient, model["w"], name="backward"))
            await model.step()
            await model["w"]
        show({"end": model.steps, "at_ns": time.perf_counter_ns()})
    weights = await model.finish()
    return hashlib.sha256(weights["w"].tobytes()).hexdigest()


def _softmax_gradient(images: Floats, labels: Labels, pace_s: float, weights: Floats) -> Floats:
    """Return the gradient of the mean cross-entropy for the weights, shape (64, 10), after a pause of `pace_s`."""
    time.sleep(pace_s)
    scores = images @ weights
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    likely[np.arange(len(labels)), labels] -= 1
    gradient: Floats = images.T @ likely / np.float32(len(labels))
    return gradient


def replay_digest(history: Sequence[tuple[Sequence[int], int]], steps: int) -> str:
    """Return the digest of a run in this process with a given history: members of each world, and its first step."""
    memory = {member: Epoch(survives=True) for members, _ in history for member in members}

    async def train_epoch(rank: Rank, members: Sequence[int], joined: Sequence[int], begin: int, end: int) -> str:
        """Train the steps of one world from `begin` to `end`, with the memory of its members; return the digest."""
        rank.epoch = memory[members[rank.rank]]
        rank.epoch.step, rank.epoch.joined = begin, tuple(joined)
        if rank.epoch.survivor is not None:
            rank.epoch.survivor.report()
            rank.epoch.survivor.advance(begin)
        return await train(rank, end, lambda line: None, 0.0)

    ends = [begin for _, begin in history[1:]] + [steps]
    before = history[0][0]
    for (members, begin), end in zip(history, ends, strict=True):
        joined = [rank for rank, member in enumerate(members) if member not in before]
        digests = run(train_epoch, members, joined, begin, end, ranks=len(members))
        before = members
    return digests[0]


def main(steps: int, folder: str) -> None:
    """Train as one process of the job up to `steps` steps, print the digest, and write the trace to `folder`."""
    member = int(os.environ["OVERLAP_NODE_RANK"])
    seen: list[Timeline] = []

    async def train_when_ready(rank: Rank) -> str:
        """Train as soon as a spare waits, or without one after `_READY_S`; return the digest of the weights."""
        with trio.move_on_after(_READY_S):  # without a spare it goes on alone, and the story tells that
            while not _has_spare():  # noqa: ASYNC110  another process makes it true
                await trio.sleep(0.01)
        return await train(rank, steps, _print, _STEP_S)

    with overriding(watcher=seen.append):
        digests = run(train_when_ready)
    _print({"digest": digests[0]})
    columns = [replace(each.columns, rank=np.full_like(each.columns.rank, member)) for each in seen]
    timeline = Timeline.of_columns(SpanColumns.concatenate(columns), world_size=seen[0].world_size)
    write_trace(timeline, Path(folder, f"process-{member}.json"))


def _has_spare() -> bool:
    return any(Path(os.environ[WITNESS]).glob("attempt-*/run-*/spare-*"))


def _print(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
