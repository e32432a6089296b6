"""How long to look whether others have come before sleeping. Pure."""

from __future__ import annotations

__all__ = ["Patience"]

# Waking another process takes 15 us and more, and being woken as long: a process looks for a moment before it sleeps.
# Measured on 2 processes that share memory, 8 bytes: 5 us with 50 us of that, 33 without (without a framework around
# it).
_LOOK_S = 50e-6
# Whoever is waited for may need this very core, or be busy for long. After so many times in vain it is not tried any
# more, but for every so manieth time.
_TRIES, _PROBE = 3, 16


class Patience:
    """Looks as long as that has helped lately.

    Args:
        look_s: How long, each time.
    """

    __slots__ = ("_failed", "_look_s", "_passed_over")

    def __init__(self, look_s: float = _LOOK_S) -> None:
        self._look_s = look_s
        self._failed = self._passed_over = 0

    def take(self) -> float:
        """Return for how many seconds to look now; `learn` follows unless that is 0."""
        if self._failed < _TRIES:
            return self._look_s
        self._passed_over = (self._passed_over + 1) % _PROBE
        return 0.0 if self._passed_over else self._look_s

    def learn(self, *, came: bool) -> None:
        """Take note of whether the others came meanwhile."""
        self._failed = 0 if came else self._failed + 1
