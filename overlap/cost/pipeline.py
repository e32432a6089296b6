"""Time of slices in a pipeline of phases, which share wires, memories and reducers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from .phase import PricedPhase

Uses: TypeAlias = tuple[tuple[float, ...], ...]
"""(resources, phases) Busy time of each resource in each phase, as a share of the phase's busiest resource, 0 to 1."""

# Decimals of shares: smaller differences come from sums that were added up in another order.
_DIGITS = 9


def find_binding_uses(parts: Sequence[PricedPhase]) -> Uses:
    """Return the uses of the resources that can limit phases that run at the same time.

    A resource is left out if another one is used as much or more in every phase.

    Args:
        parts: Phases of one option, one after the other.
    """
    busy_s = [part.busy_s_per_slot for part in parts]
    busy = np.zeros((max(len(column_s) for column_s in busy_s), len(parts)))
    for column, column_s in enumerate(busy_s):
        busy[: len(column_s), column] = column_s
    # (resources, phases): share of the time of each phase in which the resource is busy.
    used = busy[busy.any(axis=1)] / np.maximum(busy.max(axis=0, initial=0.0), np.finfo(float).tiny)
    rows = np.unique(np.round(used, _DIGITS), axis=0)
    # A resource that is busy no longer than another one in every phase can never be the bound.
    binding = [row for row in rows if not ((rows >= row).all(axis=1) & (rows > row).any(axis=1)).any()]
    return tuple(tuple(row.tolist()) for row in binding)


def pipelined_time_s(phases_s: Sequence[float], slices: int, shared: Uses) -> float:
    """Return the time until all slices have passed through all phases, one slice behind the other.

    With phases that share nothing it is sum(phases_s) + (slices - 1) * max(phases_s); with phases that all need the
    same wires, slices * sum(phases_s).

    Args:
        phases_s: Time of each phase for one slice, if no other phase works.
        slices: Number of slices.
        shared: Uses of the resources that phases share.
    """
    now_s, count = 0.0, len(phases_s)
    done = [0] * count  # number of finished slices of each phase
    left_s = list(phases_s)  # time left of the slice that each phase works on
    while done[-1] < slices:
        # A phase works if the phase before has finished a slice that this phase has not.
        at_work = tuple(p for p in range(count) if done[p] < slices and (p == 0 or done[p] < done[p - 1]))
        rate = _phase_rates(at_work, shared)
        step_s = min(left_s[p] / rate[p] for p in at_work)
        now_s += step_s
        for p in at_work:
            left_s[p] -= rate[p] * step_s
            if left_s[p] <= 1e-12 * phases_s[p]:
                done[p] += 1
                left_s[p] = phases_s[p]
    return now_s


@lru_cache(maxsize=4096)  # plans for many sizes and numbers of slices need the same few results
def _phase_rates(at_work: tuple[int, ...], shared: Uses) -> Mapping[int, float]:
    """Return by phase the speed at which it works, 1 if it is as fast as alone.

    The speeds of all phases rise together until a resource is fully used. Then the phases that use it keep their speed,
    and the others go on rising (max-min fairness).

    Args:
        at_work: Numbers of the phases that work at the same time.
        shared: Uses of the resources that phases share.
    """
    rate = dict.fromkeys(at_work, 0.0)
    rising = set(at_work)
    while rising:
        # The rise until a phase works at full speed, or until a resource is fully used.
        levels = [1.0 - max((rate[p] for p in rising), default=0.0)]
        for row in shared:
            by = sum(row[p] for p in rising)
            if by > 0:
                levels.append(max(0.0, (1.0 - sum(row[p] * rate[p] for p in at_work)) / by))
        step = min(levels)
        for p in rising:
            rate[p] += step
        full = [row for row in shared if sum(row[p] * rate[p] for p in at_work) >= 1.0 - 1e-9]
        stopped = {p for p in rising if rate[p] >= 1.0 - 1e-9 or any(row[p] > 0 for row in full)}
        # If, by rounding, no phase stops here, the rates cannot rise any more: end the loop.
        rising -= stopped or rising
    return rate
