"""Costs of computes in virtual time: as declared, by the device's roofline, or as recorded in a real run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from statistics import median_low
from typing import Literal, SupportsFloat, TypeAlias

from topology import Cluster

from ..errors import UsageError
from ..notice import notify
from ..timeline.spans import Timeline
from ..units import format_s

ComputeClass: TypeAlias = Literal["flops", "memory", "seconds"]
"""Why a compute takes its time: the peak of operations, the memory's bandwidth, or a given or recorded time."""

# Names of dtypes in the machines' files, by their names in numpy.
_SHORT_DTYPES = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "tf32": "tf32",
    "float8_e4m3": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float8_e3m4": "fp8",
}  # fmt: skip


def short_dtype(dtype: str) -> str:
    """Return the name of a dtype in machines' files, such as "bf16" for "bfloat16"; other names are returned as is."""
    return _SHORT_DTYPES.get(dtype, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Roofline model of one rank's core: a compute takes the time of its operations or of its bytes, the longer one.

    Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52, 2009.
    """

    flops_per_s: float | None  # peak of the core for the dtype; None if unknown
    bytes_per_s: float | None  # bandwidth of the core's share of the memory; None if unknown
    dtype: str  # dtype of the peak
    device: str  # name of the device, for messages
    efficiency: float = 1.0  # share of the peak that computes reach
    memory_efficiency: float = 1.0  # share of the bandwidth that computes reach

    def __post_init__(self) -> None:
        for name in ("efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name}: expected more than 0, at most 1, got {getattr(self, name)!r}")

    @classmethod
    def of(
        cls, cluster: Cluster, *, dtype: str = "bfloat16", efficiency: float = 1.0, memory_efficiency: float = 1.0
    ) -> Roofline:
        """Return the roofline of a rank of a cluster, from the published figures of the machine.

        Args:
            cluster: The machine.
            dtype: Dtype of the computes, with its name in numpy ("bfloat16") or in the machine's file ("bf16").
            efficiency: Share of the peak that computes reach.
            memory_efficiency: Share of the bandwidth that computes reach.

        Raises:
            UsageError: The machine has peaks for other dtypes, but none for this one.
        """
        peaks, short_name = dict(cluster.machine.chip.flops_per_s), short_dtype(dtype)
        if peaks and short_name not in peaks:
            known = ", ".join(name for name in _SHORT_DTYPES if _SHORT_DTYPES[name] in peaks)
            raise UsageError(f"dtype: no peak is known for {dtype!r} on {cluster.machine.chip.name}; known are {known}")
        return cls(
            flops_per_s=cluster.flops_per_s(short_name) if peaks else None,
            bytes_per_s=cluster.rank_memory_bytes_per_s(),
            dtype=dtype,
            device=cluster.machine.chip.name,
            efficiency=efficiency,
            memory_efficiency=memory_efficiency,
        )

    def time_s(self, name: str, *, flops: float, bytes_moved: float) -> tuple[float, ComputeClass]:
        """Return the time of a compute in seconds, and which limit decides it: "flops" or "memory".

        Args:
            name: Name of the compute, for the error.
            flops: Number of floating-point operations.
            bytes_moved: Bytes that the compute reads and writes.

        Raises:
            UsageError: The machine's rate for one of the two is unknown; the error names the compute.
        """
        counted_s = self._time_at_rate_s("flops", name, flops, self.flops_per_s, self.efficiency)
        moved_s = self._time_at_rate_s("bytes_moved", name, bytes_moved, self.bytes_per_s, self.memory_efficiency)
        return (counted_s, "flops") if counted_s >= moved_s else (moved_s, "memory")

    def _time_at_rate_s(self, argument: str, name: str, amount: float, rate: float | None, efficiency: float) -> float:
        """Return the time of an amount at a share of a rate; refuse an amount whose rate is unknown. 0 takes no time.

        `argument` is the name of the amount, `name` that of the compute, both for the error.
        """
        if not amount:
            return 0.0
        if rate is None:
            raise UsageError(
                f"{argument}: compute '{name}' states {amount:g}, but {self.device} has no known rate; state seconds=, "
                'or name a machine that has one: cluster="trn2.48xlarge"'
            )
        return amount / (rate * efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The times of computes in an earlier run, by name."""

    # By name of a compute, the median of its times on all ranks; of an even number of times, the lower middle one.
    median_ns: Mapping[str, int]
    source: str = "a timeline"  # origin of the profile, for messages

    @classmethod
    def of(cls, timeline: Timeline, *, source: str = "a timeline") -> Profile:
        """Return the profile of the computes of a timeline.

        Args:
            timeline: The timeline.
            source: Origin of the timeline, for messages.

        Raises:
            UsageError: The timeline has no computes.
        """
        spans: dict[str, list[int]] = {}
        for span in timeline.spans:
            if span.kind == "compute":
                spans.setdefault(span.name, []).append(span.duration_ns)
        if not spans:
            raise UsageError(f"profile: no compute in {source}; name a trace that has some")
        return cls(
            median_ns={name: median_low(each) for name, each in sorted(spans.items())},
            source=source,
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Return the profile of the computes in a trace file.

        Args:
            path: A trace file of a real run.

        Raises:
            UsageError: The file cannot be read, or has no computes.
        """
        from ..timeline.files.reading import read_trace  # here, because few runs have a profile

        return cls.of(read_trace(path), source=os.fspath(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCosts:
    """Costs of the computes of a run: from a profile if it has the compute's name, else as the compute states them."""

    roofline: Roofline  # price of operations and bytes
    profile: Profile | None = None  # profile of an earlier run, if there is one
    unknown_s: float | None = None  # cost of a compute for which no cost is known; None: it is refused

    def duration_ns(
        self,
        name: str,
        *,
        seconds: float | None = None,
        flops: float | None = None,
        bytes_moved: float | None = None,
    ) -> tuple[int, ComputeClass]:
        """Return the time of a compute in nanoseconds, and its class, which says what decided the time.

        A time in `profile` counts first, then `seconds`, then the roofline for `flops` and `bytes_moved`. If the
        compute states nothing, it takes `unknown_s`, and that is reported once.

        Args:
            name: Name of the compute.
            seconds: Stated time.
            flops: Stated number of floating-point operations.
            bytes_moved: Stated number of bytes that it reads and writes.

        Raises:
            UsageError: A stated value is invalid, or there is no cost and `unknown_s` is None; names the compute.
        """
        for argument, amount in (("seconds", seconds), ("flops", flops), ("bytes_moved", bytes_moved)):
            if amount is not None and not _is_amount(amount):
                raise UsageError(f"{argument}: compute '{name}' needs a finite number, 0 or more, got {amount!r}")
        if self.profile is not None and name in self.profile.median_ns:
            return self.profile.median_ns[name], "seconds"
        if seconds is not None:
            return round(seconds * 1e9), "seconds"
        if flops is None and bytes_moved is None:
            if self.unknown_s is None:
                raise UsageError(self._unknown_cost_text(name))
            _report_unknown_costs(self.unknown_s)
            return round(self.unknown_s * 1e9), "seconds"
        time_s, limit = self.roofline.time_s(name, flops=flops or 0.0, bytes_moved=bytes_moved or 0.0)
        return round(time_s * 1e9), limit

    def _unknown_cost_text(self, name: str) -> str:
        """Return the message for a compute without a cost, which names the ways to give one."""
        known_names = ""
        if self.profile is not None:
            known_names = f"; the profile {self.profile.source} knows {', '.join(self.profile.median_ns)}"
        amounts = "flops= and bytes_moved=, or " if self.roofline.flops_per_s else ""
        return (
            f"seconds: compute '{name}' has no cost on the virtual clock; pass seconds=, or {amounts}"
            "a profile of a real run, as overlap run --trace TRACE writes it: "
            f"clock=overlap.Virtual(profile=TRACE){known_names}"
        )


@cache
def _report_unknown_costs(cost_s: float) -> None:
    """Print, once in a process (because of `cache`), how long computes without a cost take."""
    notify(
        f"computes without a cost take {format_s(cost_s)} on the virtual clock; rank.compute(f, x, seconds=1e-3) "
        "states another, and clock=overlap.Virtual(profile=TRACE) takes that of a recorded run"
    )


def _is_amount(value: object) -> bool:
    """Whether a value is a finite number from 0; a bool is no number here."""
    return isinstance(value, SupportsFloat) and not isinstance(value, bool) and 0 <= float(value) < inf
