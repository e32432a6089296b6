"""Busy time of the processors that ranks share in a round, if the nodes are processes of one computer.

Each process is bound to a share of the processors (overlap/launch/binding.py). If there are more processes than
processors, each processor gets equally many, and consecutive processes are on different processors. A message is as
much work for its sender as for its receiver.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..collectives.placement import Floats, Placement
from .parameters import CostParameters, figures_of_wires
from .rounds import Round


class ProcessorTime(NamedTuple):
    """Busy time of each processor in a round: `once_s + s_per_byte * bytes of a slot`."""

    once_s: Floats  # (cores,) time that does not depend on the bytes
    s_per_byte: Floats  # (cores,) time for each byte of a slot


def processor_work(
    round_: Round, kind: NDArray[np.str_], placement: Placement, parameters: CostParameters
) -> ProcessorTime:
    """Return the busy time of each processor in a round; empty arrays if ranks share no processors.

    Args:
        round_: The round.
        kind: (messages,) Kind of the wire on which each message leaves.
        placement: Where the ranks are.
        parameters: Parameters of the cost model.
    """
    if parameters.cores is None:
        return ProcessorTime(np.zeros(0), np.zeros(0))
    process, size = placement.device, int(placement.device.max(initial=0)) + 1
    share = _core_shares(size, int(parameters.cores))
    src, dst = process[round_.src], process[round_.dst]
    message_s, byte_s = figures_of_wires(parameters.busy_s, kind), figures_of_wires(parameters.busy_s_per_byte, kind)
    sent_s = byte_s * round_.sent
    # Half of the work of a message is its sender's, half its receiver's.
    once_s = (np.bincount(src, message_s, size) + np.bincount(dst, message_s, size)) / 2
    once_s += parameters.wake_s * np.bincount(process[np.unique(round_.dst)], minlength=size)
    moved_s = (np.bincount(src, sent_s, size) + np.bincount(dst, sent_s, size)) / 2
    own_s = np.bincount(process, _memory_work_s(round_, parameters), size)
    together_s = _sharing_time_s(moved_s[:, None] * share)
    return ProcessorTime(once_s @ share, (moved_s + own_s) @ share + (parameters.crowding - 1) * together_s)


def _sharing_time_s(work_s: Floats) -> Floats:
    """Return (cores,) the time in which several processes take turns on a processor; `work_s` is (processes, cores)."""
    all_s: Floats = work_s.sum(axis=0)
    # The process with the most work shares the processor while the others work, which takes twice the time of their
    # work; then it is alone. If the others have more work than it, the processor is shared all the time.
    together_s: Floats = np.minimum(all_s, 2 * (all_s - work_s.max(axis=0)))
    return together_s


def _memory_work_s(round_: Round, parameters: CostParameters) -> Floats:
    """Return (size,) the time of copies and additions in each rank's memory, for each byte of a slot."""
    copied = round_.local if round_.unawaited is None else round_.local + round_.unawaited
    return parameters.copied_s_per_byte * copied + parameters.reduction_s_per_byte * (round_.added + round_.local_added)


def _core_shares(processes: int, cores: int) -> Floats:
    """Return (processes, cores) the share of each process's work that each processor does."""
    if processes > cores and processes % cores:  # processes are not bound to processors
        return np.full((processes, cores), 1 / cores)
    return np.eye(cores)[np.arange(processes) % cores]
