"""Call sites in a program: operator, module and Python function around an instant of a thread."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..timeline.columnar import Int64s, Rows, run_starts
from ..timeline.files.profile import NOTE, OPERATOR, PYTHON, RankProfile
from ..timeline.files.windows import is_outermost
from ..units import format_ns

BACKWARD = "backward"
"""Phase of operators of the backward pass; they have the call site of their forward operator."""
_DEPTH, _PRIME = 200, np.uint64(0x100000001B3)
MAX_SITES = 3
"""Most call sites that a report names for a cause."""
_NAME = 80
"""Characters of the name of an operator, module or note that are shown."""
_DUNDER = re.compile(r"^__(?!init__|next__|iter__|getitem__)\w+__$|^<")
_FRAME = re.compile(r"^(?P<path>[^()]+\.py)\((?P<line>\d+)\): (?P<name>.+)$")
_LIBRARY = re.compile(r"(^|/)(torch|torchvision|numpy|triton|importlib|<frozen)(/|$)|^<|^threading\.py|/lib/python3")
_MAIN_OPERATOR_SHARE = 0.9
"""If one operator has at least this part of the time of a call site, others there are not listed."""
_INSTANCE = re.compile(r"_\d+$")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function: ")
_IS_BACKWARD = re.compile(r"Backward\d*$|^autograd::")
_NOT_A_SITE = re.compile(r"^(ProfilerStep#|PyTorch Profiler|enumerate\(DataLoader\)|gloo:|overlap:|nccl:)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """Call site in a program, such as "Linear_0, aten::addmm at train.py:41 (def main)"; a part not recorded is ""."""

    operator: str = ""  # the outermost operator
    module: str = ""  # the innermost module
    frames: tuple[str, ...] = ()  # functions of the program, "file.py:line (def function)", the outermost first
    phase: str = ""  # "backward"; for a copy its kinds of memory, "Device -> Pinned"; or a note of the user around it

    @property
    def frame(self) -> str:
        """Innermost function of the program, as "file.py:line (def function)", or "" without one."""
        return self.frames[-1] if self.frames else ""

    def __str__(self) -> str:
        name = self.module or self.operator
        if name and self.phase == BACKWARD:
            name = f"the backward of {name}"
        elif name and "->" in self.phase:  # a copy, between two kinds of memory
            name = f"{self.phase} under {name}"
        note = self.phase if self.phase != BACKWARD and "->" not in self.phase else ""
        parts = [name or note, self.operator if self.module else ""]
        where = self.frame or (note if name else "")
        text = ", ".join(filter(None, parts))
        return f"{text} at {where}" if text and where else text or where


class SiteCost(NamedTuple):
    """Time that was spent at a call site."""

    site: CallSite
    duration_ns: int
    pieces: int  # number of pieces of time


def majority_site(costs: Sequence[SiteCost]) -> CallSite:
    """Return a call site from the operator, module, function and phase that each have more than half of the time.

    A part without such a majority is "".
    """
    total_ns = sum(cost.duration_ns for cost in costs)

    def majority_text(times_ns: Iterable[tuple[str, int]]) -> str:
        """Return the text with more than half of the time, or "". Of several (nested frames), the last is taken."""
        found = [text for text, ns in sum_times_by_name(times_ns).items() if 2 * ns > total_ns]
        return found[-1] if found else ""

    # If no instance of a module, such as "Linear_0", has a majority, their common name "Linear" may have it.
    modules = [(site.module, ns) for site, ns, _ in costs]
    frame = majority_text((frame, ns) for site, ns, _ in costs for frame in dict.fromkeys(site.frames))
    return CallSite(
        operator=majority_text((site.operator, ns) for site, ns, _ in costs),
        module=majority_text(modules) or majority_text((_INSTANCE.sub("", name), ns) for name, ns in modules),
        frames=(frame,) if frame else (),
        phase=majority_text((site.phase, ns) for site, ns, _ in costs),
    )


def sum_times_by_name(times_ns: Iterable[tuple[str, int]]) -> Counter[str]:
    """Return the sum of the times of each name: [("a", 1), ("b", 2), ("a", 3)] gives {"a": 4, "b": 2}."""
    sums_ns: Counter[str] = Counter()
    for name, ns in times_ns:
        sums_ns[name] += ns
    return sums_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTime:
    """Time at one call site of a program."""

    site: str
    duration_ns: int
    operators: str = ""  # the most expensive operators, if no single one has nearly all of the time

    def text(self, where: str = "") -> str:
        """Return text such as "train.py:41 (9 ms on rank 1: add, mul)"; `where` is the part " on rank 1"."""
        return f"{self.site} ({format_ns(self.duration_ns)}{where}{self.operators and ': '}{self.operators})"


def top_sites(
    costs: Sequence[SiteCost], step_ns: float, *, by: Literal["operator", "function", "site"]
) -> list[SiteTime]:
    """Return the most expensive operators, functions or call sites, at most `MAX_SITES`.

    A sum for an operator or function is shown with the module and line that have most of its time. Sums below a
    hundredth of the step are left out.

    Args:
        costs: Time at each call site.
        step_ns: Length of the step.
        by: What is added up: all call sites of one operator, all of one function (or module, if functions are not
            recorded), or each call site by itself.
    """
    groups: dict[str, list[SiteCost]] = {}
    for cost in costs:
        site = cost.site
        if str(site):
            parts = (site.operator, site.module, site.frame, site.phase)
            name = next(filter(None, (site.frame, site.module, *parts) if by == "function" else parts))
            key = str(site) if by == "site" else f"{site.phase == BACKWARD}{name}"
            groups.setdefault(key, []).append(cost)
    times = [_sum_site_group(group) for group in groups.values()]
    times.sort(key=lambda time: -time.duration_ns)
    return [time for time in times[:MAX_SITES] if time.duration_ns >= 0.01 * step_ns]


def _sum_site_group(group: Sequence[SiteCost]) -> SiteTime:
    """Add up the time of call sites, under their common call site.

    If no single operator has nearly all of the time (`_MAIN_OPERATOR_SHARE`), the most expensive ones are listed.
    """
    site, operator_times_ns = majority_site(group), operator_times(group)
    total_ns = operator_times_ns.total()
    if max(operator_times_ns.values()) >= _MAIN_OPERATOR_SHARE * total_ns:
        return SiteTime(site=str(site), duration_ns=total_ns)
    if site.frame:
        # Several operators at one function: the call site is the function, without one operator and its module.
        site = replace(site, operator="", module="" if site.operator else site.module)
    return SiteTime(site=str(site), duration_ns=total_ns, operators=list_operators(group))


def operator_times(costs: Sequence[SiteCost]) -> Counter[str]:
    """Return the nanoseconds of each operator."""
    return sum_times_by_name((cost.site.operator, cost.duration_ns) for cost in costs)


def list_operators(costs: Sequence[SiteCost]) -> str:
    """Return the names of the most expensive operators, at most four, such as "aten::add, aten::mul"; "" if none."""
    return ", ".join(name for name, _ in operator_times(costs).most_common(4) if name)


class CallSites:
    """Finds the call site of an instant of a thread in a profile: the events that are around the instant.

    Attributes:
        has_python: Whether Python functions are recorded.

    Args:
        profile: The events.
    """

    def __init__(self, profile: RankProfile) -> None:
        self._profile = profile
        self._rows = profile.rows_of_kinds(OPERATOR, NOTE, PYTHON)
        self._backward = profile.names_matching(_BACKWARD)
        self._no_site = profile.names_matching(_NOT_A_SITE)
        self._forward = self._forward_rows()
        self._levels: dict[int, list[Rows]] = {}
        self.has_python: bool = bool((profile.kind[self._rows] == PYTHON).any())

    def _forward_rows(self) -> dict[int, int]:
        """Return, by sequence number of autograd, the row of the forward operator.

        Operators without a node of their own share the number of the next one: the last one has the node.
        """
        profile = self._profile
        operators = profile.rows_of_kinds(OPERATOR)
        operators = operators[(profile.sequence[operators] >= 0) & ~profile.name_matches(operators, _IS_BACKWARD)]
        return dict(zip(profile.sequence[operators].tolist(), operators.tolist(), strict=True))

    def find_for_rows(self, rows: Rows) -> list[CallSite]:
        """Return the call site at the start of each event, by its row in the profile; an empty one for row -1."""
        threads = np.where(rows >= 0, self._profile.thread[rows], -1).astype(np.int32)
        sites, number = self.find_with_index(threads, self._profile.start_ns[rows])
        return [sites[each] for each in number.tolist()]

    def find_with_index(
        self, threads: NDArray[np.int32], instants_ns: Int64s
    ) -> tuple[list[CallSite], NDArray[np.intp]]:
        """Return distinct call sites, and for each instant of a thread the index of its call site among them.

        A backward operator has the call site of its forward operator. Thread -1 has an empty call site.
        """
        # Instants with the same names around them have equal keys: each key's call site is built once.
        keys, backward = self._chain_keys(threads, instants_ns)
        forward = np.full(len(threads), -1, np.intp)
        at = np.flatnonzero(backward >= 0)
        forward[at] = [self._forward.get(number, -1) for number in self._profile.sequence[backward[at]].tolist()]
        # The key of a backward operator also covers its forward operator, so that equal keys have one call site.
        at = np.flatnonzero(forward >= 0)
        thread, start_ns = self._profile.thread[forward[at]], self._profile.start_ns[forward[at]]
        keys[at] += _PRIME * self._chain_keys(thread, start_ns)[0]
        _, first, number = np.unique(keys, return_index=True, return_inverse=True)
        forward = forward[first]
        is_backward = forward >= 0
        rows = self._enclosing_rows(
            np.where(is_backward, self._profile.thread[forward], threads[first]),
            np.where(is_backward, self._profile.start_ns[forward], instants_ns[first]),
        )
        sites = [self._build_site(chain) for chain in rows]
        return [
            replace(site, phase=BACKWARD) if is_other else site
            for site, is_other in zip(sites, is_backward.tolist(), strict=True)
        ], number

    def _chain_keys(
        self, threads: NDArray[np.int32], instants_ns: Int64s
    ) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        """Return, for each instant, a hash of the names of the events around it, and the outermost backward operator.

        The operator is a row of the profile, or -1 without one.
        """
        # A rolling hash of names, extended level by level from the outermost.
        keys, backward = threads.astype(np.uint64), np.full(len(threads), -1, np.intp)
        for query, row in self._rows_around(threads, instants_ns):
            keys[query] = keys[query] * _PRIME + self._profile.name[row].astype(np.uint64) + np.uint64(1)
            is_backward = self._backward[self._profile.name[row]] & (backward[query] < 0)
            backward[query[is_backward]] = row[is_backward]
        return keys, backward

    def _rows_around(self, threads: NDArray[np.int32], instants_ns: Int64s) -> Iterator[tuple[Rows, Rows]]:
        """Yield, by level, outermost first, the indexes of instants with an event around them, and its row for each."""
        profile = self._profile
        for thread in np.unique(threads).tolist():
            queries = np.flatnonzero(threads == thread)
            at_ns = instants_ns[queries]
            for outer in self._nested_levels(thread):
                at = np.searchsorted(profile.start_ns[outer], at_ns, "right") - 1
                inside = (at >= 0) & (at_ns < profile.end_ns[outer[at]]) & ~self._no_site[profile.name[outer[at]]]
                yield queries[inside], outer[at[inside]]

    def _nested_levels(self, thread: int) -> list[Rows]:
        """Return the rows of a thread by depth of nesting, the outermost first; rows of one level do not overlap."""
        if thread not in self._levels:
            profile, rows = self._profile, self._profile.rows_on_thread(self._rows, thread)
            rows = rows[profile.start_ns[rows] < profile.end_ns[rows]]
            # Depth of a row: the rows that began before it, less those that have ended by its start.
            depth = np.arange(len(rows)) - np.searchsorted(
                np.sort(profile.end_ns[rows]), profile.start_ns[rows], "right"
            )
            by_depth = np.argsort(depth, kind="stable")
            levels: list[Rows] = []
            for level in np.split(rows[by_depth], run_starts(depth[by_depth])[1:]):
                while len(level) and len(levels) < _DEPTH:
                    is_outer = is_outermost(profile, level)  # rows that cross others may share their depth
                    levels.append(level[is_outer])
                    level = level[~is_outer]
            self._levels[thread] = levels
        return self._levels[thread]

    def _enclosing_rows(self, threads: NDArray[np.int32], instants_ns: Int64s) -> list[list[int]]:
        """Return, for each instant, the rows of the events around it, the outermost first."""
        chains: list[list[int]] = [[] for _ in instants_ns]
        for queries, rows in self._rows_around(threads, instants_ns):
            for at, row in zip(queries.tolist(), rows.tolist(), strict=True):
                chains[at].append(row)
        return chains

    def _build_site(self, chain: list[int]) -> CallSite:
        """Return the call site of a chain of nested events, given as rows, the outermost first."""
        profile = self._profile
        operator = module = phase = ""
        frames: list[str] = []
        for row in chain:
            name, kind = profile.names[profile.name[row]][:_NAME], profile.kind[row]
            if kind == OPERATOR and not operator:
                operator = name.removeprefix("autograd::engine::evaluate_function: ")
            elif kind == NOTE:
                phase = name
            elif name.startswith("nn.Module: "):
                module = name.removeprefix("nn.Module: ")
            elif kind == PYTHON and (match := _parse_program_frame(profile.names[profile.name[row]])):
                frames.append(f"{match['path']}:{match['line']} (def {match['name']})")
        return CallSite(operator=operator, module=module, frames=tuple(frames), phase=phase)


@lru_cache(maxsize=1 << 16)
def _parse_program_frame(name: str) -> re.Match[str] | None:
    """Parse "file.py(41): main" into path, line and name; None for functions of libraries and special methods."""
    match = _FRAME.match(name)
    if match is None or _LIBRARY.search(match["path"]) or _DUNDER.match(match["name"]):
        return None
    top_level = match["path"].split("/", 1)[0].removesuffix(".py")
    return None if top_level in sys.stdlib_module_names else match
