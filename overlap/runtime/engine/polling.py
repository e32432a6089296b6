"""Polling of wires by a task that is about to sleep.

The peer may need this very core, for Linux likes to put a woken task on the core of its waker: between two looks other
tasks may run, and where they do for long, the polling task moves to another core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import sched_yield
from time import perf_counter

from transports import Starter
from transports.patience import LONG_TURN_S

# Other tasks of the loop wait so long at most, however much comes: as long as for a few chunks.
_LONGEST_S = 2e-3


def linger(
    starters: Mapping[int, Starter],
    over: Callable[[], bool],
    *,
    longest_s: float = _LONGEST_S,
    long_turn_s: float = LONG_TURN_S,
) -> None:
    """Take in what comes from peers until all is over, nothing has come for as long as that is worth, or it gets late.

    Args:
        starters: Of the messages under way, by the world rank of the other end; at least one.
        over: Whether nothing more is waited for.
        longest_s: When it gets late.
        long_turn_s: Who runs for longer between two looks needs the core more than looking does.
    """
    latest_s = perf_counter() + longest_s
    while not over() and _taken_in(starters):
        if perf_counter() >= latest_s:
            return
    patience = next(iter(starters.values())).patience
    if patience is None or over() or not (patience_s := patience.take()):
        return
    until_s = perf_counter() + patience_s
    while not over() and (now_s := perf_counter()) < until_s:
        if _taken_in(starters):
            until_s = min(perf_counter() + patience_s, latest_s)
            continue
        looked_s = perf_counter()
        sched_yield()
        back_s = perf_counter()
        if patience.moves(back_s - looked_s):
            until_s = min(back_s + patience_s, latest_s)
        elif back_s - now_s > long_turn_s:
            patience.give_up()
            return
    patience.learn(came=over())


def _taken_in(starters: Mapping[int, Starter]) -> bool:
    """Take in what has come, and say whether anything had."""
    came = False
    for peer, starter in starters.items():
        came = starter.catch_up(peer) or came
    return came
