"""How computes and communication slow each other down beyond what they share by name.

Compute and communication share DMA engines and memory bandwidth. The fabric knows only what communication takes of
them; so what overlap costs is stated, as one coefficient for each class, and is nothing unless it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import UsageError

ALL = "*"
"""The class that stands for all that are not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Slow-downs while overlapped: how many times as long something takes."""

    # for each class of computes ("flops" and "memory" for what limits them, "seconds" for those whose time is given, or
    # `ALL`), while its rank communicates.
    compute: Mapping[str, float] = field(default_factory=dict)
    # for each collective by name ("send" for messages, or `ALL`), while any of its ranks computes.
    communication: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, factors in (("compute", self.compute), ("communication", self.communication)):
            for name, factor in factors.items():
                if not 1 <= factor < float("inf"):  # also for NaN
                    raise UsageError(f"interference: {role} {name!r} expected 1 or more, got {factor!r}")

    @property
    def off(self) -> bool:
        """Whether nothing slows anything down."""
        return all(factor == 1 for factor in (*self.compute.values(), *self.communication.values()))

    def of_compute(self, name: str) -> float:
        """Return the factor of a class of computes."""
        return self.compute.get(name, self.compute.get(ALL, 1.0))

    def of_communication(self, name: str) -> float:
        """Return the factor of a collective."""
        return self.communication.get(name, self.communication.get(ALL, 1.0))

    def __str__(self) -> str:
        if self.off:
            return "compute and communication do not slow each other down"
        told = [f"compute ({name}) x{factor:g} while its rank communicates" for name, factor in self.compute.items()]
        told += [f"{name} x{factor:g} while its ranks compute" for name, factor in self.communication.items()]
        return "; ".join(told)


NO_INTERFERENCE = Interference()
"""The default."""
