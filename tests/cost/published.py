"""Published times of collectives next to the planner's, and the sizes at which one algorithm was seen to take over."""

from dataclasses import dataclass
from functools import cache
from math import sqrt

from overlap.cost.measurements import COLLECTIVES, Measurement
from overlap.cost.select import plan
from topology import cluster

TRAINING = {"machine": "dl1.24xlarge x16", "nbytes": 10_000_000_000, "host_copies": 391.44, "peer_direct": 674.73}
"""Samples per second of BERT-5B with ZeRO-2 on 128 Gaudi ("EFA Peer Direct on DL1 with Gaudi")."""

_DOCUMENTS = "aws-neuron/aws-neuron-sdk:neuron-runtime/explore/intranode-collective-comm.rst"
_BENCHMARK = "aws-neuron/aws-neuron-sdk:tools/neuron-sys-tools/nccom-test.rst"
_EACH = ("all_gather", "reduce_scatter", "all_reduce")
# Crossovers are searched in this many octaves around the published one, and found to a hundredth of the size.
_OCTAVES = 3
_CLOSE = 1.01
_BY_SIZE = ("one_shot", "mesh", "rdh", "kangaring")  # in the order of the sizes at which they win


@dataclass(frozen=True)
class Knee:
    """Range of sizes in which one algorithm was seen to take over from another on trn2.48xlarge."""

    ranks: int
    collective: str
    below: str
    above: str
    least_bytes: int
    most_bytes: int
    source: str


KNEES = (
    *(Knee(64, op, "mesh", "rdh", 500_000, 2_000_000, _DOCUMENTS) for op in _EACH),  # 1 MB, half to twice that
    # Measured between 32 and 128 MiB (davidshtian/xpu-perf, nccom-test, 2026-03); documents say 56 MB.
    *(Knee(64, op, "rdh", "kangaring", 32 << 20, 128 << 20, _DOCUMENTS) for op in _EACH),
    Knee(16, "all_reduce", "mesh", "rdh", 128 << 10, 2 << 20, _BENCHMARK),  # of which collective is not said
    Knee(16, "all_reduce", "rdh", "kangaring", 2 << 20, 32 << 20, _BENCHMARK),
)


def measured_s(row: Measurement) -> float:
    """Return the published figure as a time."""
    if row.unit == "us":
        return row.figure / 1e6
    passes = 2 if row.collective == "all_reduce" else 1
    return row.nbytes * passes * (row.ranks - 1) / row.ranks / (row.figure * 1e6)


@cache
def predicted_s(row: Measurement) -> float:
    """Return the planned time of a row; for a published difference of two sizes, the difference of their times."""

    def planned_s(nbytes: int) -> float:
        machine = cluster(row.machine, strict=False)
        found = plan(row.collective, nbytes, machine, row.group or None, dtype=row.dtype, peer_direct=row.peer_direct)
        return found.predicted_s

    return planned_s(row.nbytes) - (planned_s(row.beyond_bytes) if row.beyond_bytes else 0.0)


def error(row: Measurement) -> float:
    """Return the error of the prediction, as a share of the measured time."""
    return predicted_s(row) / measured_s(row) - 1


def classes() -> dict[tuple[str, str], list[Measurement]]:
    """Return the rows by chip and nodes, and dtype."""
    found: dict[tuple[str, str], list[Measurement]] = {}
    for row in COLLECTIVES:
        scope = "across nodes" if " x" in row.machine else "one node"
        found.setdefault((f"{cluster(row.machine).machine.chip.name}, {scope}", row.dtype), []).append(row)
    return found


def predicted_crossover(knee: Knee) -> int | None:
    """Search for the size at which the cheapest algorithm changes; None if none is near the published one."""
    machine, ranks = cluster("trn2.48xlarge"), tuple(range(knee.ranks))

    def cheapest(nbytes: int) -> str:
        return plan(knee.collective, nbytes, machine, ranks).cheapest

    below, above = knee.least_bytes >> _OCTAVES, knee.most_bytes << _OCTAVES
    while above > below * _CLOSE:
        middle = round(sqrt(below * above))
        wins_before = cheapest(middle) in _BY_SIZE[: _BY_SIZE.index(knee.above)]
        below, above = (middle, above) if wins_before else (below, middle)
    return above if (cheapest(below), cheapest(above)) == (knee.below, knee.above) else None
