"""Which algorithm a collective uses when it travels as a program."""

from __future__ import annotations

from ..errors import UsageError
from .generators import GENERATORS

__all__ = ["DIRECT", "algorithms", "choose"]

DIRECT = "direct"

# Below this a step's latency costs more than its bytes: one exchange of everything beats p - 1 small ones.
# MPICH switches all-reduce at the same size (pmodels/mpich: MPIR_CVAR_ALLREDUCE_SHORT_MSG_SIZE = 2048).
SHORT_BYTES = 2048


def algorithms() -> list[str]:
    """Return the names that `algorithm=` takes."""
    return [DIRECT, *sorted({name for by_name in GENERATORS.values() for name in by_name})]


def choose(collective: str, size: int, nbytes: int, *, preferred: str | None = None) -> str:
    """Return the name of the algorithm for one collective.

    Args:
        collective: Name of the collective.
        size: Ranks in the group.
        nbytes: Of one rank's input.
        preferred: Taken wherever it exists for this collective.

    Raises:
        UsageError: If no collective knows `preferred`.
    """
    known = GENERATORS[collective]
    if preferred is not None and preferred not in algorithms():
        raise UsageError(f"algorithm: {preferred!r} is unknown; known are {', '.join(algorithms())}")
    if preferred in known:
        return preferred
    if collective == "all_reduce" and nbytes <= SHORT_BYTES:
        return "recursive_doubling"
    return "ring" if "ring" in known and nbytes > SHORT_BYTES else "mesh"
