"""Facts about a job from which its report is made: the same for traces of overlap and of other tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .bounds import RankStep
from .causes import COMM, COMPUTE, UNKNOWN, WIRE
from .rank import RankReport
from .ranks import LateRank, Traffic
from .report import Advice, mean_costs
from .sites import SiteCost, SiteTime, top_sites


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a job from which its report is made. Step None is a whole recording without steps."""

    origin: str  # the tool that recorded the job
    world_size: int
    step: int | None  # the step that the report shows
    walls_ns: Mapping[int | None, int]  # by step, in order: the time of the longest rank
    costs: Mapping[int | None, Mapping[int, RankStep]]  # by step and rank
    # By cause, the call sites in the shown step, the most expensive first; with profiles, of the rank of `profile`.
    sites: Mapping[str, Sequence[SiteCost]]
    late_by_step: Mapping[int | None, Sequence[LateRank]]  # ranks that others waited for, the most awaited first
    traffic: Sequence[Traffic] = ()  # communication in the shown step, the most exposed first
    profile: RankReport | None = None  # of the rank that lost most time of its own; None for timelines
    communicates: bool = False  # whether the shown step has communication, exposed or hidden
    ours: bool = False  # whether overlap recorded the job: then everything that a rank does is recorded
    hideable_ns: int | None = None  # exposed communication that later computes could hide, averaged over the ranks
    torch: bool = False  # whether the program uses `torch.distributed`
    cut: bool = False  # whether a file was cut off
    first: Advice | None = None  # a change that comes before all others
    unknown: str = ""  # why exposed communication cannot be divided into waiting and wire
    undecided: Sequence[str] = ()  # open questions, as sentences
    notes: Sequence[str] = ()

    @property
    def report(self) -> RankReport:
        """The profile of the rank that lost most time of its own; not for timelines, which have none."""
        assert self.profile is not None, "rules of profiles are not for timelines"
        return self.profile

    @property
    def shown_ranks(self) -> Sequence[RankStep]:
        """The shown step of each rank."""
        return list(self.costs[self.step].values())

    def mean_costs_of(self, step: int | None) -> Mapping[str, int]:
        """Return the time of each cause in a step, in nanoseconds, averaged over the ranks."""
        return mean_costs([rank.costs_ns for rank in self.costs[step].values()])

    @property
    def mean_ns(self) -> Mapping[str, int]:
        """Time of each cause in the shown step, in nanoseconds, averaged over the ranks."""
        return self.mean_costs_of(self.step)

    @property
    def step_ns(self) -> int:
        """Length of the shown step in nanoseconds, averaged over the ranks: its times of all causes together."""
        return sum(self.mean_ns.values())

    @property
    def late_ranks(self) -> Sequence[LateRank]:
        """Ranks that others waited for in the shown step, the most awaited first."""
        return self.late_by_step[self.step]

    def site_times(self, cause: str) -> list[SiteTime]:
        """Return the most expensive call sites of a cause in the shown step; [] for unrecorded time.

        Profiles have many call sites: those of one operator, or for computes of one function, are added up.
        """
        if cause == UNKNOWN:
            return []
        by: Literal["operator", "function", "site"] = "function" if cause == COMPUTE else "operator"
        # Communication has one call site for each operator and line already.
        in_profile = self.profile is not None and cause not in (COMM, WIRE)
        return top_sites(self.sites.get(cause, ()), self.step_ns, by=by if in_profile else "site")

    def cost_ns(self, *names: str) -> int:
        """Return the time of some causes (`names`) together in the shown step, averaged over the ranks."""
        return sum(self.mean_ns.get(cause, 0) for cause in names)
