"""Facts about a job that its report rests on: the same for traces of ours and of other tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .bounds import RankStep
from .causes import COMM, COMPUTE, UNKNOWN, WIRE
from .pieces import SiteCost
from .rank import RankReport
from .ranks import LateRank, Traffic
from .report import Advice, mean_costs
from .sites import SiteTime, top_sites


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a job that its report rests on."""

    origin: str  # the tool that recorded it
    world_size: int
    step: int | None  # the shown one
    walls_ns: Mapping[int | None, int]  # the longest rank's time of each step, in order
    costs: Mapping[int | None, Mapping[int, RankStep]]  # of each step and rank
    sites: Mapping[str, Sequence[SiteCost]]  # of each cause in the shown step; of profiles, those of `profile`
    last: Mapping[int | None, Sequence[LateRank]]  # ranks that others waited for in these steps, most awaited first
    traffic: Sequence[Traffic] = ()
    profile: RankReport | None = None  # of the rank that lost most by itself; None for timelines
    communicates: bool = False  # whether the shown step has operations, exposed or not
    ours: bool = False  # whether our own recorder recorded it, which records all
    torch: bool = False  # whether it is a program of `torch.distributed`
    cut: bool = False  # whether a file was cut off
    first: Advice | None = None  # what is to be repaired before anything else
    unknown: str = ""  # why exposed communication cannot be divided into waiting and wire
    undecided: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def report(self) -> RankReport:
        """The profile of the rank that lost most by itself."""
        assert self.profile is not None, "rules of profiles are not for timelines"
        return self.profile

    @property
    def shown(self) -> Sequence[RankStep]:
        """The shown step of each rank."""
        return list(self.costs[self.step].values())

    def mean_of(self, step: int | None) -> Mapping[str, int]:
        """Return the causes of a step, means of the ranks."""
        return mean_costs([rank.costs_ns for rank in self.costs[step].values()])

    @property
    def mean_ns(self) -> Mapping[str, int]:
        """Causes of the shown step, means of the ranks."""
        return self.mean_of(self.step)

    @property
    def step_ns(self) -> int:
        """Length of the shown step: the sum of its causes, mean of the ranks, in nanoseconds."""
        return sum(self.mean_ns.values())

    @property
    def late(self) -> Sequence[LateRank]:
        """Ranks that others waited for in the shown step, the most awaited first."""
        return self.last[self.step]

    def site_times(self, cause: str) -> list[SiteTime]:
        """Return the most expensive call sites of a cause in the shown step; none for time nothing is recorded of."""
        if cause == UNKNOWN:
            return []
        by: Literal["operator", "function", "site"] = "function" if cause == COMPUTE else "operator"
        in_profile = self.profile is not None and cause not in (COMM, WIRE)
        return top_sites(self.sites.get(cause, ()), self.step_ns, by=by if in_profile else "site")

    def cost_ns(self, *names: str) -> int:
        """Return the time of some causes in the shown step, mean of the ranks."""
        return sum(self.mean_ns.get(cause, 0) for cause in names)
