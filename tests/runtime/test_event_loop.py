"""Turns of the event loop: what comes from threads, who awaits what is done, who looks before it sleeps."""

import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from overlap.runtime.engine import polling
from overlap.runtime.engine.polling import poll_wires
from overlap.runtime.event_loop import FairPauses
from overlap.runtime.handover import Handover
from transports import NeuronLink
from transports.patience import Crowding, Patience
from transports.wrappers import WrappedWire

# -- the way from threads to the event loop ----------------------------------------------------------------------------


def test_each_thread_that_posts_after_the_end_of_the_loop_hears_of_it() -> None:
    async def main() -> Handover:
        return Handover(trio.lowlevel.current_trio_token())

    handover = trio.run(main)
    for _ in range(3):
        with pytest.raises(trio.RunFinishedError):
            handover.post(print)


class EndingLoop:
    """Token of a loop whose last turn has yet to come, in which it takes no further calls.

    Args:
        before_refusal: Called in each call that is refused, as another thread could be.
    """

    def __init__(self, before_refusal: Callable[[], object] = lambda: None) -> None:
        self._before_refusal, self._calls, self.over = before_refusal, list[Callable[[], object]](), False

    def run_sync_soon(self, function: Callable[[], object]) -> None:
        if self.over:
            before, self._before_refusal = self._before_refusal, lambda: None
            before()
            raise trio.RunFinishedError
        self._calls.append(function)

    def last_turn(self) -> None:
        self.over = True
        for function in self._calls:
            function()


def is_posted(handover: Handover, function: Callable[[], object]) -> bool:
    try:
        handover.post(function)
    except trio.RunFinishedError:
        return False
    return True


def test_each_of_two_threads_that_post_at_once_hears_of_the_end_of_the_loop() -> None:
    posted = list[bool]()
    token = EndingLoop(lambda: posted.append(is_posted(handover, print)))
    handover = Handover(token)  # type: ignore[arg-type]
    token.last_turn()
    posted.append(is_posted(handover, print))
    assert posted == [False, False]


def test_a_post_in_the_last_turn_of_the_loop_takes_no_other_with_it() -> None:
    called, posted = list[str](), list[bool]()

    def first() -> None:
        called.append("first")
        posted.append(is_posted(handover, lambda: called.append("too late")))

    token = EndingLoop()
    handover = Handover(token)  # type: ignore[arg-type]
    posted += [is_posted(handover, first), is_posted(handover, lambda: called.append("second"))]
    token.last_turn()
    assert (called, posted) == (["first", "second"], [True, True, False])


def test_a_post_that_the_last_turn_of_the_loop_has_called_is_no_error() -> None:
    called = list[str]()
    token = EndingLoop(lambda: token.last_turn())
    handover = Handover(token)  # type: ignore[arg-type]
    handover.post(called.append, "first")
    token.last_turn()
    handover.post(called.append, "second")
    assert called == ["first", "second"]


def post_interrupted(handover: Handover, line: int, called: list[str]) -> bool:
    """Post a call, and interrupt it before one of its lines; return whether there was such a line."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        if frame.f_code is not Handover.post.__code__:
            return None
        lines += event == "line"
        if event == "line" and lines == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        handover.post(called.append, "interrupted")
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_post_after_one_that_was_interrupted_anywhere_is_called() -> None:
    async def main() -> int:
        line, handover = 1, Handover(trio.lowlevel.current_trio_token())
        while post_interrupted(handover, line, called := list[str]()):
            handover.post(called.append, "later")
            await wait_all_tasks_blocked()
            assert called in (["later"], ["interrupted", "later"])
            line += 1
        return line

    assert trio.run(main) > 4


# -- who awaits what is done checks for cancellation each time, and lets others run when it is their turn --------------

FOR_EVER_S = 1e9


async def pauses_beside(every_s: float) -> bool:
    """Return whether another task runs in two pauses; it has the first turn or the second."""
    ran: list[bool] = []

    async def other() -> None:
        ran.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        turns = FairPauses(every_s)
        await turns.pause()
        await turns.pause()
        return bool(ran)


async def checkpoint_in(pause: Callable[[], Awaitable[None]]) -> None:
    with assert_checkpoints():
        await pause()


def test_when_it_is_their_turn_others_run() -> None:
    assert trio.run(pauses_beside, 0.0)
    trio.run(checkpoint_in, FairPauses(0.0).pause)


def test_before_that_they_do_not() -> None:
    assert not trio.run(pauses_beside, FOR_EVER_S)


@pytest.mark.parametrize("every_s", [0.0, FOR_EVER_S])
def test_a_cancellation_is_noticed_always(every_s: float) -> None:
    async def main() -> bool:
        with trio.CancelScope() as scope:
            scope.cancel()
            await FairPauses(every_s).pause()
        return scope.cancelled_caught

    assert trio.run(main)


# -- who is about to sleep looks at its wires first, as long as that brings something or has helped lately -------------


class Bringing(WrappedWire):
    """Brings something at some looks, counted from 1."""

    def __init__(self, brings_at: set[int], patience: Patience | None) -> None:
        super().__init__(NeuronLink(1).wire(0), [0])
        self.looks, self.brings_at, self.given = 0, brings_at, patience

    @property
    def polling_patience(self) -> Patience | None:
        return self.given

    def catch_up(self, peer: int) -> bool:
        self.looks += 1
        return self.looks in self.brings_at


def test_it_looks_on_while_something_comes_and_once_more() -> None:
    wire = Bringing({1, 2, 3}, None)
    poll_wires({7: wire}, lambda: False, longest_s=FOR_EVER_S, long_turn_s=FOR_EVER_S)
    assert wire.looks == 4


def test_it_ends_with_what_is_waited_for() -> None:
    wire = Bringing({1, 2, 3}, None)
    poll_wires({7: wire}, lambda: wire.looks == 2, longest_s=FOR_EVER_S, long_turn_s=FOR_EVER_S)
    assert wire.looks == 2


def test_where_that_helps_it_waits_for_what_has_not_come_yet() -> None:
    wire = Bringing({50}, Patience(FOR_EVER_S))
    poll_wires({7: wire}, lambda: wire.looks == 60, longest_s=FOR_EVER_S, long_turn_s=FOR_EVER_S)
    assert wire.looks == 60


def test_all_wires_are_looked_at() -> None:
    first, second = Bringing({1}, None), Bringing(set(), None)
    poll_wires({7: first, 8: second}, lambda: False, longest_s=FOR_EVER_S, long_turn_s=FOR_EVER_S)
    assert (first.looks, second.looks) == (2, 2)


def test_where_it_has_not_helped_lately_it_looks_once() -> None:
    patience = Patience(1e-9)
    for _ in range(3):
        poll_wires({7: Bringing(set(), patience)}, lambda: False, longest_s=FOR_EVER_S, long_turn_s=FOR_EVER_S)
    wire = Bringing(set(), patience)
    poll_wires({7: wire}, lambda: False, longest_s=FOR_EVER_S, long_turn_s=FOR_EVER_S)
    assert (wire.looks, patience.next_poll_s()) == (1, 0.0)


def test_however_much_comes_others_have_their_turn() -> None:
    wire = Bringing(set(range(1000)), Patience(FOR_EVER_S))
    poll_wires({7: wire}, lambda: wire.looks == 1000, longest_s=0.0)
    assert wire.looks == 1


def test_who_has_to_wait_long_for_the_core_looks_no_more_for_a_while() -> None:
    patience = Patience(FOR_EVER_S)
    poll_wires({7: Bringing(set(), patience)}, lambda: False, longest_s=FOR_EVER_S, long_turn_s=0.0)
    assert patience.next_poll_s() == 0.0


def test_who_leaves_a_shared_core_looks_on_at_the_next() -> None:
    left: list[str] = []
    patience = Patience(FOR_EVER_S, Crowding(lambda: not left.append("left"), shared_s=0.0))
    wire = Bringing({50}, patience)
    poll_wires({7: wire}, lambda: wire.looks == 60, longest_s=FOR_EVER_S, long_turn_s=FOR_EVER_S)
    assert (wire.looks, left[0]) == (60, "left")


class SlowWire(Bringing):
    """Its looks at some messages take time, on a clock that only they move."""

    def __init__(self, brings_at: set[int], patience: Patience, takes_s: dict[int, float]) -> None:
        super().__init__(brings_at, patience)
        self.now_s, self.takes_s = 0.0, takes_s

    def catch_up(self, peer: int) -> bool:
        came = super().catch_up(peer)
        self.now_s += self.takes_s.get(self.looks, 0.0)
        return came


def test_the_time_of_what_comes_is_no_turn_of_another_task(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = Patience(1.0)
    wire = SlowWire({3}, patience, {3: 0.005})
    monkeypatch.setattr(polling, "perf_counter", lambda: wire.now_s)
    poll_wires({7: wire}, lambda: wire.looks == 10, longest_s=FOR_EVER_S, long_turn_s=0.001)
    assert (wire.looks, patience.next_poll_s()) == (10, 1.0)


def test_the_time_of_a_look_is_none_in_which_others_need_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    wire = SlowWire(set(), Patience(1.0, Crowding(lambda: not left.append("left"), shared_s=0.001)), {3: 0.005})
    monkeypatch.setattr(polling, "perf_counter", lambda: wire.now_s)
    poll_wires({7: wire}, lambda: wire.looks == 10, longest_s=FOR_EVER_S, long_turn_s=FOR_EVER_S)
    assert (wire.looks, left) == (10, [])
