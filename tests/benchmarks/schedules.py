"""What schedules cost: proving, generating and costing them, and finding again what a call was compiled to."""

from time import perf_counter, perf_counter_ns

import numpy as np

from overlap.cli.bench.sampling import Sampling, Times
from overlap.collectives.call import call
from overlap.collectives.generators import generate
from overlap.collectives.generators.composed import PHASES
from overlap.collectives.placement import Placement, place_group
from overlap.collectives.program import project_all
from overlap.collectives.proof import verify
from overlap.collectives.schedule import Schedule
from overlap.cost.clocks import cost
from overlap.cost.parameters import cost_parameters
from overlap.cost.placed import place_rounds
from overlap.cost.rounds import read_rounds
from overlap.cost.select import plan
from overlap.runtime.engine.compiler import Compiler
from tests.benchmarks.figures import few
from tests.cost.star import Star
from topology import cluster

RANKS = 1024
RANKS_ONCE = 4096  # 34 million rows: too many to prove over and over
RANKS_COMPILED = 64
RANKS_PLANNED = 16384

_NODE_RANKS = 64
_LOOK_UPS = 1000  # in a sample: one takes a few us, of which two looks at the clock would be a part
_ELEMENTS = 1 << 20


def measure_proof(sampling: Sampling) -> Times:
    """Time to prove a ring all-reduce of 1024 ranks, without generating it."""
    schedule = _ring(RANKS)
    return Times.of_samples([_proving_ns(schedule) for _ in range(few(sampling))])


def measure_proof_once(_: Sampling) -> Times:
    """Time to prove a ring all-reduce of 4096 ranks, one sample whatever was asked for. Takes over 2 GB of memory."""
    return Times.of_samples([_proving_ns(_ring(RANKS_ONCE))])


def measure_compiling(sampling: Sampling) -> Times:
    """Time from nothing to the programs of all of 64 ranks: generate a ring all-reduce, prove it, project it."""
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        begun_ns = perf_counter_ns()
        schedule = _ring(RANKS_COMPILED)
        verify(schedule)
        project_all(schedule)
        samples.append(perf_counter_ns() - begun_ns)
    return Times.of_samples(samples[sampling.warmup :])


def measure_costing(sampling: Sampling) -> Times:
    """Time to cost a ring all-reduce of 1024 ranks from its table, as if no two messages shared a wire."""
    return Times.of_samples([ring_costing_s(RANKS)[0] * 1e9 for _ in range(few(sampling))])


def measure_costing_loads(sampling: Sampling) -> Times:
    """Time to do so on trn2.48xlarge nodes, with what is on every wire in every step."""
    return Times.of_samples([ring_costing_s(RANKS)[1] * 1e9 for _ in range(few(sampling))])


def measure_planning(_: Sampling) -> Times:
    """Time to plan a collective for the first time on 16,384 ranks: the one that takes longest, once."""
    machine, samples = cluster("trn2.48xlarge", nodes=RANKS_PLANNED // _NODE_RANKS), []
    for collective in PHASES:
        begun_ns = perf_counter_ns()
        plan(collective, 1 << 26, machine)
        samples.append(perf_counter_ns() - begun_ns)
    return Times.of_samples([max(samples)])


def measure_look_up(sampling: Sampling) -> Times:
    """Time that a compiler of 64 ranks takes for a call that it has compiled before."""
    compiler, members = Compiler(cluster("trn2.48xlarge"), None), tuple(range(RANKS_COMPILED))
    known = call("all_reduce", "sum", np.dtype(np.float32), (_ELEMENTS,), RANKS_COMPILED)
    compiler.compile(known, members, 0)
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        begun_ns = perf_counter_ns()
        for _ in range(_LOOK_UPS):
            compiler.compile(known, members, 0)
        samples.append((perf_counter_ns() - begun_ns) / _LOOK_UPS)
    return Times.of_samples(samples[sampling.warmup :])


def ring_costing_s(ranks: int = 1024) -> tuple[float, float]:
    """Return the seconds that costing a ring all-reduce takes, from its table: without contention, and with link loads.

    Link loads are those of trn2.48xlarge nodes, whose wires are numbered before.

    Args:
        ranks: A multiple of 64.
    """
    machine = cluster("trn2.48xlarge", nodes=ranks // _NODE_RANKS)
    plain = generate("all_reduce", "ring", ranks)
    along = generate("all_reduce", "ring", ranks, order=machine.ring_order())
    placement = place_group(machine)
    return (
        _timed(plain, Star(ranks, latency_s=2e-6, bytes_per_s=12.5e9), contention=False),
        _timed(along, placement, contention=True, warm=True),
    )


def _timed(schedule: Schedule, placement: Placement, *, contention: bool, warm: bool = False) -> float:
    known = cost_parameters(cluster("trn2.48xlarge"))
    if warm:
        place_rounds(placement, read_rounds(schedule), parameters=known)
    start_s = perf_counter()
    cost(place_rounds(placement, read_rounds(schedule), parameters=known, contention=contention), 1e9)
    return perf_counter() - start_s


def _ring(ranks: int) -> Schedule:
    return generate("all_reduce", "ring", ranks)


def _proving_ns(schedule: Schedule) -> int:
    begun_ns = perf_counter_ns()
    verify(schedule)
    return perf_counter_ns() - begun_ns
