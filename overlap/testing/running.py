"""Runs: async rank functions and plain programs become a `Run`; seeds are tried, and a failing one is made smaller."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_ulong, py_object, pythonapi
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from transports.delays import Instant

from ..errors import UsageError
from ..processes.real_time import find_cluster
from ..settings import check_ranks
from ..simulation.simulated_backend import Virtual
from .faults import Fault, FaultPlan, check_kind, draw, parse
from .judging import NEVER_ENDS, UNUSED, judge
from .record import Record
from .run import RanksFailed, Run
from .threads import RealTimeError
from .world import TestedBackend, WorldResult, simulate

if TYPE_CHECKING:
    import topology

    from ..runtime.rank import Rank
    from ..runtime.world import World

# Memory that a rank takes besides its program's, measured with 64 ranks of DDP on a small model: 0.8 MiB.
_RANK_BYTES = 1 << 20
_REAL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The setting of a run."""

    ranks: int | None = None  # Default: the ranks of the cluster, or 2
    cluster: str | topology.Cluster = "local"  # The machine whose wires carry the bytes
    seed: int = 0  # Seed of the ranks' speeds and order; 0: equally fast, in their order
    faults: tuple[Fault, ...] = ()
    steps: int | None = None  # Argument `--steps` of a program, or the argument `steps` of a function
    timeout_s: float | None = 1e5  # Limit in virtual time
    real_timeout_s: float = _REAL_TIMEOUT_S  # Limit in real time, without delays, of a rank's turn
    clock: Virtual = field(default_factory=Virtual)  # Assumptions of virtual time
    allow: tuple[str, ...] = ()  # Kinds of verdicts that are no failures
    as_one: bool = False  # Whether gradients are compared with those of one rank; of programs of PyTorch only

    def __post_init__(self) -> None:
        if self.ranks is not None:
            check_ranks(self.ranks)
            check_memory(self.ranks)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise UsageError(f"seed: expected an integer from 0, got {self.seed!r}")
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            raise UsageError(f"steps: expected a positive integer, got {self.steps!r}")
        if not isinstance(self.clock, Virtual):
            raise UsageError(
                f"clock: expected an overlap.Virtual, got {self.clock!r}; for real time call "
                "overlap.run(main, ranks=4) in a test of your own"
            )

    @property
    def arguments(self) -> str:
        """Arguments of a test that repeat this setting."""
        parts = [f"ranks={self.ranks}"] if self.ranks is not None else []
        parts += [f"cluster={self.cluster!r}"] if self.cluster != "local" else []
        parts += [f"seed={self.seed}"] if self.seed else []
        parts += [f'faults="{", ".join(map(str, self.faults))}"'] if self.faults else []
        assumptions = [
            f"{field.name}={getattr(self.clock, field.name)!r}"
            for field in fields(Virtual)
            if getattr(self.clock, field.name) != getattr(Virtual(), field.name)
        ]
        parts += [f"clock=overlap.Virtual({', '.join(assumptions)})"] if assumptions else []
        parts += [f"steps={self.steps}"] if self.steps is not None else []
        parts += ["as_one=True"] if self.as_one else []
        parts += [f"real_timeout_s={self.real_timeout_s:g}"] if self.real_timeout_s != _REAL_TIMEOUT_S else []
        return ", ".join(parts)


def check_memory(ranks: int) -> None:
    """Refuse more ranks than this machine has memory for; the UsageError has both figures."""
    try:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system tells
        return
    if ranks * _RANK_BYTES > free_bytes:
        raise UsageError(
            f"ranks: {ranks} ranks need at least {ranks * _RANK_BYTES >> 20} MiB of memory, and this machine has "
            f"{free_bytes >> 20} MiB free; use fewer ranks"
        )


def run_async(main: Callable[[Rank], Awaitable[Any]], setting: Setting, line: str) -> Run:
    """Run an async function on every rank, in virtual time; `line` repeats the run in a test."""

    def wrap(clock: TestedBackend, world: World) -> Callable[..., Awaitable[Any]]:
        """Return the async function of a rank, which notes at its end that the rank has left."""

        async def main_and_record(rank: Rank) -> Any:
            """Run the program of a rank, and note its end and its unfinished operations."""
            result = await main(rank)
            clock.record.left[rank.rank] = ""
            clock.injector.record_unfinished(rank.rank, sends=False)
            return result

        return main_and_record

    outcome = run_world(setting, wrap)
    run = make_run(outcome, setting, line)
    verdicts = judge(outcome.record, outcome.error, unused=outcome.unused)
    run.verdicts = [verdict for verdict in verdicts if verdict.kind not in setting.allow]
    return run


def run_world(setting: Setting, wrap: Callable[[TestedBackend, World], Callable[..., Awaitable[Any]]]) -> WorldResult:
    """Run a world of ranks, within its limits of virtual and of real time."""
    placed = find_cluster(setting.cluster, setting.ranks)
    record = Record(size=setting.ranks or placed.world_size)
    clock = TestedBackend(setting.clock, placed, FaultPlan(setting.seed, setting.faults), record)

    def progress() -> object:
        return clock.kernel.now_ns, len(record.issues)

    with limit_real_time(setting.real_timeout_s, progress):
        return simulate(clock, placed, setting.timeout_s, wrap)


def make_run(outcome: WorldResult, setting: Setting, line: str) -> Run:
    """Return the run of a world that has ended, without verdicts."""
    return Run(
        size=outcome.record.size,
        record=outcome.record,
        seed=setting.seed,
        faults=tuple(outcome.faults),
        returned=outcome.results,
        spans=outcome.timeline,
        error=outcome.error,
        line=line,
    )


@contextmanager
def limit_real_time(seconds: float, progress: Callable[[], object]) -> Iterator[None]:
    """Raise `RealTimeError` in this thread if the value of `progress` stays the same for `seconds` of running time."""
    over, thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        """Raise `RealTimeError` in the other thread once `progress` has been constant for `seconds`, plus 2 s."""
        before, since = progress(), Instant.now()
        while not over.wait(min(1.0, seconds)):
            if (now := progress()) != before:
                before, since = now, Instant.now()
            elif Instant.now().since(since) > seconds + 2.0:  # a rank's own limit comes first: it knows where it is
                pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread), py_object(RealTimeError))
                return

    watcher = threading.Thread(target=watch, name="overlap real time", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


# -- seeds -----------------------------------------------------------------------------------------------------------


def explore(
    make: Callable[[Setting], Run],
    setting: Setting,
    *,
    seeds: int,
    kinds: Sequence[str] = (),
    check: bool = True,
) -> list[Run]:
    """Try seeds, and return their runs; a failing one is shrunk first.

    Args:
        make: Runs a setting.
        setting: Setting of the first seed.
        seeds: How many.
        kinds: Kinds of faults that each seed draws; none by default. A run without faults then comes first, for seeds
            draw among its operations.
        check: Whether to raise for a seed that fails.

    Raises:
        RanksFailed: For the first seed that fails, made smaller. With faults of its own a program may fail, and then
            has to name the rank that the fault happened to.
    """
    __tracebackhide__ = True
    runs: list[Run] = []
    for seed in ([None] if kinds else []) + [*range(setting.seed, setting.seed + seeds)]:
        chosen = setting if seed is None else replace(setting, seed=seed)
        if kinds and runs:
            counts = Counter(issue.rank for issue in runs[0].record.issues)
            drawn = draw(chosen.seed, kinds, [counts[rank] for rank in range(runs[0].size)])
            chosen = replace(chosen, faults=drawn, allow=(*chosen.allow, UNUSED))
        run = make(chosen)
        if check and shows_fault(run):
            raise shrink(make, chosen, run)
        if runs and not shows_fault(run):
            run.folder = None  # a thousand files for each of many seeds
        runs.append(run)
    return runs


def shows_fault(run: Run) -> bool:
    """Whether a run shows a fault of the program, and not merely the faults that were planned."""
    if run.verdict is None:
        return False
    blamed = {fault.rank for fault in run.faults if fault.kind in ("die", "stop", "cut", "signal", "disk")}
    return not (blamed and run.verdict.kind in _OF_FAULTS and blamed & set(run.verdict.ranks[:1]))


_OF_FAULTS = ("rank lost", "dead", "skipped", "left", "unmatched", "crash", "stall")


def shrink(make: Callable[[Setting], Run], setting: Setting, run: Run) -> RanksFailed:
    """Remove parts of a failing setting that its failure does not need: the seed, faults, ranks, steps."""
    assert run.verdict is not None
    if run.verdict.kind in (UNUSED, NEVER_ENDS):  # each try would take as long
        return RanksFailed(run, run.verdict)
    best, tries = run, 0
    for candidates in (_calmer_settings, _settings_of_fewer_ranks, _shorter_settings, _earlier_faults):
        for candidate in islice(candidates(setting), _TRIES - tries):
            tries += 1
            try:
                smaller = make(candidate)
            except UsageError:  # the setting is refused, such as a fault of a rank that it lacks
                continue
            if shows_fault(smaller) and _same_failure(run, smaller):
                setting, best = candidate, smaller
                break
    assert best.verdict is not None
    more = f"made smaller in {tries} {'try' if tries == 1 else 'tries'}" if best is not run else ""
    return RanksFailed(best, best.verdict, more=more)


_TRIES = 20


def _same_failure(run: Run, other: Run) -> bool:
    """Whether two runs fail for one reason: a kind of verdict, and a line of the program that both blame."""
    first, second = run.verdict, other.verdict
    if first is None or second is None or first.kind != second.kind:
        return False
    if type(run.own_error) is not type(other.own_error):
        return False
    return not first.lines or not set(first.lines).isdisjoint(second.lines)


def _calmer_settings(setting: Setting) -> Iterator[Setting]:
    """Yield settings with fewer disturbances, the calmest first."""
    calm = replace(setting, seed=0)
    if setting.faults:
        yield replace(calm, faults=())
        for fault in setting.faults:
            yield replace(calm, faults=(fault,))
        yield calm
        for fault in setting.faults:
            yield replace(setting, faults=(fault,))
    elif setting.seed:
        yield calm


def _settings_of_fewer_ranks(setting: Setting) -> Iterator[Setting]:
    size = setting.ranks or 2
    least = max((fault.rank + 1 for fault in setting.faults), default=1)
    for ranks in sorted({2, 3, 4, size // 2}):
        if max(2, least) <= ranks < size:
            yield replace(setting, ranks=ranks)


def _shorter_settings(setting: Setting) -> Iterator[Setting]:
    """Yield settings with fewer steps, the fewest first; their faults happen earlier in proportion."""
    all_steps = setting.steps or 1
    for steps in sorted({1, 2, 3, all_steps // 2}):
        if 0 < steps < all_steps:
            share = steps / all_steps
            faults = tuple(
                replace(fault, at=int(fault.at * share), step=None if fault.step is None else int(fault.step * share))
                for fault in setting.faults
            )
            yield replace(setting, steps=steps, faults=faults)


def _earlier_faults(setting: Setting) -> Iterator[Setting]:
    """Yield settings in which one fault happens at an earlier step, the earliest first."""
    for number, fault in enumerate(setting.faults):
        moment = fault.at if fault.step is None else fault.step
        for earlier in sorted({0, 1, moment // 4, moment // 2}):
            if earlier < moment:
                moved = replace(fault, at=earlier) if fault.step is None else replace(fault, step=earlier)
                faults = (*setting.faults[:number], moved, *setting.faults[number + 1 :])
                yield replace(setting, faults=faults)


def parse_setting(values: dict[str, Any]) -> tuple[Setting, int, tuple[str, ...]]:
    """Return the setting of a test, the number of seeds, and the kinds of faults that seeds draw."""
    values = dict(values)
    seeds = values.pop("seeds", 1)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise UsageError(f"seeds: expected a positive integer, got {seeds!r}")
    names = [field.name for field in fields(Setting)]
    for name in values:
        if name not in names:
            raise UsageError(f"ranks: {name!r} is unknown; known are {', '.join([*names, 'seeds'])}")
    planned = values.pop("faults", ())
    faults: tuple[Fault, ...] = ()
    kinds: tuple[str, ...] = ()
    if not isinstance(planned, str):
        faults = tuple(planned)
    elif "(" in planned:
        faults = parse(planned)
    else:
        kinds = tuple(field.strip() for field in planned.split(","))
    for kind in kinds:
        check_kind(kind)
    if isinstance(values.get("allow"), str):
        values["allow"] = (values["allow"],)
    return Setting(**values, faults=faults), seeds, kinds
