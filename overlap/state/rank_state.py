"""The states of ranks: trees of arrays that they save together, each its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import trio

from ..diagnostics import calling, is_of_tasks
from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.stream import Stream
from .files import CODES, DamagedError, SavedFile
from .saves import STATES, Saves, file_names
from .store import Site, Store
from .trees import Tree, pack_tree, unpack_tree


class SavedState:
    """A complete state.

    Args:
        folder: Where it lies.
        own: Values of this rank.
        own_rank: Rank that had saved these; None: nobody has.

    Attributes:
        step: At which it was saved.
        world_size: How many ranks saved it.
    """

    step: int
    world_size: int

    def __init__(self, folder: Path, step: int, world_size: int, own: Tree, own_rank: int | None) -> None:
        self.step, self.world_size = step, world_size
        self._folder, self._own, self._own_rank = folder, own, own_rank

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
        """Return the tree that a rank saved, if this process sees the file.

        Raises:
            UsageError: If there was no such rank, or its file cannot be read here.
        """
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank: expected 0 to {self.world_size - 1}, a rank that saved the state, got {rank!r}")
        try:
            return await trio.to_thread.run_sync(read_tree, self._folder / file_names(self.world_size)[rank])
        except (OSError, DamagedError) as error:
            raise UsageError(
                f"state: the part of rank {rank} at step {self.step} cannot be read: {error}; "
                "copy its file to this host again"
            ) from None


class RankState:
    """The state store as one rank uses it: `rank.state`.

    Attributes:
        folder: Folder of the states; None if none is named.
        real: Whether anything is kept: in virtual time nothing is.
        writing: Checkpoints under way, by the ranks of their group: all of a group use one stream.
        open_store: Returns a store of saves in the same attempt; takes the first arguments of `Store`, and `keep`.

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
        self.folder: str | None = folder
        self.real: bool = real
        self.writing: dict[tuple[int, ...], Future[None]] = {}
        self._world, self._stream = world, stream
        self.open_store: Callable[..., Store] = partial(Store, real=real, note=note, drawn=set[int]())
        self._store = self.open_store(Saves(folder, STATES), world, stream, keep=2)
        self._last_step = -1

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
                follow, if the tree has something that cannot be kept, if the folder holds the state of another run
                and this one has not asked for `latest`, or if another job saves there.
            OSError: If it cannot be written.
        """
        if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
            raise UsageError(f"step: expected an integer of 0 or more, got {step!r}")
        if step <= self._last_step:
            raise UsageError(f"step: expected more than the last saved step ({self._last_step}), got {step}")
        if self.real and self.folder is None:
            raise UsageError(
                "state: there is no folder for it; give --state-dir DIR, or overlap.run(..., state_dir=DIR)"
            )
        arrays, form = pack_tree(tree, CODES) if self.real else ({}, None)
        await self._store.save(int(step), arrays, name="state.save", site=_users_site(), form=form)
        self._last_step = int(step)

    async def latest(self) -> SavedState | None:
        """Return the newest state that is complete, the same on all ranks; None if there is none.

        A collective: every rank calls it. Without a folder (`--state-dir`, `OVERLAP_STATE_DIR`, `state_dir=`) there is
        none.

        Raises:
            UsageError: If the folder holds states of an earlier version of this package alone.
        """
        site = _users_site()
        if not self.real:
            await self._world.barrier(stream=self._stream, name="state.latest", call_site=site)
        newest = await self._store.newest(name="state.latest", site=site, own=True)
        if newest is None:
            return None
        save, ranks, _ = newest
        self._last_step = save.step
        folder, own_rank, own = self._store.saves.path(save), None, None
        if ranks == self._world.size:
            own_rank = self._world.rank
            own = await trio.to_thread.run_sync(read_tree, folder / file_names(ranks)[own_rank])
        return SavedState(folder, save.step, ranks, own, own_rank)


def read_tree(path: Path) -> Tree:
    """Return the tree in a file; its arrays are new memory.

    Raises:
        OSError: It cannot be read.
        DamagedError: It is no file of a state, or its bytes are not those that were written.
    """
    file = SavedFile(path)
    file.check_digest()
    return unpack_tree(file.about.form, file.array)


def _users_site() -> Site | None:
    """Return the line of the program that has called the store; None if it was started as a task."""
    frame, _ = calling()
    return None if is_of_tasks(frame.f_code) else (frame.f_code, frame.f_lasti)
