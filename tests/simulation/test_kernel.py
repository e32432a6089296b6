"""Virtual time under Trio: exact instants, one order, and no way out into the real world."""

import socket
import threading
from types import SimpleNamespace

import pytest
import trio
from trio._core import _run

from overlap.errors import OverlapError, UsageError
from overlap.simulation.clock import VirtualClock
from overlap.simulation.kernel import EventOrder, Kernel


def run(main, *args, on_stall=None):
    kernel = Kernel()
    kernel.on_stall = on_stall
    return kernel.run(main, kernel, *args), kernel


def test_time_stands_still_without_sleep():
    async def main(kernel):
        for _ in range(10):
            await trio.lowlevel.checkpoint()
        return kernel.now_ns, trio.current_time()

    assert run(main)[0] == (0, 0.0)


@pytest.mark.parametrize(
    ("sleep_s", "times", "expected_ns"),
    [
        (0.1, 1, 100_000_000),
        (0.1, 1000, 100_000_000_000),  # ten doubles of 0.1 do not make 1
        (1 / 3, 3, 999_999_999),  # each rounds to 333,333,333
        (1e-9, 1000, 1000),
        (0.7e-9, 10, 10),
        (0.3e-9, 10, 0),  # less than half a nanosecond is no time, but ends
        (86_400.0, 30, 30 * 86_400 * 10**9),
    ],
)
def test_sleeps_end_at_the_nearest_nanosecond(sleep_s, times, expected_ns):
    async def main(kernel):
        for _ in range(times):
            await trio.sleep(sleep_s)
        return kernel.now_ns, trio.current_time()

    assert run(main)[0] == (expected_ns, expected_ns / 1e9)


def test_a_nanosecond_counts_after_a_month():
    async def main(kernel):
        await trio.sleep(30 * 86_400)
        await kernel.sleep_until(kernel.now_ns + 1)
        await trio.sleep(0.1)
        return kernel.now_ns

    assert run(main)[0] == 30 * 86_400 * 10**9 + 100_000_001


def test_deadlines_live_in_virtual_time():
    async def main(kernel):
        with trio.move_on_after(0.25) as scope:
            await trio.sleep(0.5)
        assert scope.cancelled_caught
        at_ns = kernel.now_ns
        with pytest.raises(trio.TooSlowError), trio.fail_at(0.3):
            await kernel.sleep_until(10**9)
        with trio.move_on_after(1) as scope:
            await kernel.sleep_until(kernel.now_ns + 999_999_999)
        assert not scope.cancelled_caught
        return at_ns, kernel.now_ns

    assert run(main)[0] == (250_000_000, 1_299_999_999)


def test_what_was_cancelled_does_not_stop_the_clock():
    async def main(kernel):
        with trio.move_on_after(1e-6):
            await kernel.sleep_until(2000)
        called = []
        kernel.call_at(3000, 0, lambda: called.append(kernel.now_ns)).cancel()
        await kernel.sleep_until(5000)
        return called, kernel.now_ns

    assert run(main)[0] == ([], 5000)


def test_the_past_is_over():
    async def main(kernel):
        await kernel.sleep_until(1000)
        await kernel.sleep_until(10)
        assert kernel.now_ns == 1000
        with pytest.raises(AssertionError, match="999 ns is over, it is 1000 ns"):
            kernel.call_at(999, 0, print)

    run(main)


def test_an_instant_goes_by_kind_then_by_rank():
    async def main(kernel):
        told = []

        def at(rank, order):
            kernel.call_at(1000, rank, lambda: told.append((order.name, rank)), order=order)

        for rank in (2, 0, 1):
            for order in (EventOrder.RATES, EventOrder.COMPUTE, EventOrder.TRANSFER):
                at(rank, order)
        kernel.call_at(1000, 0, lambda: at(3, EventOrder.COMPUTE))
        await kernel.sleep_until(1000)
        told.append("awake")
        await kernel.sleep_until(1001)
        return told

    assert run(main)[0] == [
        *(("TRANSFER", rank) for rank in (0, 1, 2)),
        *(("COMPUTE", rank) for rank in (0, 1, 2)),
        ("COMPUTE", 3),
        "awake",
        *(("RATES", rank) for rank in (0, 1, 2)),
    ]


def test_kinds_wait_for_the_tasks_that_others_wake():
    async def main(kernel):
        told = []

        async def sleeper():
            await kernel.sleep_until(1000)
            for _ in range(5):
                await trio.lowlevel.checkpoint()
            told.append("task")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper)
            kernel.call_at(1000, 0, lambda: told.append("settled"), order=EventOrder.RATES)
        return told

    async def long_enough(kernel):
        told = await main(kernel)
        await kernel.sleep_until(2000)
        return told

    assert run(long_enough)[0] == ["task", "settled"]


def test_trio_has_its_turn_only_when_there_is_something_for_it(monkeypatch):
    kernel, waits, wait = Kernel(), [], trio.testing.wait_all_tasks_blocked

    async def counted():
        waits.append(kernel.now_ns)
        await wait()

    async def main():
        for time_ns in range(1, 100):
            kernel.call_at(time_ns, 0, lambda: None)
        await kernel.sleep_until(50)
        await kernel.sleep_until(200)

    monkeypatch.setattr(trio.testing, "wait_all_tasks_blocked", counted)
    kernel.run(main)
    assert waits == [0, 0, 50, 200]


def test_what_a_callback_leaves_to_trio_comes_before_the_next_instant():
    async def main(kernel):
        told, soon = [], trio.lowlevel.current_trio_token().run_sync_soon
        kernel.call_at(5, 0, lambda: soon(lambda: told.append(kernel.now_ns)))
        kernel.call_at(6, 0, lambda: told.append("next"))
        await kernel.sleep_until(10)
        return told

    assert run(main)[0] == [5, "next"]


@pytest.mark.parametrize("deadline_ns", [20, 25])
def test_deadlines_have_their_turn_among_callbacks(deadline_ns):
    async def main(kernel):
        told = []
        for time_ns in (10, 20, 30):
            kernel.call_at(time_ns, 0, lambda: told.append(kernel.now_ns))
        with trio.move_on_after(deadline_ns * 1e-9):
            await trio.sleep_forever()
        told.append(f"over at {kernel.now_ns}")
        await kernel.sleep_until(40)
        return told

    assert run(main)[0] == [10, 20, f"over at {deadline_ns}", 30]


def chatter(kernel, trace):
    """Start 20 ranks that sleep in step and out of step, and message their neighbours."""

    async def rank(number, inbox, outbox):
        for step in range(5):
            await kernel.sleep_until(kernel.now_ns + 100 + 50 * (number % 3), rank=number)
            due_ns = kernel.now_ns + 70
            kernel.call_at(
                due_ns, number, lambda step=step: outbox.send_nowait((number, step)), order=EventOrder.TRANSFER
            )
            trace.append((kernel.now_ns, number, step, await inbox.receive()))
            await trio.sleep(1e-7)

    async def main():
        pairs = [trio.open_memory_channel(10) for _ in range(20)]
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(rank, number, pairs[number][1], pairs[(number + 1) % 20][0])

    return main


@pytest.mark.everyday(1)
@pytest.mark.parametrize("direction", [0.0, 1.0, None])
def test_every_run_is_the_same(monkeypatch, direction):
    """Also when Trio always, or never, turns its batches round."""
    if direction is not None:
        monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", False)
        monkeypatch.setattr(_run, "_r", SimpleNamespace(random=lambda: direction))
    expected = None
    for _ in range(100 if direction is None else 3):
        kernel, trace = Kernel(), []
        kernel.run(chatter(kernel, trace))
        assert len(trace) == 100
        # Inside an instant tasks are Trio's to order; what happened when is not.
        found = (kernel.now_ns, sorted(trace))
        expected = expected or found
        assert found == expected
    assert expected[1][0] == (100, 0, 0, (19, 0))


def test_a_deadlock_ends_at_once():
    async def main(kernel):
        await trio.sleep(1)
        await trio.sleep_forever()

    with pytest.raises(OverlapError, match="blocked for ever"):
        run(main)


def test_what_was_cancelled_does_not_put_a_deadlock_off():
    kernel = Kernel()

    async def main():
        kernel.call_at(10**9, 0, print).cancel()
        await trio.sleep_forever()

    with pytest.raises(OverlapError, match="blocked for ever"):
        kernel.run(main)
    assert kernel.now_ns == 0


def test_a_deadlock_is_for_the_caller_to_explain():
    def explain():
        return UsageError("rank 0 waits for rank 1")

    async def main(kernel):
        await trio.Event().wait()

    with pytest.raises(UsageError, match="rank 0 waits for rank 1"):
        run(main, on_stall=explain)


def test_a_deadlock_may_be_resolved():
    freed = trio.Event()

    async def main(kernel):
        await trio.sleep(2)
        await freed.wait()
        await trio.sleep(1)
        return kernel.now_ns

    assert run(main, on_stall=freed.set)[0] == 3_000_000_000


def test_who_does_not_resolve_a_deadlock_is_not_asked_for_ever():
    asked = []

    async def main(kernel):
        await trio.sleep_forever()

    with pytest.raises(OverlapError, match="blocked for ever"):
        run(main, on_stall=lambda: asked.append(1))
    assert asked == [1]


def test_threads_are_refused():
    ran = []

    async def main(kernel):
        await trio.to_thread.run_sync(ran.append, 1)

    with pytest.raises(UsageError, match=r"a thread \(trio.to_thread\)"):
        run(main)
    assert ran == [], "not even started, so it does not depend on how fast it is"


def test_threads_under_a_limiter_of_their_own_are_refused():
    gate = threading.Event()

    async def main(kernel):
        try:
            # The thread goes back to Trio's idle ones a moment after the run: it is named as these are.
            await trio.to_thread.run_sync(
                gate.wait, limiter=trio.CapacityLimiter(1), abandon_on_cancel=True, thread_name="Trio thread at a gate"
            )
        finally:
            gate.set()

    with pytest.raises(UsageError, match="a thread"):
        run(main)


def test_real_input_is_refused_even_while_something_is_due():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)

        async def main(kernel):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep, 10)
                await trio.lowlevel.wait_readable(ours)

        with pytest.raises(UsageError, match="real input or output"):
            run(main)


def test_errors_come_out_as_they_are():
    async def main(kernel):
        await trio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main)


def test_an_error_in_a_callback_ends_the_run():
    def fails():
        raise KeyError("due")

    async def main(kernel):
        kernel.call_at(5, 0, fails)
        await trio.sleep_forever()

    with pytest.raises(KeyError, match="due"):
        run(main)


def test_names():
    kernel = Kernel()
    kernel.call_at(5, 0, print)
    assert repr(kernel) == "<Kernel at 0 ns: 1 batches due>"
    assert repr(VirtualClock()) == "<VirtualClock at 0 ns>"
