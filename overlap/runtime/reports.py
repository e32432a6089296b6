"""What can be said of what the ranks of this process are doing: where they stand, and who waits for whom."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from ..diagnostics import task_tree
from .backend import Backend
from .standing import Standing, find_stall, report_lines
from .world_member import Member

_TOLD = 16  # lines on who waits for whom, when the user has had enough


class OtherReports(Protocol):
    """What the other processes can say of their ranks."""

    async def standings(self, mine: Sequence[Standing]) -> list[Standing]:
        """Give the others a moment to say where theirs stood, and return those of all ranks that are known."""


class Reports:
    """What can be said of the ranks of this process.

    Args:
        members: The ranks.
        backend: Tells the time.
        others: The other processes.

    Attributes:
        stood: Where the ranks stood when the first of them was stopped; of all processes once they are gathered.
        caveat: A line that ends what is said of where they stood.
    """

    def __init__(self, members: Sequence[Member], backend: Backend, others: OtherReports | None) -> None:
        self.stood: list[Standing] = []
        self.caveat = ""
        self._members, self._backend, self._others = members, backend, others

    # -- where they stood when they were stopped -------------------------------------------------------------------

    def take_stock(self) -> None:
        """Note where the ranks stand, unless that was noted when the first of them was stopped."""
        self.stood = self.stood or self.standings()

    async def gather(self) -> None:
        """Give the other processes a moment to say where their ranks stood."""
        if self._others:
            self.stood = await self._others.standings(self.stood)

    def lines(self) -> list[str]:
        """Say of each rank what it waited for and on whom, one line each."""
        return self._told(self.stood)

    def sentence(self) -> str:
        """Say in one sentence whom the others waited for; nothing if they did not."""
        stall = find_stall({standing.rank: standing for standing in self.stood})
        return stall.sentence if stall is not None else ""

    async def note_on(self, interrupt: BaseException) -> None:
        """Note on an interrupt who was waiting for whom."""
        self.take_stock()
        await self.gather()
        stall, lines = find_stall({standing.rank: standing for standing in self.stood}), self.lines()
        # ranks that wait for each other at one moment may be about to go on: their bytes are on the way
        sentence = stall.sentence if stall is not None and not stall.hopeless else ""
        more = [f"and {len(lines) - _TOLD} lines more"] if len(lines) > _TOLD else []
        for line in [*([sentence] if sentence else []), *lines[:_TOLD], *more]:
            interrupt.add_note(f"  {line}")

    # -- now -------------------------------------------------------------------------------------------------------

    def standings(self, places: Mapping[int, str] = MappingProxyType({})) -> list[Standing]:
        """Say where each rank stands.

        Args:
            places: Where the programs of some were that are being unwound.
        """
        now_ns = self._backend.now_ns()
        return [member.standing(now_ns, places.get(member.context.rank)) for member in self._members]

    def lines_now(self) -> list[str]:
        """Say of each rank what it waits for and on whom, one line each."""
        return self._told(self.standings())

    def _told(self, standings: Sequence[Standing]) -> list[str]:
        return [*report_lines(standings), *([self.caveat] if self.caveat else [])]

    def doing(self, rank: int) -> list[str]:
        """Say what a rank had not finished when it was abandoned."""
        mine = [member.context.outstanding for member in self._members if member.context.rank == rank]
        return [line for outstanding in mine for line in outstanding.doing or outstanding.lines()]

    def waiting_for(self, ranks: Container[int]) -> str:
        """Say in which operation ranks wait for some that are lost; nothing if they do not."""
        for context in (member.context for member in self._members):
            if what := context.outstanding.waiting_for(ranks):
                step = "" if context.step is None else f" in step {context.step}"
                return f"rank {context.rank} waited for it in {what}{step}"
        return ""

    def steps(self) -> str:
        """Say in which step the ranks are, such as " in step 3"; nothing if they are in none."""
        steps = sorted({member.context.step for member in self._members if member.context.step is not None})
        if not steps:
            return ""
        return f" in step {steps[0]}" if len(steps) == 1 else f" in steps {steps[0]}-{steps[-1]}"

    def kept(self) -> str:
        """Say which state of the ranks is on the disk, such as "; step 40 is saved"; nothing if none is."""
        steps = [member.context.kept_step for member in self._members if member.context.kept_step is not None]
        return f"; step {max(steps)} is saved" if steps else ""

    def tasks(self) -> list[str]:
        """Name the tasks of each rank, with the file and line of the program where they are."""
        lines: list[str] = []
        for context in (member.context for member in self._members):
            if context.nursery is not None:
                task, name = context.nursery.parent_task, f"rank {context.rank}"
                lines += task_tree(task, context.thread, name=name, indent="  ")
        return lines
