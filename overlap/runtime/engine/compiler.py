"""From a call to the program of each rank: what the runtime does with the placeholder that a compiler left.

The algorithm is chosen by cost on the placed topology (or by name, where the program insists), its table is generated
and proved, and each rank's part cut out. Everything is kept for the next call of the same collective, group and size
class, so a training loop compiles in its first step only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from ...collectives.call import Call, Pairs
from ...collectives.generators import generate
from ...collectives.kinds import Collective
from ...collectives.program import Program, project
from ...collectives.proof import verify
from ...collectives.schedule import Schedule
from ...collectives.slicing import in_slices
from ...collectives.uneven import uneven
from ...cost.choice import Choices
from ...cost.select import size_class
from .compiled import Compiled

if TYPE_CHECKING:
    from topology import Cluster

MESSAGE_ALGORITHM = "mesh"
"""What a message between two ranks goes by in timelines, and is where it needs a program."""

# Calls whose programs are found at one look-up: those of a training loop are the same in every step.
_REMEMBERED = 1 << 14

_Key: TypeAlias = tuple[str, int, str, int, Pairs, tuple[int, ...], bool, bool, str | None]


class Compiler:
    """Compiles the collectives of one world.

    Attributes:
        cluster: Where the ranks are placed.
        algorithm: Name of the algorithm to use wherever it exists, unless a call names another; None leaves the choice
            to the cost.
        far: Whether some ranks live on different hosts; then long messages travel in slices.
    """

    def __init__(
        self, cluster: Cluster, algorithm: str | None, *, far: Callable[[Sequence[int]], bool] = lambda _: False
    ) -> None:
        self.cluster, self.algorithm, self.far = cluster, algorithm, far
        # The engine compiles where it has decided against the short cut.
        self._choices = Choices(cluster, algorithm, programs_only=True)
        self._known: dict[tuple[Call, tuple[int, ...], int], Compiled] = {}
        self._schedules: dict[_Key, Schedule] = {}
        self._programs: dict[tuple[_Key, int], Program] = {}

    def compile(self, call: Call, members: tuple[int, ...], position: int) -> Compiled:
        """Return the proved schedule of a call and the program of the rank at `position` of the group `members`."""
        if call.counts:  # seldom the same twice, and not what the program depends on
            return self._compiled(call, members, position)
        found = self._known.get((call, members, position))
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[call, members, position] = self._compiled(call, members, position)
        return found

    def _compiled(self, call: Call, members: tuple[int, ...], position: int) -> Compiled:
        key = (
            call.kind.value,
            size_class(call.nbytes),
            str(call.dtype),
            call.root,
            call.pairs,
            members,
            bool(call.counts),
            call.exact,
            call.algorithm,
        )
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self._schedules[key] = self._for_blocks_of(call, self._schedule(call, members), members)
        program = self._programs.get((key, position))
        if program is None:
            program = self._programs[key, position] = project(schedule, position)
        return Compiled(schedule, program, members)

    def _for_blocks_of(self, call: Call, schedule: Schedule, members: tuple[int, ...]) -> Schedule:
        """Return the table that carries the blocks of a call, which may differ in size, or be worth slicing."""
        if not call.counts:
            return in_slices(schedule, size_class(call.nbytes)) if self.far(members) else schedule
        found = uneven(schedule)
        verify(found)
        return found

    def _schedule(self, call: Call, members: tuple[int, ...]) -> Schedule:
        if call.kind is Collective.P2P:  # one message; which groups are legal does not concern it
            return _message()
        return self._choices.plan(call, members).schedule()


@cache
def _message() -> Schedule:
    schedule = generate("permute", MESSAGE_ALGORITHM, 2, pairs=((0, 1),))
    verify(schedule)
    return schedule
