"""Reports: one sentence on a job, its causes and advice, as an object, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import UsageError

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

SCHEMA = "overlap.why"
SCHEMA_VERSION = 1
"""Version of `as_dict`. It rises when a field changes its meaning or is removed; fields may be added without that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Time of the shown step that is spent for one reason, averaged over the ranks."""

    cause: str  # a key of `causes.WORDING`
    text: str  # the cause in words
    duration_ns: int
    share: float  # of the step, from 0 to 1
    places: tuple[str, ...] = ()  # call sites, the most expensive first, with their times


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change to the program. A gain is the time by which a step gets shorter if the whole cause is gone."""

    cause: str  # a key of `causes.WORDING`
    change: str
    place: str  # the call site; "" if unknown
    evidence: str
    gain_least_ns: int | None = None  # of profiles: the smallest gain over the recorded steps, if the rest stays
    gain_most_ns: int | None = None  # the same for the largest gain; of timelines, the upper bound
    gain_ns: int | None = None  # of timelines: the gain of the shown step, if the rest stays
    gain_text: str = ""  # the gain as text, or why it is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The reason why a job is stuck; later versions may add fields."""

    sentence: str
    verdict: str  # kind of the verdict, a value of `waits.judge.Kind`
    ranks: Sequence[int] = ()  # the ranks that the sentence blames
    missing: Sequence[int] = ()  # ranks without a record
    # Operations of the sentence; each has the keys "rank", "operation", "line" and "state".
    operations: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    page: Sequence[str] = ()  # lines: the job, the sentence, notes, and a table of the ranks
    also: Sequence[Hang] = ()  # with flight records and dumps together, the verdict on each kind of files
    schema: str = "overlap.hang"
    version: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """The reason why a job is slow, which `overlap.why` returns."""

    verdict: str  # one sentence
    origin: str  # the tool that recorded the job
    ranks: tuple[int, ...] = ()
    world_size: int = 0
    step: int | None = None  # the step that is shown; None for the whole recording
    step_ns: int = 0  # length of the shown step on its longest rank
    steps_ns: Mapping[str, int] = field(default_factory=dict)  # the same by step; key "all" for a run without steps
    causes: tuple[Cause, ...] = ()  # of the shown step, the largest first; they add up to its mean over the ranks
    advice: tuple[Advice, ...] = ()  # the best first
    undecided: tuple[str, ...] = ()  # open questions, as sentences
    notes: tuple[str, ...] = ()
    traffic: tuple[Mapping[str, Any], ...] = ()  # communication of the shown step, with the fields of `ranks.Traffic`
    costs: tuple[tuple[int, int | None, str, int], ...] = field(default=(), repr=False)  # (rank, step, cause, ns)
    hang: Hang | None = None  # the verdict, if the job is stuck

    def __str__(self) -> str:
        lines: list[str] = import_module(".page", __package__).page_lines(self)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(str(self))}</pre>'

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: `schema`, `schema_version`, and all fields; times are integers of nanoseconds."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **fields}

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each rank, step and cause: `rank`, `step`, `cause`, `duration_ns`.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise UsageError("why: to_pandas needs pandas: pip install pandas") from error
        return DataFrame(self.costs, columns=["rank", "step", "cause", "duration_ns"])

    def cost_ns(self, cause: str) -> int:
        """Return the nanoseconds of a cause in the shown step, averaged over the ranks; 0 if it has none."""
        return next((each.duration_ns for each in self.causes if each.cause == cause), 0)

    def per_step(self, cause: str | None = None) -> dict[int | None, float]:
        """Return, by step, the nanoseconds of a cause averaged over the ranks; without a cause, the mean length."""
        sums: dict[int | None, float] = {}
        ranks: dict[int | None, set[int]] = {}
        for rank, step, name, ns in self.costs:
            ranks.setdefault(step, set()).add(rank)
            sums[step] = sums.get(step, 0) + (ns if cause in (None, name) else 0)
        return {step: ns / len(ranks[step]) for step, ns in sums.items()}


def from_json(data: bytes | str) -> Why:
    """Parse the output of `overlap why --json`, also of older versions.

    Raises:
        UsageError: The data is something else, is damaged, or is of a newer version.
    """
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise UsageError(f"why: not JSON: {error}; name a file of `overlap why --json`") from error
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise UsageError(
            f"why: not a report: it has no field 'schema' that is {SCHEMA!r}; name a file of `overlap why --json`"
        )
    version = fields.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise UsageError(
            f"why: written by a newer version (format {version}; this one reads up to {SCHEMA_VERSION}); update overlap"
        )
    try:
        # `convert` ignores fields that this version does not know.
        return msgspec.convert(fields, Why)
    except msgspec.ValidationError as error:
        raise UsageError(f"why: damaged report: {error}; write it again with `overlap why --json`") from error


def median_length_step(steps_ns: Mapping[int | None, int]) -> int | None:
    """Return the key of the median length; of two in the middle, the shorter. Key None is a run without steps."""
    order = sorted(steps_ns, key=lambda step: (steps_ns[step], -1 if step is None else step))
    return order[(len(order) - 1) // 2]


def mean_costs(costs_ns: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Average the nanoseconds of each cause over the ranks, rounded down, so their sum may lack some nanoseconds."""
    names = sorted({name for costs in costs_ns for name in costs})
    return {name: sum(costs.get(name, 0) for costs in costs_ns) // max(len(costs_ns), 1) for name in names}
