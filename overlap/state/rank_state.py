"""The states of ranks: ranks save together, each rank a tree of arrays of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import trio

from ..diagnostics import find_caller, is_of_tasks
from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.stream import Stream
from .files import CODES, DamagedError, SavedFile
from .saves import STATES, Saves, file_names
from .store import Site, Store
from .trees import Tree, pack_tree, unpack_tree


class SavedState:
    """A complete state: the trees that all ranks have saved at a step.

    Args:
        folder: Folder of the save.
        step: Step at which it was saved.
        world_size: Number of ranks that saved it.
        own: The tree of this rank; None if the world had another size.
        own_rank: Rank that saved `own`; None if the world had another size.

    Attributes:
        step: Step at which it was saved.
        world_size: Number of ranks that saved it.
    """

    def __init__(self, folder: Path, step: int, world_size: int, own: Tree, own_rank: int | None) -> None:
        self.step = step
        self.world_size = world_size
        self._folder, self._own, self._own_rank = folder, own, own_rank

    def __repr__(self) -> str:
        return f"<SavedState of step {self.step}, {self.world_size} ranks>"

    @property
    def tree(self) -> Tree:
        """The tree that this rank saved.

        Raises:
            UsageError: The world had another size; then choose a tree with `part`.
        """
        if self._own_rank is None:
            raise UsageError(
                f"state: step {self.step} was saved by {self.world_size} ranks, and the world has another size now; "
                "choose a part: await state.part(rank)"
            )
        return self._own

    async def part(self, rank: int) -> Tree:
        """Return the tree that a given rank saved; its file must be readable by this process.

        Args:
            rank: Number of the rank in the world that saved the state.

        Raises:
            UsageError: There was no such rank, or its file cannot be read here.
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
    """The store of states as one rank uses it: `rank.state`.

    Args:
        world: The group of all ranks.
        stream: Stream of the collectives by which ranks agree.
        folder: Folder of the states; None: no folder is named, and nothing can be saved.
        real: Whether time is real; in virtual time nothing is saved.
        note: Function that is called with each step whose state is complete.

    Attributes:
        folder: Folder of the states; None if no folder is named.
        real: Whether states are saved: in virtual time they are not.
        writing: By the ranks of a group, the future of the last checkpoint that the group has begun and not yet waited
            for.
        open_store: `open_store(saves, group, stream, keep=keep)` returns a `Store` for further saves of this attempt.
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
        # `drawn` has the random numbers of this attempt's saves. All stores share one set.
        self.open_store: Callable[..., Store] = partial(Store, real=real, note=note, drawn=set[int]())
        self._store = self.open_store(Saves(folder, STATES), world, stream, keep=2)
        self._last_step = -1

    async def save(self, step: int, tree: Tree) -> None:
        """Save a tree of arrays. When `save` returns, the trees of all ranks are on the disk.

        This is a collective: every rank calls `save`, with the same step and a tree of its own. If a process is killed
        at any moment, the folder has the previous state or this state, never a mixture. The two newest states are kept.

        Args:
            step: Number of the step, greater than that of the last save.
            tree: Arrays, numbers, texts, None, and lists, tuples and dicts of these. The arrays must not change until
                `save` returns.

        Raises:
            UsageError: No folder is named (`--state-dir`, `OVERLAP_STATE_DIR`, `state_dir=`), the step is not greater
                than the last one, the tree has an item that cannot be saved, the folder has the state of another run
                and this run has not called `latest`, or another job saves in the folder.
            OSError: The state cannot be written.
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
        """Return the newest state that is complete, the same on all ranks; None if there is none, or no folder.

        This is a collective: every rank calls it.

        Raises:
            UsageError: All states are damaged, or of an earlier version of this package.
        """
        site = _users_site()
        if not self.real:  # in virtual time there is no state, but ranks wait for each other as in real time
            await self._world.barrier(stream=self._stream, name="state.latest", call_site=site)
        newest = await self._store.find_newest(name="state.latest", site=site, own=True)
        if newest is None:
            return None
        save, ranks, _ = newest
        self._last_step = save.step
        folder, own_rank, own_tree = self._store.saves.folder_of(save), None, None
        if ranks == self._world.size:
            own_rank = self._world.rank
            own_tree = await trio.to_thread.run_sync(read_tree, folder / file_names(ranks)[own_rank])
        return SavedState(folder, save.step, ranks, own_tree, own_rank)


def read_tree(path: Path) -> Tree:
    """Return the tree in a file of a state; its arrays are new memory.

    Raises:
        OSError: The file cannot be read.
        DamagedError: It is no file of a state, or its bytes are not those that were written.
    """
    file = SavedFile(path)
    file.check_digest()
    return unpack_tree(file.facts.form, file.read_array)


def _users_site() -> Site | None:
    """Return the line of the program that has called the store; None if Trio called it, as a task."""
    frame, _ = find_caller()
    return None if is_of_tasks(frame.f_code) else (frame.f_code, frame.f_lasti)
