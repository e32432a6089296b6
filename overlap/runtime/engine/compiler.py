"""From a call to the program of each rank: what the runtime does with the placeholder that a compiler left.

The algorithm is chosen by cost on the placed topology (or by name, where the program insists), its table is generated
and proved, and each rank's part cut out. Everything is kept for the next call of the same collective, group and size
class, so a training loop compiles in its first step only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ...collectives.call import Call, Pairs
from ...collectives.generators import GENERATORS, fits, generate
from ...collectives.kinds import Collective
from ...collectives.program import Program, project
from ...collectives.proof import verify
from ...collectives.schedule import IN_RANK_ORDER, Schedule
from ...collectives.slicing import in_slices
from ...collectives.uneven import uneven
from ...cost.select import plan, size_class
from ...errors import ScheduleError
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
            return _named("permute", MESSAGE_ALGORITHM, 2, 0, ((0, 1),))
        collective = "all_reduce" if call.kind is Collective.BARRIER else call.kind.value
        choose = partial(
            plan,
            collective,
            size_class(call.nbytes),
            self.cluster,
            members,
            dtype="uint8" if call.dtype is None else str(call.dtype),
            root=call.root,
            pairs=call.pairs if call.kind is Collective.PERMUTE else None,
            exact=call.exact,
            programs_only=True,  # who compiles has decided against the short cut
        )
        insisted = call.algorithm or self.algorithm
        if insisted not in GENERATORS[collective] or (call.exact and insisted not in IN_RANK_ORDER):
            return choose().schedule()
        try:
            chosen = choose(algorithm=insisted)
        except ScheduleError:
            # It does not fit these wires; in its plain form it may still take this number of ranks.
            if fits(insisted, len(members)):
                return _named(collective, insisted, len(members), call.root, call.pairs)
            chosen = choose()
        return chosen.schedule()


def _named(collective: str, algorithm: str, size: int, root: int, pairs: Pairs) -> Schedule:
    schedule = generate(collective, algorithm, size, root=root, pairs=pairs)
    verify(schedule)
    return schedule
