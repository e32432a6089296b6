"""Running a setting in a test: limits, seeds that are tried, and a failing setting that is made smaller."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
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
from .faults import Fault, FaultPlan, check_fault_kind, draw_faults, parse_faults
from .judging import NEVER_ENDS, UNUSED, judge_run
from .record import Record
from .run import RanksFailed, Run
from .threads import RealTimeError
from .world import TestedBackend, WorldResult, simulate_world

if TYPE_CHECKING:
    import topology

    from ..runtime.rank import Rank
    from ..runtime.world import World

# Memory that a rank takes besides its program's, measured with 64 ranks of DDP on a small model: 0.8 MiB.
_RANK_BYTES = 1 << 20
_REAL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The setting of a run: ranks, machine, disturbances and limits."""

    ranks: int | None = None  # Default: the ranks of the cluster, or 2
    cluster: str | topology.Cluster = "local"  # The machine whose wires carry the bytes
    seed: int = 0  # Seed of the ranks' speeds and order; 0: equally fast, in their order
    faults: tuple[Fault, ...] = ()
    steps: int | None = None  # Argument `--steps` of a program, or the argument `steps` of a function
    timeout_s: float | None = 1e5  # Limit in virtual time
    real_timeout_s: float = _REAL_TIMEOUT_S  # Limit of a rank's turn in real time, less delays of this process
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
        """The arguments with which a test repeats this setting, such as "ranks=4, seed=3"."""
        parts = [f"ranks={self.ranks}"] if self.ranks is not None else []
        parts += [f"cluster={self.cluster!r}"] if self.cluster != "local" else []
        parts += [f"seed={self.seed}"] if self.seed else []
        parts += [f'faults="{", ".join(map(str, self.faults))}"'] if self.faults else []
        names, usual = [field.name for field in fields(Virtual)], Virtual()
        values = {name: getattr(self.clock, name) for name in names}
        assumptions = [f"{name}={value!r}" for name, value in values.items() if value != getattr(usual, name)]
        parts += [f"clock=overlap.Virtual({', '.join(assumptions)})"] if assumptions else []
        parts += [f"steps={self.steps}"] if self.steps is not None else []
        parts += ["as_one=True"] if self.as_one else []
        parts += [f"real_timeout_s={self.real_timeout_s:g}"] if self.real_timeout_s != _REAL_TIMEOUT_S else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """The runs that a test asks for: a setting with one or several seeds."""

    setting: Setting  # With the first seed
    seeds: int = 1  # Number of successive seeds
    kinds: tuple[str, ...] = ()  # Kinds of faults that each seed draws; (): none


def check_memory(ranks: int) -> None:
    """Refuse more ranks than this machine has memory for; the UsageError has both figures."""
    try:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # this system does not report free memory
        return
    if ranks * _RANK_BYTES > free_bytes:
        raise UsageError(
            f"ranks: {ranks} ranks need at least {ranks * _RANK_BYTES >> 20} MiB of memory, and this machine has "
            f"{free_bytes >> 20} MiB free; use fewer ranks"
        )


def run_async(main: Callable[[Rank], Awaitable[Any]], setting: Setting, line: str) -> Run:
    """Run an async function on every rank, in virtual time.

    Args:
        main: The function.
        setting: Options of the run.
        line: The line that repeats the run in a test.
    """

    def make_main(clock: TestedBackend, world: World) -> Callable[..., Awaitable[Any]]:
        """Return the function that runs each rank, and records that its program has ended."""

        async def main_and_record(rank: Rank) -> Any:
            """Run the program of a rank, and record its end and its unfinished operations."""
            result = await main(rank)
            clock.record.left[rank.rank] = ""
            clock.injector.record_unfinished_operations(rank.rank, sends=False)
            return result

        return main_and_record

    outcome = run_world(setting, make_main)
    run = make_run(outcome, setting, line)
    verdicts = judge_run(outcome.record, outcome.error, unused=outcome.unused)
    run.verdicts = [verdict for verdict in verdicts if verdict.kind not in setting.allow]
    return run


def run_world(
    setting: Setting, make_main: Callable[[TestedBackend, World], Callable[..., Awaitable[Any]]]
) -> WorldResult:
    """Run a world of ranks, within its limits of virtual and of real time.

    Args:
        setting: Options of the run.
        make_main: Makes the async function that runs each rank, from the backend and the world.
    """
    placed = find_cluster(setting.cluster, setting.ranks)
    record = Record(size=setting.ranks or placed.world_size)
    clock = TestedBackend(setting.clock, placed, FaultPlan(setting.seed, setting.faults), record)

    def progress() -> object:
        return clock.kernel.now_ns, len(record.issues)

    with limit_real_time(setting.real_timeout_s, progress):
        return simulate_world(clock, placed, setting.timeout_s, make_main)


def make_run(outcome: WorldResult, setting: Setting, line: str) -> Run:
    """Return the `Run` of a world that has ended, without verdicts yet.

    Args:
        outcome: The result of the world.
        setting: Options of the run.
        line: The line that repeats the run in a test.
    """
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
    """Raise `RealTimeError` in this thread if nothing goes on during a `with` block.

    Args:
        seconds: Limit of real time, less delays of this process (see `Instant`); 2 s are added.
        progress: Returns a value that changes while something goes on.
    """
    over, thread = threading.Event(), threading.get_ident()

    def raise_without_progress() -> None:
        """Raise `RealTimeError` in the other thread when `progress` has been constant for longer than the limit."""
        before, since = progress(), Instant.now()
        while not over.wait(min(1.0, seconds)):
            if (now := progress()) != before:
                before, since = now, Instant.now()
            # A rank has a limit of its own, whose error names the line: it should come first.
            elif Instant.now().own_seconds_since(since) > seconds + 2.0:
                pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread), py_object(RealTimeError))
                return

    watcher = threading.Thread(target=raise_without_progress, name="overlap real time", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


# -- seeds -----------------------------------------------------------------------------------------------------------


def try_seeds(make: Callable[[Setting], Run], trials: Trials, *, check: bool = True) -> list[Run]:
    """Run each seed, and return the runs; if seeds draw faults, a run without faults comes first.

    The faults are drawn among the operations of that run.

    Args:
        make: Runs a setting.
        trials: The setting, the seeds, and the kinds of faults that they draw.
        check: Whether to raise for a run that shows a fault of the program.

    Raises:
        RanksFailed: A run shows a fault of the program (see `shows_program_fault`). The error has the run made smaller.
    """
    __tracebackhide__ = True
    runs: list[Run] = []
    first = trials.setting.seed
    settings = [replace(trials.setting, seed=seed) for seed in range(first, first + trials.seeds)]
    for chosen in [trials.setting, *settings] if trials.kinds else settings:
        if trials.kinds and runs:
            counts = Counter(issue.rank for issue in runs[0].record.issues)
            drawn = draw_faults(chosen.seed, trials.kinds, [counts[rank] for rank in range(runs[0].size)])
            chosen = replace(chosen, faults=drawn, allow=(*chosen.allow, UNUSED))
        run = make(chosen)
        if check and shows_program_fault(run):
            raise shrink_failure(make, chosen, run)
        if runs and not shows_program_fault(run):
            run.folder = None  # removes it: each may have a thousand files
        runs.append(run)
    return runs


def shows_program_fault(run: Run) -> bool:
    """Whether a run shows a fault of the program, not only the planned faults.

    A run may end because of a planned fault, if its verdict names the rank that the fault happened to.
    """
    if run.verdict is None:
        return False
    hit_ranks = {fault.rank for fault in run.faults if fault.kind in ("die", "stop", "cut", "signal", "disk")}
    return run.verdict.kind not in _OF_FAULTS or hit_ranks.isdisjoint(run.verdict.ranks[:1])


_OF_FAULTS = ("rank lost", "dead", "skipped", "left", "unmatched", "crash", "stall")
"""Kinds of verdicts that a planned fault may cause in a program without a fault."""


def shrink_failure(make: Callable[[Setting], Run], setting: Setting, run: Run) -> RanksFailed:
    """Make a failing setting smaller: without seed and faults, with fewer ranks and steps, as far as it still fails.

    Args:
        make: Runs a setting.
        setting: The setting.
        run: The run of the setting, which failed.

    Returns:
        The error to raise, with the smallest run found that fails in the same way.
    """
    assert run.verdict is not None
    if run.verdict.kind in (UNUSED, NEVER_ENDS):  # nothing to find, or each try would take as long
        return RanksFailed(run, run.verdict)
    best, tries = run, 0
    for candidates in (_calmer_settings, _settings_of_fewer_ranks, _shorter_settings, _settings_of_earlier_faults):
        for candidate in islice(candidates(setting), _TRIES - tries):
            tries += 1
            try:
                smaller = make(candidate)
            except UsageError:  # an invalid setting, such as too few ranks for the program
                continue
            if shows_program_fault(smaller) and _is_same_failure(run, smaller):
                setting, best = candidate, smaller
                break
    assert best.verdict is not None
    more = f"made smaller in {tries} {'try' if tries == 1 else 'tries'}" if best is not run else ""
    return RanksFailed(best, best.verdict, more=more)


_TRIES = 20


def _is_same_failure(run: Run, other: Run) -> bool:
    """Whether two runs fail in the same way: kind of verdict, type of error, and a line that both verdicts have."""
    first, second = run.verdict, other.verdict
    if first is None or second is None or first.kind != second.kind:
        return False
    if type(run.own_error) is not type(other.own_error):
        return False
    return not first.lines or not set(first.lines).isdisjoint(second.lines)


def _calmer_settings(setting: Setting) -> Iterator[Setting]:
    """Yield settings without seed or with fewer faults, the ones with the fewest first."""
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
    """Yield settings with fewer ranks, the fewest first, but with all ranks to which faults happen."""
    size = setting.ranks or 2
    least = max((fault.rank + 1 for fault in setting.faults), default=1)
    for ranks in sorted({2, 3, 4, size // 2}):
        if max(2, least) <= ranks < size:
            yield replace(setting, ranks=ranks)


def _shorter_settings(setting: Setting) -> Iterator[Setting]:
    """Yield settings with fewer steps, the fewest first; faults are moved forward in proportion."""
    all_steps = setting.steps or 1
    for steps in sorted({1, 2, 3, all_steps // 2}):
        if 0 < steps < all_steps:
            share = steps / all_steps
            faults = tuple(
                replace(fault, at=int(fault.at * share), step=None if fault.step is None else int(fault.step * share))
                for fault in setting.faults
            )
            yield replace(setting, steps=steps, faults=faults)


def _settings_of_earlier_faults(setting: Setting) -> Iterator[Setting]:
    """Yield settings in which one fault happens at an earlier step, the earliest first."""
    for number, fault in enumerate(setting.faults):
        moment = fault.at if fault.step is None else fault.step
        for earlier in sorted({0, 1, moment // 4, moment // 2}):
            if earlier < moment:
                moved = replace(fault, at=earlier) if fault.step is None else replace(fault, step=earlier)
                faults = (*setting.faults[:number], moved, *setting.faults[number + 1 :])
                yield replace(setting, faults=faults)


def parse_trials(values: Mapping[str, Any]) -> Trials:
    """Return the trials that the arguments of a test ask for.

    Raises:
        UsageError: An argument is unknown, or its value is invalid.
    """
    values = dict(values)
    seeds = values.pop("seeds", 1)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise UsageError(f"seeds: expected a positive integer, got {seeds!r}")
    names = [field.name for field in fields(Setting)]
    for name in values:
        if name not in names:
            raise UsageError(f"ranks: {name!r} is unknown; known are {', '.join([*names, 'seeds'])}")
    planned = values.pop("faults", ())
    kinds: tuple[str, ...] = ()
    # A text without "(", such as "die, late", names kinds of faults to draw from.
    if isinstance(planned, str) and "(" not in planned:
        kinds, planned = tuple(kind.strip() for kind in planned.split(",")), ()
    faults = parse_faults(planned) if isinstance(planned, str) else tuple(planned)
    for kind in kinds:
        check_fault_kind(kind)
    if isinstance(values.get("allow"), str):
        values["allow"] = (values["allow"],)
    return Trials(setting=Setting(**values, faults=faults), seeds=seeds, kinds=kinds)
