"""A CC-core for tests: carries programs out in a random order that their queues and waits allow."""

import random
from collections.abc import Sequence

import numpy as np

from overlap.collectives import Buffer, Extent, Op, Program, Schedule, Step, StepKind, slot_bounds

Ints = np.ndarray


class Stuck(Exception):
    """No step of any rank may start: the programs have deadlocked."""


def execute(
    schedule: Schedule, programs: Sequence[Program], inputs: Sequence[Ints], *, seed: int, shared: bool
) -> list[Ints]:
    """Add up the inputs; a send finishes when its message has been taken, as over a link without any buffer.

    With `shared`, buffers that may be one memory are.
    """
    world = _World(schedule, programs, inputs, shared)
    rng = random.Random(seed)
    while todo := [(rank, q) for rank, at in enumerate(world.done) for q, n in enumerate(at) if world.step(rank, q)]:
        able = [head for head in todo if world.ready(*head)]
        if not able:
            raise Stuck(f"{len(todo)} queues are waiting for each other")
        world.run(*rng.choice(able))
    return world.outputs


class _World:
    def __init__(self, schedule: Schedule, programs: Sequence[Program], inputs: Sequence[Ints], shared: bool) -> None:
        self.schedule, self.programs = schedule, programs
        self.block = inputs[schedule.root].size // schedule.blocks[0]
        self.done = [[0] * len(program.queues) for program in programs]
        _, out, scratch = (n * self.block for n in schedule.blocks)
        self.outputs = [np.zeros(out, inputs[0].dtype) for _ in programs]
        scratches = [np.full(scratch, 77, inputs[0].dtype) for _ in programs]
        taken = list(inputs)
        if shared and schedule.reduces:
            self.outputs = [s[:out] for s in scratches]
        if shared and schedule.in_place:
            taken = self.outputs
            for x, own in zip(inputs, taken, strict=True):
                own[...] = x
        self.memory = {Buffer.IN: taken, Buffer.OUT: self.outputs, Buffer.SCRATCH: scratches}

    def step(self, rank: int, queue: int) -> Step | None:
        at = self.done[rank][queue]
        steps = self.programs[rank].queues[queue]
        return steps[at] if at < len(steps) else None

    def ready(self, rank: int, queue: int) -> bool:
        """Receives drive: one may start when its message is at the head of the sender's queue, and both may go."""
        step = self.step(rank, queue)
        assert step is not None
        if step.kind is StepKind.SEND or not self.free(rank, step):
            return False
        if step.kind is StepKind.LOCAL:
            return True
        sent = self.step(step.peer, 2 * step.channel)
        return sent is not None and sent.peer == rank and self.free(step.peer, sent)

    def free(self, rank: int, step: Step) -> bool:
        return all(self.done[rank][queue] >= n for queue, n in step.waits)

    def run(self, rank: int, queue: int) -> None:
        step = self.step(rank, queue)
        assert step is not None
        if step.kind is StepKind.RECV:
            sent = self.step(step.peer, 2 * step.channel)
            assert sent is not None
            assert (sent.src, sent.dst, sent.op) == (step.src, step.dst, step.op)
            self.done[step.peer][2 * step.channel] += 1
        incoming = self.view(step.peer, step.src)
        target = self.view(rank, step.dst)
        base = self.view(rank, step.base) if step.base else target
        target[...] = base + incoming if step.op is Op.ADD else incoming
        self.done[rank][queue] += 1

    def view(self, rank: int, extent: Extent) -> Ints:
        k = self.schedule.slots_per_block
        start, _ = slot_bounds(extent.slot, k, self.block)
        _, stop = slot_bounds(extent.slot + extent.count - 1, k, self.block)
        return self.memory[extent.buffer][rank][start:stop]
