"""Polling of wires by a task that is about to sleep.

The peer may need this very core, because Linux tends to put a woken task on the core of its waker. So the polling task
yields the core between two looks; if other tasks then run for long, it stops polling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import sched_yield
from time import perf_counter

from transports import Wire
from transports.patience import LONG_TURN_S

# Seconds after which polling ends even if messages arrive, as the event loop's other tasks wait: time of a few chunks.
_LONGEST_S = 2e-3


def poll_wires(
    wires: Mapping[int, Wire],
    over: Callable[[], bool],
    *,
    longest_s: float = _LONGEST_S,
    long_turn_s: float = LONG_TURN_S,
) -> None:
    """Process arriving messages until no more are expected, none has arrived for a while, or a time limit is reached.

    Args:
        wires: Wires of the messages in flight, by the world rank of the other end; at least one.
        over: Returns whether no more messages are expected.
        longest_s: Time limit in seconds.
        long_turn_s: Seconds. If another task uses the core for longer between two looks, polling ends.
    """
    latest_s = perf_counter() + longest_s
    while not over() and _process_arrivals(wires):
        if perf_counter() >= latest_s:
            return
    patience = next(iter(wires.values())).polling_patience  # of the first wire; None: longer polling does not pay
    if patience is None or over() or not (patience_s := patience.next_poll_s()):
        return
    until_s = perf_counter() + patience_s
    while not over() and (now_s := perf_counter()) < until_s:
        if _process_arrivals(wires):
            until_s = min(perf_counter() + patience_s, latest_s)
            continue
        looked_s = perf_counter()
        sched_yield()
        back_s = perf_counter()
        if patience.leave_crowded_core(back_s - looked_s):
            until_s = min(back_s + patience_s, latest_s)
        elif back_s - now_s > long_turn_s:
            patience.pause_polling()
            return
    patience.record_poll(came=over())


def _process_arrivals(wires: Mapping[int, Wire]) -> bool:
    """Return whether any message had arrived."""
    progressed = False
    for peer, wire in wires.items():
        progressed = wire.catch_up(peer) or progressed
    return progressed
