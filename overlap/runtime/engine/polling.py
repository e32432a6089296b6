"""Polling of wires by a task that is about to sleep.

The peer may need this very core, because Linux likes to put a woken task on the core of its waker. Between two looks
other tasks may run, and if they run for long, the polling task moves to another core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import sched_yield
from time import perf_counter

from transports import Wire
from transports.patience import LONG_TURN_S

# Longest wait of the loop's other tasks, whatever arrives: the time of a few chunks.
_LONGEST_S = 2e-3


def linger(
    wires: Mapping[int, Wire],
    over: Callable[[], bool],
    *,
    longest_s: float = _LONGEST_S,
    long_turn_s: float = LONG_TURN_S,
) -> None:
    """Process arriving messages until all is over, none has arrived for a while, or the time limit is reached.

    Args:
        wires: Wires of the messages in flight, by the world rank of the other end; at least one.
        over: Whether no more messages are expected.
        longest_s: Time limit.
        long_turn_s: A task that runs for longer between two looks needs the core more than looking does.
    """
    latest_s = perf_counter() + longest_s
    while not over() and _process_arrivals(wires):
        if perf_counter() >= latest_s:
            return
    patience = next(iter(wires.values())).patience
    if patience is None or over() or not (patience_s := patience.take()):
        return
    until_s = perf_counter() + patience_s
    while not over() and (now_s := perf_counter()) < until_s:
        if _process_arrivals(wires):
            until_s = min(perf_counter() + patience_s, latest_s)
            continue
        looked_s = perf_counter()
        sched_yield()
        back_s = perf_counter()
        if patience.leave_if_crowded(back_s - looked_s):
            until_s = min(back_s + patience_s, latest_s)
        elif back_s - now_s > long_turn_s:
            patience.give_up()
            return
    patience.learn(came=over())


def _process_arrivals(wires: Mapping[int, Wire]) -> bool:
    """Process arrived messages; return whether there were any."""
    progressed = False
    for peer, wire in wires.items():
        progressed = wire.catch_up(peer) or progressed
    return progressed
