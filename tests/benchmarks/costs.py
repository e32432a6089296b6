"""What the library itself costs, and at most how much: issuing, recording a span, starting, and its schedules."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import trio

from overlap.cli.bench.sampling import Sampling, Times

from . import issuing, schedules, starting
from .figures import Figure, time_of


@dataclass(frozen=True, slots=True)
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


_BEHIND = f"  with {issuing.UNFINISHED} unfinished"
_UP = f"{starting.RANKS_UP} ranks up and down"
_RUN = f"overlap run, {starting.RANKS_RUN} ranks that do nothing"
_CROWDED = f"  as two processes, beside {starting.CROWD} busy processes"
_PROVE = "prove a ring all-reduce, {} ranks"
_COST = f"cost a ring, {schedules.RANKS} ranks"
_PLAN = f"first plan of any kind, {schedules.RANKS_PLANNED:,} ranks"
_COMPILE = f"generate, prove, project, {schedules.RANKS_COMPILED} ranks"


def _issuing(program: Callable[..., Awaitable[list[int]]]) -> Callable[[Sampling], Times]:
    return lambda sampling: issuing.measure(program, sampling)


def _issue_behind(sampling: Sampling) -> Times:
    return issuing.measure(issuing.issue_behind, sampling, trio.Event())


def _computing(argument: Callable[[], object]) -> Callable[[Sampling], Times]:
    return lambda sampling: issuing.measure(issuing.compute, sampling, argument, ranks=1)


COSTS = (
    Cost("issue", "issue", "issue an all_reduce", 15e3, _issuing(issuing.issue)),
    Cost("issue/behind", "issue", _BEHIND, 15e3, _issue_behind),
    Cost("issue/thread", "issue", "  from the compute thread", 100e3, _issuing(issuing.issue_in_a_thread)),
    Cost("compute", "issue", "issue a compute of 1 MiB", None, _computing(issuing.an_array)),
    Cost("compute/many", "issue", f"  of a dict of {issuing.ARRAYS} arrays", None, _computing(issuing.many_arrays)),
    Cost("span", "span", "record a span", 1e3, issuing.measure_span),
    Cost("flight", "span", "record a flight", 400, issuing.measure_flight),
    Cost("import", "start", "import overlap, beyond trio and numpy", 50e6, starting.measure_import),
    Cost("startup", "start", _UP, 0.5e9, starting.measure_startup),
    Cost("run", "start", _RUN, 1e9, starting.measure_run),
    Cost("run/crowded", "start", _CROWDED, None, starting.measure_crowded_run),
    Cost("prove", "schedules", _PROVE.format(schedules.RANKS), 0.2e9, schedules.measure_proof),
    Cost("plan", "schedules", _PLAN, 2e9, schedules.measure_planning),
    Cost("compile", "schedules", _COMPILE, 50e6, schedules.measure_compiling),
    Cost("cost", "schedules", f"{_COST}, no contention", 20e6, schedules.measure_costing),
    Cost("cost/loads", "schedules", f"{_COST}, link loads", 100e6, schedules.measure_costing_loads),
    Cost("look_up", "schedules", "look up a cached plan", 5e3, schedules.measure_look_up),
    # Last: what so much memory leaves behind in the allocator would be in the times of the others.
    Cost(
        "prove/4096", "schedules", _PROVE.format(schedules.RANKS_ONCE), 3e9, schedules.measure_proof_once, in_all=False
    ),
)


def figures(sampling: Sampling, word: str | None = None) -> Iterator[Figure]:
    """Measure the costs of a word, or, without one, those that are measured along with everything else."""
    for cost in COSTS:
        if cost.in_all if word is None else cost.word == word:
            yield time_of(cost.name, cost.text, cost.measure(sampling), cost.aim_ns)
