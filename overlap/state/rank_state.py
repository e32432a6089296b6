"""The states of ranks: trees of arrays that they save together, each its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from ..collectives.reduce import Array
from ..diagnostics import calling, is_of_tasks
from ..errors import UsageError
from ..runtime.forms import dtype_of
from ..runtime.group import Group
from ..runtime.stream import Stream
from .files import CODES, DamagedError, SavedFile
from .saves import STATES, Saves, file_names
from .store import Site, Store, in_thread
from .trees import Tree, from_json_form, to_json_form


class SavedState:
    """A complete state.

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
        """Return the tree that a rank had saved, if its file is seen here.

        Raises:
            UsageError: If there was no such rank, or its file cannot be read here.
        """
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank: expected 0 to {self.world_size - 1}, a rank that saved the state, got {rank!r}")
        try:
            return await in_thread(partial(read_tree, self._folder / file_names(self.world_size)[rank]))
        except (OSError, DamagedError) as error:
            raise UsageError(
                f"state: the part of rank {rank} at step {self.step} cannot be read: {error}; "
                "copy its file to this host again"
            ) from None


class RankState:
    """The state store as one rank uses it: `rank.state`.

    Attributes:
        note_kept: Call it with a step that all ranks have kept in another way: a job that is stopped names it.
        folder: Folder of the states; None if none is named.
        real: Whether anything is kept: in virtual time nothing is.
        drawn: Random numbers of the saves of this rank's stores in this attempt.

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
        self.note_kept, self.folder, self.real = note, folder, real
        self._world, self._stream = world, stream
        self.drawn: set[int] = set()
        self._store = Store(Saves(folder, STATES), world, stream, keep=2, note=note, drawn=self.drawn)
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
            raise UsageError(f"step: expected 0 or more, got {step!r}")
        if step <= self._last_step:
            raise UsageError(f"step: expected more than the last saved step ({self._last_step}), got {step}")
        site = _users_site()
        if not self.real:
            return await self._world.barrier(stream=self._stream, name="state.save", call_site=site)
        if self.folder is None:
            raise UsageError(
                "state: there is no folder for it; give --state-dir DIR, or overlap.run(..., state_dir=DIR)"
            )
        arrays, form = pack_tree(tree)
        await self._store.save(int(step), arrays, name="state.save", site=site, form=form)
        self._last_step = int(step)
        return None

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
            return None
        newest = await self._store.newest(name="state.latest", site=site, own=True)
        if newest is None:
            return None
        save, ranks, _ = newest
        self._last_step = save.step
        folder, own_rank = self._store.saves.path(save), self._world.rank if ranks == self._world.size else None
        own = None if own_rank is None else await in_thread(partial(read_tree, folder / file_names(ranks)[own_rank]))
        return SavedState(folder, save.step, ranks, own, own_rank)


def pack_tree(tree: Tree) -> tuple[dict[str, Array], object]:
    """Return the arrays of a tree by name, and the form of the tree; arrays of types that files lack are bytes.

    Raises:
        UsageError: A value cannot be kept; names its place.
    """
    arrays: list[Array] = []
    form = to_json_form(tree, arrays)
    named = {str(index): _storable(array) for index, array in enumerate(arrays)}
    return named, {"tree": form, "dtypes": [_dtype_name(array.dtype) for array in arrays]}


def read_tree(path: Path) -> Tree:
    """Return the tree in a file; its arrays are new memory.

    Raises:
        OSError: It cannot be read.
        DamagedError: It is no file of a state, or its bytes are not those that were written.
    """
    file = SavedFile(path)
    file.check_digest()
    form, arrays = file.about.form, []
    for index, name in enumerate(form["dtypes"]):
        stored, dtype = file.array(str(index)), dtype_of(name)
        shape = stored.shape if stored.dtype == dtype else stored.shape[:-1]
        arrays.append(stored.view(dtype).reshape(shape))
    return from_json_form(form["tree"], arrays)


def _storable(array: Array) -> Array:
    """Return an array as files can have it: its elements are bytes, on a further axis, if they lack its dtype."""
    if array.dtype.isnative and array.dtype.name in CODES:
        return array
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def _dtype_name(dtype: np.dtype[np.generic]) -> str:
    """Return the name of a dtype in a header: numpy's short one, or that of a type of ml_dtypes."""
    return dtype.str if dtype.kind != "V" and np.dtype(dtype.str) == dtype else dtype.name


def _users_site() -> Site | None:
    """Return the line of the program that has called the store; None if it was started as a task."""
    frame, _ = calling()
    return None if is_of_tasks(frame.f_code) else (frame.f_code, frame.f_lasti)
