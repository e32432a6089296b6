"""The two training loops of the demo, which differ in when they wait, and the run that compares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TypeAlias

import numpy as np

from transports import LinkSpeed, Paced

from ... import Future, Rank, run
from ...data import Digits
from ...timeline import Recorder, Timeline, breakdowns
from .model import Classifier, Floats, Labels, parameter_count, windows

ALGORITHM = "binomial"
"""A tree up and a tree down: 14 messages for 8 ranks, where a ring needs 112. Real CC-cores have hardware for messages;
here all ranks share one event loop, and its work for each (0.2 ms) is taken from compute. The tree keeps its links busy
for longer than a ring, which costs nothing."""

LATENCY_S = 20e-6
"""Of a message between neighbouring hosts."""

Progress: TypeAlias = Callable[[float], None]
"""Called after each step with the loss."""


COMM_PER_COMPUTE = 0.45
"""How long communication takes in a step, as part of compute, if the speed of the links is ours to choose: a little
less than half, for a good half of compute follows the first bucket and all of it could hide there."""

PROBE_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What every rank is told.

    Attributes:
        images: To learn from, as `windows`.
        labels: What they show.
        test: Images that nobody learns from.
        steps: How many steps each model takes.
        widths: The model's.
        progress: Told by rank 0.
    """

    images: Floats
    labels: Labels
    test: Digits
    steps: int
    widths: Sequence[Sequence[int]]
    progress: Progress

    @property
    def weights(self) -> int:
        """How many weights and biases a model has."""
        return sum(map(parameter_count, self.widths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """Where the ranks are, and how fast what joins them is.

    Attributes:
        ranks: Data-parallel ranks, at least 2.
        nodes: Processes that they are spread over. With one, every two ranks have a wire; with several, every two ranks
            of different nodes, on top of the sockets that carry the bytes.
        bandwidth_bytes_per_s: Of each wire, each way; `inf` for no pacing at all.
    """

    ranks: int
    nodes: int = 1
    bandwidth_bytes_per_s: float = math.inf

    def speed(self, src: int, dst: int) -> LinkSpeed | None:
        """Return the speed from a rank to a rank."""
        each = self.ranks // self.nodes
        if self.nodes > 1 and src // each == dst // each:
            return None
        return LinkSpeed(latency_s=LATENCY_S, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)

    @property
    def rounds(self) -> int:
        """How many messages that follow each other cross wires when a bucket is reduced: up the tree and down."""
        return 2 * ((self.nodes if self.nodes > 1 else self.ranks) - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the ranks have at the end, as rank 0 knows it.

    Attributes:
        digests: For each rank, SHA-256 of all weights, trained without and with overlap.
        right: Test images that the model trained with overlap knows.
    """

    digests: list[tuple[str, str]]
    right: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished comparison.

    Attributes:
        outcome: What was learnt.
        tests: How many test images there were.
        timeline: Of both trainings. Step i is the i-th one without overlap, step `steps + i` the i-th one with.
        steps: Steps of each.
    """

    outcome: Outcome
    tests: int
    timeline: Timeline
    steps: int


async def step_without(rank: Rank, model: Classifier, images: Floats, labels: Labels) -> None:
    """Take one step in which communication starts when the backward pass is over, all buckets at once."""
    grad: Future[object] = rank.compute(model.forward, images, labels)
    backs = []
    for block in reversed(model.blocks):
        back = rank.compute(block.backward, grad, name="backward")
        grad = back[0]
        backs.append((block, back))
    await back
    pending = [(block, rank.all_reduce((await back)[1], op="mean")) for block, back in backs]
    for block, reduced in pending:
        update = rank.compute(block.update, await reduced)
    await update


async def step_with(rank: Rank, model: Classifier, images: Floats, labels: Labels) -> None:
    """Take one step in which each bucket starts to travel when it exists, under the rest of the backward pass."""
    grad: Future[object] = rank.compute(model.forward, images, labels)
    pending = []
    for block in reversed(model.blocks):
        back = rank.compute(block.backward, grad, name="backward")
        grad = back[0]
        pending.append((block, rank.all_reduce(back[1], op="mean")))
    for block, reduced in pending:
        update = rank.compute(block.update, await reduced)
    await update


async def train(rank: Rank, lesson: Lesson) -> Outcome | None:
    """Train two equal models on this rank's share of the images, one in each way; tell rank 0 what became of them.

    They take turns step by step, so that whatever else the machine does meets both alike.
    """
    mine = slice(rank.rank, None, rank.world_size)
    images, labels = lesson.images[mine], lesson.labels[mine]
    models = Classifier(widths=lesson.widths), Classifier(widths=lesson.widths)
    for index in range(lesson.steps):
        for turn, (model, step) in enumerate(zip(models, (step_without, step_with), strict=True)):
            await rank.barrier()
            with rank.step(index + turn * lesson.steps):
                await step(rank, model, images, labels)
            if rank.rank == 0:
                lesson.progress(model.loss)
    return await _outcome(rank, models, lesson.test)


async def _outcome(rank: Rank, models: tuple[Classifier, Classifier], test: Digits) -> Outcome | None:
    digests = bytes.fromhex("".join(model.digest() for model in models))
    told = await rank.gather(np.frombuffer(digests, np.uint8)[None])
    if told is None:
        return None
    halves = told.reshape(rank.world_size, 2, -1)
    right = int((models[1].predict(windows(test.images)) == test.labels).sum())
    return Outcome(digests=[(a.tobytes().hex(), b.tobytes().hex()) for a, b in halves], right=right)


def compare(lesson: Lesson, wires: Wires, *, trace: str | PathLike[str] | None = None) -> Run | None:
    """Train both ways.

    Returns:
        What came out, or None in a process without rank 0. In a world of several processes its timeline has the ranks
        of this one; `trace` has all.
    """
    paced = wires.bandwidth_bytes_per_s < math.inf
    recorders: list[Recorder] = []

    async def main(rank: Rank) -> Outcome | None:
        recorders.append(rank.recorder)
        return await train(rank, lesson)

    outcome, *_ = run(
        main,
        ranks=wires.ranks,
        transport=partial(Paced, links=wires.speed) if paced else None,
        algorithm=ALGORITHM if paced else None,
        trace=trace,
    )
    if outcome is None:
        return None
    timeline = Timeline.collect(recorders, world_size=wires.ranks, meta={"script": "overlap demo"})
    return Run(outcome=outcome, tests=len(lesson.test), timeline=timeline, steps=lesson.steps)


def fitting_bandwidth(lesson: Lesson, wires: Wires) -> float:
    """Return the speed of wires, in bytes per second, at which communication takes `COMM_PER_COMPUTE` of compute here.

    It takes a few steps without any wires, in this process, to find out how long compute takes on this machine.
    """
    silent = replace(lesson, steps=PROBE_STEPS, progress=lambda loss: None)
    probed = compare(silent, Wires(ranks=wires.ranks))
    assert probed is not None, "rank 0 is here"
    compute_ns = min(
        max(row.compute_ns for row in breakdowns(probed.timeline, step=step)) for step in probed.timeline.steps()
    )
    wire_bytes = wires.rounds * 4 * lesson.weights  # each message is a whole bucket
    return float(f"{wire_bytes / (COMM_PER_COMPUTE * compute_ns / 1e9):.2g}")
