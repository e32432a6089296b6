"""How long to look whether others have come before sleeping. Pure."""

from __future__ import annotations

from transports.cores import Crowding

# Waking another process takes 15 us and more, and being woken as long: a process looks for a moment before it sleeps.
# Measured on 2 processes that share memory, 8 bytes: 5 us with 50 us of that, 33 without (without a framework around
# it).
_LOOK_S = 50e-6
# Whoever is waited for may need this very core, or be busy for long. After so many times in vain it is not tried any
# more, but for every so manieth time.
_TRIES, _PROBE = 3, 16
#: Where who looks lets others run, somebody else needs the core, or the interpreter, if that takes longer: time is
#: shared out in slices of 3 and 5 ms.
LONG_TURN_S = 1e-3
# Then it is not tried again for so many times: at 3 ms each, those take 50 us of each wait.
_GIVEN_UP = 64


class Patience:
    """Looks as long as that has helped lately.

    Args:
        look_s: How long, each time.
        crowding: Leaves cores that others need, too; None: they are waited for.
    """

    __slots__ = ("_crowding", "_failed", "_look_s", "_passed_over", "_probe")

    def __init__(self, look_s: float = _LOOK_S, crowding: Crowding | None = None) -> None:
        self._look_s, self._crowding = look_s, crowding
        self._failed = self._passed_over = 0
        self._probe = _PROBE

    def take(self) -> float:
        """Return for how many seconds to look now; `learn` or `give_up` follows unless that is 0."""
        if self._failed < _TRIES:
            return self._look_s
        self._passed_over = (self._passed_over + 1) % self._probe
        return 0.0 if self._passed_over else self._look_s

    def learn(self, *, came: bool) -> None:
        """Take note of whether the others came meanwhile."""
        self._failed, self._probe = (0 if came else self._failed + 1), _PROBE

    def moves(self, others_ran_s: float) -> bool:
        """Leave this core if others have just run on it for so long; True if that is worth looking on for."""
        return self._crowding is not None and self._crowding.leaves(others_ran_s)

    def give_up(self) -> None:
        """Take note that looking has kept this process from going on."""
        self._failed, self._passed_over, self._probe = _TRIES, 0, _GIVEN_UP
