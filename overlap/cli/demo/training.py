"""The two training loops of the demo, which differ in when gradients leave, and the run that compares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

import numpy as np

from transports import LinkSpeed, Paced

from ... import Future, Rank, run
from ...data import digits
from ...parallel import Adam, DataParallel
from ...timeline import Timeline, breakdowns
from .model import WIDTHS, Classifier, Floats, Labels, cross_entropy, image_windows, parameter_count

ALGORITHM = "binomial"
"""A tree up and a tree down: 14 messages for 8 ranks, where a ring needs 112. Real CC-cores have hardware for messages;
here all ranks share one event loop, and its work for each (0.2 ms) is taken from compute. The tree keeps its links busy
for longer than a ring, which costs nothing."""

LATENCY_S = 20e-6
"""Of a message between neighbouring hosts."""

OPTIMIZER = Adam(0.004, betas=(0.9, 0.99))
"""A high rate, and a short memory: few steps must do."""

COMM_PER_COMPUTE = 0.45
"""Time of communication in a step, as a share of compute, if the speed of the links is ours to choose: a little
less than half, for a good half of compute follows the first bucket and all of it could hide there."""

PROBE_STEPS = 2

META = {"script": "overlap demo"}

Progress: TypeAlias = Callable[[float], None]
"""Called after each step with the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training to demonstrate: its ranks, the speed of their links, the model and the steps."""

    ranks: int  # Data-parallel ranks, at least 2
    steps: int  # How many steps each model takes
    bandwidth_bytes_per_s: float = math.inf  # Speed of each link, each way; `inf` for no pacing
    widths: Sequence[Sequence[int]] = WIDTHS  # The model's

    @property
    def weights(self) -> int:
        """Number of weights and biases of a model."""
        return sum(map(parameter_count, self.widths))

    def link_speed(self, src: int, dst: int) -> LinkSpeed:
        """Return the speed of the link between two ranks, which is the same for all pairs.

        Args:
            src: One rank; ignored.
            dst: The other one; ignored.
        """
        return LinkSpeed(latency_s=LATENCY_S, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoComparison:
    """Results of the trainings without and with overlap."""

    digests: list[tuple[str, str]]  # For each rank, SHA-256 of all weights, trained without and with overlap
    right: int  # Test images that the model trained with overlap knows
    tests: int  # How many test images there are
    steps: int  # Steps of each training
    timeline: Timeline  # Both trainings: step i is the i-th one without overlap, step `steps + i` the i-th one with it

    @property
    def identical(self) -> bool:
        """Whether all weights are the same, bit by bit, on all ranks and in both trainings."""
        return len({digest for pair in self.digests for digest in pair}) == 1


def _issue_forward(
    rank: Rank, net: Classifier, model: DataParallel, images: Floats, labels: Labels
) -> tuple[Future[object], Iterator[tuple[str, Future[object]]]]:
    """Issue the forward pass of a step, of images as `image_windows`.

    Return the loss, and an iterator that issues the backward pass: one block for each (name, gradient) that is taken.
    """
    x: object = images
    activations: dict[str, Future[object]] = {}
    for name, block in net.blocks.items():
        out = rank.compute(block.forward, model[name], x, name="forward")
        x, activations[name] = out[0], out[1]
    loss_and_grad = rank.compute(cross_entropy, x, labels, name="loss")

    def issue_backward() -> Iterator[tuple[str, Future[object]]]:
        """Issue the blocks' backward passes from the last to the first, one for each gradient that is taken."""
        grad = loss_and_grad[0]
        for name, block in reversed(net.blocks.items()):
            back = rank.compute(block.backward, model[name], activations.pop(name), grad, name="backward")
            grad = back[0]
            yield name, back[1]

    return loss_and_grad[1], issue_backward()


async def step_without_overlap(
    rank: Rank, net: Classifier, model: DataParallel, images: Floats, labels: Labels
) -> float:
    """Take one step without overlap: communication of all buckets starts after the backward pass.

    Args:
        rank: The rank.
        net: Blocks of the model.
        model: Their weights, and what becomes of gradients.
        images: Images of this rank, as `image_windows`.
        labels: Their classes.

    Returns:
        The loss before the update.
    """
    loss, backward = _issue_forward(rank, net, model, images, labels)
    gradients = dict(backward)
    for name in gradients:
        await gradients[name]
    for name, gradient in gradients.items():
        model.reduce(name, gradient)
    model.step()
    await model.finish()
    return cast("float", await loss)


async def step_with_overlap(rank: Rank, net: Classifier, model: DataParallel, images: Floats, labels: Labels) -> float:
    """Take one step with overlap: each bucket travels as soon as it is full, while the backward pass goes on.

    Arguments and result are those of `step_without_overlap`.
    """
    loss, backward = _issue_forward(rank, net, model, images, labels)
    for name, gradient in backward:
        model.reduce(name, gradient)
    model.step()
    await model.finish()
    return cast("float", await loss)


async def train(rank: Rank, task: Task, images: Floats, labels: Labels, progress: Progress) -> list[Classifier]:
    """Train two equal models on this rank's share of the images, one in each way.

    They take turns step by step, so that other load of the machine slows both alike.

    Args:
        rank: The rank.
        task: The training.
        images: Images for all ranks, as `image_windows`.
        labels: Their classes.
        progress: Called on rank 0 after each step.

    Returns:
        The models with their final weights: trained without overlap, and with it.
    """
    share = slice(rank.rank, None, rank.world_size)
    nets = [Classifier(task.widths) for _ in range(2)]
    # a bucket for each block: one byte fills it
    models = [
        DataParallel(rank, net.weights, optimizer=OPTIMIZER, bucket_bytes=1, rebuild_buckets=False) for net in nets
    ]
    ways = step_without_overlap, step_with_overlap
    for index in range(task.steps):
        for turn, (net, model, step) in enumerate(zip(nets, models, ways, strict=True)):
            await rank.barrier()
            with rank.step(index + turn * task.steps):
                loss = await step(rank, net, model, images[share], labels[share])
            if rank.rank == 0:
                progress(loss)
    for net, model in zip(nets, models, strict=True):
        net.weights = await model.finish()
    return nets


def compare_trainings(task: Task, progress: Progress) -> DemoComparison:
    """Train both models on the ranks of this process, and return the results of both."""
    learnt, test = digits().split()
    images, recorders = image_windows(learnt.images), []

    async def main(rank: Rank) -> tuple[list[tuple[str, str]], int] | None:
        """Train; return on rank 0 the two digests of each rank, and how many images are classified right; else None."""
        recorders.append(rank.recorder)
        without, overlapped = await train(rank, task, images, learnt.labels, progress)
        digests = bytes.fromhex(without.digest() + overlapped.digest())
        digests_by_rank = await rank.gather(np.frombuffer(digests, np.uint8)[None])
        if digests_by_rank is None:
            return None
        right = (overlapped.logits(image_windows(test.images)).argmax(axis=1) == test.labels).sum()
        pairs = digests_by_rank.reshape(rank.world_size, 2, -1)
        return [(first.tobytes().hex(), second.tobytes().hex()) for first, second in pairs], int(right)

    paced = task.bandwidth_bytes_per_s < math.inf
    outcome, *_ = run(
        main,
        ranks=task.ranks,
        transport=partial(Paced, links=task.link_speed) if paced else None,
        algorithm=ALGORITHM if paced else None,
    )
    assert outcome is not None, "rank 0 gathers the digests"
    timeline = Timeline.collect(recorders, world_size=task.ranks, meta=META)
    return DemoComparison(digests=outcome[0], right=outcome[1], tests=len(test), steps=task.steps, timeline=timeline)


def measure_fitting_bandwidth(task: Task) -> float:
    """Return the speed of links, in bytes per second, at which communication takes `COMM_PER_COMPUTE` of compute here.

    It takes a few steps without pacing, in this process, to find out how long compute takes on this machine.
    """
    probe = replace(task, steps=PROBE_STEPS, bandwidth_bytes_per_s=math.inf)
    timeline = compare_trainings(probe, lambda loss: None).timeline
    compute_ns = min(max(row.compute_ns for row in breakdowns(timeline, step=step)) for step in timeline.steps())
    # A bucket goes up the tree and down again, whole in each message.
    rounds = 2 * (task.ranks - 1).bit_length()
    return float(f"{rounds * 4 * task.weights / (COMM_PER_COMPUTE * compute_ns / 1e9):.2g}")
