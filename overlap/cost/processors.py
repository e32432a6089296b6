"""Time that a round takes of processors that ranks share, where nodes are processes of one computer.

Each process keeps to a share of the processors (overlap/launch/binding.py): of fewer than processes, as many keep to
each, and neighbours to different ones. A message is as much work for whom it comes from as for whom it comes to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..collectives.placement import Floats, Placement
from .parameters import Parameters, by_kind
from .rounds import Round


class Work(NamedTuple):
    """Busy time of each processor."""

    once_s: Floats  # (cores,) time for a message of any size
    s_per_byte: Floats  # (cores,) time for each byte of a slot


def processors(one: Round, kind: NDArray[np.str_], placement: Placement, parameters: Parameters) -> Work:
    """Return the time that a round takes of each processor; of none where ranks share none.

    Args:
        one: The round.
        kind: (messages,) Of the wire that each message leaves on.
        placement: Where the ranks are.
        parameters: The model's.
    """
    if parameters.cores is None:
        return Work(np.zeros(0), np.zeros(0))
    process, size = placement.device, int(placement.device.max(initial=0)) + 1
    share = _shares(size, int(parameters.cores))
    src, dst = process[one.src], process[one.dst]
    message_s, byte_s = by_kind(parameters.busy_s, kind), by_kind(parameters.busy_s_per_byte, kind)
    sent_s = byte_s * one.sent
    once_s = (np.bincount(src, message_s, size) + np.bincount(dst, message_s, size)) / 2
    once_s += parameters.wake_s * np.bincount(process[np.unique(one.dst)], minlength=size)
    moved_s = (np.bincount(src, sent_s, size) + np.bincount(dst, sent_s, size)) / 2
    own_s = np.bincount(process, _own_s(one, parameters), size)
    together_s = _together_s(moved_s[:, None] * share)
    return Work(once_s @ share, (moved_s + own_s) @ share + (parameters.crowding - 1) * together_s)


def _together_s(work_s: Floats) -> Floats:
    """Return (cores,) for how long processes take turns: from when one alone is left it has the processor to itself.

    Args:
        work_s: (processes, cores) of each on each.
    """
    all_s: Floats = work_s.sum(axis=0)
    together_s: Floats = np.minimum(all_s, 2 * (all_s - work_s.max(axis=0)))
    return together_s


def _own_s(one: Round, parameters: Parameters) -> Floats:
    """Return (size,) what each rank copies and adds within its memory, for each byte of a slot."""
    copied = one.local if one.beside is None else one.local + one.beside
    return parameters.copied_s_per_byte * copied + parameters.reduction_s_per_byte * (one.added + one.local_added)


def _shares(processes: int, cores: int) -> Floats:
    """Return (processes, cores) the share of each process's work that each processor does."""
    if processes > cores and processes % cores:  # no rank is bound to a core
        return np.full((processes, cores), 1 / cores)
    return np.eye(cores)[np.arange(processes) % cores]
