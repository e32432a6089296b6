"""Call sites in a program: operator, module and Python function around an instant of a thread."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..timeline.columnar import run_starts
from ..timeline.files.profile import NOTE, OPERATOR, PYTHON, Int64s, RankProfile
from ..timeline.files.windows import Rows, is_outermost
from ..units import format_ns

BACKWARD = "backward"
"""Phase of operators of the backward pass; their call sites are those of their forward."""
_DEPTH, _PRIME = 200, np.uint64(0x100000001B3)
MAX_SITES = 3
"""Call sites of a cause that are named."""
_NAME = 80
"""Characters of an operator, module or note that are shown."""
_DUNDER = re.compile(r"^__(?!init__|next__|iter__|getitem__)\w+__$|^<")
_FRAME = re.compile(r"^(?P<path>[^()]+\.py)\((?P<line>\d+)\): (?P<name>.+)$")
_LIBRARY = re.compile(r"(^|/)(torch|torchvision|numpy|triton|importlib|<frozen)(/|$)|^<|^threading\.py|/lib/python3")
_MAIN_OPERATOR_SHARE = 0.9
"""Part of the time of a call site from which on it counts as one operator's."""
_INSTANCE = re.compile(r"_\d+$")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function: ")
_NOT_A_SITE = re.compile(r"^(ProfilerStep#|PyTorch Profiler|enumerate\(DataLoader\)|gloo:|overlap:|nccl:)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """Call site in a program; a part that was not recorded is ""."""

    operator: str = ""  # the outermost operator
    module: str = ""  # the innermost module
    frames: tuple[str, ...] = ()  # "file.py:line (def function)" of the program, outermost first
    phase: str = ""  # "backward", or a note of the user around it

    @property
    def frame(self) -> str:
        """Innermost function of the program, as "file.py:line (def function)"; "" without one."""
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


def common_site(sites: Sequence[tuple[CallSite, int]]) -> CallSite:
    """Return the operator, module, function and phase that hold for more than half of the time of some call sites."""
    total_ns = sum(ns for _, ns in sites)

    def prevailing(texts: Iterable[tuple[str, int]]) -> str:
        """Return the text that has more than half of the time; "" if none has."""
        times: dict[str, int] = {}
        for text, ns in texts:
            times[text] = times.get(text, 0) + ns
        found = [text for text, ns in times.items() if 2 * ns > total_ns]
        return found[-1] if found else ""

    modules = [(site.module, ns) for site, ns in sites]
    return CallSite(
        operator=prevailing((site.operator, ns) for site, ns in sites),
        module=prevailing(modules) or prevailing((_INSTANCE.sub("", name), ns) for name, ns in modules),
        frames=tuple(
            filter(None, [prevailing((frame, ns) for site, ns in sites for frame in dict.fromkeys(site.frames))])
        ),
        phase=prevailing((site.phase, ns) for site, ns in sites),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTime:
    """Time at one call site of a program."""

    site: str
    duration_ns: int
    operators: str = ""  # the most expensive ones, if no operator alone has nearly all of the time

    def text(self, where: str = "") -> str:
        """Return text such as "aten::add (9 ms on rank 1: add, mul)"; `where` is the part " on rank 1"."""
        return f"{self.site} ({format_ns(self.duration_ns)}{where}{self.operators and ': '}{self.operators})"


def top_sites(
    sites: Sequence[tuple[CallSite, int, int]], step_ns: float, *, by: Literal["operator", "function", "site"]
) -> list[SiteTime]:
    """Return the most expensive operators, functions or call sites, at most `MAX_SITES`.

    An operator has the module and function that have most of its time. Functions that are not recorded are modules.
    """
    groups: dict[str, list[tuple[CallSite, int]]] = {}
    for site, ns, _ in sites:
        if str(site):
            parts = (site.operator, site.module, site.frame, site.phase)
            name = next(filter(None, (site.frame, site.module, *parts) if by == "function" else parts))
            key = str(site) if by == "site" else f"{site.phase == BACKWARD}{name}"
            groups.setdefault(key, []).append((site, ns))
    sums = sorted(
        ((sum(ns for _, ns in group), common_site(group), group) for group in groups.values()),
        key=lambda each: -each[0],
    )
    return [
        SiteTime(
            site=_describe_group(site, group), duration_ns=ns,
            operators=list_operators(group) if _has_several(group) else "",
        )
        for ns, site, group in sums[:MAX_SITES] if ns >= 0.01 * step_ns
    ]  # fmt: skip


def _has_several(sites: Sequence[tuple[CallSite, int]]) -> bool:
    """Whether no operator alone has nearly all (`_MAIN_OPERATOR_SHARE`) of the time of some call sites."""
    sums: Counter[str] = Counter()
    for site, ns in sites:
        sums[site.operator] += ns
    return max(sums.values()) < _MAIN_OPERATOR_SHARE * sum(sums.values())


def _describe_group(site: CallSite, group: Sequence[tuple[CallSite, int]]) -> str:
    """Return the common call site of a group as text, without the operator if a function has several."""
    if site.frame and _has_several(group):
        return str(replace(site, operator="", module="" if site.operator else site.module))
    return str(site)


def list_operators(sites: Sequence[tuple[CallSite, int]]) -> str:
    """Return at most four operators, the most expensive first, as text; "" if none has a name."""
    sums: Counter[str] = Counter()
    for site, ns in sites:
        sums[site.operator] += ns
    return ", ".join(name for name, _ in sums.most_common(4) if name)


class CallSites:
    """Call sites of instants of the threads of a profile."""

    def __init__(self, profile: RankProfile) -> None:
        self._profile = profile
        self._rows = profile.rows(OPERATOR, NOTE, PYTHON)
        self._backward = profile.names_matching(_BACKWARD)
        self._no_site = profile.names_matching(_NOT_A_SITE)
        self._forward = self._forward_rows()
        self._levels: dict[int, list[Rows]] = {}
        self.has_python: bool = bool((profile.kind[self._rows] == PYTHON).any())

    def _forward_rows(self) -> dict[int, int]:
        """Return the row of the last forward operator of each sequence number: operators without a node share it."""
        profile = self._profile
        forwards: dict[int, int] = {}
        rows = self._rows[(profile.sequence[self._rows] >= 0) & (profile.kind[self._rows] == OPERATOR)]
        backward = re.compile(r"Backward\d*$|^autograd::")
        is_backward = profile.names_matching(backward)
        for row in rows[~is_backward[profile.name[rows]]].tolist():
            forwards[int(profile.sequence[row])] = row
        return forwards

    def of_rows(self, rows: Rows) -> list[CallSite]:
        """Return the call site of each of some rows at its start; an empty one for row -1. See `find_numbered`."""
        threads = np.where(rows >= 0, self._profile.thread[rows], -1).astype(np.int32)
        sites, number = self.find_numbered(threads, self._profile.start_ns[rows])
        return [sites[each] for each in number.tolist()]

    def find_numbered(self, threads: NDArray[np.int32], instants_ns: Int64s) -> tuple[list[CallSite], NDArray[np.intp]]:
        """Return distinct call sites, and for each instant of a thread the index of its call site among them.

        A backward operator has the call site of its forward operator. Thread -1 has an empty call site.
        """
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
        """Return a hash of the names around each instant, and the row of the outermost backward operator, or -1."""
        # A rolling hash of names, extended level by level from the outermost.
        keys, backward = threads.astype(np.uint64), np.full(len(threads), -1, np.intp)
        for query, row in self._rows_around(threads, instants_ns):
            keys[query] = keys[query] * _PRIME + self._profile.name[row].astype(np.uint64) + np.uint64(1)
            is_backward = self._backward[self._profile.name[row]] & (backward[query] < 0)
            backward[query[is_backward]] = row[is_backward]
        return keys, backward

    def _rows_around(self, threads: NDArray[np.int32], instants_ns: Int64s) -> Iterator[tuple[Rows, Rows]]:
        """Yield the rows around instants of threads, the outermost first: some instants, and a row for each of them."""
        profile = self._profile
        for thread in np.unique(threads).tolist():
            queries = np.flatnonzero(threads == thread)
            at_ns = instants_ns[queries]
            for outer in self._nested_levels(thread):
                at = np.searchsorted(profile.start_ns[outer], at_ns, "right") - 1
                inside = (at >= 0) & (at_ns < profile.end_ns[outer[at]]) & ~self._no_site[profile.name[outer[at]]]
                yield queries[inside], outer[at[inside]]

    def _nested_levels(self, thread: int) -> list[Rows]:
        """Return the rows of a thread in levels, the outermost first; rows of one level do not overlap."""
        if thread not in self._levels:
            profile, rows = self._profile, self._rows[self._profile.thread[self._rows] == thread]
            rows = rows[profile.start_ns[rows] < profile.end_ns[rows]]
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
        """Return the rows that are around each instant, the outermost first."""
        chains: list[list[int]] = [[] for _ in instants_ns]
        for queries, rows in self._rows_around(threads, instants_ns):
            for at, row in zip(queries.tolist(), rows.tolist(), strict=True):
                chains[at].append(row)
        return chains

    def _build_site(self, chain: list[int]) -> CallSite:
        """Return the call site that a chain of rows, the outermost first, describes."""
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
            elif kind == PYTHON and (match := _program_frame(profile.names[profile.name[row]])):
                frames.append(f"{match['path']}:{match['line']} (def {match['name']})")
        return CallSite(operator=operator, module=module, frames=tuple(frames), phase=phase)


@lru_cache(maxsize=1 << 16)
def _program_frame(name: str) -> re.Match[str] | None:
    """Return the parts of the name of a Python function of the program; None for a library's, or a special method's."""
    match = _FRAME.match(name)
    return match if match and not _is_library(match["path"]) and not _DUNDER.match(match["name"]) else None


def _is_library(path: str) -> bool:
    first = path.split("/", 1)[0].removesuffix(".py")
    return bool(_LIBRARY.search(path)) or first in sys.stdlib_module_names
