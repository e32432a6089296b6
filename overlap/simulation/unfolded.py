"""Collectives in flight, message by message, with the order of their starts, departures and arrivals. Pure.

The rules are those of the cost model: a rank begins a step when all messages of earlier steps have arrived and its
earlier messages have started; a message leaves when the messages of earlier steps on its first wire have left. Phases
follow one another as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .flow import Flow, Section
from .fluid import Fluid
from .unfolding import ARRIVED, LEFT, STARTED, Phase, StepMessage


class MessagePlan(NamedTuple):
    """Plan of a collective in flight: its phases, message by message."""

    launch_ns: int  # before its first phase
    phases: tuple[Phase, ...]  # sections, one after the other
    ranks: int  # number of ranks
    taken_ns: int = 0  # time of the whole operation if it runs alone


class MessageFlow(Flow):
    """A message of a collective under way, or a delay before one.

    Attributes:
        of: The collective.
        step: Index of its step in the phase.
        post: The message; None for a delay.
        then: Called after a delay.
    """

    __slots__ = ("of", "post", "step", "then")
    of: Unfolded
    post: StepMessage | None
    step: int
    then: Callable[[], None]

    def __init__(
        self,
        of: Unfolded,
        marks_ns: Sequence[int],
        sections: Sequence[Section],
        *,
        step: int = 0,
        post: StepMessage | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        whole = of.whole
        super().__init__((*whole.key, of.message_count), marks_ns, sections, priority=whole.priority, lane=whole.lane)
        self.of, self.step, self.post, self.then = of, step, post, then
        self.age: tuple[int, int] = whole.age[0], of.message_count


_NOTHING = np.zeros(0, np.int64), np.zeros(0)


class Unfolded:
    """A collective that is simulated message by message.

    Attributes:
        whole: The flow of the whole collective.
        message_count: Number of messages and delays that have begun.
        finished: Positions of ranks that are done.
    """

    whole: Flow
    message_count: int

    def __init__(self, whole: Flow, plan: MessagePlan) -> None:
        self.whole, self.message_count = whole, 0
        self.finished: set[int] = set()
        self._ranks = plan.ranks
        self._phases, self._phase = deque(plan.phases), _Phase(())
        self._new: list[MessageFlow] = []
        self._after(plan.launch_ns, self._next_phase)

    @property
    def done(self) -> bool:
        """Whether all ranks are done with all phases."""
        return len(self.finished) == self._ranks

    def begun(self) -> list[MessageFlow]:
        """Return the messages and delays that have begun since the last call."""
        new, self._new = self._new, []
        return new

    def nudge(self) -> MessageFlow:
        """Return an empty message that ends at once."""
        self.message_count += 1
        return MessageFlow(self, (0,), (Section.of(0, *_NOTHING),))

    def reached(self, message: MessageFlow, mark: int) -> None:
        """Handle a mark that a message or delay has reached."""
        post = message.post
        if post is None:
            message.then()
            return
        event = post.becomes[mark]
        if event == STARTED:
            self._message_started(post.src)
        elif event == LEFT:
            self._message_left(post, message.step)
        else:
            assert event == ARRIVED
            self._phase.awaited[message.step][post.dst] -= 1
            self._begin_steps(post.dst)

    def _after(self, delay_ns: int, then: Callable[[], None]) -> None:
        if not delay_ns:
            then()
            return
        self.message_count += 1
        self._new.append(MessageFlow(self, (delay_ns,), (Section.of(delay_ns, *_NOTHING),), then=then))

    def _next_phase(self) -> None:
        self._phase = _Phase(self._phases.popleft())
        for rank in range(self._phase.size):
            self._begin_steps(rank)

    def _begin_steps(self, rank: int) -> None:
        """Begin the next steps of a rank that can begin."""
        phase = self._phase
        while phase.can_begin(rank):
            number = phase.begun[rank]
            if number == len(phase.steps):
                self._end(rank)
                return
            local_ns = phase.steps[number].local_ns[rank]
            if local_ns and not phase.prepared[rank]:
                if not phase.unsent[rank]:
                    phase.starting[rank] = 1
                    self._after(local_ns, lambda: self._end_local_work(rank))
                return
            phase.begin(rank)
            if beside_ns := phase.steps[number].beside_ns[rank]:
                phase.unsent[rank] += 1
                self._after(beside_ns, lambda: self._end_copy(rank))
            for post in phase.steps[number].posts[rank]:
                if phase.turn(post.port) == number:
                    self._send(post, number)
                else:
                    phase.held.setdefault((post.port, number), []).append(post)

    def _end_local_work(self, rank: int) -> None:
        self._phase.starting[rank], self._phase.prepared[rank] = 0, True
        self._begin_steps(rank)

    def _end_copy(self, rank: int) -> None:
        self._phase.unsent[rank] -= 1
        self._begin_steps(rank)

    def _send(self, post: StepMessage, step: int) -> None:
        self.message_count += 1
        self._new.append(MessageFlow(self, post.marks_ns, post.sections, step=step, post=post))
        if post.becomes[0] != STARTED:
            self._phase.starting[post.src] -= 1

    def _message_started(self, rank: int) -> None:
        self._phase.starting[rank] -= 1
        self._begin_steps(rank)

    def _message_left(self, post: StepMessage, step: int) -> None:
        phase = self._phase
        phase.unsent[post.src] -= 1
        for held in phase.leave(post.port):
            self._send(held, phase.turn(post.port))
            self._begin_steps(held.src)
        self._begin_steps(post.src)

    def _end(self, rank: int) -> None:
        self._phase.ended.add(rank)
        if not self._phases:
            lanes = range(rank % self._ranks, self._phase.size, self._ranks)
            if self._phase.ended.issuperset(lanes):
                self.finished.add(rank % self._ranks)
        elif len(self._phase.ended) == self._phase.size:
            self._next_phase()


class _Phase:
    """Progress of ranks and wires in a phase.

    Attributes:
        steps: Steps of the phase.
        size: Ranks, once for each lane.
        awaited: (steps, ranks) Messages that are still to come.
        begun: (ranks,) Steps that each rank has begun.
        starting: (ranks,) Messages of those steps that each rank has not started yet.
        unsent: (ranks,) Messages that have not left, and copies beside them that are not done.
        prepared: (ranks,) Whether the local work before the messages of the next step is done.
        held: Messages that wait for their first wire, by wire and step.
        ended: Ranks that are done.
    """

    def __init__(self, steps: Phase) -> None:
        self.steps, self.size = steps, len(steps[0].posts) if steps else 0
        self.awaited = [list(step.awaited) for step in steps]
        self.begun, self.starting, self.unsent = ([0] * self.size for _ in range(3))
        self._complete = [0] * self.size  # steps with all messages arrived
        self.prepared = [False] * self.size
        self.held: dict[tuple[int, int], list[StepMessage]] = {}
        self.ended: set[int] = set()
        self._turns: dict[int, deque[list[int]]] = {}  # by port: the step, and its unsent messages
        for number, step in enumerate(steps):
            for post in (post for posts in step.posts for post in posts):
                turns = self._turns.setdefault(post.port, deque())
                if not turns or turns[-1][0] != number:
                    turns.append([number, 0])
                turns[-1][1] += 1

    def can_begin(self, rank: int) -> bool:
        """Return whether a rank can begin its next step, or end the phase."""
        number = self.begun[rank]
        while self._complete[rank] < number and not self.awaited[self._complete[rank]][rank]:
            self._complete[rank] += 1
        if self._complete[rank] < number or self.starting[rank] or rank in self.ended:
            return False
        return number < len(self.steps) or not self.unsent[rank]

    def begin(self, rank: int) -> None:
        """Begin the next step of a rank."""
        count = len(self.steps[self.begun[rank]].posts[rank])
        self.begun[rank] += 1
        self.prepared[rank] = False
        self.starting[rank] = count
        self.unsent[rank] += count

    def turn(self, port: int) -> int:
        """Return the step that has its turn on a wire."""
        return self._turns[port][0][0]

    def leave(self, port: int) -> list[StepMessage]:
        """Count a message that has left on a wire, and return the messages that may start now."""
        turns = self._turns[port]
        turns[0][1] -= 1
        if turns[0][1]:
            return []
        turns.popleft()
        return self.held.pop((port, turns[0][0]), []) if turns else []


def alone(whole: Flow, plan: MessagePlan, until_ns: float | None = None) -> tuple[int, Unfolded, Fluid]:
    """Simulate a collective alone, to its end or until an instant; return the instant, the collective and its flows.

    Args:
        whole: The flow of the whole collective.
        plan: Its messages.
        until_ns: Instant after its start.
    """
    unfolded, fluid, now_ns = Unfolded(whole, plan), Fluid(), 0
    fluid.start(0, unfolded.begun(), parts=True)
    while (next_ns := fluid.settle(now_ns)) is not None and (until_ns is None or next_ns <= until_ns):
        now_ns = next_ns
        for flow, mark in fluid.advance(now_ns):
            assert isinstance(flow, MessageFlow)
            unfolded.reached(flow, mark)
            fluid.start(now_ns, unfolded.begun(), parts=True)
    return now_ns, unfolded, fluid
