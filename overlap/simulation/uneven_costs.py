"""What blocks of different sizes cost: the algorithm for equal ones, priced by what each of its transfers has to carry.

Pure; no Trio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from ..collectives.uneven import UnevenSchedule, slots_moved, uneven
from ..cost import Placed, Rounds, cost, rounds
from ..cost.option import Flat, Option

if TYPE_CHECKING:
    from ..collectives.call import Call

# Beyond so many ranks tables take seconds to go through: blocks are priced as equal ones of as many bytes.
_MOST_RANKS = 512
# Calls with other counts, as those of experts are in every step, that are remembered.
_REMEMBERED = 256

_Priced: TypeAlias = tuple[Option, float]


class UnevenCosts:
    """Prices the calls of one world whose blocks differ."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Option, int], UnevenSchedule] = {}
        self._known: dict[tuple[Call, tuple[int, ...]], _Priced] = {}

    def priced(
        self, even: Option, asked: Call, members: tuple[int, ...], placed: Callable[[Rounds], Placed]
    ) -> _Priced:
        """Return an option, and for how many bytes it is to be priced.

        Args:
            even: What the call would become if its blocks were equal.
            asked: The call.
            members: World ranks in group order.
            placed: Puts rounds on the machine.
        """
        if len(members) > _MOST_RANKS:
            return even, asked.nbytes
        found = self._known.get((asked, members))
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[asked, members] = self._computed(even, asked, placed)
        return found

    def _computed(self, even: Option, asked: Call, placed: Callable[[Rounds], Placed]) -> _Priced:
        # Slices that are pipelined through phases have no price as one table; for how much more there is to carry, the
        # table in one piece tells.
        phased = len(even.parts) > 1
        table = self._table(even, 1 if phased else even.price(asked.nbytes).slices)
        differing = placed(rounds(table, slots_moved(table, asked.counts)))
        if not phased:
            return Flat(even.algorithm, even.detail, differing, lambda: table), asked.nbytes
        equal, nbytes = placed(rounds(table)), asked.nbytes
        without_s, equal_s = cost(equal, 0).total_s, cost(equal, nbytes).total_s
        differing_s = cost(differing, nbytes).total_s
        return even, nbytes * (differing_s - without_s) / (equal_s - without_s) if equal_s > without_s else nbytes

    def _table(self, even: Option, slices: int) -> UnevenSchedule:
        found = self._tables.get((even, slices))
        if found is None:
            if len(self._tables) >= _REMEMBERED:
                self._tables.clear()
            found = self._tables[even, slices] = uneven(even.schedule(slices))
        return found
