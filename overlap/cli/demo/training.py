"""The two training loops of the demo, which differ in when they wait, and the run that compares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from transports import LinkSpeed, NeuronLink, Paced

from ... import Future, Rank, run
from ...timeline import Recorder, Timeline, breakdowns
from .model import Classifier, Floats, Labels, parameter_count

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
        steps: How many steps each model takes.
        widths: The model's.
        progress: Told by rank 0.
    """

    images: Floats
    labels: Labels
    steps: int
    widths: Sequence[Sequence[int]]
    progress: Progress

    @property
    def weights(self) -> int:
        """How many weights and biases a model has."""
        return sum(map(parameter_count, self.widths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank has at the end.

    Attributes:
        models: Trained without and with overlap.
        recorder: The rank's spans. Step i is the i-th one without overlap, step `steps + i` the i-th one with.
    """

    models: tuple[Classifier, Classifier]
    recorder: Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished comparison.

    Attributes:
        outcomes: In rank order.
        timeline: Of both trainings.
        steps: Steps of each.
    """

    outcomes: list[Outcome]
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


async def train(rank: Rank, lesson: Lesson) -> Outcome:
    """Train two equal models on this rank's share of the images, one in each way.

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
    return Outcome(models=models, recorder=rank.recorder)


def compare(lesson: Lesson, *, ranks: int, bandwidth_bytes_per_s: float) -> Run:
    """Train both ways on `ranks` ranks, over links of that speed each way between any two; `inf` for no pacing at all.

    Args:
        lesson: What to learn.
        ranks: Data-parallel ranks, at least 2.
        bandwidth_bytes_per_s: Of each link.
    """
    speed = LinkSpeed(latency_s=LATENCY_S, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    paced = bandwidth_bytes_per_s < math.inf
    transport = Paced(NeuronLink(ranks), links=lambda src, dst: speed) if paced else NeuronLink(ranks)
    outcomes = run(train, lesson, ranks=ranks, transport=transport, algorithm=ALGORITHM if paced else None)
    recorders = [outcome.recorder for outcome in outcomes]
    timeline = Timeline.collect(recorders, world_size=ranks, meta={"script": "overlap demo"})
    return Run(outcomes=outcomes, timeline=timeline, steps=lesson.steps)


def fitting_bandwidth(lesson: Lesson, *, ranks: int) -> float:
    """Return the speed of links, in bytes per second, at which communication takes `COMM_PER_COMPUTE` of compute here.

    It takes a few steps without any links to find out how long compute takes on this machine.
    """
    silent = replace(lesson, steps=PROBE_STEPS, progress=lambda loss: None)
    probed = compare(silent, ranks=ranks, bandwidth_bytes_per_s=math.inf)
    compute_ns = min(
        max(row.compute_ns for row in breakdowns(probed.timeline, step=step)) for step in probed.timeline.steps()
    )
    rounds = 2 * (ranks - 1).bit_length()  # each passes on a whole bucket
    wire_bytes = rounds * 4 * lesson.weights
    return float(f"{wire_bytes / (COMM_PER_COMPUTE * compute_ns / 1e9):.2g}")
