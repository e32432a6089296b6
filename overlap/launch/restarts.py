"""Restarts of a world that has failed, as often as allowed, and as long as there is progress.

The line that is printed of each attempt says who ended it and why, and from which step the next one goes on. The next
attempt starts at once while there is progress; without, it waits, longer each time, and the third attempt in a row
that got no further is the last: a program that fails three times at one place fails the fourth time too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .nodeprocess import LaunchSpec
from .processes import LaunchOutcome
from .verdict import Ending, card, culprit, oom_kills

FUTILE = 3  # attempts without progress
BAD_USAGE = 2  # the exit code of what would fail again in the same way
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

_OURS = "overlap: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """When to start a world again."""

    most: int  # How often, at least once
    latest: Callable[[], int | None]  # Returns the step from which the next attempt goes on; None if there is no state
    # Returns how far an attempt came, given the pids of its processes; None if that is not known.
    reached: Callable[[Sequence[int]], int | None]
    place: str | None  # Where the state is; None: none is named
    sleep: Callable[[float], None]  # Waits a number of seconds
    # With how few nodes the world may go on; after an attempt without progress the next has one less, and after one
    # with progress it has all of them again. None: it needs all.
    fewest: int | None = None
    # Returns what a process was doing that has ended without a word, given its pid.
    signs: Callable[[int], Sequence[str]] = lambda pid: ()
    # Returns what to start here in an attempt, once the launchers of all machines agree who takes part; None: all nodes
    # are started here, or all must be there.
    agree: Callable[[LaunchSpec, int], LaunchSpec] | None = None


def launch_again(what: LaunchSpec, restarts: Restarts, once: Callable[[LaunchSpec], LaunchOutcome]) -> LaunchOutcome:
    """Launch a world until it ends well, or there is no point in it; return how the last attempt went.

    Args:
        what: What to start.
        restarts: How often.
        once: Launches it once.
    """
    best, futile = restarts.latest() if restarts.place else None, 0
    fewest = restarts.fewest or what.nodes
    for attempt in range(restarts.most + 1):
        killed = oom_kills()
        nodes = max(fewest, what.nodes - futile)
        outcome = once(
            restarts.agree(what, attempt)
            if restarts.agree
            else numbered(what, attempt, nodes, [node for node in what.here if node < nodes])
        )
        guilty = culprit(outcome.endings)
        if guilty is None or outcome.asked is not None or guilty.returncode == BAD_USAGE:
            break
        step = restarts.latest()
        reached = step if restarts.place else restarts.reached([ending.pid for ending in outcome.endings])
        better = reached is not None and (best is None or reached > best)
        best, futile = (reached, 0) if better else (best, futile + 1)
        hopeless = futile >= FUTILE + what.nodes - fewest
        if attempt == restarts.most or hopeless:
            what.report(_given_up(futile if hopeless else 0, attempt))
            break
        pause_s = min(FIRST_PAUSE_S * 2 ** (futile - 1), LONGEST_PAUSE_S) if futile else 0.0
        why = _why(guilty, oom_kills() - killed, restarts.signs)
        begin = f"restart {attempt + 1} of {restarts.most}" + (f" in {pause_s:g} s" if pause_s else "")
        begin += _with(max(fewest, what.nodes - futile), what.nodes)
        what.report(f"{begin}, {_from(step, restarts.place)}: {why}")
        if pause_s:
            restarts.sleep(pause_s)
    return outcome


def numbered(what: LaunchSpec, attempt: int, nodes: int, here: Sequence[int]) -> LaunchSpec:
    """Return the launch of one attempt: how many nodes take part, and which of them are started here."""
    environ = {**what.environ, "OVERLAP_RESTART": str(attempt)}
    if nodes == 1 < what.nodes:  # a process alone is told its ranks by this only
        environ["OVERLAP_RANKS"] = str(what.ranks_per_node)
    return replace(what, environ=environ, attempt=attempt, nodes=nodes, here=here)


def _given_up(futile: int, attempt: int) -> str:
    if futile:
        return f"gives up: {futile} attempts in a row ended without progress"
    times = "once" if attempt == 1 else f"{attempt} times"
    return f"gives up: it has been started again {times}, and --max-restarts allows no more"


def _with(nodes: int, all_nodes: int) -> str:
    return f" with {nodes} node{'s' * (nodes > 1)}" if nodes < all_nodes else ""


def _from(step: int | None, place: str | None) -> str:
    if step is not None:
        return f"from step {step}"
    return "from the beginning" + (f" (no complete state in {place})" if place else " (no --state-dir)")


def _why(guilty: Ending, killed: int, signs: Callable[[int], Sequence[str]]) -> str:
    told = card(guilty, oom_kills=killed)[-1].removeprefix(_OURS)
    doing = signs(guilty.pid)[:1] if guilty.status is None else ()
    return "; ".join([told, *doing])
