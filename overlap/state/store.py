"""State store: trees of arrays that the ranks of a world save together, and find again after a restart.

Kept between worlds: after a restart, `latest` gives every rank the same state, the newest that is complete. Ranks agree
on that by a collective, so they need not see each other's files: a folder on each machine will do as long as the same
machines come back, and one that all share lets others take their place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import trio

from ..collectives.reduce import Array
from ..diagnostics import calling, is_of_tasks
from ..errors import UsageError
from ..notice import notify
from ..runtime.group import Group
from ..runtime.memory.arrays import metadata
from ..runtime.stream import Stream
from .encoding import DamagedStateError, Tree, decode, encode
from .parts import Parts, Save

# Saves that a rank offers to the others, the newest first. Two are kept; the rest are unfinished ones of earlier
# attempts, at most one of each.
_OFFERED = 16

T = TypeVar("T")
Site: TypeAlias = tuple[CodeType, int]  # Code and instruction


class SavedState:
    """A complete state.

    Attributes:
        step: At which it was saved.
        world_size: How many ranks saved it.
    """

    step: int
    world_size: int

    def __init__(self, parts: Parts, save: Save, world_size: int, own: Tree, own_rank: int | None) -> None:
        self.step, self.world_size = save.step, world_size
        self._parts, self._save, self._own, self._own_rank = parts, save, own, own_rank

    def __repr__(self) -> str:
        return f"<SavedState of step {self.step}, {self.world_size} ranks>"

    @property
    def tree(self) -> Tree:
        """The tree that this rank saved.

        Raises:
            UsageError: If the world had another size: then the program must choose, with `part`.
        """
        if self._own_rank is None:
            raise UsageError(
                f"state: step {self.step} was saved by {self.world_size} ranks, and the world has another size now; "
                "choose a part: await state.part(rank)"
            )
        return self._own

    async def part(self, rank: int) -> Tree:
        """Return the tree that a rank had saved, if its file is seen here.

        Raises:
            UsageError: If there was no such rank, or its file cannot be read here.
        """
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank: expected 0 to {self.world_size - 1}, a rank that saved the state, got {rank!r}")
        try:
            return await in_thread(lambda: decode(self._parts.read(self._save, rank, self.world_size)))
        except (OSError, DamagedStateError) as error:
            raise UsageError(
                f"state: the part of rank {rank} at step {self.step} cannot be read: {error}; "
                "copy its file to this host again"
            ) from None


class RankState:
    """The state store as one rank uses it: `rank.state`.

    Attributes:
        note_kept: Call it with a step that all ranks have kept in another way: a job that is stopped names it.

    Args:
        world: The group of all ranks, as this rank has it.
        stream: Carries the collectives by which ranks agree.
        folder: Where the files are; None: none is named.
        real: Whether time is real; in virtual time nothing is kept.
        note: Takes each step whose state is complete.
    """

    def __init__(
        self,
        world: Group,
        stream: Stream,
        folder: str | None,
        *,
        real: bool,
        note: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.note_kept = note
        self._world, self._stream, self._real = world, stream, real
        self._parts = Parts(folder) if folder is not None else None
        self._nonce: int | None = None  # of this attempt, drawn by the first rank
        self._kept: list[Save] = []  # complete ones, the newest last
        self._looked = False

    @property
    def folder(self) -> str | None:
        """Folder of the states; None if none is named."""
        return None if self._parts is None else str(self._parts.folder)

    @property
    def real(self) -> bool:
        """Whether anything is kept: in virtual time nothing is."""
        return self._real

    async def save(self, step: int, tree: Tree) -> None:
        """Save a tree of arrays; when this returns, the trees of all ranks are on the disk.

        A collective: every rank calls it, with the same step and a tree of its own. Killed at any moment it leaves the
        state before it, or this one, never a mixture. The two newest are kept.

        Args:
            step: Number of the step, greater than that of the last save.
            tree: Arrays, numbers, texts, None, and lists, tuples and dicts of them. Its arrays belong to the store
                until this returns.

        Raises:
            UsageError: If no folder is named (`--state-dir`, `OVERLAP_STATE_DIR`, `state_dir=`), if the step does not
                follow, if the tree has something that cannot be kept, or if the folder holds the state of another run
                and this one has not asked for `latest`.
            OSError: If it cannot be written.
        """
        if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
            raise UsageError(f"step: expected 0 or more, got {step!r}")
        if self._kept and step <= self._kept[-1].step:
            raise UsageError(f"step: expected more than the last saved step ({self._kept[-1].step}), got {step}")
        call_site = _users_site()
        if not self._real:
            await self._wait_for_ranks(call_site)
            return
        parts = self._required_parts()
        if not self._looked:
            await self._check_unused(parts)
        save = Save(int(step), await self._draw_nonce_once(call_site))
        own_rank, ranks = self._world.rank, self._world.size
        try:
            await in_thread(lambda: parts.write(save, own_rank, ranks, encode(tree)))
        except OSError as error:
            failure = OSError(
                f"state of step {step} cannot be written: {error}; make room there, or name another --state-dir"
            )
            failure.errno = error.errno
            raise failure from None
        await self._wait_for_ranks(call_site)
        self._kept = [*self._kept[-1:], save]
        self.note_kept(save.step)
        await in_thread(lambda: parts.remove_before(self._kept))

    async def latest(self) -> SavedState | None:
        """Return the newest state that is complete, the same on all ranks; None if there is none.

        A collective: every rank calls it. Without a folder (`--state-dir`, `OVERLAP_STATE_DIR`, `state_dir=`) there is
        none.
        """
        self._looked, call_site = True, _users_site()
        if not self._real:
            await self._wait_for_ranks(call_site, name="state.latest")
            return None
        parts = self._parts
        offered = [] if parts is None else await in_thread(lambda: self._usable_saves(parts))
        for save, ranks in await self._common_saves(offered, call_site):
            assert parts is not None  # all ranks have offered it
            own_rank = self._world.rank if ranks == self._world.size else None
            own, trouble = await in_thread(lambda: _read_part(parts, save, own_rank, ranks))  # noqa: B023 (awaited at once)
            if await self._all_ranks_agree(not trouble, call_site):
                self._kept = [save]
                return SavedState(parts, save, ranks, own, own_rank)
            if trouble:
                notify(f"state: step {save.step} is passed over: the part of rank {own_rank} cannot be read: {trouble}")
        return None

    def _required_parts(self) -> Parts:
        """Return the files of the store; refuse a store without a folder."""
        if self._parts is None:
            raise UsageError(
                "state: there is no folder for it; give --state-dir DIR, or overlap.run(..., state_dir=DIR)"
            )
        return self._parts

    def _usable_saves(self, parts: Parts) -> list[tuple[Save, int]]:
        """Return the newest saves that this rank can go on from: its own part is here, or the parts of all ranks."""
        rank, size = self._world.rank, self._world.size
        usable = [
            (save, ranks)
            for save, found in parts.find_parts().items()
            for ranks, here in found.items()
            if (ranks == size and rank in here) or len(here) == ranks
        ]
        return sorted(usable, reverse=True)[:_OFFERED]

    # -- with the other ranks ------------------------------------------------------------------------------------------

    async def _common_saves(self, offered: list[tuple[Save, int]], call_site: Site | None) -> list[tuple[Save, int]]:
        """Return the saves that all ranks can go on from, the newest first, with their numbers of ranks."""
        table = np.full((1, _OFFERED, 3), -1, np.int64)
        for index, (save, ranks) in enumerate(offered):
            table[0, index] = (save.step, save.nonce, ranks)
        gathered = await self._world.all_gather(
            metadata(table), stream=self._stream, name="state.latest", call_site=call_site
        )
        common = set.intersection(*({tuple(row) for row in of_one if row[2] > 0} for of_one in gathered.tolist()))
        return sorted(((Save(step, nonce), ranks) for step, nonce, ranks in common), reverse=True)

    async def _draw_nonce_once(self, site: Site | None) -> int:
        """Return the random number of this attempt, which the first rank draws at the first save."""
        if self._nonce is None:
            self._nonce = await common_nonce(self._world, stream=self._stream, name="state.save begins", call_site=site)
        return self._nonce

    async def _check_unused(self, parts: Parts) -> None:
        """Refuse to save next to the state of another run, which would be removed or found in place of this one."""
        found = await in_thread(parts.complete_saves)
        if found and not self._kept:
            raise UsageError(
                f"state: {parts.folder} holds step {found[0][0].step} of another run; "
                "go on from it with rank.state.latest(), or name another folder"
            )
        self._looked = True

    async def _all_ranks_agree(self, agrees: bool, site: Site | None) -> bool:
        """Return whether `agrees` is true on all ranks."""
        return await all_agree(agrees, self._world, stream=self._stream, name="state.latest", call_site=site)

    async def _wait_for_ranks(self, site: Site | None, name: str = "state.save") -> None:
        """Wait until all ranks have arrived here."""
        await self._world.barrier(stream=self._stream, name=name, call_site=site)


def _users_site() -> Site | None:
    """Return the line of the program that has called the store; None if it was started as a task."""
    frame, _ = calling()
    return None if is_of_tasks(frame.f_code) else (frame.f_code, frame.f_lasti)


def _read_part(parts: Parts, save: Save, rank: int | None, ranks: int) -> tuple[Tree, str]:
    """Return a rank's part, and why it cannot be read, or ""; None and "" if `rank` is None."""
    if rank is None:
        return None, ""
    try:
        return decode(parts.read(save, rank, ranks)), ""
    except (OSError, DamagedStateError, ValueError) as error:
        return None, str(error)


async def all_agree(agrees: bool, group: Group, **options: Any) -> bool:
    """Return whether `agrees` is true on all ranks of a group, the same on each of them."""
    least: Array = await group.all_reduce(metadata([agrees], np.int8), op="min", **options)
    return bool(least[0])


async def common_nonce(group: Group, **options: Any) -> int:
    """Return a random number that the first rank draws, the same on all ranks of a group."""
    drawn = int.from_bytes(os.urandom(8), "big") >> 2  # fits into a signed number
    return int((await group.broadcast(metadata([drawn], np.int64), **options))[0])


async def in_thread(work: Callable[[], T]) -> T:
    """Run a function that waits for the disk in a thread."""
    return await trio.to_thread.run_sync(work)
