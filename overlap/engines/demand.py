"""Demand of a gang: waits for resources up to a limit, and reports missing ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ..errors import OverlapError
from ..notice import notify

# Moments of the first report of a wait for resources, and of later ones.
FIRST_S, EVERY_S = 1.0, 30.0


class ResourcesError(OverlapError):
    """An engine has not had the resources for all processes of a gang in time; nothing has run.

    Attributes:
        missing: What is missing, in words.
        waited_s: How long it was waited for.
    """

    missing: str
    waited_s: float

    def __init__(self, message: str, *, missing: str, waited_s: float) -> None:
        self.missing, self.waited_s = missing, waited_s
        super().__init__(message)


def wait_for_resources(demand: str, limit_s: float, ready: Callable[[float], bool], missing: Callable[[], str]) -> None:
    """Wait until an engine has the resources of a gang, and report the missing ones to the user.

    `ready` waits up to a number of seconds, and returns whether all resources are available; `missing` returns the
    missing ones as text.

    Raises:
        ResourcesError: If it takes longer than `limit_s`.
    """
    begun_s, next_report_s = time.monotonic(), FIRST_S
    while True:
        waited_s = time.monotonic() - begun_s
        if ready(max(0.0, min(next_report_s, limit_s) - waited_s)):
            return
        waited_s = time.monotonic() - begun_s
        if waited_s >= next_report_s:
            notify(f"{demand}: waiting for resources, up to {limit_s:.3g} s: {missing()}")
            next_report_s += EVERY_S
        if waited_s >= limit_s:
            missing_text = missing()
            raise ResourcesError(
                f"{demand}: not there within {limit_s:.3g} s: {missing_text}; free some, or pass a longer wait_s",
                missing=missing_text,
                waited_s=limit_s,
            )


def lacking(demands: Sequence[Mapping[str, float]], nodes: Mapping[str, Mapping[str, float]]) -> str:
    """Return the demands that do not fit on nodes with these free resources, as text.

    >>> lacking([{"CPU": 2}, {"CPU": 2}, {"GPU": 1}], {"a": {"CPU": 3}, "b": {"CPU": 1}})
    '1 place with CPU: 2, 1 place with GPU: 1; free: CPU 3 on a, CPU 1 on b'
    """
    free = {name: dict(resources) for name, resources in nodes.items()}
    unplaced: Counter[str] = Counter()
    for demand in sorted(demands, key=lambda amounts: -sum(amounts.values())):
        for resources in free.values():
            if all(resources.get(name, 0) >= amount for name, amount in demand.items()):
                for name, amount in demand.items():
                    resources[name] -= amount
                break
        else:
            unplaced[", ".join(f"{name}: {amount:g}" for name, amount in demand.items())] += 1
    missing = ", ".join(f"{count} place{'s' * (count > 1)} with {demand}" for demand, count in sorted(unplaced.items()))
    kinds = sorted({name for demand in demands for name in demand})
    free_text = [
        f"{', '.join(f'{kind} {nodes[node].get(kind, 0):g}' for kind in kinds if nodes[node].get(kind))} on {node}"
        for node in nodes
        if any(nodes[node].get(kind) for kind in kinds)
    ]
    return f"{missing or 'a place that fits the strategy'}; free: {', '.join(free_text) or 'nothing of that'}"
