"""Faults of a test as data: rank, kind and moment; drawn by a seed, or given by the test."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any

import numpy as np

from ..errors import UsageError
from ..runtime.checking import sends_data
from ..runtime.memory.arrays import Metadata
from ..runtime.operation import Operation
from ..simulation.faults import Fate, Fates, Faults
from .turns import Turns

KINDS = {
    "die": "the rank is gone; the others are notified after 0.1 s",
    "stop": "the rank stops for ever, and nobody is notified",
    "slow": "the computes of the rank take `by` times as long",
    "late": "the rank's part in one operation arrives `by` seconds late",
    "slow_link": "every operation of the rank arrives `by` seconds late",
    "cut": "the rank's links are cut, or the one `to` a rank, for good or for `by` seconds; after 15 s it is given up",
    "flip": "one bit of what the rank sends is flipped",
    "disk": "the rank's disk is full: writing a file raises OSError from then on",
    "signal": "the rank gets SIGTERM",
}
"""Kinds of faults, and what they do."""

_OF_COMPUTES = ("die",)  # Kinds that may also happen at a compute, not only at an operation
_OF_PROCESSES = {"signal": "whose handler would be that of all ranks", "disk": "whose files are not watched"}
_DEFAULT_BY = {"slow": 10.0, "late": 0.5, "slow_link": 0.01}
_TEXT = re.compile(r"(\w+)\((.*?)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `str(fault)`, such as "die(rank=1, at=3)", can be passed to a test."""

    kind: str  # One of `KINDS`
    rank: int
    at: int = 0  # It happens before this operation or compute of the rank, counted from 0
    by: float | None = None  # Amount: a factor for "slow", seconds for others; None: the default, or no amount
    to: int | None = None  # For "cut": the rank at the other end of the link; None: all links
    step: int | None = None  # Instead of `at`: before the first operation or compute of this step, or of a later one

    def __post_init__(self) -> None:
        check_fault_kind(self.kind)

    def __str__(self) -> str:
        when = f"step={self.step}" if self.step is not None else f"at={self.at}"
        by = f", by={self.by:g}" if self.by is not None else ""
        to = f", to={self.to}" if self.to is not None else ""
        return f"{self.kind}(rank={self.rank}, {when}{by}{to})"

    @property
    def amount(self) -> float:
        """Amount of the fault: `by`, or its default for this kind."""
        return self.by if self.by is not None else _DEFAULT_BY.get(self.kind, 0.0)


def check_fault_kind(kind: str) -> None:
    """Refuse unknown kinds of faults with a UsageError."""
    if kind not in KINDS:
        raise UsageError(f"faults: {kind!r} is unknown; known are {', '.join(KINDS)}")


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse faults from a text such as "die(rank=1, at=3), late(rank=0, at=2)".

    Raises:
        UsageError: The text, or a part of it, is no such fault.
    """
    faults = []
    for kind, arguments in _TEXT.findall(text):
        arguments_by_name: dict[str, Any] = {}
        for part in filter(None, (each.strip() for each in arguments.split(","))):
            name, _, value = part.partition("=")
            if name.strip() not in ("rank", "at", "by", "step", *(["to"] if kind == "cut" else [])):
                to = ", to" * (kind == "cut")
                raise UsageError(f"faults: {kind} has no {name.strip()!r}; it takes rank, at, step{to} and by")
            try:
                arguments_by_name[name.strip()] = float(value) if name.strip() == "by" else int(value)
            except ValueError:
                raise UsageError(f"faults: expected a number as {name.strip()} of {kind}, got {value!r}") from None
        if "rank" not in arguments_by_name:
            raise UsageError(f"faults: {kind} needs a rank, as in {kind}(rank=0)")
        faults.append(Fault(kind=kind, **arguments_by_name))
    unread = _TEXT.sub("", text).strip(" ,")
    if not faults or unread:
        trouble = f"cannot read {unread!r} in {text!r}" if unread else f"{text!r} has no fault"
        raise UsageError(
            f'faults: {trouble}; write faults such as "die(rank=1, at=3)", of the kinds {", ".join(KINDS)}'
        )
    return tuple(faults)


def check_kinds_for_async(kinds: Iterable[str]) -> None:
    """Refuse kinds of faults that do nothing to an async function, with a UsageError that advises others."""
    for kind in kinds:
        if kind in _OF_PROCESSES:
            raise UsageError(
                f"faults: {kind} does nothing to an async function, {_OF_PROCESSES[kind]}; use die or stop, or test a "
                "program of torch.distributed: ranks.program, ranks.function"
            )


def draw_faults(seed: int, kinds: Sequence[str], counts: Sequence[int]) -> tuple[Fault, ...]:
    """Draw one or two faults of some kinds, by a seed.

    Args:
        seed: The seed.
        kinds: Kinds to choose from.
        counts: By rank, its number of operations in a run without faults.
    """
    chance = Random(f"faults {seed}")
    faults = []
    for _ in range(chance.choice((1, 1, 2))):
        rank = chance.randrange(len(counts))
        kind, at = chance.choice(list(kinds)), chance.randrange(max(1, counts[rank]))
        faults.append(Fault(kind=kind, rank=rank, at=at, by=chance.choice((None, 0.5)) if kind == "cut" else None))
    return tuple(faults)


class FaultPlan(Fates):
    """Planned faults of one run; and by the seed, how fast ranks are and in which order they take turns.

    With seed 0, ranks are equally fast and take turns in their order.

    Args:
        seed: Seed of the disturbances.
        faults: The planned faults.

    Attributes:
        planned: The planned faults.
        happened: The planned faults that have happened so far.
        full: Ranks whose disk is full.
        turns: Decides which rank runs next; None: virtual time does.
        on_signal: Called with a rank that gets a signal.
        on_stop: Called with the operation at which a rank stops.
    """

    def __init__(self, seed: int, faults: Iterable[Fault] = ()) -> None:
        self.planned: tuple[Fault, ...] = tuple(faults)
        # Even seeds decide turns, odd seeds delays. With planned faults there are no turns: they would not happen then.
        self.turns: Turns | None = Turns(seed) if seed and seed % 2 == 0 and not self.planned else None
        super().__init__(_make_disturbances(seed, in_turns=self.turns is not None))
        self.happened: list[Fault] = []
        self._begun_steps: set[tuple[int, int, bool]] = set()  # rank, step, whether an operation
        self.full: set[int] = set()
        self._cuts: list[tuple[Fault, float]] = []  # cuts of links, each with its end in nanoseconds
        self._due: Sequence[Fault] | None = None  # faults of the operation that arrives; set by `apply_faults`
        self._held_up_ns = 0.0  # time for which a cut holds up that operation
        self.on_signal: Callable[[int], None] = _ignore
        self.on_stop: Callable[[Operation], None] = _ignore
        self._seed = seed

    def _take_due_faults(self, rank: int, step: int | None, kinds: Collection[str] = KINDS) -> list[Fault]:
        """Return the faults that happen at the next action of a rank, and add them to `happened`."""
        number = self._done[rank]
        due = []
        for fault in self.planned:
            if fault.rank != rank or fault in self.happened or fault.kind not in kinds:
                continue
            if (fault.step is None and number >= fault.at) or (
                fault.step is not None and step is not None and step >= fault.step
            ):
                self.happened.append(fault)
                due.append(fault)
        return due

    def apply_faults(self, operation: Operation) -> bool:
        """Apply the faults that are due to an operation that is about to arrive; return False if it must not arrive.

        A delay by these faults is returned by `draw_next_fate`, which is called after this.
        """
        rank = operation.context.rank
        self._due = due = self._take_due_faults(rank, operation.step)
        self._record_step(rank, operation.step, operation=True)
        self._held_up_ns = self._remaining_cut_ns(operation)
        for fault in due:
            if fault.kind == "flip":
                if not _flip_bit(operation):
                    self.happened.remove(fault)  # an operation without data: the next one
            elif fault.kind == "disk":
                self.full.add(rank)
            elif fault.kind == "signal":
                self.on_signal(rank)
            elif fault.kind == "stop":
                self.dead.add(rank)
                self.on_stop(operation)
                return False
        return True

    def _remaining_cut_ns(self, operation: Operation) -> float:
        """Return for how many nanoseconds from now a link that an operation needs is cut; 0 if none is."""
        rank, now_ns = operation.context.rank, operation.context.now_ns()
        self._cuts += [(f, inf if f.by is None else now_ns + f.by * 1e9) for f in self._due or () if f.kind == "cut"]
        members = operation.members
        ends = [until for f, until in self._cuts if f.rank == rank and (f.to is None or f.to in members)]
        return max(0.0, *ends, now_ns) - now_ns

    def fault_origin(self, rank: int) -> str:
        """Return a clause for messages on the cause of a rank's fault: the planned faults, or the seed."""
        planned = [str(fault) for fault in self.happened if fault.rank == rank]
        return f"planned by {', '.join(planned)}" if planned else super().fault_origin(rank)

    def draw_next_fate(self, rank: int, step: int | None = None) -> Fate:
        """Return the fate of the next action of a rank: its delay, and whether it is lost or the rank dies.

        Args:
            rank: The rank.
            step: The step that has issued the action; None: it is in no step.
        """
        # `apply_faults` has found the faults of an operation already; for a compute they are looked up here.
        due = self._take_due_faults(rank, step, _OF_COMPUTES) if self._due is None else self._due
        self._record_step(rank, step, operation=False)
        fate = super().draw_next_fate(rank) if self._seed else self._count_undisturbed_action(rank)
        self._due = None
        cut_ns, self._held_up_ns = self._held_up_ns, 0.0
        if not due and not self.happened:
            return fate
        late_s = sum(fault.amount for fault in due if fault.kind == "late")
        late_s += sum(f.amount for f in self.happened if f.kind == "slow_link" and f.rank == rank)
        lost = cut_ns > self.faults.silence_s * 1e9
        return Fate(
            late_ns=fate.late_ns + round(late_s * 1e9 + (0.0 if lost else cut_ns)),
            lost=lost,
            dies_at=0.25 if "die" in {fault.kind for fault in due} else None,
        )

    def slowed_compute_ns(self, rank: int, cost_ns: int, step: int | None = None) -> int:
        """Return the nanoseconds that a compute takes on a rank, with the seed and faults applied.

        Args:
            rank: The rank.
            cost_ns: Nanoseconds without them.
            step: The step that has issued the compute; None: it is in no step.
        """
        self._take_due_faults(rank, step, ("slow",))
        for fault in self.happened:
            if fault.kind == "slow" and fault.rank == rank:
                cost_ns = round(cost_ns * fault.amount)
        return super().slowed_compute_ns(rank, cost_ns) if self._seed else cost_ns

    def _count_undisturbed_action(self, rank: int) -> Fate:
        """Count an action of a rank in a run with seed 0, and return the fate without any delay."""
        self._done[rank] += 1
        return _NOTHING_HAPPENS

    def explain_unused_fault(self, size: int) -> str:
        """Return why the first planned fault that did not happen did not, as text; "" if all have happened.

        Args:
            size: Number of ranks.
        """
        for fault in self.planned:
            if fault not in self.happened:
                return f"{fault} did not happen: {self._unused_reason(fault, size)}"
        return ""

    def _unused_reason(self, fault: Fault, size: int) -> str:
        """Return why a fault has not happened, as text: its rank, its step or its operation does not exist."""
        rank = fault.rank
        if not 0 <= rank < size:
            return f"the ranks are 0 to {size - 1}"
        if fault.step is None:
            count = self._done[rank]
            counted = f"rank {rank} begins {count} operations and computes, counted from 0"
            needed = "operation with data" if fault.kind == "flip" else "operation"
            return f"{counted}{f', and no {needed} from {fault.at} on' if fault.at < count else ''}; use a smaller at="
        computes = fault.kind in ("die", "slow")
        steps = [step for of, step, operation in self._begun_steps if of == rank and (operation or computes)]
        if not steps:
            return f"rank {rank} issues nothing inside of rank.step(...); use at= in place of step="
        return f"the last step of rank {rank} that issues anything is {max(steps)}; use a smaller step="

    def _record_step(self, rank: int, step: int | None, *, operation: bool) -> None:
        """Record that a rank began an operation or a compute in a step, for `explain_unused_fault`."""
        if step is not None:
            self._begun_steps.add((rank, step, operation))


_NOTHING_HAPPENS = Fate()


def _make_disturbances(seed: int, *, in_turns: bool) -> Faults:
    """Return the random disturbances of a seed: delays and speeds; with turns only the order of tasks; none for 0."""
    if seed == 0 or in_turns:
        return Faults(seed=seed, delay=0.0, loss=0.0, death=0.0, slow=0.0, reorder=in_turns)
    # The speed of a rank acts as its priority: a very slow rank runs only when all others are blocked.
    return Faults(seed=seed, loss=0.0, death=0.0, delay_s=1e-3)


def _flip_bit(operation: Operation) -> bool:
    """Flip the second highest bit of the middle element that is sent; return False if no data is sent."""
    if not sends_data(operation) or isinstance(operation.input, Metadata):
        return False
    data = np.array(operation.source)  # a copy: the program's own array may be locked, and must not change
    if not data.size:
        return False
    raw = data.reshape(-1).view(np.uint8)
    # The last byte of an element is the highest one on little-endian machines.
    raw[(data.size // 2 + 1) * data.itemsize - 1 if data.size > 1 else -1] ^= 0x40
    operation.source = data
    return True


def _ignore(_: Any) -> None:
    """Do nothing: the default of `on_signal` and `on_stop`."""
