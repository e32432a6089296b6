"""What the library itself costs, and at most how much: issuing, recording a span, starting, and its schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature

from overlap import Future
from overlap.cli.bench.sampling import Sampling, Times

from . import issuing, schedules, starting
from .figures import Figure, time_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Something of ours that has a cost.

    Attributes:
        name: A stable name.
        word: What the command line calls it; several costs may share a word.
        text: What it is.
        aim_ns: At most so much; None if it is only for reference.
        measure: Measures doing it once.
        in_all: Whether it is measured along with everything else, or only by its word.
    """

    name: str
    word: str
    text: str
    aim_ns: float | None
    measure: Callable[[Sampling], Times]
    in_all: bool = True


IN_A_THREAD = Cost(
    name="issue/thread",
    word="issue",
    text="  from the compute thread",
    aim_ns=100e3,
    measure=issuing.measure_issue_in_a_thread,
)

_PROVE = "prove a ring all-reduce, {} ranks"
_COST = f"cost a ring, {schedules.RANKS} ranks"
_PLAN = f"first plan of any kind, {schedules.RANKS_PLANNED:,} ranks"
_COMPILE = f"generate, prove, project, {schedules.RANKS_COMPILED} ranks"


COSTS = (
    Cost(name="issue", word="issue", text="issue an all_reduce", aim_ns=15e3, measure=issuing.measure_issue),
    Cost(
        name="issue/behind",
        word="issue",
        text=f"  with {issuing.UNFINISHED} unfinished",
        aim_ns=15e3,
        measure=issuing.measure_issue_behind,
    ),
    *([IN_A_THREAD] if "timeout" in signature(Future.result).parameters else []),
    Cost(
        name="compute",
        word="issue",
        text="issue a compute of 1 MiB",
        aim_ns=None,
        measure=partial(issuing.measure_compute, argument=issuing.an_array),
    ),
    Cost(
        name="compute/many",
        word="issue",
        text=f"  of a dict of {issuing.ARRAYS} arrays",
        aim_ns=None,
        measure=partial(issuing.measure_compute, argument=issuing.many_arrays),
    ),
    Cost(name="span", word="span", text="record a span", aim_ns=1e3, measure=issuing.measure_span),
    Cost(name="flight", word="span", text="record a flight", aim_ns=400, measure=issuing.measure_flight),
    Cost(
        name="import",
        word="start",
        text="import overlap, beyond trio and numpy",
        aim_ns=50e6,
        measure=starting.measure_import,
    ),
    Cost(
        name="startup",
        word="start",
        text=f"{starting.RANKS_UP} ranks up and down",
        aim_ns=0.5e9,
        measure=starting.measure_startup,
    ),
    Cost(
        name="run",
        word="start",
        text=f"overlap run, {starting.RANKS_RUN} ranks that do nothing",
        aim_ns=1e9,
        measure=starting.measure_run,
    ),
    Cost(
        name="run/crowded",
        word="start",
        text=f"  as two processes, beside {starting.CROWD} busy processes",
        aim_ns=None,
        measure=starting.measure_crowded_run,
    ),
    Cost(
        name="prove",
        word="schedules",
        text=_PROVE.format(schedules.RANKS),
        aim_ns=0.2e9,
        measure=schedules.measure_proof,
    ),
    Cost(name="plan", word="schedules", text=_PLAN, aim_ns=2e9, measure=schedules.measure_planning),
    Cost(name="compile", word="schedules", text=_COMPILE, aim_ns=50e6, measure=schedules.measure_compiling),
    Cost(
        name="cost",
        word="schedules",
        text=f"{_COST}, no contention",
        aim_ns=20e6,
        measure=schedules.measure_costing,
    ),
    Cost(
        name="cost/loads",
        word="schedules",
        text=f"{_COST}, link loads",
        aim_ns=100e6,
        measure=schedules.measure_costing_loads,
    ),
    Cost(name="look_up", word="schedules", text="look up a cached plan", aim_ns=5e3, measure=schedules.measure_look_up),
    # Last: what so much memory leaves behind in the allocator would be in the times of the others.
    Cost(
        name="prove/4096",
        word="schedules",
        text=_PROVE.format(schedules.RANKS_ONCE),
        aim_ns=3e9,
        measure=schedules.measure_proof_once,
        in_all=False,
    ),
)


def figures(sampling: Sampling, word: str | None = None) -> Iterator[Figure]:
    """Measure the costs of a word, or, without one, those that are measured along with everything else."""
    for cost in COSTS:
        if cost.in_all if word is None else cost.word == word:
            yield time_of(cost.name, cost.text, cost.measure(sampling), cost.aim_ns)
