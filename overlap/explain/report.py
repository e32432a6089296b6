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
"""Version of `as_dict`; it rises when a field changes its meaning or goes. Fields may be added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Time of the shown step, mean of the ranks, that is spent for one reason."""

    cause: str  # a key of `causes.WORDING`
    text: str
    duration_ns: int
    share: float  # of the step, from 0 to 1
    places: tuple[str, ...] = ()  # call sites, the most expensive first, with their times


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change to the program."""

    cause: str
    change: str
    place: str  # the call site
    evidence: str
    gain_least_ns: int | None = None  # bounds of what the step gets shorter by, if all of the cause goes; over steps
    gain_most_ns: int | None = None
    gain_ns: int | None = None  # what one step gets shorter by if the rest stays; of timelines
    gain_text: str = ""  # the bounds as text, or why there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The reason why a job is stuck; later versions add fields."""

    sentence: str
    verdict: str  # kind of the verdict, see `waits.judge`
    ranks: Sequence[int] = ()  # the ranks that the sentence blames
    missing: Sequence[int] = ()  # ranks without a record
    operations: Sequence[Mapping[str, Any]] = ()  # those of the sentence: "rank", "operation", "line", "state"
    notes: Sequence[str] = ()
    page: Sequence[str] = ()  # lines: the job, the sentence, notes, and a table of the ranks
    also: Sequence[Hang] = ()  # verdicts on files of two kinds
    schema: str = "overlap.hang"
    version: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """The reason why a job is slow, which `overlap.why` returns."""

    verdict: str
    origin: str
    ranks: tuple[int, ...] = ()
    world_size: int = 0
    step: int | None = None  # the shown step, the median one by its longest rank; None for the whole recording
    step_ns: int = 0
    steps_ns: Mapping[str, int] = field(default_factory=dict)  # the longest rank's time of each step
    causes: tuple[Cause, ...] = ()  # they add up to the mean of the ranks' steps
    advice: tuple[Advice, ...] = ()
    undecided: tuple[str, ...] = ()  # what cannot be told, and why
    notes: tuple[str, ...] = ()
    traffic: tuple[Mapping[str, Any], ...] = ()
    costs: tuple[tuple[int, int | None, str, int], ...] = field(default=(), repr=False)
    hang: Hang | None = None  # of a job that is stuck

    def __str__(self) -> str:
        lines: list[str] = import_module(".page", __package__).page_lines(self)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(str(self))}</pre>'

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: `schema`, `schema_version`, and the fields; times are integers of nanoseconds."""
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
        """Return the time of a cause in the shown step, mean of the ranks."""
        return next((each.duration_ns for each in self.causes if each.cause == cause), 0)

    def per_step(self, cause: str | None = None) -> dict[int | None, float]:
        """Return for each step the time of a cause, mean of its ranks; None: the length of the step."""
        sums: dict[int | None, float] = {}
        ranks: dict[int | None, set[int]] = {}
        for rank, step, name, ns in self.costs:
            ranks.setdefault(step, set()).add(rank)
            sums[step] = sums.get(step, 0) + (ns if cause in (None, name) else 0)
        return {step: ns / len(ranks[step]) for step, ns in sums.items()}


def from_json(data: bytes | str) -> Why:
    """Read the output of `overlap why --json`, also of older versions.

    Raises:
        UsageError: It is something else, or a newer version has written it.
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
        return msgspec.convert(fields, Why)
    except msgspec.ValidationError as error:
        raise UsageError(f"why: damaged report: {error}; write it again") from error


def median_length_step(steps_ns: Mapping[int | None, int]) -> int | None:
    """Return the step of median length; of two, the shorter."""
    order = sorted(steps_ns, key=lambda step: (steps_ns[step], -1 if step is None else step))
    return order[(len(order) - 1) // 2]


def mean_costs(costs_ns: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the means over ranks, by cause, rounded down; their sum is the mean of the sums, less some nanoseconds."""
    names = sorted({name for costs in costs_ns for name in costs})
    return {name: sum(costs.get(name, 0) for costs in costs_ns) // max(len(costs_ns), 1) for name in names}
