"""Imperfections of a modelled cluster: jitter, stragglers, slow wires, and interference with computes.

Random numbers depend on the seed and a name only: each rank has a separate sequence, and whether a wire is slow follows
from the wire's name. So no figure depends on the order in which ranks run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp
from random import Random
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ..collectives.placement import Ints, Placement, Routes, Wires
from ..errors import UsageError

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Imperfections of a cluster; with the defaults it is perfect."""

    seed: int = 0  # seed of all random numbers
    # Variation of computes: each takes exp(jitter * z) times its cost, with z normally distributed. 0.05 is a standard
    # deviation of about 5 %.
    jitter: float = 0.0
    straggler_share: float = 0.0  # share of the ranks that are slow, from 0 to 1; the seed picks them
    stragglers: tuple[int, ...] = ()  # further ranks that are slow, whatever the seed
    straggler_factor: float = 1.0  # computes of a slow rank take this many times as long
    slow_wire_share: float = 0.0  # share of the wires that are slow, from 0 to 1; the seed picks them
    slow_wire_factor: float = 1.0  # share of the bandwidth that a slow wire has left, more than 0 and at most 1

    def __post_init__(self) -> None:
        _check_range("jitter", self.jitter, "0 or more", self.jitter >= 0)
        _check_range("straggler_factor", self.straggler_factor, "1 or more", self.straggler_factor >= 1)
        _check_range(
            "slow_wire_factor", self.slow_wire_factor, "more than 0, at most 1", 0 < self.slow_wire_factor <= 1
        )
        for name in ("straggler_share", "slow_wire_share"):
            share = getattr(self, name)
            _check_range(name, share, "from 0 to 1", 0 <= share <= 1)

    @property
    def calm(self) -> bool:
        """Whether there is no jitter, no straggler and no slow wire."""
        slow_ranks = (self.straggler_share or self.stragglers) and self.straggler_factor > 1
        return not (self.jitter or slow_ranks or (self.slow_wire_share and self.slow_wire_factor < 1))

    def __str__(self) -> str:
        parts = []
        if self.jitter:
            parts.append(f"computes vary by exp({self.jitter:g} z)")
        if self.straggler_factor != 1:
            share = [f"{self.straggler_share:.4g} of the ranks"] if self.straggler_share else []
            ranks = " and ".join([*share, *map("rank {}".format, self.stragglers)])
            parts += [f"{ranks} compute {self.straggler_factor:g} times as long"] if ranks else []
        if self.slow_wire_share and self.slow_wire_factor != 1:
            parts.append(
                f"{self.slow_wire_share:.4g} of the wires have {self.slow_wire_factor:g} of their bandwidth left"
            )
        return "; ".join([*parts, f"seed {self.seed}"]) if parts else "no jitter, no stragglers, no slow wires"

    def jitter_of(self, rank: int) -> Jitter:
        """Return the `Jitter` of a rank's computes, which begins with the first compute."""
        return Jitter(self, rank)

    def is_straggler(self, rank: int) -> bool:
        """Whether a rank computes slowly."""
        return rank in self.stragglers or _random_share(self.seed, f"rank {rank}") < self.straggler_share


def _check_range(name: str, value: float, expected: str, is_valid: bool) -> None:
    """Refuse a value unless `is_valid`; `expected` describes the range, for the error."""
    if not is_valid:  # also for NaN
        raise UsageError(f"{name}: expected {expected}, got {value!r}")


def _random_share(seed: int, name: str) -> float:
    """Return a number in [0, 1) that depends on seed and name only, the same with every version of Python."""
    return Random(f"{seed} {name}").random()


class Jitter:
    """The jitter of one rank's computes, in their order.

    Args:
        conditions: Imperfections of the cluster, with the seed.
        rank: World rank.
    """

    def __init__(self, conditions: Conditions, rank: int) -> None:
        self._draw = Random(f"{conditions.seed} computes of rank {rank}").random
        self._jitter = conditions.jitter
        self._factor = conditions.straggler_factor if conditions.is_straggler(rank) else 1.0

    def next_compute_ns(self, cost_ns: int) -> int:
        """Return the time of the rank's next compute, given its time on a perfect machine; draws a random number."""
        if not self._jitter:
            return cost_ns if self._factor == 1 else round(cost_ns * self._factor)
        # inv_cdf needs a number more than 0 and less than 1. random() may be 0: the last factor keeps 1 - 0 below 1.
        z = _NORMAL.inv_cdf((1 - self._draw()) * (1 - 2**-53))
        return round(cost_ns * self._factor * exp(self._jitter * z))


class SlowWires:
    """The slow wires of one cluster; whether a wire is slow is drawn at its first use.

    Args:
        conditions: Imperfections of the cluster, with the seed.
    """

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._bandwidth_shares: dict[int, float] = {}

    def placement_with_slow_wires(self, placement: Placement) -> Placement:
        """Return a placement whose slow wires have less bandwidth; `placement` itself if no wires are slow."""
        conditions = self._conditions
        if conditions.slow_wire_factor == 1 or not conditions.slow_wire_share:
            return placement
        return _SlowWirePlacement(placement, self)

    def bandwidth_share(self, placement: Placement, wire: int) -> float:
        """Return the share of the bandwidth that a wire has left: `slow_wire_factor` if it is slow, else 1."""
        if wire not in self._bandwidth_shares:
            conditions = self._conditions
            slow = _random_share(conditions.seed, placement.describe(wire)) < conditions.slow_wire_share
            self._bandwidth_shares[wire] = conditions.slow_wire_factor if slow else 1.0
        return self._bandwidth_shares[wire]


class _SlowWirePlacement(Placement):
    """A placement in which slow wires have less bandwidth.

    Args:
        placement: The placement on a perfect cluster.
        slow: The slow wires.
    """

    def __init__(self, placement: Placement, slow: SlowWires) -> None:
        self.size, self.device = placement.size, placement.device
        self.memory_bytes_per_s = placement.memory_bytes_per_s
        self._placement, self._slow = placement, slow
        self._used_wires: set[int] = set()

    def routes(self, src: Ints, dst: Ints, far: NDArray[np.bool_] | None = None) -> Routes:
        """See `Placement.routes`. Records which wires are used, for `wires`."""
        routes = self._placement.routes(src, dst, far)
        self._used_wires.update(np.unique(routes.wire).tolist())
        return routes

    def wires(self) -> Wires:
        """Return all wires; those that routes have used so far have less bandwidth if they are slow."""
        wires = self._placement.wires()
        bytes_per_s = wires.bytes_per_s.copy()
        for wire in self._used_wires:
            bytes_per_s[wire] *= self._slow.bandwidth_share(self._placement, wire)
        return Wires(kind=wires.kind, latency_s=wires.latency_s, bytes_per_s=bytes_per_s)

    def first_in_stable_order(self, wires: Ints) -> int:
        """See `Placement.first_in_stable_order`."""
        return self._placement.first_in_stable_order(wires)

    def describe(self, wire: int) -> str:
        """See `Placement.describe`."""
        return self._placement.describe(wire)


CALM = Conditions()
"""A perfect cluster."""


ALL = "*"
"""Key of `Interference` for all computes or collectives that have no entry of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Slow-downs while computes and communication overlap, as factors of their times."""

    # Factor on the time of computes while their rank communicates, by their class: "flops", "memory", "seconds" (see
    # `ComputeClass`), or `ALL`.
    compute: Mapping[str, float] = field(default_factory=dict)
    # Factor on the time of collectives while any of their ranks computes, by the collective's name, "send" for
    # messages, or `ALL`.
    communication: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, factors in (("compute", self.compute), ("communication", self.communication)):
            for name, factor in factors.items():
                if not 1 <= factor < float("inf"):  # also for NaN
                    raise UsageError(f"interference: {role} {name!r} expected 1 or more, got {factor!r}")

    @property
    def off(self) -> bool:
        """Whether there is no interference: all factors are 1."""
        return all(factor == 1 for factor in (*self.compute.values(), *self.communication.values()))

    def of_compute(self, name: str) -> float:
        """Return the factor on the time of computes of the class `name`, 1 or more."""
        return self.compute.get(name, self.compute.get(ALL, 1.0))

    def of_communication(self, name: str) -> float:
        """Return the factor on the time of the collective `name`, 1 or more."""
        return self.communication.get(name, self.communication.get(ALL, 1.0))

    def __str__(self) -> str:
        if self.off:
            return "compute and communication do not slow each other down"
        parts = [f"compute ({name}) x{factor:g} while its rank communicates" for name, factor in self.compute.items()]
        parts += [f"{name} x{factor:g} while its ranks compute" for name, factor in self.communication.items()]
        return "; ".join(parts)


NO_INTERFERENCE = Interference()
"""No interference, the default."""
